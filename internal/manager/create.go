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
)

// keepKeys is how long an idempotency key is remembered.
const keepKeys = 24 * time.Hour

// Create makes a sandbox and returns it running (req.NoWaiting: as soon as it is in
// the database). It is safe to repeat: the same req.Key gives the same sandbox or the
// same failure for a day, also after a crash of the broker; an ID that the caller
// chose, or a thread, gives the sandbox that is live under it, once the one being
// destroyed is gone: then Found is set, and a TTL that req names moves its expiry to no
// earlier than that from now, as Extend would. A caller who leaves does not stop the
// work.
//
// Kinds: Invalid, Denied and Unsupported before anything exists; Conflict when the
// key, the ID or the name belongs to something else; NoCredit; and what the backend
// said when it failed, after everything it made was removed.
func (m *Manager) Create(ctx context.Context, req sandboxer.CreateRequest) (*sandboxer.Sandbox, error) {
	p, err := may(ctx, sandboxer.ScopeWrite)
	if err != nil {
		return nil, err
	}
	o, err := m.resolve(p, req)
	if err != nil {
		return nil, err
	}
	if o.key != "" {
		if sb, err := m.replay(ctx, o); sb != nil || err != nil {
			return sb, err
		}
	}
	sb, err := m.claimOrCreate(ctx, o)
	if o.key != "" && isKind(err, sandboxer.Conflict) {
		if sb, err := m.replay(ctx, o); sb != nil || err != nil { // a twin of this request was faster
			return sb, err
		}
	}
	return sb, err
}

// Plan checks req as Create does and says what it would make. Nothing is created.
func (m *Manager) Plan(ctx context.Context, req sandboxer.CreateRequest) (Plan, error) {
	p, err := may(ctx, sandboxer.ScopeWrite)
	if err != nil {
		return Plan{}, err
	}
	o, err := m.resolve(p, req)
	if err != nil {
		return Plan{}, err
	}
	sb := o.record(1)
	if err := m.boundDisk(o, sb); err != nil {
		return Plan{}, err
	}
	if err := m.checkBackend(ctx, o, sb); err != nil {
		return Plan{}, err
	}
	if sb.Quote, err = m.quote(ctx, o, sb); err != nil {
		return Plan{}, err
	}
	plan := Plan{Spec: sb.Spec, Extension: o.ext.Info.ID, Quote: sb.Quote, TTL: o.ttl}
	if sb.LivesByUse() {
		plan.TTL = sandboxer.TTLIdle
	}
	return plan, nil
}

// replay answers with what was made under o's key, or with nothing when the key is
// new.
func (m *Manager) replay(ctx context.Context, o *resolvedRequest) (*sandboxer.Sandbox, error) {
	k, err := m.store.IdempotencyKey(ctx, o.tenant, o.key)
	switch {
	case isKind(err, sandboxer.NotFound) || err == nil && time.Since(k.At) > keepKeys:
		return nil, nil
	case err != nil:
		return nil, err
	case !m.digestMatches(k.Digest, o.digest):
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the idempotency key %q was used for another request, which made sandbox %s", o.key, m.shownOf(ctx, k)).
			WithHint("use a new key for a new request")
	}
	sb, err := m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation)
	if err != nil {
		return nil, err
	}
	// The key of the request that made a sandbox is as old as that (idempotency).
	found := !k.At.Equal(sb.CreatedAt)
	if sb.Found = found; o.noWaiting {
		return sb, failure(sb)
	}
	for sb.State == sandboxer.Creating {
		j, mine, err := m.begin(ctx, sb.ID, sb.Generation, true, nil)
		if err != nil {
			return nil, err
		}
		if mine {
			m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) {
				return m.resume(ctx, j, k.SandboxID, k.Generation)
			})
		}
		if err := wait(ctx, j.done); err != nil {
			return nil, err
		}
		if sb, err = m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation); err != nil {
			return nil, err
		}
		if mine && j.err != nil && sb.State == sandboxer.Creating {
			return nil, j.err
		}
	}
	if err := failure(sb); err != nil {
		return nil, err
	}
	sb.Found = found
	return m.withLastUse(sb), nil
}

