package confine

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kept are the capabilities that a broker of root's needs, and what for. Without the
// first six no sandbox starts on this machine. Capabilities that this process did not have it does
// not get here.
var kept = []uintptr{
	unix.CAP_CHOWN,            // a sandbox's files belong to its own users
	unix.CAP_DAC_OVERRIDE,     // they are written and removed all the same
	unix.CAP_FOWNER,           // also where only an owner may
	unix.CAP_SETUID,           // a sandbox's root is an ordinary user of this machine
	unix.CAP_SETGID,           //
	unix.CAP_SYS_ADMIN,        // mounts, and the namespaces that sandboxes join
	unix.CAP_NET_ADMIN,        // the buffers of a sandbox's network link: a third of the speed without
	unix.CAP_NET_BIND_SERVICE, // --listen :443
	unix.CAP_KILL,             // ending what a build of an image left as another user,
	unix.CAP_SYS_PTRACE,       // and recognizing it
	unix.CAP_SYS_CHROOT,       // entering the mount namespace that an engine sees mounts in
	unix.CAP_SETFCAP,          // mounts whose owners are mapped to root of a container, which is this machine's
}

// Process gives up, for all threads of this process and for the programs that it will
// start, every capability that a broker does not need; with noNewPrivileges also those that
// set-user-ID programs and files with capabilities would give. Capabilities that are missing
// already, or that the kernel does not know, are no error. There is no way back. It fails
// in a program that is linked with C libraries, and has then changed nothing.
func Process(noNewPrivileges bool) error {
	if noNewPrivileges {
		// First, so that a process that cannot do this has not done half.
		if err := all("no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
			return err
		}
	}
	keep := uint64(0)
	for _, c := range kept {
		keep |= 1 << c
	}
	hdr := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(hdr, &data[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	// Only a process with this capability may lower the bounding set. Without it, that set
	// matters only when root executes a program.
	if data[0].Effective&(1<<unix.CAP_SETPCAP) != 0 {
		for c := uintptr(0); ; c++ {
			in, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
			if errors.Is(err, unix.EINVAL) {
				break // the kernel knows no more
			}
			if err != nil {
				return os.NewSyscallError("prctl", err)
			}
			if in == 0 || keep&(1<<c) != 0 {
				continue
			}
			if err := all(fmt.Sprintf("capability %d", c), unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c); err != nil {
				return err
			}
		}
	}
	for i := range data {
		data[i].Permitted &= uint32(keep >> (32 * i))
		data[i].Effective &= uint32(keep >> (32 * i))
		data[i].Inheritable = 0 // and so none is ambient
	}
	return setAll(hdr, &data)
}

func setAll(hdr *unix.CapUserHeader, data *[2]unix.CapUserData) error {
	_, _, err := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(hdr)), uintptr(unsafe.Pointer(data)), 0)
	return failed("capset", err)
}

func all(what string, trap, a1, a2 uintptr) error {
	_, _, err := syscall.AllThreadsSyscall6(trap, a1, a2, 0, 0, 0, 0)
	return failed(what, err)
}

func failed(what string, err syscall.Errno) error {
	if err == 0 {
		return nil
	}
	if err == syscall.ENOTSUP {
		return fmt.Errorf("%s: %w", what, ErrLinked)
	}
	return fmt.Errorf("%s: %w", what, err)
}
