//go:build linux

package runner

import (
	"runtime"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// keepBounds spares a start eighty system calls that each stop all of a process's threads:
// gVisor removes capabilities from the bounding set, one by one, of its kernel and of its
// file server. That set bounds what a process gains by executing a program. With
// no_new_privs it gains nothing, and gVisor's filters let neither of the two execute
// anything. gVisor leaves the set alone where CAP_SETPCAP is not effective. The
// capabilities themselves it takes away as ever.
//
// An ordinary user's children execute themselves anew on the way, and are left to gVisor.
func keepBounds(args []string) {
	if !slices.Contains(args, "--rootless=false") {
		return
	}
	hdr := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(hdr, &data[0]) != nil || data[0].Effective&(1<<unix.CAP_SETPCAP) == 0 {
		return
	}
	// If either fails, gVisor does as it always would.
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return
	}
	data[0].Effective &^= 1 << unix.CAP_SETPCAP
	var pin runtime.Pinner
	pin.Pin(hdr)
	pin.Pin(&data[0])
	defer pin.Unpin()
	syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(hdr)), uintptr(unsafe.Pointer(&data[0])), 0)
}
