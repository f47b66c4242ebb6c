package spec

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
	"github.com/sand-boxer/sandboxer/internal/suggest"
)

// commonRequest has the fields that creates and restores share, and checks them.
type commonRequest struct {
	name, key   string
	ttl         time.Duration
	env, labels map[string]string
	maxCost     sandboxer.Credits
}

func checkCommon(prof sandboxer.Profile, c commonRequest) error {
	if c.ttl == sandboxer.TTLIdle {
		c.ttl = 0 // withTTL checks it
	}
	if err := cmp.Or(CheckName(c.name), CheckKey(c.key), CheckTTL(prof, c.ttl), checkEnv(c.env), checkLabels(c.labels)); err != nil {
		return err
	}
	if c.maxCost < 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "max_cost %s is negative", c.maxCost).WithHint("give an amount above zero, or leave it out for no bound")
	}
	return nil
}

// checkURL refuses a secret in the URL of a repository, which would get into the record, into logs and into the arguments of
// git. A user name alone is no secret over SSH; over HTTP it usually is a token.
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

func CheckName(name string) error {
	if name != "" && !namePattern.MatchString(name) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q cannot be the name of a sandbox: want 1 to 63 characters a-z, 0-9 and inner . _ -", name).
			WithHint("choose another name, such as build-1, or leave it out")
	}
	return nil
}

func CheckKey(key string) error {
	if len(key) > 255 || strings.ContainsFunc(key, func(r rune) bool { return r < 0x21 || r > 0x7e }) {
		return sandboxer.E(sandboxer.Invalid, nil, "an idempotency key has 1 to 255 visible ASCII characters").WithHint("use a random one for each request, such as a UUID")
	}
	return nil
}

func CheckTTL(p sandboxer.Profile, ttl time.Duration) error {
	switch longest := lifecycle.MaxTTL(p); {
	case ttl < 0:
		return sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is negative", ttl).WithHint(shortTime)
	case ttl > 0 && ttl < time.Second:
		return sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is too short: want at least 1s", ttl).WithHint(shortTime)
	case ttl > longest:
		return sandboxer.E(sandboxer.Invalid, nil, "a time to live of %s is longer than profile %s allows (%s)", sandboxer.FormatDuration(ttl), p.ID, sandboxer.FormatDuration(longest)).
			WithHint("ask for at most %s, or have the operator raise max_ttl in the profile", sandboxer.FormatDuration(longest))
	}
	return nil
}

// withExpiry returns the profile as it applies to one sandbox, with the requested actions on idling and on expiry. A request
// may always choose destroy; it may choose another action only if the profile leaves it open. The idle time is at most that of
// the profile.
func withExpiry(p sandboxer.Profile, idle time.Duration, onIdle, onTTL sandboxer.ExpiryAction) (sandboxer.Profile, error) {
	switch {
	case idle < 0 || idle > 0 && idle < time.Second:
		return p, sandboxer.E(sandboxer.Invalid, nil, "an idle time of %s: want at least 1s", idle).WithHint(shortTime)
	case p.Idle > 0 && idle > p.Idle:
		return p, sandboxer.E(sandboxer.Invalid, nil, "an idle time of %s is longer than profile %s allows (%s)", sandboxer.FormatDuration(idle), p.ID, sandboxer.FormatDuration(p.Idle)).
			WithHint("ask for at most %s, or have the operator raise idle in the profile", sandboxer.FormatDuration(p.Idle))
	}
	p.Idle = cmp.Or(idle, p.Idle)
	if onIdle != "" && p.Idle == 0 {
		return p, sandboxer.E(sandboxer.Invalid, nil, "on_idle has no effect without an idle time, and profile %s has none", p.ID).
			WithHint("give an idle time: --idle 10m")
	}
	for _, a := range []struct {
		name  string
		asked sandboxer.ExpiryAction
		has   *sandboxer.ExpiryAction
	}{{"on_idle", onIdle, &p.OnIdle}, {"on_ttl", onTTL, &p.OnTTL}} {
		switch {
		case a.asked == "":
		case !slices.Contains(sandboxer.ExpiryActions(), a.asked):
			return p, sandboxer.E(sandboxer.Invalid, nil, "%s cannot be %q", a.name, a.asked).WithHint("give destroy or pause")
		case a.asked == sandboxer.ExpiryPause && *a.has == sandboxer.ExpiryDestroy:
			return p, sandboxer.E(sandboxer.Invalid, nil, "%s: profile %s says destroy, and a request cannot choose pause instead", a.name, p.ID).
				WithHint("leave %s out, or use a profile that pauses: sandboxer profile ls", a.name)
		default:
			*a.has = a.asked
		}
	}
	return p, nil
}

