package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// createOrShare makes the sandbox of a chosen ID, or shares the existing one.
func (c *creation) createOrShare(ctx context.Context) (*sandboxer.Sandbox, error) {
	for {
		last, err := c.latest(ctx)
		switch {
		case err != nil:
			return nil, err
		case last == nil:
		case last.State == sandboxer.Terminating:
			if _, err := c.m.box(last).finishTeardown(ctx); err != nil {
				return nil, err
			}
			continue
		case c.IsOther(last.Thread):
			return nil, idOfAnother(c.Shown)
		case last.State.Live() && !c.matches(last):
			return nil, idTaken(c.Shown)
		}
		id, err := c.settleID(ctx, last)
		if err != nil {
			return nil, err
		}
		own := *c // jobs keep what they are asked for
		own.SetID(id)
		sb, err := (&own).startCreate(ctx)
		if errors.Is(err, errLookAgain) || err == errAbandoned && ctx.Err() == nil { // by earlier callers
			continue
		}
		return sb, err
	}
}

// latest returns the newest sandbox that c's tenant has, or had, under the ID that c chose; nil if there never was one.
func (c *creation) latest(ctx context.Context) (*sandboxer.Sandbox, error) {
	last, err := c.m.store.SandboxShown(ctx, c.Tenant, c.Shown)
	switch {
	case isKind(err, sandboxer.NotFound):
		return nil, nil
	case last != nil && err != nil: // damaged
		return nil, idUnavailable(c.Shown)
	}
	return last, err
}

// settleID returns the ID for the record and the objects of a sandbox whose ID c chose. It is the ID of the last such sandbox,
// which may date from before IDs were per tenant, or else that of ObjectID. If another tenant uses the ID of ObjectID, a
// derived ID is returned instead, so that no caller learns of the other tenant's sandbox.
func (c *creation) settleID(ctx context.Context, last *sandboxer.Sandbox) (string, error) {
	if last != nil {
		return last.ID, nil
	}
	id := sandboxer.ObjectID(c.Tenant, c.Shown)
	if sandboxer.IsDerivedID(id) {
		return id, nil // and so of no other tenant
	}
	foreign, err := c.m.isForeignID(ctx, id, c.Tenant)
	if foreign {
		id = sandboxer.DerivedID(c.Tenant, c.Shown)
	}
	return id, err
}

// isForeignID reports whether id is, or was, used by something that is not the tenant's: a record, one that is about to be
// written, or an entry of the ledger. An object that the database does not know may be the tenant's own; create refuses its ID.
func (m *Manager) isForeignID(ctx context.Context, id, tenant string) (bool, error) {
	m.mu.Lock()
	j := m.jobs[id]
	foreign := j != nil && j.request != nil && j.request.Tenant != tenant
	m.mu.Unlock()
	if foreign {
		return true, nil
	}
	switch sb, err := m.store.Sandbox(ctx, id); {
	case sb != nil && (err != nil || sb.Tenant != tenant):
		return true, nil // a damaged one may be any tenant's
	case err != nil && !isKind(err, sandboxer.NotFound):
		return false, err
	}
	_, err := m.unusedGeneration(ctx, id, tenant)
	if isKind(err, sandboxer.Conflict) {
		return true, nil
	}
	return false, err
}

// idUnavailable is the error for an ID that is unavailable for a reason that does not concern the caller's tenant. It reveals
// nothing else.
func idUnavailable(id string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "the sandbox ID %s is not available", id).
		WithHint("choose another ID or thread")
}

func idTaken(id string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "the sandbox ID %s belongs to another sandbox", id).
		WithHint("use the profile, the inputs and the settings that it was made with, or choose another ID")
}

// idOfAnother refuses the ID of another thread: an ID belongs to one thread for ever.
func idOfAnother(id string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "the sandbox ID %s belongs to another thread", id).
		WithHint("choose another ID or thread")
}

