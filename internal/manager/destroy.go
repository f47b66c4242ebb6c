package manager

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Destroy ends a sandbox in whatever state it is and returns it terminated. A
// sandbox that is gone already is success. If the backend cannot do it now, the
// error is Unavailable, the record comes with it, terminating, and the sweep goes on
// until it is done: the tenant pays only until this call. A sandbox whose record is
// damaged can be destroyed too; nothing is charged for it.
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
		if err := m.beginTeardown(ctx, sb, why); err != nil {
			return nil, err
		}
		if sb, err = m.finishTeardown(ctx, sb); err != nil {
			return sb, err
		}
	}
	// A later generation may be there that the database does not know.
	for _, q := range m.quarantine.list(sb.ID) {
		if admin || q.Tenant == sb.Tenant {
			if _, err := m.removeUnknownObjects(ctx, sb.ID); err != nil {
				return sb, err
			}
			break
		}
	}
	return sb, nil
}

// ending is why and since when a sandbox ends.
type ending struct {
	reason  sandboxer.Reason
	message string
	fault   sandboxer.Kind
	hint    string
	at      time.Time                     // zero means now
	still   func(*sandboxer.Sandbox) bool // nil, or whether the reason holds for the record as it is now
}

// errNotNeeded says that the reason to end a sandbox has gone in the meantime.
var errNotNeeded = errors.New("it need not end any more")

// beginTeardown commits the intent to end sb, after which there is no way back. A sandbox that
// ends already is left as it is.
func (m *Manager) beginTeardown(ctx context.Context, sb *sandboxer.Sandbox, why ending) error {
	for sb.State != sandboxer.Terminating && sb.State != sandboxer.Terminated {
		err := m.step(pEnding, func() error {
			return m.move(ctx, sb, sandboxer.Terminating, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
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
		if err != nil && why.still != nil && (sb.State == sandboxer.Terminating || sb.State == sandboxer.Terminated) {
			return errNotNeeded // somebody else ended it, and pays
		}
	}
	return nil
}

// finishTeardown pays what a terminating sandbox owes, or waits for whoever is doing so, and
// returns it terminated; or terminating, with the error after which it will be tried
// again.
func (m *Manager) finishTeardown(ctx context.Context, sb *sandboxer.Sandbox) (*sandboxer.Sandbox, error) {
	for {
		j, mine, err := m.begin(ctx, sb.ID, sb.Generation, false, nil)
		if err != nil {
			return nil, err
		}
		over := (<-chan struct{})(j.done)
		tearing := !mine && !m.isMaking(j)
		if mine {
			own := *sb
			m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) { return &own, m.teardown(ctx, &own) })
		} else {
			over = m.cancelForTeardown(j, sb.Generation)
		}
		if err := wait(ctx, over); err != nil {
			return nil, err
		}
		if sb, err = m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); err != nil {
			return nil, err
		}
		switch {
		case sb.State == sandboxer.Terminated:
			return sb, nil
		case mine && j.err != nil:
			return sb, j.err
		case tearing && sb.LastError != "":
			return sb, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s is not removed yet: %s", sb.Shown(), sb.LastError).
				WithHint("it is tried again by itself")
		}
	}
}

// teardown releases everything sb has outside and then settles its ledger. The caller
// owns the job of sb.
func (m *Manager) teardown(ctx context.Context, sb *sandboxer.Sandbox) error {
	if sb.State == sandboxer.Terminated {
		return nil
	}
	report, err := m.teardownObject(ctx, sb)
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return m.scheduleRetry(ctx, sb, err)
	}
	return m.commitTerminated(ctx, sb, report)
}

// commitTerminated commits that sb has ended, and what became of its object.
func (m *Manager) commitTerminated(ctx context.Context, sb *sandboxer.Sandbox, report sandboxer.CleanupReport) error {
	err := m.step(pEnded, func() error {
		err := m.move(ctx, sb, sandboxer.Terminated, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			sb.EndedAt = now()
			sb.Cleanup = &report
			sb.Cost, w.Entries = settle(sb)
			var err error
			if w.Snapshots, err = m.dropPauseSnapshot(ctx, sb); err != nil {
				return err
			}
			for _, s := range report.Warnings {
				w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, s))
			}
			return nil
		})
		if err == nil {
			m.usage.forget(sb.ID)
		}
		return err
	})
	if err == nil && sb.Pause.Snapshot != "" {
		m.dropInternal(ctx, sb.Pause.Snapshot)
	}
	return err
}

// teardownObject tears down the object of sb and asks once more whether it is gone, where
// the backend can tell: a record must not end before its object.
func (m *Manager) teardownObject(ctx context.Context, sb *sandboxer.Sandbox) (r sandboxer.CleanupReport, err error) {
	if sb.Untouched {
		return r, nil
	}
	b, err := m.backend(sb.Extension)
	if err != nil {
		return r, err
	}
	h := handleOf(sb)
	err = m.step(pTeardown, func() (err error) { r, err = b.Teardown(ctx, h); return err })
	if err != nil {
		return r, err
	}
	if b.Can(sandboxer.CanProbe) {
		if alive, err := b.IsAlive(ctx, h); err == nil && alive == sandboxer.Alive {
			return r, sandboxer.E(sandboxer.Unavailable, nil, "%s said that it was removed, but it is still there", sb.Extension)
		}
	}
	return r, nil
}

// handleOf returns the handle of sb, or, when its creation was cut short, one that
// an extension finds it by.
func handleOf(sb *sandboxer.Sandbox) sandboxer.Handle {
	if sb.Handle.SandboxID != "" {
		return sb.Handle
	}
	return sandboxer.Handle{SandboxID: sb.ID, Generation: objectGeneration(sb), Host: sb.Host}
}

// scheduleRetry notes that a step of sb failed, and when it is tried again.
func (m *Manager) scheduleRetry(ctx context.Context, sb *sandboxer.Sandbox, cause error) error {
	m.log.WarnContext(ctx, "step failed", "sandbox", sb.ID, "generation", sb.Generation, "state", sb.State, "err", cause)
	state := sb.State
	err := m.step(pRetry, func() error {
		return m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != state {
				return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s by now", sb.Shown(), sb.State)
			}
			sb.Retries++
			sb.LastError = sandboxer.Message(cause)
			wait := backoff(sb.Retries, rand.Float64())
			if !sb.AbsentSince.IsZero() { // its object is gone: nothing far away has to come back first
				wait = min(wait, probeEvery)
			}
			sb.RetryAt = now().Add(wait)
			if sb.Retries <= 3 || sb.Retries%20 == 0 { // a backend that is away for days must not fill the database
				w.Events = append(w.Events, event(ctx, sb, sandboxer.EventRetry, sb.LastError))
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	owed := "removed"
	switch {
	case state == sandboxer.Creating && isPaused(sb):
		owed = "resumed"
	case state == sandboxer.Creating:
		owed = "made"
	case state == sandboxer.Pausing:
		owed = "paused"
	}
	e := sandboxer.E(sandboxer.Unavailable, cause, "sandbox %s is not %s yet: %s", sb.Shown(), owed, sb.LastError).
		WithHint("it is tried again by itself")
	e.RetryAfter = time.Until(sb.RetryAt)
	return e
}

// backoff is how long to wait before the nth repetition: 1s doubling to 5 minutes,
// give or take a quarter by chance (0 ≤ chance < 1).
func backoff(n int, chance float64) time.Duration {
	d := 5 * time.Minute
	if n < 10 {
		d = min(d, time.Second<<max(0, n-1))
	}
	return time.Duration(float64(d) * (0.75 + chance/2))
}
