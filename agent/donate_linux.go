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
			for _, conn := range receiveConns(c) {
				select {
				case l.conns <- conn:
				case <-l.done:
					conn.Close()
				}
			}
		})
	}
}

// receiveConns reads one message and returns the sockets in it.
func receiveConns(c *net.UnixConn) (conns []net.Conn) {
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	oob := make([]byte, unix.CmsgSpace(4*maxDonation))
	_, n, _, _, err := c.ReadMsgUnix(make([]byte, 1), oob)
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
	conn, err := dialSoon(args[0], *wake, 10*time.Second)
	if errors.Is(err, errStranger) {
		fmt.Fprintln(os.Stderr, "sandboxer-agent:", err)
		return StrangerExit
	}
	if err == nil {
		_, _, err = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(fds...), nil)
		conn.Close()
	}
	return report(err)
}

// StrangerExit is the exit code of donate where another process than the one to wake has
// put itself in the agent's place.
const StrangerExit = 3

var errStranger = errors.New("another process listens where the agent should")

// listener returns who called listen on the other end of conn, by the word of the kernel.
func listener(conn *net.UnixConn) (pid int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil || err != nil {
		return 0, errors.Join(cerr, err)
	}
	return int(cred.Pid), nil
}

// dialSoon connects to the Unix socket at path, which may be about to appear once
// the process wake, if that is not 0, is woken. It must then be that process which listens
// there: root of the sandbox can put a socket of its own in that place.
func dialSoon(path string, wake int, limit time.Duration) (*net.UnixConn, error) {
	const patience = 50 // tries after which a signal is taken for lost: the process may just have begun
	for began, try := time.Now(), 0; ; try++ {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err == nil && wake > 0 {
			pid, perr := listener(conn)
			if perr != nil || pid != wake {
				conn.Close()
				conn, err = nil, errors.Join(errStranger, perr)
			}
		}
		if err == nil || time.Since(began) > limit || !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, errStranger) {
			return conn, err
		}
		if wake > 0 && try%patience == 0 {
			_ = unix.Kill(wake, unix.SIGUSR1)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