// startCreate starts the job that makes c's sandbox, or joins the one that does, and waits until the state for which the caller
// asked.
func (c *creation) startCreate(ctx context.Context) (*sandboxer.Sandbox, error) {
	j, mine, err := c.m.begin(ctx, c.ID, 0, true, c)
	switch {
	case err != nil:
		return nil, err
	case mine:
		j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) { return c.create(ctx, j) })
	case j.request != nil && j.request.Tenant != c.Tenant:
		return nil, errLookAgain // settleID sees it now
	case !j.isMaking() || j.request == nil:
		// It is being torn down, or a leftover that is being finished; the tenant is c's.
		if err := events.Wait(ctx, j.done); err != nil {
			return nil, err
		}
		return nil, errLookAgain
	case c.IsOther(j.request.Thread):
		return nil, idOfAnother(c.Shown)
	case !c.Same(&j.request.Resolved):
		return nil, idTaken(cmp.Or(c.Shown, c.ID))
	}
	return c.await(ctx, j, mine)
}

// await waits until j, which makes c's sandbox, reaches the state for which the caller asked.
func (c *creation) await(ctx context.Context, j *job, mine bool) (*sandboxer.Sandbox, error) {
	if c.NoWaiting {
		if err := j.waitFor(ctx, j.published); err != nil {
			return nil, err
		}
		// A sandbox that is to live longer than it was made for has to be ready before it is extended.
		if j.committed != nil && (mine && j.recorded || !c.Outlives(j.committed, now())) {
			sb := *j.committed
			return &sb, c.joinExisting(ctx, j, mine, &sb)
		}
	}
	if err := j.waitFor(ctx, j.done); err != nil {
		return nil, err
	}
	if j.err != nil {
		return nil, j.err
	}
	sb := *j.sb
	return &sb, c.joinExisting(ctx, j, mine, &sb)
}

// joinExisting lets c's caller share a sandbox that another request made: it lives at least as long as c asks, and c's
// idempotency key then names it.
func (c *creation) joinExisting(ctx context.Context, j *job, mine bool, sb *sandboxer.Sandbox) error {
	if mine && j.recorded {
		return nil
	}
	if (sb.Thread == sandboxer.Thread{} && c.Thread != sandboxer.Thread{}) { // made before threads were kept, or by its ID alone
		err := c.m.box(sb).update(ctx, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if c.IsOther(sb.Thread) {
				return idOfAnother(c.Shown)
			}
			sb.Thread = c.Thread
			return nil
		})
		if err != nil {
			return err
		}
	}
	if c.Outlives(sb, now()) {
		longer, err := c.m.extend(ctx, sb.Ref(), Extend{TTL: c.Asked.TTL}, true)
		if err != nil {
			return sandboxer.E(sandboxer.KindOf(err), err, "sandbox %s exists, and its time to live cannot be changed to the requested one: %s", sb.Shown(), sandboxer.Message(err)).
				WithHint("leave out the time to live: the expiry then stays as it is")
		}
		*sb = *longer
	}
	sb.Found = true
	if c.Key == "" {
		return nil
	}
	key := c.Idempotency(sb)
	if key.At = now(); !key.At.After(sb.CreatedAt) {
		key.At = sb.CreatedAt.Add(time.Microsecond)
	}
	err := c.m.store.Write(ctx, sandboxer.Writes{Key: key})
	if !isKind(err, sandboxer.Conflict) {
		return err
	}
	k, err := c.m.store.IdempotencyKey(ctx, c.Tenant, c.Key)
	if err == nil && (!c.m.digestMatches(k.Digest, c.Digest) || k.SandboxID != sb.ID || k.Generation != sb.Generation) {
		err = sandboxer.E(sandboxer.Conflict, nil, "the idempotency key %q was used for another request", c.Key)
	}
	return err
}

