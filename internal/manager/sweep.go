package manager

import (
	"context"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// touchEvery is how far the stored time of last use may lag behind the real one.
const touchEvery = 10 * time.Second

// loop sweeps until the manager closes. It checks due records when it is woken. At every tick it also surveys each extension,
// separately, so that one that hangs delays no other.
func (m *Manager) loop() {
	tick := time.NewTicker(m.opts.SweepEvery)
	defer tick.Stop()
	m.newPass().surveyAll(false)
	m.newPass().async(func() { m.reportQuarantinedSnapshots(m.ctx) })
	first := m.newPass()
	first.async(func() { first.settlePending(m.ctx) })
	for {
		ticked := false
		select {
		case <-m.ctx.Done():
			return
		case <-m.sweepDue:
		case <-tick.C:
			ticked = true
		}
		t := m.newPass()
		if err := t.sweepRecords(m.ctx, time.Now()); err != nil && m.ctx.Err() == nil {
			m.log.Error("sweep", "err", err)
		}
		if err := t.sweepSnapshots(m.ctx, time.Now()); err != nil && m.ctx.Err() == nil {
			m.log.Error("sweep of snapshots", "err", err)
		}
		if ticked {
			t.async(func() { t.settlePending(m.ctx) })
			if m.meterDue() {
				t.async(func() { t.meterAll(m.ctx) })
			}
			t.surveyAll(false)
			m.housekeep()
			m.serveAll() // room that another broker made, or that a damaged record took
		}
	}
}

// Sweep makes one whole sweep now, waits for everything it started and reports the
// results. It needs the admin scope.
func (m *Manager) Sweep(ctx context.Context) (SweepReport, error) {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
		return SweepReport{}, err
	}
	ctx = sandboxer.WithPrincipal(ctx, sandboxer.Principal{}) // what it does, the sweep does
	t := m.newPass()
	if err := t.sweepRecords(ctx, time.Now()); err != nil {
		return SweepReport{}, err
	}
	if err := t.sweepSnapshots(ctx, time.Now()); err != nil {
		return SweepReport{}, err
	}
	t.settlePending(ctx)
	t.surveyAll(true)
	m.housekeep()
	if err := events.Wait(ctx, t.done()); err != nil {
		return t.summary(), err
	}
	return t.summary(), nil
}

// A pass is one pass of the sweep: it counts what it does, and knows when it is over.
type pass struct {
	m *Manager

	wg     sync.WaitGroup
	mu     sync.Mutex
	report SweepReport
}

func (m *Manager) newPass() *pass { return &pass{m: m} }

func (ps *pass) count(f func(*SweepReport)) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	f(&ps.report)
}

func (ps *pass) summary() SweepReport {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.report
}

func (ps *pass) done() <-chan struct{} {
	done := make(chan struct{})
	go func() { ps.wg.Wait(); close(done) }()
	return done
}

// async runs f in a goroutine that the manager and ps wait for.
func (ps *pass) async(f func()) {
	if ps.m.enter() != nil {
		return
	}
	ps.wg.Add(1)
	go func() {
		defer ps.m.wg.Done()
		defer ps.wg.Done()
		f()
	}()
}

// wakeSweep makes the loop look for due records.
func (m *Manager) wakeSweep() {
	select {
	case m.sweepDue <- struct{}{}:
	default:
	}
}

// scheduleSweep makes the loop check records at the time at, if that is before the next tick. If at has passed already, the
// loop checks immediately, but only once for the same time: at may have passed while it was being written.
func (m *Manager) scheduleSweep(before, at time.Time) {
	switch d := time.Until(at); {
	case at.IsZero() || d > m.opts.SweepEvery:
	case d > 0:
		time.AfterFunc(d, m.wakeSweep)
	case !at.Equal(before):
		m.wakeSweep()
	}
}

// records calls f with every record q selects, page by page.
func (m *Manager) records(ctx context.Context, q sandboxer.Query, f func(*sandboxer.Sandbox)) error {
	q.Limit = sandboxer.MaxPage
	for {
		items, next, err := m.store.Sandboxes(ctx, q)
		if err != nil {
			return err
		}
		for _, sb := range items {
			f(sb)
		}
		if next == "" {
			return nil
		}
		q.After = next
	}
}

// sweepRecords checks the records due at the given time, or all living ones if it is
// zero, without asking their backends.
func (ps *pass) sweepRecords(ctx context.Context, due time.Time) error {
	if ps.m.clock.check(time.Now()) {
		ps.m.log.Warn("the clock was set; nothing expires before the grace period is over", "grace", ps.m.opts.Grace)
	}
	return ps.m.records(ctx, sandboxer.Query{States: liveStates, DueBefore: due}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged != "" {
			sandboxRecords.report(ps.m, sb)
			return
		}
		ps.sweepOne(sb, sandboxer.Unknown)
	})
}

