package backend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// call makes one call of the extension: it applies the deadline, classifies the error and
// reports the call. The extension is expected to stop when ctx ends; if it does not, the call is
// abandoned.
func call[T any](ctx context.Context, b *Backend, op string, limit time.Duration, f func(context.Context) (T, error)) (out T, err error) {
	if err := ctx.Err(); err != nil { // a call with a done ctx changes nothing
		return out, sandboxer.E(sandboxer.KindOf(err), err, "%s was canceled before it began", op)
	}
	start := time.Now()
	if err := b.accept(op); err != nil {
		b.observe(op, err, start)
		return out, err
	}
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, errDeadline)
		defer cancel()
	}
	type answer struct {
		out      T
		err      error
		panicked string
	}
	ended := make(chan answer, 1)
	var left atomic.Int32 // which is first: the end of the call, or its abandonment
	go func() {
		a := answer{err: errors.New("the extension ended its goroutine without returning")}
		defer func() {
			if p := recover(); p != nil {
				a.panicked = fmt.Sprintf("%v\n%s", p, debug.Stack())
			}
			ended <- a
			if !left.CompareAndSwap(0, 1) {
				b.abandon(op, -1)
				if c, ok := any(a.out).(io.Closer); ok && a.err == nil && c != nil {
					_ = c.Close()
				}
			}
		}()
		a.out, a.err = f(ctx)
	}()
	var a answer
	select {
	case a = <-ended:
	case <-ctx.Done():
		linger := time.NewTimer(b.opts.Linger)
		select {
		case a = <-ended:
		case <-linger.C:
			if left.CompareAndSwap(0, 1) {
				b.abandon(op, 1)
				kind := sandboxer.KindOf(ctx.Err())
				a.err = sandboxer.E(kind, context.Cause(ctx), "%s: %s did not stop when it was canceled; the broker stopped waiting for it after %s", b.id, op, b.opts.Linger).
					WithHint("the machine or engine behind it may hang: look at %s", b.id)
				b.observe(op, a.err, start)
				return out, a.err
			}
			a = <-ended // just now
		}
		linger.Stop()
	}
	if a.panicked != "" {
		panic(a.panicked)
	}
	if a.err != nil {
		a.err = b.discreet(ctx, op, b.classify(ctx, op, limit, a.err))
	}
	b.observe(op, a.err, start)
	return a.out, a.err
}

// do is call for methods without a result.
func do(ctx context.Context, b *Backend, op string, limit time.Duration, f func(context.Context) error) error {
	_, err := call(ctx, b, op, limit, func(ctx context.Context) (struct{}, error) { return struct{}{}, f(ctx) })
	return err
}

// list is call for methods that yield values one after the other.
func list[T any](ctx context.Context, b *Backend, op string, limit time.Duration, f func(context.Context) iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		items, more, enough := make(chan T), make(chan struct{}), make(chan struct{})
		stop := sync.OnceFunc(func() { close(enough) })
		defer stop()
		over := make(chan error, 1)
		go func() {
			over <- do(ctx, b, op, limit, func(ctx context.Context) error {
				for v, err := range f(ctx) {
					if err != nil {
						return err
					}
					select {
					case items <- v:
					case <-enough:
						return nil
					}
					select {
					case <-more:
					case <-enough:
						return nil
					}
				}
				return nil
			})
		}()
		for {
			select {
			case v := <-items:
				if !yield(v, nil) {
					stop()
					select {
					case <-over:
					case <-time.After(100 * time.Millisecond): // it looks for the next one
						cancel()
						<-over
					}
					return
				}
				more <- struct{}{}
			case err := <-over:
				if err != nil {
					var none T
					yield(none, err)
				}
				return
			}
		}
	}
}

func failed[T any](err error) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		yield(none, err)
	}
}

// accept refuses a call of an extension that has too many abandoned calls.
func (b *Backend) accept(op string) error {
	most := int64(b.opts.MaxAbandoned)
	if op == "teardown" || op == "probe" {
		most *= 4
	}
	if n := b.abandoned.Load(); n >= most {
		e := sandboxer.E(sandboxer.Unavailable, nil, "%s has %d hung calls, and gets no more calls until some of them end", b.id, n).
			WithHint("the machine or engine behind it may hang: look at %s", b.id)
		e.RetryAfter = b.opts.Linger
		return e
	}
	return nil
}

