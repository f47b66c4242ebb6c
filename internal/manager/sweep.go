package manager

import (
	"context"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// touchEvery is how far the stored time of last use may lag behind the real one.
const touchEvery = 10 * time.Second

// loop sweeps until the manager closes: the records that are due when something says
// so, and at every tick also each extension, apart from the others, so that one that
// hangs holds up none but itself.
func (m *Manager) loop() {
	tick := time.NewTicker(m.opts.SweepEvery)
	defer tick.Stop()
	m.surveyAll(newTracker(), false)
	m.async(newTracker(), func() { m.reportQuarantinedSnapshots(m.ctx) })
	for {
		ticked := false
		select {
		case <-m.ctx.Done():
			return
		case <-m.sweepDue:
		case <-tick.C:
			ticked = true
		}
		t := newTracker()
		if err := m.sweepRecords(m.ctx, t, time.Now()); err != nil && m.ctx.Err() == nil {
			m.log.Error("sweep", "err", err)
		}
		if err := m.sweepSnapshots(m.ctx, t, time.Now()); err != nil && m.ctx.Err() == nil {
			m.log.Error("sweep of snapshots", "err", err)
		}
		if ticked {
			m.surveyAll(t, false)
			m.housekeep()
			m.serveAll() // room that another broker made, or that a damaged record took
		}
	}
}

// Sweep makes one whole sweep now, waits for everything it set in motion and says what
// came of it. It needs the admin scope.
func (m *Manager) Sweep(ctx context.Context) (SweepReport, error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return SweepReport{}, err
	}
	ctx = sandboxer.WithPrincipal(ctx, sandboxer.Principal{}) // what it does, the sweep does
	t := newTracker()
	if err := m.sweepRecords(ctx, t, time.Now()); err != nil {
		return SweepReport{}, err
	}
	if err := m.sweepSnapshots(ctx, t, time.Now()); err != nil {
		return SweepReport{}, err
	}
	m.surveyAll(t, true)
	m.housekeep()
	if err := wait(ctx, t.done()); err != nil {
		return t.summary(), err
	}
	return t.summary(), nil
}

// A tracker counts what one sweep does, and knows when it is over.
type tracker struct {
	wg     sync.WaitGroup
	mu     sync.Mutex
	report SweepReport
}

func newTracker() *tracker { return &tracker{} }

func (t *tracker) count(f func(*SweepReport)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(&t.report)
}

func (t *tracker) summary() SweepReport {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.report
}

func (t *tracker) done() <-chan struct{} {
	done := make(chan struct{})
	go func() { t.wg.Wait(); close(done) }()
	return done
}

