package manager

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
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

// quarantinedObject is what the manager remembers of a quarantined object. Guarded by Manager.mu.
type quarantinedObject struct {
	Quarantined
	probedAt  time.Time // when its backend was last asked
	reported  bool
	deadSince time.Time // when it was first proven dead
	dead      bool      // proven twice: nothing is left to keep
	unclaimed bool      // its stamp says that it was made for a pool and never claimed
}

// A stamp is the record of a sandbox as it was when its object was made.
type stamp struct {
	V       int                `json:"v"`
	Sandbox *sandboxer.Sandbox `json:"sandbox"`
	Env     []byte             `json:"env,omitempty"` // Sandbox.SealedEnv
}

func stampName(id string, generation int) []byte {
	return fmt.Appendf(nil, "stamp/%s/%d", id, generation)
}

// stampOf seals what Spec.Stamp says of sb, or returns nil for what is too big.
func (m *Manager) stampOf(sb *sandboxer.Sandbox) []byte {
	plain, err := json.Marshal(stamp{1, sb, sb.SealedEnv})
	if err != nil {
		return nil
	}
	nonce := make([]byte, m.seal.NonceSize(), m.seal.NonceSize()+len(plain)+m.seal.Overhead())
	rand.Read(nonce)
	sealed := m.seal.Seal(nonce, nonce, plain, stampName(sb.ID, objectGeneration(sb)))
	if len(sealed) > sandboxer.MaxStampBytes {
		return nil
	}
	return sealed
}

// openStamp returns the record that a stamp of ours holds, or nil: there is none, or it is
// another object's, or another installation's.
func (m *Manager) openStamp(f sandboxer.Found) *sandboxer.Sandbox {
	n := m.seal.NonceSize()
	if len(f.Stamp) <= n {
		return nil
	}
	plain, err := m.seal.Open(nil, f.Stamp[:n], f.Stamp[n:], stampName(f.Handle.SandboxID, f.Handle.Generation))
	if err != nil {
		return nil
	}
	var s stamp
	if _, err := strictjson.DecodeStored(plain, &s); err != nil || s.V != 1 || s.Sandbox == nil || s.Sandbox.ID != f.Handle.SandboxID {
		return nil
	}
	s.Sandbox.SealedEnv = s.Env
	return s.Sandbox
}

