package manager

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// known is the refusal to adopt what the database knows.
func (w recordWords) known(id, state string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "%s %s is known and %s: there is nothing to adopt", w.name, id, state)
}

// checkStamp refuses what an administrator says of something if its stamp, by which it was
// made of was, says otherwise.
func (w recordWords) checkStamp(id string, was *sandboxer.Sandbox, tenant, profile string) error {
	if (tenant == "" || was.Tenant == "" || tenant == was.Tenant) && (profile == "" || profile == was.Profile || "profile."+profile == was.Profile) {
		return nil
	}
	return sandboxer.E(sandboxer.Invalid, nil, "%s %s is tenant %s's, of profile %s, by its stamp", w.name, id, was.Tenant, was.Profile).
		WithHint("leave out the tenant and the profile")
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
			return nil, sandboxRecords.known(id, string(sb.State))
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
	m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) { return m.runAdopt(ctx, all[0], a) })
	if err := wait(ctx, j.done); err != nil {
		return nil, err
	}
	return j.sb, j.err
}

// runAdopt is the job behind Adopt.
func (m *Manager) runAdopt(ctx context.Context, x unknownObject, a Adoption) (*sandboxer.Sandbox, error) {
	_, v, err := m.recordStatusOf(ctx, x.s)
	if err == nil && v != unknown {
		err = sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is known by now", x.s.id)
	}
	if err != nil {
		return nil, err
	}
	sb, err := m.adoptedSandbox(ctx, x, a)
	if err != nil {
		return nil, err
	}
	b := x.e.Backend
	if b.Can(sandboxer.CanPause) { // it may be frozen
		if err := m.step(pThaw, func() error { return b.Resume(ctx, x.found.Handle) }); err != nil {
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
		items, _, err := m.store.Sandboxes(ctx, sandboxer.Query{Tenant: sb.Tenant, Name: sb.Name, States: live, Limit: 1})
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
	if last, lerr := m.store.Sandbox(ctx, sb.ID); lerr == nil && isContested(last) {
		err = m.adoptAsClaim(ctx, last, sb, w)
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
	m.endQuarantine(x.e, nil, map[sighting]bool{x.s: true}, false)
	m.notify(sb.ID)
	m.alarm(time.Time{}, sb.ExpiresAt)
	m.adopt(sb)
	return sb, nil
}

// adoptAsClaim makes last, which waited in a pool when the database went back, the record of
// sb, with what w books. A crash in between leaves it as a claim does that was cut short.
func (m *Manager) adoptAsClaim(ctx context.Context, last, sb *sandboxer.Sandbox, w sandboxer.Writes) error {
	mine := *sb
	claim := func(into *sandboxer.Sandbox, also *sandboxer.Writes) error {
		if !isContested(into) {
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

// adoptedSandbox makes the record of x. Nothing is written yet.
func (m *Manager) adoptedSandbox(ctx context.Context, x unknownObject, a Adoption) (*sandboxer.Sandbox, error) {
	id := x.s.id
	sb := m.openStamp(x.found)
	if sb != nil && sb.Tenant == "" {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s was made for a pool and is nobody's", id).
			WithHint("it is removed by itself; or: sandboxer destroy %s", id)
	}
	var err error
	if sb != nil {
		if err := sandboxRecords.checkStamp(id, sb, a.Tenant, a.Profile); err != nil {
			return nil, err
		}
	} else if sb, err = m.withoutStamp(ctx, x, a); err != nil {
		return nil, err
	}
	// The ID may have had former lives, which the database or the ledger know.
	generation, err := m.unbooked(ctx, id, "")
	if err != nil {
		return nil, err
	}
	last, err := m.store.Sandbox(ctx, id)
	switch {
	case isKind(err, sandboxer.NotFound):
	case err != nil:
		return nil, err
	case isContested(last) && objectOf(last) == x.s.generation:
		generation = max(generation, last.Generation)
	case last.State.Live():
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s in the database; %s has a later generation of it", id, last.State, x.e.Info.ID).
			WithHint("if it is paused, sandboxer resume %s; or end both: sandboxer destroy %s", id, id)
	case last.Tenant != sb.Tenant:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the ID %s was tenant %s's; it cannot become %s's", id, last.Tenant, sb.Tenant).
			WithHint("get rid of the object with: sandboxer destroy %s", id)
	default:
		generation = max(generation, objectOf(last)+1)
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
	if err := m.scheduleAdopted(sb, x.found.Fuse, a.TTL); err != nil {
		return nil, err
	}
	sb.State, sb.Reason, sb.Message, sb.Fault, sb.Untouched = sandboxer.Running, "", "", "", false
	sb.Pause, sb.Retries, sb.RetryAt, sb.LastError, sb.AbsentSince = sandboxer.Pause{}, 0, time.Time{}, "", time.Time{}
	sb.Version, sb.PausedFor, sb.ResumedAt, sb.Cost = 0, 0, time.Time{}, 0
	return sb, nil
}

// scheduleAdopted sets when an adopted sandbox ends, and what it costs until then. What it was
// before went with what the database lost: it counts as made now.
func (m *Manager) scheduleAdopted(sb *sandboxer.Sandbox, fuse time.Time, ttl time.Duration) error {
	at := now()
	margin := fuseMargin
	if sb.Spec.Profile.OnTTL == sandboxer.ExpiryPause {
		margin += patience
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

// withoutStamp makes the record of an object of which nothing is known but what a says.
func (m *Manager) withoutStamp(ctx context.Context, x unknownObject, a Adoption) (*sandboxer.Sandbox, error) {
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
		err := m.reap(ctx, x.e, x.s, x.found.Handle, sb.Tenant)
		if err == errMoot {
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

// AdoptSnapshot makes a record anew for a snapshot that the database does not know, one that it
// kept for a pause too, and returns it sealed. It needs the admin scope. Kinds: NotFound when
// there is no such snapshot; Conflict when the database knows it, or it was not saved to the
// end; Invalid when a contradicts its stamp, or says too little; Failed when it is damaged.
func (m *Manager) AdoptSnapshot(ctx context.Context, id string, a SnapshotAdoption) (*sandboxer.SnapshotRecord, error) {
	if err := checkName(a.Name); err != nil {
		return nil, err
	}
	s, release, err := m.claimUnknownSnapshot(ctx, id)
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

// claimUnknownSnapshot finds one for an administrator, and reserves it.
func (m *Manager) claimUnknownSnapshot(ctx context.Context, id string) (_ *unknownSnapshot, release func(), err error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, nil, err
	}
	if err := checkSnapshotID(id); err != nil {
		return nil, nil, err
	}
	release, err = m.claim(id)
	if err != nil {
		return nil, nil, err
	}
	s, err := m.unknownSnapshot(ctx, id)
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

// unknownSnapshot finds the one called id.
func (m *Manager) unknownSnapshot(ctx context.Context, id string) (*unknownSnapshot, error) {
	if rec, err := m.store.Snapshot(ctx, id); err == nil {
		return nil, snapshotRecords.known(id, string(rec.State))
	} else if !isKind(err, sandboxer.NotFound) {
		return nil, err
	}
	all, silent, err := m.unknownSnapshots(ctx, id, true)
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
func (m *Manager) adoptedSnapshot(s *unknownSnapshot, a SnapshotAdoption) (*sandboxer.SnapshotRecord, error) {
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

// dropUnknownSnapshot makes the record by which a snapshot is dropped that the database does not know, at the
// wish of an administrator. NotFound: there is none of that ID.
func (m *Manager) dropUnknownSnapshot(ctx context.Context, id string) (*sandboxer.SnapshotRecord, error) {
	s, release, err := m.claimUnknownSnapshot(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	rec := &sandboxer.SnapshotRecord{
		ID: id, Tenant: sandboxer.PrincipalFrom(ctx).Tenant, SandboxID: s.found.SandboxID, Generation: s.found.Generation, Extension: s.extension,
		Kind: sandboxer.SnapshotPortable, State: sandboxer.SnapshotDropping, Message: "the database did not know it", CreatedAt: now(),
	}
	if s.was != nil {
		rec.Tenant, rec.Profile = cmp.Or(s.was.Tenant, rec.Tenant), s.was.Profile
	}
	if s.extension != "" {
		rec.Kind = sandboxer.SnapshotNative
		if s.portable != nil {
			rec.Kind = sandboxer.SnapshotBoth
		}
	}
	return rec, m.step(pDropping, func() error { return m.putSnapshot(ctx, rec, "") })
}
