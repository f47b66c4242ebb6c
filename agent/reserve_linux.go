package agent

import (
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// A sandbox's limit of processes must not end the agent, which needs threads while what
// it serves has used all there are: its end is the sandbox's. So it keeps the
// capability to exceed the limit, which capabilities(7) calls CAP_SYS_RESOURCE, and
// nothing that it starts has it or can get it.

// reserve takes the capability out of the bounding set of this process, so that no
// program that is started has it, and has forkExec start them without.
func (t *table) reserve() error {
	if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_RESOURCE, 0, 0, 0); err != nil || has == 0 {
		return err
	}
	// A set belongs to a thread; ours are made by one another.
	if _, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, unix.PR_CAPBSET_DROP, unix.CAP_SYS_RESOURCE, 0); errno != 0 {
		return fmt.Errorf("CAP_SYS_RESOURCE cannot be taken out of the bounding set: %w", errno)
	}
	t.limited = true
	return nil
}

// forkExec starts a program. If the capability is reserved, the thread that does so lays
// it down meanwhile: the limit of processes is checked in its name.
func (t *table) forkExec(file string, args []string, attr *syscall.ProcAttr) (pid int, err error) {
	if !t.limited {
		return syscall.ForkExec(file, args, attr)
	}
	// While it is locked, the runtime makes no thread from this one.
	runtime.LockOSThread()
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		runtime.UnlockOSThread()
		return 0, err
	}
	less := caps
	less[unix.CAP_SYS_RESOURCE/32].Effective &^= 1 << (unix.CAP_SYS_RESOURCE % 32)
	if err := unix.Capset(&hdr, &less[0]); err != nil {
		runtime.UnlockOSThread()
		return 0, err
	}
	pid, err = syscall.ForkExec(file, args, attr)
	if unix.Capset(&hdr, &caps[0]) == nil {
		runtime.UnlockOSThread() // otherwise the thread ends with its goroutine
	}
	return pid, err
}