// shownOf is the ID by which the tenant of k knows the sandbox that was made under it.
func (m *Manager) shownOf(ctx context.Context, k sandboxer.IdempotencyKey) string {
	if sb, err := m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation); err == nil {
		return sb.Shown()
	}
	return k.SandboxID
}

// failure repeats the error with which sb could not be made, or nil.
func failure(sb *sandboxer.Sandbox) error {
	switch {
	case sb.Fault != "":
		err := sandboxer.E(sb.Fault, nil, "%s", sb.Message)
		err.Hint = sb.Hint
		return err
	case sb.ReadyAt.IsZero() && !sb.EndingAt.IsZero():
		return errTerminating
	}
	return nil
}

// createOrShare makes the sandbox of a chosen ID, or shares in the one there is.
func (m *Manager) createOrShare(ctx context.Context, o *resolvedRequest) (*sandboxer.Sandbox, error) {
	for {
		last, err := m.latest(ctx, o)
		switch {
		case err != nil:
			return nil, err
		case last == nil:
		case last.State == sandboxer.Terminating:
			if _, err := m.finishTeardown(ctx, last); err != nil {
				return nil, err
			}
			continue
		case o.isOther(last.Thread):
			return nil, idOfAnother(o.shown)
		case last.State.Live() && !m.matches(o, last):
			return nil, idTaken(o.shown)
		}
		id, err := m.settleID(ctx, o, last)
		if err != nil {
			return nil, err
		}
		own := *o // jobs keep what they are asked for
		own.setID(id)
		sb, err := m.startCreate(ctx, &own)
		if errors.Is(err, errLookAgain) || err == errAbandoned && ctx.Err() == nil { // by those who came before
			continue
		}
		return sb, err
	}
}

// latest returns the newest sandbox that o's tenant has, or had, under the ID that o chose; nil if
// there never was one.
func (m *Manager) latest(ctx context.Context, o *resolvedRequest) (*sandboxer.Sandbox, error) {
	last, err := m.store.SandboxShown(ctx, o.tenant, o.shown)
	switch {
	case isKind(err, sandboxer.NotFound):
		return nil, nil
	case last != nil && err != nil: // damaged
		return nil, idUnavailable(o.shown)
	}
	return last, err
}

// settleID returns what the record and the objects of the sandbox carry that o chose the ID of:
// what the last one carried, which may be of before IDs were their tenants', or ObjectID's. That
// may be in others' hands where it is what the caller chose: a random one, or another tenant's
// of before. Then it is derived, so that nobody learns of the other.
func (m *Manager) settleID(ctx context.Context, o *resolvedRequest, last *sandboxer.Sandbox) (string, error) {
	if last != nil {
		return last.ID, nil
	}
	id := sandboxer.ObjectID(o.tenant, o.shown)
	if sandboxer.IsDerivedID(id) {
		return id, nil // and so nobody else's
	}
	foreign, err := m.isForeignID(ctx, id, o.tenant)
	if foreign {
		id = sandboxer.DerivedID(o.tenant, o.shown)
	}
	return id, err
}

// isForeignID reports whether id is, or was, what something carries that is not the tenant's: a
// record, one that is about to be written, an object that the database does not know, or what the
// ledger remembers.
func (m *Manager) isForeignID(ctx context.Context, id, tenant string) (bool, error) {
	m.mu.Lock()
	j := m.jobs[id]
	foreign := j != nil && j.request != nil && j.request.tenant != tenant
	m.mu.Unlock()
	if foreign {
		return true, nil
	}
	switch sb, err := m.store.Sandbox(ctx, id); {
	case sb != nil && (err != nil || sb.Tenant != tenant):
		return true, nil // a damaged one may be anybody's
	case err != nil && !isKind(err, sandboxer.NotFound):
		return false, err
	}
	for _, q := range m.quarantine.list(id) {
		if q.Tenant != "" && q.Tenant != tenant {
			return true, nil
		}
	}
	_, err := m.unusedGeneration(ctx, id, tenant)
	if isKind(err, sandboxer.Conflict) {
		return true, nil
	}
	return false, err
}

// idUnavailable is all that a caller learns of an ID that cannot be had for a reason that is not
// its tenant's business.
func idUnavailable(id string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "the sandbox ID %s cannot be had", id).
		WithHint("choose another ID or thread")
}

// errLookAgain says that the ID changed hands between a look and a job.
var errLookAgain = errors.New("look again")

