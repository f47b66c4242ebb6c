package manager

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// warnAt is the part of the hold, in percent, at which an event reports that a sandbox nears its hold.
const warnAt = 80

// meterDue reports whether it is time to read the meters again.
func (m *Manager) meterDue() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	due := time.Since(m.lastMetered) >= m.opts.meterEvery
	if due {
		m.lastMetered = time.Now()
	}
	return due
}

// meterAll reads the meters of all running sandboxes and acts on the readings.
func (ps *pass) meterAll(ctx context.Context) {
	for _, e := range ps.m.extensions() {
		if e.Backend == nil || !e.Backend.Can(sandboxer.CanMeter) {
			continue
		}
		q := sandboxer.Query{Extension: e.Info.ID, States: []sandboxer.State{sandboxer.Running}}
		err := ps.m.records(ctx, q, func(sb *sandboxer.Sandbox) {
			if sb.Damaged != "" || sb.Quote.Amount == 0 || !ps.m.box(sb).isMetered() || !ps.m.sweepLocks.tryLock(billOf(sb)) {
				return
			}
			ps.async(func() {
				defer ps.m.sweepLocks.unlock(billOf(sb))
				release, err := ps.m.slot(ctx, sb.Extension)
				if err != nil {
					return
				}
				err = ps.m.box(sb).meter(ctx)
				release()
				if err == nil && lifecycle.IsOverspent(sb) {
					ps.sweepOne(sb, sandboxer.Unknown)
				}
				ps.settled(ctx, sb, err)
			})
		})
		if err != nil && ctx.Err() == nil {
			ps.m.log.Error("sweep of meters", "extension", e.Info.ID, "err", err)
		}
	}
}

// meter stores the reading of the meter of sb in its record, with an event if the reading nears or reaches the hold. If the
// profile of sb says so, it then puts more on hold. Any other consequence is up to lifecycle.Decide.
func (bx box) meter(ctx context.Context) error {
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil {
		return err
	}
	u, err := b.MeterActual(ctx, handleOf(bx.sb), lived(bx.sb, now()))
	if err != nil {
		bx.m.log.DebugContext(ctx, "meter", "sandbox", bx.sb.ID, "err", err)
		return nil // probes find out whether it is gone
	}
	u.At, u.Final = now(), false
	commit := func(extend bool) error {
		return bx.m.step(pMetered, func() error {
			return bx.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
				if sb.State != sandboxer.Running {
					return errNotNeeded
				}
				keepMetered(ctx, sb, w, u, extend)
				return nil
			})
		})
	}
	extends := bx.sb.Spec.Profile.OnCost == sandboxer.CostExtend
	err = commit(extends)
	if extends && isKind(err, sandboxer.NoCredit) {
		err = commit(false)
	}
	return err
}

// keepMetered adds the reading of the meter to sb, and its consequences to w.
func keepMetered(ctx context.Context, sb *sandboxer.Sandbox, w *sandboxer.Writes, u sandboxer.Usage, extend bool) {
	near := func(cost sandboxer.Credits) bool { return cost >= sb.Quote.Amount-sb.Quote.Amount/100*(100-warnAt) }
	told, held := sb.Usage.Cost, sb.Quote.Amount
	sb.Usage = u
	switch {
	case lifecycle.IsOverspent(sb) && extend && holdCost(ctx, sb, w):
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventBilling, fmt.Sprintf("it has cost %s of %s on hold: now %s are on hold", u.Cost, held, sb.Quote.Amount)))
	case near(u.Cost) && !near(told):
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventBilling, fmt.Sprintf("it has cost %s of %s on hold", u.Cost, held)))
	}
}

// holdCost puts the quoted amount of sb on hold once more, as often as necessary to exceed the reading of its meter. If the
// request allows no more, it changes nothing and returns false. The tenant must be able to pay (NoCredit of the store).
func holdCost(ctx context.Context, sb *sandboxer.Sandbox, w *sandboxer.Writes) bool {
	quoted := max(sb.Quote.For(sb.Quote.Duration), 1)
	if sb.Usage.Cost > math.MaxInt64-quoted-sb.Quote.Amount {
		return false
	}
	more := ((sb.Usage.Cost-sb.Quote.Amount)/quoted + 1) * quoted
	if sb.MaxCost > 0 && sb.Quote.Amount+more > sb.MaxCost {
		return false
	}
	w.Entries, w.Cover = append(w.Entries, hold(ctx, sb, fmt.Sprintf("cost:%d", sb.Version), more)), true
	sb.Quote.Amount += more
	return true
}
