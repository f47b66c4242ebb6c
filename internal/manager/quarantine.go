package manager

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A record is written before anything exists, so an object with our stamp and an ID or a
// generation that the database never had is younger than the database: that was restored
// from a backup, or lost its latest writes. Such an object may be somebody's work. It is
// quarantined: kept, and told, until its fuse, or until an administrator adopts it, which
// makes a record anew from its stamp, or destroys it.

// maxQuarantine bounds of how many quarantined objects more is known than that they are
// kept.
const maxQuarantine = sandboxer.MaxPage

// Quarantined is an object of this installation that its database does not know.
type Quarantined struct {
	ID         string    `json:"id"`
	ShownID    string    `json:"shown_id,omitempty"` // as the four after Host, by its stamp
	Generation int       `json:"generation"`
	Extension  string    `json:"extension"`
	Host       string    `json:"host,omitempty"`
	Tenant     string    `json:"tenant,omitempty"` // by its stamp, if it has one, as the next three
	Name       string    `json:"name,omitempty"`
	Profile    string    `json:"profile,omitempty"`
	CreatedAt  time.Time `json:"created_at,omitzero"`
	Since      time.Time `json:"since"`          // when this server saw it first
	Until      time.Time `json:"until,omitzero"` // its fuse; zero: until an administrator decides
	Why        string    `json:"why"`
}

// quarantine has the quarantined objects, as far as surveys have seen them.
//
// mu guards the map and the objects in it. Neither the store nor a backend is called under it.
type quarantine struct {
	mu      sync.Mutex
	objects map[objectKey]*quarantinedObject
}

// quarantinedObject is what is remembered of a quarantined object.
type quarantinedObject struct {
	Quarantined
	probedAt  time.Time // when its backend was last asked
	reported  bool
	deadSince time.Time // when it was first proven dead
	dead      bool      // proven twice: nothing is left to keep
	unclaimed bool      // its stamp says that it was made for a pool and never claimed
}

func newQuarantine() *quarantine { return &quarantine{objects: map[objectKey]*quarantinedObject{}} }

// see notes that k is listed, and says whether it is to be kept and whether its backend is to
// be asked about it now. In a grace period no fuse is over.
func (q *quarantine) see(k objectKey, host string, now time.Time, grace bool) (keep, look bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	o := q.objects[k]
	if o == nil {
		if len(q.objects) >= maxQuarantine {
			return true, false
		}
		o = &quarantinedObject{Quarantined: Quarantined{
			ID: k.id, Generation: k.generation, Extension: k.extension, Host: host, Since: now.UTC(),
			Why: "the database does not know it: that was restored from a backup, or lost its latest writes",
		}}
		q.objects[k] = o
	}
	if now.Sub(o.probedAt) >= probeEvery {
		o.probedAt, look = now, true
	}
	over := !o.Until.IsZero() && now.After(o.Until) && !grace
	return !over && !o.dead && !o.unclaimed, look
}

// inspected notes what its backend says of k: what was found of it, if anything, what its
// stamp says, if it has one, and whether it is alive. It reports whether it is to be told of, for
// the first time.
func (q *quarantine) inspected(k objectKey, found sandboxer.Found, was *sandboxer.Sandbox, alive sandboxer.Liveness, now time.Time) (_ Quarantined, report bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	o := q.objects[k]
	if o == nil {
		return Quarantined{}, false
	}
	if found.Handle.SandboxID != "" {
		o.Until = found.Fuse
	}
	if was != nil {
		o.ShownID, o.Tenant, o.Name, o.Profile, o.CreatedAt = was.ShownID, was.Tenant, was.Name, was.Profile, was.CreatedAt
		o.unclaimed = isPooled(was)
	}
	switch {
	case alive != sandboxer.Gone && alive != sandboxer.OOMKilled:
		o.deadSince, o.dead = time.Time{}, false
	case o.deadSince.IsZero():
		o.deadSince = now
	case now.Sub(o.deadSince) >= confirmAfter:
		o.dead = true
	}
	report = !o.reported && !o.unclaimed && o.deadSince.IsZero()
	o.reported = o.reported || report
	return o.Quarantined, report
}

// reportAgain has the next inspection of k tell of it, as the last one could not.
func (q *quarantine) reportAgain(k objectKey) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if o := q.objects[k]; o != nil {
		o.reported = false
	}
}

// release forgets the objects of an extension that are explained by now or, if the listing was
// whole, not there any more.
func (q *quarantine) release(extension string, listed map[objectKey]sandboxer.Handle, explained map[objectKey]bool, whole bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for k := range q.objects {
		if _, ok := listed[k]; k.extension == extension && (explained[k] || !ok && whole) {
			delete(q.objects, k)
		}
	}
}

// remove forgets k.
func (q *quarantine) remove(k objectKey) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.objects, k)
}

// get returns what is known of k; nothing if it is not quarantined.
func (q *quarantine) get(k objectKey) Quarantined {
	q.mu.Lock()
	defer q.mu.Unlock()
	if o := q.objects[k]; o != nil {
		return o.Quarantined
	}
	return Quarantined{}
}

