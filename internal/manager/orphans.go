package manager

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// orphans removes objects of this installation whose record says that they are gone, after a grace period since the first
// sighting. Objects that never had a record are quarantined first. whole says that the listing was complete.
func (ps *pass) orphans(ctx context.Context, e *extension, listed map[objectKey]sandboxer.Handle, explained map[objectKey]bool, whole bool) error {
	defer ps.m.quarantine.release(e.Info.ID, listed, explained, whole)
	for s, h := range listed {
		if explained[s] {
			continue
		}
		tenant, v, err := ps.m.recordStatusOf(ctx, s)
		if err != nil {
			return err
		}
		if v == recordLive {
			explained[s] = true
			continue
		}
		if v == recordMissing && ps.quarantineObject(e, s, h) {
			ps.count(func(r *SweepReport) { r.Quarantined++ })
			continue
		}
		if !ps.m.isOldOrphan(s) || !ps.m.sweepLocks.tryLock(s.id) {
			continue
		}
		ps.async(func() {
			defer ps.m.unlockSweep(s.id)
			err := e.removeOrphan(ps.m.ctx, s, h, tenant)
			if err == errNotNeeded {
				return
			}
			if err != nil {
				ps.count(func(r *SweepReport) { r.Failed++ })
				ps.m.log.Warn("orphan", "extension", e.Info.ID, "sandbox", s.id, "generation", s.generation, "err", err)
				return
			}
			ps.count(func(r *SweepReport) { r.Orphans++ })
		})
	}
	ps.m.orphanSightings.retain(e.Info.ID, listed, explained)
	return nil
}

// orphanSightings remember when each listed object without a living record was first seen.
//
// mu guards the map. Nothing is called while it is held.
type orphanSightings struct {
	mu    sync.Mutex
	since map[objectKey]time.Time
}

func newOrphanSightings() *orphanSightings {
	return &orphanSightings{since: map[objectKey]time.Time{}}
}

// note returns when k was first seen, which is now for a new one.
func (o *orphanSightings) note(k objectKey, now time.Time) (since time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.since[k]; !ok {
		o.since[k] = now
	}
	return o.since[k]
}

// forget restarts the time of k.
func (o *orphanSightings) forget(k objectKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.since, k)
}

// retain forgets those objects of an extension that it no longer lists, or that now have a record.
func (o *orphanSightings) retain(extension string, listed map[objectKey]sandboxer.Handle, explained map[objectKey]bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for k := range o.since {
		if _, ok := listed[k]; k.extension == extension && (!ok || explained[k]) {
			delete(o.since, k)
		}
	}
}

// A recordStatus is the knowledge of the database about an object of a backend.
type recordStatus int

const (
	recordLive    recordStatus = iota // a living record has it
	recordEnded                       // its record says that it is gone
	recordMissing                     // it never had a record, as far as the database knows
)

// recordStatusOf says what the database knows of s. tenant is its tenant, if that is known. A
// record answers for its own generation and those that its resumes made: the latest of
// these may exist. A later generation had a record that the database lost.
func (m *Manager) recordStatusOf(ctx context.Context, s objectKey) (tenant string, _ recordStatus, err error) {
	sb, err := m.store.Sandbox(ctx, s.id)
	switch {
	case isKind(err, sandboxer.NotFound):
		return "", recordMissing, nil
	case err != nil && sb == nil:
		return "", recordLive, err
	case owes(sb, s):
		return sb.Tenant, recordLive, nil
	case sb.Damaged != "" && s.generation > sb.Generation: // which it made last cannot be read
	case s.generation > lifecycle.ObjectGeneration(sb):
		return sb.Tenant, recordMissing, nil
	case s.generation != 0 && s.generation != lifecycle.ObjectGeneration(sb), sb.State == sandboxer.Paused && !lifecycle.HasReadyObject(sb):
		return sb.Tenant, recordEnded, nil
	}
	if sb.State == sandboxer.Terminated { // a damaged record explains as much
		return sb.Tenant, recordEnded, nil
	}
	if lifecycle.MayBeClaimed(sb) {
		return "", recordMissing, nil
	}
	return sb.Tenant, recordLive, nil
}

// isOldOrphan notes a sighting of an orphan and reports whether the first one was long enough ago. Sightings are only in
// memory, so a new process removes nothing for a grace period.
func (m *Manager) isOldOrphan(k objectKey) bool {
	now := time.Now()
	return now.Sub(m.orphanSightings.note(k, now)) >= m.opts.Grace && !m.clock.inGracePeriod(now)
}

// removeOrphan tears down one orphan, unless a job works on its ID.
func (e *extension) removeOrphan(ctx context.Context, s objectKey, h sandboxer.Handle, tenant string) error {
	release, err := e.m.slot(ctx, e.Info.ID)
	if err != nil {
		return err
	}
	defer release()
	j, mine, err := e.m.begin(ctx, s.id, s.generation, false, nil)
	if err != nil {
		return err
	}
	if !mine {
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s has work in flight", s.id)
	}
	j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) {
		_, v, err := e.m.recordStatusOf(ctx, s)
		if err == nil && v == recordLive {
			err = errNotNeeded
		}
		if err != nil {
			return nil, err
		}
		err = e.m.step(pOrphan, func() error { _, err := e.Backend.Teardown(ctx, h); return err })
		e.m.orphanSightings.forget(s) // if it failed, its grace period begins again
		if err != nil {
			return nil, err
		}
		e.m.quarantine.remove(s)
		return nil, e.m.store.Write(ctx, sandboxer.Writes{Events: []sandboxer.Event{{
			At: now(), SandboxID: s.id, Generation: s.generation, Tenant: tenant,
			Type: sandboxer.EventOrphan, Actor: events.Actor(ctx),
			Message: fmt.Sprintf("%s had an object of no live sandbox; it was removed", e.Info.ID),
		}}})
	})
	<-j.done
	e.m.events.Notify(s.id)
	return j.err
}
