package manager

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// reopenEvery bounds how long an extension that could not be opened waits for its next
// attempt; the first comes after about a second.
const reopenEvery = time.Minute

// reopenAll tries again to open the extensions that could not be opened, each separately, until
// all are open or the manager closes.
func (m *Manager) reopenAll() {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, e := range m.extensions() {
		if e.Backend == nil && e.Reopen != nil {
			wg.Go(func() { e.reopen() })
		}
	}
}

func (e *extension) reopen() {
	for n := 1; ; n++ {
		wait := min(lifecycle.Backoff(n, rand.Float64()), reopenEvery)
		e = e.replace(func(e *Extension) { e.Info.RetryAt = time.Now().Add(wait) })
		select {
		case <-time.After(wait):
		case <-e.m.ctx.Done():
			return
		}
		again := e.Reopen(e.m.ctx)
		if e.m.ctx.Err() != nil {
			return
		}
		if again.Backend == nil && again.Info.Problem != e.Info.Problem {
			e.m.log.Warn("extension still cannot be used", "extension", e.Info.ID, "problem", again.Info.Problem)
		}
		e = e.replace(func(e *Extension) { e.Info, e.Backend = again.Info, again.Backend })
		if e.Backend != nil {
			e.extensionOpened()
			return
		}
	}
}

// replace puts a changed copy of e in the place of e and returns the copy.
func (e *extension) replace(change func(*Extension)) *extension {
	next := *e
	change(&next.Extension)
	e.m.mu.Lock()
	defer e.m.mu.Unlock()
	all := slices.Clone(e.m.extensions())
	all[slices.Index(all, e)] = &next
	e.m.exts.Store(&all)
	return &next
}

// extensionOpened starts all work that waited for e.
func (e *extension) extensionOpened() {
	e.m.log.Info("extension is available now", "extension", e.Info.ID)
	for _, p := range e.m.catalogue.Load().profiles {
		if slices.Contains(p.Extensions(), e.Info.ID) {
			if fault := e.m.site().CheckProfile(p); fault != "" {
				e.m.log.Warn("profile cannot be used", "why", fault)
			}
		}
	}
	e.retryNow()
	for _, p := range e.m.catalogue.Load().pools {
		if p.profile.Extension == e.Info.ID {
			p.mu.Lock()
			p.failures, p.retryAt = 0, time.Time{}
			p.mu.Unlock()
		}
	}
	e.m.wakeSweep()
	e.m.wakePools()
	e.m.newPass().surveyAll(true)
	e.m.newPass().async(func() { e.listen() })
	e.m.newPass().async(func() { e.m.reportQuarantinedSnapshots(e.m.ctx) })
}

// retryNow repeats at once all steps that wait for their next try on e, because e can be used again.
func (e *extension) retryNow() {
	err := e.m.records(e.m.ctx, sandboxer.Query{Extension: e.Info.ID, States: liveStates}, func(sb *sandboxer.Sandbox) {
		if sb.Retries == 0 && sb.RetryAt.IsZero() || sb.Damaged != "" {
			return
		}
		err := e.m.box(sb).update(e.m.ctx, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			sb.Retries, sb.RetryAt = 0, time.Time{} // also of a call in flight, which may hang since before
			return nil
		})
		if err != nil && e.m.ctx.Err() == nil { // it is tried again at its time, then
			e.m.log.Warn("work that waits for an extension", "extension", e.Info.ID, "sandbox", sb.ID, "err", err)
		}
	})
	if err != nil && e.m.ctx.Err() == nil {
		e.m.log.Warn("work that waits for an extension", "extension", e.Info.ID, "err", err)
	}
}
