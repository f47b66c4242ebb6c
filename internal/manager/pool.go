package manager

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

const (
	// basisEvery is how often it is asked what the sandboxes of a pool would be made of.
	basisEvery = 30 * time.Second
	// idleFor is how long an extension must not have been asked for a sandbox before one
	// is made for a pool, and maxIdleWait how long a pool waits for that: requests go first.
	idleFor     = 150 * time.Millisecond
	maxIdleWait = 2 * time.Second
)

// poolActor is the actor of what is done for pools.
const poolActor = "pool"

// A pool keeps sandboxes of one profile warm. What there is stands in the database; this is
// only a memory of it, which claims are quick with and the next look corrects.
type pool struct {
	profile sandboxer.Profile
	filling sync.Mutex  // held by the one who looks after it
	due     atomic.Bool // it is to be filled once more

	mu            sync.Mutex
	key           string    // what one would be made of now; empty while unknown
	keyAt         time.Time // when that was asked
	keySince      time.Time // when the answer was last another one
	ready         []string  // IDs, oldest first
	failures      int
	retryAt       time.Time
	problem       string
	full          bool // that is why: there was no room
	claimed, cold int64
}

// demand tells when an extension was last asked for a sandbox.
type demand struct {
	mu   sync.Mutex
	now  int
	last time.Time
}

func (d *demand) begin() (end func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now++
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.now--
		d.last = time.Now()
	}
}

func (d *demand) isIdle() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.now == 0 && time.Since(d.last) >= idleFor
}

func (m *Manager) poolOf(profile string) *pool {
	for _, p := range m.catalogue.Load().pools {
		if p.profile.ID == profile {
			return p
		}
	}
	return nil
}

// isPooled reports whether sb is nobody's: in a pool or being made for one.
func isPooled(sb *sandboxer.Sandbox) bool { return sb.Pool != "" && sb.Tenant == "" }

// isClaimed reports whether sb was in a pool and its owner waits for it.
func isClaimed(sb *sandboxer.Sandbox) bool {
	return sb.Pool != "" && sb.Tenant != "" && sb.ReadyAt.IsZero() && !isPaused(sb)
}

// whyCold says what o asks for that cannot be given to a sandbox that is there already,
// or nothing.
func (p *pool) whyCold(o *resolvedRequest) string {
	mode := func(n sandboxer.NetworkPolicy) sandboxer.NetworkMode { return cmp.Or(n.Mode, sandboxer.NetworkNone) }
	switch prof := &p.profile; {
	case o.shown != "":
		return "its ID was chosen"
	case o.spec.Image != prof.Image:
		return "another image"
	case o.spec.User != prof.User:
		return "another user"
	case !slices.Equal(o.spec.Command, prof.Command):
		return "another command"
	case o.spec.Limits != prof.Limits:
		return "other limits"
	case mode(o.spec.Network) != mode(prof.Network):
		return "another network mode"
	case len(o.req.Mounts) > 0:
		return "mounts"
	case o.spec.Host != "":
		return "a host was named"
	}
	return ""
}

// takeReady hands out one that should be ready, to one caller.
func (p *pool) takeReady() (id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ready) == 0 {
		return ""
	}
	id, p.ready = p.ready[0], p.ready[1:]
	return id
}

// countCreate notes how a create of the profile was answered.
func (m *Manager) countCreate(p *pool, warm bool) {
	p.mu.Lock()
	if warm {
		p.claimed++
	} else {
		p.cold++
	}
	p.mu.Unlock()
	if m.opts.Pooled != nil {
		m.opts.Pooled(p.profile.ID, warm)
	}
	m.wakePools()
}

// wakePools has the pools looked after.
func (m *Manager) wakePools() {
	select {
	case m.poolsDue <- struct{}{}:
	default:
	}
}

// claimOrCreate answers o with a sandbox of the pool, or with a new one.
func (m *Manager) claimOrCreate(ctx context.Context, o *resolvedRequest) (*sandboxer.Sandbox, error) {
	defer o.ext.demand.begin()()
	make := m.startCreate
	if o.shown != "" {
		make = m.createOrShare
	}
	p := m.poolOf(o.spec.Profile.ID)
	if p == nil {
		return make(ctx, o)
	}
	o.cold = p.whyCold(o)
	if o.cold == "" && m.rooms.anybody(o.ext.Info.ID, p.profile.ID) {
		o.cold = "others wait for room already"
	}
	for o.cold == "" {
		id := p.takeReady()
		if id == "" {
			o.cold = "it was empty"
			break
		}
		sb, err := m.claimFromPool(ctx, o, p, id)
		if errors.Is(err, errClaimLost) {
			continue
		}
		if isFull(err) { // the profile; it waits like those who get none of the pool
			m.wakePools()
			o.cold = "its profile had no room"
			break
		}
		if err == nil {
			m.countCreate(p, true)
		} else {
			m.wakePools() // it may be ready still
		}
		return sb, err
	}
	sb, err := make(ctx, o)
	if err == nil && !sb.Found {
		m.countCreate(p, false)
	}
	return sb, err
}

