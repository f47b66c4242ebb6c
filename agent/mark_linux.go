package agent

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
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
	mark := []byte(args[0])
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
func killRound(mark []byte, session int) int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	killed := 0
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == 1 || pid == os.Getpid() {
			continue
		}
		state, sid := stateAndSession(pid)
		if state == "Z" || state == "X" || state == "" {
			continue
		}
		if sid != session {
			env, err := os.ReadFile("/proc/" + e.Name() + "/environ")
			if err != nil || !hasEntry(env, mark) {
				continue
			}
		}
		if unix.Kill(pid, unix.SIGKILL) == nil {
			killed++
		}
	}
	return killed
}

func hasEntry(env, want []byte) bool {
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if bytes.Equal(kv, want) {
			return true
		}
	}
	return false
}

func stateAndSession(pid int) (state string, session int) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", 0
	}
	f := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(f) < 4 {
		return "", 0
	}
	session, _ = strconv.Atoi(f[3])
	return f[0], session
}
