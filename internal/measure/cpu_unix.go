//go:build unix

package measure

import (
	"syscall"
	"time"
)

// CPU is the processor time of this process so far, or less than 0 if it is not
// known.
func CPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return -1
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
