package manager

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// dull is the fake as a backend that keeps no deadline of its own, or tells none.
type dull struct{ *fake.Extension }

func (d dull) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	found, err := d.Extension.Discover(ctx, id)
	found.Fuse = time.Time{}
	return found, err
}

func (d dull) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	spec.Fuse = time.Time{}
	return d.Extension.Provision(ctx, spec)
}

// TestWentBackKillsNobody restores a backup whose deadlines are over by then: those who moved
// them since keep their sandboxes for as long as they asked for.
func TestWentBackKillsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { sweeping(s); s.profiles[2].Idle = 8 * time.Minute })
		if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
			t.Fatal(err)
		}
		extended := r.create(sandboxer.CreateRequest{TTL: 10 * time.Minute})
		paid := r.create(sandboxer.CreateRequest{Profile: "paid", TTL: 10 * time.Minute})
		frozen := r.create(sandboxer.CreateRequest{TTL: 10 * time.Minute})
		busy := r.create(sandboxer.CreateRequest{Profile: "lazy"})
		over := r.create(sandboxer.CreateRequest{TTL: 10 * time.Minute})
		gone := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		back := r.backUp()
		for _, sb := range []*sandboxer.Sandbox{extended, paid} {
			if _, err := r.Extend(acme, sb.ID, Extend{TTL: 50 * time.Minute}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := r.Pause(acme, frozen.ID, PauseRequest{Depth: sandboxer.PauseFreeze}); err != nil {
			t.Fatal(err)
		}
		r.destroy(gone.ID)
		time.Sleep(7 * time.Minute)
		if _, err := r.Exec(acme, busy.ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(4 * time.Minute)
		back()
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, want := range []struct {
			sb    *sandboxer.Sandbox
			state sandboxer.State
			until time.Time
		}{
			{extended, sandboxer.Running, extended.CreatedAt.Add(50 * time.Minute)},
			{paid, sandboxer.Running, paid.CreatedAt.Add(50 * time.Minute)},
			{frozen, sandboxer.Running, frozen.CreatedAt.Add(2 * time.Hour)}, // as long as its profile allows
			{busy, sandboxer.Running, busy.ExpiresAt},
			{over, sandboxer.Terminated, over.ExpiresAt},
			{gone, sandboxer.Terminated, gone.ExpiresAt},
		} {
			sb := r.get(want.sb.ID)
			if sb.State != want.state || sb.ExpiresAt.Sub(want.until).Abs() > time.Second || sb.Unconfirmed != "" {
				t.Errorf("%s is %s (%s), %q, expires at %s; want %s, %s", sb.ID, sb.State, sb.Reason, sb.Unconfirmed, sb.ExpiresAt, want.state, want.until)
			}
		}
		if _, err := r.Exec(acme, frozen.ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
			t.Errorf("what was frozen does not run: %v", err)
		}
		if sb := r.get(paid.ID); sb.Quote.Amount <= paid.Quote.Amount {
			t.Errorf("on hold for what was extended is %s, as before", sb.Quote.Amount)
		}
		r.sound(4)
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := len(r.world.Live()); n != 1 { // the frozen one
			t.Errorf("%d objects are left of 1", n)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		r.sound(0)
		r.noHolds()
	})
}

// TestWentBackWithoutCredit has a tenant not have what its extension costs.
func TestWentBackWithoutCredit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, sweeping)
		grant := func(amount sandboxer.Credits, key string) {
			if err := r.Grant(admin, sandboxer.DefaultTenant, amount, key, ""); err != nil {
				t.Fatal(err)
			}
		}
		grant(50_000, "a")
		sb := r.create(sandboxer.CreateRequest{Profile: "paid", TTL: 10 * time.Minute})
		back := r.backUp()
		grant(sandboxer.Credit, "b")
		if _, err := r.Extend(acme, sb.ID, Extend{TTL: 50 * time.Minute}); err != nil {
			t.Fatal(err)
		}
		back()
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Running || got.Quote.Amount != sb.Quote.Amount {
			t.Errorf("it is %s with %s on hold", got.State, got.Quote.Amount)
		}
		r.sound(1)
		time.Sleep(time.Hour)
		synctest.Wait()
		r.sound(0)
		r.noHolds()
	})
}

