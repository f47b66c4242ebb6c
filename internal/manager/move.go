package manager

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// sweeper is the actor of what nobody asked for.
const sweeper = "sweep"

// actor names who caused what happens in ctx, for events.
func actor(ctx context.Context) string {
	if p := sandboxer.PrincipalFrom(ctx); p.Actor != "" {
		return p.Actor
	}
	return sweeper
}

// move brings sb to the state next and is the only function that does. change, which
// sees the record as it was, may set further fields, add to what is committed with
// them, or refuse; it may run more than once. sb is brought up to date. Conflict: sb is in another state by now, from
// which this move was not meant.
func (m *Manager) move(ctx context.Context, sb *sandboxer.Sandbox, next sandboxer.State, change func(*sandboxer.Sandbox, *sandboxer.Writes) error) error {
	from := sb.State
	return m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
		if sb.State != from || !sb.State.CanBecome(next) {
			return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s and cannot become %s", sb.Shown(), sb.State, next)
		}
		if err := change(sb, w); err != nil {
			return err
		}
		switch {
		case from == sandboxer.Running && next == sandboxer.Pausing, from == sandboxer.Paused && next == sandboxer.Creating, next == sandboxer.Terminating:
			sb.Unconfirmed = "" // its deadline is a new one
		}
		sb.State = next
		sb.Retries, sb.RetryAt, sb.LastError = 0, time.Time{}, ""
		sb.AbsentSince, sb.UnresponsiveSince = time.Time{}, time.Time{}
		w.Events = append(w.Events, event(ctx, sb, sandboxer.EventState, sb.Message))
		ev := &w.Events[len(w.Events)-1]
		ev.From, ev.To, ev.Cause = from, next, sb.Reason
		return nil
	})
}

// update changes sb by compare-and-swap, reading it again and asking change again
// when somebody else was faster. An error from change stops the update.
func (m *Manager) update(ctx context.Context, sb *sandboxer.Sandbox, change func(*sandboxer.Sandbox, *sandboxer.Writes) error) error {
	for tries := 0; ; tries++ {
		next := *sb
		var w sandboxer.Writes
		if err := change(&next, &w); err != nil {
			return err
		}
		err := m.store.UpdateSandbox(ctx, &next, w)
		if err == nil {
			expired, retried := sb.ExpiresAt, sb.RetryAt
			left := sb.TakesRoom() && !next.TakesRoom()
			*sb = next
			if sb.State != sandboxer.Running {
				m.ports.end(sb.ID, 0)
			}
			m.notify(sb.ID)
			if left {
				m.roomMade(sb.Extension)
			}
			m.scheduleSweep(expired, sb.ExpiresAt)
			m.scheduleSweep(retried, sb.RetryAt)
			return nil
		}
		if !isKind(err, sandboxer.Conflict) {
			return err
		}
		conflict := err
		fresh, err := m.store.SandboxGeneration(ctx, sb.ID, sb.Generation)
		if err != nil {
			return err
		}
		if fresh.Version == sb.Version && len(w.Snapshots) > 0 && tries < 10 {
			continue // it was one of those that somebody changed
		}
		if fresh.Version == sb.Version && (w.Key != nil || next.Name != sb.Name) {
			return conflict // the key or the name is another's
		}
		if fresh.Version == sb.Version {
			return sandboxer.E(sandboxer.Internal, nil, "sandbox %s cannot be written although nobody changed it", sb.Shown())
		}
		*sb = *fresh
	}
}

// event describes something that happens to sb.
func event(ctx context.Context, sb *sandboxer.Sandbox, t sandboxer.EventType, message string) sandboxer.Event {
	return sandboxer.Event{
		At: time.Now(), SandboxID: sb.ID, ShownID: sb.ShownID, Generation: sb.Generation, Tenant: sb.Tenant,
		Type: t, Actor: actor(ctx), Message: message,
	}
}
