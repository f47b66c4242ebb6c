package manager

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// probeEvery is how often each sandbox that its backend lists is probed as well. What
// is listed exists, but need not be alive: a crash leaves remains.
const probeEvery = 30 * time.Second

// An objectKey is an object outside, as a backend lists it.
type objectKey struct {
	extension, id string
	generation    int
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
			if err := m.surveyOne(m.ctx, t, e); m.ctx.Err() == nil {
				e.surveys.note(m.log, e.Info.ID, err)
			}
		})
	}
}

// surveyLogEvery is how often the log says that an extension still cannot be surveyed for the same kind of reason. An engine that is not there
// would fill it otherwise: surveys follow each other by seconds.
const surveyLogEvery = 10 * time.Minute

// surveyLog is what the log was last told of an extension's surveys.
type surveyLog struct {
	failed sandboxer.Kind // empty: the last one was well
	at     time.Time
}

func (l *surveyLog) note(log *slog.Logger, extension string, err error) {
	switch {
	case err == nil && l.failed != "":
		*l = surveyLog{}
		log.Info("survey is well again", "extension", extension)
	case err == nil:
	case sandboxer.KindOf(err) != l.failed || now().Sub(l.at) >= surveyLogEvery:
		*l = surveyLog{failed: sandboxer.KindOf(err), at: now()}
		log.Warn("survey", "extension", extension, "err", err)
	}
}

// A survey is one comparison of the records of an extension with what its backend has.
type survey struct {
	e         *extension
	at        time.Time
	listed    map[objectKey]sandboxer.Handle
	listErr   error              // why listed is not all
	explained map[objectKey]bool // of listed, what a record has
	probeAll  bool               // not only what is missing
}

// canProbe reports whether the backend can be asked about one sandbox.
func (v *survey) canProbe() bool {
	return v.e.Backend != nil && v.e.Backend.Can(sandboxer.CanProbe)
}

// find returns the object of sb, if it is listed.
func (v *survey) find(sb *sandboxer.Sandbox) (k objectKey, h sandboxer.Handle, ok bool) {
	k = objectKey{v.e.Info.ID, sb.ID, objectGeneration(sb)}
	if h, ok = v.listed[k]; !ok {
		k.generation = 0 // an object that does not tell
		h, ok = v.listed[k]
	}
	return k, h, ok
}

// surveyOne compares the records of one extension with what its backend has.
func (m *Manager) surveyOne(ctx context.Context, t *tracker, e *extension) error {
	// The listing comes first: whatever is in it was in the database before.
	v := &survey{e: e, at: time.Now()}
	v.listed, v.listErr = m.listing(ctx, e)
	v.explained = make(map[objectKey]bool, len(v.listed))
	if *e.unlisted && v.listErr == nil {
		m.retryNow(e)
	}
	*e.unlisted = v.listErr != nil
	if v.probeAll = v.at.Sub(*e.probed) >= probeEvery; v.probeAll {
		*e.probed = v.at
	}
	q := sandboxer.Query{Extension: e.Info.ID, States: liveStates}
	if err := m.records(ctx, q, func(sb *sandboxer.Sandbox) { m.surveyRecord(t, v, sb) }); err != nil {
		return err
	}
	err := m.orphans(ctx, t, e, v.listed, v.explained, v.listErr == nil)
	if err == nil && e.Backend != nil { // what is away is told when it is back
		e.surveyed.Store(true)
	}
	return errors.Join(err, v.listErr)
}

