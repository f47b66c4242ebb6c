package vmpacker

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// dialBelow connects to a socket in dir; its path may be longer than a socket's
// address.
func dialBelow(ctx context.Context, dir, name string) (net.Conn, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return new(net.Dialer).DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name))
}

// endAll kills the processes that find lists, until it lists none, and fails if it cannot check them. A number may have
// been reused: endAll checks the process again once it is pinned.
func endAll(ctx context.Context, find func() ([]int, error)) error {
	for {
		pids, err := find()
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				continue // it ended, or the next look shows the error
			}
			if now, err := find(); err == nil && slices.Contains(now, pid) {
				_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			}
			unix.Close(fd)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// used returns processor time and memory of a process.
func used(pid int) (cpu time.Duration, memory int64, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	f := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(f) < 22 {
		return 0, 0, fmt.Errorf("process %d has no figures", pid)
	}
	user, _ := strconv.ParseInt(string(f[11]), 10, 64)
	system, _ := strconv.ParseInt(string(f[12]), 10, 64)
	pages, _ := strconv.ParseInt(string(f[21]), 10, 64)
	return time.Duration(user+system) * (time.Second / 100), pages * int64(os.Getpagesize()), nil
}

// apart starts a process in a session of its own.
func apart() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

// mortal starts a process that gets a signal to end when its parent thread ends.
func mortal() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGTERM}
}

const managedWorks = true
