//go:build linux

package runner

import (
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// keepBounds saves a start eighty system calls that each stop all of a process's threads:
// gVisor removes capabilities from the bounding set, one by one, of its kernel and of its
// file server. That set bounds what a process gains by executing a program. With
// no_new_privs, which comes with gVisor's filters, it gains nothing, and the filters let
// neither of the two execute anything. gVisor leaves the set alone if CAP_SETPCAP is not
// effective. It still takes the capabilities themselves from all threads.
//
// An ordinary user's children execute their program again on the way, and are left to
// gVisor.
func keepBounds(args []string) {
	if !slices.Contains(args, "--rootless=false") {
		return
	}
	runtime.LockOSThread() // gVisor then checks this thread
	hdr := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(hdr, &data[0]) == nil {
		data[0].Effective &^= 1 << unix.CAP_SETPCAP
		_ = unix.Capset(hdr, &data[0]) // on an error gVisor does its own work
	}
}
