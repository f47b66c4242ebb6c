package manager

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

func pooled(size int) func(*setup) {
	return func(s *setup) {
		for i := range s.profiles {
			if s.profiles[i].ID != "profile.lazy" {
				s.profiles[i].Pool.Size = size
			}
		}
		s.profiles = slices.DeleteFunc(s.profiles, func(p sandboxer.Profile) bool { return p.ID == "profile.lazy" })
	}
}

func (r *rig) warm(profile string) []*sandboxer.Sandbox {
	r.t.Helper()
	items, _, err := r.List(admin, sandboxer.Query{Profile: profile, States: []sandboxer.State{sandboxer.Warm}})
	if err != nil {
		r.t.Fatal(err)
	}
	return items
}

// full waits until the pool of the profile has size warm ones that it may give away, in the database as in its
// memory of them, and returns their IDs.
func (r *rig) full(profile string, size int) (ids []string) {
	r.t.Helper()
	p := r.poolOf("profile." + profile)
	eventually(r.t, fmt.Sprintf("%d warm ones of %s", size, profile), func() bool {
		ids = nil
		for _, sb := range r.warm(profile) {
			if !lifecycle.MayBeClaimed(sb) {
				ids = append(ids, sb.ID)
			}
		}
		p.mu.Lock()
		known := slices.Clone(p.ready)
		p.mu.Unlock()
		slices.Sort(known)
		return len(ids) == size && slices.Equal(known, slices.Sorted(slices.Values(ids)))
	})
	return ids
}

func TestPoolClaim(t *testing.T) {
	r := newRig(t, pooled(2))
	if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
		t.Fatal(err)
	}
	ids := r.full("paid", 2)
	r.full("test", 2)
	if items, _, err := r.List(acme, sandboxer.Query{}); err != nil || len(items) > 0 {
		t.Errorf("a tenant sees what is nobody's: %v, %v", items, err)
	}
	if _, err := r.Get(acme, ids[0]); !isKind(err, sandboxer.NotFound) {
		t.Errorf("a tenant finds what is nobody's: %v", err)
	}
	r.noHolds()
	sb := r.create(sandboxer.CreateRequest{Profile: "paid", Name: "mine", Key: "k", TTL: 30 * time.Minute,
		Env: map[string]string{"A": "b"}, Labels: map[string]string{"l": "m"}, Consumer: sandboxer.Consumer{ID: "c"}})
	if !slices.Contains(ids, sb.ID) || sb.State != sandboxer.Running || sb.Tenant != sandboxer.DefaultTenant || sb.Name != "mine" || sb.Consumer.ID != "c" ||
		sb.Spec.Labels["l"] != "m" || sb.Spec.Warm || sb.PooledAt.IsZero() || !sb.CreatedAt.After(sb.PooledAt) || sb.Quote.Amount == 0 || sb.Reason != "" {
		t.Errorf("claimed: %+v", sb)
	}
	if left := time.Until(sb.ExpiresAt); left < 29*time.Minute || left > 30*time.Minute {
		t.Errorf("it lives for %s", left)
	}
	var out strings.Builder
	x, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "echo $A$FROM"}, Stdout: &out})
	if err != nil || x.Code != 0 || out.String() != "b\n" {
		t.Errorf("its environment: %q, %+v, %v", out.String(), x, err)
	}
	if again := r.create(sandboxer.CreateRequest{Profile: "paid", Name: "mine", Key: "k", TTL: 30 * time.Minute,
		Env: map[string]string{"A": "b"}, Labels: map[string]string{"l": "m"}, Consumer: sandboxer.Consumer{ID: "c"}}); again.ID != sb.ID || again.Found {
		t.Errorf("the same key gives %s, found %t", again.ID, again.Found)
	}
	want := "g1 →creating pool pool; g1 step pool; g1 creating→warm pool pool; g1 warm→creating requested user:default; g1 creating→running  user:default"
	if got := history(t, r.Manager, sb.ID); got != want {
		t.Errorf("history %q\nwant    %q", got, want)
	}
	// Conflicts and lacks leave the pool as it is.
	r.full("paid", 2)
	_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "paid", Name: "mine"})
	wantErr(t, err, sandboxer.Conflict, `"mine" belongs to sandbox`)
	_, err = r.Create(rival, sandboxer.CreateRequest{Profile: "paid"})
	wantErr(t, err, sandboxer.NoCredit, "rival has 0.00")
	r.full("paid", 2)
	r.destroy(sb.ID)
	r.noHolds()
	r.full("paid", 2)
	r.sound(4)
}

