package sshtest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// attr has a server end with the test binary, even if that panics and cleans up
// nothing.
func attr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGTERM}
}

func kill(pid int) { syscall.Kill(pid, syscall.SIGKILL) }

// descendants returns the processes below pid of that name.
func descendants(pid int, name string) (found []int) {
	parents := map[int]int{}
	names := map[int]string{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range stats {
		data, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		s := string(data)
		open, shut := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
		if open < 1 || shut < open {
			continue
		}
		p, _ := strconv.Atoi(strings.TrimSpace(s[:open]))
		rest := strings.Fields(s[shut+1:])
		if len(rest) > 1 {
			parents[p], _ = strconv.Atoi(rest[1])
			names[p] = s[open+1 : shut]
		}
	}
	for p := range parents {
		for at := parents[p]; at > 1; at = parents[at] {
			if at == pid {
				if strings.HasPrefix(names[p], name) {
					found = append(found, p)
				}
				break
			}
		}
	}
	return found
}

// Hang stops the server's processes, as if the machine had stalled: connections stay open
// but get no answer until resume is called.
func (s *Server) Hang() (resume func()) {
	syscall.Kill(s.PID, syscall.SIGSTOP) // it makes no more of them
	stopped := append(s.Children(), s.PID)
	for _, pid := range stopped {
		syscall.Kill(pid, syscall.SIGSTOP)
	}
	return func() {
		for _, pid := range stopped {
			syscall.Kill(pid, syscall.SIGCONT)
		}
	}
}
