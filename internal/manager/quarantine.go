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

// A record is written before anything exists, and is kept for as long as something does. What
// carries our stamp under an ID or a generation that the database never had is therefore
// younger than the database: that was restored from a backup, or lost its latest writes. It
// may be somebody's work. It is quarantined: kept, and told, until its fuse, which a snapshot
// has not, or until an administrator adopts it, which makes a record anew, or removes it.

// maxQuarantine bounds of how many quarantined objects more is known than that they are
// kept.
const maxQuarantine = sandboxer.MaxPage

// Quarantined is an object of this installation that its database does not know.
type Quarantined struct {
	ID         string    `json:"id"`
	Generation int       `json:"generation"`
	Extension  string    `json:"extension"`
	Host       string    `json:"host,omitempty"`
	Tenant     string    `json:"tenant,omitempty"` // this and the next three by its stamp, if it has one
	Name       string    `json:"name,omitempty"`
	Profile    string    `json:"profile,omitempty"`
	CreatedAt  time.Time `json:"created_at,omitzero"`
	Since      time.Time `json:"since"`          // when this server saw it first
	Until      time.Time `json:"until,omitzero"` // its fuse; zero: until an administrator decides
	Why        string    `json:"why"`
}

// A quarantineList has the objects that the database does not know. Guarded by Manager.mu.
type quarantineList map[sighting]*quarantinedObject

// quarantinedObject is what the manager remembers of one.
type quarantinedObject struct {
	Quarantined
	looked    time.Time // when its backend was last asked
	told      bool
	deadSince time.Time // when it was first proven dead
	dead      bool      // proven twice: nothing is left to keep
	nobodys   bool      // its stamp says that it was made for a pool and never claimed
}

// unknownText says of something that the database does not know what is known, until when it
// is kept, and what to do.
func (w recordWords) unknownText(has, until, id string) string {
	return fmt.Sprintf("%s the database does not know it; it is kept %s; %s %s; or %s %s", has, until, w.adopt, id, w.remove, id)
}

func keptUntil(at time.Time) string {
	if at.IsZero() {
		return "until an administrator decides"
	}
	return "until " + at.UTC().Format(time.RFC3339)
}

// reportUnknown logs that there is something that the database does not know, and writes ev,
// which says so.
func (m *Manager) reportUnknown(ctx context.Context, w recordWords, ev sandboxer.Event, attrs ...any) error {
	m.log.Warn(w.object+" of this installation is unknown to the database; it is kept", attrs...)
	ev.At, ev.Type, ev.Actor = now(), sandboxer.EventQuarantine, sweeper
	return m.store.Write(ctx, sandboxer.Writes{Events: []sandboxer.Event{ev}})
}

// quarantineUnknown says whether the object s, which the database does not know, is to be kept, and
// sees to it that it is looked at and told.
func (m *Manager) quarantineUnknown(t *tally, e *extension, s sighting, h sandboxer.Handle) bool {
	now := time.Now()
	m.mu.Lock()
	look := false
	defer func() {
		m.mu.Unlock()
		if look {
			m.async(t, func() { m.inspect(e, s, h) })
		}
	}()
	q := m.quarantine[s]
	if q == nil {
		if len(m.quarantine) >= maxQuarantine {
			return true
		}
		q = &quarantinedObject{Quarantined: Quarantined{
			ID: s.id, Generation: s.generation, Extension: e.Info.ID, Host: h.Host, Since: now.UTC(),
			Why: "the database does not know it: that was restored from a backup, or lost its latest writes",
		}}
		m.quarantine[s] = q
	}
	if now.Sub(q.looked) >= probeEvery {
		q.looked, look = now, true
	}
	over := !q.Until.IsZero() && now.After(q.Until) && !now.Before(m.graceUntil)
	return !over && !q.dead && !q.nobodys
}

