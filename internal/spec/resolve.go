package spec

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// A Resolved is a create or a restore that was checked, with its profile and its defaults.
type Resolved struct {
	Tenant, Actor string
	ID            string           // of the record and the objects; never empty. One that was chosen is settled later (SetID)
	Shown         string           // the ID that the caller chose, under which a sandbox may exist already; "" if none
	Thread        sandboxer.Thread // whose sandbox it is; its User is not empty then
	Name          string
	Extension     string         // the ID of the extension that makes it
	Spec          sandboxer.Spec // Generation and Fuse are filled in when the record is made
	TTL           time.Duration
	MaxCost       sandboxer.Credits
	Key, Digest   string
	NoWaiting     bool
	Secrets       map[string]sandboxer.SecretRef
	Asked         sandboxer.CreateRequest // a create as it came; zero for a restore, whose ID no other request can ask for

	Place string // where it has to be made, whatever was requested; empty leaves that to its extension

	Routing *Routing // the request on all candidates of its profile

	From *sandboxer.SnapshotRecord // what it is restored from; nil for a new one
	As   sandboxer.SnapshotKind    // in which form
}

// SetID sets the ID for the record and the objects of r.
func (r *Resolved) SetID(id string) { r.ID, r.Spec.ID = id, id }

// Same reports whether other is the same request as r, so that one sandbox can answer both.
func (r *Resolved) Same(other *Resolved) bool {
	return r.Tenant == other.Tenant && !r.IsOther(other.Thread) && r.on(other.Extension).isFulfilledBy(other.Spec, other.Name, other.Spec.Env, other.Secrets)
}

// Matches reports whether sb, whose environment is env, is what r requests, so that sb can answer r.
func (r *Resolved) Matches(sb *sandboxer.Sandbox, env map[string]string) bool {
	return r.Tenant == sb.Tenant && !r.IsOther(sb.Thread) && r.on(sb.Extension).isFulfilledBy(sb.Spec, sb.Name, env, sb.Secrets)
}

// on is r on the candidate with that extension; r itself if there is none.
func (r *Resolved) on(extension string) *Resolved {
	if r.Extension == extension || r.Routing == nil {
		return r
	}
	for _, o := range r.Routing.On {
		if o != nil && o.Extension == extension {
			return o
		}
	}
	return r
}

// IsOther reports whether r is for a thread and the ID belongs to another thread. It is false if r names only the ID, or if the
// sandbox of the ID has no thread.
func (r *Resolved) IsOther(thread sandboxer.Thread) bool {
	none := sandboxer.Thread{}
	return r.Thread != none && thread != none && r.Thread != thread
}

// isFulfilledBy reports whether a sandbox of this spec, name and environment has the profile, the inputs and every other value
// that the request itself names. Values that the request leaves to the profile do not count, because the profile may have
// changed.
func (r *Resolved) isFulfilledBy(spec sandboxer.Spec, name string, env map[string]string, secrets map[string]sandboxer.SecretRef) bool {
	asked := &r.Asked
	has := func(all, some map[string]string) bool {
		for k, v := range some {
			if got, ok := all[k]; !ok || got != v {
				return false
			}
		}
		return true
	}
	for variable, secret := range asked.Secrets {
		if secrets[variable].Name != secret {
			return false
		}
	}
	is := func(want, got int64) bool { return want == 0 || want == got }
	if mine, its := r.Spec.Credential, spec.Credential; mine.Tenant != "" && its.Tenant != "" && mine.Name != its.Name { // another consumer's account
		return false
	}
	return r.Spec.Profile.ID == spec.Profile.ID && maps.Equal(r.Spec.Inputs, spec.Inputs) &&
		(asked.Name == "" || asked.Name == name) &&
		(asked.Image == "" || asked.Image == spec.Image) &&
		(asked.Host == "" || asked.Host == spec.Host) &&
		(asked.User == "" || asked.User == spec.User) &&
		is(int64(asked.Idle), int64(spec.Profile.Idle)) &&
		(asked.TTL != sandboxer.TTLIdle || spec.Profile.TTL == sandboxer.TTLIdle) &&
		(asked.OnIdle == "" || asked.OnIdle == cmp.Or(spec.Profile.OnIdle, sandboxer.ExpiryDestroy)) &&
		(asked.OnTTL == "" || asked.OnTTL == cmp.Or(spec.Profile.OnTTL, sandboxer.ExpiryDestroy)) &&
		(len(asked.Command) == 0 || slices.Equal(asked.Command, spec.Command)) &&
		(asked.Network == nil || asked.Network.Mode == spec.Network.Mode && slices.Equal(asked.Network.Allow, spec.Network.Allow)) &&
		is(asked.Limits.MilliCPU, spec.Limits.MilliCPU) && is(asked.Limits.MemoryBytes, spec.Limits.MemoryBytes) &&
		is(asked.Limits.DiskBytes, spec.Limits.DiskBytes) && is(asked.Limits.PIDs, spec.Limits.PIDs) && is(int64(asked.Limits.GPUs), int64(spec.Limits.GPUs)) &&
		has(spec.Labels, asked.Labels) && has(env, asked.Env) && !overlap(secrets, asked.Env) &&
		!slices.ContainsFunc(asked.Mounts, func(m sandboxer.Mount) bool { return !slices.Contains(spec.Mounts, m) })
}