// list returns what is quarantined under id, or, if that is "", all that is to be kept, oldest
// first.
func (q *quarantine) list(id string) []Quarantined {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := []Quarantined{}
	for k, o := range q.objects {
		if id == "" && !o.dead && !o.unclaimed || k.id == id {
			all = append(all, o.Quarantined)
		}
	}
	slices.SortFunc(all, func(a, b Quarantined) int {
		return cmp.Or(a.Since.Compare(b.Since), strings.Compare(a.ID, b.ID), a.Generation-b.Generation)
	})
	return all
}

// quarantineObject says whether the object k, which the database does not know, is to be kept,
// and has it looked at and told.
func (m *Manager) quarantineObject(t *tracker, e *extension, k objectKey, h sandboxer.Handle) (keep bool) {
	now := time.Now()
	keep, look := m.quarantine.see(k, h.Host, now, m.clock.inGracePeriod(now))
	if look {
		m.async(t, func() { m.inspectQuarantined(e, k, h) })
	}
	return keep
}

// inspectQuarantined asks the backend about a quarantined object, and tells of it the first
// time.
func (m *Manager) inspectQuarantined(e *extension, k objectKey, h sandboxer.Handle) {
	release, err := m.slot(m.ctx, e.Info.ID)
	if err != nil {
		return
	}
	defer release()
	var found sandboxer.Found
	var was *sandboxer.Sandbox
	if e.Backend.Can(sandboxer.CanDiscover) {
		if found, err = e.Backend.Discover(m.ctx, k.id); err == nil && found.Handle.Generation == k.generation {
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
	q, report := m.quarantine.inspected(k, found, was, alive, now)
	if !report {
		return
	}
	until := keptUntil(q.Until)
	ev := sandboxer.Event{SandboxID: k.id, ShownID: q.ShownID, Generation: k.generation, Tenant: q.Tenant}
	ev.Message = sandboxRecords.unknownText(e.Info.ID+" has it,", until, k.id)
	err = m.reportUnknown(m.ctx, sandboxRecords.recordWords, ev, "sandbox", k.id, "generation", k.generation,
		"extension", e.Info.ID, "tenant", q.Tenant, "profile", q.Profile, "until", until)
	if err != nil {
		m.quarantine.reportAgain(k)
	}
}

// Quarantine lists what is quarantined, at most MaxPage objects, oldest first. It needs
// the admin scope.
func (m *Manager) Quarantine(ctx context.Context) ([]Quarantined, error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	return m.quarantine.list(""), nil
}

// An unknownObject is an object that the database does not know.
type unknownObject struct {
	e     *extension
	s     objectKey
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
			for _, q := range m.quarantine.list(id) {
				if q.Extension == e.Info.ID && q.Generation > found.Handle.Generation {
					found = sandboxer.Found{Handle: sandboxer.Handle{SandboxID: id, Generation: q.Generation, Host: q.Host}}
				}
			}
		}
		if found.Handle.SandboxID == "" {
			continue
		}
		s := objectKey{e.Info.ID, id, found.Handle.Generation}
		_, v, err := m.recordStatusOf(ctx, s)
		if err != nil {
			return nil, err
		}
		if v == recordMissing {
			all = append(all, unknownObject{e, s, found})
		}
	}
	return all, nil
}

// isQuarantinedID reports whether an extension has an object under id that the database does not
// know, so that nothing new may be made under it. Once a survey has seen what the
// extensions have, nobody is asked.
func (m *Manager) isQuarantinedID(ctx context.Context, id string) (bool, error) {
	if len(m.quarantine.list(id)) > 0 {
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
		_, v, err := m.recordStatusOf(ctx, objectKey{e.Info.ID, id, found.Handle.Generation})
		if err != nil || v == recordMissing {
			return v == recordMissing, err
		}
	}
	return false, nil
}

// removeUnknownObjects tears down what the database does not know under id, at the wish of whoever is
// in ctx, and returns what that was; nil if there is nothing.
func (m *Manager) removeUnknownObjects(ctx context.Context, id string) (*sandboxer.Sandbox, error) {
	all, err := m.unknownObjects(ctx, id)
	if err != nil {
		return nil, err
	}
	var gone *sandboxer.Sandbox
	for _, x := range all {
		sb := &sandboxer.Sandbox{ID: id}
		if was := m.openStamp(x.found); was != nil {
			sb = was
		}
		err := m.removeOrphan(ctx, x.e, x.s, x.found.Handle, sb.Tenant)
		if err == errNotNeeded {
			continue
		}
		if err != nil {
			return nil, err
		}
		sb.Generation, sb.Extension, sb.Handle, sb.State = x.s.generation, x.e.Info.ID, x.found.Handle, sandboxer.Terminated
		sb.Reason, sb.Message, sb.EndedAt = sandboxer.ReasonRequested, "the database did not know it; it was removed", now()
		sb.Quote, sb.SealedEnv, sb.Spec.Env = sandboxer.MeterQuote{}, nil, nil
		gone = sb
	}
	return gone, nil
}

// quarantineText says of an object that the database does not know how long it is kept.
func (m *Manager) quarantineText(e *extension, s objectKey) string {
	whose := ","
	q := m.quarantine.get(s)
	if q.Tenant != "" {
		whose = fmt.Sprintf(", tenant %s's by its stamp,", q.Tenant)
	}
	return sandboxRecords.unknownText(fmt.Sprintf("%s has generation %d of it%s", e.Info.ID, s.generation, whose), keptUntil(q.Until), s.id)
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
