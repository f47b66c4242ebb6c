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
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

const (
	// basisEvery is how often a pool asks from which parts its sandboxes would be made.
	basisEvery = 30 * time.Second
	// idleFor is how long an extension must be without requests before a sandbox is made for a pool, and maxIdleWait how long a
	// pool waits for that: requests come first.
	idleFor     = 150 * time.Millisecond
	maxIdleWait = 2 * time.Second
)

// poolActor is the actor of changes that pools make.
const poolActor = "pool"

// A pool keeps sandboxes of one profile warm. The database has its members; this is a cache that makes claims fast, and that
// the next look at the database corrects.
type pool struct {
	m       *Manager
	profile sandboxer.Profile
	filling sync.Mutex  // held by the goroutine that tends it
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

// demand knows when an extension last got a request for a sandbox.
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

// whyCold names the part of o that cannot be given to an existing sandbox, or nothing.
func (p *pool) whyCold(o *creation) string {
	mode := func(n sandboxer.NetworkPolicy) sandboxer.NetworkMode { return cmp.Or(n.Mode, sandboxer.NetworkNone) }
	switch prof := &p.profile; {
	case o.Shown != "":
		return "its ID was chosen"
	case o.Extension != prof.Extension:
		return "another extension serves it"
	case o.Spec.Image != prof.Image:
		return "another image"
	case o.Spec.User != prof.User:
		return "another user"
	case !slices.Equal(o.Spec.Command, prof.Command):
		return "another command"
	case o.Spec.Limits != prof.Limits:
		return "other limits"
	case mode(o.Spec.Network) != mode(prof.Network):
		return "another network mode"
	case len(o.Asked.Mounts) > 0:
		return "mounts"
	case o.Spec.Host != "":
		return "a host was named"
	case len(o.Secrets) > 0:
		return "secrets"
	}
	return ""
}

// takeReady gives one caller a sandbox that should be ready.
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
func (p *pool) countCreate(warm bool) {
	p.mu.Lock()
	if warm {
		p.claimed++
	} else {
		p.cold++
	}
	p.mu.Unlock()
	if p.m.opts.Pooled != nil {
		p.m.opts.Pooled(p.profile.ID, warm)
	}
	p.m.wakePools()
}

// wakePools wakes the keeper of the pools.
func (m *Manager) wakePools() {
	select {
	case m.poolsDue <- struct{}{}:
	default:
	}
}

// claimOrCreate answers c with a sandbox from the pool, or with a new one.
func (c *creation) claimOrCreate(ctx context.Context) (*sandboxer.Sandbox, error) {
	defer c.ext.demand.begin()()
	make := c.startCreate
	if c.Shown != "" {
		make = c.createOrShare
	}
	p := c.m.poolOf(c.Spec.Profile.ID)
	if p == nil {
		return make(ctx)
	}
	c.cold = p.whyCold(c)
	if c.cold == "" && c.m.rooms.anybody(c.ext.Info.ID, p.profile.ID) {
		c.cold = "other requests wait for room"
	}
	for c.cold == "" {
		id := p.takeReady()
		if id == "" {
			c.cold = "it was empty"
			break
		}
		sb, err := c.claimFromPool(ctx, p, id)
		if errors.Is(err, errClaimLost) {
			continue
		}
		if isFull(err) { // the profile; it waits like requests that get none of the pool
			c.m.wakePools()
			c.cold = "its profile had no room"
			break
		}
		if err == nil {
			p.countCreate(true)
		} else {
			c.m.wakePools() // it may be ready still
		}
		return sb, err
	}
	sb, err := make(ctx)
	if err == nil && !sb.Found {
		p.countCreate(false)
	}
	return sb, err
}

// errClaimLost says that a sandbox of the pool is no longer available.
var errClaimLost = sandboxer.E(sandboxer.Conflict, nil, "another request has it")

// claimFromPool gives the sandbox id of the pool to c.
func (c *creation) claimFromPool(ctx context.Context, p *pool, id string) (*sandboxer.Sandbox, error) {
	own := *c
	own.SetID(id)
	j, mine, err := c.m.begin(ctx, id, 1, true, &own)
	if err != nil {
		return nil, err
	}
	if !mine {
		return nil, errClaimLost
	}
	j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) { return (&own).claimPooled(ctx, j, p) })
	sb, err := (&own).await(ctx, j, true)
	if err == errTerminating && !j.recorded {
		return nil, errClaimLost // it was removed from the pool meanwhile
	}
	return sb, err
}

