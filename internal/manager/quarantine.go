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
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// A record is written before anything exists. An object of this installation whose ID or generation the database never had is
// therefore younger than the database, which was restored from a backup or lost its latest writes. The object may be the work
// of a tenant, so it is quarantined: it is kept and reported until its fuse, or until an administrator destroys it.

// maxQuarantine bounds the number of quarantined objects whose details are remembered. More are kept, too.
const maxQuarantine = sandboxer.MaxPage

// Quarantined is an object of this installation that its database does not know.
type Quarantined struct {
	ID         string    `json:"id"`
	Generation int       `json:"generation"`
	Extension  string    `json:"extension"`
	Host       string    `json:"host,omitempty"`
	Since      time.Time `json:"since"`          // when this server saw it first
	Until      time.Time `json:"until,omitzero"` // its fuse; zero: until an administrator decides
	Why        string    `json:"why"`
}

// quarantine has the quarantined objects that surveys have seen.
//
// mu guards the map and the objects in it. Neither the store nor a backend is called while it is held.
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
}

func newQuarantine() *quarantine { return &quarantine{objects: map[objectKey]*quarantinedObject{}} }

// see notes that k is listed, and says whether to keep it and whether to ask its backend about it now. In a grace period, or
// while the sweep is on hold, no fuse expires.
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
			Why: "the database does not know it: the database was restored from a backup, or lost its latest writes",
		}}
		q.objects[k] = o
	}
	if now.Sub(o.probedAt) >= probeEvery {
		o.probedAt, look = now, true
	}
	over := !o.Until.IsZero() && now.After(o.Until) && !grace
	return !over && !o.dead, look
}

// inspected notes the answer of the backend about k: its data, if any, and whether it is alive. It returns whether k has to be
// reported, for the first time.
func (q *quarantine) inspected(k objectKey, found sandboxer.Found, alive sandboxer.Liveness, now time.Time) (_ Quarantined, report bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	o := q.objects[k]
	if o == nil {
		return Quarantined{}, false
	}
	if found.Handle.SandboxID != "" {
		o.Until = found.Fuse
	}
	switch {
	case alive != sandboxer.Gone && alive != sandboxer.OOMKilled:
		o.deadSince, o.dead = time.Time{}, false
	case o.deadSince.IsZero():
		o.deadSince = now
	case now.Sub(o.deadSince) >= lifecycle.ConfirmAfter:
		o.dead = true
	}
	report = !o.reported && o.deadSince.IsZero()
	o.reported = o.reported || report
	return o.Quarantined, report
}

// reportAgain makes the next inspection of k report it, because the last report failed.
func (q *quarantine) reportAgain(k objectKey) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if o := q.objects[k]; o != nil {
		o.reported = false
	}
}

// release forgets those objects of an extension that have a record now or, if the listing was complete, are no longer listed.
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
		if id == "" && !o.dead || k.id == id {
			all = append(all, o.Quarantined)
		}
	}
	slices.SortFunc(all, func(a, b Quarantined) int {
		return cmp.Or(a.Since.Compare(b.Since), strings.Compare(a.ID, b.ID), a.Generation-b.Generation)
	})
	return all
}

// quarantineObject says whether to keep the object k, which the database does not know, and has it inspected and reported.
func (ps *pass) quarantineObject(e *extension, k objectKey, h sandboxer.Handle) (keep bool) {
	now := time.Now()
	keep, look := ps.m.quarantine.see(k, h.Host, now, ps.m.clock.inGracePeriod(now) || ps.m.hold.held())
	if look {
		ps.async(func() { e.inspectQuarantined(k, h) })
	}
	return keep
}

// inspectQuarantined asks the backend about a quarantined object, and reports it the first
// time.
func (e *extension) inspectQuarantined(k objectKey, h sandboxer.Handle) {
	release, err := e.m.slot(e.m.ctx, e.Info.ID)
	if err != nil {
		return
	}
	defer release()
	var found sandboxer.Found
	if e.Backend.Can(sandboxer.CanDiscover) {
		if found, err = e.Backend.Discover(e.m.ctx, k.id); err != nil || found.Handle.Generation != k.generation {
			found = sandboxer.Found{}
		}
	}
	alive := sandboxer.Unknown
	if e.Backend.Can(sandboxer.CanProbe) {
		if alive, err = e.Backend.IsAlive(e.m.ctx, h); err != nil {
			alive = sandboxer.Unknown
		}
	}
	now := time.Now()
	q, report := e.m.quarantine.inspected(k, found, alive, now)
	if !report {
		return
	}
	until := keptUntil(q.Until)
	ev := sandboxer.Event{SandboxID: k.id, Generation: k.generation}
	ev.Message = sandboxRecords.unknownText(e.Info.ID+" has it,", until, k.id)
	err = e.m.reportUnknown(e.m.ctx, sandboxRecords.recordWords, ev, "sandbox", k.id, "generation", k.generation,
		"extension", e.Info.ID, "until", until)
	if err != nil {
		e.m.quarantine.reportAgain(k)
	}
}

