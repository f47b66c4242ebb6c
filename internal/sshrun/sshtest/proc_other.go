//go:build !linux

package sshtest

import (
	"os"
	"syscall"
)

func attr() *syscall.SysProcAttr { return nil }

func kill(pid int) {
	if p, err := os.FindProcess(pid); err == nil {
		p.Kill()
	}
}

func descendants(int, string) []int { return nil }
