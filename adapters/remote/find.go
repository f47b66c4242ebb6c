package remote

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"iter"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/hosts"
)

// The labels by which our sandboxes are found there: those of hosts.Mark, and these.
const (
	labelPrefix = "dev.sandboxer.remote."
	labelAsked  = labelPrefix + "asked" // askedOf what it was made of
	labelFuse   = labelPrefix + "fuse"  // the one that it was made with, as Unix time
)

// Bounds of the labels of a sandbox, which are those of the API.
const (
	maxLabels = 64
	ownLabels = 6
)

// farID is the ID there of a generation of one of our sandboxes. It differs by generation, so that a late teardown cannot
// end a newer one, and by installation and extension, so that those of two never conflict in one tenant there.
func farID(owner, extension, id string, generation int) string {
	sum := sha256.Sum256([]byte(owner + "\x00" + extension + "\x00" + id + "\x00" + strconv.Itoa(generation)))
	return strings.TrimRight(id[:min(len(id), 28)], "-") + "-" + hex.EncodeToString(sum[:8])
}

// labels are those of spec plus ours.
func (p *peer) labels(spec sandboxer.Spec) (map[string]string, error) {
	out := map[string]string{}
	maps.Copy(out, spec.Labels)
	maps.Copy(out, hosts.Mark{Owner: p.env.Owner, Extension: p.env.Extension, ID: spec.ID, Generation: spec.Generation}.Labels(labelPrefix))
	out[labelAsked] = askedOf(spec)
	if !spec.Fuse.IsZero() {
		out[labelFuse] = strconv.FormatInt(spec.Fuse.Unix(), 10)
	}
	if len(out) > maxLabels {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%s accepts at most %d labels in a request: the server needs the others to identify the owner", p.env.Extension, maxLabels-ownLabels)
	}
	return out, nil
}

// origin is the content of a sandbox's labels.
type origin struct {
	hosts.Mark
	fuse time.Time
}

// originOf reads the labels; ok is false if they are not ours.
func originOf(sb *api.Sandbox) (s origin, ok bool) {
	s.Mark, ok = hosts.ReadMark(labelPrefix, sb.Labels)
	if n, err := strconv.ParseInt(sb.Labels[labelFuse], 10, 64); ok && err == nil {
		s.fuse = time.Unix(n, 0)
	}
	return s, ok
}

// owns reports whether s belongs to owner and this extension.
func (p *peer) owns(s origin, owner string) bool {
	return s.Owner == owner && s.Extension == p.env.Extension
}

// fuseOf is the present fuse of sb. The expiry there differs from the requested one by the time that the request took, and by
// the difference of the clocks.
func (s origin) fuseOf(sb *api.Sandbox) time.Time {
	if !s.fuse.IsZero() && sb.ExpiresAt.Sub(s.fuse).Abs() < time.Minute {
		return s.fuse
	}
	return sb.ExpiresAt
}

// ref names a sandbox or a snapshot there, even if our key sees those of every tenant.
func (p *peer) ref(id string) string { return cmp.Or(p.tenant, sandboxer.DefaultTenant) + "/" + id }

func handleOf(sb *api.Sandbox, id string, generation int) sandboxer.Handle {
	return sandboxer.Handle{SandboxID: id, Generation: generation, Ref: sb.ID}
}

// ended reports whether the sandbox of the record does not exist any more, or will soon not.
func ended(sb *api.Sandbox) bool {
	return sb.State == sandboxer.Terminating || sb.State == sandboxer.Terminated
}

// failure says why a sandbox that ended did.
func (p *peer) failure(sb *api.Sandbox) error {
	if sb.Reason == sandboxer.ReasonFailed && sb.Fault != "" {
		return p.fail(&sandboxer.Error{Kind: kindThere(sb.Fault), Msg: cmp.Or(sb.Message, "the sandbox failed"), Hint: sb.Hint})
	}
	return p.gone(sb)
}

