package agent

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// attachTries is how often an agent that is about to listen is looked for, at least 2 ms
	// after each other. They are counted and not timed, as those of donate are.
	attachTries = 5000
	startTime   = 30 * time.Second // until an agent that was started listens or ends
	maxSaid     = 64 << 10         // of what it says until then
)

// runAttach makes our standard streams a connection to the agent that listens at a socket,
// which it starts if there is none.
func runAttach(args []string) int {
	// Whoever set the environment of a container does not say how the agent serves it.
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, EnvPrefix) {
			_ = os.Unsetenv(name)
		}
	}
	fs := flag.NewFlagSet("attach", flag.ContinueOnError)
	var (
		o      initFlags
		socket string
		frames bool
	)
	o.register(fs)
	fs.StringVar(&socket, "socket", "", "`address` of the agent, @name or /path; the other flags are those of init, for one that is started")
	fs.BoolVar(&frames, "frames", false, framesHelp)
	if code, ok := parse(fs, args); !ok {
		return code
	}
	given := []string{"init", "--listen=" + ownPrefix + socket, "--detached"}
	if dir, err := os.Getwd(); err == nil {
		given = append(given, "--workdir="+dir) // unless a flag says otherwise
	}
	fs.Visit(func(f *flag.Flag) {
		if f.Name != "socket" && f.Name != "frames" {
			given = append(given, "--"+f.Name+"="+f.Value.String())
		}
	})
	err := o.check()
	switch {
	case err != nil:
	case fs.NArg() > 0:
		err = fmt.Errorf("attach takes no command, and got %q", fs.Arg(0))
	case len(o.listen) > 0 || o.detached:
		err = errors.New("attach takes neither --listen nor --detached")
	default:
		err = checkSocket(socket)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandboxer-agent:", err)
		return 2
	}
	conn, err := attached(socket, given, func(conn *net.UnixConn) error { return ourAgent(conn, 0) })
	return relayed(conn, frames, err)
}

const framesHelp = "the input comes in frames, each after its length in 4 octets; an empty one ends it, and the end of the stream all"

func checkSocket(name string) error {
	switch {
	case len(name) < 2 || name[0] != '@' && !filepath.IsAbs(name):
		return fmt.Errorf("--socket %q: want @name or an absolute path", name)
	case len(name) > 107:
		return fmt.Errorf("--socket %q: longer than 107 bytes", name)
	}
	return nil
}

// runConnect makes our standard streams a connection to the agent that listens at a socket. It
// starts none: where the agent is the sandbox's first process, there is no other.
func runConnect(args []string) int {
	fs := flag.NewFlagSet("connect", flag.ContinueOnError)
	var (
		socket string
		pid    int
		frames bool
	)
	fs.StringVar(&socket, "socket", "", "`address` of the agent, @name or /path")
	fs.IntVar(&pid, "pid", 0, "the `process` that the agent is; 0 means any that runs our program")
	fs.BoolVar(&frames, "frames", false, framesHelp)
	if code, ok := parse(fs, args); !ok {
		return code
	}
	err := checkSocket(socket)
	if err == nil && fs.NArg() > 0 {
		err = fmt.Errorf("connect takes no command, and got %q", fs.Arg(0))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandboxer-agent:", err)
		return 2
	}
	conn, err := attached(socket, nil, func(conn *net.UnixConn) error { return ourAgent(conn, pid) })
	return relayed(conn, frames, err)
}

// relayed joins conn to our standard streams, and returns the exit code.
func relayed(conn *net.UnixConn, frames bool, err error) int {
	if err == nil {
		err = relayStreams(conn, frames)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandboxer-agent:", err)
		if errors.Is(err, errStranger) {
			return StrangerExit
		}
		return 1
	}
	return 0
}