func idTaken(id string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "the sandbox ID %s belongs to another sandbox", id).
		WithHint("ask for it with the profile, the inputs and the settings it was made with, or choose another ID")
}

// idOfAnother refuses a thread the ID that another has: an ID is one thread's for good.
func idOfAnother(id string) error {
	return sandboxer.E(sandboxer.Conflict, nil, "the sandbox ID %s belongs to another thread", id).
		WithHint("choose another ID or thread")
}

// startCreate starts the job that makes o's sandbox, or joins the one that does, and
// waits for as much of it as the caller wants.
func (m *Manager) startCreate(ctx context.Context, o *resolvedRequest) (*sandboxer.Sandbox, error) {
	j, mine, err := m.begin(ctx, o.id, 0, true, o)
	switch {
	case err != nil:
		return nil, err
	case mine:
		m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) { return m.create(ctx, j, o) })
	case j.request != nil && j.request.tenant != o.tenant:
		return nil, errLookAgain // settleID sees it now
	case !m.isMaking(j) || j.request == nil:
		// It is on its way out, or a leftover that is being finished; o's own.
		if err := wait(ctx, j.done); err != nil {
			return nil, err
		}
		return nil, errLookAgain
	case o.isOther(j.request.thread):
		return nil, idOfAnother(o.shown)
	case !o.same(j.request):
		return nil, idTaken(cmp.Or(o.shown, o.id))
	}
	return m.await(ctx, o, j, mine)
}

// await waits for as much of j, which makes o's sandbox, as the caller wants.
func (m *Manager) await(ctx context.Context, o *resolvedRequest, j *job, mine bool) (*sandboxer.Sandbox, error) {
	if o.noWaiting {
		if err := m.waitFor(ctx, j, j.published); err != nil {
			return nil, err
		}
		// One that is to live longer than it was made for has to be ready for that.
		if j.committed != nil && (mine && j.recorded || !o.outlives(j.committed)) {
			sb := *j.committed
			return &sb, m.joinExisting(ctx, o, j, mine, &sb)
		}
	}
	if err := m.waitFor(ctx, j, j.done); err != nil {
		return nil, err
	}
	if j.err != nil {
		return nil, j.err
	}
	sb := *j.sb
	return &sb, m.joinExisting(ctx, o, j, mine, &sb)
}

// outlives reports whether o names a time to live that ends after sb does.
func (o *resolvedRequest) outlives(sb *sandboxer.Sandbox) bool {
	return o.req.TTL > 0 && now().Add(o.req.TTL).After(sb.ExpiresAt)
}

// joinExisting makes o's caller a partner in a sandbox that another request made: it lives as
// long as o asks for, and answers to o's idempotency key.
func (m *Manager) joinExisting(ctx context.Context, o *resolvedRequest, j *job, mine bool, sb *sandboxer.Sandbox) error {
	if mine && j.recorded {
		return nil
	}
	if (sb.Thread == sandboxer.Thread{} && o.thread != sandboxer.Thread{}) { // made before threads were kept, or by its ID alone
		err := m.update(ctx, sb, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if o.isOther(sb.Thread) {
				return idOfAnother(o.shown)
			}
			sb.Thread = o.thread
			return nil
		})
		if err != nil {
			return err
		}
	}
	if o.outlives(sb) {
		longer, err := m.extend(ctx, sb.Ref(), Extend{TTL: o.req.TTL}, true)
		if err != nil {
			return sandboxer.E(sandboxer.KindOf(err), err, "sandbox %s is there and cannot live as long as is asked: %s", sb.Shown(), sandboxer.Message(err)).
				WithHint("ask for it without a time to live, which leaves its expiry as it is")
		}
		*sb = *longer
	}
	sb.Found = true
	if o.key == "" {
		return nil
	}
	key := o.idempotency(sb)
	if key.At = now(); !key.At.After(sb.CreatedAt) {
		key.At = sb.CreatedAt.Add(time.Microsecond)
	}
	err := m.store.Write(ctx, sandboxer.Writes{Key: key})
	if !isKind(err, sandboxer.Conflict) {
		return err
	}
	k, err := m.store.IdempotencyKey(ctx, o.tenant, o.key)
	if err == nil && (!m.digestMatches(k.Digest, o.digest) || k.SandboxID != sb.ID || k.Generation != sb.Generation) {
		err = sandboxer.E(sandboxer.Conflict, nil, "the idempotency key %q was used for another request", o.key)
	}
	return err
}

