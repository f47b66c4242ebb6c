//go:build linux

package runner

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// umask is that of package subprocess. A file server sets its own.
const umask = 0o022

// keepNamed is the first thing that a child of gVisor's does: it closes each descriptor that is neither one of its streams nor
// in its arguments, and a file server wipes its environment. gVisor's library opens control sockets and more without
// close-on-exec in the server, where many sandboxes are made at once; a child would hold files of other children, and its own a
// second time, at numbers that it needs. The environment is the server's, with secrets.
func keepNamed(args []string) {
	named := map[int]bool{0: true, 1: true, 2: true}
	for _, a := range args {
		name, value, _ := strings.Cut(a, "=")
		if !strings.HasSuffix(name, "-fd") && !strings.HasSuffix(name, "-fds") {
			continue
		}
		for _, n := range strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ':' }) {
			if fd, err := strconv.Atoi(n); err == nil {
				named[fd] = true
			}
		}
	}
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || named[fd] {
			continue
		}
		// An execve closes descriptors that this program opened itself; it does not close inherited ones.
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
	if slices.Contains(args, "gofer") && len(os.Environ()) > 0 { // gVisor gives the others none of the server's environment
		if err := wipeEnvironment(); err != nil {
			fmt.Fprintln(os.Stderr, "the environment cannot be wiped:", err)
			os.Exit(1)
		}
	}
	os.Clearenv()
	unix.Umask(umask)
}

var errHidden = errors.New("the kernel does not report its path")

// wipeEnvironment overwrites the environment that the kernel has put into this process, and shows in /proc. The runtime
// has a copy.
func wipeEnvironment() error {
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return err
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const first, start, end = 3, 50, 51 // as proc(5) numbers them
	if len(f) <= end-first {
		return errHidden
	}
	from, err := strconv.ParseInt(f[start-first], 10, 64)
	to, eerr := strconv.ParseInt(f[end-first], 10, 64)
	if err = errors.Join(err, eerr); err != nil || from == 0 {
		return cmp.Or(err, errHidden)
	}
	mem, err := os.OpenFile("/proc/self/mem", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	_, err = mem.WriteAt(make([]byte, max(0, to-from)), from)
	return err
}
