// Package procs finds running processes by what they were started with. That is how
// adapters know what belongs to a sandbox after it has left its process tree, and a
// process that is overlooked lives on.
//
// In the middle of an execve a process shows neither environment nor arguments: first
// because what was opened is the memory it is leaving, and then until its new memory is
// set up, which lasts as long as the program takes to be read. Such a process is looked at
// again, unless it belongs to another user, where that is not visible. It is of the kernel's own
// making, and so Linux's only; where there is no /proc nothing is found.
//
// If a process cannot be looked at, because this process has no descriptor left for it,
// that never means that it does not exist: it is an error.
package procs

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ExecVar is the variable by which a command that an adapter starts from outside of the sandbox,
// and all that the command started, are found when it is cancelled.
const ExecVar = "SANDBOXER_EXEC"

// Environ returns the environment that pid was started with, NAME=value and a NUL byte
// each; nothing for one that ended, belongs to the kernel or may not be looked at. buf is
// room for it: an environment that does not fit is read all the same, but may be that of two programs.
func Environ(pid int, buf []byte) ([]byte, error) { return started(pid, "environ", buf) }

// Args returns the arguments that pid was started with, as Environ does.
func Args(pid int, buf []byte) ([]byte, error) { return started(pid, "cmdline", buf) }

// Room is how much most environments need.
const Room = 128 << 10

// Has reports whether entry is one of those of list, which end with a NUL byte each.
func Has(list []byte, entry string) bool {
	return bytes.HasPrefix(list, []byte(entry+"\x00")) || bytes.Contains(list, []byte("\x00"+entry+"\x00"))
}

// HasAny reports whether one of entries is one of those of list, which end with a NUL byte
// each.
func HasAny(list []byte, entries map[string]bool) bool {
	for len(list) > 0 {
		entry, rest, whole := bytes.Cut(list, []byte{0})
		if whole && entries[string(entry)] {
			return true
		}
		list = rest
	}
	return false
}

// Limit returns the limit of pid that /proc/PID/limits calls by that name, such as "Max file
// locks". A limit that the kernel does not enforce any more can mark a process: it is kept
// when the process drops its environment and leaves its session. Both are 0 for a process that
// ended or may not be looked at, and each if there is none.
func Limit(pid int, name string) (soft, hard uint64, err error) {
	data, err := Read(pid, "limits")
	if err != nil {
		return 0, 0, err
	}
	_, rest, _ := bytes.Cut(data, []byte("\n"+name+" "))
	line, _, _ := bytes.Cut(rest, []byte{'\n'})
	if f := bytes.Fields(line); len(f) >= 2 {
		soft, _ = strconv.ParseUint(string(f[0]), 10, 64) // "unlimited" is none
		hard, _ = strconv.ParseUint(string(f[1]), 10, 64)
	}
	return soft, hard, nil
}

// WithEnv lists the processes that have entry, NAME=value, in their environment.
func WithEnv(entry string) ([]int, error) { return with("environ", entry) }

// WithArg lists the processes that have arg among their arguments.
func WithArg(arg string) ([]int, error) { return with("cmdline", arg) }

