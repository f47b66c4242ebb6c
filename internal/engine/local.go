package engine

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Local is this machine as a [Host], for an engine with a Unix socket here. Commands run as
// the broker's account, with its environment and what a command has of its own.
type Local struct{}

var _ Host = Local{}

// Name implements Host.
func (Local) Name() string { return "localhost" }

// Dial implements Host. Unavailable: nobody listens there.
func (Local) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil && ctx.Err() == nil {
		err = sandboxer.E(sandboxer.Unavailable, err, "nothing can be connected to at %s", addr)
	}
	return c, err
}

// Kill implements Host. Failed: some would not end.
func (Local) Kill(ctx context.Context, name, value string) error {
	entry := name + "=" + value
	for ended := 0; ended < 2; { // one that was just started may be seen late
		pids, err := procs.WithEnv(entry)
		if err != nil {
			return sandboxer.E(sandboxer.Failed, err, "processes with %s cannot be looked for", entry)
		}
		pids = slices.DeleteFunc(pids, procs.Ended)
		if ended++; len(pids) == 0 {
			continue
		}
		ended = 0
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // what may not be killed is seen the next time
		}
		select {
		case <-ctx.Done():
			return sandboxer.E(sandboxer.Failed, ctx.Err(), "some processes with %s could not be ended", entry)
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// Ask implements Host: there is room for every command here.
func (l Local) Ask(ctx context.Context, c sshrun.Cmd) (sandboxer.Exit, error) { return l.Run(ctx, c) }

// Capture implements Host. Failed: it wrote more than most bytes, and was ended.
func (l Local) Capture(ctx context.Context, c sshrun.Cmd, most int) ([]byte, sandboxer.Exit, error) {
	out := &answer{most: most}
	c.Stdout = out
	exit, err := l.Run(ctx, c)
	if errors.Is(err, errTooLong) {
		return nil, exit, sandboxer.E(sandboxer.Failed, err, "an answer is longer than %d bytes", most).
			WithHint("look at what has become so large or so many")
	}
	return out.b.Bytes(), exit, err
}

var errTooLong = errors.New("the answer is too long")

// An answer takes so many bytes and no more.
type answer struct {
	most int
	b    bytes.Buffer
}

func (a *answer) Write(p []byte) (int, error) {
	if a.b.Len()+len(p) > a.most {
		return 0, errTooLong
	}
	return a.b.Write(p)
}

// lateOutput is how long an ended command's outputs, held open by something that it
// started, may be silent before they are let go.
const lateOutput = 500 * time.Millisecond

// Run implements Host. A non-zero exit is a result; 127 is a command that is not there. Invalid: c
// cannot be run as it is. Timeout and Canceled: ctx ended, and with it c and what it
// started.
func (l Local) Run(ctx context.Context, c sshrun.Cmd) (sandboxer.Exit, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Exit{}, over(ctx)
	}
	run := rand.Text()
	cmd, err := l.command(c, run)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	s, err := start(cmd, c)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	defer s.close()
	ended := make(chan sandboxer.Exit, 1)
	go func() { ended <- wait(cmd) }()
	stop := make(chan struct{})
	var side sync.WaitGroup
	side.Go(func() { s.control(c, cmd.Process.Pid, stop) })
	defer side.Wait()
	defer close(stop)
	select {
	case exit := <-ended:
		if s.drain(ctx) {
			return exit, s.failed()
		}
	case <-ctx.Done():
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // what left its group is found by its environment
	case <-s.refused:
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	err = l.Kill(kill, runVariable, run)
	s.close()
	// Whoever takes the output may have stopped to.
	select {
	case <-s.copied:
	case <-time.After(lateOutput):
	}
	switch {
	case err != nil:
		return sandboxer.Exit{}, err
	case ctx.Err() != nil:
		return sandboxer.Exit{}, over(ctx)
	}
	return sandboxer.Exit{}, s.failed()
}

// over is the error of a command whose context ended.
func over(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return sandboxer.E(sandboxer.Timeout, ctx.Err(), "a command did not finish in time")
	}
	return sandboxer.E(sandboxer.Canceled, ctx.Err(), "a command was canceled")
}

// runVariable is in the environment of a command and of what it starts.
const runVariable = "SANDBOXER_RUN"

// command is c as a process of its own group, by way of a shell, which says of every command
// alike that it is not there.
func (Local) command(c sshrun.Cmd, run string) (*exec.Cmd, error) {
	script := `exec "$@"`
	if c.Script != "" {
		script = c.Script
	} else if len(c.Args) == 0 || c.Args[0] == "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "there is no command to run")
	}
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, "sh"}, c.Args...)...)
	cmd.Env = append(os.Environ(), runVariable+"="+run)
	for k, v := range c.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the name of an environment variable", k)
		}
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if slices.ContainsFunc(slices.Concat(cmd.Args, cmd.Env), func(s string) bool { return strings.IndexByte(s, 0) >= 0 }) {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the command holds a NUL byte, which no command can be given")
	}
	if cmd.Dir = c.Dir; cmd.Dir == "" {
		cmd.Dir, _ = os.UserHomeDir() // without one it is where the broker is
	}
	if fi, err := os.Stat(cmd.Dir); cmd.Dir != "" && (err != nil || !fi.IsDir()) {
		return nil, sandboxer.E(sandboxer.Invalid, err, "directory %q cannot be entered", cmd.Dir)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: c.TTY != nil}
	return cmd, nil
}

// wait waits for the command itself, not for what it started.
func wait(cmd *exec.Cmd) sandboxer.Exit {
	_ = cmd.Wait() // the state tells it all
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return sandboxer.Exit{Code: 128 + int(ws.Signal()), Signal: signalName(ws.Signal())}
	}
	code := cmd.ProcessState.ExitCode()
	return sandboxer.Exit{Code: code, Signal: signalName(syscall.Signal(code - 128))}
}