// attached returns a connection to the agent at a socket. Where none listens, one is started
// with the arguments; without arguments one is waited for that is about to listen. Who does is
// asked for by check.
func attached(socket string, args []string, check func(*net.UnixConn) error) (*net.UnixConn, error) {
	started := args == nil
	for try := 0; ; try++ {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err == nil {
			if err = check(conn); err == nil {
				return conn, nil
			}
			conn.Close()
			if errors.Is(err, errEnding) && try < attachTries { // then nobody listens there
				time.Sleep(2 * time.Millisecond)
				continue
			}
			return nil, err
		}
		if try == attachTries || !soon(err) {
			return nil, err
		}
		if !started && !errors.Is(err, unix.EAGAIN) {
			if err := startDetached(args); err != nil {
				return nil, err
			}
			started = true
			continue
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// errEnding says that who listened is ending: it has no program any more, and its sockets are closed next.
var errEnding = errors.New("the process that listens where the agent should is ending")

// ourAgent refuses the other end of conn unless it is our user's and runs our program, by the
// word of the kernel: any process inside may have listened there first. With a pid it must be that
// process instead: the first one of a container is the agent by the word of who made it, and which program
// it runs the kernel does not tell once it has started something as another user.
func ourAgent(conn *net.UnixConn, pid int) error {
	cred, err := peer(conn)
	switch {
	case err != nil:
		return fmt.Errorf("%w: the kernel does not say who: %w", errStranger, err)
	case int(cred.Uid) != os.Geteuid():
		return fmt.Errorf("%w: it is of user %d, and not of %d", errStranger, cred.Uid, os.Geteuid())
	case cred.Pid == 0:
		return fmt.Errorf("%w: it is not in this container", errStranger)
	case pid != 0 && int(cred.Pid) != pid:
		return fmt.Errorf("%w: it is process %d, and not %d", errStranger, cred.Pid, pid)
	case pid != 0:
	case !sameProgram(int(cred.Pid)):
		what, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", cred.Pid))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("%w: process %d", errEnding, cred.Pid)
		}
		if err != nil {
			what = err.Error()
		}
		return fmt.Errorf("%w: process %d runs another program (%s)", errStranger, cred.Pid, what)
	}
	return nil
}

// startDetached starts the agent in a session of its own, and returns when it, or another that
// was faster, listens.
func startDetached(args []string) error {
	// What we were left open by mistake is not for somebody who stays.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Args[0] = os.Args[0] // which tells a program of several roles its own
	cmd.Dir = "/"
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		// Who marks the commands of others to kill them does not mean the agent.
		return strings.HasPrefix(kv, "SANDBOXER_EXEC=") || strings.HasPrefix(kv, "SANDBOXER_RUN=") || strings.HasPrefix(kv, markVar+"=")
	})
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd.Stderr = w
	err = cmd.Start()
	w.Close()
	if err != nil {
		return fmt.Errorf("the agent cannot be started: %w", err)
	}
	_ = r.SetReadDeadline(time.Now().Add(startTime))
	said, err := io.ReadAll(io.LimitReader(r, maxSaid))
	if bytes.HasSuffix(said, []byte{Mark}) {
		return nil
	}
	if err != nil || len(said) == maxSaid {
		_ = cmd.Process.Kill()
	}
	ended := cmd.Wait()
	switch said := strings.TrimPrefix(strings.TrimSpace(string(said)), "sandboxer-agent: "); {
	case cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == InUseExit:
		return nil
	case err != nil:
		return fmt.Errorf("the agent that was started does not listen: %w: %s", err, said)
	default:
		return fmt.Errorf("the agent that was started ended (%v): %s", ended, said)
	}
}

// noTag is a limit of file locks, which Linux has long stopped to heed, below those with which
// commands over SSH are tagged, to be killed with all that they started.
const noTag = 1 << 60

// detach lets go of who started us, who learns so that we listen.
func detach() error {
	var locks unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_LOCKS, &locks); err == nil && locks.Max != unix.RLIM_INFINITY && locks.Max > noTag {
		if err := unix.Setrlimit(unix.RLIMIT_LOCKS, &unix.Rlimit{Cur: noTag, Max: noTag}); err != nil {
			return err
		}
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	if _, err := os.Stderr.Write([]byte{Mark}); err != nil {
		return err
	}
	for fd := range 3 {
		if err := unix.Dup3(int(null.Fd()), fd, 0); err != nil {
			return err
		}
	}
	return nil
}

// halfOpenTime is how long nothing may come of a connection whose caller has closed its side, where that comes not in frames. Whether
// there is still a caller cannot be told then: an engine closes our input, and nothing else.
const halfOpenTime = 10 * time.Minute

// lingerTime is how long a caller who is still sending may take to notice that the agent's side has ended.
const lingerTime = 2 * time.Second