// Quarantine lists what is quarantined, at most MaxPage objects, oldest first. It needs
// the admin scope.
func (m *Manager) Quarantine(ctx context.Context) ([]Quarantined, error) {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	return m.quarantine.list(""), nil
}

// An unknownObject is an object that the database does not know.
type unknownObject struct {
	e      *extension
	s      objectKey
	handle sandboxer.Handle
	tenant string // of its ID, if the database knows one
}

// unknownObjects finds what the extensions have under id and the database does not know: also
// what no survey has seen so far. Unavailable if nothing is found, and one of them cannot be asked.
func (m *Manager) unknownObjects(ctx context.Context, id string) (all []unknownObject, err error) {
	var silent error
	for _, e := range m.extensions() {
		if e.Backend == nil {
			continue
		}
		var h sandboxer.Handle
		if e.Backend.Can(sandboxer.CanDiscover) {
			found, err := e.Backend.Discover(ctx, id)
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			if err != nil && !isKind(err, sandboxer.NotFound) {
				silent = cmp.Or(silent, error(sandboxer.E(sandboxer.Unavailable, err, "%s cannot say whether it has a sandbox %q that the database does not know: %s", e.Info.ID, id, sandboxer.Message(err)).
					WithHint("check the ID: sandboxer ls --all; or try again when the extension can be reached")))
			}
			h = found.Handle
		}
		if h.SandboxID == "" { // incomplete, dead, or the extension cannot tell
			for _, q := range m.quarantine.list(id) {
				if q.Extension == e.Info.ID && q.Generation > h.Generation {
					h = sandboxer.Handle{SandboxID: id, Generation: q.Generation, Host: q.Host}
				}
			}
		}
		if h.SandboxID == "" {
			continue
		}
		s := objectKey{e.Info.ID, id, h.Generation}
		tenant, v, err := m.recordStatusOf(ctx, s)
		if err != nil {
			return nil, err
		}
		if v == recordMissing {
			all = append(all, unknownObject{e, s, h, tenant})
		}
	}
	if len(all) == 0 {
		return nil, silent
	}
	return all, nil
}

// isQuarantinedID reports whether an extension has an object under id that the database does not know, so that nothing new may
// be made under id. After a survey has listed the objects of the extensions, no extension is asked.
func (m *Manager) isQuarantinedID(ctx context.Context, id string) (bool, error) {
	// A survey that ends meanwhile has put what it saw into the quarantine, so that is looked at last.
	var unseen []*extension
	for _, e := range m.extensions() {
		if e.Backend != nil && !e.surveyed.Load() && e.Backend.Can(sandboxer.CanDiscover) {
			unseen = append(unseen, e)
		}
	}
	if len(m.quarantine.list(id)) > 0 {
		return true, nil
	}
	for _, e := range unseen {
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

// removeUnknownObjects tears down the object id that the database does not know, for the caller in
// ctx, and returns it; nil if there is nothing.
func (m *Manager) removeUnknownObjects(ctx context.Context, id string) (*sandboxer.Sandbox, error) {
	all, err := m.unknownObjects(ctx, id)
	if err != nil {
		return nil, err
	}
	var gone *sandboxer.Sandbox
	for _, x := range all {
		err := x.e.removeOrphan(ctx, x.s, x.handle, x.tenant)
		if err == errNotNeeded {
			continue
		}
		if err != nil {
			return nil, err
		}
		gone = &sandboxer.Sandbox{
			ID: id, Tenant: x.tenant, Generation: x.s.generation, Extension: x.e.Info.ID, Handle: x.handle, State: sandboxer.Terminated,
			Reason: sandboxer.ReasonRequested, Message: "the database did not know it; it was removed", EndedAt: now(),
		}
	}
	return gone, nil
}

// quarantineText says how long an object is kept that the database does not know.
func (e *extension) quarantineText(s objectKey) string {
	until := keptUntil(e.m.quarantine.get(s).Until)
	return sandboxRecords.unknownText(fmt.Sprintf("%s has generation %d of it,", e.Info.ID, s.generation), until, s.id)
}

// unknownText describes an object that the database does not know, until when it is kept, and what
// to do.
func (w recordWords) unknownText(has, until, id string) string {
	return fmt.Sprintf("%s the database does not know it; it is kept %s; remove it with: %s %s", has, until, w.remove, id)
}

func keptUntil(at time.Time) string {
	if at.IsZero() {
		return "until an administrator decides"
	}
	return "until " + at.UTC().Format(time.RFC3339)
}

// reportUnknown logs that there is an object that the database does not know, and writes ev,
// which says so.
func (m *Manager) reportUnknown(ctx context.Context, w recordWords, ev sandboxer.Event, attrs ...any) error {
	m.log.Warn(w.object+" of this installation is unknown to the database; it is kept", attrs...)
	ev.At, ev.Type, ev.Actor = now(), sandboxer.EventQuarantine, events.Sweeper
	return m.store.Write(ctx, sandboxer.Writes{Events: []sandboxer.Event{ev}})
}
