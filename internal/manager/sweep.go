package manager

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// probeEvery is how often each sandbox that its backend lists is probed as well. What
// is listed exists, but need not be alive: a crash leaves remains.
const probeEvery = 30 * time.Second

// touchEvery is how far the stored time of last use may lag behind the real one.
const touchEvery = 10 * time.Second

// An objectKey is an object outside, as a backend lists it.
type objectKey struct {
	extension, id string
	generation    int
}

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
	m.checkClock()
	return m.records(ctx, sandboxer.Query{States: liveStates, DueBefore: due}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged != "" {
			m.reportDamaged(sb)
			return
		}
		m.sweepOne(t, sb, sandboxer.Unknown)
	})
}

// checkClock notices that the clock was set: then nothing is ended by it for one
// grace period, so that a wrong clock that is put right kills nobody.
func (m *Manager) checkClock() {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	if jumped(m.clock, now) {
		m.graceUntil = now.Add(m.opts.Grace)
		m.log.Warn("the clock was set; nothing expires before the grace period is over", "grace", m.opts.Grace)
	}
	m.clock = now
}

// jumped reports whether the wall clock moved otherwise than time did between two
// readings.
func jumped(a, b time.Time) bool {
	d := b.Round(0).Sub(a.Round(0)) - b.Sub(a)
	return d.Abs() > 5*time.Second
}

// inGracePeriod reports whether the clock must not be trusted yet.
func (m *Manager) inGracePeriod() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().Before(m.graceUntil)
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
	case timed && m.inGracePeriod():
		return
	case a.verb == verbNone && sb.UsedAt.Sub(stored) < touchEvery:
		return
	case !m.take(sb.ID):
		return
	}
	m.async(t, func() {
		defer m.drop(sb.ID)
		m.applyAction(t, sb, seen, working, a)
	})
}

// interpret is what seen says of sb: that one is not there which was saved, to be paused, and
// is being removed, says nothing.
func (m *Manager) interpret(sb *sandboxer.Sandbox, seen sandboxer.Liveness) sandboxer.Liveness {
	dead := seen == sandboxer.Gone || seen == sandboxer.OOMKilled
	if !dead || sb.State != sandboxer.Pausing || sb.Pause.Snapshot == "" {
		return seen
	}
	rec, err := m.store.Snapshot(m.ctx, sb.Pause.Snapshot)
	if isKind(err, sandboxer.NotFound) || err == nil && rec.State != sandboxer.SnapshotSealed {
		return seen
	}
	return sandboxer.Unknown
}

// take makes the caller the only one of the sweep who does something with id, until drop.
func (m *Manager) take(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, busy := m.acting[id]
	m.acting[id] = busy
	return !busy
}

