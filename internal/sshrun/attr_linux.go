package sshrun

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

func masterAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGTERM}
}

// widen enlarges a pipe's buffer, for fewer switches between two processes. At the
// user's limit for that it leaves the pipe as it is.
func widen(f *os.File) {
	if rc, err := f.SyscallConn(); err == nil {
		rc.Control(func(fd uintptr) { unix.FcntlInt(fd, unix.F_SETPIPE_SZ, 256<<10) })
	}
}