// signalName is a signal's name as sandboxer.Exit has it, "" for what is none.
func signalName(s syscall.Signal) string { return strings.TrimPrefix(unix.SignalName(s), "SIG") }

// streams are those of a command under way.
type streams struct {
	terminal *os.File // ours of its two ends, nil without one
	ours     []*os.File
	copied   chan struct{} // closed when all output was passed on
	refused  chan struct{} // closed when output could not be passed on

	once    sync.Once
	err     atomic.Pointer[error]
	last    atomic.Int64 // when output was passed on last
	passing atomic.Int32 // outputs that somebody is taking
	closing sync.Once
}

// start starts cmd with the streams that c has.
func start(cmd *exec.Cmd, c sshrun.Cmd) (_ *streams, err error) {
	s := &streams{copied: make(chan struct{}), refused: make(chan struct{})}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
		if err != nil {
			s.close()
		}
	}()
	pipe := func() (r, w *os.File) {
		if err == nil {
			if r, w, err = os.Pipe(); err != nil {
				err = sandboxer.E(sandboxer.Unavailable, err, "a pipe cannot be had")
			}
		}
		return r, w
	}
	var outputs sync.WaitGroup
	var input *os.File
	copyTo := []func(){}
	if c.TTY != nil {
		ours, slave, err := pty.Open()
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "a terminal cannot be had")
		}
		s.terminal, s.ours, theirs = ours, append(s.ours, ours), append(theirs, slave)
		setSize(ours, *c.TTY)
		cmd.Stdin, cmd.Stdout, cmd.Stderr, input = slave, slave, slave, ours
		copyTo = append(copyTo, func() { s.pass(c.Stdout, ours) })
	} else {
		if c.Stdin != nil {
			r, w := pipe()
			if err != nil {
				return nil, err
			}
			cmd.Stdin, input = r, w
			s.ours, theirs = append(s.ours, w), append(theirs, r)
		}
		for _, out := range []struct {
			to   io.Writer
			from *io.Writer
		}{{c.Stdout, &cmd.Stdout}, {c.Stderr, &cmd.Stderr}} {
			if out.to == nil {
				continue
			}
			r, w := pipe()
			if err != nil {
				return nil, err
			}
			*out.from = w
			s.ours, theirs = append(s.ours, r), append(theirs, w)
			copyTo = append(copyTo, func() { s.pass(out.to, r) })
		}
	}
	if err := cmd.Start(); err != nil {
		if errors.Is(err, syscall.E2BIG) {
			return nil, sandboxer.E(sandboxer.Invalid, err, "the arguments and the environment are too long")
		}
		return nil, sandboxer.E(sandboxer.Unavailable, err, "a command cannot be started on this machine")
	}
	for _, f := range copyTo {
		outputs.Go(f)
	}
	go func() { outputs.Wait(); close(s.copied) }()
	if input != nil {
		go func() { // which ends when its reader lets it: nobody waits for that
			if c.Stdin != nil {
				_, _ = io.Copy(input, c.Stdin)
			}
			if c.TTY != nil {
				_, _ = input.Write([]byte{4}) // how a terminal says that there is no more
				return
			}
			input.Close()
		}()
	}
	return s, nil
}

// pass passes on an output.
func (s *streams) pass(to io.Writer, from *os.File) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && to != nil {
			s.passing.Add(1)
			_, werr := to.Write(buf[:n])
			s.last.Store(time.Now().UnixNano())
			s.passing.Add(-1)
			if werr != nil {
				s.once.Do(func() { s.err.Store(&werr); close(s.refused) })
			}
		}
		if err != nil {
			return // also EIO, by which a terminal says that nobody has its other end
		}
	}
}

// drain waits for the outputs to end, or to have nothing more to say. Whoever takes them may
// take their time, until ctx ends: then false.
func (s *streams) drain(ctx context.Context) bool {
	for ended := time.Now(); ; {
		select {
		case <-s.copied:
			return true
		case <-ctx.Done():
			return false
		case <-time.After(lateOutput / 5):
		}
		last := time.Unix(0, s.last.Load())
		if last.Before(ended) {
			last = ended
		}
		if s.passing.Load() == 0 && time.Since(last) > lateOutput {
			s.close()
		}
	}
}

// failed is the error of output that could not be passed on, nil if all was.
func (s *streams) failed() error {
	if err := s.err.Load(); err != nil {
		return fmt.Errorf("%w: %w", sshrun.ErrOutput, *err)
	}
	return nil
}

// close ends all copying.
func (s *streams) close() {
	s.closing.Do(func() {
		for _, f := range s.ours {
			f.Close()
		}
	})
}

// control passes on resizes and signals.
func (s *streams) control(c sshrun.Cmd, pid int, stop <-chan struct{}) {
	resize, signals := c.Resize, c.Signals
	for {
		select {
		case size, ok := <-resize:
			if !ok {
				resize = nil
			} else if s.terminal != nil {
				setSize(s.terminal, size)
			}
		case sig, ok := <-signals:
			if !ok {
				signals = nil
			} else if sig, ok := sig.(syscall.Signal); ok {
				_ = syscall.Kill(-pid, sig) // it may have ended
			}
		case <-stop:
			return
		}
	}
}

// setSize may be called while f is closed: the descriptor is held meanwhile. A size that cannot be
// set is the program's to live with.
func setSize(f *os.File, size sandboxer.WinSize) {
	if rc, err := f.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) {
			_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: size.Cols, Row: size.Rows})
		})
	}
}
