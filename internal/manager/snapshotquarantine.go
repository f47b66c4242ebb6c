package manager

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
)

// The record of a snapshot is written before anything is saved, and is kept for as long as
// any of its data is. A snapshot of an extension, or of the store of portable snapshots, whose ID
// the database never had is therefore younger than the database. It is kept and reported until an
// administrator removes it.

// A quarantinedSnapshot is a snapshot that the database does not know.
type quarantinedSnapshot struct {
	id        string
	extension string                  // that has a native form of it; "" if none
	found     sandboxer.FoundSnapshot // of the native form
	portable  bool                    // the store of portable snapshots has it
}

// quarantinedSnapshots finds such snapshots by ID, all or only the one called id. silent has the error of
// each extension, and of the store, that could not be asked; the store is asked if withStore is set.
func (m *Manager) quarantinedSnapshots(ctx context.Context, id string, withStore bool) (found map[string]*quarantinedSnapshot, silent map[string]error, err error) {
	found, silent = map[string]*quarantinedSnapshot{}, map[string]error{}
	// unknown returns the one called at, nil if the database knows it or it is not asked for.
	unknown := func(at string) (*quarantinedSnapshot, error) {
		if id != "" && at != id || found[at] == nil && len(found) >= maxQuarantine {
			return nil, nil
		}
		_, err := m.store.Snapshot(ctx, at)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if !isKind(err, sandboxer.NotFound) { // a record that cannot be read is one
			return nil, nil
		}
		if found[at] == nil {
			found[at] = &quarantinedSnapshot{id: at}
		}
		return found[at], nil
	}
	for _, e := range m.extensions() {
		if e.Backend == nil || !e.Backend.Can(sandboxer.CanSnapshot) {
			continue
		}
		for f, err := range e.Backend.ListSnapshots(ctx, m.opts.Owner) {
			if ctx.Err() != nil {
				return nil, nil, context.Cause(ctx)
			}
			if err != nil {
				silent[e.Info.ID] = err
				break
			}
			s, err := unknown(f.Snapshot.SnapshotID)
			if err != nil {
				return nil, nil, err
			}
			if s != nil {
				s.extension, s.found = e.Info.ID, f
			}
		}
	}
	if m.opts.SnapshotStore == nil || !withStore {
		return found, silent, nil
	}
	kept, err := m.opts.SnapshotStore.List(ctx)
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	if err != nil {
		silent[storeName] = err
	}
	for _, at := range kept {
		s, err := unknown(at)
		if err != nil {
			return nil, nil, err
		}
		if s != nil {
			s.portable = true
		}
	}
	return found, silent, nil
}

// text says what is known of s and what to do.
func (s *quarantinedSnapshot) text() string {
	where, has := s.extension, "has"
	switch {
	case where == "":
		where = storeName
	case s.portable:
		where, has = where+" and "+storeName, "have"
	}
	return snapshotRecords.unknownText(fmt.Sprintf("%s %s snapshot %s,", where, has, s.id), keptUntil(time.Time{}), s.id)
}

// reportQuarantinedSnapshots reports each of them once. The audit names extensions that cannot be asked.
func (m *Manager) reportQuarantinedSnapshots(ctx context.Context) {
	all, _, err := m.quarantinedSnapshots(ctx, "", true)
	if err != nil {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		s := all[id]
		if !m.reportedSnapshots.add(id) {
			continue
		}
		e := sandboxer.Event{SandboxID: s.found.SandboxID, Generation: s.found.Generation, Message: s.text()}
		err := m.reportUnknown(ctx, snapshotRecords.recordWords, e, "snapshot", id, "sandbox", e.SandboxID, "extension", s.extension)
		if err != nil {
			m.log.Warn("an event could not be written", "snapshot", id, "err", err)
		}
	}
}

// quarantinedSnapshot finds the one called id.
func (m *Manager) quarantinedSnapshot(ctx context.Context, id string) (*quarantinedSnapshot, error) {
	all, silent, err := m.quarantinedSnapshots(ctx, id, true)
	if err != nil {
		return nil, err
	}
	s := all[id]
	for name, err := range silent {
		if s == nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot say whether it has a snapshot %q: %s", name, id, sandboxer.Message(err))
		}
	}
	if s == nil {
		return nil, sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %q", id)
	}
	return s, nil
}

// dropQuarantined makes the record by which an administrator drops a snapshot that the database does
// not know. id is its complete ID. NotFound: there is none of that ID.
func (m *Manager) dropQuarantined(ctx context.Context, id string) (*sandboxer.SnapshotRecord, error) {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	release, err := m.pins.claim(id)
	if err != nil {
		return nil, err
	}
	defer release()
	s, err := m.quarantinedSnapshot(ctx, id)
	if err != nil {
		return nil, err
	}
	rec := &sandboxer.SnapshotRecord{
		ID: id, Tenant: sandboxer.PrincipalFrom(ctx).Tenant, SandboxID: s.found.SandboxID, Generation: s.found.Generation, Extension: s.extension,
		Kind: sandboxer.SnapshotPortable, State: sandboxer.SnapshotDropping, Message: "the database did not know it", CreatedAt: now(),
	}
	if s.extension != "" {
		rec.Kind = sandboxer.SnapshotNative
		if s.portable {
			rec.Kind = sandboxer.SnapshotBoth
		}
	}
	return rec, m.step(pDropping, func() error { return m.putSnapshot(ctx, rec, "") })
}
