package manager

import (
	"cmp"
	"context"
	"fmt"
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
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, fmt.Sprintf("its name, %q, belongs to sandbox %s by now", sb.Name, items[0].Shown())))
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
	m.quarantine.remove(x.s)
	m.notify(sb.ID)
	m.scheduleSweep(time.Time{}, sb.ExpiresAt)
	m.enforceNetwork(sb)
	return sb, nil
}

// replaceClaimed makes last, which waited in a pool when the database went back, the record of
// sb, with what w books. A crash in between leaves it as a claim does that was cut short.
func (m *Manager) replaceClaimed(ctx context.Context, last, sb *sandboxer.Sandbox, w sandboxer.Writes) error {
	mine := *sb
	claim := func(into *sandboxer.Sandbox, also *sandboxer.Writes) error {
		if !mayBeClaimed(into) {
			return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is known by now", sb.Shown())
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
		if err := sandboxRecords.checkStamp(id, sb, a.Tenant, a.Profile); err != nil {
			return nil, err
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
	if pauses(sb.Spec.Profile) {
		margin += stuckAfter
	}
	switch {
	case ttl > 0:
		if err := checkTTL(sb.Spec.Profile, ttl); err != nil {
			return err
		}
		if sb.ExpiresAt = at.Add(ttl); sb.LivesByUse() {
			sb.Spec.Profile.TTL = ttl
		}
	case sb.LivesByUse(): // its fuse tells of its use alone
		sb.ExpiresAt = at.Add(maxTTL(sb.Spec.Profile))
	case !fuse.IsZero():
		sb.ExpiresAt = fuse.Add(-margin).UTC().Truncate(time.Microsecond)
	}
	if !sb.ExpiresAt.After(at) {
		return sandboxer.E(sandboxer.Invalid, nil, "the time of sandbox %s ran out at %s", sb.Shown(), sb.ExpiresAt.UTC().Format(time.RFC3339)).
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
	o.setID(x.s.id)
	sb := o.record(x.s.generation)
	if sb.Quote, err = m.quote(ctx, o, sb); err != nil {
		return nil, err
	}
	return sb, nil
}
