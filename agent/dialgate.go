package agent

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// A dialGate counts the connections that are being opened to one agent, and can hold back further
// ones. Its zero value is open.
type dialGate struct {
	mu      sync.Mutex
	under   int           // dials under way
	closed  bool          // further ones wait
	changed chan struct{} // closed when one of these changes; nil while nobody waits for that

	left map[chan dialed]context.CancelFunc // those that were given up and are not over
	over bool                               // nothing that is given up is waited for any more
}

// A dialed is what came of a dial.
type dialed struct {
	conn net.Conn
	err  error
}

// WithoutDials calls f while no connection to the agent is being opened: it waits for those under
// way, also of calls that were given up, and those to come wait until f has returned. Who freezes a
// sandbox that is entered by a command of its engine does it here. Such a command that meets the freezer
// on its way in waits there with what the engine holds for it, and the sandbox cannot be
// thawed any more. A call that took an idle connection may have left one behind that is still
// being opened, so that it is not enough to make no calls.
//
// The error is f's, or that ctx ended before f was called; then its kind is that of the
// context's error.
func (c *Client) WithoutDials(ctx context.Context, f func(context.Context) error) error {
	if err := c.dials.shut(ctx); err != nil {
		return sandboxer.E(sandboxer.KindOf(err), err, "connections to the sandbox's agent are still being opened")
	}
	defer c.dials.reopen()
	return f(ctx)
}

// wait lets go of the lock until something has changed. The lock is held when it returns.
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

// tell wakes who waits. The lock is held.
func (g *dialGate) tell() {
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}

// shut closes the gate, and returns when nothing is under way.
func (g *dialGate) shut(ctx context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.closed { // by somebody else
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

// enter counts a dial, with one of slots if that is not nil. It waits while the gate is closed, and
// with waits for a slot, too. leave has to be called when it returns nil.
func (g *dialGate) enter(ctx context.Context, slots chan struct{}, waits bool) error {
	for {
		select {
		case slots <- struct{}{}:
		default:
			switch {
			case slots == nil:
			case !waits:
				return sandboxer.E(sandboxer.Unavailable, ErrNotReached, "%d connections to the sandbox's agent are being opened, and none is there yet", cap(slots))
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
		g.free(slots) // for those under way there is none too few

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

// bounded is dial, held back by the gate, with errors that say ErrNotReached. No more than n are under
// way if n is not 0. Whoever answers late, or never, is asked no further time meanwhile: a dial that is
// given up is not over, since an engine goes on with what it was asked for, and counts until it is.
func (g *dialGate) bounded(n int, waits bool, dial func(context.Context) (net.Conn, error)) func(context.Context) (net.Conn, error) {
	var slots chan struct{}
	if n > 0 {
		slots = make(chan struct{}, n)
	}
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := func() (net.Conn, error) {
			if err := g.enter(ctx, slots, waits); err != nil {
				return nil, err
			}
			return g.detached(ctx, func(ctx context.Context) (net.Conn, error) {
				defer g.leave(slots)
				return dial(ctx)
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

// detached is dial, which goes on when ctx ends, until end is called; the connection is closed then.
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

// end ends dials that were given up, and will be.
func (g *dialGate) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.over = true
	for _, end := range g.left {
		end()
	}
}
