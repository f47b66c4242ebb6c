package agent

import (
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// A sandbox's limit of processes must not end the agent, because that ends the sandbox:
// the agent needs threads even when its commands have used the whole limit. So it keeps
// the capability to exceed the limit, which capabilities(7) calls CAP_SYS_RESOURCE, and
// nothing that it starts has it or can get it.

// reserve drops the capability from the bounding set of this process, so that no started
// program has it, and makes forkExec start programs without it.
func (t *table) reserve() error {
	if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_RESOURCE, 0, 0, 0); err != nil || has == 0 {
		return err
	}
	// Capability sets are per thread; threads inherit them from each other.
	if _, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, unix.PR_CAPBSET_DROP, unix.CAP_SYS_RESOURCE, 0); errno != 0 {
		return fmt.Errorf("cannot remove CAP_SYS_RESOURCE from the bounding set: %w", errno)
	}
	t.limited = true
	return nil
}

// forkExec starts a program. If the capability is reserved, its thread drops it
// meanwhile: the kernel checks the limit of processes against that thread.
func (t *table) forkExec(file string, args []string, attr *syscall.ProcAttr) (pid int, err error) {
	if !t.limited {
		return syscall.ForkExec(file, args, attr)
	}
	// While the thread is locked, the runtime makes no other thread from it.
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
