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

// A donateListener accepts connections that are handed to it whole: open sockets, or
// pairs of pipes (to read from, to write to), sent as descriptors over a Unix socket
// that only root of the sandbox can reach.
// Their other ends are outside. An adapter that can start a program inside with open
// files gets a wire to the agent this way that needs no network and passes through
// nothing else; "donate" is that program.
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
	// It takes the place of whatever is there in one step: somebody inside may be after it, too.
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

// donorPatience is how long a message is waited for from who has connected.
const donorPatience = 10 * time.Second

// receiveConns reads one message, which must be there by the given time, and returns the
// sockets in it.
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

// readLate reads the message that is there although its time is up: where we had not had the
// processor, that says nothing of who sent it.
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
		_ = os.Remove(l.path) // it may be gone, or another's
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

// runDonate hands its open descriptors, from 3 on, to the agent that listens at a
// path. The agent may still be starting: it is waited for. With --wake it may not even
// have been started: the given process becomes the agent when told by SIGUSR1.
func runDonate(args []string) int {
	fs := flag.NewFlagSet("donate", flag.ContinueOnError)
	wake := fs.Int("wake", 0, "`process` to tell by SIGUSR1, until the agent listens")
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
			// It has given up waiting for us, who were late.
			if try < lateTries && (errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)) {
				continue
			}
		}
		return report(err)
	}
}

const (
	// donateTries is how often the agent is looked for, at least 2 ms after each other: ten
	// seconds and more. They are counted and not timed: where the machine stands still, or has
	// much else to do, the agent has had no more turns than we.
	donateTries = 5000
	lateTries   = 10
)

// StrangerExit is the exit code of donate where another process than the one to wake has
// put itself in the agent's place.
const StrangerExit = 3

var errStranger = errors.New("another process listens where the agent should")

// peer returns who is at the other end of conn, by the word of the kernel: who called listen
// for one that we dialed, and who called connect for one that we accepted.
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

// dialSoon connects to the Unix socket at path, which may be about to appear once
// the process wake, if that is not 0, is woken. It must then be that process which listens
// there: root of the sandbox can put a socket of its own in that place. It is tried tries times.
func dialSoon(path string, wake int, tries int) (*net.UnixConn, error) {
	const patience = 50 // tries after which a signal is taken for lost: the process may just have begun
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

// asleep reports whether a process waits for something, or stands still. Who is to be woken
// does, but for a moment after its start: the signal would end it then.
func asleep(pid int) bool {
	f, err := procs.Stat(pid)
	return err != nil || len(f) == 0 || f[0] != "R" // it may be gone, which the signal finds out
}

// soon reports whether an agent that is starting, or busy, may be the cause of err.
func soon(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EAGAIN) || errors.Is(err, errStranger)
}

// sameProgram reports whether a process runs the program that we are: then it needs no more
// signals, and what became so at the word of an older build may die of them.
func sameProgram(pid int) bool {
	theirs, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	ours, err := os.Stat("/proc/self/exe")
	return err == nil && os.SameFile(theirs, ours)
}
