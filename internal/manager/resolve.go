package manager

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// fuseMargin is how much longer than we a backend keeps a sandbox before it removes
// it by itself: long enough for a broker that lives to be first, short enough to
// bound what a dead broker costs.
const fuseMargin = 2 * time.Minute

// A resolvedRequest is a checked create or restore.
type resolvedRequest struct {
	tenant, actor string
	id            string // never empty
	chosen        bool   // the caller chose the ID, so it may exist already
	name          string
	ext           *extension
	spec          sandboxer.Spec // Generation, Owner, Fuse are filled in when the record is made
	ttl           time.Duration
	maxCost       sandboxer.Credits
	key, digest   string
	noWaiting     bool
	req           sandboxer.CreateRequest // a create as it came; zero for a restore, whose ID nobody else can ask for

	cold string // why it is not answered from the pool of its profile; empty without one

	place string // where it has to be made, whoever asked for what; empty leaves that to its extension

	from *sandboxer.SnapshotRecord // what it is restored from; nil for a new one
	as   sandboxer.SnapshotKind    // in which form
}

// matches reports whether sb is what o asks for, so that o may be answered with it.
func (m *Manager) matches(o *resolvedRequest, sb *sandboxer.Sandbox) bool {
	env, err := m.openEnv(sb)
	return err == nil && o.tenant == sb.Tenant && o.isFulfilledBy(sb.Spec, sb.Name, env)
}

// same is matches for two requests.
func (o *resolvedRequest) same(p *resolvedRequest) bool {
	return o.tenant == p.tenant && o.isFulfilledBy(p.spec, p.name, p.spec.Env)
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
		(len(r.Command) == 0 || slices.Equal(r.Command, spec.Command)) &&
		(r.Network == nil || r.Network.Mode == spec.Network.Mode && slices.Equal(r.Network.Allow, spec.Network.Allow)) &&
		is(r.Limits.MilliCPU, spec.Limits.MilliCPU) && is(r.Limits.MemoryBytes, spec.Limits.MemoryBytes) &&
		is(r.Limits.DiskBytes, spec.Limits.DiskBytes) && is(r.Limits.PIDs, spec.Limits.PIDs) && is(int64(r.Limits.GPUs), int64(spec.Limits.GPUs)) &&
		has(spec.Labels, r.Labels) && has(env, r.Env) &&
		!slices.ContainsFunc(r.Mounts, func(m sandboxer.Mount) bool { return !slices.Contains(spec.Mounts, m) })
}

// macPrefix begins a digest that is kept; older ones have none.
const macPrefix = "hmac-"

// mac is what is kept of a digest. The environment of the request is in it, which nobody
// who reads the database shall be able to guess: it is made with the installation's key.
func (m *Manager) mac(digest string) string {
	return macPrefix + hex.EncodeToString(keyedDigest(m.opts.Key, "sandboxer idempotency", []byte(digest)))
}

// keyedDigest digests data with the installation's key, for one purpose: who reads the digest
// cannot try what it is of.
func keyedDigest(key []byte, purpose string, data []byte) []byte {
	derived := hmac.New(sha256.New, key)
	derived.Write([]byte(purpose))
	mac := hmac.New(sha256.New, derived.Sum(nil))
	mac.Write(data)
	return mac.Sum(nil)
}

// same reports whether what was kept, perhaps by an older version, is of the request with
// this digest.
func (m *Manager) same(kept, digest string) bool {
	if !strings.HasPrefix(kept, macPrefix) {
		kept = m.mac(kept)
	}
	return hmac.Equal([]byte(kept), []byte(digest))
}

// digest identifies a request under an idempotency key. What says how to answer, not
// what to make, does not count.
func digest(req sandboxer.CreateRequest) string { return digestOf("", req) }

// restoreDigest is digest for a restore of one snapshot.
func restoreDigest(snapshot string, req RestoreRequest) string {
	return digestOf(snapshot+"\x00", req)
}

// forkDigest is digest for a fork of one sandbox.
func forkDigest(sandbox string, req ForkRequest) string {
	return digestOf("fork\x00"+sandbox+"\x00", req)
}

// digestOf digests what is said of what is asked for, and the request. Digests are kept for
// a day, and those of former builds must be found again: they are made of a form that wrote
// durations as nanoseconds, under names that said so, and money as a number.
func digestOf(what string, req any) string {
	v := reflect.ValueOf(req)
	fields := reflect.VisibleFields(v.Type())
	for i, f := range fields {
		if f.Type == reflect.TypeFor[time.Duration]() {
			name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
			fields[i].Tag = reflect.StructTag(fmt.Sprintf("json:%q", name+"_ns,"+opts))
		}
	}
	j, err := json.Marshal(v.Convert(reflect.StructOf(fields)).Interface()) // sorts maps; Key and NoWaiting have no JSON
	if err != nil {
		panic(err) // plain data always encodes
	}
	sum := sha256.Sum256(append([]byte(what), j...))
	return hex.EncodeToString(sum[:])
}

