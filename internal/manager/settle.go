package manager

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

const (
	// billWithin is how long a terminated sandbox may keep its hold because its backend does not know the cost yet.
	billWithin = time.Hour
	// correctWithin is how long after that the backend is still asked about a sandbox that was charged by its running time.
	correctWithin = 24 * time.Hour
	// readWithin bounds the reading before a teardown, which must not wait for a slow meter.
	readWithin = 5 * time.Second
)

// unsettledQuery selects ended sandboxes with something on hold.
var unsettledQuery = sandboxer.Query{States: []sandboxer.State{sandboxer.Terminated}, Unsettled: true}

// A reading is the answer of a backend's meter about one sandbox; the zero reading is none.
type reading struct {
	usage   sandboxer.Usage
	pending string // why the backend does not know yet what it cost; "" if it does, or never will
}

// lived is the running time of sb, without its pauses, until the request to end it or the time at.
func lived(sb *sandboxer.Sandbox, at time.Time) time.Duration {
	switch {
	case sb.ReadyAt.IsZero():
		return 0
	case !sb.EndingAt.IsZero():
		at = sb.EndingAt
	}
	if lifecycle.IsPaused(sb) && sb.Pause.At.Before(at) {
		at = sb.Pause.At
	}
	return at.Sub(sb.ReadyAt) - sb.PausedFor
}

// isMetered reports whether the backend's meter counts exactly the life of sb: not the time that its object waited in a pool,
// and not only the last of several objects. A sandbox that never ran costs nothing.
func (bx box) isMetered() bool {
	sb := bx.sb
	if sb.ReadyAt.IsZero() || sb.Untouched || sb.Pool != "" {
		return false
	}
	resumed := !sb.ResumedAt.IsZero() || lifecycle.IsPaused(sb) // else its former objects never were ready
	if lifecycle.ObjectGeneration(sb) != sb.Generation && resumed {
		return false
	}
	b, err := bx.m.backend(sb.Extension)
	return err == nil && b.Can(sandboxer.CanMeter)
}

// keepReading asks the meter of a sandbox that is about to be removed, and stores the answer in its record, because the backend
// may forget it afterwards. A failure to read delays nothing.
func (bx box) keepReading(ctx context.Context) error {
	if !bx.isMetered() || bx.sb.Usage.At.After(bx.sb.EndingAt) {
		return nil
	}
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil {
		return nil
	}
	asking, cancel := context.WithTimeout(ctx, readWithin)
	u, err := b.MeterActual(asking, handleOf(bx.sb), lived(bx.sb, now()))
	cancel()
	if err != nil {
		bx.m.log.DebugContext(ctx, "meter before the teardown", "sandbox", bx.sb.ID, "err", err)
		return nil
	}
	if u.Final = false; u == (sandboxer.Usage{At: u.At}) {
		return nil // it says nothing
	}
	u.At = now() // the backend's clock may be another
	return bx.m.step(pReading, func() error {
		return bx.update(ctx, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if sb.State == sandboxer.Terminated {
				return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s", sb.Shown(), sb.State)
			}
			sb.Usage = u
			return nil
		})
	})
}

// readMeter asks the meter of a sandbox whose object is proven gone.
func (bx box) readMeter(ctx context.Context) reading {
	if !bx.isMetered() {
		return reading{}
	}
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil {
		return reading{}
	}
	u, err := b.MeterActual(ctx, handleOf(bx.sb), lived(bx.sb, now()))
	u.At = now()
	switch {
	case isKind(err, sandboxer.NotFound):
		return reading{}
	case err != nil:
		return reading{pending: sandboxer.Message(err)}
	case !u.Final:
		return reading{usage: u, pending: bx.sb.Extension + " does not know yet what it cost"}
	}
	return reading{usage: u}
}