// withTTL returns the profile as it applies to a sandbox whose request names ttl; its idle time is already decided. Whether the
// sandbox lives as long as it is used is fixed for its whole life.
func withTTL(p sandboxer.Profile, ttl time.Duration) (sandboxer.Profile, error) {
	switch {
	case ttl == sandboxer.TTLIdle, ttl == 0 && p.TTL == sandboxer.TTLIdle:
		p.TTL = sandboxer.TTLIdle
	case p.TTL == sandboxer.TTLIdle:
		p.TTL = ttl
	}
	if p.TTL == sandboxer.TTLIdle && p.Idle == 0 {
		return p, sandboxer.E(sandboxer.Invalid, nil, "ttl idle (as long as it is used) needs an idle time, and profile %s has none", p.ID).
			WithHint("give an idle time: --idle 10m")
	}
	return p, nil
}

// mayPause refuses automatic pauses that the extension does not support.
func (s *Site) mayPause(extension string, actions ...sandboxer.ExpiryAction) error {
	if !slices.Contains(actions, sandboxer.ExpiryPause) {
		return nil
	}
	b, err := s.backend(extension)
	if err != nil {
		return nil // creating says why
	}
	if s.canPauseSomehow(b) {
		return nil
	}
	return backend.Lacks(extension, sandboxer.CanPause).WithHint("leave out on_idle and on_ttl, or use a profile of an extension that pauses")
}

func checkEnv(env map[string]string) error {
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return sandboxer.E(sandboxer.Invalid, nil, "environment variable %q: a name has no '=', and neither name nor value a NUL byte", k).
				WithHint("put binary values into a file: sandboxer cp")
		}
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > 64 {
		return sandboxer.E(sandboxer.Invalid, nil, "%d labels are too many: want at most 64", len(labels)).WithHint("leave some out, or put several values into one")
	}
	for k, v := range labels {
		if k == "" || len(k) > 128 || len(v) > 1024 || strings.ContainsAny(k, "=\x00\n") || strings.ContainsAny(v, "\x00\n") {
			return sandboxer.E(sandboxer.Invalid, nil, "label %q: want a name of 1 to 128 bytes without '=' and a value of at most 1024 bytes, neither with a line break", k).
				WithHint("shorten it, and put longer texts into a file: sandboxer cp")
		}
	}
	return nil
}

// maxRequest bounds what one request adds to the database.
const maxRequest = 256 << 10

func checkSize(req any) error {
	if j, err := json.Marshal(req); err != nil || len(j) > maxRequest {
		return sandboxer.E(sandboxer.Invalid, err, "the request has %d bytes: want at most %d", len(j), maxRequest).
			WithHint("shorten env and inputs, and put long values into a file: sandboxer cp")
	}
	return nil
}

// ceilings are the largest limits that callers without the admin scope may have; 0
// is no bound.
func (s *Site) ceilings(spec sandboxer.Spec) sandboxer.Limits {
	most := spec.Profile.MaxLimits.Or(spec.Profile.Limits)
	if b, err := s.backend(spec.Profile.Extension); err == nil {
		most = most.Or(b.DefaultLimits(spec))
	}
	return most
}