// gone says that a sandbox is not there any more, and why as far as that is known.
func (p *peer) gone(sb *api.Sandbox) error {
	why := cmp.Or(sb.Message, string(sb.Reason), "it ended")
	if sb.Reason == sandboxer.ReasonOOMKilled {
		why = "it used more memory than its limit and was killed"
	}
	return sandboxer.E(sandboxer.NotFound, nil, "%s: sandbox %s is gone: %s", p.name, sb.ID, textThere(why))
}

// find returns the sandbox of h, the newest if it names no generation; one that has ended only if there is no other. Kind:
// NotFound.
func (p *peer) find(ctx context.Context, h sandboxer.Handle) (*api.Sandbox, error) {
	is := func(sb *api.Sandbox) bool {
		s, ok := originOf(sb)
		return ok && p.owns(s, p.env.Owner) && s.ID == h.SandboxID && (h.Generation == 0 || s.Generation == h.Generation)
	}
	var old *api.Sandbox
	if ref := h.Ref; ref != "" || h.Generation != 0 {
		ref = cmp.Or(ref, farID(p.env.Owner, p.env.Extension, h.SandboxID, h.Generation))
		sb, err := p.client.Get(ctx, p.ref(ref))
		switch {
		case err == nil && sb.ID == ref && is(sb):
			if !ended(sb) || h.Ref != "" {
				return sb, nil
			}
			old = sb
		case err != nil && sandboxer.KindOf(err) != sandboxer.NotFound:
			return nil, p.fail(err)
		}
	}
	var found *api.Sandbox
	newest := 0
	for sb, err := range p.live(ctx, p.env.Owner, h.SandboxID) {
		if err != nil {
			return nil, p.fail(err)
		}
		if s, _ := originOf(&sb); is(&sb) && s.Generation > newest {
			found, newest = &sb, s.Generation
		}
	}
	switch {
	case found != nil:
		return found, nil
	case old != nil:
		return old, nil
	}
	return nil, sandboxer.E(sandboxer.NotFound, nil, "%s: there is no sandbox %s", p.name, h.SandboxID)
}

// live lists the live sandboxes with our labels; id may be empty. All of them belong to that owner and have that ID.
func (p *peer) live(ctx context.Context, owner, id string) iter.Seq2[api.Sandbox, error] {
	return func(yield func(api.Sandbox, error) bool) {
		q := api.SandboxQuery{Tenant: p.tenant, Labels: hosts.Mark{Owner: owner, Extension: p.env.Extension, ID: id}.Labels(labelPrefix), Limit: sandboxer.MaxPage}
		if !p.admin {
			q.Tenant = ""
		}
		for sb, err := range api.All(func(cursor string) (*api.List[api.Sandbox], error) {
			q.Cursor = cursor
			return p.client.List(ctx, q)
		}) {
			if err != nil {
				yield(sb, err)
				return
			}
			if s, ok := originOf(&sb); !ok || !p.owns(s, owner) || id != "" && s.ID != id || sandboxer.CheckID(sb.ID) != nil {
				continue
			}
			if !yield(sb, nil) {
				return
			}
		}
	}
}

// use calls f with the reference of the sandbox of h there. A sandbox that has ended there is NotFound, whatever f returns.
func use[T any](ctx context.Context, p *peer, h sandboxer.Handle, f func(ref string) (T, error)) (T, error) {
	var none T
	ref := h.Ref
	if ref == "" {
		sb, err := p.find(ctx, h)
		if err != nil {
			return none, err
		}
		if ended(sb) {
			return none, p.gone(sb)
		}
		ref = sb.ID
	}
	out, err := f(p.ref(ref))
	switch sandboxer.KindOf(err) {
	case "":
		return out, nil
	case sandboxer.Conflict, sandboxer.NotFound:
		switch sb, lookErr := p.find(ctx, h); {
		case sandboxer.KindOf(lookErr) == sandboxer.NotFound:
			return out, lookErr
		case lookErr == nil && ended(sb):
			return out, p.gone(sb)
		}
	}
	return out, p.fail(err)
}

