package agent

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

// runKillMarked kills every process whose environment contains the given NAME=VALUE,
// that belongs to the given session, that descends from its leader or from another such,
// or whose bounding set of capabilities has the given tag above those that there are,
// until a look finds none. An adapter that starts commands from outside the sandbox
// cancels them so: what a command started may have left its process tree and its session
// and dropped its environment, but takes the tag along.
func runKillMarked(args []string) int {
	if len(args) < 2 || len(args) > 3 || !strings.Contains(args[0], "=") {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: kill-marked needs NAME=VALUE, a session and perhaps a tag")
		return 2
	}
	mark := args[0]
	session, err := strconv.Atoi(args[1])
	if err != nil || session < 2 {
		fmt.Fprintf(os.Stderr, "sandboxer-agent: %q is not a session\n", args[1])
		return 2
	}
	tag := uint64(0)
	if len(args) == 3 {
		if tag, err = strconv.ParseUint(args[2], 16, 64); err != nil {
			fmt.Fprintf(os.Stderr, "sandboxer-agent: %q is not a tag\n", args[2])
			return 2
		}
	}
	buf := make([]byte, procs.Room)
	marked := func(s procStat) bool {
		return s.session == session || s.pid == session || tag != 0 && boundTag(s.pid) == tag || procs.Has(procs.Environ(s.pid, buf), mark)
	}
	const rounds = 1000 // a fork bomb that outruns us is the process limit's job
	for range rounds {
		if killFamily(marked) == 0 {
			return 0
		}
	}
	fmt.Fprintln(os.Stderr, "sandboxer-agent: marked processes multiply faster than they can be killed")
	return 1
}

// TagShift is where a tag begins in a bounding set: above all capabilities of Linux.
const TagShift = 41

// boundTag is the tag in the bounding set of a process, which it cannot drop.
func boundTag(pid int) uint64 {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(data), "\nCapBnd:")
	line, _, _ := strings.Cut(rest, "\n")
	caps, err := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	if err != nil {
		return 0
	}
	return caps >> TagShift
}

// killFamily kills the processes that are marked and all that descend from them, and
// returns how many. They are stopped first: who dies leaves children that nobody can tell
// any more, and who is stopped has none.
func killFamily(marked func(procStat) bool) int {
	self := os.Getpid()
	family := map[int]bool{}
	for range 100 {
		stats, grown := readProcesses(), false
		for changed := true; changed; {
			changed = false
			for _, s := range stats {
				if family[s.pid] || s.dead || s.pid == 1 || s.pid == self || !family[s.parent] && !marked(s) {
					continue
				}
				_ = unix.Kill(s.pid, unix.SIGSTOP)
				family[s.pid], changed, grown = true, true, true
			}
		}
		if !grown {
			break
		}
	}
	killed := 0
	for pid := range family {
		if unix.Kill(pid, unix.SIGKILL) == nil {
			killed++
		}
	}
	return killed
}