func (b *Backend) abandon(op string, change int) {
	b.abandoned.Add(int64(change))
	if b.opts.Abandoned != nil {
		b.opts.Abandoned(b.id, op, change)
	}
}

func (b *Backend) observe(op string, err error, start time.Time) {
	if b.opts.Observe != nil {
		b.opts.Observe(b.id, op, sandboxer.KindOf(err), time.Since(start))
	}
}

// A gate keeps an abandoned call from the readers and writers of its caller.
type gate struct {
	over atomic.Bool
	mu   sync.RWMutex // held for reading by writes in progress
}

var errLeftBehind = errors.New("the caller no longer waits for the call")

// shut ends the use of what went through the gate. It waits for a write in progress, but not
// for long: the writer must end it.
func (g *gate) shut() {
	g.over.Store(true)
	if g.mu.TryLock() {
		g.mu.Unlock()
		return
	}
	written := make(chan struct{})
	go func() {
		g.mu.Lock() // when no write is in progress any more
		close(written)
		g.mu.Unlock()
	}()
	select {
	case <-written:
	case <-time.After(time.Second):
	}
}

func (g *gate) writer(w io.Writer) io.Writer {
	if w == nil {
		return nil
	}
	return gatedWriter{g, w}
}

func (g *gate) reader(r io.Reader) io.Reader {
	if r == nil {
		return nil
	}
	return gatedReader{g, r}
}

// begin makes a writer, unless it is too late for that.
func (g *gate) begin(f func() io.Writer) io.Writer {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if g.over.Load() {
		return g.writer(io.Discard)
	}
	return g.writer(f())
}

type gatedWriter struct {
	g *gate
	w io.Writer
}

func (w gatedWriter) Write(p []byte) (int, error) {
	w.g.mu.RLock()
	defer w.g.mu.RUnlock()
	if w.g.over.Load() {
		return 0, errLeftBehind
	}
	return w.w.Write(p)
}

type gatedReader struct {
	g *gate
	r io.Reader
}

// Read does not wait for a read in progress: it may never end.
func (r gatedReader) Read(p []byte) (int, error) {
	if r.g.over.Load() {
		return 0, errLeftBehind
	}
	return r.r.Read(p)
}

// whileItMoves returns ctx with a deadline that restarts whenever progress is
// reported: a large image may take long over a slow connection, but must not stall.
func whileItMoves(ctx context.Context, limit time.Duration) (_ context.Context, done func()) {
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(limit, func() { cancel(errDeadline) })
	var mu sync.Mutex
	var last sandboxer.Progress
	ctx = sandboxer.WithProgress(ctx, func(p sandboxer.Progress) {
		mu.Lock()
		moved := p != last
		last = p
		mu.Unlock()
		if moved && ctx.Err() == nil {
			timer.Reset(limit)
		}
		sandboxer.ReportProgress(outer, p)
	})
	return ctx, func() {
		timer.Stop()
		cancel(nil)
	}
}

var errDeadline = errors.New("deadline of the call")

func (b *Backend) classify(ctx context.Context, op string, limit time.Duration, err error) error {
	if errors.Is(err, context.DeadlineExceeded) && context.Cause(ctx) == errDeadline {
		return sandboxer.E(sandboxer.Timeout, err, "%s: %s did not finish within %s", b.id, op, limit)
	}
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		full := sandboxer.E(sandboxer.Exhausted, err, "%s: this server has reached its limit of open files", b.id).
			WithHint("try again later; an operator can raise the limit (LimitNOFILE=, ulimit -n)")
		full.RetryAfter = time.Second
		return full
	}
	var e *sandboxer.Error
	if errors.As(err, &e) {
		return err
	}
	kind := sandboxer.KindOf(err)
	return sandboxer.E(kind, err, "%s: %s failed", b.id, op)
}
