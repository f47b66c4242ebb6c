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
	// pulseEvery is how often a sandbox with calls in flight is asked whether it works, and
	// how long it may take to answer.
	pulseEvery = 5 * time.Second
	// pulseMisses is how many missed answers in a row make a sandbox unresponsive. It is
	// more than one in case the machine, or the broker, was paused.
	pulseMisses = 3
	// pulseRecheck is how long a call to an unresponsive sandbox waits for an answer.
	pulseRecheck = 2 * time.Second
	// commandPatience is how long a running command may continue in an unresponsive sandbox,
	// which may recover.
	commandPatience = 2 * time.Minute
)

// errUnresponsive is why calls into an unresponsive sandbox end. Its state is unknown then,
// and nothing in it is ended.
var errUnresponsive = sandboxer.E(sandboxer.Unavailable, nil, "the sandbox does not respond: its kernel runs, but no longer answers").
	WithHint("it may recover if the machine is only overloaded; if not, destroy it")

// A pulse watches a sandbox's kernel while calls into it are in flight, so that they end
// when it does not respond. The duration of a call shows nothing: it may wait for the start
// of a thousand commands.
type pulse struct {
	ask  func(context.Context) error // answers soon, and only if the kernel can work
	back func()                      // it responds again; called without locks

	every, patience time.Duration // pulseEvery and commandPatience, except in tests

	mu       sync.Mutex
	calls    map[*attended]struct{}
	beat     *time.Timer // nil while there are no calls
	checking chan struct{}
	heard    time.Time // its last answer, of any kind
	missed   int
	since    time.Time // when it became unresponsive; zero while it responds
	silent   int       // calls during which it cannot answer
}

type attended struct {
	cancel  context.CancelCauseFunc
	command bool // may run as long as it likes
}

// attend returns ctx that also ends, with errUnresponsive, when the sandbox does not
// respond; done must be called. A command is already running, and gets more time.
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

// hush says that the kernel cannot answer until done.
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

// doubt notes that the kernel did not answer a question.
func (p *pulse) doubt() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.since.IsZero() {
		p.since = time.Now()
	}
}

// quiet reports whether a missing answer means nothing now.
func (p *pulse) quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silent > 0 || time.Since(p.heard) < p.every
}

// hear notes an answer of the kernel.
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

// check asks the kernel whether it works, once for all callers, and waits for an answer up
// to limit. It returns nil for a sandbox that has ended: waiting would not help.
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

// tick checks the kernel for the calls in flight.
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
	p.beat.Reset(p.every / 100) // the rest of the time passed during the check
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

// lag returns ctx that ends some time after the given one: for work that has begun and
// should finish.
func lag(ctx context.Context, by time.Duration) (_ context.Context, cancel func()) {
	out, end := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(by, func() { end(context.Cause(ctx)) })
	})
	return out, func() { stop(); end(nil) }
}