// errClaimLost says that a sandbox of the pool cannot be had any more.
var errClaimLost = sandboxer.E(sandboxer.Conflict, nil, "somebody else has it")

// claimFromPool gives the sandbox id of the pool to o.
func (m *Manager) claimFromPool(ctx context.Context, o *resolvedRequest, p *pool, id string) (*sandboxer.Sandbox, error) {
	own := *o
	own.setID(id)
	j, mine, err := m.begin(ctx, id, 1, true, &own)
	if err != nil {
		return nil, err
	}
	if !mine {
		return nil, errClaimLost
	}
	m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) { return m.claimPooled(ctx, j, &own, p) })
	sb, err := m.await(ctx, &own, j, true)
	if err == errTerminating && !j.recorded {
		return nil, errClaimLost // it was removed from the pool meanwhile
	}
	return sb, err
}

// claimPooled is the job behind claimFromPool: one compare-and-swap makes it o's, with the hold, the
// idempotency key and the event; then finishClaim brings it what its owner asked for. A broker that dies in between
// leaves a record that is creating, as after any create.
func (m *Manager) claimPooled(ctx context.Context, j *job, o *resolvedRequest, p *pool) (*sandboxer.Sandbox, error) {
	sb, err := m.store.SandboxGeneration(ctx, o.id, 1)
	if isKind(err, sandboxer.NotFound) {
		return nil, errClaimLost
	}
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	key := p.key
	p.mu.Unlock()
	if sb.State != sandboxer.Warm || !isPooled(sb) || sb.Pool != key || !time.Now().Before(sb.ExpiresAt) || hasMarks(sb) || sb.Unconfirmed != "" {
		return nil, errClaimLost
	}
	next := o.record(sb.Generation)
	if err := m.price(ctx, o, next); err != nil {
		return nil, err
	}
	err = m.step(pClaimed, func() error {
		return m.move(ctx, sb, sandboxer.Creating, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			was := *sb
			*sb = *next
			sb.Version, sb.Handle, sb.ProvisionedAt = was.Version, was.Handle, was.ProvisionedAt
			sb.Pool, sb.PooledAt = was.Pool, was.PooledAt
			sb.Host = cmp.Or(was.Host, sb.Host)
			sb.Reason = sandboxer.ReasonRequested // until it runs
			w.Entries, w.Cover = entries(hold(sb, "hold", sb.Quote.Amount)), true
			w.Key, w.Quota, w.Room = o.idempotency(sb), m.quotaFor(sb.Tenant, ofSandboxes...), m.roomFor(sb.Extension, sb.Profile)
			return nil
		})
	})
	if isKind(err, sandboxer.Conflict) && sb.State != sandboxer.Warm {
		return nil, errClaimLost
	}
	if err != nil {
		return nil, m.explainCreateError(ctx, o, next, err)
	}
	j.recorded = true
	m.publishRecord(j, sb)
	return m.build(ctx, j, sb)
}

// finishClaim brings to a claimed sandbox what its owner asked for. If that cannot be done
// because of the sandbox, it is removed, and another is made in its place.
func (m *Manager) finishClaim(ctx context.Context, b *backend.Backend, j *job, sb *sandboxer.Sandbox) error {
	spec, err := m.specFor(sb)
	if err != nil {
		return err
	}
	var h sandboxer.Handle
	err = m.step(pClaim, func() (err error) { h, err = b.Claim(ctx, sb.Handle, spec); return err })
	if err == nil {
		sb.Handle, sb.ProvisionedAt = h, now() // stored when it runs; until then it can be asked again
		return nil
	}
	switch sandboxer.KindOf(err) {
	case sandboxer.Invalid, sandboxer.Unsupported, sandboxer.Denied, sandboxer.Failed, sandboxer.Exhausted, sandboxer.Canceled:
		return err
	}
	if ctx.Err() != nil {
		return err
	}
	why := err
	m.log.WarnContext(ctx, "claim failed; it is made anew", "sandbox", sb.ID, "err", why)
	if err := m.step(pDiscard, func() error { _, err := b.Teardown(ctx, sb.Handle); return err }); err != nil {
		return err
	}
	err = m.step(pReplaced, func() error {
		return m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Creating {
				return errTerminating
			}
			sb.Spec.Generation = objectGeneration(sb) + 1
			sb.Handle, sb.Pool, sb.PooledAt, sb.Reason = sandboxer.Handle{}, "", time.Time{}, ""
			m.clearPlace(sb)
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventStep, "the one from the pool could not be used and is made anew: "+sandboxer.Message(why)))
			return nil
		})
	})
	if err != nil {
		return err
	}
	return m.provision(ctx, b, j, sb)
}

