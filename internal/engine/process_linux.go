package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/namespaces"
)

// A Process is the first one of a container, as this machine sees it.
type Process struct {
	PID int
	fd  int // of the process itself: its number may be another's when it has ended
}

// Close releases the process, which goes on.
func (p Process) Close() { unix.Close(p.fd) }

// Alive is nil while the number belongs to the process.
func (p Process) Alive() error {
	return os.NewSyscallError("pidfd_send_signal", unix.PidfdSendSignal(p.fd, 0, nil, 0))
}

// ErrElsewhere says that a container does not run on this machine, as far as can be seen here.
var ErrElsewhere = errors.New("the container's processes are not on this machine")

// First returns the first process of a container of an engine at a Unix socket, if it runs on this machine. The socket may
// lead to a virtual machine, whose numbers of processes mean nothing here: the kernel has to say that the process is
// in the container's control group.
func First(c ContainerDetail) (Process, error) {
	none := Process{}
	if c.State.Pid <= 1 || len(c.ID) < 32 {
		return none, ErrElsewhere
	}
	fd, err := unix.PidfdOpen(c.State.Pid, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return none, ErrElsewhere
	}
	if err != nil {
		return none, os.NewSyscallError("pidfd_open", err)
	}
	p := Process{c.State.Pid, fd}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.PID))
	if err == nil && !strings.Contains(string(groups), c.ID) {
		err = ErrElsewhere
	}
	if err == nil {
		err = p.Alive() // so what was read is its
	}
	if err != nil {
		p.Close()
		return none, err
	}
	return p, nil
}

// Dial connects to the socket of the program in the network of the container, once its first process is that program.
// The error is ErrElsewhere if this process is not root, or if another kernel than this machine's has the socket,
// as with gVisor.
func (p Process) Dial(ctx context.Context, program, socket string) (net.Conn, error) {
	proc := fmt.Sprintf("/proc/%d/", p.PID)
	for try := 0; ; try++ {
		now, err := os.Readlink(proc + "exe")
		switch {
		case err != nil, try == reachTries:
			return nil, ErrElsewhere
		case now == program:
			return p.connect(ctx, proc, socket)
		}
		select { // the runtime is about to become it, and the kernel announces no exec
		case <-ctx.Done():
			return nil, sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "the sandbox's agent did not start")
		case <-time.After(time.Millisecond):
		}
	}
}

// reachTries is how often to check, 1 ms apart, whether the first process of a container is the agent yet.
const reachTries = 20

// connect connects to the process's socket. proc is its directory in /proc.
func (p Process) connect(ctx context.Context, proc, socket string) (net.Conn, error) {
	failed := func(err error) error {
		return sandboxer.E(sandboxer.Unavailable, err, "the sandbox's agent cannot be reached: %v", err)
	}
	netns, err := os.Open(proc + "ns/net")
	if err != nil {
		return nil, ErrElsewhere
	}
	defer netns.Close()
	status, err := os.ReadFile(proc + "status")
	if err != nil {
		return nil, failed(err)
	}
	var uid int
	_, after, _ := strings.Cut(string(status), "\nUid:")
	if _, err := fmt.Sscan(after, &uid); err != nil {
		return nil, failed(err)
	}
	if err := p.Alive(); err != nil { // so what was opened and read is its
		return nil, sandboxer.E(sandboxer.NotFound, err, "the sandbox has ended")
	}
	for {
		var conn *net.UnixConn
		err := namespaces.InNetwork(netns, func() (err error) {
			if uid != os.Geteuid() { // the agent lets in its own user alone; the thread ends with this
				if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
					return os.NewSyscallError("setresuid", errno)
				}
			}
			conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
			return err
		})
		switch {
		case err == nil:
			if err := p.answers(conn); err != nil {
				conn.Close()
				return nil, failed(err)
			}
			return conn, nil
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
			return nil, ErrElsewhere
		case !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.EAGAIN): // it is about to listen, or many connections wait
			return nil, failed(err)
		}
		select {
		case <-ctx.Done():
			return nil, sandboxer.E(sandboxer.KindOf(ctx.Err()), err, "the sandbox's agent did not answer in time")
		case <-time.After(2 * time.Millisecond):
		}
		if p.Alive() != nil {
			return nil, sandboxer.E(sandboxer.NotFound, err, "the sandbox has ended")
		}
	}
}

// answers is nil if, according to the kernel, the other side of conn is the process.
func (p Process) answers(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil {
		return cerr
	}
	if err == nil && int(cred.Pid) != p.PID {
		err = fmt.Errorf("another process (%d) listens on its socket", cred.Pid)
	}
	return err
}
