package manager

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

var public = sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}

func open(s *setup) {
	s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.open", Extension: "ext.fake", Network: public})
}

// enforced is what the backend was last told for the only object there is.
func (r *rig) enforced() sandboxer.NetworkMode {
	r.t.Helper()
	live := r.world.Live()
	if len(live) != 1 {
		r.t.Fatalf("%d objects", len(live))
	}
	return live[0].Spec.Network.Mode
}

func TestSetNetwork(t *testing.T) {
	r := newRig(t, open)
	sb := r.create(sandboxer.CreateRequest{Profile: "open", Network: &sandboxer.NetworkPolicy{}})
	got, err := r.SetNetwork(acme, sb.ID, public)
	if err != nil || got.Spec.Network.Mode != sandboxer.NetworkPublic || got.Version <= sb.Version {
		t.Fatalf("SetNetwork: %+v, %v", got, err)
	}
	if m := r.enforced(); m != sandboxer.NetworkPublic {
		t.Errorf("the backend has %q", m)
	}
	if h := history(t, r.Manager, sb.ID); !strings.HasSuffix(h, "g1 network user:default") {
		t.Errorf("history: %s", h)
	}
	_, err = r.SetNetwork(rival, sb.ID, public)
	wantErr(t, err, sandboxer.NotFound, "no sandbox")
	_, err = r.SetNetwork(as(sandboxer.DefaultTenant, sandboxer.ScopeRead), sb.ID, public)
	wantErr(t, err, sandboxer.Denied, "write")
	_, err = r.SetNetwork(acme, sb.ID, sandboxer.NetworkPolicy{Mode: "some"})
	wantErr(t, err, sandboxer.Invalid, "none, public and allow")
	_, err = r.SetNetwork(acme, sb.ID, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"10.0.0.0/8"}})
	wantErr(t, err, sandboxer.Invalid, "wider than the profile's")

	// What the backend refuses is not in the database either.
	_, err = r.SetNetwork(acme, sb.ID, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"example.org"}})
	wantErr(t, err, sandboxer.Unsupported, "the fake")
	if got := r.get(sb.ID).Spec.Network.Mode; got != sandboxer.NetworkPublic || r.enforced() != got {
		t.Errorf("after a refusal the database has %q, the backend %q", got, r.enforced())
	}

	other := r.create(sandboxer.CreateRequest{})
	_, err = r.SetNetwork(acme, other.ID, public)
	wantErr(t, err, sandboxer.Invalid, "wider than the profile's")
	r.destroy(other.ID)
	_, err = r.SetNetwork(acme, other.ID, sandboxer.NetworkPolicy{})
	wantErr(t, err, sandboxer.Conflict, "terminated")
	r.destroy(sb.ID)
	r.sound(0)
}

func TestSetNetworkUnsupported(t *testing.T) {
	r := newRig(t, func(s *setup) { s.fake.Drop = []sandboxer.Capability{sandboxer.CanNetwork} })
	sb := r.create(sandboxer.CreateRequest{})
	_, err := r.SetNetwork(acme, sb.ID, sandboxer.NetworkPolicy{})
	wantErr(t, err, sandboxer.Unsupported, "create another")
}

func TestSetNetworkFails(t *testing.T) {
	r := newRig(t, open)
	sb := r.create(sandboxer.CreateRequest{Profile: "open", Network: &public})
	r.world.Inject(fake.Fault{Verb: fake.VerbNetwork, Kind: sandboxer.Unavailable, Times: 1})
	_, err := r.SetNetwork(acme, sb.ID, sandboxer.NetworkPolicy{})
	wantErr(t, err, sandboxer.Unavailable, "")
	if got := r.get(sb.ID).Spec.Network.Mode; got != sandboxer.NetworkPublic {
		t.Errorf("after a failure the database has %q", got)
	}
	// Done, but the answer got lost: it is undone, since the caller got an error.
	r.world.Inject(fake.Fault{Verb: fake.VerbNetwork, Lost: true, Times: 1})
	_, err = r.SetNetwork(acme, sb.ID, sandboxer.NetworkPolicy{})
	if err == nil {
		t.Fatal("a lost answer is an error")
	}
	if got := r.get(sb.ID).Spec.Network.Mode; got != sandboxer.NetworkPublic || r.enforced() != got {
		t.Errorf("after a lost answer the database has %q, the backend %q", got, r.enforced())
	}
}

// betweenDatabaseAndBackend has a sandbox whose record says none and whose network is public
// still, as after a broker that died in between; the fake imitates that by a lie.
func betweenDatabaseAndBackend(t *testing.T) (*rig, *sandboxer.Sandbox) {
	t.Helper()
	r := newRig(t, open)
	sb := r.create(sandboxer.CreateRequest{Profile: "open", Network: &public})
	r.world.Inject(fake.Fault{Verb: fake.VerbNetwork, Lie: true, Times: 1})
	if _, err := r.SetNetwork(acme, sb.ID, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone}); err != nil {
		t.Fatal(err)
	}
	if m := r.enforced(); m != sandboxer.NetworkPublic {
		t.Fatalf("the lie is none: %q", m)
	}
	return r, sb
}

// TestNetworkAfterRestart has the next broker enforce what is in the database.
func TestNetworkAfterRestart(t *testing.T) {
	r, sb := betweenDatabaseAndBackend(t)
	r.restart()
	eventually(t, "the policy of the database to be enforced", func() bool { return r.enforced() == sandboxer.NetworkNone })
	r.destroy(sb.ID)
}

// TestNetworkAfterAnOutage has the extension not answer when the next broker starts: the
// database is enforced when it does.
func TestNetworkAfterAnOutage(t *testing.T) {
	r, sb := betweenDatabaseAndBackend(t)
	r.world.Inject(fake.Fault{Verb: fake.VerbList, Kind: sandboxer.Unavailable, Times: 1})
	r.restart()
	for range 2 { // the first one may meet the outage
		if _, err := r.Sweep(admin); err != nil {
			t.Fatal(err)
		}
	}
	if m := r.enforced(); m != sandboxer.NetworkNone {
		t.Errorf("the database says none, and %q is in force", m)
	}
	r.destroy(sb.ID)
}

func TestSetNetworkConcurrently(t *testing.T) {
	r := newRig(t, open)
	sb := r.create(sandboxer.CreateRequest{Profile: "open"})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			p := sandboxer.NetworkPolicy{}
			if i%2 == 0 {
				p = public
			}
			ctx, cancel := context.WithCancel(acme)
			defer cancel()
			if _, err := r.SetNetwork(ctx, sb.ID, p); err != nil {
				t.Errorf("SetNetwork: %v", err)
			}
		})
	}
	wg.Wait()
	if want := r.get(sb.ID).Spec.Network.Mode; want != r.enforced() {
		t.Errorf("the database has %q, the backend %q", want, r.enforced())
	}
}