// drop ends take. Whoever was refused in between may have seen what is due since, so
// there is another look.
func (m *Manager) drop(id string) {
	m.mu.Lock()
	again := m.acting[id]
	delete(m.acting, id)
	m.mu.Unlock()
	if again {
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
		err = m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if !still(sb) {
				return errNotNeeded
			}
			switch {
			case a.verb == verbMarkUnresponsive:
				w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, "it does not respond; it is kept, for it may come back"))
			case !sb.UnresponsiveSince.IsZero() && a.verb == verbClearMarks:
				w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, "it responds again"))
			}
			sb.AbsentSince, sb.UnresponsiveSince = time.Time{}, time.Time{}
			switch a.verb {
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
	case verbResume:
		err = m.continueCreate(ctx, t, sb)
	case verbPause:
		err = m.sweepPause(ctx, t, sb, a.reason)
	case verbEnd:
		why := ending{reason: a.reason, message: endMessages[a.reason]}
		if a.reason == sandboxer.ReasonLost {
			why.at = sb.AbsentSince
		}
		if a.reason == sandboxer.ReasonFailed {
			why.fault = sandboxer.Timeout
		}
		why.still = still
		if err = m.beginTeardown(ctx, sb, why); err != nil {
			break
		}
		t.count(func(r *SweepReport) {
			switch a.reason {
			case sandboxer.ReasonExpired, sandboxer.ReasonIdle:
				r.Expired++
			case sandboxer.ReasonLost, sandboxer.ReasonOOMKilled:
				r.Lost++
			}
		})
		if a.reason == sandboxer.ReasonOOMKilled {
			m.oomKilled(sb.Extension, "sandbox")
		}
		err = m.retryTeardown(ctx, t, sb)
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

// endMessages is the message of a record that the sweep ends.
var endMessages = map[sandboxer.Reason]string{
	sandboxer.ReasonExpired:   "its time to live ran out",
	sandboxer.ReasonIdle:      "nobody used it for longer than its profile allows",
	sandboxer.ReasonOOMKilled: "it used more memory than its limit and was killed",
	sandboxer.ReasonLost:      "its backend does not have it any more",
	sandboxer.ReasonFailed:    "it was not finished in time",
}

// slot waits for one of the extension's worker slots. An extension that is not
// configured any more has no work to bound.
func (m *Manager) slot(ctx context.Context, extension string) (release func(), err error) {
	e := m.extension(extension)
	if e == nil {
		return func() {}, nil
	}
	return takeSlot(ctx, e.workers)
}

// saveSlot is slot for what needs snapshots, whose store may hang while teardowns go on.
func (m *Manager) saveSlot(ctx context.Context, extension string) (release func(), err error) {
	e := m.extension(extension)
	if e == nil {
		return func() {}, nil
	}
	return takeSlot(ctx, e.saves)
}

// dropSlot waits for a slot in which rec may be dropped. What only the store of portable
// snapshots is needed for holds up nothing of an extension.
func (m *Manager) dropSlot(ctx context.Context, rec *sandboxer.SnapshotRecord) (release func(), err error) {
	if !rec.Kind.Has(sandboxer.SnapshotNative) || m.extension(rec.Extension) == nil {
		return takeSlot(ctx, m.drops)
	}
	return m.saveSlot(ctx, rec.Extension)
}

func takeSlot(ctx context.Context, slots chan struct{}) (release func(), err error) {
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
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

// saveUse stores the time of last use.
func (m *Manager) saveUse(ctx context.Context, sb *sandboxer.Sandbox) error {
	return m.update(ctx, sb, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
		if sb.State != sandboxer.Running {
			return errNotNeeded
		}
		m.withLastUse(sb)
		return nil
	})
}

// surveyAll starts a survey of every extension. Where one is in progress, that is enough,
// or another is made after it, if again is set.
func (m *Manager) surveyAll(t *tracker, again bool) {
	for _, e := range m.extensions() {
		m.async(t, func() {
			if !again && len(e.survey) > 0 {
				return
			}
			select {
			case e.survey <- struct{}{}:
			case <-m.ctx.Done():
				return
			}
			defer func() { <-e.survey }()
			if err := m.surveyOne(m.ctx, t, e); err != nil && m.ctx.Err() == nil {
				m.log.Warn("survey", "extension", e.Info.ID, "err", err)
			}
		})
	}
}

// surveyOne compares the records of one extension with what its backend has.
func (m *Manager) surveyOne(ctx context.Context, t *tracker, e *extension) error {
	// The listing comes first: whatever is in it was in the database before.
	at := time.Now()
	listed, lerr := m.listing(ctx, e)
	if away := lerr != nil; *e.unlisted && !away {
		m.retryNow(e)
		*e.unlisted = false
	} else {
		*e.unlisted = away
	}
	seen := make(map[objectKey]bool, len(listed))
	probing := e.Backend != nil && e.Backend.Can(sandboxer.CanProbe)
	inherited := func(sb *sandboxer.Sandbox) bool { return sb.ReadyAt.Before(m.started) && !m.isAdopted(sb) }
	all := at.Sub(*e.probed) >= probeEvery
	if all {
		*e.probed = at
	}
	q := sandboxer.Query{Extension: e.Info.ID, States: liveStates}
	err := m.records(ctx, q, func(sb *sandboxer.Sandbox) {
		t.count(func(r *SweepReport) { r.Seen++ })
		if sb.Damaged != "" {
			t.count(func(r *SweepReport) { r.Damaged++ })
			m.reportDamaged(sb)
			return
		}
		if sb.Unconfirmed == sandboxer.Unasked && sb.State != sandboxer.Terminating && e.Backend != nil {
			t.count(func(r *SweepReport) { r.Unconfirmed++ })
			m.confirmRecord(t, e, sb)
			return
		}
		if sb.State == sandboxer.Paused && !hasReadyObject(sb) { // what is listed of it is left over
			m.sweepOne(t, sb, sandboxer.Unknown)
			return
		}
		s := objectKey{e.Info.ID, sb.ID, objectGeneration(sb)}
		found, ok := listed[s]
		if !ok {
			s.generation = 0 // an object that does not tell
			found, ok = listed[s]
		}
		if ok && sb.Host == "" && found.Host != "" && !mayBeClaimed(sb) && !m.working(sb.ID) {
			own := *sb
			m.recordHost(t, &own, found)
		}
		switch {
		case ok:
			seen[s] = !mayBeClaimed(sb)
			if probing && needsProbe(sb) && (all || !sb.AbsentSince.IsZero()) {
				m.probe(t, e, sb, inherited(sb))
				return
			}
			if sb.State == sandboxer.Running && inherited(sb) {
				m.async(t, func() { m.adopt(sb) })
				t.count(func(r *SweepReport) { r.Adopted++ })
			}
			m.sweepOne(t, sb, sandboxer.Alive)
		case !needsProbe(sb), e.Backend == nil:
			m.sweepOne(t, sb, sandboxer.Unknown)
		case lerr != nil:
			m.sweepOne(t, sb, sandboxer.Unknown)
		case probing:
			m.probe(t, e, sb, inherited(sb))
		case e.Backend.Can(sandboxer.CanList) && at.Sub(objectSince(sb)) >= m.opts.Grace:
			m.sweepOne(t, sb, sandboxer.Gone)
		default: // it may be too new for a slow listing, or nobody can tell
			m.sweepOne(t, sb, sandboxer.Unknown)
		}
	})
	if err != nil {
		return err
	}
	err = m.orphans(ctx, t, e, listed, seen, lerr == nil)
	if err == nil && e.Backend != nil { // what is away is told when it is back
		e.surveyed.Store(true)
	}
	return errors.Join(err, lerr)
}

// listing returns what the backend lists under our name, or nothing if it cannot. With
// an error, what is not in it may be there all the same: one of its machines may be
// away.
func (m *Manager) listing(ctx context.Context, e *extension) (map[objectKey]sandboxer.Handle, error) {
	if e.Backend == nil || !e.Backend.Can(sandboxer.CanList) {
		return nil, nil
	}
	listed := map[objectKey]sandboxer.Handle{}
	for h, err := range e.Backend.ListRunning(ctx, m.opts.Owner) {
		if err != nil {
			return listed, err
		}
		listed[objectKey{e.Info.ID, h.SandboxID, h.Generation}] = h
	}
	return listed, nil
}

// probe asks the backend about one sandbox and acts on the answer. inherited says that
// a former process left it: found alive, it is adopted. While the sweep does something else
// with the sandbox, it does nothing and returns false.
func (m *Manager) probe(t *tracker, e *extension, sb *sandboxer.Sandbox, inherited bool) bool {
	if !m.take(sb.ID) {
		return false
	}
	m.async(t, func() {
		release, err := m.slot(m.ctx, e.Info.ID)
		if err != nil {
			m.drop(sb.ID)
			return
		}
		alive, err := e.Backend.IsAlive(m.ctx, handleOf(sb))
		release()
		m.drop(sb.ID)
		if err != nil {
			m.log.Debug("probe", "sandbox", sb.ID, "err", err)
			alive = sandboxer.Unknown
		}
		if alive == sandboxer.Alive && inherited && hasReadyObject(sb) {
			m.adopt(sb)
			t.count(func(r *SweepReport) { r.Adopted++ })
		}
		m.sweepOne(t, sb, alive)
	})
	return true
}

// probeSoon probes a sandbox that its user was told is not there; if something else is done
// with it now, then after that, which may have begun before there was a reason to doubt.
func (m *Manager) probeSoon(h sandboxer.Handle) {
	m.mu.Lock()
	doubted := m.probing[h.SandboxID]
	m.probing[h.SandboxID] = true
	m.mu.Unlock()
	if doubted { // by somebody else, who sees to it
		return
	}
	settled := func() {
		m.mu.Lock()
		delete(m.probing, h.SandboxID)
		m.mu.Unlock()
	}
	if m.ctx.Err() != nil {
		settled()
		return
	}
	t := newTracker()
	m.async(t, func() {
		defer settled()
		for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
			sb, err := m.store.Sandbox(m.ctx, h.SandboxID)
			if err != nil || sb.State != sandboxer.Running || objectGeneration(sb) != h.Generation {
				return
			}
			e := m.extension(sb.Extension)
			if e == nil || e.Backend == nil || !e.Backend.Can(sandboxer.CanProbe) || !m.working(sb.ID) && m.probe(t, e, sb, false) {
				return
			}
			select {
			case <-time.After(pause):
			case <-m.ctx.Done():
				return
			}
		}
	})
}