// settle adds the cost of sb, which has ended, to its record and to w: the final cost of the backend, or else the price of the
// time from ready to the request to end it, without its pauses. The cost is posted, and the rest of the hold (Quote.Amount) is
// released. While the backend does not know yet, the bill is pending, for billWithin at most. over is the cost beyond the hold,
// which the tenant does not pay.
func settle(ctx context.Context, sb *sandboxer.Sandbox, w *sandboxer.Writes, r reading) (over sandboxer.Credits) {
	if !r.usage.At.IsZero() {
		sb.Usage = r.usage
	}
	tell := func(format string, args ...any) {
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventBilling, fmt.Sprintf(format, args...)))
	}
	if r.pending != "" && sb.Quote.Amount > 0 && now().Before(sb.EndedAt.Add(billWithin)) {
		if sb.Billing == "" {
			sb.Billing, sb.Retries = sandboxer.BillingPending, 0
			tell("the bill is pending until %s: %s", sb.EndedAt.Add(billWithin).UTC().Format(time.RFC3339), r.pending)
		}
		askLater(sb, r.pending)
		return 0
	}
	if sb.Billing != "" {
		sb.Billing, sb.Retries, sb.LastError, sb.RetryAt = "", 0, "", time.Time{}
	}
	sb.Cost = 0
	if !sb.ReadyAt.IsZero() {
		sb.Cost = min(sb.Quote.For(lived(sb, sb.EndedAt)), sb.Quote.Amount)
	}
	actual := sb.Cost
	switch {
	case r.pending != "" && sb.Quote.Amount > 0:
		tell("%s: it is settled by the time that it ran", r.pending)
		sb.Billing = sandboxer.BillingEstimated
		askLater(sb, r.pending)
	case priced(sb):
		sb.Cost, actual = min(sb.Usage.Cost, sb.Quote.Amount), sb.Usage.Cost
		if over = sb.Usage.Cost - sb.Cost; over > 0 {
			tell("it cost %s, %s more than was on hold, which is not charged", sb.Usage.Cost, over)
		}
	}
	w.Entries = append(w.Entries, entries(
		booking(sb, "post", sandboxer.EntryPost, sb.Cost),
		booking(sb, "void", sandboxer.EntryVoid, sb.Quote.Amount-sb.Cost),
	)...)
	if row := usageRow(sb, sandboxer.UsageSettled, actual); row.Key != "" {
		w.Usage = append(w.Usage, row)
	}
	return over
}

// priced reports whether the reading is the final cost of sb. A reading without prices does not replace the profile's price.
func priced(sb *sandboxer.Sandbox) bool {
	return sb.Usage.Final && (sb.Quote.ByBackend || sb.Usage.Cost > 0)
}

// askLater notes why the backend of sb does not know the cost, and the time of the next question.
func askLater(sb *sandboxer.Sandbox, why string) {
	sb.Retries++
	sb.LastError, sb.RetryAt = why, now().Add(lifecycle.Backoff(sb.Retries, rand.Float64()))
}

// usageRow is the usage row of sb, which has ended. The row has no key if sb never ran for a tenant: then nothing is written.
func usageRow(sb *sandboxer.Sandbox, t sandboxer.UsageType, cost sandboxer.Credits) sandboxer.UsageRow {
	if sb.ReadyAt.IsZero() || sb.Tenant == "" {
		return sandboxer.UsageRow{}
	}
	row := sandboxer.UsageRow{
		Key: bookingKey(sb, "usage"), Type: t, At: now(), Tenant: sb.Tenant, SandboxID: sb.ID, ShownID: sb.ShownID, Generation: sb.Generation,
		Consumer: sb.Consumer, Labels: sb.Spec.Labels, Profile: sb.Profile, Extension: sb.Extension, Host: sb.Host,
		From: sb.ReadyAt, Until: sb.EndedAt, Ran: max(lived(sb, sb.EndedAt), 0),
		Charged: sb.Cost, Cost: cost, Overrun: max(cost-sb.Cost, 0), Final: sb.Billing == "", Meter: sb.Usage, Quote: sb.Quote,
	}
	if !sb.EndingAt.IsZero() {
		row.Until = sb.EndingAt
	}
	if t == sandboxer.UsageCorrection {
		row.Key, row.Corrects, row.Charged = bookingKey(sb, "usage:correction"), row.Key, 0
	}
	return row
}