// claimPooled is the job of claimFromPool: one compare-and-swap makes the sandbox c's, with the hold, the idempotency key and
// the event; then finishClaim adds the requested parts. If the broker dies in between, the record is creating, as after any
// create.
func (c *creation) claimPooled(ctx context.Context, j *job, p *pool) (*sandboxer.Sandbox, error) {
	sb, err := c.m.store.SandboxGeneration(ctx, c.ID, 1)
	if isKind(err, sandboxer.NotFound) {
		return nil, errClaimLost
	}
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	key := p.key
	p.mu.Unlock()
	if sb.State != sandboxer.Warm || !lifecycle.IsPooled(sb) || sb.Pool != key || !time.Now().Before(sb.ExpiresAt) || lifecycle.HasMarks(sb) || lifecycle.MayBeClaimed(sb) {
		return nil, errClaimLost
	}
	next := c.record(sb.Generation)
	if err := c.price(ctx, next); err != nil {
		return nil, err
	}
	if c.isRouted() {
		for _, choice := range c.Routing.Route() {
			if choice.Verdict == sandboxer.RouteChosen {
				choice.Price = &next.Quote.Amount
			}
			next.Route = append(next.Route, choice.RouteChoice)
		}
	}
	err = c.m.step(pClaimed, func() error {
		return c.m.box(sb).move(ctx, sandboxer.Creating, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			was := *sb
			*sb = *next
			sb.Version, sb.Handle, sb.ProvisionedAt, sb.Spec.Credential = was.Version, was.Handle, was.ProvisionedAt, was.Spec.Credential
			sb.Pool, sb.PooledAt = was.Pool, was.PooledAt
			sb.Host = cmp.Or(was.Host, sb.Host)
			sb.Reason = sandboxer.ReasonRequested // until it runs
			w.Entries, w.Cover = entries(hold(ctx, sb, "hold", sb.Quote.Amount)), true
			w.Key, w.Quota, w.Room = c.Idempotency(sb), c.m.QuotaFor(sb.Tenant, ofSandboxes...), c.m.roomFor(sb.Extension, sb.Profile)
			return nil
		})
	})
	if isKind(err, sandboxer.Conflict) && sb.State != sandboxer.Warm {
		return nil, errClaimLost
	}
	if err != nil {
		return nil, c.explainCreateError(ctx, next, err)
	}
	j.recorded = true
	j.publishRecord(sb)
	return c.m.box(sb).in(j).build(ctx)
}

// finishClaim adds the requested parts to a claimed sandbox. If that fails because of the sandbox, the sandbox is removed and
// made again.
func (wk backed) finishClaim(ctx context.Context) error {
	spec, err := wk.specFor(ctx)
	if err != nil {
		return err
	}
	var h sandboxer.Handle
	err = wk.m.step(pClaim, func() (err error) { h, err = wk.b.Claim(ctx, wk.sb.Handle, spec); return err })
	if err == nil {
		wk.sb.Handle, wk.sb.ProvisionedAt = h, now() // stored when it runs; until then it can be asked again
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
	wk.m.log.WarnContext(ctx, "claim failed; a new sandbox is made instead", "sandbox", wk.sb.ID, "err", why)
	if err := wk.m.step(pDiscard, func() error { _, err := wk.b.Teardown(ctx, wk.sb.Handle); return err }); err != nil {
		return err
	}
	err = wk.m.step(pReplaced, func() error {
		return wk.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Creating {
				return errTerminating
			}
			sb.Spec.Generation = lifecycle.ObjectGeneration(sb) + 1
			sb.Handle, sb.Pool, sb.PooledAt, sb.Reason = sandboxer.Handle{}, "", time.Time{}, ""
			wk.m.box(sb).clearPlace()
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventStep, "the sandbox from the pool could not be used, and a new one is created: "+sandboxer.Message(why)))
			return nil
		})
	})
	if err != nil {
		return err
	}
	return wk.provision(ctx)
}

// addToPool puts a sandbox that is ready into its pool.
func (wk work) addToPool(ctx context.Context, reach sandboxer.Reachability) (*sandboxer.Sandbox, error) {
	err := wk.m.step(pWarm, func() error {
		return wk.move(ctx, sandboxer.Warm, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			sb.Reachability, sb.Reason = reach, sandboxer.ReasonPool
			sb.PooledAt = now()
			sb.ReadyAt = sb.PooledAt
			sb.Host = cmp.Or(reach.Host, sb.Host)
			return nil
		})
	})
	if err != nil {
		return nil, wk.failCreate(ctx, err)
	}
	wk.sb.Spec.Env = nil
	wk.m.wakePools()
	return wk.sb, nil
}

// keepPools keeps the pools full until the manager closes.
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
			m.newPass().async(func() { p.keepPoolFull(ctx) })
		}
		select {
		case <-m.ctx.Done():
			return
		case <-tick.C:
		case <-m.poolsDue:
		}
	}
}