// Create checks a create for p and merges it with its profile, on the first candidate that can serve it. Nothing
// exists yet.
func (s *Site) Create(p sandboxer.Principal, req sandboxer.CreateRequest) (*Resolved, error) {
	prof, err := FindProfile(s.Profiles, req.Profile)
	if err != nil {
		return nil, err
	}
	if req.Consumer, err = boundConsumer(p, req.Consumer); err != nil {
		return nil, err
	}
	ask := Ask{Inputs: req.Inputs, Host: req.Host, Image: req.Image, Limits: req.Limits, Network: req.Network, MaxCost: req.MaxCost, Words: p.Can(sandboxer.ScopeAdmin)}
	return s.resolve(prof, ask, func(prof sandboxer.Profile, e *Extension) (*Resolved, error) { return s.createOn(p, prof, e, req) })
}

// createOn is Create on one candidate.
func (s *Site) createOn(p sandboxer.Principal, prof sandboxer.Profile, e *Extension, req sandboxer.CreateRequest) (*Resolved, error) {
	v := View{Profile: prof, Inputs: e.Info.Inputs}
	inputs, _, err := v.inputs(req.Inputs, req.Host, req.Image)
	if err != nil {
		return nil, err
	}
	shown, thread, err := identify(inputs, req.Thread)
	if err != nil {
		return nil, err
	}
	if err := s.checkCreate(prof, req); err != nil {
		return nil, err
	}
	if prof, err = withExpiry(prof, req.Idle, req.OnIdle, req.OnTTL); err == nil {
		prof, err = withTTL(prof, req.TTL)
	}
	if err != nil {
		return nil, err
	}
	spec := s.createdSpec(prof, req)
	spec.ID, spec.Inputs = newID(p.Tenant, shown), inputs
	if spec.Credential, err = e.keyFor(p.Tenant, p.Consumer); err != nil {
		return nil, err
	}
	if err := s.allow(p, e, &spec, req); err != nil {
		return nil, err
	}
	return &Resolved{
		Tenant: p.Tenant, Actor: p.Actor, ID: spec.ID, Shown: shown, Thread: thread, Name: req.Name, Extension: e.Info.ID, Spec: spec,
		TTL: lifecycle.LifeOf(prof, req.TTL), MaxCost: req.MaxCost, Secrets: secretRefs(p.Tenant, req.Secrets),
		Key: req.Key, Digest: s.kept(createDigest(req)), NoWaiting: req.NoWaiting, Asked: req,
	}, nil
}

// checkCreate refuses what no caller may ask of the profile.
func (s *Site) checkCreate(prof sandboxer.Profile, req sandboxer.CreateRequest) error {
	return cmp.Or(
		s.mayPause(prof.Extension, req.OnIdle, req.OnTTL),
		checkCommon(prof, commonRequest{name: req.Name, key: req.Key, ttl: req.TTL, env: req.Env, labels: req.Labels, maxCost: req.MaxCost}),
		req.Limits.Check(),
		s.checkNetwork(prof.Network, req.Network),
		checkMounts(prof, req.Mounts),
		checkSecrets(prof, req),
		checkUser(req.User),
		checkSize(req),
	)
}

