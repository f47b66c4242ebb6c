package manager

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// Destroy ends a sandbox in any state and returns it terminated. A sandbox that is gone already is success. If the backend
// cannot remove it now, the error is Unavailable, the returned record is terminating, and the sweep continues until it is
// removed; the tenant pays only until this call. A sandbox whose record is damaged can be destroyed too; nothing is charged for
// it.
func (m *Manager) Destroy(ctx context.Context, ref string) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	why := ending{reason: sandboxer.ReasonRequested}
	if sb != nil && sb.Damaged != "" {
		if sb, err = sandboxRecords.repaired(ctx, m, sb, err); err == nil {
			why.message = sb.Message
		}
	}
	admin := sandboxer.PrincipalFrom(ctx).Can(sandboxer.ScopeAdmin)
	if isKind(err, sandboxer.NotFound) && admin && sandboxer.CheckID(ref) == nil { // it may be quarantined
		if gone, derr := m.removeUnknownObjects(ctx, ref); gone != nil || derr != nil {
			return gone, derr
		}
	}
	if err != nil {
		return nil, err
	}
	if sb.State != sandboxer.Terminated {
		if err := m.enter(); err != nil {
			return nil, err
		}
		defer m.wg.Done()
		if err := m.box(sb).beginTeardown(ctx, why); err != nil {
			return nil, err
		}
		if sb, err = m.box(sb).finishTeardown(ctx); err != nil {
			return sb, err
		}
	}
	// There may be a later generation that the database does not know. An ID belongs to one tenant.
	if len(m.quarantine.list(sb.ID)) > 0 {
		if _, err := m.removeUnknownObjects(ctx, sb.ID); err != nil {
			return sb, err
		}
	}
	return sb, nil
}

// ending is why, and since when, a sandbox ends.
type ending struct {
	reason  sandboxer.Reason
	message string
	fault   sandboxer.Kind
	hint    string
	at      time.Time                     // zero means now
	still   func(*sandboxer.Sandbox) bool // nil, or whether the reason holds for the record as it is now
}

// errNotNeeded says that the reason to end a sandbox has gone in the meantime.
var errNotNeeded = errors.New("it no longer needs to end")

// beginTeardown commits the intent to end sb, which cannot be undone. A sandbox that is ending already stays as it is.
func (bx box) beginTeardown(ctx context.Context, why ending) error {
	for bx.sb.State != sandboxer.Terminating && bx.sb.State != sandboxer.Terminated {
		err := bx.m.step(pEnding, func() error {
			return bx.move(ctx, sandboxer.Terminating, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
				if why.still != nil && !why.still(sb) {
					return errNotNeeded
				}
				sb.Reason, sb.Message, sb.Fault, sb.Hint = why.reason, why.message, why.fault, why.hint
				sb.EndingAt = now()
				if !why.at.IsZero() {
					sb.EndingAt = why.at
				}
				return nil
			})
		})
		if err != nil && !isKind(err, sandboxer.Conflict) {
			return err
		}
		if err != nil && why.still != nil && (bx.sb.State == sandboxer.Terminating || bx.sb.State == sandboxer.Terminated) {
			return errNotNeeded // another caller ended it, and pays
		}
	}
	return nil
}

// finishTeardown does the remaining work for a terminating sandbox, or waits for the job that does, and returns the sandbox
// terminated. After a failure it returns the sandbox terminating, with the error; the sweep tries again.
func (bx box) finishTeardown(ctx context.Context) (*sandboxer.Sandbox, error) {
	for {
		j, mine, err := bx.m.begin(ctx, bx.sb.ID, bx.sb.Generation, false, nil)
		if err != nil {
			return nil, err
		}
		over := (<-chan struct{})(j.done)
		tearing := !mine && !j.isMaking()
		if mine {
			own := *bx.sb
			j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) { return &own, bx.m.box(&own).teardown(ctx) })
		} else {
			over = j.cancelForTeardown(bx.sb.Generation)
		}
		if err := events.Wait(ctx, over); err != nil {
			return nil, err
		}
		if bx.sb, err = bx.m.store.SandboxGeneration(ctx, bx.sb.ID, bx.sb.Generation); err != nil {
			return nil, err
		}
		switch {
		case bx.sb.State == sandboxer.Terminated:
			return bx.sb, nil
		case mine && j.err != nil:
			return bx.sb, j.err
		case tearing && bx.sb.LastError != "":
			return bx.sb, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s is not removed yet: %s", bx.sb.Shown(), bx.sb.LastError).
				WithHint("it is retried automatically")
		}
	}
}

