package protocol

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// Options of a Conn.
type Options struct {
	// Serve handles requests of the other side; nil refuses everything. It may take as
	// long as it needs and is called in goroutines of its own.
	Serve func(ctx context.Context, r *Request) (any, error)
	// Trace adds the origin of internal errors to answers: this side is the extension, and the other one has the log.
	Trace bool
	// MaxServed bounds requests of the other side under way; further ones are answered
	// with Exhausted. Default 8.
	MaxServed int
	// MaxAsked bounds requests of this side under way; further calls wait. Default 8. Those with a
	// stream, which may last, never take the last quarter: short ones get through.
	MaxAsked int
	// Hide, if set, filters all texts for people from the other side: errors, progress, and log lines.
	Hide func(string) string
	// Log gets what the other side logs; nil discards it.
	Log func(level slog.Level, msg string, attrs map[string]string)
	// Unanswered is called when a cancelled request was not answered within CancelTime; may be nil.
	Unanswered func(method string)
}

// A Request is a request of the other side.
type Request struct {
	Method string
	Params json.RawMessage
	Token  string // of its stream; "" if it has none
}

// Decode reads the params into v, a pointer to a struct.
func (r *Request) Decode(v any) error {
	params := r.Params
	if len(params) == 0 {
		params = json.RawMessage("{}")
	}
	if _, err := strictjson.DecodeStored(params, v); err != nil {
		return sandboxer.E(sandboxer.Invalid, nil, "the params of %s cannot be read: %s", r.Method, err)
	}
	return nil
}

// A Conn is a control connection. Its methods may be called from several goroutines.
type Conn struct {
	opts Options
	r    *bufio.Reader
	rest chan []byte     // what could not be written at once
	turn chan struct{}   // held by the writer
	raw  syscall.RawConn // of what is written to; nil if it is no file

	mu      sync.Mutex
	last    uint64
	asked   map[uint64]*asked             // requests of ours under way
	serving map[uint64]context.CancelFunc // and of the other side
	slots   chan struct{}                 // one for each request of ours
	lasting chan struct{}                 // and for each of those with a stream
	busy    chan struct{}                 // and for each of the other side whose answer was not taken
	served  sync.WaitGroup                // what Serve does
	err     error                         // why it ended; set before done is closed
	done    chan struct{}
	end     sync.Once
}

type asked struct {
	answer   chan line // of one
	progress func(sandboxer.Progress)
}

// New returns the connection that reads from r and writes to w, after the hellos. Run reads it; writing
// goes on until it has ended. The caller closes r and w.
func New(r *bufio.Reader, w io.Writer, opts Options) *Conn {
	if opts.MaxServed == 0 {
		opts.MaxServed = 8
	}
	if opts.MaxAsked == 0 {
		opts.MaxAsked = 8
	}
	c := &Conn{
		opts: opts, r: r, rest: make(chan []byte, 1), turn: make(chan struct{}, 1),
		asked: map[uint64]*asked{}, serving: map[uint64]context.CancelFunc{},
		slots: make(chan struct{}, opts.MaxAsked), lasting: make(chan struct{}, max(opts.MaxAsked-opts.MaxAsked/4, 1)),
		busy: make(chan struct{}, 4*opts.MaxServed), done: make(chan struct{}),
	}
	if f, ok := w.(syscall.Conn); ok {
		c.raw, _ = f.SyscallConn()
	}
	go c.write(w)
	return c
}

// NewReader returns a reader for New, ReadHello and the token of a stream.
func NewReader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, 64<<10) }

// WriteHello sends the first line.
func WriteHello(w io.Writer, h Hello) error {
	data, err := encode(line{Hello: &h})
	if err == nil {
		_, err = w.Write(data)
	}
	return err
}

// ReadHello reads the first line of the other side. Kind: Invalid if it is not a hello.
func ReadHello(r *bufio.Reader) (*Hello, error) {
	data, err := readLine(r)
	if err != nil {
		return nil, err
	}
	l, err := parse(data)
	if err == nil && l.Hello == nil {
		err = errors.New("it is no hello")
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the first line does not belong to the extension protocol: %s", err)
	}
	return l.Hello, nil
}

// write writes what could not be written at once, and keeps its turn until then.
func (c *Conn) write(w io.Writer) {
	for {
		select {
		case data := <-c.rest:
			if _, err := w.Write(data); err != nil {
				c.fail(err)
				return
			}
			<-c.turn
		case <-c.done:
			return
		}
	}
}

