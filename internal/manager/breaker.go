package manager

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
)

const (
	// breakerFaults is the number of faults in a row after which routes skip an extension.
	breakerFaults = 5
	// breakerFirst and breakerLast are the shortest and the longest time until a create may try the extension again.
	breakerFirst, breakerLast = 5 * time.Second, 5 * time.Minute
)

// A breaker makes routes skip an extension whose backend failed several times in a row; it is then open. One create at a time
// may still try the extension, its trial. Creates of profiles without a route use the extension as ever, and their results
// count.
//
// mu guards the rest. Nothing is called while it is held.
type breaker struct {
	mu     sync.Mutex
	faults int           // in a row
	wait   time.Duration // from the last fault that counted to the next trial; 0: closed
	until  time.Time     // the end of wait
	trial  *trial        // in progress
}

// A trial is a create that finds out whether the backend works again.
type trial struct{ began time.Time }

// retryAt is when a create may go to the extension; zero if it may now.
func (b *breaker) retryAt(now time.Time) time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.next(now)
}

// next is retryAt. Call it with mu held.
func (b *breaker) next(now time.Time) time.Time {
	switch {
	case b.wait == 0:
	case b.trial != nil && now.Sub(b.trial.began) < breakerLast: // a longer one, which may wait for room, excludes no other
		return now.Add(breakerFirst)
	case now.Before(b.until):
		return b.until
	}
	return time.Time{}
}

// begin is retryAt for a create that uses the extension if it may. If the create becomes its trial, the trial must be ended.
func (b *breaker) begin(now time.Time) (t *trial, retryAt time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if retryAt = b.next(now); retryAt.IsZero() && b.wait > 0 {
		t = &trial{began: now}
		b.trial = t
	}
	return t, retryAt
}

// end ends a trial, also one without a result; t may be nil.
func (b *breaker) end(t *trial) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if t != nil && b.trial == t {
		b.trial = nil
	}
}

// fault notes a fault of the backend in a create; t is its trial, or nil. It returns the time until which routes skip the
// extension because of it; zero if nothing changed.
func (b *breaker) fault(t *trial, now time.Time) (until time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults++
	switch {
	case b.wait == 0 && b.faults < breakerFaults:
		return time.Time{}
	case b.wait == 0:
		b.wait = breakerFirst
	case t == nil || t != b.trial: // it began before, or has no route
		return time.Time{}
	default:
		b.wait = min(2*b.wait, breakerLast)
	}
	b.until, b.trial = now.Add(b.wait), nil
	return b.until
}

// success notes that the backend made a sandbox, and reports whether routes skipped it before.
func (b *breaker) success() (closed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	closed = b.wait > 0
	b.faults, b.wait, b.until, b.trial = 0, 0, time.Time{}, nil
	return closed
}

// isFault reports whether err is a fault of the backend of e, and not of the request for sb.
func (e *extension) isFault(sb *sandboxer.Sandbox, err error) bool {
	switch sandboxer.KindOf(err) {
	case sandboxer.Unavailable, sandboxer.Timeout, sandboxer.Internal:
	default:
		return false
	}
	s := sb.Spec
	chosen := s.Host != "" || s.Image != s.Profile.Image || // what the caller chose may be what does not answer
		slices.ContainsFunc(e.judged().Restricted(s), func(name string) bool { return s.Inputs[name] != s.Profile.Inputs[name] })
	return !chosen && sandboxer.Discreet(err) == err // a public text is for answers of addresses that callers choose
}

// heard notes the result of a step of making sb for the breaker of e: the failure err, or, if err is nil, a sandbox that is
// ready.
func (e *extension) heard(ctx context.Context, t *trial, sb *sandboxer.Sandbox, err error) {
	text := ""
	switch {
	case ctx.Err() != nil: // the caller left, or the broker stops
		return
	case err == nil:
		if e.breaker.success() {
			text = fmt.Sprintf("extension %s works again: routes use it", e.Info.ID)
		}
	case e.isFault(sb, err):
		if until := e.breaker.fault(t, time.Now()); !until.IsZero() {
			text = fmt.Sprintf("extension %s failed several times in a row: routes skip it until %s", e.Info.ID, until.UTC().Format(time.RFC3339))
		}
	}
	if text == "" {
		return
	}
	e.m.log.WarnContext(ctx, text, "sandbox", sb.ID, "err", err)
	w := sandboxer.Writes{Events: []sandboxer.Event{{At: now(), Type: sandboxer.EventWarning, Actor: events.Actor(ctx), Message: text}}}
	if werr := e.m.store.Write(ctx, w); werr != nil {
		e.m.log.WarnContext(ctx, "an event could not be stored", "event", text, "err", werr)
		return
	}
	e.m.events.Notify("")
}