// quarantineObject says whether the object s, which the database does not know, is to be kept, and
// sees to it that it is looked at and told.
func (m *Manager) quarantineObject(t *tracker, e *extension, s objectKey, h sandboxer.Handle) bool {
	now := time.Now()
	m.mu.Lock()
	look := false
	defer func() {
		m.mu.Unlock()
		if look {
			m.async(t, func() { m.inspectQuarantined(e, s, h) })
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
	if now.Sub(q.probedAt) >= probeEvery {
		q.probedAt, look = now, true
	}
	over := !q.Until.IsZero() && now.After(q.Until) && !now.Before(m.graceUntil)
	return !over && !q.dead && !q.unclaimed
}

// inspectQuarantined asks the backend about a quarantined object, and tells of it the first time.
func (m *Manager) inspectQuarantined(e *extension, s objectKey, h sandboxer.Handle) {
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
		q.unclaimed = isPooled(was)
	}
	switch {
	case alive != sandboxer.Gone && alive != sandboxer.OOMKilled:
		q.deadSince, q.dead = time.Time{}, false
	case q.deadSince.IsZero():
		q.deadSince = now
	case now.Sub(q.deadSince) >= confirmAfter:
		q.dead = true
	}
	tell := !q.reported && !q.unclaimed && q.deadSince.IsZero()
	q.reported = q.reported || tell
	say := q.Quarantined
	m.mu.Unlock()
	if !tell {
		return
	}
	until := "until an administrator decides"
	if !say.Until.IsZero() {
		until = "until " + say.Until.UTC().Format(time.RFC3339)
	}
	m.log.Warn("an object of this installation is unknown to the database; it is kept", "sandbox", s.id, "generation", s.generation,
		"extension", e.Info.ID, "tenant", say.Tenant, "profile", say.Profile, "until", until)
	err = m.store.Write(m.ctx, sandboxer.Writes{Events: []sandboxer.Event{{
		At: now, SandboxID: s.id, Generation: s.generation, Tenant: say.Tenant, Type: sandboxer.EventQuarantine, Actor: sweeper,
		Message: fmt.Sprintf("%s has it, the database does not know it; it is kept %s; sandboxer adopt %s; or sandboxer destroy %s", e.Info.ID, until, s.id, s.id),
	}}})
	if err != nil {
		m.mu.Lock()
		q.reported = false
		m.mu.Unlock()
	}
}

// releaseFromQuarantine forgets quarantined objects of e that are known by now or, if the listing was
// whole, not there any more.
func (m *Manager) releaseFromQuarantine(e *extension, listed map[objectKey]sandboxer.Handle, explained map[objectKey]bool, whole bool) {
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
		if id == "" && !q.dead && !q.unclaimed || s.id == id {
			all = append(all, q.Quarantined)
		}
	}
	slices.SortFunc(all, func(a, b Quarantined) int {
		return cmp.Or(a.Since.Compare(b.Since), strings.Compare(a.ID, b.ID), a.Generation-b.Generation)
	})
	return all
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
			for _, q := range m.quarantined(id) {
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

// Adopt makes a record anew for a quarantined object, from its stamp or, where it has
// none, from what a says, and returns it running. Its time is paid for from now on. It
// needs the admin scope. Kinds: NotFound when no extension has such an object; Conflict
// when the database knows the ID, as another tenant's too, or several extensions have it;
// Invalid when a contradicts the stamp, or says too little; NoCredit when the tenant
// cannot pay; and the backend's.
func (m *Manager) Adopt(ctx context.Context, id string, a Adoption) (*sandboxer.Sandbox, error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	if err := sandboxer.CheckID(id); err != nil {
		return nil, err
	}
	if a.TTL < 0 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is not above zero", a.TTL)
	}
	all, err := m.unknownObjects(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case len(all) > 1:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "%s and %s both have a sandbox %s that the database does not know", all[0].e.Info.ID, all[1].e.Info.ID, id).
			WithHint("only one of them can have the ID; destroy all with: sandboxer destroy %s", id)
	case len(all) == 0:
		if sb, err := m.store.Sandbox(ctx, id); err == nil && sb.State.Live() {
			return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is known and %s: there is nothing to adopt", id, sb.State)
		}
		return nil, sandboxer.E(sandboxer.NotFound, nil, "no extension has a sandbox %q that the database does not know", id).
			WithHint("list those that there are: sandboxer ls --quarantined")
	}
	j, mine, err := m.begin(ctx, id, all[0].s.generation, false, nil)
	if err != nil {
		return nil, err
	}
	if !mine {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s has work in flight", id).WithHint("try again in a moment")
	}
	m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) { return m.adoptObject(ctx, all[0], a) })
	if err := wait(ctx, j.done); err != nil {
		return nil, err
	}
	return j.sb, j.err
}

// adoptObject is the job behind Adopt.
func (m *Manager) adoptObject(ctx context.Context, x unknownObject, a Adoption) (*sandboxer.Sandbox, error) {
	_, v, err := m.recordStatusOf(ctx, x.s)
	if err == nil && v != recordMissing {
		err = sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is known by now", x.s.id)
	}
	if err != nil {
		return nil, err
	}
	sb, err := m.recordOfUnknown(ctx, x, a)
	if err != nil {
		return nil, err
	}
	b := x.e.Backend
	if b.Can(sandboxer.CanPause) { // it may be frozen
		if err := m.step(pUnfreeze, func() error { return b.Resume(ctx, x.found.Handle) }); err != nil {
			return nil, err
		}
	}
	err = m.step(pReady, func() (err error) { sb.Reachability, err = b.WaitReady(ctx, x.found.Handle); return err })
	if err != nil {
		return nil, err
	}
	if b.Can(sandboxer.CanRenew) {
		if err := m.step(pRenew, func() error { return b.Renew(ctx, x.found.Handle, sb.Spec.Fuse) }); err != nil {
			return nil, err
		}
	}
	sb.Handle, sb.Host = x.found.Handle, cmp.Or(sb.Reachability.Host, x.found.Handle.Host, sb.Host)
	sb.ReadyAt = now()
	sb.UsedAt, sb.ProvisionedAt = sb.ReadyAt, sb.ReadyAt
	w := sandboxer.Writes{Entries: entries(hold(sb, "hold", sb.Quote.Amount)), Cover: true}
	if sb.Name != "" {
		items, _, err := m.store.Sandboxes(ctx, sandboxer.Query{Tenant: sb.Tenant, Name: sb.Name, States: liveStates, Limit: 1})
		if err != nil {
			return nil, err
		}
		if len(items) > 0 {
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, fmt.Sprintf("its name, %q, belongs to sandbox %s by now", sb.Name, items[0].ID)))
			sb.Name = ""
		}
	}
	made := event(ctx, sb, sandboxer.EventState, "")
	made.To, made.Cause = sandboxer.Creating, sandboxer.ReasonRequested
	runs := event(ctx, sb, sandboxer.EventState, "")
	runs.From, runs.To = sandboxer.Creating, sandboxer.Running
	adopted := event(ctx, sb, sandboxer.EventAdopt, "the database did not know it; its record was made anew")
	w.Events = append(w.Events, made, runs, adopted)
	if last, lerr := m.store.Sandbox(ctx, sb.ID); lerr == nil && mayBeClaimed(last) {
		err = m.replaceClaimed(ctx, last, sb, w)
	} else {
		err = m.step(pAdopted, func() error { return m.store.CreateSandbox(ctx, sb, w) })
	}
	if err != nil {
		if isKind(err, sandboxer.NoCredit) {
			return nil, sandboxer.E(sandboxer.NoCredit, err, "the rest of its life costs up to %s credits, which tenant %s does not have", sb.Quote.Amount, sb.Tenant).
				WithHint("grant them, or adopt it for a shorter time: --ttl")
		}
		return nil, err
	}
	m.releaseFromQuarantine(x.e, nil, map[objectKey]bool{x.s: true}, false)
	m.notify(sb.ID)
	m.scheduleSweep(time.Time{}, sb.ExpiresAt)
	m.adopt(sb)
	return sb, nil
}

