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

// Hang stops the server's processes, where that is known how.
func (s *Server) Hang() (resume func()) {
	s.t.Skip("only on Linux are a server's processes known")
	return nil
}