func TestPoolCold(t *testing.T) {
	r := newRig(t, pooled(1))
	r.full("test", 1)
	for why, req := range map[string]sandboxer.CreateRequest{
		"its ID was chosen": {Inputs: map[string]string{"sandbox_id": "mine"}},
		"another image":     {Image: "other"},
		"another command":   {Command: []string{"sleep", "1000"}},
		"a host was named":  {Host: "localhost"},
	} {
		sb := r.create(req)
		if sb.Pool != "" {
			t.Errorf("%s: it came from the pool", why)
		}
		events, err := r.Events(acme, sandboxer.EventQuery{SandboxID: sb.ID})
		if err != nil || !slices.ContainsFunc(events, func(ev sandboxer.Event) bool { return ev.Message == "not from the pool: "+why }) {
			t.Errorf("%s: events %+v, %v", why, events, err)
		}
	}
	pools, err := r.Pools(admin)
	if err != nil || len(pools) != 2 || pools[0].Ready != 1 || *pools[0].Cold != 4 || *pools[0].Claimed != 0 {
		t.Errorf("pools: %+v, %v", pools, err)
	}
	// What all tenants' creates came to is none of one tenant's business.
	pools, err = r.Pools(acme)
	if err != nil || len(pools) != 2 || pools[0].Ready != 1 || pools[0].Cold != nil || pools[0].Claimed != nil {
		t.Errorf("pools, to a tenant: %+v, %v", pools, err)
	}
	p := sandboxer.Profile{Limits: sandboxer.Limits{PIDs: 9}, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}}
	for why, o := range map[string]*creation{
		"other limits":         {Resolved: spec.Resolved{Spec: sandboxer.Spec{Limits: sandboxer.Limits{PIDs: 8}, Network: p.Network}}},
		"another network mode": {Resolved: spec.Resolved{Spec: sandboxer.Spec{Limits: p.Limits}}},
		"mounts":               {Resolved: spec.Resolved{Spec: sandboxer.Spec{Limits: p.Limits, Network: p.Network}, Asked: sandboxer.CreateRequest{Mounts: make([]sandboxer.Mount, 1)}}},
	} {
		if got := (&pool{profile: p}).whyCold(o); got != why {
			t.Errorf("refused because of %q, want %q", got, why)
		}
	}
}

// TestPoolRace has many ask at the same time for few.
func TestPoolRace(t *testing.T) {
	r := newRig(t, pooled(3))
	ids := r.full("test", 3)
	var mu sync.Mutex
	owner := map[string]string{}
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			tenant := fmt.Sprint("t", i%4)
			sb, err := r.Create(as(tenant), sandboxer.CreateRequest{Profile: "test", Env: map[string]string{"N": fmt.Sprint(i)}})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if other := owner[sb.ID]; other != "" || sb.Tenant != tenant {
				t.Errorf("%s belongs to %s and %s (%s)", sb.ID, other, tenant, sb.Tenant)
			}
			owner[sb.ID] = tenant
		})
	}
	wg.Wait()
	for _, id := range ids {
		if owner[id] == "" {
			t.Errorf("%s was not claimed", id)
		}
	}
	r.full("test", 3)
	r.full("paid", 3)
	r.sound(24 + 6)
}