// idempotency is o's key, as old as the sandbox: so replay knows that o made it.
func (o *resolvedRequest) idempotency(sb *sandboxer.Sandbox) *sandboxer.IdempotencyKey {
	if o.key == "" {
		return nil
	}
	return &sandboxer.IdempotencyKey{
		Tenant: o.tenant, Key: o.key, Digest: o.digest, SandboxID: sb.ID, Generation: sb.Generation, At: sb.CreatedAt,
	}
}

// now is the time in the precision the store keeps.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// record is the sandbox o asks for, before it is priced.
func (o *resolvedRequest) record(generation int) *sandboxer.Sandbox {
	at := now()
	sb := &sandboxer.Sandbox{
		ID: o.id, Generation: generation, Name: o.name, Tenant: o.tenant, Thread: o.thread,
		Profile: o.spec.Profile.ID, Extension: o.ext.Info.ID, Host: cmp.Or(o.place, o.spec.Host), Consumer: o.spec.Consumer,
		State: sandboxer.Creating, Spec: o.spec, CreatedAt: at, ExpiresAt: at.Add(o.ttl),
	}
	if o.shown != o.id {
		sb.ShownID = o.shown
	}
	sb.Spec.Generation = generation
	sb.Spec.Fuse = firstFuse(o.ext.Backend, sb.Spec.Profile, at, sb.ExpiresAt)
	for _, p := range o.spec.Ports {
		sb.Opened = append(sb.Opened, sandboxer.OpenPort{Port: p, Rev: 1})
	}
	if o.from != nil {
		sb.RestoredFrom, sb.RestoredAs = o.from.ID, o.as
	}
	return sb
}

// create is the job behind Create: it writes the sandbox down, and builds it.
func (m *Manager) create(ctx context.Context, j *job, o *resolvedRequest) (*sandboxer.Sandbox, error) {
	generation, thread := 1, o.thread
	if o.shown != "" {
		last, err := m.latest(ctx, o)
		if err == nil && last != nil && last.ID != o.id {
			err = errLookAgain // it became another's
		}
		switch {
		case err != nil:
			return nil, err
		case last == nil:
			if generation, err = m.unusedGeneration(ctx, o.id, o.tenant); err != nil {
				return nil, err
			}
		case o.isOther(last.Thread):
			return nil, idOfAnother(o.shown)
		case last.State == sandboxer.Terminated:
			generation = objectGeneration(last) + 1
			thread = cmp.Or(thread, last.Thread)
		case last.State == sandboxer.Terminating:
			return nil, errLookAgain
		case !m.matches(o, last):
			return nil, idTaken(o.shown)
		case last.State == sandboxer.Creating:
			m.publishRecord(j, last)
			return m.resume(ctx, j, last.ID, last.Generation)
		case last.State == sandboxer.Paused:
			if err := m.mayResume(ctx, last); err != nil {
				return nil, err
			}
			m.publishRecord(j, last)
			return m.beginResume(ctx, j, last, 0)
		default:
			return m.withLastUse(last), nil
		}
		// What the database lost under the ID must not be handed out as new.
		if held, err := m.isQuarantinedID(ctx, o.id); err != nil || held {
			return nil, cmp.Or(err, idUnavailable(o.shown))
		}
	}
	sb := o.record(generation)
	sb.Thread = thread
	if err := m.price(ctx, o, sb); err != nil {
		return nil, err
	}
	if o.place == "" {
		if err := m.choosePlace(ctx, sb, sb.Spec.Env, nil); err != nil {
			return nil, err
		}
	}
	if o.from != nil {
		unpin, err := m.pinSealed(ctx, o.from.ID)
		if err != nil {
			return nil, err
		}
		defer unpin() // from then on the record says that the snapshot is needed
	}
	began, tried := now(), false
	err := m.withRoom(ctx, j, roomRequest{sb.Extension, sb.Profile, sb.Tenant, o.leaving}, func(room *sandboxer.Room) error {
		var waited time.Duration
		if tried {
			waited = time.Since(began).Round(time.Second)
			postpone(sb, now())
		}
		tried = true
		ev := event(ctx, sb, sandboxer.EventState, "")
		ev.To, ev.Cause = sandboxer.Creating, sandboxer.ReasonRequested
		w := sandboxer.Writes{
			Entries: entries(hold(sb, "hold", sb.Quote.Amount)), Cover: true,
			Events: []sandboxer.Event{ev}, Key: o.idempotency(sb), Quota: m.quotaFor(sb.Tenant, ofSandboxes...), Room: room,
		}
		if o.cold != "" {
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventStep, "not from the pool: "+o.cold))
		}
		if waited > 0 {
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventStep, "it waited "+sandboxer.FormatDuration(waited)+" for room"))
		}
		return m.step(pRecord, func() error { return m.store.CreateSandbox(ctx, sb, w) })
	})
	if err != nil {
		return nil, m.explainCreateError(ctx, o, sb, err)
	}
	m.notify(sb.ID)
	m.scheduleSweep(time.Time{}, sb.ExpiresAt)
	j.recorded, j.untried = true, true
	m.publishRecord(j, sb)
	return m.build(ctx, j, sb)
}

