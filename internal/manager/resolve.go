package manager

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// fuseMargin is how much longer than we a backend keeps a sandbox before it removes
// it by itself: long enough for a broker that lives to be first, short enough to
// bound what a dead broker costs.
const fuseMargin = 2 * time.Minute

// fuseStep is by how much the fuse of a sandbox that lives as long as it is used is moved at least, and so
// how often at most.
const fuseStep = time.Minute

// marginOf is how much longer than we the backend keeps a sandbox of the profile.
func marginOf(p sandboxer.Profile) time.Duration {
	if pauses(p) {
		return fuseMargin + stuckAfter // it must not remove it while it is being paused
	}
	return fuseMargin
}

// firstFuse is the fuse of an object that is made from then on, for a sandbox of the profile that expires at
// end. That of one that lives as long as it is used follows its use (keepFuse), where the backend can.
func firstFuse(b *backend.Backend, p sandboxer.Profile, from, end time.Time) time.Time {
	if soon := from.Add(stuckAfter + p.Idle + fuseStep); p.TTL == sandboxer.TTLIdle && b != nil && b.Can(sandboxer.CanRenew) && soon.Before(end) {
		end = soon
	}
	return end.Add(marginOf(p))
}

// A resolvedRequest is a checked create or restore.
type resolvedRequest struct {
	tenant, actor string
	id            string           // of the record and the objects; never empty. Of a chosen one see settleID
	shown         string           // the ID that the caller chose, under which a sandbox may exist already; "" if none
	thread        sandboxer.Thread // whose sandbox it is; its User is not empty then
	name          string
	ext           *extension
	spec          sandboxer.Spec // Generation, Owner, Fuse are filled in when the record is made
	ttl           time.Duration
	maxCost       sandboxer.Credits
	key, digest   string
	noWaiting     bool
	req           sandboxer.CreateRequest // a create as it came; zero for a restore, whose ID nobody else can ask for

	cold string // why it is not answered from the pool of its profile; empty without one

	leaving <-chan struct{} // closed when its caller does not wait for room any more; nil: his job knows (job.abandoned)

	place string // where it has to be made, whoever asked for what; empty leaves that to its extension

	from *sandboxer.SnapshotRecord // what it is restored from; nil for a new one
	as   sandboxer.SnapshotKind    // in which form
}

// setID settles what the record and the objects of o carry.
func (o *resolvedRequest) setID(id string) { o.id, o.spec.ID = id, id }

// matches reports whether sb is what o asks for, so that o may be answered with it.
func (m *Manager) matches(o *resolvedRequest, sb *sandboxer.Sandbox) bool {
	env, err := m.openEnv(sb)
	return err == nil && o.tenant == sb.Tenant && !o.isOther(sb.Thread) && o.isFulfilledBy(sb.Spec, sb.Name, env)
}

// same is matches for two requests.
func (o *resolvedRequest) same(p *resolvedRequest) bool {
	return o.tenant == p.tenant && !o.isOther(p.thread) && o.isFulfilledBy(p.spec, p.name, p.spec.Env)
}

// isOther reports whether o asks for another thread than has the ID. Who names only the ID, or
// finds one that no thread has, is no other.
func (o *resolvedRequest) isOther(thread sandboxer.Thread) bool {
	none := sandboxer.Thread{}
	return o.thread != none && thread != none && o.thread != thread
}

