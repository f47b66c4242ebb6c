package manager

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// The invariants that Audit checks. They hold at every moment, also after a broker died, except where a grace period is named.
const (
	invObject    = "every object of a backend belongs to one live sandbox"
	invTwice     = "no generation has two objects"
	invAsked     = "every extension lists its objects" // an unchecked object is not proven sound
	invStates    = "states follow the table, each change with cause and actor"
	invState     = "a record has the state of its last event"
	invNegate    = "no tenant has spent more than it was granted"
	invResolve   = "a hold is resolved once: an ended sandbox has nothing on hold, unless its bill is pending"
	invPending   = "a bill is pending for an hour at most" // except for two sweeps
	invOver      = "no more is charged than was on hold"
	invUsage     = "usage rows charge what was posted"
	invCost      = "the cost of a sandbox is the amount that was posted for it"
	invQuote     = "the hold of a live sandbox is the amount that was quoted"
	invExpired   = "no sandbox runs past its expiry"     // except for two sweeps
	invCurrent   = "no record is older than its sandbox" // the database did not go back, or was accepted
	invWhole     = "every record can be read"
	invSaved     = "a paused sandbox has a sealed snapshot, or a frozen object"
	invForm      = "a sealed snapshot is stored in every form that its record names"
	invRead      = "the stored files of a snapshot are unchanged"
	invKept      = "stored files belong to a snapshot that is not dropped"
	invCache     = "caches are within their limits"
	invForgotten = "the leftovers of a forgotten sandbox are gone"
	invOwn       = "a snapshot of a pause or a fork is still needed" // except for two sweeps
	invName      = "a name belongs to one live sandbox of its tenant"
	invPooled    = "a sandbox in a pool has no tenant, and every other sandbox has one"
	invPool      = "a pool has only sandboxes that its profile makes now, and no more than its size" // except for two sweeps
)

// Audit compares the database with itself and with the listing of every backend, and returns the differences. It changes
// nothing and needs the admin scope. A backend, or a part of it, that does not answer is one of the violations; the others are
// checked all the same.
func (m *Manager) Audit(ctx context.Context) (Audit, error) { return m.audit(ctx, false) }

// DeepAudit is Audit, and also reads all stored data of every portable snapshot, one after the other and in little memory. It
// may take long, and ends with ctx.
func (m *Manager) DeepAudit(ctx context.Context) (Audit, error) { return m.audit(ctx, true) }

// maxViolations bounds how many violations one audit names.
const maxViolations = 1000

func (m *Manager) audit(ctx context.Context, deep bool) (Audit, error) {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
		return Audit{}, err
	}
	a := &auditing{m: m, Audit: Audit{Violations: []Violation{}, named: map[generationKey]bool{}, deep: deep}}
	for _, check := range []func(context.Context) error{a.auditObjects, a.auditHistory, a.auditLedger, a.auditRecords, a.auditPools, a.auditSnapshots, a.auditCaches, a.auditForgotten} {
		if err := check(ctx); err != nil {
			return a.Audit, err
		}
	}
	return a.Audit, nil
}

// auditing is an audit in progress.
type auditing struct {
	Audit
	m *Manager
}

func (a *Audit) violated(invariant, id, format string, args ...any) {
	a.add(Violation{invariant, id, fmt.Sprintf(format, args...)})
}

// add adds v to the result, or only counts it if the result has maxViolations already.
func (a *Audit) add(v Violation) {
	if len(a.Violations) >= maxViolations {
		a.LeftOut++
		return
	}
	a.Violations = append(a.Violations, v)
}

// damaged names a damaged record once.
func (a *Audit) damaged(sb *sandboxer.Sandbox) {
	k := generationKey{sb.ID, sb.Generation}
	if !a.named[k] {
		a.named[k] = true
		a.add(sandboxRecords.violate(sb))
	}
}

// auditObjects compares listings with the database. It checks each difference once more, because the object may have been torn
// down between the two readings.
func (a *auditing) auditObjects(ctx context.Context) error {
	for _, e := range a.m.extensions() {
		if e.Backend == nil { // what was never used has nothing that could be missed
			for _, q := range []sandboxer.Query{{Extension: e.Info.ID, Limit: 1}, {DebtsAt: e.Info.ID, States: liveStates, Limit: 1}} {
				items, _, err := a.m.store.Sandboxes(ctx, q)
				if err != nil {
					return err
				}
				if len(items) > 0 {
					a.violated(invAsked, "", "%s could not be opened: %s", e.Info.ID, e.Info.Problem)
					break
				}
			}
			continue
		}
		suspects, n, silent, err := e.unexplained(ctx)
		if err != nil {
			return err
		}
		a.Checked += n
		if silent != nil {
			a.violated(invAsked, "", "%s: %s", e.Info.ID, sandboxer.Message(silent))
		}
		if len(suspects) == 0 {
			continue
		}
		again, _, _, err := e.unexplained(ctx)
		if err != nil {
			return err
		}
		for s, v := range suspects {
			if _, ok := again[s]; ok {
				a.add(v)
			}
		}
	}
	return nil
}

