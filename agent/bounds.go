package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

// An agent's answers come from inside its sandbox, where another process may have taken its
// place. So a client bounds all that it reads: what exceeds a bound ends the call with Failed;
// what takes too long ends it with Timeout.
const (
	maxHead      = 64 << 10  // bytes of an answer's head
	maxAnswer    = 64 << 10  // bytes of the body of a plain answer that is no file
	maxReply     = 1 << 20   // bytes of one message of a remote procedure
	maxText      = 1 << 10   // bytes of a message about a failure
	maxHint      = 256       // bytes of a hint about a failure
	maxPage      = 1024      // entries of one page of a listing
	maxPageBytes = 256 << 10 // of names and targets in one page
	maxListed    = 1_000_000 // entries of one listing
	leastMoved   = 64 << 10  // bytes that a transfer moves in the time for progress
)

// patience is how long a client waits for an agent. A stream without an end of its own, such
// as the output of a command, may be silent for as long as its caller wants.
type patience struct {
	answer   time.Duration // for a whole answer, or the beginning of a stream
	remove   time.Duration // for the removal of a tree
	progress time.Duration // for the next leastMoved bytes of a transfer
	kill     time.Duration // for the end of a command that was killed
}

var defaultPatience = patience{answer: time.Minute, remove: 10 * time.Minute, progress: 2 * time.Minute, kill: 10 * time.Second}

var (
	errLate  = errors.New("the agent took too long")
	errLarge = errors.New("the answer is larger than an agent's answer can be")
)

func tooLarge(what string) error {
	return sandboxer.E(sandboxer.Failed, errLarge, "the sandbox's agent answered with more than %s", what).WithHint("the sandbox is broken: create a new one")
}

func unreadable(cause error, what string) error {
	return sandboxer.E(sandboxer.Failed, cause, "the sandbox's agent gave an answer that cannot be read: %s", what).WithHint("the sandbox is broken: create a new one")
}

// within bounds a call with a small answer.
func within(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := after(d, func() { cancel(errLate) })
	return ctx, func() { stop(); cancel(nil) }
}

// after calls f after d of our own running time, unless stop is called first. It counts steps: a
// pause of the machine, or of this process, counts as one step, because no other process could run
// either.
func after(d time.Duration, f func()) (stop func()) {
	left := 16
	step := d / time.Duration(left)
	var mu sync.Mutex
	var t *time.Timer
	mu.Lock()
	defer mu.Unlock()
	t = time.AfterFunc(step, func() {
		mu.Lock()
		defer mu.Unlock()
		switch left--; {
		case left > 0:
			t.Reset(step)
		case left == 0:
			f()
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		left = 0
		t.Stop()
	}
}

// A stillness ends a transfer that makes too little progress: less than leastMoved bytes in d of
// the agent's time.
type stillness struct {
	d time.Duration

	mu    sync.Mutex
	timer *time.Timer
	left  time.Duration // of d, when its turn began
	began time.Time     // of the agent's turn; zero while it is ours
	moved int           // since all of d was left
}

// moving returns a context that ends when the transfer makes no progress for d while it is
// the agent's turn. The agent has the first turn.
func moving(ctx context.Context, d time.Duration) (context.Context, context.CancelCauseFunc, *stillness) {
	ctx, cancel := context.WithCancelCause(ctx)
	return ctx, cancel, &stillness{timer: time.AfterFunc(d, func() { cancel(errLate) }), d: d, left: d, began: time.Now()}
}

// ours ends the agent's turn, in which this many bytes moved.
func (s *stillness) ours(moved int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer.Stop()
	if !s.began.IsZero() {
		s.left -= time.Since(s.began)
		s.began = time.Time{}
	}
	if s.moved += moved; s.moved >= leastMoved {
		s.left, s.moved = s.d, 0
	}
}

func (s *stillness) agents() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.began = time.Now()
	s.timer.Reset(s.left)
}

// A transfer is the body of a streamed answer.
type transfer struct {
	io.ReadCloser
	c      *Client
	ctx    context.Context
	cancel context.CancelCauseFunc
	still  *stillness
}

func (t *transfer) Read(p []byte) (int, error) {
	t.still.agents()
	n, err := t.ReadCloser.Read(p)
	t.still.ours(n)
	if err != nil && err != io.EOF {
		err = t.c.transportError(t.ctx, err)
	}
	return n, err
}

func (t *transfer) Close() error {
	t.still.ours(0)
	defer t.cancel(nil)
	return t.ReadCloser.Close()
}

// readAnswer reads a small body whole.
func readAnswer(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxAnswer+1))
	if len(b) > maxAnswer {
		return nil, tooLarge("64 KiB")
	}
	return b, err
}