// surveyRecord acts on what a survey says of one sandbox.
func (m *Manager) surveyRecord(t *tracker, v *survey, sb *sandboxer.Sandbox) {
	e := v.e
	t.count(func(r *SweepReport) { r.Seen++ })
	switch {
	case sb.Damaged != "":
		t.count(func(r *SweepReport) { r.Damaged++ })
		sandboxRecords.report(m, sb)
		return
	case sb.Unconfirmed == sandboxer.Unasked && sb.State != sandboxer.Terminating && e.Backend != nil:
		t.count(func(r *SweepReport) { r.Unconfirmed++ })
		m.confirmRecord(t, e, sb)
		return
	case sb.State == sandboxer.Paused && !hasReadyObject(sb): // what is listed of it is left over
		m.sweepOne(t, sb, sandboxer.Unknown)
		return
	}
	inherited := sb.ReadyAt.Before(m.started) && !m.networkEnforced.contains(generationKey{sb.ID, sb.Generation})
	k, found, ok := v.find(sb)
	if ok && sb.Host == "" && found.Host != "" && !mayBeClaimed(sb) && !m.working(sb.ID) {
		own := *sb
		m.recordHost(t, &own, found)
	}
	switch {
	case ok:
		v.explained[k] = !mayBeClaimed(sb)
		if v.canProbe() && needsProbe(sb) && (v.probeAll || !sb.AbsentSince.IsZero()) {
			m.probe(t, e, sb, inherited, false)
			return
		}
		if sb.State == sandboxer.Running && inherited {
			m.async(t, func() { m.enforceNetwork(sb) })
			t.count(func(r *SweepReport) { r.Adopted++ })
		}
		m.sweepOne(t, sb, sandboxer.Alive)
	case !needsProbe(sb), e.Backend == nil, v.listErr != nil:
		m.sweepOne(t, sb, sandboxer.Unknown)
	case v.canProbe():
		m.probe(t, e, sb, inherited, false)
	case e.Backend.Can(sandboxer.CanList) && v.at.Sub(objectSince(sb)) >= m.opts.Grace:
		m.sweepOne(t, sb, sandboxer.Gone)
	default: // it may be too new for a slow listing, or nobody can tell
		m.sweepOne(t, sb, sandboxer.Unknown)
	}
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
// a former process left it: found alive, it is adopted. told says that its extension told of it. While the
// sweep does something else with the sandbox, it does nothing and returns false.
func (m *Manager) probe(t *tracker, e *extension, sb *sandboxer.Sandbox, inherited, told bool) bool {
	if !m.sweepLocks.tryLock(sb.ID) {
		return false
	}
	m.async(t, func() {
		release, err := m.slot(m.ctx, e.Info.ID)
		if err != nil {
			m.unlockSweep(sb.ID)
			return
		}
		alive, err := e.Backend.IsAlive(m.ctx, handleOf(sb))
		release()
		m.unlockSweep(sb.ID)
		if err != nil {
			m.log.Debug("probe", "sandbox", sb.ID, "err", err)
			alive = sandboxer.Unknown
		}
		if told && alive == sandboxer.Gone {
			alive = died
		}
		if alive == sandboxer.Alive && inherited && hasReadyObject(sb) {
			m.enforceNetwork(sb)
			t.count(func(r *SweepReport) { r.Adopted++ })
		}
		m.sweepOne(t, sb, alive)
	})
	return true
}

// probeSoon probes a sandbox that its user was told is not there; if something else is done
// with it now, then after that, which may have begun before there was a reason to doubt.
func (m *Manager) probeSoon(h sandboxer.Handle) {
	if !m.probing.add(h.SandboxID) { // somebody else sees to it
		return
	}
	done := func() { m.probing.remove(h.SandboxID) }
	if m.ctx.Err() != nil {
		done()
		return
	}
	t := newTracker()
	m.async(t, func() {
		defer done()
		for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
			sb, err := m.store.Sandbox(m.ctx, h.SandboxID)
			if err != nil || sb.State != sandboxer.Running || objectGeneration(sb) != h.Generation {
				return
			}
			e := m.extension(sb.Extension)
			if e == nil || e.Backend == nil || !e.Backend.Can(sandboxer.CanProbe) || !m.working(sb.ID) && m.probe(t, e, sb, false, false) {
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