// async runs f in a goroutine that both the manager and t wait for.
func (m *Manager) async(t *tracker, f func()) {
	if m.enter() != nil {
		return
	}
	t.wg.Add(1)
	go func() {
		defer m.wg.Done()
		defer t.wg.Done()
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

// scheduleSweep has the loop look at the time at, if that comes before the next tick would
// see to it anyway. If it has passed already, the loop looks at once, but only if it is
// another time than before: it may have passed while it was being written.
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

// sweepRecords looks at the records due at the given time, or at all living ones if it is
// zero, without a look at their backends.
func (m *Manager) sweepRecords(ctx context.Context, t *tracker, due time.Time) error {
	if m.clock.check(time.Now()) {
		m.log.Warn("the clock was set; nothing expires before the grace period is over", "grace", m.opts.Grace)
	}
	return m.records(ctx, sandboxer.Query{States: liveStates, DueBefore: due}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged != "" {
			sandboxRecords.report(m, sb)
			return
		}
		m.sweepOne(t, sb, sandboxer.Unknown)
	})
}

// sweepOne decides about sb and sets the action in motion, unless the sweep has something
// queued for it already.
func (m *Manager) sweepOne(t *tracker, sb *sandboxer.Sandbox, seen sandboxer.Liveness) {
	m.scheduleSweep(sb.ExpiresAt, sb.ExpiresAt)
	m.scheduleSweep(sb.RetryAt, sb.RetryAt)
	stored := sb.UsedAt
	working := m.working(sb.ID)
	seen = m.interpret(sb, seen)
	a := decide(m.withLastUse(sb), seen, working, time.Now())
	timed := a.reason == sandboxer.ReasonExpired || a.reason == sandboxer.ReasonIdle
	switch {
	case timed && m.clock.inGracePeriod(time.Now()):
		return
	case a.verb == verbNone && sb.UsedAt.Sub(stored) < touchEvery && !m.fuseDue(sb):
		return
	case !m.sweepLocks.tryLock(sb.ID):
		return
	}
	m.async(t, func() {
		defer m.unlockSweep(sb.ID)
		m.applyAction(t, sb, seen, working, a)
	})
}

// interpret is what seen says of sb: that one is not there which was saved, to be paused, and
// is being removed, says nothing.
func (m *Manager) interpret(sb *sandboxer.Sandbox, seen sandboxer.Liveness) sandboxer.Liveness {
	dead := seen == sandboxer.Gone || seen == sandboxer.OOMKilled || seen == died
	if !dead || sb.State != sandboxer.Pausing || sb.Pause.Snapshot == "" {
		return seen
	}
	rec, err := m.store.Snapshot(m.ctx, sb.Pause.Snapshot)
	if isKind(err, sandboxer.NotFound) || err == nil && rec.State != sandboxer.SnapshotSealed {
		return seen
	}
	return sandboxer.Unknown
}

// unlockSweep ends m.sweepLocks.tryLock. Whoever was refused in between may have seen what is
// due since, so there is another look.
func (m *Manager) unlockSweep(id string) {
	if m.sweepLocks.unlock(id) {
		m.wakeSweep()
	}
}

// applyAction takes the step that was decided. It looks at the record again where somebody
// may have changed it since.
func (m *Manager) applyAction(t *tracker, sb *sandboxer.Sandbox, seen sandboxer.Liveness, working bool, a action) {
	ctx := m.ctx
	var err error
	still := func(sb *sandboxer.Sandbox) bool {
		return decide(m.withLastUse(sb), m.interpret(sb, seen), working, time.Now()) == a
	}
	switch a.verb {
	case verbNone:
		err = m.saveUse(ctx, sb)
	case verbMarkAbsent, verbClearMarks, verbMarkUnresponsive:
		err = m.commitMarks(ctx, sb, a.verb, still)
	case verbResume:
		err = m.continueCreate(ctx, t, sb)
	case verbPause:
		err = m.sweepPause(ctx, t, sb)
	case verbEnd:
		err = m.sweepEnd(ctx, t, sb, a.reason, still)
	case verbTeardown:
		// Somebody else may have tried, and failed, since sb was read.
		var cur *sandboxer.Sandbox
		if cur, err = m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); err == nil && still(cur) {
			err = m.retryTeardown(ctx, t, cur)
		}
	}
	if err != nil && err != errNotNeeded && ctx.Err() == nil {
		t.count(func(r *SweepReport) { r.Failed++ })
		m.log.Warn("sweep", "sandbox", sb.ID, "generation", sb.Generation, "step", string(a.verb), "err", err)
	}
}

// commitMarks notes what a look at the object of sb came to, as long as still holds for its
// record: that it is absent, or does not respond, or neither any more.
func (m *Manager) commitMarks(ctx context.Context, sb *sandboxer.Sandbox, mark verb, still func(*sandboxer.Sandbox) bool) error {
	return m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
		if !still(sb) {
			return errNotNeeded
		}
		switch {
		case mark == verbMarkUnresponsive:
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, "it does not respond; it is kept, for it may come back"))
		case !sb.UnresponsiveSince.IsZero() && mark == verbClearMarks:
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, "it responds again"))
		}
		sb.AbsentSince, sb.UnresponsiveSince = time.Time{}, time.Time{}
		switch mark {
		case verbMarkAbsent:
			sb.AbsentSince = now()
			if sb.State == sandboxer.Terminating {
				sb.RetryAt = sb.AbsentSince
			}
		case verbMarkUnresponsive:
			sb.UnresponsiveSince = now()
		}
		return nil
	})
}

