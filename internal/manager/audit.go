package manager

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// The invariants that Audit checks. They are kept at every instant, also by a broker
// that dies, except where a grace is named.
const (
	invObject    = "every object outside belongs to one living sandbox"
	invTwice     = "no generation has two objects"
	invAsked     = "every extension says what it has" // what was not checked is not sound
	invStates    = "states follow the table, each change with cause and actor"
	invState     = "a record is in the state its last event says"
	invNegate    = "no tenant has spent more than it was granted"
	invResolve   = "a hold is resolved once: an ended sandbox has nothing on hold"
	invOver      = "no more is charged than was on hold"
	invCost      = "what a sandbox cost is what was posted for it"
	invQuote     = "what is on hold for a living sandbox is what was quoted"
	invExpired   = "no sandbox runs past its expiry"     // but for two sweeps
	invCurrent   = "no record is older than its sandbox" // the database did not go back, or that is settled
	invWhole     = "every record can be read"
	invSaved     = "a paused sandbox has a sealed snapshot, or an object that stands still"
	invForm      = "a sealed snapshot is kept in every form that it says"
	invRead      = "what is kept of a snapshot is what was saved"
	invKept      = "what is kept of snapshots belongs to one that is not dropped"
	invCache     = "what is kept for later sandboxes is within its bounds"
	invForgotten = "what was given up is gone"
	invOwn       = "a snapshot that the broker made for itself is needed" // but for two sweeps
	invName      = "a name means one living sandbox of its tenant"
	invPooled    = "what is in a pool is nobody's, and whoever has a sandbox is known"
	invPool      = "a pool has what its profile makes now, and no more than that asks for" // but for two sweeps
)

// Audit compares the database with itself and with what every backend lists, and
// says where the two differ. It changes nothing and needs the admin scope. That a backend,
// or a part of it, cannot be asked is one of the violations, beside those of the rest.
func (m *Manager) Audit(ctx context.Context) (Audit, error) { return m.audit(ctx, false) }

// DeepAudit is Audit, and reads all that is kept of every portable snapshot, one after
// the other and in little memory, which may take long; it ends with ctx.
func (m *Manager) DeepAudit(ctx context.Context) (Audit, error) { return m.audit(ctx, true) }

// maxViolations bounds how many violations one audit names.
const maxViolations = 1000

func (m *Manager) audit(ctx context.Context, deep bool) (Audit, error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return Audit{}, err
	}
	a := Audit{Violations: []Violation{}, named: map[generationKey]bool{}, deep: deep}
	for _, check := range []func(context.Context, *Audit) error{m.auditObjects, m.auditHistory, m.auditLedger, m.auditRecords, m.auditPools, m.auditSnapshots, m.auditCaches, m.auditForgotten} {
		if err := check(ctx, &a); err != nil {
			return a, err
		}
	}
	return a, nil
}

func (a *Audit) violated(invariant, id, format string, args ...any) {
	a.add(Violation{invariant, id, fmt.Sprintf(format, args...)})
}

// add names v, or counts it where enough are named.
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

