package agent

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

// runKillMarked kills every process whose environment contains the given NAME=VALUE
// or that belongs to the given session, until a look finds none. An adapter that
// starts commands from outside the sandbox cancels them so: what a command started
// may have left its process tree, but carries the mark along.
func runKillMarked(args []string) int {
	if len(args) != 2 || !strings.Contains(args[0], "=") {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: kill-marked needs NAME=VALUE and a session")
		return 2
	}
	mark := args[0]
	session, err := strconv.Atoi(args[1])
	if err != nil || session < 2 {
		fmt.Fprintf(os.Stderr, "sandboxer-agent: %q is not a session\n", args[1])
		return 2
	}
	const rounds = 1000 // a fork bomb that outruns us is the process limit's job
	for range rounds {
		if killRound(mark, session) == 0 {
			return 0
		}
	}
	fmt.Fprintln(os.Stderr, "sandboxer-agent: marked processes multiply faster than they can be killed")
	return 1
}

// killRound looks once and returns how many processes it killed.
func killRound(mark string, session int) int {
	killed, buf := 0, make([]byte, procs.Room)
	for _, pid := range procs.All() {
		if pid == 1 || pid == os.Getpid() {
			continue
		}
		st := procs.Stat(pid) // state, parent, group, session
		if len(st) < 4 || st[0] == "Z" || st[0] == "X" {
			continue
		}
		if st[3] != strconv.Itoa(session) && !procs.Has(procs.Environ(pid, buf), mark) {
			continue
		}
		if unix.Kill(pid, unix.SIGKILL) == nil {
			killed++
		}
	}
	return killed
}