// addToPool puts a sandbox that is ready into its pool.
func (m *Manager) addToPool(ctx context.Context, j *job, sb *sandboxer.Sandbox, reach sandboxer.Reachability) (*sandboxer.Sandbox, error) {
	err := m.step(pWarm, func() error {
		return m.move(ctx, sb, sandboxer.Warm, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			sb.Reachability, sb.Reason = reach, sandboxer.ReasonPool
			sb.PooledAt = now()
			sb.ReadyAt = sb.PooledAt
			sb.Host = cmp.Or(reach.Host, sb.Host)
			return nil
		})
	})
	if err != nil {
		return nil, m.failCreate(ctx, j, sb, err)
	}
	sb.Spec.Env = nil
	m.wakePools()
	return sb, nil
}

// keepPools looks after the pools until the manager closes.
func (m *Manager) keepPools() {
	tick := time.NewTicker(m.opts.SweepEvery)
	defer tick.Stop()
	ctx := sandboxer.WithPrincipal(m.ctx, sandboxer.Principal{Actor: poolActor})
	for {
		if err := m.removeStalePools(ctx); err != nil && ctx.Err() == nil {
			m.log.Error("pools", "err", err)
		}
		for _, p := range m.catalogue.Load().pools {
			p.due.Store(true)
			m.async(newTracker(), func() { m.keepPoolFull(ctx, p) })
		}
		select {
		case <-m.ctx.Done():
			return
		case <-tick.C:
		case <-m.poolsDue:
		}
	}
}

// keepPoolFull tends p until nobody asks for that any more, unless somebody else does: then
// that one looks once more, because it may have looked before there was a reason to.
func (m *Manager) keepPoolFull(ctx context.Context, p *pool) {
	for p.due.Load() && p.filling.TryLock() {
		for p.due.Swap(false) {
			if err := m.fillPool(ctx, p); err != nil && ctx.Err() == nil {
				m.log.Warn("pool", "profile", p.profile.ID, "err", err)
			}
		}
		p.filling.Unlock()
	}
}

// removeStalePools removes what waits for a profile that keeps no pool any more.
func (m *Manager) removeStalePools(ctx context.Context) error {
	return m.records(ctx, sandboxer.Query{States: []sandboxer.State{sandboxer.Warm}}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged == "" && sb.Unconfirmed == "" && m.poolOf(sb.Profile) == nil {
			m.discardPooled(ctx, newTracker(), sb, "its profile keeps no pool any more")
		}
	})
}

// members lists what the pool has, newest first, and how many more are being made.
func (m *Manager) members(ctx context.Context, p *pool) (warm []*sandboxer.Sandbox, making int, err error) {
	q := sandboxer.Query{Profile: p.profile.ID, States: []sandboxer.State{sandboxer.Creating, sandboxer.Warm}}
	err = m.records(ctx, q, func(sb *sandboxer.Sandbox) {
		switch {
		case sb.Damaged != "" || !isPooled(sb) || sb.Unconfirmed != "":
		case sb.State == sandboxer.Warm:
			warm = append(warm, sb)
		default:
			making++
		}
	})
	return warm, making, err
}

// fillPool brings the pool to its size: what is of no use is removed, what is missing made,
// one after the other.
func (m *Manager) fillPool(ctx context.Context, p *pool) error {
	for ctx.Err() == nil {
		p.mu.Lock()
		early := time.Until(p.retryAt)
		p.mu.Unlock()
		key, err := m.basis(ctx, p, early > 0)
		if err != nil {
			return m.poolFailed(p, err)
		}
		warm, making, err := m.members(ctx, p)
		if err != nil {
			return err
		}
		var ready []string
		for _, sb := range warm {
			switch {
			case sb.Pool != key:
				if key != "" {
					m.discardPooled(ctx, newTracker(), sb, "it is not what its profile makes now")
				}
			case len(ready) >= p.profile.Pool.Size:
				m.discardPooled(ctx, newTracker(), sb, "there are more than its profile keeps")
			case m.working(sb.ID): // being claimed, or removed
			default:
				ready = append(ready, sb.ID)
			}
		}
		slices.Reverse(ready)
		full := len(ready)+making >= p.profile.Pool.Size
		p.mu.Lock()
		p.ready = ready
		if full && making == 0 {
			p.failures, p.retryAt, p.problem, p.full = 0, time.Time{}, "", false
		}
		p.mu.Unlock()
		if full || early > 0 {
			return nil
		}
		if err := m.makePooled(ctx, p, key); err != nil {
			return m.poolFailed(p, err)
		}
	}
	return nil
}

