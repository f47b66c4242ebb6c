package manager

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// probeEvery is how often a sandbox that its backend lists is also probed. A listed sandbox exists, but may be dead: a crash
// leaves remains.
const probeEvery = 30 * time.Second

// An objectKey is an object outside, as a backend lists it.
type objectKey struct {
	extension, id string
	generation    int
}

// surveyAll starts a survey of every extension. If one is in progress, no other is started, unless again is set: then another
// follows it.
func (ps *pass) surveyAll(again bool) {
	for _, e := range ps.m.extensions() {
		ps.async(func() {
			if !again && len(e.survey) > 0 {
				return
			}
			select {
			case e.survey <- struct{}{}:
			case <-ps.m.ctx.Done():
				return
			}
			defer func() { <-e.survey }()
			if err := ps.surveyOne(ps.m.ctx, e); ps.m.ctx.Err() == nil {
				e.surveys.note(ps.m.log, e.Info.ID, err)
			}
		})
	}
}

// surveyLogEvery is how often the log repeats that an extension cannot be surveyed for the same kind of reason. Surveys follow
// each other within seconds, so an unreachable engine would fill the log otherwise.
const surveyLogEvery = 10 * time.Minute

// surveyLog is the last log message about an extension's surveys.
type surveyLog struct {
	failed sandboxer.Kind // empty: the last one was well
	at     time.Time
}

func (l *surveyLog) note(log *slog.Logger, extension string, err error) {
	switch {
	case err == nil && l.failed != "":
		*l = surveyLog{}
		log.Info("survey works again", "extension", extension)
	case err == nil:
	case sandboxer.KindOf(err) != l.failed || now().Sub(l.at) >= surveyLogEvery:
		*l = surveyLog{failed: sandboxer.KindOf(err), at: now()}
		log.Warn("survey", "extension", extension, "err", err)
	}
}

// A survey is one comparison of the records of an extension with the objects of its backend.
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
	k = objectKey{v.e.Info.ID, sb.ID, lifecycle.ObjectGeneration(sb)}
	if h, ok = v.listed[k]; !ok {
		k.generation = 0 // an object that does not tell
		h, ok = v.listed[k]
	}
	return k, h, ok
}

// surveyOne compares the records of one extension with what its backend has.
func (ps *pass) surveyOne(ctx context.Context, e *extension) error {
	// The listing comes first: everything in it was in the database before.
	v := &survey{e: e, at: time.Now()}
	v.listed, v.listErr = e.listing(ctx)
	v.explained = make(map[objectKey]bool, len(v.listed))
	if *e.unlisted && v.listErr == nil {
		e.retryNow()
	}
	*e.unlisted = v.listErr != nil
	if v.probeAll = v.at.Sub(*e.probed) >= probeEvery; v.probeAll {
		*e.probed = v.at
	}
	q := sandboxer.Query{Extension: e.Info.ID, States: liveStates}
	if err := ps.m.records(ctx, q, func(sb *sandboxer.Sandbox) { ps.surveyRecord(v, sb) }); err != nil {
		return err
	}
	err := ps.orphans(ctx, e, v.listed, v.explained, v.listErr == nil)
	if err == nil && e.Backend != nil { // an extension that is away is reported when it is back
		e.surveyed.Store(true)
	}
	return errors.Join(err, v.listErr)
}

