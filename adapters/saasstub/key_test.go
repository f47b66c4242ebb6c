package saasstub

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

// A cloud is two accounts of the service behind one URL, chosen by the key; other keys are refused.
type cloud struct {
	mu   sync.Mutex
	keys map[string]http.Handler // by key
	env  sandboxer.Env
	all  []sandboxer.Handle // recorded
}

const canary = "canary-of-"

// open opens the extension with a tenant's key for each of the names in keys.
func (c *cloud) open(t *testing.T, url string, config string) *extension {
	t.Helper()
	env := c.env
	env.Recorded = func(context.Context) ([]sandboxer.Handle, error) { return c.all, nil }
	env.Secret = func(_ context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
		if ref.Tenant == "removed" || ref.Name != "key" {
			return "", sandboxer.E(sandboxer.NotFound, nil, "there is no %s", ref)
		}
		return sandboxer.Secret(canary + ref.Tenant), nil
	}
	env.Decode = func(v any) error {
		return json.NewDecoder(strings.NewReader(fmt.Sprintf(`{"url":%q,%s`, url, config))).Decode(v)
	}
	x, err := Adapter.Open(t.Context(), env)
	if err != nil {
		t.Fatal(err)
	}
	return x.(*extension)
}

// TestKeyOfEachTenant: tenants reach their own accounts only; a key that is refused or removed proves nothing, and hinders no other tenant.
func TestKeyOfEachTenant(t *testing.T) {
	ctx := t.Context()
	c := &cloud{keys: map[string]http.Handler{}}
	c.env = sandboxer.Env{Extension: "ext.saas-stub", Owner: "test", Dir: t.TempDir(), Notes: notes.New(t.TempDir(), "ext.saas-stub", []byte("key"))}
	for _, tenant := range []string{"acme", "rival"} {
		dir := home(t)
		other := order("other")
		other.Owner = "nobody"
		if _, err := opens(t, "nobody", dir, `{}`).Provision(ctx, other); err != nil { // so that it runs
			t.Fatal(err)
		}
		elsewhere(t, dir, func(h http.Handler) http.Handler { c.keys[canary+tenant] = h; return h })
	}
	url := elsewhere(t, t.TempDir(), func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c.mu.Lock()
			h := c.keys[strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")]
			c.mu.Unlock()
			if h == nil {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	x := c.open(t, url, `"credential":{"secret":"key","by":"tenant"}}`)
	handles := map[string]sandboxer.Handle{}
	for _, tenant := range []string{"acme", "rival"} {
		spec := order("box-" + tenant)
		spec.Credential = sandboxer.SecretRef{Tenant: tenant, Name: "key", Version: 1}
		h, err := x.Provision(ctx, spec)
		if err != nil || h.Credential != spec.Credential {
			t.Fatalf("Provision = %+v, %v", h, err)
		}
		handles[tenant] = h
		c.all = append(c.all, h)
		if data, _ := json.Marshal(h); bytes.Contains(data, []byte(canary)) {
			t.Errorf("the handle has the key: %s", data)
		}
	}
	if l, err := x.IsAlive(ctx, sandboxer.Handle{SandboxID: "box-rival", Generation: 1, Ref: handles["rival"].Ref, Credential: handles["acme"].Credential}); l != sandboxer.Gone {
		t.Errorf("with acme's key, rival's is %s, %v", l, err)
	}
	listed := func() (ids []string, last error) {
		for h, err := range x.ListRunning(ctx, "test") {
			if err == nil {
				ids = append(ids, h.SandboxID+" "+h.Credential.Tenant)
			}
			last = err
		}
		return ids, last
	}
	if ids, err := listed(); err != nil || len(ids) != 2 || ids[0] != "box-acme acme" || ids[1] != "box-rival rival" {
		t.Errorf("listed are %q, %v", ids, err)
	}
	if f, err := x.Discover(ctx, "box-rival"); err != nil || f.Handle.Credential.Tenant != "rival" {
		t.Errorf("Discover = %+v, %v", f, err)
	}
	if c, err := x.Capacity(ctx, ""); err != nil || c.Free != -1 {
		t.Errorf("Capacity = %+v, %v", c, err)
	}

	c.mu.Lock()
	delete(c.keys, canary+"acme") // it is revoked
	c.mu.Unlock()
	_, err := x.Teardown(ctx, handles["acme"])
	wantKind(t, "Teardown with a revoked key", err, sandboxer.Unavailable)
	if text := fmt.Sprintf("%+v %s", err, sandboxer.HintOf(err)); !strings.Contains(text, "secret key (version 1)") || strings.Contains(text, canary) {
		t.Errorf("it says %s", text)
	}
	if l, err := x.IsAlive(ctx, handles["acme"]); l != sandboxer.Unknown || err == nil {
		t.Errorf("with a revoked key it is %s, %v", l, err)
	}
	if ids, err := listed(); !hosted.IsRefused(err) || len(ids) != 1 {
		t.Errorf("listed are %q, %v", ids, err)
	}
	for _, tenant := range []string{"acme", "removed"} {
		spec := order("late-" + tenant)
		spec.Credential = sandboxer.SecretRef{Tenant: tenant, Name: "key", Version: 1}
		_, err = x.Provision(ctx, spec)
		wantKind(t, "Provision with the key of "+tenant, err, sandboxer.Invalid) // no fault of the service
		if _, err := x.Teardown(ctx, sandboxer.Handle{SandboxID: spec.ID, Generation: 1, Credential: spec.Credential}); sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Errorf("Teardown of what was refused to %s: %v", tenant, err)
		}
	}
	if remains, err := x.Forget(ctx, handles["acme"]); err != nil || len(remains) != 1 || !strings.Contains(remains[0], handles["acme"].Ref) {
		t.Errorf("Forget = %q, %v", remains, err)
	}
	_, err = x.Forget(ctx, handles["rival"])
	wantKind(t, "Forget of what can be removed", err, sandboxer.Unsupported)
	if _, err := x.Teardown(ctx, handles["rival"]); err != nil {
		t.Error(err)
	}
}

// TestNeedsKey: what an operator's missing secret and another process say when the extension is opened.
func TestNeedsKey(t *testing.T) {
	env := sandboxer.Env{Extension: "ext.saas-stub", Dir: t.TempDir(), Decode: func(v any) error {
		return json.Unmarshal([]byte(`{"credential":{"secret":"other"}}`), v)
	}}
	_, err := Adapter.Open(t.Context(), env)
	wantKind(t, "in another process", err, sandboxer.Unavailable)
	env.Secret = func(context.Context, sandboxer.SecretRef) (sandboxer.Secret, error) {
		return "", sandboxer.E(sandboxer.NotFound, nil, "there is none")
	}
	_, err = Adapter.Open(t.Context(), env)
	wantKind(t, "without the secret", err, sandboxer.NotFound)
	if !strings.HasPrefix(sandboxer.Message(err), "needs a key: ") || sandboxer.HintOf(err) != "an administrator sets it: sandboxer secret set --operator other" {
		t.Errorf("it says %v (%s)", err, sandboxer.HintOf(err))
	}
}