// poolFailed notes why the pool is not full, and when that is tried again.
func (m *Manager) poolFailed(p *pool, cause error) error {
	if m.ctx.Err() != nil {
		return nil
	}
	p.mu.Lock()
	p.failures++
	wait := backoff(p.failures, rand.Float64())
	p.retryAt, p.problem, p.full = now().Add(wait), sandboxer.Message(cause), isFull(cause)
	p.mu.Unlock()
	time.AfterFunc(wait, m.wakePools)
	return cause
}

// basis returns the digest of what a sandbox of the pool would be made of now; with
// known, as far as that was asked before.
func (m *Manager) basis(ctx context.Context, p *pool, known bool) (string, error) {
	p.mu.Lock()
	key, at := p.key, p.keyAt
	p.mu.Unlock()
	if known || key != "" && time.Since(at) < basisEvery {
		return key, nil
	}
	b, err := m.backend(p.profile.Extension)
	if err != nil {
		return "", err
	}
	spec := m.profileSpec(p.profile)
	spec.ID, spec.Generation, spec.Warm = sandboxer.NewID(), 1, true
	if err := b.Check(ctx, spec); err != nil {
		return "", err
	}
	basis, err := b.Basis(ctx, spec)
	if err != nil {
		return "", err
	}
	spec.ID, spec.Profile.Pool = "", sandboxer.Pool{}
	j, err := json.Marshal([]any{spec, spec.Env, p.profile.Extension, basis})
	if err != nil {
		return "", err
	}
	sum := keyedDigest(m.opts.Key, "sandboxer pool", j) // of the profile's environment, too, and kept with each sandbox
	p.mu.Lock()
	defer p.mu.Unlock()
	if key = hex.EncodeToString(sum[:16]); key != p.key {
		p.keySince = time.Now()
	}
	p.key, p.keyAt = key, time.Now()
	return key, nil
}