// orphans removes objects that carry our name and whose record says that they are gone,
// once they have been seen so for a grace period. Those that no record ever knew are
// quarantined first. whole says that the listing was.
func (m *Manager) orphans(ctx context.Context, t *tracker, e *extension, listed map[objectKey]sandboxer.Handle, explained map[objectKey]bool, whole bool) error {
	defer m.releaseFromQuarantine(e, listed, explained, whole)
	for s, h := range listed {
		if explained[s] {
			continue
		}
		tenant, v, err := m.recordStatusOf(ctx, s)
		if err != nil {
			return err
		}
		if v == recordLive {
			explained[s] = true
			continue
		}
		if v == recordMissing && m.quarantineObject(t, e, s, h) {
			t.count(func(r *SweepReport) { r.Quarantined++ })
			continue
		}
		if !m.isOldOrphan(s) || !m.take(s.id) {
			continue
		}
		m.async(t, func() {
			defer m.drop(s.id)
			err := m.removeOrphan(m.ctx, e, s, h, tenant)
			if err == errNotNeeded {
				return
			}
			if err != nil {
				t.count(func(r *SweepReport) { r.Failed++ })
				m.log.Warn("orphan", "extension", e.Info.ID, "sandbox", s.id, "generation", s.generation, "err", err)
				return
			}
			t.count(func(r *SweepReport) { r.Orphans++ })
		})
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for s := range m.orphanSince {
		if _, ok := listed[s]; s.extension == e.Info.ID && (!ok || explained[s]) {
			delete(m.orphanSince, s)
		}
	}
	return nil
}

// A recordStatus is what the database says to an object outside.
type recordStatus int

const (
	recordLive    recordStatus = iota // a living record has it
	recordEnded                       // its record says that it is gone
	recordMissing                     // it never had a record, as far as the database knows
)

// recordStatusOf says what the database knows of s. tenant is whose it was, if that is known. A
// record answers for its own generation and those that its resumes made, of which the
// latest may exist; a later one had a record that the database lost.
func (m *Manager) recordStatusOf(ctx context.Context, s objectKey) (tenant string, _ recordStatus, err error) {
	sb, err := m.store.Sandbox(ctx, s.id)
	switch {
	case isKind(err, sandboxer.NotFound):
		return "", recordMissing, nil
	case err != nil && sb == nil:
		return "", recordLive, err
	case sb.Damaged != "" && s.generation > sb.Generation: // which it made last cannot be read
	case s.generation > objectGeneration(sb):
		return sb.Tenant, recordMissing, nil
	case s.generation != 0 && s.generation != objectGeneration(sb), sb.State == sandboxer.Paused && !hasReadyObject(sb):
		return sb.Tenant, recordEnded, nil
	}
	if sb.State == sandboxer.Terminated { // a damaged record explains as much
		return sb.Tenant, recordEnded, nil
	}
	if mayBeClaimed(sb) {
		return "", recordMissing, nil
	}
	return sb.Tenant, recordLive, nil
}

// isOldOrphan notes a stray object and reports whether it has been one for long enough.
// Sightings begin with the process, so a fresh one removes nothing for a grace
// period.
func (m *Manager) isOldOrphan(s objectKey) bool {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	first, ok := m.orphanSince[s]
	if !ok {
		m.orphanSince[s] = now
		return false
	}
	return now.Sub(first) >= m.opts.Grace && !now.Before(m.graceUntil)
}

// removeOrphan tears down one stray object, unless its ID has work in flight.
func (m *Manager) removeOrphan(ctx context.Context, e *extension, s objectKey, h sandboxer.Handle, tenant string) error {
	release, err := m.slot(ctx, e.Info.ID)
	if err != nil {
		return err
	}
	defer release()
	j, mine, err := m.begin(ctx, s.id, s.generation, false, nil)
	if err != nil {
		return err
	}
	if !mine {
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s has work in flight", s.id)
	}
	m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) {
		_, v, err := m.recordStatusOf(ctx, s)
		if err == nil && v == recordLive {
			err = errNotNeeded
		}
		if err != nil {
			return nil, err
		}
		err = m.step(pOrphan, func() error { _, err := e.Backend.Teardown(ctx, h); return err })
		m.mu.Lock()
		delete(m.orphanSince, s) // failed, it has to ripen again
		if err == nil {
			delete(m.quarantine, s)
		}
		m.mu.Unlock()
		if err != nil {
			return nil, err
		}
		return nil, m.store.Write(ctx, sandboxer.Writes{Events: []sandboxer.Event{{
			At: now(), SandboxID: s.id, Generation: s.generation, Tenant: tenant,
			Type: sandboxer.EventOrphan, Actor: actor(ctx),
			Message: fmt.Sprintf("%s had an object that no living sandbox explains; it was removed", e.Info.ID),
		}}})
	})
	<-j.done
	m.notify(s.id)
	return j.err
}