// replaceClaimed makes last, which waited in a pool when the database went back, the record of
// sb, with what w books. A crash in between leaves it as a claim does that was cut short.
func (m *Manager) replaceClaimed(ctx context.Context, last, sb *sandboxer.Sandbox, w sandboxer.Writes) error {
	mine := *sb
	claim := func(into *sandboxer.Sandbox, also *sandboxer.Writes) error {
		if !mayBeClaimed(into) {
			return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is known by now", sb.ID)
		}
		was := *into
		*into = mine
		into.Generation, into.Version, into.State = was.Generation, was.Version, was.State
		into.Pool, into.PooledAt, into.ReadyAt = was.Pool, was.PooledAt, time.Time{}
		into.Reason = sandboxer.ReasonRequested // until it runs
		also.Entries, also.Cover = w.Entries, w.Cover
		for _, ev := range w.Events {
			if ev.Type != sandboxer.EventState {
				also.Events = append(also.Events, ev)
			}
		}
		return nil
	}
	err := m.step(pAdopted, func() error {
		if last.State == sandboxer.Warm {
			return m.move(ctx, last, sandboxer.Creating, claim)
		}
		return m.update(ctx, last, claim)
	})
	if err == nil {
		err = m.step(pAdopted, func() error {
			return m.move(ctx, last, sandboxer.Running, func(into *sandboxer.Sandbox, also *sandboxer.Writes) error {
				into.Reason, into.ReadyAt = "", mine.ReadyAt
				return nil
			})
		})
	}
	if err == nil {
		*sb = *last
	}
	return err
}

// recordOfUnknown makes the record of an unknown object. Nothing is written yet.
func (m *Manager) recordOfUnknown(ctx context.Context, x unknownObject, a Adoption) (*sandboxer.Sandbox, error) {
	id := x.s.id
	sb := m.openStamp(x.found)
	if sb != nil && sb.Tenant == "" {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s was made for a pool and is nobody's", id).
			WithHint("it is removed by itself; or: sandboxer destroy %s", id)
	}
	var err error
	if sb != nil {
		if a.Tenant != "" && a.Tenant != sb.Tenant || a.Profile != "" && a.Profile != sb.Profile && "profile."+a.Profile != sb.Profile {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "sandbox %s is tenant %s's, of profile %s, by its stamp", id, sb.Tenant, sb.Profile).
				WithHint("leave out the tenant and the profile")
		}
	} else if sb, err = m.recordWithoutStamp(ctx, x, a); err != nil {
		return nil, err
	}
	// The ID may have had former lives, which the database or the ledger know.
	generation, err := m.unusedGeneration(ctx, id, "")
	if err != nil {
		return nil, err
	}
	last, err := m.store.Sandbox(ctx, id)
	switch {
	case isKind(err, sandboxer.NotFound):
	case err != nil:
		return nil, err
	case mayBeClaimed(last) && objectGeneration(last) == x.s.generation:
		generation = max(generation, last.Generation)
	case last.State.Live():
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s in the database; %s has a later generation of it", id, last.State, x.e.Info.ID).
			WithHint("if it is paused, sandboxer resume %s; or end both: sandboxer destroy %s", id, id)
	case last.Tenant != sb.Tenant:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the ID %s was tenant %s's; it cannot become %s's", id, last.Tenant, sb.Tenant).
			WithHint("get rid of the object with: sandboxer destroy %s", id)
	default:
		generation = max(generation, objectGeneration(last)+1)
	}
	if generation > x.s.generation {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the ledger knows generation %d of sandbox %s already", x.s.generation, id).
			WithHint("get rid of the object with: sandboxer destroy %s", id)
	}
	env, err := m.openEnv(sb)
	if err != nil {
		return nil, err
	}
	sb.Generation = min(max(sb.Generation, generation), x.s.generation)
	sb.Spec.ID, sb.Spec.Generation, sb.Extension = id, x.s.generation, x.e.Info.ID
	if sb.SealedEnv, err = m.sealEnv(sb, env); err != nil {
		return nil, err
	}
	if err := m.schedule(sb, x.found.Fuse, a.TTL); err != nil {
		return nil, err
	}
	sb.State, sb.Reason, sb.Message, sb.Fault, sb.Untouched = sandboxer.Running, "", "", "", false
	sb.Pause, sb.Retries, sb.RetryAt, sb.LastError, sb.AbsentSince = sandboxer.Pause{}, 0, time.Time{}, "", time.Time{}
	sb.Version, sb.PausedFor, sb.ResumedAt, sb.Cost = 0, 0, time.Time{}, 0
	return sb, nil
}

