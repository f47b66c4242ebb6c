//go:build linux

package local

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	// pulseEvery is how often a sandbox that has calls in flight is asked whether it is
	// there, and how long it may take to answer that.
	pulseEvery = 5 * time.Second
	// pulseMisses is how many times in a row it does not answer before it counts as one that
	// does not respond. It is more than one for a machine, or a broker, that stood still.
	pulseMisses = 3
	// pulseRecheck is how long a call to one that did not respond waits for a sign of it.
	pulseRecheck = 2 * time.Second
	// commandPatience is how long a command that runs is waited for in a sandbox that does
	// not respond. It may come back.
	commandPatience = 2 * time.Minute
)

// errUnresponsive is why calls into a sandbox end that does not respond. Nothing is known
// about it then, and nothing of it is ended.
var errUnresponsive = sandboxer.E(sandboxer.Unavailable, nil, "the sandbox does not respond: its kernel is there, but has stopped answering").
	WithHint("it may come back, on a machine that is overloaded; if not, destroy it")

// A pulse watches a sandbox's kernel while calls into it are in flight, so that they end
// when it does not respond. How long a call takes says nothing: a thousand commands may be
// waiting to be started.
type pulse struct {
	ask  func(context.Context) error // answers soon, and only if the kernel can work
	back func()                      // it responds again; called without locks

	every, patience time.Duration // pulseEvery and commandPatience, but for tests

	mu       sync.Mutex
	calls    map[*attended]struct{}
	beat     *time.Timer // nil while there are no calls
	checking chan struct{}
	heard    time.Time // its last answer, of any kind
	missed   int
	since    time.Time // it does not respond; zero while it does
	silent   int       // calls during which it cannot answer
}

type attended struct {
	cancel  context.CancelCauseFunc
	command bool // runs, for as long as it likes
}

// attend returns ctx that also ends, with errUnresponsive, when the sandbox does not
// respond; done must be called. A command is one that runs already, and is given longer.
func (p *pulse) attend(ctx context.Context, command bool) (_ context.Context, done func(), err error) {
	if p.unresponsive() && !command {
		if err := p.check(ctx, min(pulseRecheck, p.period())); err != nil {
			return nil, nil, err
		}
	}
	a := &attended{command: command}
	ctx, a.cancel = context.WithCancelCause(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.calls == nil {
		p.calls = map[*attended]struct{}{}
	}
	p.calls[a] = struct{}{}
	if p.beat == nil {
		p.missed = 0
		p.beat = time.AfterFunc(p.every, p.tick)
	}
	return ctx, func() {
		p.mu.Lock()
		delete(p.calls, a)
		p.mu.Unlock()
		a.cancel(nil)
	}, nil
}

// hush says that until done the kernel cannot answer.
func (p *pulse) hush() (done func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.silent--
		p.missed = 0
	}
}

func (p *pulse) period() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.every
}

func (p *pulse) unresponsive() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.since.IsZero()
}

// doubt says that it did not answer when it was asked.
func (p *pulse) doubt() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.since.IsZero() {
		p.since = time.Now()
	}
}

// quiet reports whether no answer is to be expected now.
func (p *pulse) quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silent > 0 || time.Since(p.heard) < p.every
}

// hear notes that the kernel answered something.
func (p *pulse) hear() {
	p.mu.Lock()
	p.heard, p.missed = time.Now(), 0
	again := !p.since.IsZero()
	p.since = time.Time{}
	p.mu.Unlock()
	if again {
		p.back()
	}
}

// check asks the kernel whether it is there, once for all who want to know, and waits for
// an answer as long as limit. It returns nil for a sandbox that ended: that is no matter of
// patience.
func (p *pulse) check(ctx context.Context, limit time.Duration) error {
	p.mu.Lock()
	ch := p.checking
	if ch == nil {
		ch = make(chan struct{})
		p.checking = ch
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			defer cancel()
			err := p.ask(ctx)
			if !errors.Is(err, context.DeadlineExceeded) {
				p.hear()
			}
			p.mu.Lock()
			p.checking = nil
			p.mu.Unlock()
			close(ch)
		}()
	}
	p.mu.Unlock()
	begun := time.Now()
	select {
	case <-ch:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.heard.Before(begun) {
		return errUnresponsive
	}
	return nil
}

// tick looks after the calls in flight.
func (p *pulse) tick() {
	p.mu.Lock()
	if len(p.calls) == 0 {
		p.beat = nil
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	err := p.check(context.Background(), p.period())
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.beat.Reset(p.every)
		return
	}
	p.beat.Reset(p.every / 100) // the rest of the time went by while it was asked
	if p.silent > 0 || time.Since(p.heard) < p.every {
		return
	}
	if p.missed++; p.missed < pulseMisses {
		return
	}
	if p.since.IsZero() {
		p.since = time.Now()
	}
	late := time.Since(p.since) >= p.patience
	for a := range p.calls {
		if !a.command || late {
			a.cancel(errUnresponsive)
		}
	}
}

// lag returns ctx that ends only some time after the given one: for what has begun and is
// better finished.
func lag(ctx context.Context, by time.Duration) (_ context.Context, cancel func()) {
	out, end := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(by, func() { end(context.Cause(ctx)) })
	})
	return out, func() { stop(); end(nil) }
}
