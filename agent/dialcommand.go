package agent

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// Mark is the first byte that the agent writes on a connection over a command, such as attach. Bytes
// before it come from an engine or a shell in between.
const Mark = '\x06'

// maxBeforeMark is how many bytes may come before the mark, and how much of a command's
// standard error is kept.
const maxBeforeMark = 64 << 10

// markTime is how long a command may take until its mark. An agent that the command starts has
// startTime of that.
const markTime = time.Minute

// errHung is the cause of an error of a command that neither ended nor wrote the Mark in its time.
var errHung = errors.New("the command hangs")

// A RunFunc runs a command at a sandbox or in it. It returns when the command has ended, even if in has
// not, and kills the command when ctx is done. An error means that the command could not be run, or
// that its end is not known. An exit code other than 0 is no error.
type RunFunc func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error)

// DialCommand opens a connection over the standard input and output of a command, from the Mark on,
// which must come within a minute. The context bounds only the dialing; the command gets its values.
// Close ends the command. The connection ends with the command: a read then returns io.EOF if the
// command succeeded, and otherwise its failure. CloseWrite closes the command's input.
//
// Kinds: those of run's errors; Exhausted if no further process can start; Unsupported if the program
// cannot run there (exit code 126 or 127, built for another platform, or missing); else Unavailable.
// The message has the command's error output.
func DialCommand(ctx context.Context, run RunFunc, args ...string) (net.Conn, error) {
	c, _, err := dialCommand(ctx, run, false, args)
	return c, err
}

// DialAttached is DialCommand for the agent's attach and connect, in any version. Input is sent in
// frames, so that the agent notices when the caller closes the connection or dies, whatever is between
// them. Versions without frames notice it only when the agent has sent nothing for a while.
func DialAttached(ctx context.Context, run RunFunc, args ...string) (net.Conn, error) {
	c, code, err := dialCommand(ctx, run, true, append(slices.Clip(args), "--frames"))
	// It does not know that argument. A failure to get a thread also has that code.
	if err != nil && code == 2 && sandboxer.KindOf(err) != sandboxer.Exhausted && ctx.Err() == nil {
		c, _, err = dialCommand(ctx, run, false, args)
	}
	return c, err
}

// dialCommand also returns the exit code of a command that ended without the Mark.
func dialCommand(ctx context.Context, run RunFunc, frames bool, args []string) (_ net.Conn, code int, _ error) {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	ctx, stop := context.WithTimeout(ctx, markTime)
	defer stop()
	said, says := net.Pipe()
	hears, feed := net.Pipe()
	c := &commandConn{Conn: said, feed: feed, end: end, done: make(chan struct{})}
	if frames {
		c.frames = &frameWriter{to: feed}
	}
	out := &markedWriter{to: says, marked: make(chan struct{}), full: make(chan struct{})}
	errs := &capture.First{Max: maxBeforeMark}
	go func() {
		defer end()
		exit, err := run(life, args, hears, out, errs)
		c.code = exit.Code
		c.err = out.verdict(exit, err, errs.String())
		close(c.done)
		says.Close()
		hears.Close()
	}()
	var err error
	select {
	case <-out.marked:
		return c, 0, nil
	case <-out.full:
		err = out.noMark()
	case <-c.done:
		select {
		case <-out.marked: // and it was short
			return c, 0, nil
		default:
			code, err = c.code, c.err
		}
	case <-ctx.Done():
		cause := ctx.Err()
		if errors.Is(cause, context.DeadlineExceeded) {
			cause = errors.Join(errHung, cause)
		}
		err = sandboxer.E(sandboxer.KindOf(ctx.Err()), cause, "the command that connects to the sandbox did not finish in time, or was canceled")
	}
	c.Close()
	return nil, code, err
}

// verdict says what the end of a command means for its connection; nil if it ended well.
func (w *markedWriter) verdict(exit sandboxer.Exit, err error, errs string) error {
	before := w.before()
	said := saying(cmp.Or(strings.TrimSpace(errs), strings.TrimSpace(before)))
	began, full := isClosed(w.marked), isClosed(w.full)
	var e *sandboxer.Error
	switch {
	case full:
		return w.noMark()
	case errors.As(err, &e):
		return err
	case err != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)):
		return sandboxer.E(sandboxer.KindOf(err), err, "the command that connects to the sandbox did not finish in time, or was canceled")
	case err != nil:
		return sandboxer.E(sandboxer.Unavailable, err, "the command that connects to the sandbox failed%s", said)
	case exit.Code != 0 && noProcess(before+"\n"+errs):
		kind := sandboxer.Exhausted
		if began { // and a call may have reached it
			kind = sandboxer.Unavailable
		}
		return sandboxer.E(kind, nil, "the sandbox seems to have reached its limit of processes, and cannot start the one that connects to its agent%s", said).
			WithHint("end processes inside, or give the next sandbox a higher limit (limits: pids)")
	case !began && (exit.Code == 126 || exit.Code == 127 || exit.Code != 0 && cannotRun(before+"\n"+errs)):
		return sandboxer.E(sandboxer.Unsupported, nil, "the program that connects to the sandbox cannot run there (%d)%s", exit.Code, said)
	case exit.Code != 0:
		return sandboxer.E(sandboxer.Unavailable, nil, "the command that connects to the sandbox ended with %d%s", exit.Code, said)
	case !began:
		return sandboxer.E(sandboxer.Unavailable, nil, "the command that connects to the sandbox ended without a connection%s", said)
	}
	return nil
}

