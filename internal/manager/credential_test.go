package manager

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// byKey is the fake with a key of the operator, or of each tenant or consumer.
type byKey struct {
	*fake.Extension
	by sandboxer.Credential
}

func (b *byKey) Credential() sandboxer.Credential { return b.by }

func keyRig(t *testing.T, by sandboxer.Credential) *rig {
	return newRig(t, func(s *setup) {
		s.profiles = s.profiles[:1]
		s.wrap = func(b *fake.Extension) sandboxer.Extension { return &byKey{b, by} }
	})
}

// of is a caller of the tenant whose API key is bound to a consumer.
func of(tenant, consumer string) context.Context {
	return sandboxer.WithPrincipal(context.Background(), sandboxer.Principal{Tenant: tenant, Actor: "key:x", Consumer: consumer, Scopes: []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite}})
}

// TestCredentialMissing: without the secret that is its key, a request is refused before anything exists, with the command that
// sets it; and what nobody vouches for is no consumer.
func TestCredentialMissing(t *testing.T) {
	for _, tt := range []struct {
		by    sandboxer.Credential
		ctx   context.Context
		asked string
		kind  sandboxer.Kind
		hint  string
	}{
		{sandboxer.Credential{Secret: "e2b"}, of("acme", ""), "", sandboxer.Invalid, "sandboxer secret set --operator e2b"},
		{sandboxer.Credential{Secret: "e2b", By: sandboxer.ByTenant}, of("acme", ""), "", sandboxer.Invalid, "sandboxer secret set e2b"},
		{sandboxer.Credential{Secret: "e2b", By: sandboxer.ByConsumer}, of("acme", ""), "bob", sandboxer.Invalid, "sandboxer key create ci --consumer NAME"},
		{sandboxer.Credential{Secret: "e2b", By: sandboxer.ByConsumer}, of("acme", "bob"), "", sandboxer.Invalid, "sandboxer secret set e2b.bob"},
		{sandboxer.Credential{Secret: "e2b", By: sandboxer.ByConsumer}, of("acme", "bob"), "eve", sandboxer.Denied, "leave out the consumer"},
	} {
		r := keyRig(t, tt.by)
		req := sandboxer.CreateRequest{Profile: "test", Consumer: sandboxer.Consumer{ID: tt.asked}}
		_, plan := r.Plan(tt.ctx, req)
		_, create := r.Create(tt.ctx, req)
		for _, err := range []error{plan, create} {
			if sandboxer.KindOf(err) != tt.kind || !strings.Contains(sandboxer.HintOf(err), tt.hint) {
				t.Errorf("%+v: %v (%s; hint %q); want %s, hint %q", tt.by, err, sandboxer.KindOf(err), sandboxer.HintOf(err), tt.kind, tt.hint)
			}
		}
		if len(r.world.Live()) > 0 {
			t.Errorf("%+v: something exists", tt.by)
		}
	}
}

// TestCredentialOfSandbox: every sandbox is made, saved and removed with the key of its tenant and consumer, in the version of its
// create.
func TestCredentialOfSandbox(t *testing.T) {
	r := keyRig(t, sandboxer.Credential{Secret: "e2b", By: sandboxer.ByConsumer})
	bob, eve := of("acme", "bob"), of("acme", "eve")
	want := sandboxer.SecretRef{Tenant: "acme", Name: "e2b.bob", Version: 1}
	for ctx, name := range map[context.Context]string{bob: "e2b.bob", eve: "e2b.eve", of("other", "bob"): "e2b.bob"} {
		if _, err := r.SetSecret(ctx, name, false, "a key"); err != nil {
			t.Fatal(err)
		}
	}
	sb, err := r.Create(bob, sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "box"}})
	if err != nil || sb.Spec.Credential != want || sb.Handle.Credential != want || sb.Consumer.ID != "bob" {
		t.Fatalf("it is %+v with %+v, of %q, %v", sb.Spec.Credential, sb.Handle.Credential, sb.Consumer.ID, err)
	}
	if _, err := r.Create(eve, sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "box"}}); !errors.Is(err, sandboxer.Conflict) {
		t.Errorf("another consumer gets it: %v", err)
	}
	if sb, err := r.Create(of("other", "bob"), sandboxer.CreateRequest{Profile: "test"}); err != nil || sb.Spec.Credential.Tenant != "other" {
		t.Errorf("of another tenant: %+v, %v", sb, err)
	}
	snap, err := r.Snapshot(bob, "box", SnapshotRequest{Kind: sandboxer.SnapshotNative})
	if err != nil || snap.Spec.Credential != want || snap.Native.Credential != want {
		t.Fatalf("its snapshot has %+v, %v", snap, err)
	}
	if _, err := r.SetSecret(bob, "e2b.bob", false, "a later key"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restore(eve, snap.ID, RestoreRequest{}); !errors.Is(err, sandboxer.Unsupported) {
		t.Errorf("another consumer restores it: %v", err)
	}
	copied, err := r.Restore(bob, snap.ID, RestoreRequest{})
	if err != nil || copied.Spec.Credential != want {
		t.Errorf("a copy has %+v, %v", copied, err)
	}
	young, err := r.Create(bob, sandboxer.CreateRequest{Profile: "test"})
	if err != nil || young.Spec.Credential.Version != 2 {
		t.Errorf("a new one has %+v, %v", young, err)
	}
	if err := r.RemoveSecret(bob, "e2b.bob", false, false); !errors.Is(err, sandboxer.Conflict) {
		t.Errorf("the key is removed: %v", err)
	}
	if h := handleOf(&sandboxer.Sandbox{ID: "box", Spec: sandboxer.Spec{Generation: 1, Credential: want}}); h.Credential != want {
		t.Errorf("before its object is known, the handle is %+v", h)
	}
	if _, err := r.Pause(bob, "box", PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
		t.Fatal(err)
	}
	if sb, err = r.Resume(bob, "box", ResumeRequest{}); err != nil || sb.Handle.Credential != want {
		t.Errorf("after a pause it has %+v, %v", sb, err)
	}
}
