package spec

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// open is a Backend with these capabilities that limits memory and admits no mounts.
type open []sandboxer.Capability

func (o open) Capabilities() []sandboxer.Capability { return o }
func (o open) Can(c sandboxer.Capability) bool      { return slices.Contains(o, c) }
func (open) Credential() sandboxer.Credential       { return sandboxer.Credential{} }

func (o open) AdmitMounts(s sandboxer.Spec) error {
	return sandboxer.E(sandboxer.Denied, nil, "no mounts")
}
func (o open) DefaultLimits(sandboxer.Spec) sandboxer.Limits {
	return sandboxer.Limits{MemoryBytes: 1 << 30}
}

// TestCreate: one function makes of a request, its principal and how things are a request that can be
// made, without a manager, a store or an extension.
func TestCreate(t *testing.T) {
	site := &Site{
		Owner: "here",
		Profiles: []sandboxer.Profile{
			{ID: "profile.a", Extension: "ext.a", TTL: time.Hour, Env: map[string]string{"A": "profile", "B": "profile"}, Requires: []sandboxer.Capability{sandboxer.CanExec}},
			{ID: "profile.closed", Extension: "ext.closed"},
			{ID: "profile.poor", Extension: "ext.poor", Requires: []sandboxer.Capability{sandboxer.CanExec}},
		},
		Extensions: []Extension{
			{Info: sandboxer.ExtensionInfo{ID: "ext.a", Inputs: []sandboxer.Input{{Name: "repo"}}}, Backend: open{sandboxer.CanExec}},
			{Info: sandboxer.ExtensionInfo{ID: "ext.closed", Problem: "its engine is down"}},
			{Info: sandboxer.ExtensionInfo{ID: "ext.poor"}, Backend: open{}},
		},
		MAC: func(digest string) string { return "mac of " + digest },
	}
	user := sandboxer.Principal{Tenant: "acme", Actor: "key:1", Scopes: []sandboxer.Scope{sandboxer.ScopeWrite}}
	admin := sandboxer.Principal{Tenant: "acme", Actor: "root", Scopes: []sandboxer.Scope{sandboxer.ScopeAdmin}}
	type req = sandboxer.CreateRequest

	r, err := site.Create(user, req{Profile: "a", Name: "web", Env: map[string]string{"B": "request"}, Inputs: map[string]string{"repo": "."}, Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	if r.Tenant != "acme" || r.Extension != "ext.a" || r.TTL != time.Hour || r.ID == "" || r.ID != r.Spec.ID || r.Shown != "" || !strings.HasPrefix(r.Digest, "mac of ") {
		t.Errorf("it comes to %+v", r)
	}
	if s := r.Spec; s.Owner != "here" || !maps.Equal(s.Env, map[string]string{"A": "profile", "B": "request"}) || s.Inputs["repo"] != "." || s.Profile.Env != nil {
		t.Errorf("its spec is %+v", s)
	}
	at := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	if sb := r.Record(2, at, true); sb.Generation != 2 || sb.Spec.Generation != 2 || sb.State != sandboxer.Creating || !sb.ExpiresAt.Equal(at.Add(time.Hour)) || !sb.Spec.Fuse.After(sb.ExpiresAt) {
		t.Errorf("its record is %+v", sb)
	}

	mount := []sandboxer.Mount{{Source: "/srv", Target: "/data"}}
	for name, c := range map[string]struct {
		by   sandboxer.Principal
		req  req
		kind sandboxer.Kind
		want string
	}{
		"no profile":          {user, req{}, sandboxer.Invalid, "no profile given"},
		"a misspelt profile":  {user, req{Profile: "closd"}, sandboxer.Invalid, `did you mean "profile.closed"`},
		"a closed extension":  {user, req{Profile: "closed"}, sandboxer.Unavailable, "its engine is down"},
		"a lack":              {user, req{Profile: "poor"}, sandboxer.Unavailable, "lacks exec"},
		"an unknown input":    {user, req{Profile: "a", Inputs: map[string]string{"rep": "."}}, sandboxer.Invalid, `did you mean "repo"`},
		"a pause":             {user, req{Profile: "a", OnTTL: sandboxer.ExpiryPause}, sandboxer.Unsupported, "does not support pause"},
		"too much memory":     {user, req{Profile: "a", Limits: sandboxer.Limits{MemoryBytes: 2 << 30}}, sandboxer.Invalid, "is more than profile profile.a allows"},
		"a mount":             {user, req{Profile: "a", Mounts: mount}, sandboxer.Denied, "profile profile.a does not offer that path for writing"},
		"too much network":    {user, req{Profile: "a", Network: &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}}, sandboxer.Denied, ""},
		"memory, by an admin": {admin, req{Profile: "a", Limits: sandboxer.Limits{MemoryBytes: 2 << 30}}, "", ""},
		"mount, by an admin":  {admin, req{Profile: "a", Mounts: mount}, "", ""},
	} {
		r, err := site.Create(c.by, c.req)
		if c.kind == "" {
			if err != nil || len(c.req.Mounts) > 0 && !r.Spec.Vouches(sandboxer.RestrictedMounts) {
				t.Errorf("%s: %+v, %v", name, r, err)
			}
			continue
		}
		if c.want == "" && err != nil { // the root package says it, and of which kind
			continue
		}
		if sandboxer.KindOf(err) != c.kind || !strings.Contains(sandboxer.Message(err), c.want) {
			t.Errorf("%s: %v; want %s, %q", name, err, c.kind, c.want)
		}
	}
}
