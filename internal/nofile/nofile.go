// Package nofile says how many files this process may have open.
package nofile

import "syscall"

// Limit is how many file descriptors this process may have: 1,024 if the kernel does not say.
func Limit() int {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return 1024
	}
	return int(min(uint64(r.Cur), 1<<20))
}
