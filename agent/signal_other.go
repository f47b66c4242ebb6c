//go:build !linux

package agent

import "syscall"

// linuxSignal translates the signals that a client's terminal can send; the
// others have a different number on each system and no portable name here.
func linuxSignal(s syscall.Signal) int {
	switch s {
	case syscall.SIGHUP:
		return 1
	case syscall.SIGINT:
		return 2
	case syscall.SIGQUIT:
		return 3
	case syscall.SIGKILL:
		return 9
	case syscall.SIGTERM:
		return 15
	}
	return 0
}
