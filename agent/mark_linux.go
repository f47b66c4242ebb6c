package agent

import (
	"cmp"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

// runKillMarked kills everything that cancelled commands started which an adapter began
// from outside the sandbox. Each command has three arguments: NAME=VALUE in the
// environment of its processes, its session, and in hexadecimal its tag, above all
// capabilities in the bounding set (0: none). It kills every process with one of these,
// and the descendants of such a process or of the session's leader, until a look finds
// none: a process may have left the tree and the session and dropped its environment, but
// keeps the tag.
func runKillMarked(args []string) int {
	if len(args) == 2 {
		args = append(args, "0")
	}
	if len(args) == 0 || len(args)%3 != 0 {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: kill-marked needs NAME=VALUE, a session and perhaps a tag, for each command")
		return 2
	}
	marks, sessions, tags := map[string]bool{}, map[int]bool{}, map[uint64]bool{}
	for ; len(args) > 0; args = args[3:] {
		if !strings.Contains(args[0], "=") {
			fmt.Fprintf(os.Stderr, "sandboxer-agent: %q is not NAME=VALUE\n", args[0])
			return 2
		}
		session, err := strconv.Atoi(args[1])
		if err != nil || session < 2 {
			fmt.Fprintf(os.Stderr, "sandboxer-agent: %q is not a session\n", args[1])
			return 2
		}
		tag, err := strconv.ParseUint(args[2], 16, 64)
		if err != nil {
			fmt.Fprintf(os.Stderr, "sandboxer-agent: %q is not a tag\n", args[2])
			return 2
		}
		marks[args[0]], sessions[session] = true, true
		if tag != 0 {
			tags[tag] = true
		}
	}
	buf := make([]byte, procs.Room)
	marked := func(s procStat) (bool, error) {
		if sessions[s.session] || sessions[s.pid] {
			return true, nil
		}
		if len(tags) > 0 {
			if tag, err := boundTag(s.pid); err != nil || tags[tag] {
				return err == nil, err
			}
		}
		env, err := procs.Environ(s.pid, buf)
		return procs.HasAny(env, marks), err
	}
	const rounds = 1000 // a fork bomb that is faster is left to the process limit
	for range rounds {
		n, err := killFamily(marked)
		if err != nil {
			fmt.Fprintf(os.Stderr, "sandboxer-agent: the processes cannot be listed: %v\n", err)
			return 1
		}
		if n == 0 {
			return 0
		}
	}
	fmt.Fprintln(os.Stderr, "sandboxer-agent: marked processes multiply faster than they can be killed")
	return 1
}

// TagShift is the first bit of a tag in a bounding set: above all capabilities of Linux.
const TagShift = 41

// boundTag returns the tag in the bounding set of a process, which the process cannot
// drop.
func boundTag(pid int) (uint64, error) {
	data, err := procs.Read(pid, "status")
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(data), "\nCapBnd:")
	line, _, _ := strings.Cut(rest, "\n")
	caps, err := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	if err != nil {
		return 0, nil
	}
	return caps >> TagShift, nil
}

// killFamily kills the marked processes and all their descendants, and returns how many.
// It stops them first: children of a dead process can no longer be recognised, and a
// stopped process makes none. On an error it has killed those that it found.
func killFamily(marked func(procStat) (bool, error)) (killed int, err error) {
	self := os.Getpid()
	family := map[int]bool{}
	for range 100 {
		stats, rerr := readProcesses()
		grown := false
		err = rerr
		for changed := true; changed; {
			changed = false
			for _, s := range stats {
				if family[s.pid] || s.dead || s.pid == 1 || s.pid == self {
					continue
				}
				if !family[s.parent] {
					is, merr := marked(s)
					if err = cmp.Or(err, merr); !is {
						continue
					}
				}
				_ = unix.Kill(s.pid, unix.SIGSTOP)
				family[s.pid], changed, grown = true, true, true
			}
		}
		if !grown {
			break
		}
	}
	for pid := range family {
		if unix.Kill(pid, unix.SIGKILL) == nil {
			killed++
		}
	}
	return killed, err
}
