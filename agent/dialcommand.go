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
)

// Mark is the first byte that a command writes which is a connection, as attach is one:
// whatever comes before it is of an engine or a shell on the way.
const Mark = '\x06'

// maxBeforeMark is how much may come before the mark, and how much of what a command says
// on its standard error is kept.
const maxBeforeMark = 64 << 10

// markTime is how long a command may take until its mark. An agent that it starts has startTime
// of that.
const markTime = time.Minute

// A RunFunc runs a command where a sandbox is, or in it. It returns when the command has
// ended, also if in has not, and ends it when ctx is done. Its error is that the command
// could not be run or its end not be learnt; a code other than 0 is none.
type RunFunc func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error)

// DialCommand opens a connection by way of a command whose standard input and output it is,
// from the Mark on, for which there is a minute. The context bounds the dialing alone, and its values are the command's.
// Close ends the command, and the connection ends with it: reading from it returns io.EOF
// where the command ended well, and otherwise what became of it. CloseWrite ends the
// command's input.
//
// Kinds: those of run's errors; Exhausted where there is no room for one more process;
// Unsupported where the program cannot run there (exit code 126 or 127, another platform's, not
// there); else Unavailable. What the command said is in the message.
func DialCommand(ctx context.Context, run RunFunc, args ...string) (net.Conn, error) {
	c, _, err := dialCommand(ctx, run, false, args)
	return c, err
}

// DialAttached is DialCommand for the program's attach and connect, of whichever version it is there. The input goes to it in frames, so
// that it ends when the caller closes the connection, or dies, whoever is between them; with versions that take none, it may take until nothing has come of the
// agent for a while.
func DialAttached(ctx context.Context, run RunFunc, args ...string) (net.Conn, error) {
	c, code, err := dialCommand(ctx, run, true, append(slices.Clip(args), "--frames"))
	// It does not know that argument. What finds no thread, too, has that code.
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
	errs := &keptWriter{}
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
		err = sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "the command that leads to the sandbox was given up")
	}
	c.Close()
	return nil, code, err
}

// verdict says what the end of a command means to its connection; nil if it ended well.
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
		return sandboxer.E(sandboxer.KindOf(err), err, "the command that leads to the sandbox was given up")
	case err != nil:
		return sandboxer.E(sandboxer.Unavailable, err, "the command that leads to the sandbox failed%s", said)
	case exit.Code != 0 && noProcess(before+"\n"+errs):
		kind := sandboxer.Exhausted
		if began { // and may have brought a call there
			kind = sandboxer.Unavailable
		}
		return sandboxer.E(kind, nil, "the sandbox seems to have no room for the process that leads to its agent, within its limit of processes%s", said).
			WithHint("end processes inside, or give the next sandbox a higher limit (limits: pids)")
	case !began && (exit.Code == 126 || exit.Code == 127 || exit.Code != 0 && cannotRun(before+"\n"+errs)):
		return sandboxer.E(sandboxer.Unsupported, nil, "the program that leads to the sandbox cannot run there (%d)%s", exit.Code, said)
	case exit.Code != 0:
		return sandboxer.E(sandboxer.Unavailable, nil, "the command that leads to the sandbox ended with %d%s", exit.Code, said)
	case !began:
		return sandboxer.E(sandboxer.Unavailable, nil, "the command that leads to the sandbox ended without a connection%s", said)
	}
	return nil
}

// noProcess reports whether our program, or an engine's, says that it got no process or thread inside.
// A lock or a socket that is busy has the same words as a limit that is reached.
func noProcess(said string) bool {
	for line := range strings.Lines(strings.ToLower(said)) {
		has := func(words ...string) bool {
			return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(line, w) })
		}
		if has("failed to create new os thread", "pthread_create failed", "newosproc", "container process: read init-p") || // the last one of an engine's program inside
			has("resource temporarily unavailable") && has("fork", "clone", "start container process") && !has("connect") {
			return true
		}
	}
	return false
}

func (w *markedWriter) noMark() error {
	return sandboxer.E(sandboxer.Unavailable, nil, "the command that leads to the sandbox says too much that is no connection%s", saying(w.before()))
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// cannotRun reports whether an engine says that a program is not there, or of another platform.
// What the program itself says begins with its name.
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

// A commandConn is a connection by way of a command.
type commandConn struct {
	net.Conn              // what the command says
	feed     net.Conn     // what it hears
	frames   *frameWriter // to feed, if it hears frames
	closed   atomic.Bool  // for what it hears, by the caller
	end      context.CancelFunc
	done     chan struct{} // closed when the command has ended,
	code     int           // with these
	err      error
}

func (c *commandConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) && c.err != nil { // written before that end
		err = c.err
	}
	return n, err
}

// Write takes what a command that ended well has not heard, as a connection does that nobody has reset yet: else what
// the command said before that would be lost on who still writes.
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

// CloseWrite ends what the command hears.
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

// A markedWriter passes on what comes after the Mark. What comes before it is kept.
type markedWriter struct {
	to     io.Writer
	marked chan struct{} // closed with the mark
	full   chan struct{} // closed when too much has come without one

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

// A keptWriter keeps the first of what is written, and takes the rest.
type keptWriter struct {
	mu   sync.Mutex
	kept []byte
}

func (w *keptWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.kept = append(w.kept, p[:min(len(p), maxBeforeMark-len(w.kept))]...)
	return len(p), nil
}

func (w *keptWriter) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.kept)
}