// noRedirect follows no redirect: a sandbox must not choose where the broker sends
// requests.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// headLimit reads the head of an answer from a raw connection.
type headLimit struct {
	r    io.Reader
	left int
}

func (h *headLimit) Read(p []byte) (int, error) {
	if h.left <= 0 {
		return 0, tooLarge("64 KiB of head")
	}
	n, err := h.r.Read(p[:min(len(p), h.left)])
	h.left -= n
	return n, err
}

// text makes an agent's failure message safe to show.
func text(s string) string { return capture.Text(s, maxText) }

// failure makes an error of an agent's message: with the kind and hint of its header if they are
// there, else of the given kind. An agent cannot use kinds that only the broker can judge.
func (c *Client) failure(kind sandboxer.Kind, header http.Header, message string) error {
	if said := sandboxer.Kind(header.Get(kindHeader)); slices.Contains(sandboxer.Kinds(), said) {
		kind = said
	}
	switch {
	case kind == sandboxer.NoCredit, kind == sandboxer.Internal, kind == sandboxer.Unauthenticated && c.opts.Token == "" && c.owned != nil:
		kind = sandboxer.Failed
	}
	e := sandboxer.E(kind, nil, "%s", text(message))
	// The hint is one line. One that our agent would not write is dropped.
	if hint, err := url.PathUnescape(header.Get(hintHeader)); err == nil && hint != "" {
		hint = strings.Join(strings.Fields(text(hint)), " ")
		if len(hint) <= maxHint+len("…") {
			return e.WithHint("%s", hint)
		}
	}
	return e
}

// A message is the body of an answer that is one message. One that is too long fails at
// once; connect would first read all of it.
type message struct {
	io.ReadCloser
	left int
}

func (m *message) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	if m.left -= n; m.left < 0 {
		return 0, tooLarge("1 MiB in one message")
	}
	return n, err
}

// envelopes is the body of a stream of messages, each with its length in front. One that is
// too long also fails at once.
type envelopes struct {
	io.ReadCloser
	head [5]byte
	n    int    // of head
	left uint32 // of the message
	last bool   // it is the last, according to its head
}

// endStream is the flag of the last message of a stream.
const endStream = 0b10

// Close reads a stream that has ended to the last byte: HTTP reuses only connections that were
// read to their end. The context of the call bounds that.
func (e *envelopes) Close() error {
	if e.last && e.left == 0 {
		_, _ = e.ReadCloser.Read(e.head[:1])
	}
	return e.ReadCloser.Close()
}

func (e *envelopes) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	for b := p[:n]; len(b) > 0; {
		if e.left > 0 {
			k := min(uint32(len(b)), e.left)
			e.left -= k
			b = b[k:]
			continue
		}
		k := copy(e.head[e.n:], b)
		e.n += k
		b = b[k:]
		if e.n == len(e.head) {
			e.n, e.left, e.last = 0, binary.BigEndian.Uint32(e.head[1:]), e.head[0]&endStream != 0
			if e.left > maxReply {
				return 0, tooLarge("1 MiB in one message")
			}
		}
	}
	return n, err
}

// broke reports whether err comes from the connection, or has a Kind already.
func broke(err error) bool {
	var ne net.Error
	var no syscall.Errno
	var se *sandboxer.Error
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) ||
		errors.As(err, &ne) || errors.As(err, &no) || errors.As(err, &se)
}