// surveyRecord acts on the result of a survey for one sandbox.
func (ps *pass) surveyRecord(v *survey, sb *sandboxer.Sandbox) {
	e := v.e
	ps.count(func(r *SweepReport) { r.Seen++ })
	switch {
	case sb.Damaged != "":
		ps.count(func(r *SweepReport) { r.Damaged++ })
		sandboxRecords.report(ps.m, sb)
		return
	case sb.State == sandboxer.Paused && !lifecycle.HasReadyObject(sb): // what is listed of it is left over
		ps.sweepOne(sb, sandboxer.Unknown)
		return
	}
	inherited := sb.ReadyAt.Before(ps.m.started) && !ps.m.networkEnforced.contains(generationKey{sb.ID, sb.Generation})
	k, found, ok := v.find(sb)
	if ok && sb.Host == "" && found.Host != "" && !lifecycle.MayBeClaimed(sb) && !ps.m.working(sb.ID) {
		own := *sb
		ps.recordHost(&own, found)
	}
	switch {
	case ok:
		v.explained[k] = !lifecycle.MayBeClaimed(sb)
		if v.canProbe() && lifecycle.NeedsProbe(sb) && (v.probeAll || lifecycle.HasMarks(sb)) {
			ps.probe(e, sb, inherited, false)
			return
		}
		if sb.State == sandboxer.Running && inherited {
			ps.async(func() { ps.m.box(sb).enforceNetwork() })
			ps.count(func(r *SweepReport) { r.Adopted++ })
		}
		ps.sweepOne(sb, sandboxer.Alive)
	case !lifecycle.NeedsProbe(sb), e.Backend == nil, v.listErr != nil:
		ps.sweepOne(sb, sandboxer.Unknown)
	case v.canProbe():
		ps.probe(e, sb, inherited, false)
	case e.Backend.Can(sandboxer.CanList) && v.at.Sub(lifecycle.ObjectSince(sb)) >= ps.m.opts.Grace:
		ps.sweepOne(sb, sandboxer.Gone)
	default: // it may be too new for a slow listing, or it is not known
		ps.sweepOne(sb, sandboxer.Unknown)
	}
}

// listing returns the objects that the backend lists under our name, or nothing if it cannot list. With an error, an object
// that is not listed may exist all the same: one of the backend's machines may be away.
func (e *extension) listing(ctx context.Context) (map[objectKey]sandboxer.Handle, error) {
	if e.Backend == nil || !e.Backend.Can(sandboxer.CanList) {
		return nil, nil
	}
	listed := map[objectKey]sandboxer.Handle{}
	for h, err := range e.Backend.ListRunning(ctx, e.m.opts.Owner) {
		if err != nil {
			return listed, err
		}
		listed[objectKey{e.Info.ID, h.SandboxID, h.Generation}] = h
	}
	return listed, nil
}

// probe asks the backend about one sandbox and acts on the answer. inherited says that a former process left the sandbox: if it
// is alive, it is adopted. told says that its extension reported it. If the sweep works on the sandbox already, probe does
// nothing and returns false.
func (ps *pass) probe(e *extension, sb *sandboxer.Sandbox, inherited, told bool) bool {
	if !ps.m.sweepLocks.tryLock(sb.ID) {
		return false
	}
	ps.async(func() {
		release, err := ps.m.slot(ps.m.ctx, e.Info.ID)
		if err != nil {
			ps.m.unlockSweep(sb.ID)
			return
		}
		alive, err := e.Backend.IsAlive(ps.m.ctx, handleOf(sb))
		release()
		ps.m.unlockSweep(sb.ID)
		if err != nil {
			ps.m.log.Debug("probe", "sandbox", sb.ID, "err", err)
			alive = sandboxer.Unknown
		}
		if told && alive == sandboxer.Gone {
			alive = lifecycle.Died
		}
		if alive == sandboxer.Alive && inherited && lifecycle.HasReadyObject(sb) {
			ps.m.box(sb).enforceNetwork()
			ps.count(func(r *SweepReport) { r.Adopted++ })
		}
		ps.sweepOne(sb, alive)
	})
	return true
}

// probeSoon probes a sandbox that a call reported as missing. If another job works on it now, the probe
// comes after that job, which may have begun before there was a reason to doubt.
func (m *Manager) probeSoon(h sandboxer.Handle) {
	if !m.probing.add(h.SandboxID) { // another goroutine probes it
		return
	}
	done := func() { m.probing.remove(h.SandboxID) }
	if m.ctx.Err() != nil {
		done()
		return
	}
	t := m.newPass()
	t.async(func() {
		defer done()
		for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
			sb, err := m.store.Sandbox(m.ctx, h.SandboxID)
			if err != nil || sb.State != sandboxer.Running || lifecycle.ObjectGeneration(sb) != h.Generation {
				return
			}
			e := m.extension(sb.Extension)
			if e == nil || e.Backend == nil || !e.Backend.Can(sandboxer.CanProbe) || !m.working(sb.ID) && t.probe(e, sb, false, false) {
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