// isFulfilledBy reports whether a sandbox of this spec, name and environment has the
// profile and the inputs that o asks for, and whatever else the request itself names.
// What it leaves to the profile does not count: the profile may be another by now.
func (o *resolvedRequest) isFulfilledBy(spec sandboxer.Spec, name string, env map[string]string) bool {
	r := &o.req
	has := func(all, some map[string]string) bool {
		for k, v := range some {
			if got, ok := all[k]; !ok || got != v {
				return false
			}
		}
		return true
	}
	is := func(asked, got int64) bool { return asked == 0 || asked == got }
	return o.spec.Profile.ID == spec.Profile.ID && maps.Equal(o.spec.Inputs, spec.Inputs) &&
		(r.Name == "" || r.Name == name) &&
		(r.Image == "" || r.Image == spec.Image) &&
		(r.Host == "" || r.Host == spec.Host) &&
		(r.User == "" || r.User == spec.User) &&
		is(int64(r.Idle), int64(spec.Profile.Idle)) &&
		(r.TTL != sandboxer.TTLIdle || spec.Profile.TTL == sandboxer.TTLIdle) &&
		(r.OnIdle == "" || r.OnIdle == cmp.Or(spec.Profile.OnIdle, sandboxer.ExpiryDestroy)) &&
		(r.OnTTL == "" || r.OnTTL == cmp.Or(spec.Profile.OnTTL, sandboxer.ExpiryDestroy)) &&
		(len(r.Command) == 0 || slices.Equal(r.Command, spec.Command)) &&
		(r.Network == nil || r.Network.Mode == spec.Network.Mode && slices.Equal(r.Network.Allow, spec.Network.Allow)) &&
		is(r.Limits.MilliCPU, spec.Limits.MilliCPU) && is(r.Limits.MemoryBytes, spec.Limits.MemoryBytes) &&
		is(r.Limits.DiskBytes, spec.Limits.DiskBytes) && is(r.Limits.PIDs, spec.Limits.PIDs) && is(int64(r.Limits.GPUs), int64(spec.Limits.GPUs)) &&
		has(spec.Labels, r.Labels) && has(env, r.Env) &&
		!slices.ContainsFunc(r.Mounts, func(m sandboxer.Mount) bool { return !slices.Contains(spec.Mounts, m) })
}

// resolve checks a create for p and merges it with its profile. Nothing exists yet.
func (m *Manager) resolve(p sandboxer.Principal, req sandboxer.CreateRequest) (*resolvedRequest, error) {
	prof, err := m.profile(req.Profile)
	if err != nil {
		return nil, err
	}
	ext, err := m.extensionFor(prof)
	if err != nil {
		return nil, err
	}
	inputs, err := ext.inputs(prof, req.Inputs, req.Host, cmp.Or(req.Image, prof.Image))
	if err != nil {
		return nil, err
	}
	shown, thread, err := identify(inputs, req.Thread)
	if err != nil {
		return nil, err
	}
	id := newID(p.Tenant, shown)
	for _, err := range []error{
		m.mayPause(prof.Extension, req.OnIdle, req.OnTTL), checkCommon(prof, commonRequest{req.Name, req.Key, req.TTL, req.Env, req.Labels, req.MaxCost}),
		req.Limits.Check(), m.checkNetwork(prof.Network, req.Network), checkMounts(prof, req.Mounts), checkUser(req.User), checkSize(req),
	} {
		if err != nil {
			return nil, err
		}
	}
	if prof, err = withExpiry(prof, req.Idle, req.OnIdle, req.OnTTL); err == nil {
		prof, err = withTTL(prof, req.TTL)
	}
	if err != nil {
		return nil, err
	}
	spec := m.profileSpec(prof)
	spec.ID, spec.Inputs, spec.Host, spec.Consumer = id, inputs, req.Host, req.Consumer
	spec.Image = cmp.Or(req.Image, prof.Image)
	spec.User = cmp.Or(req.User, prof.User)
	spec.Env = merge(prof.Env, req.Env)
	spec.Labels = merge(prof.Labels, req.Labels)
	spec.Mounts = slices.Concat(prof.Mounts, req.Mounts)
	if len(req.Command) > 0 {
		spec.Command = req.Command
	}
	if req.Network != nil {
		spec.Network = *req.Network
	}
	spec.Limits = req.Limits.Or(spec.Limits)
	if p.Can(sandboxer.ScopeAdmin) {
		spec.Vouched = ext.restricted(spec)
	} else {
		spec.Vouched = vouched(p, ext.restricted(spec))
		if err := req.Limits.Within(m.ceilings(spec), "profile "+prof.ID); err != nil {
			return nil, err
		}
	}
	if len(req.Mounts) > 0 { // the profile's need nobody else, and whoever makes them tells
		if err := m.admitMounts(spec); err != nil {
			return nil, err
		}
	}
	return &resolvedRequest{
		tenant: p.Tenant, actor: p.Actor, id: id, shown: shown, thread: thread, name: req.Name, ext: ext, spec: spec,
		ttl: lifeOf(prof, req.TTL), maxCost: req.MaxCost,
		key: req.Key, digest: m.mac(digest(req)), noWaiting: req.NoWaiting, req: req,
	}, nil
}

