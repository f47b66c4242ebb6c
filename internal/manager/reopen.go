package manager

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// reopenEvery bounds how long an extension that could not be opened waits for its next
// attempt; the first comes after about a second.
const reopenEvery = time.Minute

// reopenAll tries again to open the extensions that could not be, each by itself, until
// all are open or the manager closes.
func (m *Manager) reopenAll() {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, e := range m.extensions() {
		if e.Backend == nil && e.Reopen != nil {
			wg.Go(func() { m.reopen(e) })
		}
	}
}

func (m *Manager) reopen(e *extension) {
	for n := 1; ; n++ {
		wait := min(backoff(n, rand.Float64()), reopenEvery)
		e = m.replace(e, func(e *Extension) { e.Info.RetryAt = time.Now().Add(wait) })
		select {
		case <-time.After(wait):
		case <-m.ctx.Done():
			return
		}
		again := e.Reopen(m.ctx)
		if m.ctx.Err() != nil {
			return
		}
		if again.Backend == nil && again.Info.Problem != e.Info.Problem {
			m.log.Warn("extension still cannot be used", "extension", e.Info.ID, "problem", again.Info.Problem)
		}
		e = m.replace(e, func(e *Extension) { e.Info, e.Backend = again.Info, again.Backend })
		if e.Backend != nil {
			m.extensionOpened(e)
			return
		}
	}
}

// replace puts a changed copy of e in its place and returns it.
func (m *Manager) replace(e *extension, change func(*Extension)) *extension {
	next := *e
	change(&next.Extension)
	m.mu.Lock()
	defer m.mu.Unlock()
	all := slices.Clone(m.extensions())
	all[slices.Index(all, e)] = &next
	m.exts.Store(&all)
	return &next
}

// extensionOpened has everything looked after at once that waited for e.
func (m *Manager) extensionOpened(e *extension) {
	m.log.Info("extension can be used now", "extension", e.Info.ID)
	for _, p := range m.catalogue.Load().profiles {
		if p.Extension == e.Info.ID {
			if fault := m.checkProfile(p); fault != "" {
				m.log.Warn("profile cannot be used", "why", fault)
			}
		}
	}
	m.retryNow(e)
	for _, p := range m.catalogue.Load().pools {
		if p.profile.Extension == e.Info.ID {
			p.mu.Lock()
			p.failures, p.retryAt = 0, time.Time{}
			p.mu.Unlock()
		}
	}
	m.wakeSweep()
	m.wakePools()
	m.surveyAll(newTracker(), true)
	m.async(newTracker(), func() { m.listen(e) })
	m.async(newTracker(), func() { m.reportQuarantinedSnapshots(m.ctx) })
}

// retryNow has what waits for its next try on e tried at once: e can be asked again.
func (m *Manager) retryNow(e *extension) {
	err := m.records(m.ctx, sandboxer.Query{Extension: e.Info.ID, States: liveStates}, func(sb *sandboxer.Sandbox) {
		if sb.Retries == 0 && sb.RetryAt.IsZero() || sb.Damaged != "" {
			return
		}
		err := m.update(m.ctx, sb, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			sb.Retries, sb.RetryAt = 0, time.Time{} // also of a call in flight, which may hang since before
			return nil
		})
		if err != nil && m.ctx.Err() == nil { // it is tried again at its time, then
			m.log.Warn("what waits for an extension", "extension", e.Info.ID, "sandbox", sb.ID, "err", err)
		}
	})
	if err != nil && m.ctx.Err() == nil {
		m.log.Warn("what waits for an extension", "extension", e.Info.ID, "err", err)
	}
}