// CheckStillAllowed refuses a saved or paused sandbox to callers without the admin scope if it has more than prof gives now.
// what names the sandbox in the error.
func (s *Site) CheckStillAllowed(p sandboxer.Principal, prof sandboxer.Profile, spec sandboxer.Spec, secrets map[string]sandboxer.SecretRef, what string) error {
	if p.Can(sandboxer.ScopeAdmin) {
		return nil
	}
	on, ok := prof.On(spec.Profile.Extension)
	if !ok && prof.Route != nil {
		return LeftRoute(prof, spec.Profile.Extension)
	}
	prof, spec.Profile = on, on
	err := spec.Network.Within(prof.Network)
	if err == nil {
		err = spec.Limits.Within(s.ceilings(spec), "profile "+prof.ID)
	}
	if err == nil {
		spec.Vouched = vouched(p, spec.Vouched) // else whoever gave it
		err = s.admitMounts(spec)
	}
	if err == nil {
		err = offers(prof, secrets)
	}
	if err == nil {
		return nil
	}
	return sandboxer.E(sandboxer.Denied, err, "%s has more than profile %s gives now: %s", what, prof.ID, sandboxer.Message(err)).
		WithHint("ask an administrator, or restore it on a profile that gives as much")
}

const shortTime = "give at least one second, such as 30m, or leave it out for the profile's"

// checkUser refuses invalid users; only the backend knows whether a user exists.
func checkUser(user string) error {
	if len(user) > 64 || strings.ContainsFunc(user, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) || strings.HasPrefix(user, "-") ||
		strings.HasPrefix(user, ":") || strings.Count(user, ":") > 1 {
		return sandboxer.E(sandboxer.Invalid, nil, "%q is not a user: want a name or uid[:gid]", user).WithHint("write it as: root, 1000 or 1000:1000")
	}
	return nil
}

// CheckNetwork refuses a policy that reaches more than the profile's.
func CheckNetwork(have sandboxer.NetworkPolicy, want *sandboxer.NetworkPolicy) error {
	if want == nil {
		return nil
	}
	if modes := []string{"none", "public", "allow"}; want.Mode != "" && !slices.Contains(modes, string(want.Mode)) {
		return sandboxer.E(sandboxer.Invalid, nil, "%q is not a network mode%s", want.Mode, suggest.DidYouMean(string(want.Mode), modes)).
			WithHint("the modes are none, public and allow")
	}
	if err := want.Check(); err != nil {
		return err
	}
	return want.Within(have)
}

// checkNetwork is CheckNetwork for a request; its error names profiles that allow the requested policy.
func (s *Site) checkNetwork(have sandboxer.NetworkPolicy, want *sandboxer.NetworkPolicy) error {
	err := CheckNetwork(have, want)
	if err == nil || want.Check() != nil {
		return err
	}
	var ids []string
	for _, p := range s.Profiles {
		if want.Within(p.Network) == nil && len(ids) < 5 {
			ids = append(ids, p.ID)
		}
	}
	var e *sandboxer.Error
	if len(ids) == 0 || !errors.As(err, &e) {
		return err
	}
	with := *e
	return with.WithHint("a profile that allows it: %s", suggest.List(ids))
}

// checkMounts refuses mounts that no sandbox of the profile can have.
func checkMounts(prof sandboxer.Profile, mounts []sandboxer.Mount) error {
	if len(mounts) == 0 {
		return nil
	}
	return sandboxer.CheckMounts(slices.Concat(prof.Mounts, mounts), prof.Workspace)
}

// admitMounts refuses, as Denied, mounts for which no operator vouches and which the extension does not allow.
func (s *Site) admitMounts(spec sandboxer.Spec) error {
	if spec.Vouches(sandboxer.RestrictedMounts) {
		return nil
	}
	b, err := s.backend(spec.Profile.Extension)
	if err != nil {
		return err
	}
	one := spec
	for _, mt := range spec.Mounts {
		one.Mounts = []sandboxer.Mount{mt}
		err := b.AdmitMounts(one)
		if errors.Is(err, sandboxer.Denied) {
			what := "path"
			if !mt.ReadOnly {
				what = "path for writing"
			}
			return sandboxer.E(sandboxer.Denied, err, "mount %s: profile %s does not offer that %s, nor does %s", mt.Source, spec.Profile.ID, what, spec.Profile.Extension).
				WithHint("an administrator can mount any directory of the server's machine except the server's own; others can mount directories of the profile, and those in the roots that the extension's file lists")
		}
		if err != nil {
			return err
		}
	}
	return nil
}
