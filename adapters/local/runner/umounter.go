//go:build linux

package runner

import (
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/sand-boxer/sandboxer/adapters/local/runner/umount"
)

// useSmallUmounter makes the sandbox's kernel start package umount's program in place of
// its own. If that is not possible, gVisor works as usual.
func useSmallUmounter(args []string) {
	// In other cases the kernel executes itself again by the same name.
	if len(umount.Program) == 0 || !slices.Contains(args, "--apply-caps=true") || !slices.Contains(args, "--rootless=false") {
		return
	}
	fd, err := executable(umount.Program)
	if err == nil {
		specutils.ExePath = "/proc/self/fd/" + strconv.Itoa(fd)
	}
}

// executable returns a descriptor of a program in memory. It stays open: its number is
// needed, and it is not known until when.
func executable(program []byte) (fd int, err error) {
	var w int
	for _, flags := range []int{unix.MFD_EXEC, 0} { // a kernel may require the flag, or not know it
		if w, err = unix.MemfdCreate("umount", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags); err == nil {
			break
		}
	}
	if err != nil {
		return 0, err
	}
	defer unix.Close(w) // the kernel does not execute a file that is open for writing
	if _, err := unix.Write(w, program); err != nil {
		return 0, err
	}
	if _, err := unix.FcntlInt(uintptr(w), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL); err != nil {
		return 0, err
	}
	return unix.Open("/proc/self/fd/"+strconv.Itoa(w), unix.O_RDONLY|unix.O_CLOEXEC, 0)
}
