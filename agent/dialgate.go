package agent

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A dialGate counts the connections that are being opened to one agent, and can block further ones. Its
// zero value is open.
type dialGate struct {
	mu      sync.Mutex
	under   int           // dials in progress
	closed  bool          // further ones wait
	changed chan struct{} // closed when one of these changes; nil while no call waits for that

	left map[chan dialed]context.CancelFunc // dials that were abandoned and are still running
	over bool                               // no abandoned dial is waited for any more

	hung   int       // dials that hung since one succeeded
	last   time.Time // when the last dial began
	failed time.Time // when the last dial failed; zero if it succeeded
}

// hungPause is the time between two dials once MaxHung of them have hung: an engine may have been slow for
// another reason.
const hungPause = 10 * time.Minute

// A dialed is the result of a dial.
type dialed struct {
	conn net.Conn
	err  error
}

// WithoutDials calls f while no connection to the agent is being opened. It waits for open attempts,
// including those of abandoned calls, and new ones wait until f has returned. An adapter uses it to
// freeze a sandbox that is entered with a command of its engine. If such a command meets the freezer on
// its way in, it blocks there together with engine resources, and the sandbox can no longer be thawed.
// To make no calls is not enough: a call that used an idle connection may have left another one that is
// still being opened.
//
// The error is that of f, or says that ctx ended before f was called, with the kind of the context's
// error.
func (c *Client) WithoutDials(ctx context.Context, f func(context.Context) error) error {
	if err := c.dials.shut(ctx); err != nil {
		return sandboxer.E(sandboxer.KindOf(err), err, "connections to the sandbox's agent are still being opened")
	}
	defer c.dials.reopen()
	return f(ctx)
}

// wait releases the lock until something has changed. The lock is held when it returns.
func (g *dialGate) wait(ctx context.Context) error {
	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	changed := g.changed
	g.mu.Unlock()
	defer g.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// tell wakes the waiting calls. The lock is held.
func (g *dialGate) tell() {
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}

// shut closes the gate, and returns when no dial is in progress.
func (g *dialGate) shut(ctx context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.closed { // by another call
		if err := g.wait(ctx); err != nil {
			return err
		}
	}
	g.closed = true
	for g.under > 0 {
		if err := g.wait(ctx); err != nil {
			g.closed = false
			g.tell()
			return err
		}
	}
	return nil
}

func (g *dialGate) reopen() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = false
	g.tell()
}

// enter counts a dial, with one of slots if that is not nil. It waits while the gate is closed, and with
// waits also for a slot. When it returns nil, the caller has to call leave.
func (g *dialGate) enter(ctx context.Context, slots chan struct{}, waits bool) error {
	for {
		select {
		case slots <- struct{}{}:
		default:
			switch {
			case slots == nil:
			case !waits:
				return sandboxer.E(sandboxer.Unavailable, ErrNotReached, "%d connections to the sandbox's agent are being opened, and none is ready", cap(slots))
			default:
				select {
				case slots <- struct{}{}:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}
		g.mu.Lock()
		if !g.closed {
			g.under++
			g.mu.Unlock()
			return nil
		}
		g.mu.Unlock()
		g.free(slots) // a call that waits for the gate holds no slot

		g.mu.Lock()
		for g.closed {
			if err := g.wait(ctx); err != nil {
				g.mu.Unlock()
				return err
			}
		}
		g.mu.Unlock()
	}
}

func (g *dialGate) free(slots chan struct{}) {
	if slots != nil {
		<-slots
	}
}

func (g *dialGate) leave(slots chan struct{}) {
	g.free(slots)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.under--
	g.tell()
}

// bounded is o.Dial behind the gate, with errors that say ErrNotReached. No more than o.Dials are in
// progress if that is not 0. An abandoned dial counts until it is over, because an engine continues it.
func (g *dialGate) bounded(o ClientOptions) func(context.Context) (net.Conn, error) {
	var slots chan struct{}
	if o.Dials > 0 {
		slots = make(chan struct{}, o.Dials)
	}
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := func() (net.Conn, error) {
			if err := g.enter(ctx, slots, o.DialsWait); err != nil {
				return nil, err
			}
			return g.detached(ctx, func(ctx context.Context) (net.Conn, error) {
				defer g.leave(slots)
				return g.try(ctx, o)
			})
		}()
		if err == nil {
			return conn, nil
		}
		e := sandboxer.E(sandboxer.Unavailable, nil, "the sandbox's agent cannot be reached")
		if said, ok := errors.AsType[*sandboxer.Error](err); ok {
			*e = *said
		}
		e.Err = errors.Join(ErrNotReached, err)
		return nil, e
	}
}

// try is o.Dial, unless too many have hung.
func (g *dialGate) try(ctx context.Context, o ClientOptions) (net.Conn, error) {
	g.mu.Lock()
	now := time.Now()
	if o.MaxHung > 0 && g.hung >= o.MaxHung && now.Sub(g.last) < hungPause {
		g.mu.Unlock()
		return nil, sandboxer.E(sandboxer.Failed, nil, "the last %d connections to the sandbox's agent hung: root inside may have replaced /etc/passwd or /etc/group by a file that never ends", o.MaxHung).
			WithHint("destroy the sandbox; nothing outside of it is affected")
	}
	g.last = now
	g.mu.Unlock()
	conn, err := o.Dial(ctx)
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case err == nil:
		g.hung, g.failed = 0, time.Time{}
		return conn, nil
	case errors.Is(err, errHung):
		g.hung++
	}
	g.failed = time.Now()
	return nil, err
}

// DialFailed reports whether the last dial that ended has failed, less than d ago. An adapter with another
// way for a call does not try the agent again meanwhile.
func (c *Client) DialFailed(d time.Duration) bool {
	c.dials.mu.Lock()
	defer c.dials.mu.Unlock()
	return !c.dials.failed.IsZero() && time.Since(c.dials.failed) < d
}

// detached is dial that continues when ctx ends, until end is called; then its connection is closed.
func (g *dialGate) detached(ctx context.Context, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	came := make(chan dialed)
	go func() {
		conn, err := dial(life)
		end()
		select {
		case came <- dialed{conn, err}:
		case <-ctx.Done():
			if err == nil {
				conn.Close()
			}
			g.mu.Lock()
			delete(g.left, came)
			g.mu.Unlock()
		}
	}()
	select {
	case d := <-came:
		return d.conn, d.err
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.over:
		end()
	case life.Err() == nil:
		if g.left == nil {
			g.left = map[chan dialed]context.CancelFunc{}
		}
		g.left[came] = end
	}
	return nil, ctx.Err()
}

// end ends dials that were abandoned, now and later.
func (g *dialGate) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.over = true
	for _, end := range g.left {
		end()
	}
}