// Discover implements sandboxer.Discoverer.
func (p *peer) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	sb, err := p.find(ctx, sandboxer.Handle{SandboxID: id})
	if err != nil {
		return sandboxer.Found{}, err
	}
	s, _ := originOf(sb)
	if ended(sb) {
		return sandboxer.Found{}, p.gone(sb)
	}
	return sandboxer.Found{Handle: handleOf(sb, s.ID, s.Generation), Fuse: s.fuseOf(sb)}, nil
}

// ListRunning implements sandboxer.Lister.
func (p *peer) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		for sb, err := range p.live(ctx, owner, "") {
			if err != nil {
				yield(sandboxer.Handle{}, p.fail(err))
				return
			}
			if s, _ := originOf(&sb); !yield(handleOf(&sb, s.ID, s.Generation), nil) {
				return
			}
		}
	}
}

// IsAlive implements sandboxer.Prober.
func (p *peer) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	sb, err := p.find(ctx, h)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return sandboxer.Gone, nil
	case err != nil:
		return sandboxer.Unknown, err
	}
	p.mu.Lock()
	torn := p.oom[sb.ID]
	p.mu.Unlock()
	switch {
	case ended(sb) && sb.Reason == sandboxer.ReasonOOMKilled && !torn:
		return sandboxer.OOMKilled, nil
	case sb.State == sandboxer.Terminated:
		return sandboxer.Gone, nil
	case !sb.Unresponsive.IsZero():
		return sandboxer.Unresponsive, nil
	case sb.Unconfirmed != "":
		return sandboxer.Unknown, sandboxer.E(sandboxer.Unavailable, nil, "%s does not know whether %s exists: its database was restored from a backup", p.name, sb.ID)
	}
	return sandboxer.Alive, nil
}

// EstimateCost implements sandboxer.Quoter: what the other installation would charge us.
func (p *peer) EstimateCost(ctx context.Context, spec sandboxer.Spec, duration time.Duration) (*sandboxer.MeterQuote, error) {
	req, err := p.request(ctx, spec)
	if err != nil {
		return nil, err
	}
	req.TTL = max(duration, time.Second)
	plan, err := p.client.Plan(ctx, req)
	if err != nil {
		return nil, p.fail(err)
	}
	q := plan.Quote
	if q.Amount == 0 && q.Setup == 0 && q.PerHour == 0 {
		return nil, nil
	}
	if q.Amount < 0 || q.Setup < 0 || q.PerHour < 0 {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "%s quotes an impossible price", p.name)
	}
	return &sandboxer.MeterQuote{Amount: q.Amount.Std(), Setup: q.Setup.Std(), PerHour: q.PerHour.Std(), Duration: duration, Detail: p.name + ": " + textThere(q.Detail)}, nil
}

// Renew implements sandboxer.Renewer.
func (p *peer) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	extend := func(until time.Time) error {
		_, err := use(ctx, p, h, func(ref string) (*api.Sandbox, error) {
			return p.client.Extend(ctx, ref, api.ExtendSandbox{TTL: ttlUntil(until)})
		})
		return err
	}
	err := extend(until)
	if sandboxer.KindOf(err) != sandboxer.Invalid {
		return err
	}
	// A paused sandbox there is kept for that installation's max_paused, whose default is the same as ours: with
	// what we add to it, it is too long.
	if sb, ferr := p.running(ctx, h); ferr == nil && sb.State == sandboxer.Paused && !sb.ExpiresAt.Before(until.Add(-pausedSlack)) {
		return nil
	}
	return err
}

// pausedSlack is how much earlier than requested a paused sandbox may be removed there. The broker's own
// deadline is two minutes before that, and the clocks of two machines differ.
const pausedSlack = 5 * time.Minute

// Capacity implements sandboxer.CapacityReporter.
func (p *peer) Capacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	c, err := p.client.Probe(ctx, p.main.ext.ID)
	if err != nil {
		return sandboxer.HostCapacity{}, p.fail(err)
	}
	if host == "" {
		return *c, nil
	}
	for _, name := range c.Hosts {
		if name == host {
			return sandboxer.HostCapacity{Free: -1, Hosts: []string{host}}, nil
		}
	}
	return sandboxer.HostCapacity{}, sandboxer.E(sandboxer.NotFound, nil, "%s has no host %.60q", p.name, host)
}