// sweepEnd ends sb, as long as still holds for its record, and tears it down.
func (m *Manager) sweepEnd(ctx context.Context, t *tracker, sb *sandboxer.Sandbox, reason sandboxer.Reason, still func(*sandboxer.Sandbox) bool) error {
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
		if unused, ok = m.usage.hold(sb.ID); !ok {
			return errNotNeeded
		}
	}
	err := m.beginTeardown(ctx, sb, why)
	unused()
	if err != nil {
		return err
	}
	t.count(func(r *SweepReport) {
		switch reason {
		case sandboxer.ReasonExpired, sandboxer.ReasonIdle:
			r.Expired++
		case sandboxer.ReasonLost, sandboxer.ReasonOOMKilled:
			r.Lost++
		}
	})
	if reason == sandboxer.ReasonOOMKilled {
		m.oomKilled(sb.Extension, "sandbox")
	}
	return m.retryTeardown(ctx, t, sb)
}

// endMessages is the message of a record that the sweep ends.
var endMessages = map[sandboxer.Reason]string{
	sandboxer.ReasonExpired:   "its time to live ran out",
	sandboxer.ReasonIdle:      "nobody used it for longer than its profile allows",
	sandboxer.ReasonOOMKilled: "it used more memory than its limit and was killed",
	sandboxer.ReasonLost:      "its backend does not have it any more",
	sandboxer.ReasonFailed:    "it was not finished in time",
}

// retryTeardown tears sb down.
func (m *Manager) retryTeardown(ctx context.Context, t *tracker, sb *sandboxer.Sandbox) error {
	release, err := m.slot(ctx, sb.Extension)
	if err != nil {
		return err
	}
	defer release()
	if sb, err = m.finishTeardown(ctx, sb); err == nil && sb.State == sandboxer.Terminated {
		t.count(func(r *SweepReport) { r.Torndown++ })
	}
	return err
}

// continueCreate goes on with a sandbox that a former process left half made.
func (m *Manager) continueCreate(ctx context.Context, t *tracker, sb *sandboxer.Sandbox) error {
	slot := m.slot
	if sourceOf(sb) != "" {
		slot = m.saveSlot
	}
	release, err := slot(ctx, sb.Extension)
	if err != nil {
		return err
	}
	defer release()
	j, mine, err := m.begin(ctx, sb.ID, sb.Generation, true, nil)
	if err != nil || !mine {
		return err
	}
	m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) { return m.resume(ctx, j, sb.ID, sb.Generation) })
	<-j.done // ends with the manager
	if j.err == nil {
		t.count(func(r *SweepReport) { r.Adopted++ })
	}
	return j.err
}

// saveUse stores the time of last use, and moves the fuse of what lives by that.
func (m *Manager) saveUse(ctx context.Context, sb *sandboxer.Sandbox) error {
	if m.fuseDue(sb) {
		release, err := m.slot(ctx, sb.Extension)
		if err != nil {
			return err
		}
		defer release()
	}
	return m.update(ctx, sb, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
		if sb.State != sandboxer.Running {
			return errNotNeeded
		}
		if m.withLastUse(sb); m.fuseDue(sb) {
			return m.keepFuse(ctx, sb)
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
	// Unconfirmed counts records that may be older than their sandboxes, since the database
	// went back, and whose backends are being asked.
	Unconfirmed int `json:"unconfirmed"`
	Failed      int `json:"failed"`  // steps that failed and will be repeated
	Damaged     int `json:"damaged"` // live records that cannot be read and were left alone
}