// TestWentBackWithoutFuse has a backend that tells no deadline: people decide.
func TestWentBackWithoutFuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			sweeping(s)
			s.opts.SnapshotStore, s.profiles[0].MaxPaused = dirStore{s.dir}, 30*time.Minute
			s.fake.Drop = []sandboxer.Capability{sandboxer.CanRenew}
			s.wrap = func(e *fake.Extension) sandboxer.Extension { return dull{e} }
		})
		kept := r.create(sandboxer.CreateRequest{TTL: 10 * time.Minute})
		unwanted := r.create(sandboxer.CreateRequest{TTL: 10 * time.Minute, Name: "work"})
		paused := r.create(sandboxer.CreateRequest{})
		if _, err := r.Pause(acme, paused.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
			t.Fatal(err)
		}
		back := r.backUp()
		back()
		var ids []string
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, id := range []string{kept.ID, unwanted.ID, paused.ID} {
			if sb := r.get(id); sb.Unconfirmed != sandboxer.Untold || sb.State != sandboxer.Running && sb.State != sandboxer.Paused {
				t.Errorf("%s is %s (%s), %q", id, sb.State, sb.Reason, sb.Unconfirmed)
			}
			ids = append(ids, id)
		}
		a, err := r.Audit(admin)
		var named []string
		for _, v := range a.Violations {
			if v.Invariant == invCurrent {
				named = append(named, v.SandboxID)
			}
		}
		slices.Sort(ids)
		slices.Sort(named)
		if err != nil || !slices.Equal(named, ids) {
			t.Errorf("audit names %v of %v: %v, %v", named, ids, a.Violations, err)
		}
		// Whoever wants it says so, and it lives as long as that.
		if sb, err := r.Extend(acme, kept.ID, Extend{TTL: 10 * time.Minute}); err != nil || sb.Unconfirmed != "" {
			t.Errorf("extended: %+v, %v", sb, err)
		}
		if _, err := r.Resume(acme, paused.ID, ResumeRequest{}); err != nil {
			t.Errorf("resume: %v", err)
		}
		r.destroy(unwanted.ID)
		if _, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Name: "work"}); err != nil {
			t.Errorf("its name is not free: %v", err)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, id := range ids {
			if sb := r.get(id); sb.State != sandboxer.Terminated {
				t.Errorf("%s is %s, %q", id, sb.State, sb.Unconfirmed)
			}
		}
		r.sound(0)
	})
}

// TestWentBackAway restores a backup while the backend is away: nothing is decided until
// it is back.
func TestWentBackAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, sweeping)
		sb := r.create(sandboxer.CreateRequest{TTL: 10 * time.Minute})
		back := r.backUp()
		if _, err := r.Extend(acme, sb.ID, Extend{TTL: time.Hour}); err != nil {
			t.Fatal(err)
		}
		for _, verb := range []fake.Verb{fake.VerbDiscover, fake.VerbProbe, fake.VerbList} {
			r.setup.fake.Faults = append(r.setup.fake.Faults, fake.Fault{Verb: verb, Kind: sandboxer.Unavailable})
		}
		back()
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Running || got.Unconfirmed != sandboxer.Unasked {
			t.Fatalf("it is %s (%s), %q", got.State, got.Reason, got.Unconfirmed)
		}
		r.setup.fake.Faults = nil
		r.restart()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Running || got.Unconfirmed != "" || got.ExpiresAt.Sub(sb.CreatedAt.Add(time.Hour)).Abs() > time.Second {
			t.Errorf("it is %s, %q, and expires at %s", got.State, got.Unconfirmed, got.ExpiresAt)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		r.sound(0)
	})
}

// TestWentBackClaimed restores a backup from when a sandbox waited in a pool that belongs to
// a tenant since.
func TestWentBackClaimed(t *testing.T) {
	for _, tells := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, func(s *setup) {
				sweeping(s)
				s.profiles[0].Pool = sandboxer.Pool{Size: 2}
				if !tells {
					s.fake.Drop = []sandboxer.Capability{sandboxer.CanDiscover}
				}
			})
			full := func() bool {
				ps, err := r.Pools(admin)
				return err == nil && len(ps) == 1 && ps[0].Ready == 2
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if !full() {
				t.Fatal("the pool is not full")
			}
			back := r.backUp()
			mine := r.create(sandboxer.CreateRequest{Env: map[string]string{"SECRET": "x"}, TTL: 40 * time.Minute})
			if mine.Pool == "" {
				t.Fatal("it is not from the pool")
			}
			back()
			time.Sleep(time.Minute)
			synctest.Wait()
			if got := r.get(mine.ID); got.State != sandboxer.Warm || got.Unconfirmed != sandboxer.Claimed {
				t.Fatalf("it is %s, %q", got.State, got.Unconfirmed)
			}
			// It is neither handed out nor drained.
			for range 3 {
				if sb, err := r.Create(rival, sandboxer.CreateRequest{Profile: "test"}); err != nil || sb.ID == mine.ID {
					t.Fatalf("another tenant gets %+v, %v", sb, err)
				}
			}
			if _, _, err := r.DrainPool(admin, "test"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if !slices.ContainsFunc(r.world.Live(), func(o fake.Object) bool { return o.Spec.ID == mine.ID }) {
				t.Fatal("it was removed")
			}
			if !tells { // what is in the pool may be anybody's, too
				if _, err := r.Destroy(admin, mine.ID); err != nil {
					t.Error(err)
				}
				return
			}
			for _, q := range r.quarantine(mine.ID) {
				if q.Tenant != sandboxer.DefaultTenant {
					t.Errorf("quarantined as tenant %q's", q.Tenant)
				}
			}
			if _, err := r.Exec(rival, mine.ID, sandboxer.Cmd{Args: []string{"true"}}); !isKind(err, sandboxer.NotFound) {
				t.Errorf("another tenant uses it: %v", err)
			}
			sb, err := r.Adopt(admin, mine.ID, Adoption{})
			if err != nil {
				t.Fatal(err)
			}
			if sb.Tenant != sandboxer.DefaultTenant || sb.State != sandboxer.Running || sb.Unconfirmed != "" {
				t.Errorf("adopted: %+v", sb)
			}
			if env, err := r.openEnv(sb); err != nil || env["SECRET"] != "x" {
				t.Errorf("its environment is %v, %v", env, err)
			}
			r.quarantine()
			a, err := r.Audit(admin)
			if err != nil || len(a.Violations) > 0 {
				t.Errorf("audit: %+v, %v", a.Violations, err)
			}
			r.destroy(mine.ID)
		})
	}
}
