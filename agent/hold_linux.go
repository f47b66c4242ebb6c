package agent

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// markCapability is a capability that an engine gives a container although nothing in it needs it. hold drops it: what the engine starts there later has
// it, and is not held. The kernel lets no process trace one with more capabilities.
const markCapability = unix.CAP_BLOCK_SUSPEND

// runHold runs the agent with args and holds it with all that it starts: they can make sockets only of the families that belong to the network namespace,
// or lead nowhere but to this kernel itself; and they can trace nothing that the engine starts. With --disk they also cannot bypass a quota of a project
// on XFS, or of a subvolume on Btrfs: the kernel lets the owner of a file change its project, and any user make subvolumes without a limit.
func runHold(args []string) int {
	fs := flag.NewFlagSet("hold", flag.ContinueOnError)
	disk := fs.Bool("disk", false, "let no program inside bypass a quota of the disk")
	if code, ok := parse(fs, args); !ok {
		return code
	}
	args = fs.Args()
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: hold needs a command of sandboxer-agent")
		return 2
	}
	self, err := os.Executable()
	if err != nil {
		return report(err)
	}
	runtime.LockOSThread() // this thread is the one that calls execve
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, markCapability, 0, 0, 0); err != nil {
		return report(os.NewSyscallError("prctl(PR_CAPBSET_DROP)", err))
	}
	// Some engines also make it inheritable.
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return report(os.NewSyscallError("capget", err))
	}
	caps[markCapability/32].Inheritable &^= 1 << (markCapability % 32) // this also clears the ambient one
	if err := unix.Capset(&hdr, &caps[0]); err != nil {
		return report(os.NewSyscallError("capset", err))
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return report(os.NewSyscallError("prctl(PR_SET_NO_NEW_PRIVS)", err))
	}
	program := holdFilter(*disk)
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&fprog)), 0, 0); err != nil {
		return report(os.NewSyscallError("prctl(PR_SET_SECCOMP)", err))
	}
	return report(os.NewSyscallError("execve", unix.Exec(self, append([]string{self}, args...), os.Environ())))
}

const (
	x32Bit         = 0x4000_0000 // in numbers of amd64's x32 ABI
	sysFileSetattr = 469         // on every architecture
	sysIOURing     = 425         // io_uring_setup, which can make sockets that no filter sees

	ioctlFSSetXAttr = 0x5820 // type and number of FS_IOC_FSSETXATTR: the project of a file, and whether what is made in a directory has it
	ioctlSetFlags   = 0x6602 // of FS_IOC_SETFLAGS, which sets the latter, too
	ioctlBtrfs      = 0x9400 // the type of Btrfs's calls, which make and copy subvolumes
)

// ioctlShared are types and numbers of Btrfs that all file systems share: copies of ranges, and the label.
var ioctlShared = []uint32{0x9409, 0x940d, 0x9436, 0x9431}

// families are the socket families that are allowed. Others (AF_VSOCK, AF_ALG, AF_BLUETOOTH, …) bypass a network policy, or reach parts of the kernel that
// no sandbox needs. AF_PACKET takes a capability, and stays in its own network.
var families = []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK, unix.AF_PACKET}

// holdFilter is a seccomp program that refuses sockets of other families, with the error of a kernel without them; and, with disk, calls that change which
// quota counts a file, with the error of a file system without quotas.
func holdFilter(disk bool) []unix.SockFilter {
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		and   = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
		// Offsets in struct seccomp_data, on a little-endian machine.
		number, arch, first, request = 0, 4, 16, 24
		refuse                       = unix.SECCOMP_RET_ERRNO | uint32(unix.EOPNOTSUPP)
		noFamily                     = unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT)
	)
	only := func(k uint32, then unix.SockFilter) []unix.SockFilter { // if the value is k
		return []unix.SockFilter{{Code: equal, Jf: 1, K: k}, then}
	}
	// Requests of ioctl.
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

	// The family of a socket, or of a pair of them.
	made := []unix.SockFilter{{Code: load, K: first}}
	for _, k := range families {
		made = append(made, only(k, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})...)
	}
	made = append(made, unix.SockFilter{Code: ret, K: noFamily})
	// socketcall does the same; its family is in memory, which filters do not see.
	packed := []unix.SockFilter{{Code: load, K: first}}
	for _, k := range []uint32{1, 8} { // SYS_SOCKET, SYS_SOCKETPAIR
		packed = append(packed, only(k, unix.SockFilter{Code: ret, K: noFamily})...)
	}
	packed = append(packed, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})

	p := []unix.SockFilter{{Code: load, K: arch}}
	for _, a := range []struct {
		arch, mask                 uint32
		ioctl, socket, socketCalls []uint32
	}{
		{unix.AUDIT_ARCH_X86_64, ^uint32(x32Bit), []uint32{16, 514}, []uint32{41, 53}, nil}, {unix.AUDIT_ARCH_I386, ^uint32(0), []uint32{54}, []uint32{359, 360}, []uint32{102}},
		{unix.AUDIT_ARCH_AARCH64, ^uint32(0), []uint32{29}, []uint32{198, 199}, nil}, {unix.AUDIT_ARCH_ARM, ^uint32(0), []uint32{54}, []uint32{281, 288}, []uint32{102}},
	} {
		of := []unix.SockFilter{{Code: load, K: number}, {Code: and, K: a.mask}}
		of = append(of, only(sysIOURing, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)})...)
		on := func(numbers []uint32, then []unix.SockFilter) {
			for _, nr := range numbers {
				of = append(of, unix.SockFilter{Code: equal, Jf: uint8(len(then)), K: nr})
				of = append(of, then...)
			}
		}
		on(a.socket, made)
		on(a.socketCalls, packed)
		if disk {
			of = append(of, only(sysFileSetattr, unix.SockFilter{Code: ret, K: refuse})...)
			on(a.ioctl, asked)
		}
		of = append(of, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})
		p = append(p, unix.SockFilter{Code: equal, Jf: uint8(len(of)), K: a.arch})
		p = append(p, of...)
	}
	return append(p, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)}) // an architecture that no agent has
}