// makePooled makes one sandbox for the pool, when nobody else needs the extension.
func (m *Manager) makePooled(ctx context.Context, p *pool, key string) error {
	ext := m.extension(p.profile.Extension)
	select {
	case ext.poolCreates <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-ext.poolCreates }()
	for give := time.Now().Add(maxIdleWait); !ext.demand.isIdle() && time.Now().Before(give); {
		select {
		case <-time.After(idleFor / 8):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if m.rooms.anybody(p.profile.Extension, "") {
		return sandboxer.E(sandboxer.Exhausted, &sandboxer.FullError{Of: p.profile.Extension}, "requests wait for room on extension %s, and go first", p.profile.Extension)
	}
	at := now()
	spec := m.profileSpec(p.profile)
	spec.ID, spec.Generation, spec.Warm = sandboxer.NewID(), 1, true
	sb := &sandboxer.Sandbox{
		ID: spec.ID, Generation: 1, Profile: p.profile.ID, Extension: p.profile.Extension, State: sandboxer.Creating, Spec: spec,
		Pool: key, Reason: sandboxer.ReasonPool,
		CreatedAt: at, ExpiresAt: at.Add(cmp.Or(p.profile.Pool.MaxAge, sandboxer.DefaultPoolAge)),
	}
	// Late enough for whoever claims it with the profile's time to live: then nothing has
	// to be moved.
	sb.Spec.Fuse = firstFuse(ext.Backend, p.profile, sb.ExpiresAt, sb.ExpiresAt.Add(ttlOf(p.profile)))
	var err error
	if sb.SealedEnv, err = m.sealEnv(sb, spec.Env); err != nil {
		return err
	}
	if err := m.choosePlace(ctx, sb, spec.Env, nil); err != nil {
		return err
	}
	ev := event(ctx, sb, sandboxer.EventState, "")
	ev.To, ev.Cause = sandboxer.Creating, sandboxer.ReasonPool
	j, mine, err := m.begin(ctx, sb.ID, 1, true, nil)
	if err != nil || !mine {
		return err
	}
	m.run(j, func(ctx context.Context) (*sandboxer.Sandbox, error) {
		w := sandboxer.Writes{Events: []sandboxer.Event{ev}, Room: m.roomFor(sb.Extension, "")}
		if err := m.step(pPoolRecord, func() error { return m.store.CreateSandbox(ctx, sb, w) }); err != nil {
			return nil, err
		}
		m.notify(sb.ID)
		j.untried = true
		m.publishRecord(j, sb)
		return m.build(ctx, j, sb)
	})
	<-j.done // ends with the manager
	return j.err
}

// discardPooled ends a sandbox that nobody has claimed, in the background. It returns false
// while the sweep does something with it.
func (m *Manager) discardPooled(ctx context.Context, t *tracker, sb *sandboxer.Sandbox, why string) bool {
	if !m.sweepLocks.tryLock(sb.ID) {
		return false
	}
	m.async(t, func() {
		defer m.unlockSweep(sb.ID)
		err := m.beginTeardown(ctx, sb, ending{reason: sandboxer.ReasonPool, message: why, still: func(sb *sandboxer.Sandbox) bool {
			return isPooled(sb) && (sb.State == sandboxer.Warm || sb.State == sandboxer.Creating) && sb.Unconfirmed == ""
		}})
		if err == nil {
			err = m.retryTeardown(ctx, t, sb)
		}
		if err != nil && err != errNotNeeded && ctx.Err() == nil { // the sweep goes on with it
			m.log.WarnContext(ctx, "removal from a pool", "sandbox", sb.ID, "err", err)
		}
	})
	return true
}

// Pools describes the pool of every profile that keeps one. How often it was used and what
// keeps it from being full are told to administrators only: they come of all tenants' use.
func (m *Manager) Pools(ctx context.Context) ([]PoolStatus, error) {
	who, err := may(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, err
	}
	out := []PoolStatus{}
	for _, p := range m.catalogue.Load().pools {
		warm, _, err := m.members(ctx, p)
		if err != nil {
			return nil, err
		}
		p.mu.Lock()
		s := PoolStatus{
			Profile: p.profile.ID, Extension: p.profile.Extension, Size: p.profile.Pool.Size,
		}
		if who.Can(sandboxer.ScopeAdmin) {
			s.Claimed, s.Cold, s.Problem, s.RetryAt = new(p.claimed), new(p.cold), p.problem, p.retryAt
		}
		for _, sb := range warm {
			if sb.Pool == p.key {
				s.Ready++
			}
		}
		p.mu.Unlock()
		out = append(out, s)
	}
	return out, nil
}

// DrainPool removes every sandbox that waits in the pool of the profile and returns how
// many there were, with the ID of the profile; new ones take their place. It needs the
// admin scope. Kinds: NotFound for a profile that does not exist, Invalid for one that
// keeps no pool.
func (m *Manager) DrainPool(ctx context.Context, profile string) (id string, removed int, _ error) {
	if _, err := may(ctx, sandboxer.ScopeAdmin); err != nil {
		return "", 0, err
	}
	prof, err := m.profile(profile)
	if err != nil {
		return "", 0, sandboxer.E(sandboxer.NotFound, nil, "%s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	p := m.poolOf(prof.ID)
	if p == nil {
		return "", 0, sandboxer.E(sandboxer.Invalid, nil, "profile %s keeps no pool", prof.ID).
			WithHint("see those that do with: sandboxer pool ls")
	}
	warm, _, err := m.members(ctx, p)
	if err != nil {
		return "", 0, err
	}
	p.mu.Lock()
	p.key, p.ready = "", nil // ask what they are made of, too
	p.mu.Unlock()
	t := newTracker()
	for len(warm) > 0 && ctx.Err() == nil && m.ctx.Err() == nil {
		warm = slices.DeleteFunc(warm, func(sb *sandboxer.Sandbox) bool {
			return m.discardPooled(sandboxer.WithPrincipal(m.ctx, sandboxer.PrincipalFrom(ctx)), t, sb, fmt.Sprintf("the pool of %s was drained", prof.ID))
		})
		if len(warm) > 0 {
			time.Sleep(10 * time.Millisecond)
		}
	}
	err = wait(ctx, t.done())
	m.wakePools()
	return prof.ID, t.summary().Torndown, err
}

// PoolStatus describes the pool of one profile.
type PoolStatus struct {
	Profile   string `json:"profile"`
	Extension string `json:"extension"`
	Size      int    `json:"size"`  // how many should wait
	Ready     int    `json:"ready"` // how many wait now
	// For administrators only:
	Claimed *int64    `json:"claimed,omitempty"` // creates that were answered from it since the broker started
	Cold    *int64    `json:"cold,omitempty"`    // creates of the profile that were not
	Problem string    `json:"problem,omitempty"` // why it is not full
	RetryAt time.Time `json:"retry_at,omitzero"` // when that is tried again
}