// create is the job of Create: it writes the record of the sandbox, and builds it.
func (c *creation) create(ctx context.Context, j *job) (*sandboxer.Sandbox, error) {
	generation, thread := 1, c.Thread
	if c.Shown != "" {
		last, err := c.latest(ctx)
		if err == nil && last != nil && last.ID != c.ID {
			err = errLookAgain // it became another's
		}
		switch {
		case err != nil:
			return nil, err
		case last == nil:
			if generation, err = c.m.unusedGeneration(ctx, c.ID, c.Tenant); err != nil {
				return nil, err
			}
		case c.IsOther(last.Thread):
			return nil, idOfAnother(c.Shown)
		case last.State == sandboxer.Terminated:
			generation = lifecycle.ObjectGeneration(last) + 1
			thread = cmp.Or(thread, last.Thread)
		case last.State == sandboxer.Terminating:
			return nil, errLookAgain
		case !c.matches(last):
			return nil, idTaken(c.Shown)
		case last.State == sandboxer.Creating:
			j.publishRecord(last)
			return c.m.resume(ctx, j, last.ID, last.Generation)
		case last.State == sandboxer.Paused:
			if err := c.m.box(last).mayResume(ctx); err != nil {
				return nil, err
			}
			j.publishRecord(last)
			return c.m.box(last).in(j).beginResume(ctx, 0)
		default:
			return c.m.withLastUse(last), nil
		}
		// A sandbox that the database lost under this ID must not be handed out as new.
		if held, err := c.m.isQuarantinedID(ctx, c.ID); err != nil || held {
			return nil, cmp.Or(err, idUnavailable(c.Shown))
		}
	}
	failed := map[string]error{}
	for {
		on, route, err := c.routed(ctx, false, failed)
		if err != nil {
			return nil, err
		}
		sb, elsewhere, err := on.write(ctx, j, generation, thread, route)
		if err == nil {
			defer on.ext.breaker.end(on.trial)
			return c.m.box(sb).in(j).build(ctx)
		}
		on.ext.breaker.end(on.trial)
		if !elsewhere || !c.bursts() {
			return nil, err
		}
		failed[on.Extension] = err
	}
}

// write writes the record of c, whose candidate is chosen. elsewhere says that another candidate may have the room that this
// one lacks.
func (c *creation) write(ctx context.Context, j *job, generation int, thread sandboxer.Thread, route []sandboxer.RouteChoice) (_ *sandboxer.Sandbox, elsewhere bool, _ error) {
	sb, elsewhere, err := c.priced(ctx, generation)
	if err != nil {
		return nil, elsewhere, err
	}
	sb.Thread = thread
	if c.isRouted() {
		sb.Route = route
	}
	if c.From != nil {
		unpin, err := c.m.pinSealed(ctx, c.From.ID)
		if err != nil {
			return nil, false, err
		}
		defer unpin() // from then on the record says that the snapshot is needed
	}
	began, tried := now(), false
	err = j.withRoom(ctx, roomRequest{sb.Extension, sb.Profile, sb.Tenant, c.leaving}, func(room *sandboxer.Room) error {
		var waited time.Duration
		if tried {
			waited = time.Since(began).Round(time.Second)
			lifecycle.Postpone(sb, now())
		}
		tried = true
		ev := events.Of(ctx, sb, sandboxer.EventState, "")
		ev.To, ev.Cause = sandboxer.Creating, sandboxer.ReasonRequested
		w := sandboxer.Writes{
			Entries: entries(hold(ctx, sb, "hold", sb.Quote.Amount)), Cover: true,
			Events: []sandboxer.Event{ev}, Key: c.Idempotency(sb), Quota: c.m.QuotaFor(sb.Tenant, ofSandboxes...), Room: room,
		}
		if c.isRouted() {
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventStep, routeText(sb)))
		}
		if c.cold != "" {
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventStep, "not from the pool: "+c.cold))
		}
		if waited > 0 {
			sb.Route = withWait(sb.Route, waited)
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventStep, "it waited "+sandboxer.FormatDuration(waited)+" for room"))
		}
		return c.m.step(pRecord, func() error { return c.m.store.CreateSandbox(ctx, sb, w) })
	})
	if err != nil {
		return nil, isFull(err), c.explainCreateError(ctx, sb, err)
	}
	c.m.events.Notify(sb.ID)
	c.m.scheduleSweep(time.Time{}, sb.ExpiresAt)
	j.recorded = true
	j.goes(c)
	j.publishRecord(sb)
	return sb, false, nil
}

