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

// outdated lists, sorted, the sandboxes that the audit names because the database went back; "" stands for the
// hold itself.
func (r *rig) outdated() (ids []string) {
	r.t.Helper()
	a, err := r.Audit(admin)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, v := range a.Violations {
		if v.Invariant == invCurrent {
			ids = append(ids, v.SandboxID)
		}
	}
	slices.Sort(ids)
	return ids
}

func (r *rig) accept() {
	r.t.Helper()
	if err := r.AcceptDatabase(admin); err != nil {
		r.t.Fatal(err)
	}
}

// TestWentBackKillsNobody restores a backup whose deadlines are over by then. No deadline counts until an
// administrator accepts the database, also after a restart; those who extend their sandboxes until then keep
// them.
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
		forgotten := r.create(sandboxer.CreateRequest{TTL: 10 * time.Minute})
		gone := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		back := r.backUp()
		for _, sb := range []*sandboxer.Sandbox{extended, paid, forgotten} {
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
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		r.restart()
		time.Sleep(time.Minute)
		synctest.Wait()
		living := []*sandboxer.Sandbox{extended, paid, frozen, busy, forgotten}
		for _, sb := range living {
			if got := r.get(sb.ID); got.State != sandboxer.Running {
				t.Errorf("%s is %s (%s)", got.ID, got.State, got.Reason)
			}
		}
		if got := r.get(gone.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonLost {
			t.Errorf("what is gone is %s (%s)", got.State, got.Reason)
		}
		if n := len(r.world.Live()); n != len(living) {
			t.Fatalf("%d objects are left of %d", n, len(living))
		}
		want := []string{"", extended.ID, paid.ID, frozen.ID, forgotten.ID}
		slices.Sort(want)
		if got := r.outdated(); !slices.Equal(got, want) {
			t.Errorf("the audit names %q; want %q", got, want)
		}
		for _, sb := range []*sandboxer.Sandbox{extended, paid, frozen} {
			if _, err := r.Extend(acme, sb.ID, Extend{Add: 30 * time.Minute}); err != nil {
				t.Fatal(err)
			}
		}
		if sb := r.get(paid.ID); sb.Quote.Amount <= paid.Quote.Amount {
			t.Errorf("on hold for what was extended is %s, as before", sb.Quote.Amount)
		}
		// It stands frozen, and its record does not say so.
		if _, err := r.Pause(acme, frozen.ID, PauseRequest{Depth: sandboxer.PauseFreeze}); err != nil {
			t.Error(err)
		}
		if _, err := r.Resume(acme, frozen.ID, ResumeRequest{}); err != nil {
			t.Error(err)
		}
		if _, err := r.Exec(acme, frozen.ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
			t.Errorf("what was frozen does not run: %v", err)
		}
		if _, err := r.Exec(acme, busy.ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
			t.Fatal(err)
		}

		wantErr(t, r.AcceptDatabase(acme), sandboxer.Denied, "")
		r.accept()
		r.accept() // once more is success
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, sb := range []*sandboxer.Sandbox{extended, paid, frozen, busy} {
			if got := r.get(sb.ID); got.State != sandboxer.Running {
				t.Errorf("accepted: %s is %s (%s)", got.ID, got.State, got.Reason)
			}
		}
		if got := r.get(forgotten.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonExpired {
			t.Errorf("accepted: what nobody extended is %s (%s)", got.State, got.Reason)
		}
		r.sound(4)
		r.restart()
		if at := r.WentBack(); !at.IsZero() {
			t.Errorf("after a restart it went back at %s, and was accepted", at)
		}
		time.Sleep(3 * time.Hour)
		synctest.Wait()
		r.sound(0)
		r.noHolds()
	})
}

// TestWentBackWithoutFuse has a backend that tells no deadline: nothing ends before the database is
// accepted.
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
		ids := []string{kept.ID, unwanted.ID, paused.ID}
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, id := range ids {
			if sb := r.get(id); sb.State != sandboxer.Running && sb.State != sandboxer.Paused {
				t.Errorf("%s is %s (%s)", id, sb.State, sb.Reason)
			}
		}
		want := append([]string{""}, ids...)
		slices.Sort(want)
		if got := r.outdated(); !slices.Equal(got, want) {
			t.Errorf("the audit names %q; want %q", got, want)
		}
		if _, err := r.Extend(acme, kept.ID, Extend{TTL: 10 * time.Minute}); err != nil {
			t.Errorf("extend: %v", err)
		}
		if _, err := r.Resume(acme, paused.ID, ResumeRequest{}); err != nil {
			t.Errorf("resume: %v", err)
		}
		r.destroy(unwanted.ID)
		if _, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Name: "work"}); err != nil {
			t.Errorf("its name is not free: %v", err)
		}
		r.accept()
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, id := range []string{kept.ID, paused.ID} {
			if sb := r.get(id); sb.State != sandboxer.Running {
				t.Errorf("accepted: %s is %s (%s)", id, sb.State, sb.Reason)
			}
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, id := range ids {
			if sb := r.get(id); sb.State != sandboxer.Terminated {
				t.Errorf("%s is %s", id, sb.State)
			}
		}
		r.sound(0)
	})
}