// inspect asks the backend about a quarantined object, and tells of it the first time.
func (m *Manager) inspect(e *extension, s sighting, h sandboxer.Handle) {
	release, err := m.slot(m.ctx, e.Info.ID)
	if err != nil {
		return
	}
	defer release()
	var found sandboxer.Found
	var was *sandboxer.Sandbox
	if e.Backend.Can(sandboxer.CanDiscover) {
		if found, err = e.Backend.Discover(m.ctx, s.id); err == nil && found.Handle.Generation == s.generation {
			was = m.openStamp(found)
		} else {
			found = sandboxer.Found{}
		}
	}
	alive := sandboxer.Unknown
	if e.Backend.Can(sandboxer.CanProbe) {
		if alive, err = e.Backend.IsAlive(m.ctx, h); err != nil {
			alive = sandboxer.Unknown
		}
	}
	now := time.Now()
	m.mu.Lock()
	q := m.quarantine[s]
	if q == nil {
		m.mu.Unlock()
		return
	}
	if found.Handle.SandboxID != "" {
		q.Until = found.Fuse
	}
	if was != nil {
		q.Tenant, q.Name, q.Profile, q.CreatedAt = was.Tenant, was.Name, was.Profile, was.CreatedAt
		q.nobodys = isPooled(was)
	}
	switch {
	case alive != sandboxer.Gone && alive != sandboxer.OOMKilled:
		q.deadSince, q.dead = time.Time{}, false
	case q.deadSince.IsZero():
		q.deadSince = now
	case now.Sub(q.deadSince) >= confirmAfter:
		q.dead = true
	}
	tell := !q.told && !q.nobodys && q.deadSince.IsZero()
	q.told = q.told || tell
	say := q.Quarantined
	m.mu.Unlock()
	if !tell {
		return
	}
	until := keptUntil(say.Until)
	ev := sandboxer.Event{SandboxID: s.id, Generation: s.generation, Tenant: say.Tenant}
	ev.Message = sandboxRecords.unknownText(e.Info.ID+" has it,", until, s.id)
	err = m.reportUnknown(m.ctx, sandboxRecords.recordWords, ev, "sandbox", s.id, "generation", s.generation,
		"extension", e.Info.ID, "tenant", say.Tenant, "profile", say.Profile, "until", until)
	if err != nil {
		m.mu.Lock()
		q.told = false
		m.mu.Unlock()
	}
}

// endQuarantine forgets quarantined objects of e that are known by now or, if the listing was
// whole, not there any more.
func (m *Manager) endQuarantine(e *extension, listed map[sighting]sandboxer.Handle, explained map[sighting]bool, whole bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for s := range m.quarantine {
		if _, ok := listed[s]; s.extension == e.Info.ID && (explained[s] || !ok && whole) {
			delete(m.quarantine, s)
		}
	}
}

// Quarantine lists what is quarantined, at most MaxPage objects, oldest first. It needs
// the admin scope.
func (m *Manager) Quarantine(ctx context.Context) ([]Quarantined, error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	return m.quarantined(""), nil
}

// quarantined lists what is quarantined under id, or under all if that is "".
func (m *Manager) quarantined(id string) []Quarantined {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []Quarantined{}
	for s, q := range m.quarantine {
		if id == "" && !q.dead && !q.nobodys || s.id == id {
			all = append(all, q.Quarantined)
		}
	}
	slices.SortFunc(all, func(a, b Quarantined) int {
		return cmp.Or(a.Since.Compare(b.Since), strings.Compare(a.ID, b.ID), a.Generation-b.Generation)
	})
	return all
}

// quarantineText says of an object that the database does not know how long it is kept.
func (m *Manager) quarantineText(e *extension, s sighting) string {
	var until time.Time
	whose := ","
	m.mu.Lock()
	if q := m.quarantine[s]; q != nil {
		until = q.Until
		if q.Tenant != "" {
			whose = fmt.Sprintf(", tenant %s's by its stamp,", q.Tenant)
		}
	}
	m.mu.Unlock()
	return sandboxRecords.unknownText(fmt.Sprintf("%s has generation %d of it%s", e.Info.ID, s.generation, whose), keptUntil(until), s.id)
}

// An unknownObject is an object that the database does not know.
type unknownObject struct {
	e     *extension
	s     sighting
	found sandboxer.Found // nothing but the handle if the extension cannot discover
}

