package manager

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// keepKeys is how long an idempotency key is remembered.
const keepKeys = 24 * time.Hour

// Create makes a sandbox and returns it running (with req.NoWaiting: as soon as it is in the database). It is safe to repeat:
// the same req.Key gives the same sandbox or the same failure for a day, also after a crash of the broker. After a failure that
// may pass and left nothing behind, it tries again. If the caller chose an ID or a thread, Create returns the sandbox that
// lives under it, and sets Found; a sandbox that is being destroyed ends first. A TTL in req then moves the expiry, as Extend
// would, but never to an earlier time. If the caller leaves, the work continues.
//
// Kinds: Invalid, Denied and Unsupported before anything exists; Conflict when the key, the ID or the name belongs to something
// else; NoCredit; and the backend's kind when it failed, after everything it made was removed.
func (m *Manager) Create(ctx context.Context, req sandboxer.CreateRequest) (*sandboxer.Sandbox, error) {
	p, err := access.May(ctx, sandboxer.ScopeWrite)
	if err != nil {
		return nil, err
	}
	o, err := m.resolve(p, req)
	if err != nil {
		return nil, err
	}
	return o.underKey(ctx, true, o.claimOrCreate)
}

// underKey answers with the sandbox that was made under c's key, or calls make to create one. With free, make also runs if the
// attempt under the key failed in a way that may pass.
func (c *creation) underKey(ctx context.Context, free bool, make func(context.Context) (*sandboxer.Sandbox, error)) (*sandboxer.Sandbox, error) {
	if c.Key == "" {
		return make(ctx)
	}
	// A concurrent repeat of this request may take the key first. Once it has failed, another may free it.
	var conflict error
	for range 3 {
		if free {
			if err := c.freeKey(ctx); err != nil {
				return nil, err
			}
		}
		if sb, err := c.replay(ctx); sb != nil || err != nil {
			return sb, err
		}
		sb, err := make(ctx)
		if !isKind(err, sandboxer.Conflict) {
			return sb, err
		}
		conflict = err
	}
	if sb, err := c.replay(ctx); sb != nil || err != nil {
		return sb, err
	}
	return nil, conflict
}

// Plan checks req as Create does and describes the sandbox that Create would make. Nothing is created.
func (m *Manager) Plan(ctx context.Context, req sandboxer.CreateRequest) (Plan, error) {
	p, err := access.May(ctx, sandboxer.ScopeWrite)
	if err != nil {
		return Plan{}, err
	}
	o, err := m.resolve(p, req)
	if err != nil {
		return Plan{}, err
	}
	o, route, err := o.routed(ctx, true, nil)
	if err != nil {
		return Plan{}, err
	}
	if !p.Can(sandboxer.ScopeAdmin) {
		for i := range route {
			route[i].Words = ""
		}
	}
	sb := o.record(1)
	if err := o.boundDisk(sb); err != nil {
		return Plan{}, err
	}
	if err := o.checkSecrets(ctx); err != nil {
		return Plan{}, err
	}
	sb.Quote = o.asked.quote
	plan := Plan{Spec: sb.Spec, Extension: o.ext.Info.ID, Route: route, Quote: sb.Quote, TTL: o.TTL}
	if sb.LivesByUse() {
		plan.TTL = sandboxer.TTLIdle
	}
	plan.Spec.Env = withNames(plan.Spec.Env, o.Secrets)
	plan.Changed = otherwise(o.ext.Info.Isolation, sb.Spec)
	return plan, nil
}

// otherwise lists the differences between the spec and what a backend with this isolation really does.
func otherwise(by []sandboxer.Isolation, s sandboxer.Spec) []string {
	written := slices.ContainsFunc(s.Mounts, func(m sandboxer.Mount) bool { return !m.ReadOnly })
	if written && slices.Equal(by, []sandboxer.Isolation{sandboxer.IsolationGVisor}) {
		return []string{sandboxer.ChangedMounts}
	}
	return nil
}

// freeKey frees c's key if the create under it made nothing and failed with a kind that may pass, so that the same request can
// try again. The key stays while its sandbox is still being removed.
func (c *creation) freeKey(ctx context.Context) error {
	k, err := c.m.store.IdempotencyKey(ctx, c.Tenant, c.Key)
	if isKind(err, sandboxer.NotFound) || err == nil && !c.m.digestMatches(k.Digest, c.Digest) {
		return nil // replay says so
	}
	if err != nil {
		return err
	}
	sb, err := c.m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation)
	if err != nil || sb.State != sandboxer.Terminated || !sb.ReadyAt.IsZero() || !mayPass(sb.Fault) {
		return err
	}
	return c.m.store.Write(ctx, sandboxer.Writes{FreeKey: &k})
}