// schedule sets when an adopted sandbox ends, and what it costs until then. What it was
// before went with what the database lost: it counts as made now.
func (m *Manager) schedule(sb *sandboxer.Sandbox, fuse time.Time, ttl time.Duration) error {
	at := now()
	margin := fuseMargin
	if sb.Spec.Profile.OnTTL == sandboxer.ExpiryPause {
		margin += stuckAfter
	}
	switch {
	case ttl > 0:
		if err := checkTTL(sb.Spec.Profile, ttl); err != nil {
			return err
		}
		sb.ExpiresAt = at.Add(ttl)
	case !fuse.IsZero():
		sb.ExpiresAt = fuse.Add(-margin).UTC().Truncate(time.Microsecond)
	}
	if !sb.ExpiresAt.After(at) {
		return sandboxer.E(sandboxer.Invalid, nil, "the time of sandbox %s ran out at %s", sb.ID, sb.ExpiresAt.UTC().Format(time.RFC3339)).
			WithHint("say how long it is to live from now: --ttl 1h")
	}
	sb.CreatedAt, sb.Spec.Fuse = at, sb.ExpiresAt.Add(margin)
	q := &sb.Quote
	q.Setup = 0 // that was paid for, in what the database lost
	q.Duration = sb.ExpiresAt.Sub(at)
	q.Amount = q.For(q.Duration)
	return nil
}

// recordWithoutStamp makes the record of an object of which nothing is known but what a says.
func (m *Manager) recordWithoutStamp(ctx context.Context, x unknownObject, a Adoption) (*sandboxer.Sandbox, error) {
	if a.Tenant == "" || a.Profile == "" {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "sandbox %s has no stamp that says whose it is and what it was made from", x.s.id).
			WithHint("say it: --tenant TENANT --profile PROFILE")
	}
	p := sandboxer.PrincipalFrom(ctx)
	p.Tenant = a.Tenant
	o, err := m.resolve(p, sandboxer.CreateRequest{Profile: a.Profile})
	if err != nil {
		return nil, err
	}
	if o.ext.Info.ID != x.e.Info.ID {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "profile %s makes sandboxes on %s; %s is on %s", o.spec.Profile.ID, o.ext.Info.ID, x.s.id, x.e.Info.ID)
	}
	o.id, o.spec.ID = x.s.id, x.s.id
	sb := o.record(x.s.generation)
	if sb.Quote, err = m.quote(ctx, o, sb); err != nil {
		return nil, err
	}
	return sb, nil
}

// quarantineText says of an object that the database does not know how long it is kept.
func (m *Manager) quarantineText(e *extension, s objectKey) string {
	until, whose := "until an administrator decides", ""
	m.mu.Lock()
	if q := m.quarantine[s]; q != nil {
		if !q.Until.IsZero() {
			until = "until " + q.Until.UTC().Format(time.RFC3339)
		}
		if q.Tenant != "" {
			whose = fmt.Sprintf(", tenant %s's by its stamp,", q.Tenant)
		}
	}
	m.mu.Unlock()
	return fmt.Sprintf("%s has generation %d of it%s the database does not know it; it is kept %s; sandboxer adopt %s; or sandboxer destroy %s",
		e.Info.ID, s.generation, cmp.Or(whose, ","), until, s.id, s.id)
}