// unexplained checks the objects that the extension lists. silent says why the listing may be incomplete.
func (e *extension) unexplained(ctx context.Context) (out map[objectKey]Violation, n int, silent, err error) {
	if e.Backend == nil || !e.Backend.Can(sandboxer.CanList) {
		return nil, 0, nil, nil
	}
	count := map[objectKey]int{}
	for h, err := range e.Backend.ListRunning(ctx, e.m.opts.Owner) {
		if ctx.Err() != nil {
			return nil, 0, nil, context.Cause(ctx)
		}
		if err != nil {
			silent = err
			break
		}
		count[objectKey{e.Info.ID, h.SandboxID, h.Generation}]++
	}
	out = map[objectKey]Violation{}
	for s, n := range count {
		_, v, err := e.m.recordStatusOf(ctx, s)
		switch {
		case err != nil:
			return nil, 0, nil, err
		case v == recordMissing:
			out[s] = Violation{invObject, s.id, e.quarantineText(s)}
		case v == recordEnded:
			out[s] = Violation{invObject, s.id, fmt.Sprintf("%s has generation %d of it, the database has no live one", e.Info.ID, s.generation)}
		case n > 1:
			out[s] = Violation{invTwice, s.id, fmt.Sprintf("%s lists generation %d of it %d times", e.Info.ID, s.generation, n)}
		}
	}
	return out, len(count), silent, nil
}

// A generationKey names one generation of an ID.
type generationKey struct {
	id         string
	generation int
}

// auditHistory replays the events.
func (a *auditing) auditHistory(ctx context.Context) error {
	states := map[generationKey]sandboxer.State{}
	q := sandboxer.EventQuery{Limit: sandboxer.MaxPage}
	for {
		events, err := a.m.store.Events(ctx, q)
		if err != nil {
			return err
		}
		for _, ev := range events {
			q.After = ev.Seq
			if ev.Type != sandboxer.EventState {
				continue
			}
			a.Checked++
			k := generationKey{ev.SandboxID, ev.Generation}
			was, known := states[k]
			switch {
			case ev.Actor == "":
				a.violated(invStates, k.id, "event %d has no actor", ev.Seq)
			case ev.To != sandboxer.Running && ev.To != sandboxer.Terminated && ev.Cause == "":
				a.violated(invStates, k.id, "event %d (%s) has no cause", ev.Seq, ev.To)
			case !known && (ev.From != "" || ev.To != sandboxer.Creating),
				known && (ev.From != was || !was.CanBecome(ev.To)):
				a.violated(invStates, k.id, "event %d of generation %d: from %q (was %q) to %q", ev.Seq, k.generation, ev.From, was, ev.To)
			}
			states[k] = ev.To
		}
		if len(events) < q.Limit {
			break
		}
	}
	for k, state := range states {
		if err := a.auditState(ctx, k, state); err != nil {
			return err
		}
	}
	return nil
}

func (a *auditing) auditState(ctx context.Context, k generationKey, state sandboxer.State) error {
	sb, err := a.m.recheckRecord(ctx, k, func(sb *sandboxer.Sandbox) (bool, error) {
		if sb.State == state {
			return true, nil
		}
		q := sandboxer.EventQuery{SandboxID: k.id, Limit: sandboxer.MaxPage} // it may have moved on since
		for {
			events, err := a.m.store.Events(ctx, q)
			for _, ev := range events {
				q.After = ev.Seq
				if ev.Type == sandboxer.EventState && ev.Generation == k.generation {
					state = ev.To
				}
			}
			if err != nil || len(events) < q.Limit {
				return sb.State == state, err
			}
		}
	})
	switch {
	case isKind(err, sandboxer.NotFound):
		a.violated(invState, k.id, "generation %d has events and no record", k.generation)
	case sb != nil && sb.Damaged != "":
		a.damaged(sb)
	case err != nil:
		return err
	case sb.State != state:
		a.violated(invState, k.id, "generation %d is %s, its events say %s", k.generation, sb.State, state)
	}
	return nil
}

// recheckRecord calls judge with the record of k until judge finds no fault, or until the record did not change meanwhile. It
// returns the judged record.
func (m *Manager) recheckRecord(ctx context.Context, k generationKey, judge func(*sandboxer.Sandbox) (bool, error)) (*sandboxer.Sandbox, error) {
	sb, err := m.store.SandboxGeneration(ctx, k.id, k.generation)
	for err == nil {
		var well bool
		if well, err = judge(sb); err != nil || well {
			break
		}
		var again *sandboxer.Sandbox
		if again, err = m.store.SandboxGeneration(ctx, k.id, k.generation); err != nil || again.Version == sb.Version {
			break
		}
		sb = again
	}
	return sb, err
}

