package engine

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

const (
	// WatchEvery is how often an engine that a call waits for, and that is silent, is
	// asked whether it is there, and how long it may take to answer that.
	WatchEvery = 5 * time.Second
	// watchMisses is how many times in a row it must fail to answer before calls that need it
	// end. It is more than one because the host, or the broker, may have been paused.
	watchMisses = 3
	// recheckTime is how long a call waits for a sign of an engine that did not answer.
	recheckTime = 2 * time.Second
	// maxOwed bounds the work that waits for an engine; every sandbox is ended sooner or later anyway.
	maxOwed = 1024
)

// ErrHangs is the cause of errors that say that an engine does not answer, although its host does.
var ErrHangs = errors.New("the engine hangs")

// A Watch watches an engine while calls that need it are under way, so that they end when
// it hangs. The duration of a call proves nothing: an engine may have an image of gigabytes to
// unpack. The Host watches the host itself. Podman has no process that could hang, and is not
// watched: the methods of a nil Watch do nothing.
type Watch struct {
	o    WatchOptions
	hung error // why calls end
	log  *slog.Logger

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup // work for callers that do not wait

	mu       sync.Mutex
	calls    map[*call]struct{}
	timer    *time.Timer // nil while there are no calls
	checking chan struct{}
	checked  error     // what came of the last check
	answered time.Time // its last answer, of any kind
	missed   int
	since    time.Time // it does not answer; zero while it does
	owed     []func(context.Context) error
}

// WatchOptions are about one engine.
type WatchOptions struct {
	Program string
	Env     map[string]string
	Name    string               // of the host
	Host    func() (Host, error) // where the program runs now
	Every   time.Duration        // 0 means WatchEvery
	Log     *slog.Logger         // nil for none
}

// NewWatch returns a watch that has nothing to do yet. Its own work in the background ends with ctx.
func NewWatch(ctx context.Context, o WatchOptions) *Watch {
	if o.Every == 0 {
		o.Every = WatchEvery
	}
	w := &Watch{o: o, log: logger(o.Log, o.Name)}
	w.hung = sandboxer.E(sandboxer.Unavailable, ErrHangs, "the engine (%s) on host %s does not answer", o.Program, o.Name).
		WithHint("the server tries again, and what runs there continues to run; check the engine on that host: %s info", o.Program)
	w.ctx, w.cancel = context.WithCancel(ctx)
	return w
}

// Close cancels owed work that is under way, and waits until that has ended.
func (w *Watch) Close() {
	w.mu.Lock() // nothing begins any more
	w.cancel()
	w.mu.Unlock()
	w.work.Wait()
}

// A call is one under way that needs the engine.
type call struct {
	ctx    context.Context // what it came with
	cancel context.CancelCauseFunc
}

// Attend returns ctx that also ends when the engine does not answer. done must be called with the
// error of the call, and returns the error for the caller: in that case one with
// ErrHangs as its cause.
func (w *Watch) Attend(ctx context.Context) (_ context.Context, done func(error) error, err error) {
	if w == nil {
		return ctx, func(err error) error { return err }, nil
	}
	if err := w.Recheck(ctx); err != nil {
		return nil, nil, err
	}
	c := &call{ctx: ctx}
	within, cancel := context.WithCancelCause(ctx)
	c.cancel = cancel
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.calls == nil {
		w.calls = map[*call]struct{}{}
	}
	w.calls[c] = struct{}{}
	if w.timer == nil {
		w.missed = 0
		w.timer = time.AfterFunc(w.o.Every, w.tick)
	}
	return within, func(err error) error {
		w.mu.Lock()
		delete(w.calls, c)
		w.mu.Unlock()
		if err != nil && context.Cause(within) == w.hung {
			err = w.hung
		}
		cancel(nil)
		return err
	}, nil
}

// Recheck fails if the engine did not answer before and still does not.
func (w *Watch) Recheck(ctx context.Context) error {
	if w.Hangs() {
		if err := w.check(ctx, min(recheckTime, w.o.Every)); err == w.hung {
			return err
		}
	}
	return nil
}

// Hangs reports whether the engine failed to answer.
func (w *Watch) Hangs() bool {
	if w == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.since.IsZero()
}

// Answered notes that the engine answered something.
func (w *Watch) Answered() {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.answered, w.missed = time.Now(), 0
	again := !w.since.IsZero()
	w.since = time.Time{}
	owed := w.owed
	w.owed = nil
	w.mu.Unlock()
	if again {
		w.log.Info("an engine answers again")
	}
	if len(owed) > 0 {
		w.do(owed)
	}
}