// put writes data, or leaves the part that does not go out at once to write: the caller must not wait for a
// peer that does not read. sent is false if ctx or the connection has ended before.
func (c *Conn) put(ctx context.Context, data []byte) (sent bool) {
	select {
	case c.turn <- struct{}{}:
	case <-c.done:
		return false
	case <-ctx.Done():
		return false
	}
	if c.raw != nil {
		_ = c.raw.Write(func(fd uintptr) bool {
			n, err := unix.Write(int(fd), data)
			if err == nil && n > 0 {
				data = data[n:]
			}
			return true // what is wrong, write finds too
		})
		if len(data) == 0 {
			<-c.turn
			return true
		}
	}
	c.rest <- data
	return true
}

// send gives l to the writer, which may have to wait until the other side reads.
func (c *Conn) send(ctx context.Context, l line) error {
	data, err := encode(l)
	if err != nil {
		return err
	}
	if c.put(ctx, data) {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return c.err
}

// fail ends the connection.
func (c *Conn) fail(err error) {
	c.end.Do(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.err = err
		for _, cancel := range c.serving {
			cancel()
		}
		close(c.done)
	})
}

// Close ends the connection: its calls fail, requests of the other side are cancelled. Its reader and
// writer are not closed.
func (c *Conn) Close() { c.fail(errClosed) }

var errClosed = errors.New("the connection was closed")

// Done is closed when the connection has ended; Err says why then.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err returns why the connection has ended; io.EOF if the other side ended it properly.
func (c *Conn) Err() error {
	select {
	case <-c.done:
		return c.err
	default:
		return nil
	}
}

// Run reads until the connection ends, and returns why. It is called once.
func (c *Conn) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan struct{})
	go c.read(ctx, ended)
	<-ended
	return c.err
}

// read reads until the other side makes a request. It handles the request itself while another goroutine reads
// on: to wake one for that takes longer than most requests. The one that reads last closes ended.
func (c *Conn) read(ctx context.Context, ended chan<- struct{}) {
	var serve func()
	for serve == nil {
		var err error
		if serve, err = c.next(ctx); err != nil {
			c.fail(err)
			close(ended)
			return
		}
	}
	go c.read(ctx, ended)
	serve()
}

// next reads one line and handles it; a request is begun, and serve completes it.
func (c *Conn) next(ctx context.Context) (serve func(), err error) {
	select {
	case <-c.done:
		return nil, c.err
	default:
	}
	data, err := readLine(c.r)
	if err != nil {
		return nil, err
	}
	l, err := parse(data)
	switch {
	case err != nil:
		return nil, fmt.Errorf("a line does not belong to the extension protocol: %w", err)
	case l.Hello != nil:
		return nil, errors.New("a hello comes a second time")
	case l.Method == "":
		c.answered(l)
	case l.ID == 0:
		c.notified(l)
	default:
		return c.serve(ctx, l)
	}
	return nil, nil
}

func (c *Conn) answered(l line) {
	c.mu.Lock()
	a := c.asked[l.ID]
	delete(c.asked, l.ID)
	c.mu.Unlock()
	if a != nil {
		a.answer <- l
	}
}

// The notifications.
const (
	notifyCancel   = "cancel"
	notifyProgress = "progress"
	notifyLog      = "log"
)

type cancelParams struct {
	ID uint64 `json:"id"`
}

type progressParams struct {
	ID    uint64 `json:"id"`
	Step  string `json:"step,omitempty"`
	Done  int64  `json:"done,omitempty"`
	Total int64  `json:"total,omitempty"`
}

type logParams struct {
	Level   string            `json:"level,omitempty"`
	Message string            `json:"message"`
	Attrs   map[string]string `json:"attrs,omitempty"`
}

// maxAttrs bounds the attributes of a log line that are kept.
const maxAttrs = 32