// keepPoolFull fills p until no more callers ask for that. If another goroutine fills p already, that one looks at p once more,
// because it may have looked before this call.
func (p *pool) keepPoolFull(ctx context.Context) {
	for p.due.Load() && p.filling.TryLock() {
		for p.due.Swap(false) {
			if err := p.fillPool(ctx); err != nil && ctx.Err() == nil {
				p.m.log.Warn("pool", "profile", p.profile.ID, "err", err)
			}
		}
		p.filling.Unlock()
	}
}

// removeStalePools removes waiting sandboxes of profiles that keep no pool any more.
func (m *Manager) removeStalePools(ctx context.Context) error {
	return m.records(ctx, sandboxer.Query{States: []sandboxer.State{sandboxer.Warm}}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged == "" && !lifecycle.MayBeClaimed(sb) && m.poolOf(sb.Profile) == nil {
			m.newPass().discardPooled(ctx, sb, "its profile no longer keeps a pool")
		}
	})
}

// members lists what the pool has, newest first, and how many more are being made.
func (p *pool) members(ctx context.Context) (warm []*sandboxer.Sandbox, making int, err error) {
	q := sandboxer.Query{Profile: p.profile.ID, States: []sandboxer.State{sandboxer.Creating, sandboxer.Warm}}
	err = p.m.records(ctx, q, func(sb *sandboxer.Sandbox) {
		switch {
		case sb.Damaged != "" || !lifecycle.IsPooled(sb) || lifecycle.MayBeClaimed(sb):
		case sb.State == sandboxer.Warm:
			warm = append(warm, sb)
		default:
			making++
		}
	})
	return warm, making, err
}