// auditObjects holds listings against the database. What does not fit is looked at
// again: between the two looks it may have been torn down.
func (m *Manager) auditObjects(ctx context.Context, a *Audit) error {
	for _, e := range m.extensions() {
		if e.Backend == nil { // what was never used has nothing that could be missed
			items, _, err := m.store.Sandboxes(ctx, sandboxer.Query{Extension: e.Info.ID, Limit: 1})
			if err != nil {
				return err
			}
			if len(items) > 0 {
				a.violated(invAsked, "", "%s could not be opened: %s", e.Info.ID, e.Info.Problem)
			}
			continue
		}
		suspects, n, silent, err := m.unexplained(ctx, e)
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
		again, _, _, err := m.unexplained(ctx, e)
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

// unexplained looks at what the extension lists, and says in silent why that may not be all.
func (m *Manager) unexplained(ctx context.Context, e *extension) (out map[objectKey]Violation, n int, silent, err error) {
	if e.Backend == nil || !e.Backend.Can(sandboxer.CanList) {
		return nil, 0, nil, nil
	}
	count := map[objectKey]int{}
	for h, err := range e.Backend.ListRunning(ctx, m.opts.Owner) {
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
		_, v, err := m.recordStatusOf(ctx, s)
		switch {
		case err != nil:
			return nil, 0, nil, err
		case v == recordMissing:
			out[s] = Violation{invObject, s.id, m.quarantineText(e, s)}
		case v == recordEnded:
			out[s] = Violation{invObject, s.id, fmt.Sprintf("%s has generation %d of it, the database has no living one", e.Info.ID, s.generation)}
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
func (m *Manager) auditHistory(ctx context.Context, a *Audit) error {
	states := map[generationKey]sandboxer.State{}
	q := sandboxer.EventQuery{Limit: sandboxer.MaxPage}
	for {
		events, err := m.store.Events(ctx, q)
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
		if err := m.auditState(ctx, a, k, state); err != nil {
			return err
		}
	}
	return nil
}

func (m *Manager) auditState(ctx context.Context, a *Audit, k generationKey, state sandboxer.State) error {
	sb, err := m.recheckRecord(ctx, k, func(sb *sandboxer.Sandbox) (bool, error) {
		if sb.State == state {
			return true, nil
		}
		q := sandboxer.EventQuery{SandboxID: k.id, Limit: sandboxer.MaxPage} // it may have moved on since
		for {
			events, err := m.store.Events(ctx, q)
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

// recheckRecord calls judge with the record of k until it finds all well, or nobody has
// changed the record meanwhile, and returns the record judged.
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

// ledgerSums sums the ledger of one generation.
type ledgerSums struct{ held, posted, voided sandboxer.Credits }

func (b *ledgerSums) add(e sandboxer.Entry) {
	switch e.Type {
	case sandboxer.EntryHold:
		b.held -= e.Amount
	case sandboxer.EntryPost:
		b.posted += e.Amount
	case sandboxer.EntryVoid:
		b.voided += e.Amount
	}
}

// fault says what is wrong between the database and the record of a sandbox, or "".
func (b *ledgerSums) fault(sb *sandboxer.Sandbox) (invariant, detail string) {
	open := b.held - b.posted - b.voided
	switch {
	case b.posted > b.held:
		return invOver, fmt.Sprintf("generation %d: %s posted of %s held", sb.Generation, b.posted, b.held)
	case sb.State.Live() && open != sb.Quote.Amount:
		return invQuote, fmt.Sprintf("generation %d: %s on hold, %s quoted", sb.Generation, open, sb.Quote.Amount)
	case !sb.State.Live() && open != 0:
		return invResolve, fmt.Sprintf("generation %d ended with %s on hold", sb.Generation, open)
	case sb.Cost != b.posted:
		return invCost, fmt.Sprintf("generation %d cost %s, %s posted", sb.Generation, sb.Cost, b.posted)
	}
	return "", ""
}

// auditLedger adds up the whole ledger.
func (m *Manager) auditLedger(ctx context.Context, a *Audit) error {
	sums := map[generationKey]*ledgerSums{}
	tenants := map[string]sandboxer.Credits{}
	err := m.entries(ctx, sandboxer.EntryQuery{}, func(e sandboxer.Entry) {
		a.Checked++
		if e.SandboxID != "" {
			k := generationKey{e.SandboxID, e.Generation}
			if sums[k] == nil {
				sums[k] = &ledgerSums{}
			}
			sums[k].add(e)
		}
		if e.Type == sandboxer.EntryPost {
			return
		}
		tenants[e.Tenant] += e.Amount
		if tenants[e.Tenant] < 0 {
			a.violated(invNegate, e.SandboxID, "after entry %s, tenant %s is at %s", e.Key, e.Tenant, tenants[e.Tenant])
		}
	})
	if err != nil {
		return err
	}
	for k, sum := range sums {
		var invariant, detail string
		sb, err := m.recheckRecord(ctx, k, func(sb *sandboxer.Sandbox) (bool, error) {
			if invariant, detail = sum.fault(sb); invariant == "" {
				return true, nil
			}
			now := &ledgerSums{} // it may have been settled since
			err := m.entries(ctx, sandboxer.EntryQuery{SandboxID: k.id}, func(e sandboxer.Entry) {
				if e.Generation == k.generation {
					now.add(e)
				}
			})
			invariant, detail = now.fault(sb)
			return invariant == "", err
		})
		switch {
		case isKind(err, sandboxer.NotFound):
			// Old records go, the ledger stays; but only what was resolved is forgotten.
			if open := sum.held - sum.posted - sum.voided; open != 0 {
				a.violated(invResolve, k.id, "generation %d has %s on hold and no record", k.generation, open)
			}
		case sb != nil && sb.Damaged != "":
			a.damaged(sb)
		case err != nil:
			return err
		case invariant != "":
			a.violated(invariant, k.id, "%s", detail)
		}
	}
	return nil
}

// entries calls f with every ledger entry q selects.
func (m *Manager) entries(ctx context.Context, q sandboxer.EntryQuery, f func(sandboxer.Entry)) error {
	q.Limit = sandboxer.MaxPage
	for {
		items, next, err := m.store.Entries(ctx, q)
		if err != nil {
			return err
		}
		for _, e := range items {
			f(e)
		}
		if next == "" {
			return nil
		}
		q.After = next
	}
}

func (m *Manager) auditRecords(ctx context.Context, a *Audit) error {
	names := map[[2]string]string{}
	return m.records(ctx, sandboxer.Query{States: liveStates}, func(sb *sandboxer.Sandbox) {
		a.Checked++
		if sb.Damaged != "" {
			a.damaged(sb)
			return
		}
		if sb.Unconfirmed != "" {
			a.violated(invCurrent, sb.ID, "%s", unconfirmedText(sb))
		}
		if over := time.Since(sb.ExpiresAt); sb.Unconfirmed == "" && hasReadyObject(sb) && !sb.ExpiresAt.IsZero() && over > 2*m.opts.SweepEvery+m.opts.Grace {
			a.violated(invExpired, sb.ID, "it expired %s ago", over.Round(time.Second))
		}
		if sb.Name != "" {
			key := [2]string{sb.Tenant, sb.Name}
			if other := names[key]; other != "" {
				a.violated(invName, sb.ID, "it is called %q, as %s is", sb.Name, other)
			}
			names[key] = sb.ID
		}
	})
}

// auditPools holds what waits against the profiles that it waits for. Claims, changes
// and failures leave some too many for a moment: what tends the pools has its time.
func (m *Manager) auditPools(ctx context.Context, a *Audit) error {
	late := func(since ...time.Time) bool {
		return time.Since(slices.MaxFunc(since, time.Time.Compare)) > 2*m.opts.SweepEvery+m.opts.Grace
	}
	waiting := map[*pool]int{}
	return m.records(ctx, sandboxer.Query{States: liveStates}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged != "" || sb.Unconfirmed != "" {
			return
		}
		switch sb.State {
		case sandboxer.Warm:
			if !isPooled(sb) {
				a.violated(invPooled, sb.ID, "it is warm and belongs to tenant %q, pool %q", sb.Tenant, sb.Pool)
				return
			}
		case sandboxer.Running, sandboxer.Pausing, sandboxer.Paused:
			if isPooled(sb) {
				a.violated(invPooled, sb.ID, "it is %s, was in a pool, and belongs to nobody", sb.State)
			}
			return
		default:
			return
		}
		p := m.poolOf(sb.Profile)
		if p == nil {
			if late(m.started, sb.PooledAt) {
				a.violated(invPool, sb.ID, "it waits for profile %s, which keeps no pool", sb.Profile)
			}
			return
		}
		p.mu.Lock()
		key, since := p.key, p.keySince
		p.mu.Unlock()
		if key != "" && sb.Pool != key {
			if late(m.started, sb.PooledAt, since) {
				a.violated(invPool, sb.ID, "it is not what profile %s makes now", sb.Profile)
			}
			return
		}
		if late(m.started, sb.PooledAt) {
			if waiting[p]++; waiting[p] > p.profile.Pool.Size {
				a.violated(invPool, sb.ID, "it is one more than the %d that profile %s keeps", p.profile.Pool.Size, sb.Profile)
			}
		}
	})
}

// auditSnapshots holds the records of snapshots against their store and the sandboxes
// that need them. What does not fit is looked at again: it may have moved on.
func (m *Manager) auditSnapshots(ctx context.Context, a *Audit) error {
	withStore := m.auditSnapshotStore(ctx, a)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	suspects, n, err := m.unsoundSnapshots(ctx, withStore)
	a.Checked += n
	if err != nil || len(suspects) == 0 {
		return err
	}
	again, _, err := m.unsoundSnapshots(ctx, withStore)
	for k, v := range suspects {
		if _, ok := again[k]; ok && !a.isReported(v) {
			a.add(v)
		}
	}
	return err
}

// isReported reports whether v says of somebody that he could not be asked, which is said already.
func (a *Audit) isReported(v Violation) bool {
	who, _, _ := strings.Cut(v.Detail, ":")
	return v.Invariant == invAsked && slices.ContainsFunc(a.Violations, func(o Violation) bool {
		return o.Invariant == invAsked && strings.HasPrefix(o.Detail, who+":")
	})
}

// auditSnapshotStore names the snapshots whose files cannot be read: their manifests, or, in a deep
// audit, any of what they consist of. What several share is read for each, and named for
// each. It reports whether the store answers: one that does not is named once, and not asked
// for more.
func (m *Manager) auditSnapshotStore(ctx context.Context, a *Audit) bool {
	if m.opts.SnapshotStore == nil {
		return false
	}
	ids, err := m.opts.SnapshotStore.List(ctx)
	if err != nil {
		a.violated(invAsked, "", "%s: %s", storeName, sandboxer.Message(err))
		return false
	}
	for i, id := range ids {
		a.Checked++
		began := time.Now()
		err := m.opts.SnapshotStore.Check(ctx, id, a.deep)
		if ctx.Err() != nil {
			return false
		}
		if hung(err, began) {
			a.violated(invAsked, "", "%s: snapshot %s could not be read, and %d more were not looked at: %s", storeName, id, len(ids)-i-1, sandboxer.Message(err))
			return false
		}
		if err == nil || isKind(err, sandboxer.NotFound) { // dropped meanwhile
			continue
		}
		of := ""
		if rec, rerr := m.store.Snapshot(ctx, id); rerr == nil {
			of = rec.SandboxID
		}
		switch sandboxer.KindOf(err) {
		case sandboxer.Unavailable, sandboxer.Timeout, sandboxer.Exhausted, sandboxer.Canceled:
			a.violated(invAsked, of, "snapshot %s could not be read: %s", id, sandboxer.Message(err))
		default:
			a.violated(invRead, of, "snapshot %s: %s", id, sandboxer.Message(err))
		}
	}
	return true
}

// unsoundSnapshots looks at the records of snapshots, and at what the store of portable ones has if
// withStore is set.
func (m *Manager) unsoundSnapshots(ctx context.Context, withStore bool) (map[string]Violation, int, error) {
	out, n := map[string]Violation{}, 0
	violated := func(invariant, id, of, format string, args ...any) {
		out[id+" "+invariant] = Violation{invariant, of, fmt.Sprintf(format, args...)}
	}
	kept, asked := map[string]bool{}, false
	if withStore {
		ids, err := m.opts.SnapshotStore.List(ctx)
		if ctx.Err() != nil {
			return nil, 0, context.Cause(ctx)
		}
		asked = err == nil // else auditSnapshotStore says why
		for _, id := range ids {
			kept[id] = true
		}
	}
	living := map[string]*sandboxer.SnapshotRecord{}
	err := m.snapshots(ctx, sandboxer.SnapshotQuery{States: keptStates}, func(rec *sandboxer.SnapshotRecord) error {
		n++
		living[rec.ID] = rec
		return m.unsoundSnapshot(ctx, rec, asked && !kept[rec.ID], func(invariant, format string, args ...any) {
			violated(invariant, rec.ID, rec.SandboxID, format, args...)
		})
	})
	if err != nil {
		return nil, n, err
	}
	unknown, silent, err := m.quarantinedSnapshots(ctx, "", withStore)
	if err != nil {
		return nil, n, err
	}
	for id, s := range unknown {
		violated(invKept, id, s.found.SandboxID, "%s", s.text())
	}
	for id := range kept {
		if living[id] == nil && unknown[id] == nil {
			violated(invKept, id, "", "files of snapshot %s are kept, and there is no such snapshot", id)
		}
	}
	for name, err := range silent {
		violated(invAsked, name, "", "%s: %s", name, sandboxer.Message(err))
	}
	err = m.records(ctx, sandboxer.Query{States: []sandboxer.State{sandboxer.Paused}}, func(sb *sandboxer.Sandbox) {
		rec := living[sb.Pause.Snapshot]
		if !hasReadyObject(sb) && (rec == nil || rec.State != sandboxer.SnapshotSealed) {
			violated(invSaved, sb.ID, sb.ID, "it is paused to snapshot %q, which is not sealed", sb.Pause.Snapshot)
		}
	})
	return out, n, err
}

// unsoundSnapshot tells violated what is wrong with one record. lacksFiles says that the store
// of portable snapshots has nothing of it.
func (m *Manager) unsoundSnapshot(ctx context.Context, rec *sandboxer.SnapshotRecord, lacksFiles bool, violated func(invariant, format string, args ...any)) error {
	switch {
	case rec.Damaged != "":
		violated(invWhole, "%s", snapshotRecords.violate(rec).Detail)
		return nil
	case rec.Unconfirmed && rec.State == sandboxer.SnapshotSaving:
		violated(invCurrent, "the database went back to when snapshot %s was being saved; it is kept until somebody decides; sandboxer snapshot rm %s", rec.ID, rec.ID)
	}
	if rec.State != sandboxer.SnapshotSealed {
		return nil
	}
	if rec.Kind.Has(sandboxer.SnapshotNative) && rec.Native.SnapshotID != rec.ID {
		violated(invForm, "snapshot %s is sealed without the extension's receipt", rec.ID)
	}
	if rec.Kind.Has(sandboxer.SnapshotPortable) && (rec.Portable.Digest == "" || lacksFiles) {
		violated(invForm, "snapshot %s is sealed, and its files are not kept", rec.ID)
	}
	why, err := m.whyDrop(ctx, rec, time.Now())
	if err != nil {
		return err
	}
	if over := time.Since(rec.SealedAt); why != "" && rec.Purpose != "" && !m.pins.inUse(rec.ID) && over > 2*m.opts.SweepEvery+m.opts.Grace {
		violated(invOwn, "snapshot %s: %s", rec.ID, why)
	}
	return nil
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