// mayPass reports whether the same request may succeed after a failure of kind.
func mayPass(kind sandboxer.Kind) bool {
	return kind == sandboxer.Unavailable || kind == sandboxer.Timeout || kind == sandboxer.Exhausted
}

// replay answers with the sandbox that was made under c's key; with nothing if the key is new.
func (c *creation) replay(ctx context.Context) (*sandboxer.Sandbox, error) {
	k, err := c.m.store.IdempotencyKey(ctx, c.Tenant, c.Key)
	switch {
	case isKind(err, sandboxer.NotFound) || err == nil && time.Since(k.At) > keepKeys:
		return nil, nil
	case err != nil:
		return nil, err
	case !c.m.digestMatches(k.Digest, c.Digest):
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the idempotency key %q was used for another request, which made sandbox %s", c.Key, c.m.shownOf(ctx, k)).
			WithHint("use a new key for a new request")
	}
	sb, err := c.m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation)
	if err != nil {
		return nil, err
	}
	// The key of the request that made a sandbox has the sandbox's creation time (idempotency).
	found := !k.At.Equal(sb.CreatedAt)
	if sb.Found = found; c.NoWaiting {
		return sb, failure(sb)
	}
	for sb.State == sandboxer.Creating {
		j, mine, err := c.m.begin(ctx, sb.ID, sb.Generation, true, nil)
		if err != nil {
			return nil, err
		}
		if mine {
			j.run(func(ctx context.Context) (*sandboxer.Sandbox, error) {
				return c.m.resume(ctx, j, k.SandboxID, k.Generation)
			})
		}
		if err := events.Wait(ctx, j.done); err != nil {
			return nil, err
		}
		if sb, err = c.m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation); err != nil {
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
	return c.m.withLastUse(sb), nil
}

// shownOf is the ID that the tenant of k uses for the sandbox that was made under it.
func (m *Manager) shownOf(ctx context.Context, k sandboxer.IdempotencyKey) string {
	if sb, err := m.store.SandboxGeneration(ctx, k.SandboxID, k.Generation); err == nil {
		return sb.Shown()
	}
	return k.SandboxID
}

// failure returns the error with which the creation of sb failed, or nil.
func failure(sb *sandboxer.Sandbox) error {
	switch {
	case sb.Fault != "":
		var cause error
		if sb.Fault == sandboxer.Internal { // no record has it
			cause = fmt.Errorf(`the log has the cause in "create failed" of sandbox=%s generation=%d`, sb.ID, sb.Generation)
		}
		err := sandboxer.E(sb.Fault, cause, "%s", sb.Message)
		err.Hint = sb.Hint
		return err
	case sb.ReadyAt.IsZero() && !sb.EndingAt.IsZero():
		return errTerminating
	}
	return nil
}

// A creation is the work on one request to create or restore a sandbox.
type creation struct {
	m *Manager
	spec.Resolved
	ext     *extension
	asked   *said           // the answer of its backend; nil before it was asked
	trial   *trial          // not nil: this create tries whether its backend works again
	cold    string          // why no sandbox of the profile's pool is used; empty without a pool
	leaving <-chan struct{} // closed when its caller does not wait for room any more; nil: its job knows (job.abandoned)
}

// creation begins the work on r; nil if r is nil.
func (m *Manager) creation(r *spec.Resolved) *creation {
	if r == nil {
		return nil
	}
	return &creation{m: m, Resolved: *r, ext: m.extension(r.Extension)}
}

// record is the sandbox that c asks for, made now, before it is priced.
func (c *creation) record(generation int) *sandboxer.Sandbox {
	return c.Record(generation, now(), renews(c.ext.Backend))
}

// resolve checks a create for p and merges it with its profile. Nothing exists yet.
func (m *Manager) resolve(p sandboxer.Principal, req sandboxer.CreateRequest) (*creation, error) {
	r, err := m.site().Create(p, req)
	return m.creation(r), err
}

// matches reports whether sb is what c asks for, so that c may be answered with it.
func (c *creation) matches(sb *sandboxer.Sandbox) bool {
	env, err := c.m.box(sb).openEnv()
	return err == nil && c.Matches(sb, env)
}

// now is the time in the precision the store keeps.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// Plan is what a create would do.
type Plan struct {
	Spec      sandboxer.Spec          `json:"spec"`
	Extension string                  `json:"extension"`
	Route     []sandboxer.RouteChoice `json:"route"`
	Quote     sandboxer.MeterQuote    `json:"quote"`
	TTL       time.Duration           `json:"ttl_ns"`
	Changed   []string                `json:"changed,omitempty"`
}
