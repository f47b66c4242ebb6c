package agent

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestOrphansAreReaped leaves children of children behind.
func TestOrphansAreReaped(t *testing.T) {
	a := startAgent(t)
	for i := range 20 {
		a.sh(fmt.Sprintf("(sh -c 'echo $$ > %s/o%d; exit 0' &) ; exit 0", a.dir, i))
	}
	for i := range 20 {
		pid := readPID(t, filepath.Join(a.dir, fmt.Sprintf("o%d", i)))
		eventually(t, fmt.Sprintf("process %d is a zombie", pid), func() bool {
			_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
			return err != nil
		})
	}
	all, err := readProcesses()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if p.parent == a.cmd.Process.Pid {
			t.Errorf("the agent has a child left: %+v", p)
		}
	}
}

func TestNothingIsLeftOpen(t *testing.T) {
	a := startAgent(t)
	count := func() int {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", a.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	round := func() {
		a.sh("echo x")
		_, _ = a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"true"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}})
		_, _ = a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("x")})
		_, _ = a.Exec(t.Context(), sandboxer.Cmd{Args: []string{badProgram(t)}, Stdin: strings.NewReader("x")})
	}
	round()
	eventually(t, "descriptors stay open", func() bool { return count() <= 30 })
	before := count()
	for range 30 {
		round()
	}
	eventually(t, "descriptors stay open", func() bool { return count() <= before+3 })
}

func badProgram(t *testing.T) string {
	f := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(f, []byte{0}, 0o755); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestSignalsAreNotIgnored starts the agent as nohup and non-interactive shells do.
func TestSignalsAreNotIgnored(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command("sh", "-c", `trap '' INT QUIT HUP PIPE TSTP USR1; exec "$0" init --listen unix:`+dir+`/s -- sh -c 'grep SigIgn /proc/self/status > `+dir+`/out.tmp; mv `+dir+`/out.tmp `+dir+`/out; exec sleep 1000'`, os.Args[0])
	cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=1", "GORACE=atexit_sleep_ms=0")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	out := ""
	eventually(t, "the main command does not run", func() bool {
		b, err := os.ReadFile(dir + "/out")
		out = string(b)
		return err == nil
	})
	// The classic 31 signals; those above belong to C libraries.
	ignored, err := strconv.ParseUint(strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(out), "SigIgn:")), 16, 64)
	if err != nil || ignored&(1<<31-1) != 0 {
		t.Errorf("ignored by a command: %s (%v)", out, err)
	}
	_ = cmd.Process.Signal(syscall.SIGHUP) // the agent ignores it
	_ = cmd.Process.Signal(syscall.SIGTERM)
	if err := cmd.Wait(); err != nil {
		t.Errorf("the agent ended with %v", err)
	}
}

func TestMainCommand(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	a := startAgent(t, "--", "sh", "-c", "echo $$ > "+mark+"; echo hello from main; exec sleep 1000")
	pid := readPID(t, mark)
	ps, err := a.Processes(t.Context())
	if err != nil || len(ps) != 1 || ps[0].Tag != MainTag || ps[0].PID != pid {
		t.Errorf("%+v, %v", ps, err)
	}
	w := &awaited{}
	done := make(chan sandboxer.Exit, 1)
	go func() {
		x, err := a.Attach(t.Context(), pid, sandboxer.ProcessStreams{Replay: true, Stdout: w})
		if err != nil {
			t.Error(err)
		}
		done <- x
	}()
	w.wait(t, "hello from main\n")
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if x := <-done; x.Signal != "KILL" {
		t.Errorf("%+v", x)
	}
	if err := a.Health(t.Context()); err != nil { // it is not started again, and has no successor
		t.Errorf("after the end of main: %v", err)
	}
}

func TestTermination(t *testing.T) {
	a := startAgent(t)
	polite := filepath.Join(a.dir, "polite")
	if err := os.Mkdir(polite, 0o755); err != nil {
		t.Fatal(err)
	}
	w := &awaited{}
	done := make(chan sandboxer.Exit, 1)
	go func() {
		x, err := a.Exec(t.Context(), sandboxer.Cmd{Stdout: w,
			Args: []string{"sh", "-c", "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.01; done"}})
		if err != nil {
			t.Errorf("Exec during termination: %v", err)
		}
		done <- x
	}()
	w.wait(t, "ready")
	if _, err := a.Start(t.Context(), sandboxer.ProcessSpec{Args: []string{"sh", "-c", "trap '' TERM HUP; " + family(polite)}}); err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, r := range relatives {
		pids = append(pids, readPID(t, filepath.Join(polite, r)))
	}
	began := time.Now()
	a.stop()
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	if x := <-done; x.Code != 3 || !strings.Contains(w.String(), "bye") {
		t.Errorf("the polite one: %+v, %q", x, w.String())
	}
	for i, pid := range pids {
		if alive(pid) {
			t.Errorf("%s (process %d) outlives the agent", relatives[i], pid)
		}
	}
	if a.Health(t.Context()) == nil {
		t.Error("still listens")
	}
}

func TestSecretsStayInside(t *testing.T) {
	a := startAgent(t)
	out, _, _ := a.sh("env; tr '\\0' '\\n' < /proc/$PPID/cmdline")
	if strings.Contains(out, testToken) || strings.Contains(out, EnvPrefix) {
		t.Errorf("a command sees\n%s", out)
	}
	if strings.Contains(a.stderr.String(), testToken) {
		t.Errorf("the log has\n%s", a.stderr)
	}
}

func TestCommandLine(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
		msg  string
	}{
		{nil, 2, "usage:"},
		{[]string{"nonsense"}, 2, `unknown command "nonsense"`},
		{[]string{"init", "--workdir", "x"}, 2, "not absolute"},
		{[]string{"init", "--user", "no-such-user", "--listen", "127.0.0.1:0"}, 2, "invalid username"},
		{[]string{"init", "--replay-kib", "0"}, 2, "4 to"},
		{[]string{"init", "--listen", "nonsense"}, 1, "cannot listen"},
		{[]string{"init", "--listen", "127.0.0.1:0", "--", "no-such-command"}, 1, "no-such-command: command not found"},
		{[]string{"untar"}, 2, "one directory"},
		{[]string{"untar", "/etc/passwd"}, 1, "not a directory"},
		{[]string{"tar", "/no/such"}, 1, "no such file"},
		{[]string{"kernel", "x"}, 2, "no arguments"},
		{[]string{"kernel"}, 0, ""},
		{[]string{"help"}, 0, ""},
	} {
		var errs bytes.Buffer
		cmd := exec.Command(os.Args[0], tt.args...)
		cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=1", "GORACE=atexit_sleep_ms=0")
		cmd.Stderr = &errs
		err := cmd.Run()
		if code := cmd.ProcessState.ExitCode(); code != tt.code || !strings.Contains(errs.String(), tt.msg) {
			t.Errorf("%q: %v, %s; want exit %d with %q", tt.args, err, errs.String(), tt.code, tt.msg)
		}
	}
	dir := filepath.Join(t.TempDir(), "out")
	cmd := exec.Command(os.Args[0], "untar", "--strip", dir)
	cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=1", "GORACE=atexit_sleep_ms=0")
	cmd.Stdin = archive(t, reg("top/f", "x"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd = exec.Command(os.Args[0], "tar", dir)
	cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=1", "GORACE=atexit_sleep_ms=0")
	out, err := cmd.Output()
	if err != nil || !bytes.HasPrefix(out, []byte("f\x00")) {
		t.Errorf("tar: %.20q, %v", out, err)
	}
}
