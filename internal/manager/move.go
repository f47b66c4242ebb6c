package manager

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
)

// move changes the state of sb to next. It is the only function that does. change gets the record before the move. It may set
// further fields, add to the commit, or refuse; it may run more than once. sb is updated to the committed record. Conflict: sb
// is now in a state from which this move is not allowed.
func (bx box) move(ctx context.Context, next sandboxer.State, change func(*sandboxer.Sandbox, *sandboxer.Writes) error) error {
	from := bx.sb.State
	return bx.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
		if sb.State != from || !sb.State.CanBecome(next) {
			return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s and cannot become %s", sb.Shown(), sb.State, next)
		}
		if err := change(sb, w); err != nil {
			return err
		}
		if next == sandboxer.Terminated && len(sb.Debts) > 0 {
			return sandboxer.E(sandboxer.Internal, nil, "sandbox %s cannot end: something may exist of it on %s", sb.Shown(), sb.Debts[0].Extension)
		}
		if next == sandboxer.Terminating {
			sb.Unconfirmed = "" // its object goes, whose ever it is
		}
		sb.State = next
		if sb.Billing == "" { // else they are of the bill
			sb.Retries, sb.RetryAt, sb.LastError = 0, time.Time{}, ""
		}
		sb.AbsentSince, sb.UnresponsiveSince = time.Time{}, time.Time{}
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventState, sb.Message))
		ev := &w.Events[len(w.Events)-1]
		ev.From, ev.To, ev.Cause = from, next, sb.Reason
		return nil
	})
}

// update changes sb by compare-and-swap. It reads sb and calls change again
// when another writer was faster. An error from change stops the update.
func (bx box) update(ctx context.Context, change func(*sandboxer.Sandbox, *sandboxer.Writes) error) error {
	for tries := 0; ; tries++ {
		next := *bx.sb
		var w sandboxer.Writes
		if err := change(&next, &w); err != nil {
			return err
		}
		if w.Cover && w.Quota == nil { // it puts more on hold
			w.Quota = bx.m.QuotaFor(next.Tenant, ofSpending...)
		}
		err := bx.m.store.UpdateSandbox(ctx, &next, w)
		if err == nil {
			expired, retried, owed, from := bx.sb.ExpiresAt, bx.sb.RetryAt, bx.sb.DebtsDue(), bx.sb.Extension
			left := bx.sb.TakesRoom() && (!next.TakesRoom() || next.Extension != from)
			*bx.sb = next
			if bx.sb.State != sandboxer.Running {
				bx.m.ports.End(bx.sb.ID, 0)
			}
			bx.m.events.Notify(bx.sb.ID)
			if left {
				bx.m.roomMade(from)
			}
			bx.m.scheduleSweep(expired, bx.sb.ExpiresAt)
			bx.m.scheduleSweep(retried, bx.sb.RetryAt)
			bx.m.scheduleSweep(owed, bx.sb.DebtsDue())
			return nil
		}
		if !isKind(err, sandboxer.Conflict) {
			return err
		}
		conflict := err
		fresh, err := bx.m.store.SandboxGeneration(ctx, bx.sb.ID, bx.sb.Generation)
		if err != nil {
			return err
		}
		if fresh.Version == bx.sb.Version && len(w.Snapshots) > 0 && tries < 10 {
			continue // it was one of those that another caller changed
		}
		if fresh.Version == bx.sb.Version && (w.Key != nil || next.Name != bx.sb.Name) {
			return conflict // the key or the name is another's
		}
		if fresh.Version == bx.sb.Version {
			return sandboxer.E(sandboxer.Internal, nil, "the record of sandbox %s cannot be written, although no other request changed it", bx.sb.Shown())
		}
		*bx.sb = *fresh
	}
}