func with(what, entry string) (pids []int, err error) {
	buf := make([]byte, Room)
	all, err := All()
	if err != nil {
		return nil, err
	}
	for _, pid := range all {
		list, err := started(pid, what, buf)
		if err != nil {
			return nil, err
		}
		if Has(list, entry) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// All lists the processes that can be seen.
func All() (pids []int, err error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, unknown(err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

// unknown is nil if err says that there is nothing to see, or nothing that we may
// see, and else err.
func unknown(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// Of the fields of /proc/PID/stat, as [Stat] returns them.
const (
	vsize   = 23 - 3 // numbered as in proc(5)
	endCode = 27 - 3
	envEnd  = 51 - 3
)

// amid is how long a process is assumed to be in the middle of an execve.
const amid = time.Second

func started(pid int, what string, buf []byte) ([]byte, error) {
	was := "" // where its environment ended at the last look
	for begun, looks, settled := time.Duration(0), 1, 0; ; looks++ {
		// Before the look, so that nothing comes in between; and several, in case the machine
		// was paused.
		late := looks > 100 && monotonic()-begun > amid
		list, err := read(pid, what, buf, false)
		if err != nil || len(list) > 0 || settled > 1 || late {
			return list, unknown(err)
		}
		if looks == 1 {
			begun = monotonic()
		}
		if what != "environ" {
			if may, err := mayLook(pid); err != nil || !may {
				return nil, err // every user may read its arguments, and so there are none
			}
		}
		st, err := Stat(pid)
		switch {
		case err != nil:
			return nil, err
		case len(st) <= envEnd || st[vsize] == "0": // it ended, is a zombie or one of the kernel's
			return nil, nil
		case st[envEnd] == "0" && was == "" && !tells():
			return nil, nil
		case st[envEnd] == "0" || st[endCode] == "0":
			// Its new memory is being set up: where its environment ends is noted first as
			// where it begins, and where its code is at last.
			settled = 0
			_, _ = unix.Select(0, nil, nil, nil, &unix.Timeval{Usec: 50}) // not time.Sleep: see monotonic
		case st[envEnd] == was: // no execve came between this look and the one before
			settled++
		default:
			was, settled = st[envEnd], 0
		}
	}
}

// mayLook reports whether the kernel shows us where the environment of pid is: for another
// user's process it shows 0, as for one in the middle of an execve.
func mayLook(pid int) (bool, error) {
	fd, err := open(pid, "environ")
	if err != nil {
		return false, unknown(err)
	}
	_ = unix.Close(fd)
	return true, nil
}

// open and read are the kernel's calls alone: a look at all processes is thousands of
// files, and package os takes three times as long for each.
func open(pid int, name string) (fd int, err error) {
	for fd, err = -1, unix.EINTR; err == unix.EINTR; {
		fd, err = unix.Open("/proc/"+strconv.Itoa(pid)+"/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	return fd, err
}

// read returns a file below /proc/PID, in buf as far as there is room. The kernel returns
// what a process was started with in one piece; other files may need further reads.
func read(pid int, name string, buf []byte, more bool) ([]byte, error) {
	fd, err := open(pid, name)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	for have := 0; ; {
		if have == len(buf) {
			buf = append(buf, make([]byte, max(len(buf), 4<<10))...)
		}
		switch n, err := unix.Read(fd, buf[have:]); {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		default:
			have += n
			if n == 0 || have < len(buf) && !more {
				return buf[:have:have], nil
			}
		}
	}
}

// monotonic is the kernel's clock. The time package's clock may be a test's, which does not advance
// while a goroutine waits for a lock that is held here.
func monotonic() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return time.Duration(t.Nano())
}

// tells reports whether the kernel shows where environments are: gVisor does not, and a
// process there is never seen in the middle of an execve.
func tells() bool {
	st, err := Stat(os.Getpid())
	return err != nil || len(st) > envEnd && st[envEnd] != "0"
}

// Stat returns the fields of /proc/PID/stat from the third on, the state; none when pid
// ended.
func Stat(pid int) ([]string, error) {
	b, err := Read(pid, "stat")
	return strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])), err // the name before it may contain anything
}

// Read returns the file of a name below /proc/PID; nothing when pid ended, or it may not
// be read.
func Read(pid int, name string) ([]byte, error) {
	b, err := read(pid, name, make([]byte, 4<<10), true)
	return b, unknown(err)
}

// Ended reports whether pid is known to have ended, or only waits for its parent to notice
// that.
func Ended(pid int) bool {
	f, err := Stat(pid)
	if err != nil {
		return errors.Is(unix.Kill(pid, 0), unix.ESRCH) // takes no descriptor
	}
	return len(f) == 0 || f[0] == "Z" || f[0] == "X"
}
