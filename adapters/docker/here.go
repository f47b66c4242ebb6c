package docker

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/engine"
)

// A process is the first one of a container, as this machine has it.
type process struct {
	pid int
	fd  int // of the process itself: its number may be another's when it has ended
}

func (p process) Close() { unix.Close(p.fd) }

// alive is nil while the number is the process's.
func (p process) alive() error {
	return os.NewSyscallError("pidfd_send_signal", unix.PidfdSendSignal(p.fd, 0, nil, 0))
}

// errElsewhere says that a container does not run on this machine, as far as can be seen here.
var errElsewhere = errors.New("the container's processes are not on this machine")

// here returns the first process of a container if it runs on this machine. An engine's socket here may
// lead to a virtual machine, whose numbers of processes mean nothing here: the kernel has to say that the process is
// in the container's control group.
func (h *host) here(c engine.ContainerDetail) (process, error) {
	none := process{}
	if h.socket == "" || c.State.Pid <= 1 || len(c.ID) < 32 {
		return none, errElsewhere
	}
	fd, err := unix.PidfdOpen(c.State.Pid, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return none, errElsewhere
	}
	if err != nil {
		return none, os.NewSyscallError("pidfd_open", err)
	}
	p := process{c.State.Pid, fd}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.pid))
	if err == nil && !strings.Contains(string(groups), c.ID) {
		err = errElsewhere
	}
	if err == nil {
		err = p.alive() // so what was read is its
	}
	if err != nil {
		p.Close()
		return none, err
	}
	return p, nil
}
