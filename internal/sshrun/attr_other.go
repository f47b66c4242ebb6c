//go:build !linux

package sshrun

import (
	"os"
	"syscall"
)

func masterAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

func widen(*os.File) {}