// extensionFor finds the extension that serves a profile. Kind: Unavailable.
func (m *Manager) extensionFor(prof sandboxer.Profile) (*extension, error) {
	var abilities []ability
	for _, e := range m.extensions() {
		abilities = append(abilities, e.ability())
	}
	chosen, refused := route(prof, abilities)
	if len(chosen) == 0 {
		why := "no extension can serve it"
		for _, c := range refused {
			if c.extension == prof.Extension {
				why = c.why
			}
		}
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "profile %s cannot be used: %s", prof.ID, why)
	}
	return m.extension(chosen[0].extension), nil
}

// restricted names what of spec an operator may have to stand for.
func (e *extension) restricted(spec sandboxer.Spec) (names []string) {
	for name, value := range spec.Inputs {
		if in, ok := sandboxer.DeclarationOf(e.Info.Inputs, name); ok && in.Restricted && value != "" {
			names = append(names, name)
		}
	}
	if spec.Image != "" {
		names = append(names, sandboxer.RestrictedImage)
	}
	if spec.Host != "" {
		names = append(names, sandboxer.RestrictedHost)
	}
	if len(spec.Mounts) > 0 {
		names = append(names, sandboxer.RestrictedMounts)
	}
	slices.Sort(names)
	return names
}

// vouched are those of names that somebody stands for who let p in.
func vouched(p sandboxer.Principal, names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !slices.Contains(p.Vouches, n) })
}

// keptRestrictions are those of the restricted values of spec that an administrator gave to the
// sandbox of old and that are the same still.
func keptRestrictions(spec, old sandboxer.Spec) (names []string) {
	for _, n := range old.Vouched {
		same := spec.Inputs[n] != "" && spec.Inputs[n] == old.Inputs[n]
		if n == sandboxer.RestrictedImage {
			same = spec.Image == old.Image
		}
		if same && n != sandboxer.RestrictedHost && n != sandboxer.RestrictedMounts {
			names = append(names, n)
		}
	}
	return names
}

// profileSpec is what a sandbox of the profile is made of when its request names nothing, and
// without the inputs.
func (m *Manager) profileSpec(prof sandboxer.Profile) sandboxer.Spec {
	spec := sandboxer.Spec{
		Owner: m.opts.Owner, Profile: prof, Image: prof.Image, Command: prof.Command, Env: prof.Env, Labels: prof.Labels,
		Limits: prof.Limits, Network: prof.Network, Mounts: prof.Mounts, Ports: prof.Ports, Workspace: prof.Workspace, User: prof.User,
	}
	spec.Profile.Env = nil // its values are in Env, which is sealed
	return spec
}

// identify returns the ID that the caller chose, by the input sandbox_id or by a thread or by both
// where they agree, and the thread. It takes the ID out of the inputs.
func identify(inputs map[string]string, thread sandboxer.Thread) (shown string, _ sandboxer.Thread, err error) {
	shown = inputs["sandbox_id"]
	delete(inputs, "sandbox_id")
	none := sandboxer.Thread{}
	if shown != "" {
		if err := sandboxer.CheckID(shown); err != nil {
			return "", none, err
		}
		if sandboxer.IsDerivedID(shown) {
			return "", none, sandboxer.E(sandboxer.Invalid, nil, "%q has the form of the IDs that the broker derives, which nobody can choose", shown).
				WithHint("choose another sandbox_id")
		}
	}
	if thread.ID == "" {
		if thread.User != "" {
			return "", none, sandboxer.E(sandboxer.Invalid, nil, "thread user %q is given without a thread", thread.User).
				WithHint("give the thread's ID too, or no thread at all")
		}
		return shown, none, nil
	}
	id, err := thread.SandboxID()
	if err != nil {
		return "", none, err
	}
	if shown != "" && shown != id {
		return "", none, sandboxer.E(sandboxer.Invalid, nil, "the input sandbox_id is %s, and the thread has the ID %s", shown, id).
			WithHint("leave out one of them, or let the input be %s", id)
	}
	thread.User = cmp.Or(thread.User, sandboxer.DefaultUser)
	return id, thread, nil
}