// createdSpec is the spec of the profile with the values of the request. ID, Inputs and Vouched are not set yet.
func (s *Site) createdSpec(prof sandboxer.Profile, req sandboxer.CreateRequest) sandboxer.Spec {
	spec := s.ProfileSpec(prof)
	spec.Host, spec.Consumer = req.Host, req.Consumer
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
	return spec
}

// allow sets in spec the restricted values that p vouches for, and refuses those that p may not have.
func (s *Site) allow(p sandboxer.Principal, e *Extension, spec *sandboxer.Spec, req sandboxer.CreateRequest) error {
	if p.Can(sandboxer.ScopeAdmin) {
		spec.Vouched = e.Restricted(*spec)
	} else {
		spec.Vouched = vouched(p, e.Restricted(*spec))
		if err := req.Limits.Within(s.ceilings(*spec), "profile "+spec.Profile.ID); err != nil {
			return err
		}
	}
	if len(req.Mounts) == 0 { // the profile's need no voucher, and making the sandbox checks them
		return nil
	}
	return s.admitMounts(*spec)
}

// kept turns the digest of a request into its stored form.
func (s *Site) kept(digest string) string {
	if s.MAC == nil {
		return digest
	}
	return s.MAC(digest)
}

// Restricted returns the names of the restricted values in spec, for which an operator may have to vouch.
func (e Extension) Restricted(spec sandboxer.Spec) (names []string) {
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

// vouched returns those of names for which the front door of p vouches.
func vouched(p sandboxer.Principal, names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !slices.Contains(p.Vouches, n) })
}

// keptRestrictions returns the restricted values of spec that are unchanged since an administrator gave them to the sandbox
// old.
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

// ProfileSpec is the spec of a sandbox of the profile if the request names no values. It has no inputs.
func (s *Site) ProfileSpec(prof sandboxer.Profile) sandboxer.Spec {
	spec := sandboxer.Spec{
		Owner: s.Owner, Profile: prof, Image: prof.Image, Command: prof.Command, Env: prof.Env, Labels: prof.Labels,
		Limits: prof.Limits, Network: prof.Network, Mounts: prof.Mounts, Ports: prof.Ports, Workspace: prof.Workspace, User: prof.User,
	}
	spec.Profile.Env = nil // its values are in Env, which is sealed
	return spec
}

// PoolSpec is ProfileSpec for a sandbox that waits in the pool of the profile. Denied: the extension needs a key of each
// tenant.
func (s *Site) PoolSpec(prof sandboxer.Profile) (spec sandboxer.Spec, err error) {
	spec = s.ProfileSpec(prof)
	spec.Credential, err = s.extension(prof.Extension).keyFor("", "")
	return spec, err
}

