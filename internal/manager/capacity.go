package manager

import (
	"context"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// capacityFor is how long an answer about room is used, and how long a create waits for a new one.
const capacityFor = time.Second

// A capacity is the last answer of the backend of an extension about its room.
//
// mu guards it. Nothing is called while it is held.
type capacity struct {
	mu     sync.Mutex
	free   int // -1 if unknown
	err    error
	at     time.Time     // when it said so
	asking chan struct{} // closed when it says so again; nil: it is not asked
}

// room is the number of sandboxes for which the backend of e has room now, -1 if that is unknown, or the error of the backend.
// If its last answer is older than a second, the backend is asked in the background, once for all creates. fresh says that it
// was asked for this caller.
func (e *extension) room(ctx context.Context) (free int, fresh bool, err error) {
	if e.Backend == nil || !e.Backend.Can(sandboxer.CanCapacity) {
		return -1, false, nil
	}
	c := e.capacity
	c.mu.Lock()
	if !c.at.IsZero() && time.Since(c.at) <= capacityFor {
		defer c.mu.Unlock()
		return c.free, false, c.err
	}
	asking := c.asking
	mine := asking == nil
	if mine {
		asking = make(chan struct{})
		c.asking = asking
	}
	c.mu.Unlock()
	if mine {
		if err := e.m.enter(); err != nil {
			c.answer(-1, err)
			return -1, false, err
		}
		go func() {
			defer e.m.wg.Done()
			said, err := e.Backend.Capacity(e.m.ctx, "")
			c.answer(said.Free, err)
		}()
	}
	late := time.NewTimer(capacityFor)
	defer late.Stop()
	select {
	case <-asking:
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.free, mine, c.err
	case <-late.C:
		return -1, false, nil
	case <-ctx.Done():
		return -1, false, context.Cause(ctx)
	}
}

func (c *capacity) answer(free int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.free, c.err, c.at = free, err, time.Now()
	close(c.asking)
	c.asking = nil
}

// noRoom returns why the extension of a request of a routed profile can take no sandbox now: full if it has no room, err if it
// cannot say. That is a fault of the backend, which counts once for each question.
func (c *creation) noRoom(ctx context.Context, sb *sandboxer.Sandbox) (full, err error) {
	if !c.isRouted() {
		return nil, nil
	}
	if c.Routing.Profile.Route.Policy == sandboxer.RouteWait { // its line knows only of max
		if c.m.rooms.anybody(c.Extension, "") {
			full = sandboxer.E(sandboxer.Exhausted, nil, "other requests wait for room on %s", c.Extension)
		}
		return full, nil
	}
	free, fresh, err := c.ext.room(ctx)
	switch {
	case err != nil:
		if fresh || c.trial != nil {
			c.ext.heard(ctx, c.trial, sb, err)
		}
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot say how much room it has: %s", c.Extension, sandboxer.Message(err))
	case free == 0:
		return sandboxer.E(sandboxer.Exhausted, nil, "%s has no room for another sandbox", c.Extension).WithHint("try again when a sandbox has ended"), nil
	}
	return nil, nil
}

// belowMax says, for a plan of a routed profile, that there is no room below max: Exhausted, with a FullError as its cause, or
// why that is not known. A sandbox of a pool makes way. A create is told by the commit of its record.
func (c *creation) belowMax(ctx context.Context) error {
	r := c.m.roomFor(c.Extension, c.Spec.Profile.ID)
	if r == nil || !c.isRouted() {
		return nil
	}
	use, err := c.m.store.RoomUse(ctx, *r)
	if err != nil {
		return err
	}
	return r.Check(use, sandboxer.RoomUse{Extension: use.Extension + 1, Profile: use.Profile + 1})
}