// postpone makes sb, which is not written down yet, one that is created at that time.
func postpone(sb *sandboxer.Sandbox, at time.Time) {
	by := at.Sub(sb.CreatedAt)
	sb.CreatedAt, sb.ExpiresAt, sb.Spec.Fuse = at, sb.ExpiresAt.Add(by), sb.Spec.Fuse.Add(by)
}

// price completes the record of o: what the backend says to it, its environment, and
// what it costs.
func (m *Manager) price(ctx context.Context, o *resolvedRequest, sb *sandboxer.Sandbox) error {
	if err := m.boundDisk(o, sb); err != nil {
		return err
	}
	err := m.checkBackend(ctx, o, sb)
	if err != nil {
		return err
	}
	if sb.SealedEnv, err = m.sealEnv(sb, o.spec.Env); err != nil {
		return err
	}
	if sb.Quote, err = m.quote(ctx, o, sb); err != nil {
		return err
	}
	if o.maxCost > 0 && sb.Quote.Amount > o.maxCost {
		return sandboxer.E(sandboxer.NoCredit, nil, "it would cost up to %s credits for %s, more than the %s you allow", sb.Quote.Amount, o.ttl, o.maxCost).
			WithHint("allow more, or ask for a shorter time to live")
	}
	return nil
}

// unusedGeneration returns the first generation of id that the ledger does not know. Its entries
// outlive the records, and their keys must not come again. With a tenant, entries of another
// one are the end of it.
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
func (m *Manager) checkBackend(ctx context.Context, o *resolvedRequest, sb *sandboxer.Sandbox) error {
	if o.ext.Backend == nil {
		return nil // creating says why
	}
	spec := sb.Spec
	if o.as == sandboxer.SnapshotNative {
		// What was saved goes on, and nothing of these is used again but the mounts, which are made anew.
		spec.Vouched = slices.DeleteFunc(o.ext.restricted(spec), func(n string) bool {
			return n == sandboxer.RestrictedMounts && !slices.Contains(sb.Spec.Vouched, n)
		})
	}
	return o.ext.Backend.Check(ctx, spec)
}

// explainCreateError says why a record could not be made in words of the request.
func (m *Manager) explainCreateError(ctx context.Context, o *resolvedRequest, sb *sandboxer.Sandbox, err error) error {
	switch {
	case isKind(err, sandboxer.NoCredit):
		have, berr := m.store.Balance(ctx, o.tenant)
		if berr != nil {
			return err
		}
		return sandboxer.E(sandboxer.NoCredit, err, "it costs up to %s credits for %s, and %s has %s", sb.Quote.Amount, o.ttl, o.tenant, have).
			WithHint("ask an administrator for credits, or for a shorter time to live")
	case isKind(err, sandboxer.Conflict) && o.name != "":
		items, _, qerr := m.store.Sandboxes(ctx, sandboxer.Query{Tenant: o.tenant, Name: o.name, States: liveStates, Limit: 1})
		if qerr == nil && len(items) == 1 {
			return sandboxer.E(sandboxer.Conflict, err, "the name %q belongs to sandbox %s", o.name, items[0].Shown()).
				WithHint("choose another name, or destroy that sandbox first")
		}
	}
	return err
}