// relayStreams joins conn to our standard streams.
func relayStreams(conn *net.UnixConn, frames bool) error {
	limitRelay()
	in, undoIn := waitable(os.Stdin)
	defer undoIn()
	out, undoOut := waitable(os.Stdout)
	defer undoOut()
	return relay(conn, in, out, frames, halfOpenTime)
}

// A busyConn knows whether its other side has not taken all that was written.
type busyConn struct {
	*net.UnixConn
	writing atomic.Bool
}

func (c *busyConn) busy() bool {
	if c.writing.Load() {
		return true
	}
	waits := 0
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { waits, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	}
	return waits > 0
}

func (c *busyConn) Write(p []byte) (int, error) {
	c.writing.Store(true)
	n, err := c.UnixConn.Write(p)
	c.writing.Store(err != nil)
	return n, err
}

// relay joins conn to two streams, until the agent's side of it ends, or, where in comes in frames, the caller has gone.
func relay(conn *net.UnixConn, in io.Reader, out io.Writer, frames bool, halfOpen time.Duration) error {
	defer conn.Close()
	if _, err := out.Write([]byte{Mark}); err != nil {
		return err
	}
	over := make(chan error, 3)
	var closed atomic.Bool
	input := busyConn{UnixConn: conn}
	go func() {
		if frames {
			passFrames(&input, bufio.NewReaderSize(in, 64<<10))
			over <- nil // also where nobody takes what comes
			return
		}
		if _, err := io.Copy(conn, in); err == nil {
			_ = conn.CloseWrite()
			closed.Store(true)
			_ = conn.SetReadDeadline(time.Now().Add(halfOpen))
		}
	}()
	go func() {
		buf := make([]byte, 32<<10)
		for {
			n, err := conn.Read(buf)
			if n > 0 {
				if _, werr := out.Write(buf[:n]); werr != nil {
					over <- werr
					return
				}
			}
			switch {
			case errors.Is(err, io.EOF) && frames && input.busy():
				// The agent wants no more of what still comes. If nobody took it, engines would break the streams, and with them what
				// the agent has said.
				conn.Close()
				time.AfterFunc(lingerTime, func() { over <- nil })
				return
			case errors.Is(err, io.EOF):
				over <- nil
				return
			case err != nil:
				over <- err
				return
			case closed.Load():
				_ = conn.SetReadDeadline(time.Now().Add(halfOpen))
			}
		}
	}()
	return <-over
}

// An ownListener lets in who has our own user, by the word of the kernel.
type ownListener struct {
	*net.UnixListener
	uid int
}

const ownPrefix = "own:"

func (l ownListener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if cred, err := peer(c); err == nil && int(cred.Uid) == l.uid {
			return c, nil
		}
		c.Close()
	}
}

// listenOwn listens at @name or /path, for processes of our own user alone. The error is
// EADDRINUSE where somebody listens there already. A socket that nobody listens at is replaced.
func listenOwn(name string) (net.Listener, error) {
	if err := checkSocket(name); err != nil {
		return nil, err
	}
	addr := &net.UnixAddr{Name: name, Net: "unix"}
	if name[0] != '@' {
		unlock, err := lockDir(filepath.Dir(name))
		if err != nil {
			return nil, err
		}
		defer unlock()
		if err := removeStale(addr); err != nil {
			return nil, err
		}
	}
	l, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, err
	}
	if name[0] != '@' {
		if err := os.Chmod(name, 0o600); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return ownListener{l, os.Geteuid()}, nil
}

// removeStale removes the socket at addr if nobody listens there. Hold the lock of its directory.
func removeStale(addr *net.UnixAddr) error {
	fi, err := os.Lstat(addr.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.Mode()&fs.ModeSocket == 0:
		return fmt.Errorf("%s is not a socket, and stays", addr.Name)
	}
	conn, err := net.DialUnix("unix", nil, addr)
	if errors.Is(err, unix.ECONNREFUSED) {
		return os.Remove(addr.Name)
	}
	if err == nil {
		conn.Close()
	}
	return &net.OpError{Op: "listen", Net: "unix", Addr: addr, Err: unix.EADDRINUSE}
}

// lockDir keeps other agents out of a directory until unlock.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for try := 0; ; try++ {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if try == attachTries || !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("%s cannot be locked: %w", dir, err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