// priced is the record of c with its price and its host. elsewhere says that this candidate has no host for it, and another
// candidate may have one.
func (c *creation) priced(ctx context.Context, generation int) (_ *sandboxer.Sandbox, elsewhere bool, _ error) {
	sb := c.record(generation)
	if err := c.price(ctx, sb); err != nil {
		return nil, false, err
	}
	if c.Place == "" {
		if err := c.m.box(sb).choosePlace(ctx, sb.Spec.Env, nil); err != nil {
			c.ext.heard(ctx, c.trial, sb, err)
			return nil, isLeft(err), err
		}
	}
	return sb, false, nil
}

// price completes the record of c: the backend's check, the environment, and
// the price.
func (c *creation) price(ctx context.Context, sb *sandboxer.Sandbox) error {
	if err := c.boundDisk(sb); err != nil {
		return err
	}
	if err := c.checkSecrets(ctx); err != nil {
		return err
	}
	if c.asked == nil {
		if _, err := c.ask(ctx, sb); err != nil {
			return err
		}
	}
	var err error
	if sb.SealedEnv, err = c.m.box(sb).sealEnv(c.Spec.Env); err != nil {
		return err
	}
	sb.Quote = c.asked.quote
	if c.MaxCost > 0 && sb.Quote.Amount > c.MaxCost {
		return spec.OverMaxCost(sb.Quote.Amount, c.TTL, c.MaxCost)
	}
	return nil
}

// boundDisk sets in sb the disk limit that its backend would apply anyway, if a quota counts it. A sandbox without a limit
// cannot be counted, and is refused.
func (c *creation) boundDisk(sb *sandboxer.Sandbox) error {
	if _, counted := c.m.Quota(sb.Tenant, sandboxer.QuotaDisk); !counted || sb.Spec.Limits.DiskBytes > 0 {
		return nil
	}
	if b := c.ext.Backend; b != nil {
		sb.Spec.Limits.DiskBytes = b.DefaultLimits(sb.Spec).DiskBytes
	}
	if sb.Spec.Limits.DiskBytes == 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "tenant %s has a quota for disk, and this sandbox of %s would have no disk limit", sb.Tenant, sb.Profile).
			WithHint("ask for one: --disk 4GiB; or have the operator set limits.disk in the profile, or, where the backend cannot limit disks, leave disk out of the tenant's quota in quotas.yaml")
	}
	return nil
}

// unusedGeneration returns the first generation of id that the ledger does not know. Ledger entries outlive the records, and
// their keys must not be used again. With a tenant, the search fails at an entry of another tenant.
func (m *Manager) unusedGeneration(ctx context.Context, id, tenant string) (int, error) {
	generation, foreign := 1, false
	err := m.entries(ctx, sandboxer.EntryQuery{SandboxID: id}, func(e sandboxer.Entry) {
		generation = max(generation, e.Generation+1)
		foreign = foreign || tenant != "" && e.Tenant != tenant
	})
	if err == nil && foreign {
		err = idUnavailable(id)
	}
	return generation, err
}

// checkBackend asks the backend whether it would refuse the request outright.
func (c *creation) checkBackend(ctx context.Context, sb *sandboxer.Sandbox) (*backend.Checked, error) {
	if c.ext.Backend == nil {
		return nil, nil // creating says why
	}
	spec := sb.Spec
	spec.Tenant = sb.Tenant
	spec.Env = withNames(spec.Env, c.Secrets) // their values come when it is made
	if c.As == sandboxer.SnapshotNative {
		// The saved sandbox continues. Only the mounts are used again: they are made again.
		spec.Vouched = slices.DeleteFunc(c.ext.judged().Restricted(spec), func(n string) bool {
			return n == sandboxer.RestrictedMounts && !slices.Contains(sb.Spec.Vouched, n)
		})
	}
	return c.ext.Backend.Check(ctx, spec)
}