// unknownObjects finds what the extensions have under id and the database does not know: also
// what no survey has seen so far.
func (m *Manager) unknownObjects(ctx context.Context, id string) (all []unknownObject, err error) {
	for _, e := range m.extensions() {
		if e.Backend == nil {
			continue
		}
		var found sandboxer.Found
		if e.Backend.Can(sandboxer.CanDiscover) {
			found, err = e.Backend.Discover(ctx, id)
			if err != nil && !isKind(err, sandboxer.NotFound) {
				return nil, err
			}
		}
		if found.Handle.SandboxID == "" { // incomplete, dead, or the extension cannot tell
			for _, q := range m.quarantined(id) {
				if q.Extension == e.Info.ID && q.Generation > found.Handle.Generation {
					found = sandboxer.Found{Handle: sandboxer.Handle{SandboxID: id, Generation: q.Generation, Host: q.Host}}
				}
			}
		}
		if found.Handle.SandboxID == "" {
			continue
		}
		s := sighting{e.Info.ID, id, found.Handle.Generation}
		_, v, err := m.recordStatusOf(ctx, s)
		if err != nil {
			return nil, err
		}
		if v == unknown {
			all = append(all, unknownObject{e, s, found})
		}
	}
	return all, nil
}

// isQuarantined reports whether an extension has an object under id that the database does not
// know, so that nothing new may be made under it. Once a survey has seen what the
// extensions have, nobody is asked.
func (m *Manager) isQuarantined(ctx context.Context, id string) (bool, error) {
	if len(m.quarantined(id)) > 0 {
		return true, nil
	}
	for _, e := range m.extensions() {
		if e.Backend == nil || e.surveyed.Load() || !e.Backend.Can(sandboxer.CanDiscover) {
			continue
		}
		found, err := e.Backend.Discover(ctx, id)
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		if err != nil { // not there, or out of reach
			continue
		}
		_, v, err := m.recordStatusOf(ctx, sighting{e.Info.ID, id, found.Handle.Generation})
		if err != nil || v == unknown {
			return v == unknown, err
		}
	}
	return false, nil
}

// An unknownSnapshot is one that the database does not know.
type unknownSnapshot struct {
	id        string
	extension string // that has a native form of it; "" if none
	found     sandboxer.FoundSnapshot
	was       *sandboxer.Sandbox        // of what, by its stamp; nil if there is none
	portable  *sandboxer.SnapshotRecord // what the store knows of a portable form; nil if there is none
	why       error                     // why the portable form cannot be used
}

// unknownSnapshots finds them by ID, all or only the one called id. Who could not be asked
// is in silent, by name; the store of portable snapshots is asked if withStore is set.
func (m *Manager) unknownSnapshots(ctx context.Context, id string, withStore bool) (found map[string]*unknownSnapshot, silent map[string]error, err error) {
	found, silent = map[string]*unknownSnapshot{}, map[string]error{}
	// unknown returns the one called at, nil if the database knows it or it is not asked for.
	unknown := func(at string) (*unknownSnapshot, error) {
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
			found[at] = &unknownSnapshot{id: at}
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
func (s *unknownSnapshot) text() string {
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

// reportUnknownSnapshots tells of those there are, of each once.
func (m *Manager) reportUnknownSnapshots(ctx context.Context) {
	all, _, err := m.unknownSnapshots(ctx, "", true) // whoever cannot be asked is the audit's to tell
	if err != nil {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		s := all[id]
		m.mu.Lock()
		told := m.toldOf[id]
		m.toldOf[id] = true
		m.mu.Unlock()
		if told {
			continue
		}
		ev := sandboxer.Event{SandboxID: s.found.SandboxID, Generation: s.found.Generation, Message: s.text()}
		if s.portable != nil && ev.SandboxID == "" {
			ev.SandboxID, ev.Generation = s.portable.SandboxID, s.portable.Generation
		}
		if s.was != nil {
			ev.Tenant = s.was.Tenant
		}
		err := m.reportUnknown(ctx, snapshotRecords.recordWords, ev, "snapshot", id, "sandbox", ev.SandboxID, "extension", s.extension, "tenant", ev.Tenant)
		if err != nil {
			m.log.Warn("an event could not be written", "snapshot", id, "err", err)
		}
	}
}