func (a *auditing) auditRecords(ctx context.Context) error {
	names := map[[2]string]string{}
	held, at := a.m.hold.held(), time.Now()
	if held {
		a.violated(invCurrent, "", "%s", a.m.heldText())
	}
	err := a.m.records(ctx, unsettledQuery, func(sb *sandboxer.Sandbox) {
		over := at.Sub(sb.EndedAt) - billWithin
		if sb.Billing == sandboxer.BillingPending && over > 2*a.m.opts.SweepEvery+a.m.opts.Grace {
			a.violated(invPending, sb.ID, "generation %d: since %s", sb.Generation, sb.EndedAt)
		}
	})
	if err != nil {
		return err
	}
	return a.m.records(ctx, sandboxer.Query{States: liveStates}, func(sb *sandboxer.Sandbox) {
		a.Checked++
		if sb.Damaged != "" {
			a.damaged(sb)
			return
		}
		for _, on := range append([]sandboxer.Debt{{Extension: sb.Extension}}, sb.Debts...) {
			if a.m.extension(on.Extension) == nil {
				a.violated(invAsked, sb.ID, "%s, which has it or may have it, is no longer configured", on.Extension)
			}
		}
		over := at.Sub(sb.ExpiresAt)
		switch {
		case lifecycle.MayBeClaimed(sb):
			a.violated(invCurrent, sb.ID, "%s", claimedText(sb))
		case held && isOverdue(sb, at):
			a.violated(invCurrent, sb.ID, "%s", overdueText(sb))
		case !held && lifecycle.HasReadyObject(sb) && !sb.ExpiresAt.IsZero() && over > 2*a.m.opts.SweepEvery+a.m.opts.Grace:
			a.violated(invExpired, sb.ID, "it expired %s ago", over.Round(time.Second))
		}
		if sb.Name != "" {
			key := [2]string{sb.Tenant, sb.Name}
			if other := names[key]; other != "" {
				a.violated(invName, sb.ID, "it has the name %q, like %s", sb.Name, other)
			}
			names[key] = sb.ID
		}
	})
}

// auditPools compares waiting sandboxes with their profiles. After claims, changes and failures a pool may have too many for a
// moment, so its keeper gets time to correct that.
func (a *auditing) auditPools(ctx context.Context) error {
	late := func(since ...time.Time) bool {
		return time.Since(slices.MaxFunc(since, time.Time.Compare)) > 2*a.m.opts.SweepEvery+a.m.opts.Grace
	}
	waiting := map[*pool]int{}
	return a.m.records(ctx, sandboxer.Query{States: liveStates}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged != "" || lifecycle.MayBeClaimed(sb) {
			return
		}
		switch sb.State {
		case sandboxer.Warm:
			if !lifecycle.IsPooled(sb) {
				a.violated(invPooled, sb.ID, "it is warm and belongs to tenant %q, pool %q", sb.Tenant, sb.Pool)
				return
			}
		case sandboxer.Running, sandboxer.Pausing, sandboxer.Paused:
			if lifecycle.IsPooled(sb) {
				a.violated(invPooled, sb.ID, "it is %s, was in a pool, and has no tenant", sb.State)
			}
			return
		default:
			return
		}
		p := a.m.poolOf(sb.Profile)
		if p == nil {
			if late(a.m.started, sb.PooledAt) {
				a.violated(invPool, sb.ID, "it waits for profile %s, which keeps no pool", sb.Profile)
			}
			return
		}
		p.mu.Lock()
		key, since := p.key, p.keySince
		p.mu.Unlock()
		if key != "" && sb.Pool != key {
			if late(a.m.started, sb.PooledAt, since) {
				a.violated(invPool, sb.ID, "it is not what profile %s makes now", sb.Profile)
			}
			return
		}
		if late(a.m.started, sb.PooledAt) {
			if waiting[p]++; waiting[p] > p.profile.Pool.Size {
				a.violated(invPool, sb.ID, "it is one more than the %d that profile %s keeps", p.profile.Pool.Size, sb.Profile)
			}
		}
	})
}

// Audit is the result of comparing the database with itself and with every
// backend's listing.
type Audit struct {
	Checked    int         `json:"checked"`    // records, objects, tenants and events looked at
	Violations []Violation `json:"violations"` // at most 1,000
	LeftOut    int         `json:"left_out"`   // how many more there are

	named map[generationKey]bool // damaged records
	deep  bool
}

// Violation is one broken invariant.
type Violation struct {
	Invariant string `json:"invariant"`
	SandboxID string `json:"sandbox_id,omitempty"`
	Detail    string `json:"detail"`
}
