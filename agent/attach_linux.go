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
	// attachTries is how often attach tries an agent that is about to listen, at least 2 ms apart.
	// As in donate, tries are counted, not timed.
	attachTries = 5000
	startTime   = 30 * time.Second // until a started agent listens or ends
	maxSaid     = 64 << 10         // of the agent's messages until then
)

// runAttach connects our standard streams to the agent that listens at a socket, and starts the
// agent if there is none.
func runAttach(args []string) int {
	// The environment of a container must not decide how the agent serves it.
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
	fs.StringVar(&socket, "socket", "", "`address` of the agent, @name or /path; if the agent has to be started, it gets the other flags, which are those of init")
	fs.BoolVar(&frames, "frames", false, framesHelp)
	if code, ok := parse(fs, args); !ok {
		return code
	}
	given := []string{"init", "--listen=" + ownPrefix + socket, "--detached"}
	if dir, err := os.Getwd(); err == nil {
		given = append(given, "--workdir="+dir) // unless a flag overrides it
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
		err = fmt.Errorf("attach takes no command, but got %q", fs.Arg(0))
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

const framesHelp = "read the input in frames, each after its length in 4 octets; an empty frame ends the input, the end of the stream ends the connection"

func checkSocket(name string) error {
	switch {
	case len(name) < 2 || name[0] != '@' && !filepath.IsAbs(name):
		return fmt.Errorf("--socket %q: want @name or an absolute path", name)
	case len(name) > 107:
		return fmt.Errorf("--socket %q: longer than 107 bytes", name)
	}
	return nil
}

// runConnect connects our standard streams to the agent that listens at a socket. It starts none: if
// the agent is the sandbox's first process, there is no other.
func runConnect(args []string) int {
	fs := flag.NewFlagSet("connect", flag.ContinueOnError)
	var (
		socket string
		pid    int
		frames bool
	)
	fs.StringVar(&socket, "socket", "", "`address` of the agent, @name or /path")
	fs.IntVar(&pid, "pid", 0, "`process` of the agent; 0 means any process that runs this program")
	fs.BoolVar(&frames, "frames", false, framesHelp)
	if code, ok := parse(fs, args); !ok {
		return code
	}
	err := checkSocket(socket)
	if err == nil && fs.NArg() > 0 {
		err = fmt.Errorf("connect takes no command, but got %q", fs.Arg(0))
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

// attached returns a connection to the agent at a socket. If no agent listens, attached starts one
// with args; without args it waits for an agent that is about to listen. check verifies the
// listening process.
func attached(socket string, args []string, check func(*net.UnixConn) error) (*net.UnixConn, error) {
	started := args == nil
	for try := 0; ; try++ {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err == nil {
			if err = check(conn); err == nil {
				return conn, nil
			}
			conn.Close()
			if errors.Is(err, errEnding) && try < attachTries { // then no process listens there
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

// errEnding means that the listening process is ending: it has no program any more, and its sockets are closed next.
var errEnding = errors.New("the process that listens where the agent should is ending")

// ourAgent refuses the peer of conn unless it has our user and runs our program, according to the kernel: any
// process inside may have listened there first. With a pid the peer must be that process instead: the caller
// that made the container knows that its first process is the agent, and the kernel no longer reports that
// process's program once it has started something as another user.
func ourAgent(conn *net.UnixConn, pid int) error {
	cred, err := peer(conn)
	switch {
	case err != nil:
		return fmt.Errorf("%w: the kernel does not identify the process: %w", errStranger, err)
	case int(cred.Uid) != os.Geteuid():
		return fmt.Errorf("%w: it belongs to user %d, not to %d", errStranger, cred.Uid, os.Geteuid())
	case cred.Pid == 0:
		return fmt.Errorf("%w: it is not in this container", errStranger)
	case pid != 0 && int(cred.Pid) != pid:
		return fmt.Errorf("%w: it is process %d, not %d", errStranger, cred.Pid, pid)
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

// startDetached starts the agent in a session of its own, and returns when that agent, or a faster
// one, listens.
func startDetached(args []string) error {
	// An agent that stays must not inherit descriptors that were left open to us by mistake.
	_ = unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Args[0] = os.Args[0] // a program with several roles reads its role from this
	cmd.Dir = "/"
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		// A process that kills commands by their marks must not find the agent.
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
		return fmt.Errorf("the new agent does not listen: %w: %s", err, said)
	default:
		return fmt.Errorf("the new agent ended (%v): %s", ended, said)
	}
}

// noTag is a limit of file locks, which Linux no longer enforces. It is below the limits that tag
// commands over SSH, so that the agent is not killed with such a command.
const noTag = 1 << 60

// detach leaves the process that started us, and reports to it that we listen.
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

// halfOpenTime is how long a connection without frames may be silent after its caller has closed its side. Then it is unknown whether
// there is still a caller: an engine closes our input, and nothing else.
const halfOpenTime = 10 * time.Minute

// lingerTime is how long a caller that is still sending may take to notice that the agent's side has ended.
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

// A busyConn knows whether its peer has not yet read everything written.
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

// relay joins conn to two streams until the agent's side ends or, if in has frames, the caller has gone.
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
			over <- nil // also if the agent does not read the input
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
				// The agent wants no more input. If we did not read the rest, engines would break the streams and lose the agent's
				// output.
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

// An ownListener accepts only processes of our own user, according to the kernel.
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

// listenOwn listens at @name or /path, for processes of our own user alone. The error is EADDRINUSE
// if another process listens there. A socket without a listener is replaced.
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

// removeStale removes the socket at addr if no process listens there. Hold the lock of its directory.
func removeStale(addr *net.UnixAddr) error {
	fi, err := os.Lstat(addr.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.Mode()&fs.ModeSocket == 0:
		return fmt.Errorf("%s is not a socket, and is not removed", addr.Name)
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