// notified handles a notification. Unreadable or unknown ones are ignored.
func (c *Conn) notified(l line) {
	switch l.Method {
	case notifyCancel:
		var p cancelParams
		if _, err := strictjson.DecodeStored(l.Params, &p); err != nil {
			return
		}
		c.mu.Lock()
		cancel := c.serving[p.ID]
		c.mu.Unlock()
		if cancel != nil {
			cancel()
		}
	case notifyProgress:
		var p progressParams
		if _, err := strictjson.DecodeStored(l.Params, &p); err != nil {
			return
		}
		c.mu.Lock()
		a := c.asked[p.ID]
		c.mu.Unlock()
		if a != nil && a.progress != nil {
			a.progress(sandboxer.Progress{Step: hidden(c.opts.Hide)(p.Step), Done: max(p.Done, 0), Total: max(p.Total, 0)})
		}
	case notifyLog:
		var p logParams
		if _, err := strictjson.DecodeStored(l.Params, &p); err != nil || c.opts.Log == nil {
			return
		}
		level := slog.LevelInfo
		_ = level.UnmarshalText([]byte(p.Level))
		cut, attrs := hidden(c.opts.Hide), map[string]string{}
		for k, v := range p.Attrs {
			if len(attrs) < maxAttrs {
				attrs[cut(k)] = cut(v)
			}
		}
		c.opts.Log(level, cut(p.Message), attrs)
	}
}

// serve begins a request of the other side; rest does it and answers.
func (c *Conn) serve(ctx context.Context, l line) (rest func(), err error) {
	c.mu.Lock()
	if _, twice := c.serving[l.ID]; twice {
		c.mu.Unlock()
		return nil, fmt.Errorf("the request %d comes a second time", l.ID)
	}
	full := len(c.serving) >= c.opts.MaxServed
	var cancel context.CancelFunc
	if !full {
		if l.TimeoutMS > 0 {
			ctx, cancel = context.WithTimeout(ctx, time.Duration(min(l.TimeoutMS, maxTimeoutMS))*time.Millisecond)
		} else {
			ctx, cancel = context.WithCancel(ctx)
		}
		ctx = sandboxer.WithProgress(ctx, func(p sandboxer.Progress) {
			params, err := json.Marshal(progressParams{l.ID, cut(p.Step), p.Done, p.Total})
			if err == nil {
				_ = c.send(ctx, line{Method: notifyProgress, Params: params})
			}
		})
		c.serving[l.ID] = cancel
	}
	c.mu.Unlock()
	if err := c.take(); err != nil {
		if cancel != nil {
			cancel()
		}
		return nil, err
	}
	if full {
		return func() {
			defer func() { <-c.busy }()
			e := sandboxer.E(sandboxer.Exhausted, nil, "%d requests are under way already", c.opts.MaxServed)
			_ = c.send(context.Background(), line{ID: l.ID, Error: ErrorOf(e)})
		}, nil
	}
	c.served.Add(1)
	return func() {
		defer c.served.Done()
		defer func() { <-c.busy }()
		defer cancel()
		r := &Request{Method: l.Method, Params: l.Params, Token: l.Stream}
		var result any
		err := error(sandboxer.E(sandboxer.Unsupported, nil, "%.64q is not a method of this side", l.Method))
		if c.opts.Serve != nil {
			result, err = c.opts.Serve(ctx, r)
		}
		answer := line{ID: l.ID}
		if err == nil {
			answer.Result, err = marshal(result)
		}
		if err != nil {
			answer.Result, answer.Error = nil, travels(err, c.opts.Trace)
		}
		c.mu.Lock()
		delete(c.serving, l.ID)
		c.mu.Unlock()
		if err := c.send(context.Background(), answer); err != nil && answer.Error == nil {
			err = sandboxer.E(sandboxer.Internal, nil, "the answer to %.64q cannot be sent: %s", l.Method, sandboxer.Message(err))
			_ = c.send(context.Background(), line{ID: l.ID, Error: ErrorOf(err)}) // it was too long
		}
	}, nil
}

// take waits a while until there is room for one more answer: a peer that asks and does not read must not fill the memory.
func (c *Conn) take() error {
	select {
	case c.busy <- struct{}{}:
		return nil
	default:
	}
	timer := time.NewTimer(CancelTime)
	defer timer.Stop()
	select {
	case c.busy <- struct{}{}:
		return nil
	case <-c.done:
		return c.err
	case <-timer.C:
		return errors.New("it sends requests, and does not read the answers")
	}
}

// Wait returns when nothing is served any more, after the end of the connection.
func (c *Conn) Wait() { c.served.Wait() }

// maxTimeoutMS bounds a deadline.
const maxTimeoutMS = int64(1000 * time.Hour / time.Millisecond)

func marshal(v any) (json.RawMessage, error) {
	if v == nil {
		return json.RawMessage("{}"), nil
	}
	return json.Marshal(v)
}