// fillPool makes the pool as large as its profile says: it removes unusable sandboxes and makes missing ones, one after the
// other.
func (p *pool) fillPool(ctx context.Context) error {
	for ctx.Err() == nil {
		p.mu.Lock()
		early := time.Until(p.retryAt)
		p.mu.Unlock()
		key, err := p.basis(ctx, early > 0)
		if err != nil {
			return p.poolFailed(err)
		}
		warm, making, err := p.members(ctx)
		if err != nil {
			return err
		}
		var ready []string
		for _, sb := range warm {
			switch {
			case sb.Pool != key:
				if key != "" {
					p.m.newPass().discardPooled(ctx, sb, "it differs from what its profile makes now")
				}
			case len(ready) >= p.profile.Pool.Size:
				p.m.newPass().discardPooled(ctx, sb, "there are more than its profile keeps")
			case p.m.working(sb.ID): // being claimed, or removed
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
		if err := p.makePooled(ctx, key); err != nil {
			return p.poolFailed(err)
		}
	}
	return nil
}

// poolFailed notes why the pool is not full, and when it will try again.
func (p *pool) poolFailed(cause error) error {
	if p.m.ctx.Err() != nil {
		return nil
	}
	p.mu.Lock()
	p.failures++
	wait := lifecycle.Backoff(p.failures, rand.Float64())
	p.retryAt, p.problem, p.full = now().Add(wait), sandboxer.Message(cause), isFull(cause)
	p.mu.Unlock()
	time.AfterFunc(wait, p.m.wakePools)
	return cause
}

// basis returns the digest of the parts from which a sandbox of the pool would be made now. With known, it uses only earlier
// answers of the backend.
func (p *pool) basis(ctx context.Context, known bool) (string, error) {
	p.mu.Lock()
	key, at := p.key, p.keyAt
	p.mu.Unlock()
	if known || key != "" && time.Since(at) < basisEvery {
		return key, nil
	}
	b, err := p.m.backend(p.profile.Extension)
	if err != nil {
		return "", err
	}
	spec, err := p.m.site().PoolSpec(p.profile)
	if err != nil {
		return "", err
	}
	spec.ID, spec.Generation, spec.Warm = sandboxer.NewID(), 1, true
	if _, err := b.Check(ctx, spec); err != nil {
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
	sum := access.KeyedDigest(p.m.opts.Key, "sandboxer pool", j) // of the profile's environment, too, and kept with each sandbox
	p.mu.Lock()
	defer p.mu.Unlock()
	if key = hex.EncodeToString(sum[:16]); key != p.key {
		p.keySince = time.Now()
	}
	p.key, p.keyAt = key, time.Now()
	return key, nil
}

// makePooled makes one sandbox for the pool, when no request needs the extension.
func (p *pool) makePooled(ctx context.Context, key string) error {
	ext := p.m.extension(p.profile.Extension)
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
	if p.m.rooms.anybody(p.profile.Extension, "") {
		return sandboxer.E(sandboxer.Exhausted, &sandboxer.FullError{Of: p.profile.Extension}, "requests wait for room on extension %s, and come first", p.profile.Extension)
	}
	at := now()
	spec, err := p.m.site().PoolSpec(p.profile)
	if err != nil {
		return err
	}
	spec.ID, spec.Generation, spec.Warm = sandboxer.NewID(), 1, true
	sb := &sandboxer.Sandbox{
		ID: spec.ID, Generation: 1, Profile: p.profile.ID, Extension: p.profile.Extension, State: sandboxer.Creating, Spec: spec,
		Pool: key, Reason: sandboxer.ReasonPool,
		CreatedAt: at, ExpiresAt: at.Add(cmp.Or(p.profile.Pool.MaxAge, sandboxer.DefaultPoolAge)),
	}
	// Late enough for a claim with the profile's time to live: then nothing has
	// to be moved.
	sb.Spec.Fuse = lifecycle.FirstFuse(p.profile, sb.ExpiresAt, sb.ExpiresAt.Add(lifecycle.TTLOf(p.profile)), renews(ext.Backend))
	if sb.SealedEnv, err = p.m.box(sb).sealEnv(spec.Env); err != nil {
		return err
	}
	if err := p.m.box(sb).choosePlace(ctx, spec.Env, nil); err != nil {
		return err
	}
	ev := events.Of(ctx, sb, sandboxer.EventState, "")
	ev.To, ev.Cause = sandboxer.Creating, sandboxer.ReasonPool
	j, mine, err := p.m.begin(ctx, sb.ID, 1, true, nil)
	if err != nil || !mine {
		return err
	}
	j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) {
		w := sandboxer.Writes{Events: []sandboxer.Event{ev}, Room: p.m.roomFor(sb.Extension, "")}
		if err := p.m.step(pPoolRecord, func() error { return p.m.store.CreateSandbox(ctx, sb, w) }); err != nil {
			return nil, err
		}
		p.m.events.Notify(sb.ID)
		j.untried = true
		j.publishRecord(sb)
		return p.m.box(sb).in(j).build(ctx)
	})
	<-j.done // ends with the manager
	return j.err
}

// discardPooled ends an unclaimed sandbox, in the background. It returns false
// while the sweep works on it.
func (ps *pass) discardPooled(ctx context.Context, sb *sandboxer.Sandbox, why string) bool {
	if !ps.m.sweepLocks.tryLock(sb.ID) {
		return false
	}
	ps.async(func() {
		defer ps.m.unlockSweep(sb.ID)
		err := ps.m.box(sb).beginTeardown(ctx, ending{reason: sandboxer.ReasonPool, message: why, still: func(sb *sandboxer.Sandbox) bool {
			return lifecycle.IsPooled(sb) && (sb.State == sandboxer.Warm || sb.State == sandboxer.Creating) && !lifecycle.MayBeClaimed(sb)
		}})
		if err == nil {
			err = ps.retryTeardown(ctx, sb)
		}
		if err != nil && err != errNotNeeded && ctx.Err() == nil { // the sweep goes on with it
			ps.m.log.WarnContext(ctx, "removal from a pool", "sandbox", sb.ID, "err", err)
		}
	})
	return true
}

// Pools describes the pool of every profile that keeps one. Only administrators see how often
// it was used and what keeps it from being full: both result from all tenants' use.
func (m *Manager) Pools(ctx context.Context) ([]PoolStatus, error) {
	who, err := access.May(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, err
	}
	out := []PoolStatus{}
	for _, p := range m.catalogue.Load().pools {
		warm, _, err := p.members(ctx)
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

// DrainPool removes every sandbox that waits in the pool of the profile, and returns their number and the ID of the profile;
// new ones take their place. It needs the admin scope. Kinds: NotFound for a profile that does not exist, Invalid for one that
// keeps no pool.
func (m *Manager) DrainPool(ctx context.Context, profile string) (id string, removed int, _ error) {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
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
	warm, _, err := p.members(ctx)
	if err != nil {
		return "", 0, err
	}
	p.mu.Lock()
	p.key, p.ready = "", nil // ask what they are made of, too
	p.mu.Unlock()
	t := m.newPass()
	for len(warm) > 0 && ctx.Err() == nil && m.ctx.Err() == nil {
		warm = slices.DeleteFunc(warm, func(sb *sandboxer.Sandbox) bool {
			return t.discardPooled(sandboxer.WithPrincipal(m.ctx, sandboxer.PrincipalFrom(ctx)), sb, fmt.Sprintf("the pool of %s was drained", prof.ID))
		})
		if len(warm) > 0 {
			time.Sleep(10 * time.Millisecond)
		}
	}
	err = events.Wait(ctx, t.done())
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