// resume builds a sandbox that nobody works on any more, if it still needs it.
func (m *Manager) resume(ctx context.Context, j *job, id string, generation int) (*sandboxer.Sandbox, error) {
	sb, err := m.store.SandboxGeneration(ctx, id, generation)
	switch {
	case err != nil:
		return nil, err
	case sb.State == sandboxer.Creating:
		if _, err := m.backend(sb.Extension); err != nil { // it may come back: an engine that starts after us
			return nil, m.scheduleRetry(ctx, sb, err)
		}
		return m.build(ctx, j, sb)
	case sb.State == sandboxer.Paused && (sb.Pause.Undo || sb.Spec.Profile.AutoResume):
		return m.beginResume(ctx, j, sb, 0)
	case sb.State == sandboxer.Terminating, sb.State == sandboxer.Terminated:
		return nil, errTerminating
	}
	return m.withLastUse(sb), nil
}

// build brings a sandbox that is in the database to running, or into its pool. It does the
// same for a fresh record and for one that another process left half made: Provision is
// idempotent in the generation, so that its lost answer is simply asked for again.
func (m *Manager) build(ctx context.Context, j *job, sb *sandboxer.Sandbox) (*sandboxer.Sandbox, error) {
	b, err := m.backend(sb.Extension)
	var reach sandboxer.Reachability
	if err == nil {
		reach, err = m.prepare(ctx, b, j, sb)
	}
	if err != nil {
		return nil, m.failCreate(ctx, j, sb, err)
	}
	if isPooled(sb) {
		return m.addToPool(ctx, j, sb, reach)
	}
	checkpoint := sb.Pause.Snapshot
	if err := m.setRunning(ctx, j, sb, reach); err != nil {
		return nil, m.failCreate(ctx, j, sb, err)
	}
	if checkpoint != "" {
		m.dropInternal(ctx, checkpoint)
	}
	sb.Spec.Env = nil
	return sb, nil
}

// prepare returns when the object of sb is there, ready, and holds what it begins with.
func (m *Manager) prepare(ctx context.Context, b *backend.Backend, j *job, sb *sandboxer.Sandbox) (sandboxer.Reachability, error) {
	interrupted := sb.Handle.SandboxID != "" && !isFrozen(sb)
	if err := m.ensureObject(ctx, b, j, sb); err != nil {
		return sandboxer.Reachability{}, err
	}
	reach, err := m.awaitReady(ctx, b, sb)
	if interrupted && isKind(err, sandboxer.NotFound) {
		reach, err = m.makeAgain(ctx, b, j, sb)
	}
	if err == nil && sb.RestoredAs == sandboxer.SnapshotPortable && sb.ReadyAt.IsZero() && !b.Can(sandboxer.CanCheckpoint) {
		err = m.unarchive(ctx, b, sb)
	}
	if err == nil && wantsAnswer(sb) {
		err = m.step(pAnswer, func() error { return m.awaitAnswer(ctx, b, j, sb, reach) })
	}
	return reach, err
}

// isFrozen reports whether the object of sb stands, frozen or nearly so, and is to go on.
func isFrozen(sb *sandboxer.Sandbox) bool {
	return isPaused(sb) && (sb.Pause.Depth == sandboxer.PauseFreeze || sb.Pause.Undo)
}

// ensureObject makes the object of sb, unless it was made before.
func (m *Manager) ensureObject(ctx context.Context, b *backend.Backend, j *job, sb *sandboxer.Sandbox) error {
	switch {
	case isFrozen(sb):
		return m.unfreeze(ctx, b, sb)
	case isClaimed(sb):
		return m.finishClaim(ctx, b, j, sb)
	case sb.Handle.SandboxID != "":
		return nil
	}
	return m.provision(ctx, b, j, sb)
}

func (m *Manager) awaitReady(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox) (reach sandboxer.Reachability, err error) {
	err = m.step(pReady, func() (err error) { reach, err = b.WaitReady(ctx, sb.Handle); return err })
	return reach, err
}

