// Package sinks delivers usage rows to the receivers that sinks.yaml names, each at its own pace: to an HTTP endpoint in
// signed batches of CloudEvents, or to a file as lines. How far each is, and what it refused, is in the database. Every row
// is delivered at least once, under an ID that never changes.
package sinks

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// The bounds of one batch.
const (
	maxEvents = 500
	maxBytes  = 1 << 20
)

// Options configure Sinks. Owner, Secret and Log are required.
type Options struct {
	Owner  string // installation, which is the source of all events
	Secret func(ctx context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error)
	Log    *slog.Logger
	Data   func(sandboxer.UsageRow) any // public form of a row; nil means the row itself
	// Backoff is how long a sink is left alone after n failures in a row; nil means a second, and then growing to 15 minutes.
	Backoff func(n int) time.Duration
	// Sent and Taken, if not nil, call what delivers a batch, and what commits that it was delivered (crash tests).
	Sent, Taken func(func() error) error
}

// Sinks delivers usage rows. It is safe for concurrent use.
type Sinks struct {
	store sandboxer.Store
	opts  Options

	mu      sync.Mutex // guards what follows; nothing is called under it
	sinks   []sandboxer.Sink
	workers map[string]*worker
	changed chan struct{} // one slot: sinks may differ from workers
}

// New returns the deliverer of the usage rows in store. It delivers while Run runs.
func New(store sandboxer.Store, all []sandboxer.Sink, opts Options) *Sinks {
	if opts.Backoff == nil {
		opts.Backoff = func(n int) time.Duration {
			d := min(15*time.Minute, time.Second<<min(max(0, n-1), 10))
			return time.Duration(float64(d) * (0.75 + rand.Float64()/2))
		}
	}
	if opts.Data == nil {
		opts.Data = func(r sandboxer.UsageRow) any { return r }
	}
	call := func(f func() error) error { return f() }
	if opts.Sent == nil {
		opts.Sent = call
	}
	if opts.Taken == nil {
		opts.Taken = call
	}
	return &Sinks{store: store, opts: opts, sinks: all, workers: map[string]*worker{}, changed: make(chan struct{}, 1)}
}

// Set replaces the sinks.
func (s *Sinks) Set(all []sandboxer.Sink) {
	s.mu.Lock()
	s.sinks = all
	s.mu.Unlock()
	signal(s.changed)
}

// Using returns the names of the sinks that sign with that secret of the operator.
func (s *Sinks) Using(secret string) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sink := range s.sinks {
		if slices.Contains(sink.Keys, secret) {
			names = append(names, sink.Name)
		}
	}
	return names
}

// Wake says that there may be new rows.
func (s *Sinks) Wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		signal(w.rows)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run delivers until ctx ends, and waits then for what it began.
func (s *Sinks) Run(ctx context.Context) {
	running := map[string]*worker{}
	defer func() {
		for _, w := range running {
			w.stop()
		}
	}()
	for {
		s.mu.Lock()
		want := map[string]sandboxer.Sink{}
		for _, sink := range s.sinks {
			want[sink.Name] = sink
		}
		s.mu.Unlock()
		for name, w := range running {
			if !reflect.DeepEqual(want[name], w.sink) {
				w.stop()
				delete(running, name)
			}
		}
		for name, sink := range want {
			if running[name] == nil {
				running[name] = s.start(ctx, sink)
			}
		}
		s.mu.Lock()
		s.workers = maps.Clone(running)
		s.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-s.changed:
		}
	}
}

// A worker delivers to one sink.
type worker struct {
	*Sinks
	sink  sandboxer.Sink
	out   outlet
	rows  chan struct{} // one slot: there may be new rows
	asked chan struct{} // one slot: somebody wants a try now
	stop  func()        // ends it and waits for that
}

// An outlet takes batches. Kinds: Invalid if it refuses what is in the batch, NotFound if it wants nothing more, any other
// kind if the batch is to be delivered later.
type outlet interface {
	deliver(ctx context.Context, batch []item) error
	close()
}

func (s *Sinks) start(ctx context.Context, sink sandboxer.Sink) *worker {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	w := &worker{Sinks: s, sink: sink, rows: make(chan struct{}, 1), asked: make(chan struct{}, 1), stop: func() { cancel(); <-done }}
	if w.out = (fileOutlet{sink.File}); sink.URL != "" {
		w.out = newEndpoint(sink, s.opts.Secret)
	}
	go func() {
		defer close(done)
		defer w.out.close()
		w.run(ctx)
	}()
	return w
}