// sweepOne decides about sb and starts the action, unless the sweep has one
// queued for it already.
func (ps *pass) sweepOne(sb *sandboxer.Sandbox, seen sandboxer.Liveness) {
	ps.m.scheduleSweep(sb.ExpiresAt, sb.ExpiresAt)
	ps.m.scheduleSweep(sb.RetryAt, sb.RetryAt)
	ps.m.scheduleSweep(sb.DebtsDue(), sb.DebtsDue())
	stored := sb.UsedAt
	working := ps.m.working(sb.ID)
	seen = ps.m.box(sb).interpret(seen)
	a := ps.m.decide(sb, seen, working)
	timed := a.Reason == sandboxer.ReasonExpired || a.Reason == sandboxer.ReasonIdle
	switch {
	case timed && ps.m.clock.inGracePeriod(time.Now()):
		return
	case a.Verb == lifecycle.None && sb.UsedAt.Sub(stored) < touchEvery && !ps.m.box(sb).fuseDue():
		return
	case !ps.m.sweepLocks.tryLock(sb.ID):
		return
	}
	ps.async(func() {
		defer ps.m.unlockSweep(sb.ID)
		ps.applyAction(sb, seen, working, a)
	})
}

// decide is lifecycle.Decide, with what this manager knows.
func (m *Manager) decide(sb *sandboxer.Sandbox, seen sandboxer.Liveness, working bool) lifecycle.Action {
	at := time.Now()
	return lifecycle.Decide(m.withLastUse(sb), seen, working, at, m.hold.deadlinesFrom(at))
}

// interpret returns what seen means for sb: if sb was saved for a pause and is being removed, its absence proves nothing.
func (bx box) interpret(seen sandboxer.Liveness) sandboxer.Liveness {
	if !lifecycle.IsDead(seen) || bx.sb.State != sandboxer.Pausing || bx.sb.Pause.Snapshot == "" {
		return seen
	}
	rec, err := bx.m.store.Snapshot(bx.m.ctx, bx.sb.Pause.Snapshot)
	if isKind(err, sandboxer.NotFound) || err == nil && rec.State != sandboxer.SnapshotSealed {
		return seen
	}
	return sandboxer.Unknown
}

// unlockSweep ends m.sweepLocks.tryLock. A caller that was refused in between may have seen
// a step that became due since, so there is another look.
func (m *Manager) unlockSweep(id string) {
	if m.sweepLocks.unlock(id) {
		m.wakeSweep()
	}
}

// applyAction does the step that was decided. It reads the record again if another writer may have changed it since.
func (ps *pass) applyAction(sb *sandboxer.Sandbox, seen sandboxer.Liveness, working bool, a lifecycle.Action) {
	ctx := ps.m.ctx
	var err error
	object := lifecycle.ObjectGeneration(sb)
	still := func(sb *sandboxer.Sandbox) bool {
		seen := seen
		if lifecycle.ObjectGeneration(sb) != object { // it was resumed meanwhile: what was seen is of its former object
			seen = sandboxer.Unknown
		}
		return ps.m.decide(sb, ps.m.box(sb).interpret(seen), working) == a
	}
	switch a.Verb {
	case lifecycle.None:
		err = ps.m.box(sb).saveUse(ctx)
	case lifecycle.MarkAbsent, lifecycle.ClearMarks, lifecycle.MarkUnresponsive:
		err = ps.m.box(sb).commitMarks(ctx, a.Verb, still)
	case lifecycle.Resume:
		err = ps.continueCreate(ctx, sb)
	case lifecycle.Pause:
		err = ps.sweepPause(ctx, sb)
	case lifecycle.End:
		err = ps.sweepEnd(ctx, sb, a.Reason, still)
	case lifecycle.Teardown:
		// Another caller may have tried, and failed, since sb was read.
		var cur *sandboxer.Sandbox
		if cur, err = ps.m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); err == nil && still(cur) {
			err = ps.retryTeardown(ctx, cur)
		}
	case lifecycle.PayDebts:
		err = ps.m.box(sb).payDebts(ctx, now())
	}
	if err != nil && err != errNotNeeded && ctx.Err() == nil {
		ps.count(func(r *SweepReport) { r.Failed++ })
		ps.m.log.Warn("sweep", "sandbox", sb.ID, "generation", sb.Generation, "step", string(a.Verb), "err", err)
	}
}

// commitMarks notes the result of a probe of the object of sb, while still holds for its record: that the object is absent, or
// does not respond, or neither any more.
func (bx box) commitMarks(ctx context.Context, mark lifecycle.Verb, still func(*sandboxer.Sandbox) bool) error {
	return bx.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
		if !still(sb) {
			return errNotNeeded
		}
		switch {
		case mark == lifecycle.MarkUnresponsive:
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventWarning, "it does not respond; it is kept in case it comes back"))
		case !sb.UnresponsiveSince.IsZero() && mark == lifecycle.ClearMarks:
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventWarning, "it responds again"))
		}
		sb.AbsentSince, sb.UnresponsiveSince = time.Time{}, time.Time{}
		switch mark {
		case lifecycle.MarkAbsent:
			sb.AbsentSince = now()
			if sb.State == sandboxer.Terminating {
				sb.RetryAt = sb.AbsentSince
			}
		case lifecycle.MarkUnresponsive:
			sb.UnresponsiveSince = now()
		}
		return nil
	})
}