// makeAgain makes another object for sb, whose own did not survive what cut its creation
// short.
func (m *Manager) makeAgain(ctx context.Context, b *backend.Backend, j *job, sb *sandboxer.Sandbox) (sandboxer.Reachability, error) {
	err := m.update(ctx, sb, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
		if sb.State != sandboxer.Creating {
			return errTerminating
		}
		sb.Handle, sb.AbsentSince = sandboxer.Handle{}, time.Time{} // it is not missed while another is made
		return nil
	})
	if err == nil {
		err = m.provision(ctx, b, j, sb)
	}
	if err != nil {
		return sandboxer.Reachability{}, err
	}
	return m.awaitReady(ctx, b, sb)
}

// setRunning commits that sb runs: for the first time, claimed, or resumed.
func (m *Manager) setRunning(ctx context.Context, j *job, sb *sandboxer.Sandbox, reach sandboxer.Reachability) error {
	handle, claimed := sb.Handle, sb.ProvisionedAt
	return m.step(pRunning, func() error {
		return m.move(ctx, sb, sandboxer.Running, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) (err error) {
			sb.Reachability = reach
			sb.UsedAt = now()
			w.Events = append(w.Events, j.told...)
			if isPaused(sb) {
				if w.Snapshots, err = m.dropPauseSnapshot(ctx, sb); err != nil {
					return err
				}
				sb.ResumedAt = sb.UsedAt
				sb.PausedFor += sb.ResumedAt.Sub(sb.Pause.At)
				sb.ExpiresAt = sb.ResumedAt.Add(sb.Pause.Left)
				sb.Pause, sb.Reason, sb.Message = sandboxer.Pause{}, "", ""
			} else {
				sb.ReadyAt = sb.UsedAt
				if sb.Pool != "" { // what finishClaim brought
					sb.Handle, sb.ProvisionedAt = handle, claimed
					sb.Reason = ""
				}
			}
			if reach.Host != "" {
				sb.Host = reach.Host
			}
			return nil
		})
	})
}

// specFor is the spec of sb as its extension gets it, with what is not kept in it.
func (m *Manager) specFor(sb *sandboxer.Sandbox) (sandboxer.Spec, error) {
	env, err := m.openEnv(sb)
	if err != nil {
		return sandboxer.Spec{}, err
	}
	spec := sb.Spec
	spec.Env, spec.Stamp, spec.Tenant = env, m.stampOf(sb), sb.Tenant
	return spec, nil
}

// provision makes the object of sb and stores its handle. Where a host cannot take it now
// another is tried (tryOtherHost).
func (m *Manager) provision(ctx context.Context, b *backend.Backend, j *job, sb *sandboxer.Sandbox) error {
	e := m.extension(sb.Extension)
	select {
	case e.creates <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-e.creates }()
	spec, err := m.specFor(sb)
	if err != nil {
		return err
	}
	report, done := m.notifier.trackProgress(event(ctx, sb, sandboxer.EventProgress, ""))
	defer done()
	ctx = sandboxer.WithProgress(ctx, report)
	if err := m.ensurePlace(ctx, b, j, sb, spec.Env); err != nil {
		return err
	}
	var h sandboxer.Handle
	for avoid := []string(nil); ; {
		if b.Places() {
			spec.Place = sb.Host
		}
		spec.Stamp = m.stampOf(sb) // which says where it is, too
		untried := j.untried
		j.untried = false
		if from := sourceOf(sb); from != "" {
			h, err = m.restore(ctx, b, spec, from, isNative(sb))
		} else {
			err = m.step(pProvision, func() (err error) { h, err = b.Provision(ctx, spec); return err })
		}
		if err == nil {
			break
		}
		var source *sourceError
		untouched := untried && (sandboxer.IsUntouched(err) || errors.As(err, &source))
		if untouched {
			if uerr := m.commitUntouched(ctx, sb); uerr != nil {
				return errors.Join(err, uerr)
			}
		}
		avoid = append(avoid, sb.Host)
		if source != nil || ctx.Err() != nil || !m.tryOtherHost(ctx, b, j, sb, spec.Env, avoid, untouched, err) {
			return err
		}
	}
	// The handle is worth keeping also when a destroy has come in between.
	keep := context.WithoutCancel(ctx)
	return m.step(pHandle, func() error {
		return m.update(keep, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Creating && sb.State != sandboxer.Terminating {
				return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s", sb.Shown(), sb.State)
			}
			sb.Handle, sb.ProvisionedAt, sb.Untouched = h, now(), false
			if h.Host != "" {
				sb.Host = h.Host
			}
			step := "provisioned"
			if sourceOf(sb) != "" {
				step = "restored"
			}
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventStep, step))
			return nil
		})
	})
}

