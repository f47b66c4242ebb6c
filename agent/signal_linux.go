package agent

import "syscall"

func linuxSignal(s syscall.Signal) int { return int(s) }