// sweepEnd ends sb, as long as still holds for its record, and tears it down.
func (ps *pass) sweepEnd(ctx context.Context, sb *sandboxer.Sandbox, reason sandboxer.Reason, still func(*sandboxer.Sandbox) bool) error {
	why := ending{reason: reason, message: endMessages[reason], still: still}
	switch reason {
	case sandboxer.ReasonLost:
		why.at = sb.AbsentSince
	case sandboxer.ReasonFailed:
		why.fault = sandboxer.Timeout
	}
	unused := func() {}
	if reason == sandboxer.ReasonIdle {
		ok := false
		if unused, ok = ps.m.usage.hold(sb.ID); !ok {
			return errNotNeeded
		}
	}
	err := ps.m.box(sb).beginTeardown(ctx, why)
	unused()
	if err != nil {
		return err
	}
	ps.count(func(r *SweepReport) {
		switch reason {
		case sandboxer.ReasonExpired, sandboxer.ReasonIdle:
			r.Expired++
		case sandboxer.ReasonLost, sandboxer.ReasonOOMKilled:
			r.Lost++
		}
	})
	if reason == sandboxer.ReasonOOMKilled {
		ps.m.oomKilled(sb.Extension, "sandbox")
	}
	return ps.retryTeardown(ctx, sb)
}

// endMessages are the messages in the records of sandboxes that the sweep ends.
var endMessages = map[sandboxer.Reason]string{
	sandboxer.ReasonExpired:   "its time to live ran out",
	sandboxer.ReasonIdle:      "it was idle for longer than its profile allows",
	sandboxer.ReasonNoCredit:  "its backend's meter reached what is on hold for it",
	sandboxer.ReasonOOMKilled: "it used more memory than its limit and was killed",
	sandboxer.ReasonLost:      "its backend no longer has it",
	sandboxer.ReasonFailed:    "it was not finished in time",
}

// retryTeardown tears sb down.
func (ps *pass) retryTeardown(ctx context.Context, sb *sandboxer.Sandbox) error {
	release, err := ps.m.slot(ctx, sb.Extension)
	if err != nil {
		return err
	}
	defer release()
	if sb, err = ps.m.box(sb).finishTeardown(ctx); err == nil && sb.State == sandboxer.Terminated {
		ps.count(func(r *SweepReport) { r.Torndown++ })
	}
	return err
}

// continueCreate continues the create of a sandbox that a former process left half made.
func (ps *pass) continueCreate(ctx context.Context, sb *sandboxer.Sandbox) error {
	slot := ps.m.slot
	if lifecycle.SourceOf(sb) != "" {
		slot = ps.m.saveSlot
	}
	release, err := slot(ctx, sb.Extension)
	if err != nil {
		return err
	}
	defer release()
	j, mine, err := ps.m.begin(ctx, sb.ID, sb.Generation, true, nil)
	if err != nil || !mine {
		return err
	}
	j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) {
		return ps.m.resume(ctx, j, sb.ID, sb.Generation)
	})
	<-j.done // ends with the manager
	if j.err == nil {
		ps.count(func(r *SweepReport) { r.Adopted++ })
	}
	return j.err
}

// saveUse stores the time of last use, and moves the fuse of a sandbox that lives by its use.
func (bx box) saveUse(ctx context.Context) error {
	if bx.fuseDue() {
		release, err := bx.m.slot(ctx, bx.sb.Extension)
		if err != nil {
			return err
		}
		defer release()
	}
	return bx.update(ctx, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
		if sb.State != sandboxer.Running {
			return errNotNeeded
		}
		if bx.m.withLastUse(sb); bx.m.box(sb).fuseDue() {
			return bx.m.box(sb).keepFuse(ctx)
		}
		return nil
	})
}

// SweepReport counts what one sweep saw and did.
type SweepReport struct {
	Seen     int `json:"seen"`     // live records
	Paused   int `json:"paused"`   // because their time ran out or nobody used them, or half paused and finished
	Expired  int `json:"expired"`  // ended because their time ran out or nobody used them
	Torndown int `json:"torndown"` // teardowns that succeeded
	Adopted  int `json:"adopted"`  // found alive, or half made and resumed, by the first sweep after a start
	Lost     int `json:"lost"`     // records whose object is proven gone, or was killed for its memory
	Orphans  int `json:"orphans"`  // objects without a live record that were removed
	// Quarantined counts objects that the database does not know and that are kept.
	Quarantined int `json:"quarantined"`
	Failed      int `json:"failed"`  // steps that failed and will be repeated
	Damaged     int `json:"damaged"` // live records that cannot be read and were left alone
}