// identify returns the ID that the caller chose, and the thread. The ID comes from the input sandbox_id or from the thread;
// both must agree. It removes the ID from the inputs.
func identify(inputs map[string]string, thread sandboxer.Thread) (shown string, _ sandboxer.Thread, err error) {
	shown = inputs["sandbox_id"]
	delete(inputs, "sandbox_id")
	none := sandboxer.Thread{}
	if shown != "" {
		if err := sandboxer.CheckID(shown); err != nil {
			return "", none, err
		}
		if sandboxer.IsDerivedID(shown) {
			return "", none, sandboxer.E(sandboxer.Invalid, nil, "%q cannot be chosen: the server itself makes IDs of this form", shown).
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

// newID is the ID for the record and the objects of a sandbox of tenant. shown is the ID that the caller chose, or "".
func newID(tenant, shown string) string {
	if shown == "" {
		return sandboxer.NewID()
	}
	return sandboxer.ObjectID(tenant, shown)
}

// inputs merges the inputs of the request with those of the profile and the defaults, and checks them against the inputs that
// the extension declares. why classifies the refusal that an error is. host and image are those of the request.
func (v *View) inputs(asked map[string]string, host, image string) (merged map[string]string, why sandboxer.RouteReason, err error) {
	declared, id := v.Inputs, v.Profile.Extension
	image = cmp.Or(image, v.Profile.Image)
	known := []string{"sandbox_id"}
	for _, in := range declared {
		if in.Name != known[0] {
			known = append(known, in.Name)
		}
	}
	merged = map[string]string{}
	for _, in := range declared {
		if in.Default != "" && in.Name != sandboxer.AnyInput {
			merged[in.Name] = in.Default
		}
	}
	maps.Copy(merged, v.Profile.Inputs)
	maps.Copy(merged, asked)
	for _, k := range slices.Sorted(maps.Keys(merged)) {
		if _, ok := sandboxer.DeclarationOf(declared, k); !ok && k != known[0] {
			return nil, sandboxer.WhyUnknownInput, sandboxer.E(sandboxer.Invalid, nil, "%s does not take the input %q%s", id, k, suggest.DidYouMean(k, known)).
				WithHint("its inputs are: %s", suggest.List(known))
		}
		if err := sandboxer.CheckInputName(k); err != nil {
			return nil, sandboxer.WhyInvalid, err
		}
		if err := checkURL(k, merged[k]); err != nil {
			return nil, sandboxer.WhyInvalid, err
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
			return nil, sandboxer.WhyMissingInput, sandboxer.E(sandboxer.Invalid, nil, "%s needs the input %q: %s", id, in.Name, in.Help).
				WithHint("add --input %s=…", in.Name)
		}
		if in.OneOf != "" {
			groups[in.OneOf] = append(groups[in.OneOf], in.Name)
		}
	}
	for _, g := range slices.Sorted(maps.Keys(groups)) {
		if host == "" && image == "" && !slices.ContainsFunc(groups[g], func(name string) bool { return merged[name] != "" }) {
			return nil, sandboxer.WhyMissingInput, sandboxer.E(sandboxer.Invalid, nil, "%s needs one of the inputs %s", id, suggest.List(groups[g])).
				WithHint("add --input %s=…", groups[g][0])
		}
	}
	return merged, "", nil
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

// Outlives reports whether r asks for a time to live that ends, counted from at, after sb does.
func (r *Resolved) Outlives(sb *sandboxer.Sandbox, at time.Time) bool {
	return r.Asked.TTL > 0 && at.Add(r.Asked.TTL).After(sb.ExpiresAt)
}

// Idempotency is the idempotency key of r, with the time of creation of the sandbox, which marks r as the request that made it;
// nil if r has no key.
func (r *Resolved) Idempotency(sb *sandboxer.Sandbox) *sandboxer.IdempotencyKey {
	if r.Key == "" {
		return nil
	}
	return &sandboxer.IdempotencyKey{
		Tenant: r.Tenant, Key: r.Key, Digest: r.Digest, SandboxID: sb.ID, Generation: sb.Generation, At: sb.CreatedAt,
	}
}

// Record is the record of the sandbox that r requests, made at the time at and without a price. renews says whether the
// backend's deadline can be moved.
func (r *Resolved) Record(generation int, at time.Time, renews bool) *sandboxer.Sandbox {
	sb := &sandboxer.Sandbox{
		ID: r.ID, Generation: generation, Name: r.Name, Tenant: r.Tenant, Thread: r.Thread,
		Profile: r.Spec.Profile.ID, Extension: r.Extension, Host: cmp.Or(r.Place, r.Spec.Host), Consumer: r.Spec.Consumer,
		State: sandboxer.Creating, Spec: r.Spec, Secrets: r.Secrets, MaxCost: r.MaxCost, CreatedAt: at, ExpiresAt: at.Add(r.TTL),
	}
	if r.Shown != r.ID {
		sb.ShownID = r.Shown
	}
	sb.Spec.Generation = generation
	sb.Spec.Fuse = lifecycle.FirstFuse(sb.Spec.Profile, at, sb.ExpiresAt, renews)
	for _, p := range r.Spec.Ports {
		sb.Opened = append(sb.Opened, sandboxer.OpenPort{Port: p, Rev: 1})
	}
	if r.From != nil {
		sb.RestoredFrom, sb.RestoredAs = r.From.ID, r.As
	}
	return sb
}