// noProcess reports whether our program, or an engine's, says that it got no process or thread inside. A
// busy lock or socket has the same words as a limit that is reached.
func noProcess(said string) bool {
	for line := range strings.Lines(strings.ToLower(said)) {
		has := func(words ...string) bool {
			return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(line, w) })
		}
		if has("failed to create new os thread", "pthread_create failed", "newosproc", "container process: read init-p") || // the last one comes from an engine's program inside
			has("resource temporarily unavailable") && has("fork", "clone", "start container process") && !has("connect") {
			return true
		}
	}
	return false
}

func (w *markedWriter) noMark() error {
	return sandboxer.E(sandboxer.Unavailable, nil, "the command that connects to the sandbox printed too much before the connection%s", saying(w.before()))
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// cannotRun reports whether an engine says that a program is missing, or built for another platform.
// Messages of the program itself begin with its name.
func cannotRun(said string) bool {
	for line := range strings.Lines(strings.ToLower(said)) {
		if strings.Contains(line, "exec format error") || strings.Contains(line, "no such file or directory") && strings.Contains(line, "exec") && !strings.HasPrefix(line, "sandboxer-agent: ") {
			return true
		}
	}
	return false
}

func saying(said string) string {
	if said = strings.TrimSpace(said); said == "" {
		return ""
	}
	return ": " + text(said)
}

// A commandConn is a connection through a command.
type commandConn struct {
	net.Conn              // the command's output
	feed     net.Conn     // the command's input
	frames   *frameWriter // to feed, if the command reads frames
	closed   atomic.Bool  // the input, by the caller
	end      context.CancelFunc
	done     chan struct{} // closed when the command has ended,
	code     int           // with these results
	err      error
}

func (c *commandConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) && c.err != nil { // written before that end
		err = c.err
	}
	return n, err
}

// Write accepts and drops input for a command that ended well, as a connection does until its peer resets it. With
// an error here a caller that still writes would lose the command's output.
func (c *commandConn) Write(p []byte) (n int, err error) {
	if c.frames != nil {
		n, err = c.frames.Write(p)
	} else {
		n, err = c.feed.Write(p)
	}
	if errors.Is(err, io.ErrClosedPipe) && !c.closed.Load() && isClosed(c.done) && c.err == nil {
		return len(p), nil
	}
	return n, err
}

// CloseWrite ends the command's input.
func (c *commandConn) CloseWrite() error {
	c.closed.Store(true)
	if c.frames != nil {
		return c.frames.end()
	}
	return c.feed.Close()
}

func (c *commandConn) Close() error {
	c.closed.Store(true)
	err := errors.Join(c.feed.Close(), c.Conn.Close())
	c.end()
	return err
}

func (c *commandConn) SetDeadline(at time.Time) error {
	return errors.Join(c.feed.SetWriteDeadline(at), c.Conn.SetReadDeadline(at))
}

func (c *commandConn) SetWriteDeadline(at time.Time) error { return c.feed.SetWriteDeadline(at) }

// A markedWriter forwards what comes after the Mark. It keeps what comes before it.
type markedWriter struct {
	to     io.Writer
	marked chan struct{} // closed with the mark
	full   chan struct{} // closed after too many bytes without one

	mu    sync.Mutex
	early []byte
}

func (w *markedWriter) Write(p []byte) (int, error) {
	switch {
	case isClosed(w.marked):
		return w.to.Write(p)
	case isClosed(w.full):
		return 0, io.ErrShortWrite
	}
	before, rest, found := bytes.Cut(p, []byte{Mark})
	w.mu.Lock()
	room := maxBeforeMark - len(w.early)
	w.early = append(w.early, before[:min(len(before), room)]...)
	w.mu.Unlock()
	switch {
	case len(before) > room:
		close(w.full)
		return 0, io.ErrShortWrite
	case !found:
		return len(p), nil
	}
	close(w.marked)
	if len(rest) > 0 {
		if n, err := w.to.Write(rest); err != nil {
			return len(p) - len(rest) + n, err
		}
	}
	return len(p), nil
}

func (w *markedWriter) before() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.early)
}
