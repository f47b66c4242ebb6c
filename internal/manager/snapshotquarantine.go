package manager

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// The record of a snapshot is written before anything is saved, and is kept for as long as
// something is. What an extension or the store of portable snapshots keeps under an ID that
// the database never had is therefore younger than the database. It is kept, and told,
// until an administrator adopts or drops it.

// A quarantinedSnapshot is one that the database does not know.
type quarantinedSnapshot struct {
	id        string
	extension string // that has a native form of it; "" if none
	found     sandboxer.FoundSnapshot
	was       *sandboxer.Sandbox        // of what, by its stamp; nil if there is none
	portable  *sandboxer.SnapshotRecord // what the store knows of a portable form; nil if there is none
	why       error                     // why the portable form cannot be used
}

// quarantinedSnapshots finds them by ID, all or only the one called id. Who could not be asked
// is in silent, by name; the store of portable snapshots is asked if withStore is set.
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
			if s == nil {
				continue
			}
			s.extension, s.found = e.Info.ID, f
			s.was = m.openStamp(sandboxer.Found{Handle: sandboxer.Handle{SandboxID: f.SandboxID, Generation: f.Generation}, Stamp: f.Stamp})
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
		if s == nil {
			continue
		}
		began := time.Now()
		s.portable, s.why = m.opts.SnapshotStore.Describe(ctx, at)
		if ctx.Err() != nil {
			return nil, nil, context.Cause(ctx)
		}
		if s.why != nil {
			s.portable = &sandboxer.SnapshotRecord{ID: at}
		}
		if hung(s.why, began) {
			silent[storeName] = s.why
			break
		}
	}
	return found, silent, nil
}

// text says of one what is known and what to do.
func (s *quarantinedSnapshot) text() string {
	where, has, whose := s.extension, "has", ","
	switch {
	case where == "":
		where = storeName
	case s.portable != nil:
		where, has = where+" and "+storeName, "have"
	}
	if s.was != nil && s.was.Tenant != "" {
		whose = fmt.Sprintf(", tenant %s's,", s.was.Tenant)
	}
	return snapshotRecords.unknownText(fmt.Sprintf("%s %s snapshot %s%s", where, has, s.id, whose), keptUntil(time.Time{}), s.id)
}

// reportQuarantinedSnapshots tells of those there are, of each once.
func (m *Manager) reportQuarantinedSnapshots(ctx context.Context) {
	all, _, err := m.quarantinedSnapshots(ctx, "", true) // whoever cannot be asked is the audit's to tell
	if err != nil {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		s := all[id]
		if !m.reportedSnapshots.add(id) {
			continue
		}
		e := sandboxer.Event{Message: s.text()}
		e.SandboxID, e.Generation = s.found.SandboxID, s.found.Generation
		if s.portable != nil && e.SandboxID == "" {
			e.SandboxID, e.Generation = s.portable.SandboxID, s.portable.Generation
		}
		if s.was != nil {
			e.Tenant, e.ShownID = s.was.Tenant, s.was.ShownID
		}
		err := m.reportUnknown(ctx, snapshotRecords.recordWords, e, "snapshot", id, "sandbox", e.SandboxID, "extension", s.extension, "tenant", e.Tenant)
		if err != nil {
			m.log.Warn("an event could not be written", "snapshot", id, "err", err)
		}
	}
}

// AdoptSnapshot makes a record anew for a snapshot that the database does not know, one that it
// kept for a pause too, and returns it sealed. It needs the admin scope. Kinds: NotFound when
// there is no such snapshot; Conflict when the database knows it, or it was not saved to the
// end; Invalid when a contradicts its stamp, or says too little; Failed when it is damaged.
func (m *Manager) AdoptSnapshot(ctx context.Context, id string, a SnapshotAdoption) (*sandboxer.SnapshotRecord, error) {
	if err := checkName(a.Name); err != nil {
		return nil, err
	}
	s, release, err := m.claimQuarantined(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	rec, err := m.adoptedSnapshot(s, a)
	if err != nil {
		return nil, err
	}
	if err := m.step(pSealed, func() error { return m.putSnapshot(ctx, rec, "adopted: the database did not know it") }); err != nil {
		return nil, err
	}
	return rec, nil
}

// claimQuarantined finds one for an administrator, and reserves it.
func (m *Manager) claimQuarantined(ctx context.Context, id string) (_ *quarantinedSnapshot, release func(), err error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, nil, err
	}
	if err := checkSnapshotID(id); err != nil {
		return nil, nil, err
	}
	release, err = m.pins.claim(id)
	if err != nil {
		return nil, nil, err
	}
	s, err := m.quarantinedSnapshot(ctx, id)
	if err != nil {
		release()
		return nil, nil, err
	}
	return s, release, nil
}