// profile finds a profile by its ID, with or without the prefix.
func (m *Manager) profile(id string) (sandboxer.Profile, error) {
	var ids []string
	for _, p := range m.catalogue.Load().profiles {
		if p.ID == id || p.ID == "profile."+id {
			return p, nil
		}
		ids = append(ids, p.ID)
	}
	if id == "" {
		return sandboxer.Profile{}, sandboxer.E(sandboxer.Invalid, nil, "no profile given").WithHint("choose one of: %s", join(ids))
	}
	return sandboxer.Profile{}, sandboxer.E(sandboxer.Invalid, nil, "profile %q does not exist%s", id, didYouMean(id, ids)).
		WithHint("the profiles are: %s", join(ids))
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
	inputs, err := ext.inputs(prof, req.Inputs)
	if err != nil {
		return nil, err
	}
	id, chosen, err := identify(inputs, req.Thread)
	if err != nil {
		return nil, err
	}
	for _, err := range []error{
		checkCommon(prof, commonRequest{req.Name, req.Key, req.TTL, req.Env, req.Labels, req.MaxCost}),
		req.Limits.Check(), m.checkNetwork(prof.Network, req.Network), checkMounts(p, prof, req.Mounts), checkUser(req.User), checkSize(req),
	} {
		if err != nil {
			return nil, err
		}
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
	} else if err := req.Limits.Within(m.ceilings(spec), "profile "+prof.ID); err != nil {
		return nil, err
	}
	return &resolvedRequest{
		tenant: p.Tenant, actor: p.Actor, id: id, chosen: chosen, name: req.Name, ext: ext, spec: spec,
		ttl: cmp.Or(req.TTL, ttlOf(prof)), maxCost: req.MaxCost,
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

// commonRequest is what creates and restores may both ask for and is checked alike.
type commonRequest struct {
	name, key   string
	ttl         time.Duration
	env, labels map[string]string
	maxCost     sandboxer.Credits
}

func checkCommon(prof sandboxer.Profile, c commonRequest) error {
	for _, err := range []error{checkName(c.name), checkKey(c.key), checkTTL(prof, c.ttl), checkEnv(c.env), checkLabels(c.labels)} {
		if err != nil {
			return err
		}
	}
	if c.maxCost < 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "max_cost %s is negative", c.maxCost)
	}
	return nil
}

// restricted names what of spec an operator may have to stand for.
func (e *extension) restricted(spec sandboxer.Spec) (names []string) {
	for _, in := range e.Info.Inputs {
		if in.Restricted && spec.Inputs[in.Name] != "" {
			names = append(names, in.Name)
		}
	}
	if spec.Image != "" {
		names = append(names, sandboxer.RestrictedImage)
	}
	if spec.Host != "" {
		names = append(names, sandboxer.RestrictedHost)
	}
	slices.Sort(names)
	return names
}