// Call makes a request and waits for the answer, which it decodes into result if that is not nil.
// token names the stream of the request, if it has one. The deadline of ctx is sent along. Cancelling ctx cancels
// the request, and Call returns when that is answered or CancelTime is over. Progress goes to the progress of ctx.
// Kinds: those of the other side; Unavailable when the connection ends, Internal when the answer cannot be read.
func (c *Conn) Call(ctx context.Context, method string, params, result any, token string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p, err := marshal(params)
	if err != nil {
		return sandboxer.E(sandboxer.Invalid, err, "the params of %s cannot be written as JSON", method)
	}
	l := line{Method: method, Params: p, Stream: token}
	if deadline, ok := ctx.Deadline(); ok {
		l.TimeoutMS = max(time.Until(deadline).Milliseconds(), 1)
	}
	if token != "" {
		select {
		case c.lasting <- struct{}{}:
			defer func() { <-c.lasting }()
		case <-c.done:
			return c.ended(method)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-c.done:
		return c.ended(method)
	case <-ctx.Done():
		return ctx.Err()
	}
	var over atomic.Bool // no progress after the end
	a := &asked{answer: make(chan line, 1), progress: func(p sandboxer.Progress) {
		if !over.Load() {
			sandboxer.ReportProgress(ctx, p)
		}
	}}
	defer over.Store(true)
	c.mu.Lock()
	c.last++
	l.ID = c.last
	c.asked[l.ID] = a
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.asked, l.ID)
		c.mu.Unlock()
	}()
	data, err := encode(l)
	if err != nil {
		return err
	}
	if !c.put(ctx, data) {
		if ctx.Err() == nil {
			return c.ended(method)
		}
		go c.cancel(l.ID, method) // nothing was asked; this tells whether the other side reads at all
		return ctx.Err()
	}
	var late <-chan time.Time
	gone := ctx.Done()
	for {
		select {
		case answer := <-a.answer:
			return decode(ctx, method, answer, result, c.opts.Hide)
		case <-c.done:
			select {
			case answer := <-a.answer: // it came before the end
				return decode(ctx, method, answer, result, c.opts.Hide)
			default:
			}
			return c.ended(method)
		case <-gone:
			gone = nil
			timer := time.NewTimer(CancelTime)
			defer timer.Stop()
			late = timer.C
			go c.cancel(l.ID, method)
		case <-late:
			if c.opts.Unanswered != nil {
				c.opts.Unanswered(method)
			}
			return ctx.Err()
		}
	}
}

// cancel cancels the request id at the other side, if that reads within CancelTime.
func (c *Conn) cancel(id uint64, method string) {
	params, _ := json.Marshal(cancelParams{id})
	ctx, stop := context.WithTimeout(context.Background(), CancelTime)
	defer stop()
	if err := c.send(ctx, line{Method: notifyCancel, Params: params}); err != nil && ctx.Err() != nil && c.opts.Unanswered != nil {
		c.opts.Unanswered(method)
	}
}

func (c *Conn) ended(method string) error {
	err := c.err
	if errors.Is(err, io.EOF) {
		err = nil // it says nothing
	}
	return sandboxer.E(sandboxer.Unavailable, err, "the extension's process ended during %s", method)
}

func decode(ctx context.Context, method string, l line, result any, hide func(string) string) error {
	if l.Error != nil {
		err := l.Error.Err(hide)
		if sandboxer.KindOf(err) == sandboxer.Canceled && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			// The other side noticed the deadline before our own clock did.
			return sandboxer.E(sandboxer.Timeout, ctx.Err(), "%s", sandboxer.Message(err))
		}
		return err
	}
	if result == nil {
		return nil
	}
	if _, err := strictjson.DecodeStored(l.Result, result); err != nil {
		return sandboxer.E(sandboxer.Internal, err, "the extension's answer to %s cannot be read", method)
	}
	return nil
}

// Log sends a line for the other side's log. It waits for the other side to read, but not beyond ctx.
func (c *Conn) Log(ctx context.Context, level slog.Level, msg string, attrs map[string]string) {
	short := make(map[string]string, min(len(attrs), maxAttrs))
	for k, v := range attrs {
		if len(short) < maxAttrs {
			short[cut(k)] = cut(v)
		}
	}
	params, err := json.Marshal(logParams{level.String(), cut(msg), short})
	if err == nil {
		_ = c.send(ctx, line{Method: notifyLog, Params: params})
	}
}