// TestPoolTwoClaims has a memory that is older than the database: it is only a hint.
func TestPoolTwoClaims(t *testing.T) {
	r := newRig(t, pooled(1))
	id := r.full("test", 1)[0]
	p := r.poolOf("profile.test")
	first := r.create(sandboxer.CreateRequest{})
	p.mu.Lock()
	p.ready = append([]string{id}, p.ready...) // what an older memory would say
	p.mu.Unlock()
	second := r.create(sandboxer.CreateRequest{})
	if first.ID != id || second.ID == id {
		t.Errorf("%s went to %s and %s", id, first.ID, second.ID)
	}
}

func TestPoolProfileChange(t *testing.T) {
	r := newRig(t, pooled(2))
	old := r.full("test", 2)
	r.full("paid", 2)
	r.restart()
	if again := r.full("test", 2); !slices.Equal(again, old) {
		t.Errorf("after a restart the pool has %v, want %v", again, old)
	}
	r.setup.profiles = testProfiles()[:2]
	r.setup.profiles[0].Pool.Size = 2
	r.setup.profiles[0].Env = map[string]string{"FROM": "another"}
	r.restart()
	eventually(t, "the old ones to go", func() bool {
		for _, id := range old {
			if sb := r.get(id); sb.State != sandboxer.Terminated || sb.Reason != sandboxer.ReasonPool {
				return false
			}
		}
		return len(r.warm("paid")) == 0
	})
	r.full("test", 2)
	eventually(t, "their objects to go", func() bool { return len(r.world.Live()) == 2 })
	old = r.full("test", 2)
	r.setup.fake.Revision = "2"
	r.restart()
	eventually(t, "those of the former revision to go", func() bool { return r.get(old[0]).State == sandboxer.Terminated })
	old = r.full("test", 2)
	if id, n, err := r.DrainPool(admin, "test"); err != nil || n != 2 || id != "profile.test" {
		t.Errorf("drained %d, %v", n, err)
	}
	if _, _, err := r.DrainPool(acme, "test"); !isKind(err, sandboxer.Denied) {
		t.Errorf("a tenant drains: %v", err)
	}
	if now := r.full("test", 2); slices.Contains(now, old[0]) {
		t.Errorf("%s is still there", old[0])
	}
	r.sound(2)
}

// TestPoolDrainsWhatIsProbed drains a pool while the sweep looks at what is in it.
func TestPoolDrainsWhatIsProbed(t *testing.T) {
	r := newRig(t, pooled(2))
	ids := r.full("test", 2)
	eventually(t, "it to be free", func() bool { return r.sweepLocks.tryLock(ids[0]) })
	time.AfterFunc(100*time.Millisecond, func() { r.unlockSweep(ids[0]) })
	if _, n, err := r.DrainPool(admin, "test"); err != nil || n != 2 {
		t.Errorf("drained %d, %v", n, err)
	}
	r.full("test", 2)
	r.full("paid", 2)
	r.sound(4)
}

// lateBooks give what was read out late, once after hold was set.
type lateBooks struct {
	sandboxer.Store
	hold      atomic.Bool
	read, out chan struct{}
}

func (b *lateBooks) Sandboxes(ctx context.Context, q sandboxer.Query) ([]*sandboxer.Sandbox, string, error) {
	items, next, err := b.Store.Sandboxes(ctx, q)
	if q.Profile == "profile.test" && b.hold.CompareAndSwap(true, false) {
		b.read <- struct{}{}
		<-b.out
	}
	return items, next, err
}

// TestPoolOldLook drains a pool while somebody has looked into the database for it and
// believes it to be full: it is filled all the same.
func TestPoolOldLook(t *testing.T) {
	b := &lateBooks{read: make(chan struct{}), out: make(chan struct{})}
	r := newRig(t, func(s *setup) {
		pooled(1)(s)
		s.database = func(db sandboxer.Store) sandboxer.Store { b.Store = db; return b }
	})
	r.full("test", 1)
	open := sync.OnceFunc(func() { close(b.out) })
	t.Cleanup(open)
	b.hold.Store(true)
	r.wakePools()
	<-b.read
	if _, n, err := r.DrainPool(admin, "test"); err != nil || n != 1 {
		t.Errorf("drained %d, %v", n, err)
	}
	eventually(t, "the wish to look again", func() bool { return len(r.poolsDue) == 0 })
	time.Sleep(10 * time.Millisecond) // it is heard, and nobody is free for it
	open()
	r.full("test", 1)
	r.full("paid", 1)
	r.sound(2)
}

