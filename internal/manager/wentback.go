package manager

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// The records of a database that went back in time (Options.WentBack) are older than their
// sandboxes: one may have been extended since, used, claimed from a pool, paused, resumed or
// finished. So the sweep is on hold until an administrator accepts the database: it ends and pauses
// nothing because of a time, continues no create, pause or resume, and drops no snapshot. It
// still finds sandboxes that are gone and finishes teardowns. A sandbox that waited in a pool is marked in its
// record (Sandbox.Unconfirmed) and is never given out.

// A sweepHold says whether the sweep is on hold. It is safe for concurrent use.
type sweepHold struct {
	wentBack   atomic.Pointer[time.Time] // nil: the sweep is not on hold
	acceptedAt atomic.Pointer[time.Time] // nil: it was not on hold in this process
}

// held reports whether the sweep is on hold.
func (h *sweepHold) held() bool { return h.wentBack.Load() != nil }

// deadlinesFrom is the time since which deadlines count: zero if they always did, a time after now if they do not count yet.
func (h *sweepHold) deadlinesFrom(now time.Time) time.Time {
	if h.held() {
		return now.Add(time.Hour)
	}
	if at := h.acceptedAt.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// WentBack is when the database was found to be older than before; zero if that never happened, or if an administrator has
// accepted the database.
func (m *Manager) WentBack() time.Time {
	if at := m.hold.wentBack.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// AcceptDatabase ends the hold of the sweep: deadlines count again. It needs the admin scope. If the
// sweep is not on hold, nothing happens.
func (m *Manager) AcceptDatabase(ctx context.Context) error {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
		return err
	}
	if !m.hold.held() {
		return nil
	}
	at := now()
	err := m.store.Write(ctx, sandboxer.Writes{WentBackAccepted: true, Events: []sandboxer.Event{{
		At: at, Type: sandboxer.EventWarning, Actor: events.Actor(ctx),
		Message: "an administrator accepted the database, which went back in time: deadlines count again",
	}}})
	if err != nil {
		return err
	}
	m.hold.acceptedAt.Store(&at)
	m.hold.wentBack.Store(nil)
	m.log.WarnContext(ctx, "the database that went back was accepted: deadlines count again", "actor", events.Actor(ctx))
	m.wakeSweep()
	return nil
}

// heldText says for the audit that the sweep is on hold, and what to do.
func (m *Manager) heldText() string {
	return fmt.Sprintf("the database went back in time, noticed at %s: no deadline counts until an administrator accepts it; check the sandboxes and snapshots in this list, then: sandboxer accept", m.WentBack().UTC().Format(time.RFC3339))
}

// overdueText says for the audit what happens to sb, which expired by its record, when the database
// is accepted.
func overdueText(sb *sandboxer.Sandbox) string {
	return fmt.Sprintf("its record, which may be older than the sandbox, says that it expired at %s; keep it with: sandboxer extend %s --ttl 1h; or let it end with: sandboxer accept", sb.ExpiresAt.UTC().Format(time.RFC3339), sb.Ref())
}

// claimedText says for the audit that sb, which waited in a pool, may belong to a tenant.
func claimedText(sb *sandboxer.Sandbox) string {
	return fmt.Sprintf("it waited in a pool when the database went back, and may belong to a tenant since then; no pool hands it out; remove it with: %s %s", sandboxRecords.remove, sb.ID)
}

// isOverdue reports whether sb expired by its record.
func isOverdue(sb *sandboxer.Sandbox, at time.Time) bool {
	return sb.State.Live() && sb.State != sandboxer.Terminating && !lifecycle.MayBeClaimed(sb) && !sb.ExpiresAt.IsZero() && !at.Before(sb.ExpiresAt)
}