// run delivers what there is, and waits for more. After a failure it waits longer each time.
func (w *worker) run(ctx context.Context) {
	for n := 0; ctx.Err() == nil; {
		more, err := w.next(ctx)
		if err == nil {
			if n = 0; more {
				continue
			}
			select {
			case <-ctx.Done():
			case <-w.rows:
			case <-w.asked:
			}
			continue
		}
		if n++; n == 1 && ctx.Err() == nil {
			w.opts.Log.Warn("usage rows cannot be delivered; the server tries again", "sink", w.sink.Name, "err", err)
		}
		late := w.opts.Backoff(n)
		if own, ok := errors.AsType[*sandboxer.Error](err); ok {
			late = max(late, own.RetryAfter)
		}
		wait := time.NewTimer(late)
		select {
		case <-ctx.Done():
		case <-wait.C:
		case <-w.asked:
		}
		wait.Stop()
	}
}

// next delivers the next batch: dead letters that are to be delivered once more, or else rows after those that are dealt
// with. more says that there may be another one.
func (w *worker) next(ctx context.Context) (more bool, err error) {
	st, err := w.state(ctx, w.sink.Name)
	if err != nil || st.Stopped {
		return false, err
	}
	again := true
	rows, err := w.store.UsageRows(ctx, sandboxer.UsageQuery{Again: w.sink.Name, Limit: maxEvents})
	if err == nil && len(rows) == 0 {
		again = false
		rows, err = w.store.UsageRows(ctx, sandboxer.UsageQuery{After: st.Seq, Limit: maxEvents})
	}
	if err != nil || len(rows) == 0 {
		return false, err
	}
	batch, err := w.items(rows)
	if err == nil {
		err = w.send(ctx, &st, batch, again)
	}
	if err == nil || sandboxer.KindOf(err) == sandboxer.Conflict || ctx.Err() != nil { // Conflict: a replay has moved it
		return true, nil
	}
	stopped := sandboxer.KindOf(err) == sandboxer.NotFound
	note := w.store.Write(ctx, sandboxer.Writes{Sink: &sandboxer.SinkChange{
		Name: st.Name, From: st.Seq, To: st.Seq, Problem: sandboxer.Message(err), At: time.Now(), Stopped: stopped}})
	if stopped && note == nil {
		w.opts.Log.Warn("the sink wants no more usage rows", "sink", w.sink.Name, "err", err)
		return false, nil
	}
	return false, err
}

// send delivers batch. What is refused is halved, until single rows are left, which become dead letters.
func (w *worker) send(ctx context.Context, st *sandboxer.SinkState, batch []item, again bool) error {
	err := w.opts.Sent(func() error {
		if len(batch) == 1 && len(batch[0].data) > maxBytes-2 {
			return sandboxer.E(sandboxer.Invalid, nil, "the event has %d bytes: the maximum is 1 MiB", len(batch[0].data))
		}
		return w.out.deliver(ctx, batch)
	})
	refused := sandboxer.KindOf(err) == sandboxer.Invalid
	if refused && len(batch) > 1 {
		half := len(batch) / 2
		if err := w.send(ctx, st, batch[:half], again); err != nil {
			return err
		}
		return w.send(ctx, st, batch[half:], again)
	}
	if err != nil && !refused {
		return err
	}
	c := sandboxer.SinkChange{Name: st.Name, From: st.Seq, To: st.Seq, At: time.Now()}
	if !again {
		c.To = batch[len(batch)-1].seq
	}
	if refused {
		if st.DeadLetters++; !again && st.DeadLetters > sandboxer.MaxDeadLetters {
			return sandboxer.E(sandboxer.Exhausted, err, "%d rows were refused and are dead letters: no more are delivered", sandboxer.MaxDeadLetters)
		}
		c.Dead = []sandboxer.DeadLetter{{Seq: batch[0].seq, At: c.At, Reason: sandboxer.Message(err)}}
		w.opts.Log.Warn("a usage row was refused and is a dead letter", "sink", w.sink.Name, "row", batch[0].seq, "err", err)
	} else if again {
		for _, it := range batch {
			c.Gone = append(c.Gone, it.seq)
		}
	}
	err = w.opts.Taken(func() error { return w.store.Write(ctx, sandboxer.Writes{Sink: &c}) })
	if err == nil {
		st.Seq = c.To
	}
	return err
}

// state returns how far the sink is. A new one is noted first, at the beginning.
func (s *Sinks) state(ctx context.Context, name string) (sandboxer.SinkState, error) {
	all, err := s.store.SinkStates(ctx)
	for _, st := range all {
		if st.Name == name {
			return st, nil
		}
	}
	if err == nil {
		err = s.store.Write(ctx, sandboxer.Writes{Sink: &sandboxer.SinkChange{Name: name, At: time.Now()}})
	}
	return sandboxer.SinkState{Name: name}, err
}