// Hung notes that the engine did not answer in time, and returns the error that says so.
func (w *Watch) Hung() error {
	w.mu.Lock()
	first := w.since.IsZero()
	if first {
		w.since = time.Now()
	}
	w.mu.Unlock()
	if first {
		w.warn()
	}
	return w.hung
}

func (w *Watch) warn() { w.log.Warn("an engine does not answer; calls that need it fail") }

// Owe has f called once the engine answers again. f gets 10 seconds.
func (w *Watch) Owe(f func(context.Context) error) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.owed) >= maxOwed {
		w.owed = w.owed[1:]
	}
	w.owed = append(w.owed, f)
}

// do does the owed work.
func (w *Watch) do(owed []func(context.Context) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ctx.Err() != nil {
		return
	}
	w.work.Go(func() {
		for _, f := range owed {
			ctx, cancel := context.WithTimeout(w.ctx, killTime)
			err := f(ctx)
			cancel()
			switch {
			case err == nil:
			case w.Hangs():
				w.Owe(f)
			case w.ctx.Err() == nil:
				w.log.Warn("cleanup that waited for an engine to answer failed", "err", err)
			}
		}
	})
}

// answering exits with 0 if the engine $1 answers within $2 seconds, with 124 if it does
// not. "The engine is not there" is an answer, too.
const answering = `
"$1" version >/dev/null 2>&1 & p=$!
i=0
while kill -0 $p 2>/dev/null; do
	[ $i -lt $(($2*10)) ] || { kill -KILL $p; exit 124; }
	if sleep 0.1 2>/dev/null; then i=$((i+1)); else sleep 1; i=$((i+10)); fi
done
exit 0`

// ask asks the engine whether it is there. w.hung: according to its host, it does not answer;
// any other error says nothing about the engine.
func (w *Watch) ask(ctx context.Context) error {
	h, err := w.o.Host()
	if err != nil {
		return err
	}
	exit, err := h.Ask(ctx, sshrun.Cmd{Script: answering, Args: []string{w.o.Program, strconv.Itoa(max(1, int(w.o.Every/time.Second)))}, Env: w.o.Env})
	if err == nil && exit.Code == 124 {
		err = w.hung
	}
	return err
}

// check asks the engine whether it is there, once for all concurrent callers, and waits for
// an answer as long as limit.
func (w *Watch) check(ctx context.Context, limit time.Duration) error {
	w.mu.Lock()
	ch := w.checking
	if ch == nil {
		ch = make(chan struct{})
		w.checking = ch
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 3*w.o.Every)
			defer cancel()
			err := w.ask(ctx)
			if err == nil {
				w.Answered()
			}
			w.mu.Lock()
			w.checking, w.checked = nil, err
			w.mu.Unlock()
			close(ch)
		}()
	}
	w.mu.Unlock()
	begun := time.Now()
	over := time.NewTimer(limit)
	defer over.Stop()
	select {
	case <-ch:
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.checked
	case <-ctx.Done():
		return ctx.Err()
	case <-over.C:
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.answered.Before(begun) {
		return w.hung
	}
	return nil
}

// tick looks after the calls under way.
func (w *Watch) tick() {
	w.mu.Lock()
	if len(w.calls) == 0 {
		w.timer = nil
		w.mu.Unlock()
		return
	}
	quiet := time.Since(w.answered)
	w.mu.Unlock()
	var err error
	if quiet > w.o.Every/2 {
		err = w.check(context.Background(), 4*w.o.Every) // it has its own end
	}
	if first := w.tell(err); first {
		w.warn()
	}
}

// tell passes the result of asking the engine to the calls under way. first: they are the
// first that end because it did not answer.
func (w *Watch) tell(err error) (first bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Reset(w.o.Every)
	switch {
	case err != w.hung:
		return false
	case time.Since(w.answered) < w.o.Every:
		return false
	}
	w.timer.Reset(w.o.Every / 100) // the rest of the time went by while it was asked
	w.missed++
	for c := range w.calls {
		if w.missed >= watchMisses {
			c.cancel(w.hung)
		} else {
			sandboxer.ReportProgress(c.ctx, sandboxer.Progress{Step: "waiting: " + sandboxer.Message(w.hung)})
		}
	}
	if w.missed < watchMisses || !w.since.IsZero() {
		return false
	}
	w.since = time.Now()
	return true
}

// killTime bounds work for callers that do not wait any more.
const killTime = 10 * time.Second
