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

// Hang stops the server's processes, on systems where that is implemented.
func (s *Server) Hang() (resume func()) {
	s.t.Skip("the processes of a server are known only on Linux")
	return nil
}