// correct adds the cost that the backend reports now for sb, which was charged by its running time, to its record and to w. The
// ledger does not change. If the backend does not know yet, it is asked again, for correctWithin at most.
func correct(ctx context.Context, sb *sandboxer.Sandbox, w *sandboxer.Writes, r reading) (over sandboxer.Credits) {
	if r.pending != "" && now().Before(sb.EndedAt.Add(billWithin+correctWithin)) {
		askLater(sb, r.pending)
		return 0
	}
	sb.Billing, sb.Retries, sb.LastError, sb.RetryAt = "", 0, "", time.Time{}
	if r.pending != "" || r.usage.At.IsZero() {
		return 0
	}
	sb.Usage = r.usage
	cost := sb.Cost
	if priced(sb) {
		cost = sb.Usage.Cost
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventBilling, fmt.Sprintf("its backend says now that it cost %s: the charge stays at %s", cost, sb.Cost)))
	}
	row := usageRow(sb, sandboxer.UsageCorrection, cost)
	w.Usage = append(w.Usage, row)
	return row.Overrun
}

// overrun counts what a sandbox cost beyond its hold.
func (m *Manager) overrun(sb *sandboxer.Sandbox, over sandboxer.Credits) {
	if over > 0 && m.opts.Overrun != nil {
		m.opts.Overrun(sb.Extension, over)
	}
}

// settlePending settles pending bills, and corrects estimated ones, when their time comes.
func (ps *pass) settlePending(ctx context.Context) {
	ps.settleAll(ctx, unsettledQuery, billWithin)
	ps.settleAll(ctx, sandboxer.Query{Billing: sandboxer.BillingEstimated}, billWithin+correctWithin)
}

// settleAll does that for the records that q selects. It no longer waits for a backend once within has passed since their end.
func (ps *pass) settleAll(ctx context.Context, q sandboxer.Query, within time.Duration) {
	err := ps.m.records(ctx, q, func(sb *sandboxer.Sandbox) {
		if sb.Damaged != "" || sb.Billing == "" {
			return
		}
		if !now().Before(sb.EndedAt.Add(within)) { // whatever its backend does
			ps.settled(ctx, sb, ps.m.box(sb).commitBill(ctx, reading{pending: sb.LastError}))
			return
		}
		if now().Before(sb.RetryAt) || !ps.m.sweepLocks.tryLock(billOf(sb)) { // a former pass waits for its backend
			return
		}
		ps.async(func() {
			defer ps.m.sweepLocks.unlock(billOf(sb))
			release, err := ps.m.slot(ctx, sb.Extension)
			if err != nil {
				return
			}
			defer release()
			r := reading{pending: sb.Extension + " cannot be asked now"}
			if bx := ps.m.box(sb); bx.isMetered() {
				r = bx.readMeter(ctx)
			}
			ps.settled(ctx, sb, ps.m.box(sb).commitBill(ctx, r))
		})
	})
	if err != nil && ctx.Err() == nil {
		ps.m.log.Error("sweep of pending bills", "err", err)
	}
}

// settled notes the end of a try to settle sb.
func (ps *pass) settled(ctx context.Context, sb *sandboxer.Sandbox, err error) {
	if err != nil && err != errNotNeeded && ctx.Err() == nil {
		ps.count(func(r *SweepReport) { r.Failed++ })
		ps.m.log.Warn("settle", "sandbox", sb.ID, "generation", sb.Generation, "err", err)
	}
}

// billOf is the name of the bill of sb among the locks of the sweep. It has the generation, because a later sandbox may have
// the same ID.
func billOf(sb *sandboxer.Sandbox) string { return bookingKey(sb, "bill") }

// commitBill settles the pending bill of sb by that reading, or corrects an estimated one, or notes when its backend is asked again.
func (bx box) commitBill(ctx context.Context, r reading) error {
	var over sandboxer.Credits
	err := bx.m.step(pSettled, func() error {
		return bx.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			switch sb.Billing {
			case sandboxer.BillingPending:
				over = settle(ctx, sb, w, r)
			case sandboxer.BillingEstimated:
				over = correct(ctx, sb, w, r)
			default:
				return errNotNeeded
			}
			return nil
		})
	})
	if err == nil {
		bx.m.overrun(bx.sb, over)
		bx.m.sinks.Wake()
	}
	return err
}