func checkSnapshotID(id string) error {
	if !strings.HasPrefix(id, "snap-") || sandboxer.CheckID(id) != nil {
		return sandboxer.E(sandboxer.Invalid, nil, "%q is not the ID of a snapshot", id).WithHint("write it as the audit does, as a whole: sandboxer audit")
	}
	return nil
}

// quarantinedSnapshot finds the one called id.
func (m *Manager) quarantinedSnapshot(ctx context.Context, id string) (*quarantinedSnapshot, error) {
	if rec, err := m.store.Snapshot(ctx, id); err == nil {
		return nil, snapshotRecords.known(id, string(rec.State))
	} else if !isKind(err, sandboxer.NotFound) {
		return nil, err
	}
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
		return nil, sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %q that the database does not know", id).
			WithHint("those that there are: sandboxer audit; write the whole ID")
	}
	return s, nil
}

// adoptedSnapshot makes the record of s. Nothing is written yet.
func (m *Manager) adoptedSnapshot(s *quarantinedSnapshot, a SnapshotAdoption) (*sandboxer.SnapshotRecord, error) {
	native, portable := s.found.Whole, s.portable != nil && s.why == nil
	switch {
	case !native && s.portable != nil && s.why != nil:
		return nil, sandboxer.E(sandboxer.KindOf(s.why), s.why, "snapshot %s cannot be adopted: %s", s.id, sandboxer.Message(s.why))
	case !native && !portable:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "snapshot %s was not saved to the end", s.id).WithHint("remove what there is of it: sandboxer snapshot rm %s", s.id)
	}
	rec := &sandboxer.SnapshotRecord{SandboxID: s.found.SandboxID, Generation: s.found.Generation, Extension: s.extension}
	if s.was != nil {
		rec = newSnapshot(s.was, "", "")
		rec.Generation, rec.Extension = s.found.Generation, s.extension
		if err := snapshotRecords.checkStamp(s.id, s.was, a.Tenant, a.Profile); err != nil {
			return nil, err
		}
	}
	if portable {
		p := s.portable
		rec.Portable = p.Portable
		rec.SandboxID, rec.Profile, rec.Extension = cmp.Or(rec.SandboxID, p.SandboxID), cmp.Or(rec.Profile, p.Profile), cmp.Or(rec.Extension, p.Extension)
		rec.Generation = cmp.Or(rec.Generation, p.Generation)
		rec.Kind = sandboxer.SnapshotPortable
	}
	if native {
		rec.Native = s.found.Snapshot
		rec.Kind = sandboxer.SnapshotNative
		if portable {
			rec.Kind = sandboxer.SnapshotBoth
		}
	}
	if rec.Tenant = cmp.Or(rec.Tenant, a.Tenant); rec.Tenant == "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "snapshot %s does not say whose it is", s.id).WithHint("say it: --tenant TENANT")
	}
	if s.was == nil && a.Profile != "" {
		prof, err := m.profile(a.Profile)
		if err != nil {
			return nil, err
		}
		rec.Profile = prof.ID
	}
	if rec.Profile == "" && native {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "snapshot %s does not say what it was made from", s.id).WithHint("say it: --profile PROFILE")
	}
	rec.ID, rec.Name, rec.State, rec.Purpose = s.id, a.Name, sandboxer.SnapshotSealed, ""
	rec.CreatedAt = now()
	rec.SealedAt = rec.CreatedAt
	if s.was != nil {
		if err := m.sealFor(s.was, rec); err != nil {
			return nil, err
		}
	}
	return rec, nil
}

// dropQuarantined makes the record by which a snapshot is dropped that the database does not know, at the
// wish of an administrator. NotFound: there is none of that ID.
func (m *Manager) dropQuarantined(ctx context.Context, id string) (*sandboxer.SnapshotRecord, error) {
	s, release, err := m.claimQuarantined(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	rec := &sandboxer.SnapshotRecord{
		ID: id, Tenant: sandboxer.PrincipalFrom(ctx).Tenant, SandboxID: s.found.SandboxID, Generation: s.found.Generation, Extension: s.extension,
		Kind: sandboxer.SnapshotPortable, State: sandboxer.SnapshotDropping, Message: "the database did not know it", CreatedAt: now(),
	}
	if s.was != nil {
		rec.Tenant, rec.Profile, rec.ShownID = cmp.Or(s.was.Tenant, rec.Tenant), s.was.Profile, s.was.ShownID
	}
	if s.extension != "" {
		rec.Kind = sandboxer.SnapshotNative
		if s.portable != nil {
			rec.Kind = sandboxer.SnapshotBoth
		}
	}
	return rec, m.step(pDropping, func() error { return m.putSnapshot(ctx, rec, "") })
}
