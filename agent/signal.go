package agent

import (
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/sand-boxer/sandboxer"
)

// signals are those of Linux by number: the name without SIG, and the wire's text about a
// process that one of them ended.
var signals = [...]struct{ name, text string }{
	1:  {"HUP", "hangup"},
	2:  {"INT", "interrupt"},
	3:  {"QUIT", "quit"},
	4:  {"ILL", "illegal instruction"},
	5:  {"TRAP", "trace/breakpoint trap"},
	6:  {"ABRT", "aborted"},
	7:  {"BUS", "bus error"},
	8:  {"FPE", "floating point exception"},
	9:  {"KILL", "killed"},
	10: {"USR1", "user defined signal 1"},
	11: {"SEGV", "segmentation fault"},
	12: {"USR2", "user defined signal 2"},
	13: {"PIPE", "broken pipe"},
	14: {"ALRM", "alarm clock"},
	15: {"TERM", "terminated"},
	16: {"STKFLT", "stack fault"},
	17: {"CHLD", "child exited"},
	18: {"CONT", "continued"},
	19: {"STOP", "stopped (signal)"},
	20: {"TSTP", "stopped"},
	21: {"TTIN", "stopped (tty input)"},
	22: {"TTOU", "stopped (tty output)"},
	23: {"URG", "urgent I/O condition"},
	24: {"XCPU", "CPU time limit exceeded"},
	25: {"XFSZ", "file size limit exceeded"},
	26: {"VTALRM", "virtual timer expired"},
	27: {"PROF", "profiling timer expired"},
	28: {"WINCH", "window changed"},
	29: {"IO", "I/O possible"},
	30: {"PWR", "power failure"},
	31: {"SYS", "bad system call"},
}

const signalStatus = "signal: "

// memoryStatus ends the text about a process that the memory limit ended, or whose child
// it ended.
const memoryStatus = " (out of memory)"

func signalText(n int) string {
	if n > 0 && n < len(signals) {
		return signals[n].text
	}
	return "signal " + strconv.Itoa(n)
}

// exitOf translates a process's end from the wire.
func exitOf(code int, exited bool, status string) sandboxer.Exit {
	status, memory := strings.CutSuffix(status, memoryStatus)
	x := exitWithin(code, exited, status)
	x.OOMKilled = memory && x.Code == 137
	return x
}

func exitWithin(code int, exited bool, status string) sandboxer.Exit {
	text, ok := strings.CutPrefix(status, signalStatus)
	if exited || !ok {
		if code < 0 {
			code = 255
		}
		return sandboxer.Exit{Code: code}
	}
	text, _, _ = strings.Cut(text, " (core dumped)")
	for n, s := range signals {
		if s.text == text && n > 0 {
			return sandboxer.Exit{Code: 128 + n, Signal: s.name}
		}
	}
	if n, err := strconv.Atoi(strings.TrimPrefix(text, "signal ")); err == nil && n >= 32 {
		return sandboxer.Exit{Code: 128 + n, Signal: "RTMIN+" + strconv.Itoa(n-34)}
	}
	return sandboxer.Exit{Code: 255}
}

// signalNumber is the number of sig on Linux, which may differ from that of this
// client's system; 0 means unknown there.
func signalNumber(sig os.Signal) int {
	s, ok := sig.(syscall.Signal)
	if !ok {
		return 0
	}
	return linuxSignal(s)
}