// newID is the ID for the record and the objects of a sandbox for which a caller of tenant chose
// shown, or nothing.
func newID(tenant, shown string) string {
	if shown == "" {
		return sandboxer.NewID()
	}
	return sandboxer.ObjectID(tenant, shown)
}

// inputs merges what is asked for with the profile's and the defaults, and checks it against what
// the extension declares. host and image are those of the request.
func (e *extension) inputs(prof sandboxer.Profile, asked map[string]string, host, image string) (map[string]string, error) {
	declared := e.Info.Inputs
	known := []string{"sandbox_id"}
	for _, in := range declared {
		if in.Name != known[0] {
			known = append(known, in.Name)
		}
	}
	merged := map[string]string{}
	for _, in := range declared {
		if in.Default != "" && in.Name != sandboxer.AnyInput {
			merged[in.Name] = in.Default
		}
	}
	maps.Copy(merged, prof.Inputs)
	maps.Copy(merged, asked)
	for _, k := range slices.Sorted(maps.Keys(merged)) {
		if _, ok := sandboxer.DeclarationOf(declared, k); !ok && k != known[0] {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s does not take the input %q%s", e.Info.ID, k, didYouMean(k, known)).
				WithHint("its inputs are: %s", join(known))
		}
		if err := sandboxer.CheckInputName(k); err != nil {
			return nil, err
		}
		if err := checkURL(k, merged[k]); err != nil {
			return nil, err
		}
		if merged[k] == "" {
			delete(merged, k) // given as nothing is not given
		}
	}
	groups := map[string][]string{}
	for _, in := range declared {
		if in.Name == sandboxer.AnyInput {
			continue
		}
		if in.Required && merged[in.Name] == "" {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s needs the input %q: %s", e.Info.ID, in.Name, in.Help).
				WithHint("add --input %s=…", in.Name)
		}
		if in.OneOf != "" {
			groups[in.OneOf] = append(groups[in.OneOf], in.Name)
		}
	}
	for _, g := range slices.Sorted(maps.Keys(groups)) {
		if host == "" && image == "" && !slices.ContainsFunc(groups[g], func(name string) bool { return merged[name] != "" }) {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s needs one of the inputs %s", e.Info.ID, join(groups[g])).
				WithHint("add --input %s=…", groups[g][0])
		}
	}
	return merged, nil
}

// lifeOf is how long a sandbox lives at most for which ttl was asked, or nothing.
func lifeOf(p sandboxer.Profile, ttl time.Duration) time.Duration {
	if ttl > 0 {
		return ttl
	}
	return ttlOf(p)
}

func ttlOf(p sandboxer.Profile) time.Duration {
	if p.TTL == sandboxer.TTLIdle {
		return maxTTL(p)
	}
	return cmp.Or(p.TTL, min(sandboxer.DefaultTTL, maxTTL(p)))
}

func maxTTL(p sandboxer.Profile) time.Duration {
	return cmp.Or(p.MaxTTL, max(sandboxer.DefaultMaxTTL, p.TTL))
}

func merge(a, b map[string]string) map[string]string {
	if len(a)+len(b) == 0 {
		return nil
	}
	out := maps.Clone(a)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, b)
	return out
}

// didYouMean returns `; did you mean "x"?` for the word nearest to got, or "". The prefix
// of an ID may be missing.
func didYouMean(got string, words []string) string {
	best := suggest.Nearest(got, words)
	if best == "" {
		short := make([]string, len(words))
		for i, w := range words {
			short[i] = w[strings.IndexByte(w, '.')+1:]
		}
		if n := suggest.Nearest(got, short); n != "" {
			best = words[slices.Index(short, n)]
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + strconv.Quote(best) + "?"
}