// teardown removes everything of sb outside the database, and then settles its ledger. The caller owns the job of sb.
func (bx box) teardown(ctx context.Context) error {
	if bx.sb.State == sandboxer.Terminated {
		return nil
	}
	if err := bx.keepReading(ctx); err != nil {
		return err
	}
	report, err := bx.teardownObject(ctx)
	if err == nil {
		err = bx.payDebts(ctx, time.Time{})
	}
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return bx.scheduleRetry(ctx, err)
	}
	return bx.commitTerminated(ctx, report, bx.readMeter(ctx))
}

// commitTerminated commits that sb has ended, with the report about its object, and its cost by that reading.
func (bx box) commitTerminated(ctx context.Context, report sandboxer.CleanupReport, r reading) error {
	var over sandboxer.Credits
	err := bx.m.step(pEnded, func() error {
		err := bx.move(ctx, sandboxer.Terminated, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			sb.EndedAt = now()
			sb.Cleanup = &report
			over = settle(ctx, sb, w, r)
			var err error
			if w.Snapshots, err = bx.m.box(sb).dropPauseSnapshot(ctx); err != nil {
				return err
			}
			for _, s := range report.Warnings {
				w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventWarning, s))
			}
			return nil
		})
		if err == nil {
			bx.m.usage.forget(bx.sb.ID)
			bx.m.overrun(bx.sb, over)
			bx.m.sinks.Wake()
		}
		return err
	})
	if err == nil && bx.sb.Pause.Snapshot != "" {
		bx.m.dropInternal(ctx, bx.sb.Pause.Snapshot)
	}
	return err
}

// teardownObject tears down the object of sb and asks once more whether it is gone, if the backend can answer that: a record
// must not end before its object.
func (bx box) teardownObject(ctx context.Context) (r sandboxer.CleanupReport, err error) {
	if bx.sb.Untouched {
		return r, nil
	}
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil {
		return r, err
	}
	h := handleOf(bx.sb)
	err = bx.m.step(pTeardown, func() (err error) { r, err = b.Teardown(ctx, h); return err })
	if err == nil {
		err = doubtGone(ctx, b, bx.sb.Extension, h)
	}
	return r, err
}

// doubtGone asks the backend about an object that the backend reported as torn down.
func doubtGone(ctx context.Context, b *backend.Backend, extension string, h sandboxer.Handle) error {
	if b.Can(sandboxer.CanProbe) {
		if alive, err := b.IsAlive(ctx, h); err == nil && alive == sandboxer.Alive {
			return sandboxer.E(sandboxer.Unavailable, nil, "%s reported that it was removed, but it still exists", extension)
		}
	}
	return nil
}

// handleOf returns the handle of sb. If its creation was cut short, it returns a handle by which the extension finds the
// object.
func handleOf(sb *sandboxer.Sandbox) sandboxer.Handle {
	if sb.Handle.SandboxID != "" {
		return sb.Handle
	}
	return sandboxer.Handle{SandboxID: sb.ID, Generation: lifecycle.ObjectGeneration(sb), Host: sb.Host, Credential: sb.Spec.Credential}
}

// scheduleRetry notes that a step of sb failed, and the time of the next try.
func (bx box) scheduleRetry(ctx context.Context, cause error) error {
	bx.m.log.WarnContext(ctx, "step failed", "sandbox", bx.sb.ID, "generation", bx.sb.Generation, "state", bx.sb.State, "err", cause)
	state := bx.sb.State
	err := bx.m.step(pRetry, func() error {
		return bx.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != state {
				return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is now %s", sb.Shown(), sb.State)
			}
			sb.Retries++
			sb.LastError = sandboxer.Message(cause)
			wait := lifecycle.Backoff(sb.Retries, rand.Float64())
			if !sb.AbsentSince.IsZero() && len(sb.Debts) == 0 { // its object is gone: no backend has to recover first
				wait = min(wait, probeEvery)
			}
			sb.RetryAt = now().Add(wait)
			if sb.Retries <= 3 || sb.Retries%20 == 0 { // a backend that is away for days must not fill the database
				w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventRetry, sb.LastError))
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	owed := "removed"
	switch {
	case state == sandboxer.Creating && lifecycle.IsPaused(bx.sb):
		owed = "resumed"
	case state == sandboxer.Creating:
		owed = "made"
	case state == sandboxer.Pausing:
		owed = "paused"
	}
	e := sandboxer.E(sandboxer.Unavailable, cause, "sandbox %s is not %s yet: %s", bx.sb.Shown(), owed, bx.sb.LastError).
		WithHint("it is retried automatically")
	e.RetryAfter = time.Until(bx.sb.RetryAt)
	return e
}