// housekeep does the small things that may lag behind.
func (m *Manager) housekeep() {
	m.mu.Lock()
	due := time.Since(m.forgotten) >= time.Hour
	if due {
		m.forgotten = time.Now()
	}
	m.mu.Unlock()
	if due {
		if err := m.store.ForgetIdempotencyKeys(m.ctx, now().Add(-keepKeys)); err != nil && m.ctx.Err() == nil {
			m.log.Warn("forget idempotency keys", "err", err)
		}
		if err := m.forgetHistory(m.ctx); err != nil && m.ctx.Err() == nil {
			m.log.Warn("forget history", "err", err)
		}
	}
	m.usage.forgetUnused(time.Hour)
	if err := m.keys.saveLastUse(m.ctx, time.Minute); err != nil && m.ctx.Err() == nil {
		m.log.Warn("last use of API keys", "err", err)
	}
}

// forgetHistory removes what ended long ago, in batches short enough for others to
// commit in between. What is too much for one time is left to the next tick.
func (m *Manager) forgetHistory(ctx context.Context) error {
	if m.opts.History == 0 {
		return nil
	}
	const batch, batches = 500, 20
	before := now().Add(-m.opts.History)
	total := 0
	for range batches {
		n, err := m.store.ForgetHistory(ctx, before, batch)
		if err != nil {
			return err
		}
		if total += n; n < batch {
			if total > 0 {
				m.log.Info("old history was removed", "count", total, "before", before)
			}
			return nil
		}
	}
	m.log.Info("old history was removed, more is left", "count", total, "before", before)
	m.mu.Lock()
	m.forgotten = time.Time{}
	m.mu.Unlock()
	return nil
}

// flush stores what is only in memory, at the end.
func (m *Manager) flush(ctx context.Context) error {
	for _, id := range m.usage.ids() {
		sb, err := m.store.Sandbox(ctx, id)
		if err == nil && sb.State == sandboxer.Running {
			err = m.saveUse(ctx, sb)
		}
		if err != nil && !isKind(err, sandboxer.NotFound) && sb == nil {
			return err
		}
	}
	return m.keys.saveLastUse(ctx, 0)
}
