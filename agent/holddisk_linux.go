package agent

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// runHoldDisk runs the agent with args such that a limit of the disk holds for all that comes of it, where that is a quota: of a
// project on XFS, or of a subvolume on Btrfs. The kernel lets whoever owns a file change which project it counts for, and anybody
// make subvolumes, which no limit is for. It also takes a capability away that nobody needs, so that what an engine starts in the
// container, which has it and is not held, cannot be traced by what is.
func runHoldDisk(args []string) int {
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: hold-disk needs a command of the agent's")
		return 2
	}
	self, err := os.Executable()
	if err != nil {
		return report(err)
	}
	runtime.LockOSThread() // which is the one that goes on
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_AUDIT_WRITE, 0, 0, 0); err != nil {
		return report(os.NewSyscallError("prctl(PR_CAPBSET_DROP)", err))
	}
	// Some engines have it inherited, too.
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return report(os.NewSyscallError("capget", err))
	}
	caps[unix.CAP_AUDIT_WRITE/32].Inheritable &^= 1 << (unix.CAP_AUDIT_WRITE % 32) // and with it the ambient one
	if err := unix.Capset(&hdr, &caps[0]); err != nil {
		return report(os.NewSyscallError("capset", err))
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return report(os.NewSyscallError("prctl(PR_SET_NO_NEW_PRIVS)", err))
	}
	program := diskFilter()
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&fprog)), 0, 0); err != nil {
		return report(os.NewSyscallError("prctl(PR_SET_SECCOMP)", err))
	}
	return report(os.NewSyscallError("execve", unix.Exec(self, append([]string{self}, args...), os.Environ())))
}

const (
	x32Bit         = 0x4000_0000 // of the numbers of amd64's third ABI
	sysFileSetattr = 469         // on every architecture

	ioctlFSSetXAttr = 0x5820 // type and number of FS_IOC_FSSETXATTR: the project of a file, and whether what is made in a directory has it
	ioctlSetFlags   = 0x6602 // of FS_IOC_SETFLAGS, which has the latter, too
	ioctlBtrfs      = 0x9400 // the type of Btrfs's, by which subvolumes are made and copied
)

// ioctlShared are the types and numbers of Btrfs's that are every file system's: copies of ranges, and the label.
var ioctlShared = []uint32{0x9409, 0x940d, 0x9436, 0x9431}

// diskFilter is a seccomp program that refuses what changes which quota counts a file, as a file system does that has none of it.
func diskFilter() []unix.SockFilter {
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		and   = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
		// Of struct seccomp_data, on a machine that is little endian.
		number, arch, request = 0, 4, 24
		refuse                = unix.SECCOMP_RET_ERRNO | uint32(unix.EOPNOTSUPP)
	)
	only := func(k uint32, then unix.SockFilter) []unix.SockFilter { // where the value is k
		return []unix.SockFilter{{Code: equal, Jf: 1, K: k}, then}
	}
	// What is asked of an open file.
	asked := []unix.SockFilter{{Code: load, K: request}, {Code: and, K: 0xffff}}
	for _, k := range []uint32{ioctlFSSetXAttr, ioctlSetFlags} {
		asked = append(asked, only(k, unix.SockFilter{Code: ret, K: refuse})...)
	}
	for _, k := range ioctlShared {
		asked = append(asked, only(k, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})...)
	}
	asked = append(asked, unix.SockFilter{Code: and, K: 0xff00})
	asked = append(asked, only(ioctlBtrfs, unix.SockFilter{Code: ret, K: refuse})...)
	asked = append(asked, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})

	p := []unix.SockFilter{{Code: load, K: arch}}
	for _, a := range []struct {
		arch, mask uint32
		ioctl      []uint32
	}{
		{unix.AUDIT_ARCH_X86_64, ^uint32(x32Bit), []uint32{16, 514}}, {unix.AUDIT_ARCH_I386, ^uint32(0), []uint32{54}},
		{unix.AUDIT_ARCH_AARCH64, ^uint32(0), []uint32{29}}, {unix.AUDIT_ARCH_ARM, ^uint32(0), []uint32{54}},
	} {
		of := []unix.SockFilter{{Code: load, K: number}, {Code: and, K: a.mask}}
		of = append(of, only(sysFileSetattr, unix.SockFilter{Code: ret, K: refuse})...)
		for _, nr := range a.ioctl {
			of = append(of, unix.SockFilter{Code: equal, Jf: uint8(len(asked)), K: nr})
			of = append(of, asked...)
		}
		of = append(of, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})
		p = append(p, unix.SockFilter{Code: equal, Jf: uint8(len(of)), K: a.arch})
		p = append(p, of...)
	}
	return append(p, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)}) // no architecture of the agent's
}