// failCreate ends a create that failed: what it made is torn down, what it held is
// given back, and the caller gets the reason. Not so when it was stopped from
// outside: a destroy then does all that, or the next start goes on.
func (m *Manager) failCreate(ctx context.Context, j *job, sb *sandboxer.Sandbox, cause error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if sb.State != sandboxer.Creating {
		return errTerminating
	}
	if isPaused(sb) {
		return m.undoResume(ctx, j, sb, cause)
	}
	kind := kindForCaller(cause)
	if kind == sandboxer.Internal {
		m.log.ErrorContext(ctx, "create failed", "sandbox", sb.ID, "generation", sb.Generation, "err", cause)
	} else {
		m.log.WarnContext(ctx, "create failed", "sandbox", sb.ID, "generation", sb.Generation, "err", cause)
	}
	answer := wrapError(kind, cause, "sandbox %s could not be created", sb.Shown())
	return m.endFailed(ctx, j, sb, ending{reason: sandboxer.ReasonFailed, message: answer.Msg, fault: kind, hint: answer.Hint}, answer)
}

// kindForCaller is the kind of cause for whoever asked for a sandbox of which it tells.
func kindForCaller(cause error) sandboxer.Kind {
	switch kind := sandboxer.KindOf(cause); kind {
	case sandboxer.NotFound: // the object, not what the caller named
		return sandboxer.Failed
	case sandboxer.Canceled: // by nobody here
		return sandboxer.Unavailable
	default:
		return kind
	}
}

// wrapError is an error that says what failed, and cause as the reason, with its hint and when
// to come back.
func wrapError(kind sandboxer.Kind, cause error, format string, args ...any) *sandboxer.Error {
	e := sandboxer.E(kind, cause, "%s: %s", fmt.Sprintf(format, args...), sandboxer.Message(cause))
	e.Hint, e.RetryAfter = sandboxer.HintOf(cause), sandboxer.RetryAfterOf(cause)
	return e
}

// endFailed ends sb, of which something failed, in the job that tried it, and returns answer,
// which says so; or what stopped the job, if a destroy was faster. What of the teardown cannot be
// done now is the sweep's to go on with.
func (m *Manager) endFailed(ctx context.Context, j *job, sb *sandboxer.Sandbox, why ending, answer error) error {
	if !m.becomeTeardown(j) {
		return context.Cause(ctx)
	}
	err := m.beginTeardown(ctx, sb, why)
	if err == nil {
		err = m.teardown(ctx, sb)
	}
	if err != nil {
		m.log.WarnContext(ctx, "teardown after a failure", "sandbox", sb.ID, "failed", answer, "err", err)
	}
	return answer
}

// quote prices sb: by its backend, or by the profile where the backend knows none.
func (m *Manager) quote(ctx context.Context, o *resolvedRequest, sb *sandboxer.Sandbox) (sandboxer.MeterQuote, error) {
	var q *sandboxer.MeterQuote
	if b := o.ext.Backend; b.Can(sandboxer.CanQuote) {
		var err error
		if q, err = b.EstimateCost(ctx, sb.Spec, o.ttl); err != nil {
			return sandboxer.MeterQuote{}, err
		}
	}
	if q == nil {
		p := o.spec.Profile.Price
		q = &sandboxer.MeterQuote{Setup: p.Setup, PerHour: p.PerHour}
		if p != (sandboxer.Price{}) {
			q.Detail = "price of " + o.spec.Profile.ID
		}
		q.Amount = q.For(o.ttl)
	}
	q.Duration = o.ttl
	if q.Amount < 0 || q.Setup < 0 || q.PerHour < 0 {
		return sandboxer.MeterQuote{}, sandboxer.E(sandboxer.Internal, fmt.Errorf("quote %+v", *q), "%s quotes a negative price", o.ext.Info.ID)
	}
	return *q, nil
}

// Plan is what a create would do.
type Plan struct {
	Spec      sandboxer.Spec       `json:"spec"`
	Extension string               `json:"extension"`
	Quote     sandboxer.MeterQuote `json:"quote"`
	TTL       time.Duration        `json:"ttl_ns"`
}
