package agent

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/procs"
)

// A donateListener accepts connections that are handed over as open files: sockets, or
// pairs of pipes (to read from, to write to), sent as descriptors over a Unix socket that
// only root of the sandbox can reach. Their other ends are outside. If an adapter can
// start a program inside with open files, it gets a connection to the agent this way that
// needs no network and passes through nothing else; "donate" is that program.
type donateListener struct {
	sock  *net.UnixListener
	path  string
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
	wg    sync.WaitGroup
}

const (
	donatePrefix = "donate:"
	maxDonation  = 64 // descriptors in one message
	firstDonated = 3  // descriptor number; the standard streams come before
)

func listenDonated(path string) (net.Listener, error) {
	// This replaces an existing socket in one step: another process inside may want the path,
	// too.
	own := path + ".new"
	if err := os.Remove(own); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	sock, err := net.ListenUnix("unix", &net.UnixAddr{Name: own, Net: "unix"})
	if err != nil {
		return nil, err
	}
	sock.SetUnlinkOnClose(false)
	if err = os.Chmod(own, 0o600); err == nil {
		err = os.Rename(own, path)
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(own), sock.Close())
	}
	l := &donateListener{sock: sock, path: path, conns: make(chan net.Conn, maxDonation), done: make(chan struct{})}
	l.wg.Go(l.receive)
	return l, nil
}

func (l *donateListener) receive() {
	for {
		c, err := l.sock.AcceptUnix()
		if err != nil {
			return
		}
		l.wg.Go(func() {
			defer c.Close()
			for _, conn := range receiveConns(c, time.Now().Add(donorPatience)) {
				select {
				case l.conns <- conn:
				case <-l.done:
					conn.Close()
				}
			}
		})
	}
}

// donorPatience is how long to wait for a message on an accepted connection.
const donorPatience = 10 * time.Second

// receiveConns reads one message, which must arrive by the given time, and returns the sockets
// in it.
func receiveConns(c *net.UnixConn, until time.Time) (conns []net.Conn) {
	_ = c.SetReadDeadline(until)
	oob := make([]byte, unix.CmsgSpace(4*maxDonation))
	_, n, _, _, err := c.ReadMsgUnix(make([]byte, 1), oob)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		n, err = readLate(c, oob)
	}
	if err != nil {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return nil
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		var half *os.File // a pipe to read from, waiting for the one to write to
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			var st unix.Stat_t
			pipe := unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO && unix.SetNonblock(fd, true) == nil
			f := os.NewFile(uintptr(fd), "donated")
			switch {
			case pipe && half == nil:
				half = f
			case pipe:
				conns = append(conns, NewPipeConn(half, f))
				half = nil
			default:
				if conn, err := net.FileConn(f); err == nil {
					conns = append(conns, conn)
				}
				f.Close()
			}
		}
		if half != nil {
			half.Close()
		}
	}
	return conns
}

// readLate reads a message that has arrived although its time is over: if we had no processor
// time until now, the sender is not to blame.
func readLate(c *net.UnixConn, oob []byte) (n int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	cerr := raw.Control(func(fd uintptr) {
		_, n, _, _, err = unix.Recvmsg(int(fd), make([]byte, 1), oob, unix.MSG_DONTWAIT)
	})
	return n, errors.Join(cerr, err)
}

func (l *donateListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *donateListener) Close() error {
	var err error
	l.once.Do(func() {
		close(l.done)
		_ = os.Remove(l.path) // it may be gone, or belong to another process
		err = l.sock.Close()
		l.wg.Wait()
		for {
			select {
			case c := <-l.conns:
				c.Close()
			default:
				return
			}
		}
	})
	return err
}

func (l *donateListener) Addr() net.Addr { return l.sock.Addr() }

// runDonate hands its open descriptors, from 3 on, to the agent that listens at a path. It
// waits for an agent that is still starting. With --wake the agent may not even have been
// started: the given process becomes the agent when it receives SIGUSR1.
func runDonate(args []string) int {
	fs := flag.NewFlagSet("donate", flag.ContinueOnError)
	wake := fs.Int("wake", 0, "`process` that gets SIGUSR1 until the agent listens")
	if code, ok := parse(fs, args); !ok {
		return code
	}
	if args = fs.Args(); len(args) != 2 {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: donate needs a socket path and a number of descriptors")
		return 2
	}
	count, err := strconv.Atoi(args[1])
	if err != nil || count < 1 || count > maxDonation {
		fmt.Fprintf(os.Stderr, "sandboxer-agent: donate %q: want 1 to %d descriptors\n", args[1], maxDonation)
		return 2
	}
	fds := make([]int, count)
	for i := range fds {
		fds[i] = firstDonated + i
	}
	for try := 1; ; try++ {
		conn, err := dialSoon(args[0], *wake, donateTries)
		if errors.Is(err, errStranger) {
			fmt.Fprintln(os.Stderr, "sandboxer-agent:", err)
			return StrangerExit
		}
		if err == nil {
			_, _, err = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(fds...), nil)
			conn.Close()
			// We were late, and the agent has stopped waiting for us.
			if try < lateTries && (errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)) {
				continue
			}
		}
		return report(err)
	}
}

const (
	// donateTries is how often the agent is tried, at least 2 ms apart: ten seconds or more.
	// Tries are counted, not timed: if the machine is paused or busy, the agent has had no more
	// turns than we.
	donateTries = 5000
	lateTries   = 10
)

// StrangerExit is the exit code of donate if another process than the expected one listens in the
// agent's place.
const StrangerExit = 3

var errStranger = errors.New("another process listens where the agent should")

// peer returns the process at the other end of conn, according to the kernel: the one that called
// listen for a connection that we dialed, the one that called connect for one that we accepted.
func peer(conn *net.UnixConn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil || err != nil {
		return nil, errors.Join(cerr, err)
	}
	return cred, nil
}

// dialSoon connects to the Unix socket at path. If wake is not 0, that process creates the socket
// after SIGUSR1, and it must be the listener: root of the sandbox can put a socket of its own
// there. dialSoon tries this many times.
func dialSoon(path string, wake int, tries int) (*net.UnixConn, error) {
	const patience = 50 // tries after which a signal counts as lost: the process may just have begun
	for try, next := 0, 0; ; try++ {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err == nil && wake > 0 {
			cred, perr := peer(conn)
			if perr != nil || int(cred.Pid) != wake {
				conn.Close()
				conn, err = nil, errors.Join(errStranger, perr)
			}
		}
		if err == nil || try == tries || !soon(err) {
			return conn, err
		}
		if wake > 0 && try >= next && asleep(wake) && !sameProgram(wake) {
			_ = unix.Kill(wake, unix.SIGUSR1)
			next = try + patience
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// asleep reports whether a process waits, or is stopped. The process to be woken waits, except
// for a moment after its start, when the signal would end it.
func asleep(pid int) bool {
	f, err := procs.Stat(pid)
	return err != nil || len(f) == 0 || f[0] != "R" // it may be gone, and then the signal fails
}

// soon reports whether an agent that is starting, or busy, may be the cause of err.
func soon(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EAGAIN) || errors.Is(err, errStranger)
}

// sameProgram reports whether a process runs our program: then it needs no more signals, and one
// that an older build has woken may die of them.
func sameProgram(pid int) bool {
	theirs, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	ours, err := os.Stat("/proc/self/exe")
	return err == nil && os.SameFile(theirs, ours)
}