// explainCreateError returns the error for a record that could not be written, in the terms of the request.
func (c *creation) explainCreateError(ctx context.Context, sb *sandboxer.Sandbox, err error) error {
	switch {
	case cannotPay(err):
		have, berr := c.m.store.Balance(ctx, c.Tenant)
		if berr != nil {
			return err
		}
		return sandboxer.E(sandboxer.NoCredit, err, "it costs up to %s credits for %s, and %s has %s", sb.Quote.Amount, c.TTL, c.Tenant, have).
			WithHint("ask for a shorter time to live, or have an administrator grant credits: sandboxer credits grant %s 10", c.Tenant)
	case isKind(err, sandboxer.Conflict) && c.Name != "":
		items, _, qerr := c.m.store.Sandboxes(ctx, sandboxer.Query{Tenant: c.Tenant, Name: c.Name, States: liveStates, Limit: 1})
		if qerr == nil && len(items) == 1 {
			return sandboxer.E(sandboxer.Conflict, err, "the name %q belongs to sandbox %s", c.Name, items[0].Shown()).
				WithHint("choose another name, or destroy that sandbox first")
		}
	}
	return err
}

// quote sets the price of sb: that of its backend, or that of the profile if the backend knows none. The price is unknown only
// if neither names one and a provider charges for the extension.
func (c *creation) quote(ctx context.Context, sb *sandboxer.Sandbox) (_ sandboxer.MeterQuote, known bool, _ error) {
	known = true
	var q *sandboxer.MeterQuote
	if b := c.ext.Backend; b.Can(sandboxer.CanQuote) {
		var err error
		if q, err = b.EstimateCost(ctx, sb.Spec, c.TTL); err != nil {
			return sandboxer.MeterQuote{}, false, err
		}
	}
	byBackend := q != nil
	if q == nil {
		p := c.Spec.Profile.Price
		q = &sandboxer.MeterQuote{Setup: p.Setup, PerHour: p.PerHour}
		if p != (sandboxer.Price{}) {
			q.Detail = "price of " + c.Spec.Profile.ID
		} else {
			known = c.ext.Info.Pricing != sandboxer.PricingMetered
			if !known { // which is not a price of zero, though nobody pays it
				q.Detail = "the price is not known, and nothing is billed"
			}
		}
		q.Amount = q.For(c.TTL)
	}
	q.Duration, q.ByBackend = c.TTL, byBackend
	if len(q.Rows) > sandboxer.MaxPriceRows {
		return sandboxer.MeterQuote{}, false, sandboxer.E(sandboxer.Internal, nil, "%s quotes by %d rows of prices: want at most %d", c.ext.Info.ID, len(q.Rows), sandboxer.MaxPriceRows)
	}
	if q.Amount < 0 || q.Setup < 0 || q.PerHour < 0 {
		return sandboxer.MeterQuote{}, false, sandboxer.E(sandboxer.Internal, fmt.Errorf("quote %+v", *q), "%s quotes a negative price", c.ext.Info.ID)
	}
	return *q, known, nil
}

// errLookAgain says that the ID changed hands between a reading of the record and the start of a job.
var errLookAgain = errors.New("look again")

// ofSpending are the resources that a hold takes, ofSandboxes those that a new sandbox takes.
var (
	ofSpending  = []sandboxer.Resource{sandboxer.QuotaSpendMonth, sandboxer.QuotaSpendDay}
	ofSandboxes = append([]sandboxer.Resource{sandboxer.QuotaSandboxes, sandboxer.QuotaDisk, sandboxer.QuotaImages}, ofSpending...)
)