// inherited are those of the restricted values of spec that an administrator gave to the
// sandbox of old and that are the same still.
func inherited(spec, old sandboxer.Spec) (names []string) {
	for _, n := range old.Vouched {
		same := spec.Inputs[n] != "" && spec.Inputs[n] == old.Inputs[n]
		if n == sandboxer.RestrictedImage {
			same = spec.Image == old.Image
		}
		if same && n != sandboxer.RestrictedHost {
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

// identify settles the ID: the caller's, the thread's, or a fresh one. It takes it out of
// the inputs.
func identify(inputs map[string]string, thread sandboxer.Thread) (id string, chosen bool, err error) {
	id = inputs["sandbox_id"]
	delete(inputs, "sandbox_id")
	switch {
	case id != "" && thread != (sandboxer.Thread{}):
		return "", false, sandboxer.E(sandboxer.Invalid, nil, "both the input sandbox_id and a thread say which sandbox is meant").
			WithHint("give one of them")
	case id != "":
		return id, true, sandboxer.CheckID(id)
	case thread.ID != "":
		id, err = thread.SandboxID()
		return id, true, err
	case thread.User != "":
		return "", false, sandboxer.E(sandboxer.Invalid, nil, "thread user %q is given without a thread", thread.User).
			WithHint("give the thread's ID too, or no thread at all")
	}
	return sandboxer.NewID(), false, nil
}

// inputs merges what is asked for with the profile's and the defaults, and checks it against what
// the extension declares.
func (e *extension) inputs(prof sandboxer.Profile, asked map[string]string) (map[string]string, error) {
	declared := e.Info.Inputs
	known := []string{"sandbox_id"}
	for _, in := range declared {
		if in.Name != known[0] {
			known = append(known, in.Name)
		}
	}
	merged := map[string]string{}
	for _, in := range declared {
		if in.Default != "" {
			merged[in.Name] = in.Default
		}
	}
	maps.Copy(merged, prof.Inputs)
	maps.Copy(merged, asked)
	for _, k := range slices.Sorted(maps.Keys(merged)) {
		if !slices.Contains(known, k) {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s does not take the input %q%s", e.Info.ID, k, didYouMean(k, known)).
				WithHint("its inputs are: %s", join(known))
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
		if in.Required && merged[in.Name] == "" {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s needs the input %q: %s", e.Info.ID, in.Name, in.Help).
				WithHint("add --input %s=…", in.Name)
		}
		if in.OneOf != "" {
			groups[in.OneOf] = append(groups[in.OneOf], in.Name)
		}
	}
	for _, g := range slices.Sorted(maps.Keys(groups)) {
		if !slices.ContainsFunc(groups[g], func(name string) bool { return merged[name] != "" }) {
			return nil, sandboxer.E(sandboxer.Invalid, nil, "%s needs one of the inputs %s", e.Info.ID, join(groups[g])).
				WithHint("add --input %s=…", groups[g][0])
		}
	}
	return merged, nil
}

// checkURL refuses a secret in the address of a repository: it would end up in the
// record, in logs and in the arguments of git. A bare user name is no secret over
// SSH; over HTTP it is the usual place of a token.
func checkURL(name, value string) error {
	u, err := url.Parse(value)
	if err != nil || u.User == nil || u.Host == "" {
		if err != nil && strings.Contains(value, "://") {
			return sandboxer.E(sandboxer.Invalid, nil, "the input %q is not a usable URL", name) // the text of err repeats the secret
		}
		return nil
	}
	_, password := u.User.Password()
	if password || u.Scheme == "http" || u.Scheme == "https" {
		return sandboxer.E(sandboxer.Invalid, nil, "the URL in the input %q contains credentials", name).
			WithHint("write the URL without user and password, and pass the secret in the environment (--env)")
	}
	return nil
}

var namePattern = regexp.MustCompile(`^[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?$`)

func checkName(name string) error {
	if name != "" && !namePattern.MatchString(name) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the name of a sandbox: want 1 to 63 characters a-z, 0-9 and inner . _ -", name)
	}
	return nil
}

func checkKey(key string) error {
	if len(key) > 255 || strings.ContainsFunc(key, func(r rune) bool { return r < 0x21 || r > 0x7e }) {
		return sandboxer.E(sandboxer.Invalid, nil, "an idempotency key has 1 to 255 visible ASCII characters")
	}
	return nil
}

func ttlOf(p sandboxer.Profile) time.Duration {
	return cmp.Or(p.TTL, min(sandboxer.DefaultTTL, maxTTL(p)))
}

func maxTTL(p sandboxer.Profile) time.Duration {
	return cmp.Or(p.MaxTTL, max(sandboxer.DefaultMaxTTL, p.TTL))
}

func checkTTL(p sandboxer.Profile, ttl time.Duration) error {
	switch longest := maxTTL(p); {
	case ttl < 0:
		return sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is negative", ttl)
	case ttl > 0 && ttl < time.Second:
		return sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is too short: want at least 1s", ttl)
	case ttl > longest:
		return sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is longer than profile %s allows (%s)", sandboxer.FormatDuration(ttl), p.ID, sandboxer.FormatDuration(longest))
	}
	return nil
}

func checkEnv(env map[string]string) error {
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return sandboxer.E(sandboxer.Invalid, nil, "environment variable %q: a name has no '=', and neither name nor value a NUL byte", k)
		}
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > 64 {
		return sandboxer.E(sandboxer.Invalid, nil, "%d labels are too many: want at most 64", len(labels))
	}
	for k, v := range labels {
		if k == "" || len(k) > 128 || len(v) > 1024 || strings.ContainsAny(k, "=\x00\n") || strings.ContainsAny(v, "\x00\n") {
			return sandboxer.E(sandboxer.Invalid, nil, "label %q: want a name of 1 to 128 bytes without '=' and a value of at most 1024 bytes, neither with a line break", k)
		}
	}
	return nil
}

// maxRequest bounds what one request adds to the database.
const maxRequest = 256 << 10

func checkSize(req any) error {
	if j, err := json.Marshal(req); err != nil || len(j) > maxRequest {
		return sandboxer.E(sandboxer.Invalid, err, "the request has %d bytes: want at most %d", len(j), maxRequest)
	}
	return nil
}

// ceilings are the most of each limit that callers who are no administrators may have; 0
// is no bound.
func (m *Manager) ceilings(spec sandboxer.Spec) sandboxer.Limits {
	most := spec.Profile.MaxLimits.Or(spec.Profile.Limits)
	if b, err := m.backend(spec.Profile.Extension); err == nil {
		most = most.Or(b.DefaultLimits(spec))
	}
	return most
}

// checkStillAllowed refuses, for callers who are no administrators, to bring back what was saved or
// paused with more than prof gives now. what names it.
func (m *Manager) checkStillAllowed(p sandboxer.Principal, prof sandboxer.Profile, spec sandboxer.Spec, what string) error {
	if p.Can(sandboxer.ScopeAdmin) {
		return nil
	}
	spec.Profile = prof
	err := spec.Network.Within(prof.Network)
	if err == nil {
		err = spec.Limits.Within(m.ceilings(spec), "profile "+prof.ID)
	}
	for _, mt := range spec.Mounts {
		if err == nil && !allowsMount(prof, mt) {
			err = sandboxer.E(sandboxer.Denied, nil, "it mounts %s", mt.Source)
		}
	}
	if err == nil {
		return nil
	}
	return sandboxer.E(sandboxer.Denied, err, "%s has more than profile %s gives now: %s", what, prof.ID, sandboxer.Message(err)).
		WithHint("ask an administrator, or restore it on a profile that gives as much")
}

// checkUser refuses what cannot be a user; whether there is such a one, the backend knows.
func checkUser(user string) error {
	if len(user) > 64 || strings.ContainsFunc(user, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) || strings.HasPrefix(user, "-") ||
		strings.HasPrefix(user, ":") || strings.Count(user, ":") > 1 {
		return sandboxer.E(sandboxer.Invalid, nil, "%q is not a user: want a name or uid[:gid]", user)
	}
	return nil
}

// checkNetwork refuses a policy that reaches more than the profile's.
func checkNetwork(have sandboxer.NetworkPolicy, want *sandboxer.NetworkPolicy) error {
	if want == nil {
		return nil
	}
	if modes := []string{"none", "public", "allow"}; want.Mode != "" && !slices.Contains(modes, string(want.Mode)) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q is not a network mode%s", want.Mode, didYouMean(string(want.Mode), modes)).
			WithHint("the modes are none, public and allow")
	}
	if err := want.Check(); err != nil {
		return err
	}
	return want.Within(have)
}

// checkNetwork is checkNetwork for a request, whose refusal names the profiles that allow
// what was asked for.
func (m *Manager) checkNetwork(have sandboxer.NetworkPolicy, want *sandboxer.NetworkPolicy) error {
	err := checkNetwork(have, want)
	if err == nil || want.Check() != nil {
		return err
	}
	var ids []string
	for _, p := range m.catalogue.Load().profiles {
		if want.Within(p.Network) == nil && len(ids) < 5 {
			ids = append(ids, p.ID)
		}
	}
	var e *sandboxer.Error
	if len(ids) == 0 || !errors.As(err, &e) {
		return err
	}
	with := *e
	return with.WithHint("a profile that allows it: %s", join(ids))
}

// checkMounts lets the operator's principal mount anything and others only what the
// profile mounts, or below it, and not with more rights.
func checkMounts(p sandboxer.Principal, prof sandboxer.Profile, mounts []sandboxer.Mount) error {
	var targets []string
	for _, m := range prof.Mounts {
		targets = append(targets, m.Target)
	}
	for _, mt := range mounts {
		if !cleanAbs(mt.Source) || !cleanAbs(mt.Target) {
			return sandboxer.E(sandboxer.Invalid, nil, "mount %s:%s: want clean absolute paths", mt.Source, mt.Target)
		}
		if slices.Contains(targets, mt.Target) {
			return sandboxer.E(sandboxer.Invalid, nil, "mount %s:%s: something is mounted on %s already", mt.Source, mt.Target, mt.Target)
		}
		targets = append(targets, mt.Target)
		if !allowsMount(prof, mt) && !p.Can(sandboxer.ScopeAdmin) {
			return sandboxer.E(sandboxer.Denied, nil, "mount %s: profile %s does not offer that path", mt.Source, prof.ID).
				WithHint("only an administrator mounts any path of the host")
		}
	}
	return nil
}

// allowsMount reports whether the profile mounts mt, or what it lies in, with as many rights.
func allowsMount(prof sandboxer.Profile, mt sandboxer.Mount) bool {
	return slices.ContainsFunc(prof.Mounts, func(o sandboxer.Mount) bool {
		below := mt.Source == o.Source || strings.HasPrefix(mt.Source, strings.TrimSuffix(o.Source, "/")+"/")
		return below && (mt.ReadOnly || !o.ReadOnly)
	})
}

func cleanAbs(p string) bool {
	return path.IsAbs(p) && path.Clean(p) == p && !strings.ContainsRune(p, 0)
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