// TestWentBackWhileItWasMade restores a backup from when a sandbox was being made. It is used since, and
// is made out again when the database is accepted, however long that takes.
func TestWentBackWhileItWasMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, sweeping)
		r.world.Inject(fake.Fault{Verb: fake.VerbWaitReady, Delay: time.Minute, Times: 1})
		sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", TTL: 2 * time.Hour, NoWaiting: true})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		back := r.backUp()
		time.Sleep(5 * time.Minute)
		if got := r.get(sb.ID); got.State != sandboxer.Running {
			t.Fatalf("it is %s", got.State)
		}
		back()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Creating || len(r.world.Live()) != 1 {
			t.Fatalf("it is %s (%s), with %d objects", got.State, got.Reason, len(r.world.Live()))
		}
		r.accept()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Running {
			t.Errorf("accepted: it is %s (%s): %s", got.State, got.Reason, got.Message)
		}
		r.sound(1)
		r.destroy(sb.ID)
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
			var warm []string
			items, _, err := r.List(admin, sandboxer.Query{States: []sandboxer.State{sandboxer.Warm}})
			for _, sb := range items {
				if sb.Unconfirmed == sandboxer.Claimed {
					warm = append(warm, sb.ID)
				}
			}
			if err != nil || len(warm) != 2 || !slices.Contains(warm, mine.ID) {
				t.Fatalf("%q of %d that are warm may be a tenant's, %v; want both of before, %s among them", warm, len(items), err, mine.ID)
			}
			// They are neither handed out nor drained, accepted or not.
			for i := range 6 {
				if i == 3 {
					r.accept()
				}
				if sb, err := r.Create(rival, sandboxer.CreateRequest{Profile: "test"}); err != nil || slices.Contains(warm, sb.ID) {
					t.Fatalf("another tenant gets %+v, %v", sb, err)
				}
			}
			if _, _, err := r.DrainPool(admin, "test"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			r.quarantine(warm...)
			if !slices.ContainsFunc(r.world.Live(), func(o fake.Object) bool { return o.Spec.ID == mine.ID }) {
				t.Fatal("it was removed")
			}
			if _, err := r.Exec(rival, mine.ID, sandboxer.Cmd{Args: []string{"true"}}); !isKind(err, sandboxer.NotFound) {
				t.Errorf("another tenant uses it: %v", err)
			}
			if got := r.outdated(); !slices.Contains(got, mine.ID) {
				t.Errorf("the audit names %q, without %s", got, mine.ID)
			}
			for _, id := range warm {
				if _, err := r.Destroy(admin, id); err != nil {
					t.Error(err)
				}
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			r.quarantine()
			if got := r.outdated(); len(got) > 0 {
				t.Errorf("the audit still names %q", got)
			}
		})
	}
}

// slack is the fake as a backend that tells a deadline and does not act upon it.
type slack struct {
	dull
	fuse time.Time
}

func (s slack) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	found, err := s.dull.Discover(ctx, id)
	found.Fuse = s.fuse
	return found, err
}

// TestWentBackKeeps: neither a snapshot nor an object that the database does not know is removed for a time
// that is over, until the database is accepted.
func TestWentBackKeeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fuse := time.Now().Add(20 * time.Minute)
		r := newRig(t, func(s *setup) {
			sweeping(s)
			s.wrap = func(e *fake.Extension) sandboxer.Extension { return slack{dull{e}, fuse} }
		})
		known := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		rec, err := r.Snapshot(acme, known.ID, SnapshotRequest{Kind: sandboxer.SnapshotNative, TTL: 10 * time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		back := r.backUp()
		lost := r.create(sandboxer.CreateRequest{TTL: 15 * time.Minute})
		back()
		time.Sleep(time.Hour)
		synctest.Wait()
		r.quarantine(lost.ID)
		if got, err := r.store.Snapshot(t.Context(), rec.ID); err != nil || got.State != sandboxer.SnapshotSealed {
			t.Errorf("the snapshot is %+v, %v", got, err)
		}
		if n := len(r.world.Live()); n != 2 {
			t.Errorf("%d objects are left of 2", n)
		}
		r.accept()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		r.quarantine()
		if got, err := r.store.Snapshot(t.Context(), rec.ID); err != nil || got.State != sandboxer.SnapshotDropped {
			t.Errorf("accepted: the snapshot is %+v, %v", got, err)
		}
		r.destroy(known.ID)
		r.sound(0)
	})
}