func TestPoolBackoff(t *testing.T) {
	r := newRig(t, func(s *setup) {
		pooled(1)(s)
		s.fake.Faults = []fake.Fault{{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable}}
	})
	p := r.poolOf("profile.test")
	eventually(t, "two failures", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.failures >= 2 })
	for range 20 {
		r.wakePools()
		time.Sleep(5 * time.Millisecond)
	}
	p.mu.Lock()
	failures := p.failures
	p.mu.Unlock()
	if failures > 3 {
		t.Errorf("%d failures at once", failures)
	}
	pools, err := r.Pools(admin)
	if err != nil || pools[0].Problem == "" || pools[0].RetryAt.IsZero() {
		t.Errorf("pools: %+v, %v", pools, err)
	}
	r.sound(0)
}

// TestPoolDead claims one whose object died unnoticed: another takes its place.
func TestPoolDead(t *testing.T) {
	r := newRig(t, func(s *setup) {
		pooled(1)(s)
		s.fake.Drop = []sandboxer.Capability{sandboxer.CanNotify} // nobody knows of it yet
	})
	id := r.full("test", 1)[0]
	r.world.Kill(id)
	sb := r.create(sandboxer.CreateRequest{})
	if sb.ID != id || sb.Spec.Generation != 2 || sb.State != sandboxer.Running {
		t.Errorf("got %s, generation %d, %s; want %s made anew", sb.ID, sb.Spec.Generation, sb.State, id)
	}
	if x, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
		t.Errorf("exec: %+v, %v", x, err)
	}
	r.destroy(sb.ID)
	r.full("test", 1)
	r.full("paid", 1)
	r.sound(2)
}

// TestPoolRefused claims with what the backend refuses: the create fails as a cold one.
func TestPoolRefused(t *testing.T) {
	r := newRig(t, pooled(1))
	id := r.full("test", 1)[0]
	r.world.Inject(fake.Fault{Verb: fake.VerbClaim, Kind: sandboxer.Failed, Times: 1})
	_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
	wantErr(t, err, sandboxer.Failed, "could not be created")
	if sb := r.get(id); sb.State != sandboxer.Terminated || sb.Tenant != sandboxer.DefaultTenant || sb.Cost != 0 {
		t.Errorf("the failed one: %+v", sb)
	}
	r.noHolds()
}

func TestPoolAge(t *testing.T) {
	r := newRig(t, func(s *setup) { pooled(1)(s); s.opts.SweepEvery = 20 * time.Millisecond })
	id := r.full("test", 1)[0]
	sb := r.get(id)
	sb.ExpiresAt = now().Add(-time.Second)
	if err := r.store.UpdateSandbox(t.Context(), sb, sandboxer.Writes{}); err != nil {
		t.Fatal(err)
	}
	r.await(id, sandboxer.Terminated)
	eventually(t, "another to take its place", func() bool {
		warm := r.warm("test")
		return len(warm) == 1 && warm[0].ID != id
	})
}

// TestPoolKeyIsKeyed: a pooled sandbox is also kept with a digest of its environment.
// Without the installation's key values cannot be tried; with it, the digest is the same after a restart.
func TestPoolKeyIsKeyed(t *testing.T) {
	pool := func(key []byte) (*rig, string) {
		r := newRig(t, func(s *setup) {
			pooled(1)(s)
			s.opts.Key = key
		})
		r.full("test", 1)
		return r, r.warm("test")[0].Pool
	}
	r, one := pool(testKey)
	if _, other := pool(bytes.Repeat([]byte{8}, 32)); one == other || one == "" {
		t.Errorf("with another key it is %q, too", other)
	}
	id := r.warm("test")[0].ID
	r.restart()
	if ids := r.full("test", 1); ids[0] != id {
		t.Errorf("after a restart %s is ready, not %s", ids[0], id)
	}
}
