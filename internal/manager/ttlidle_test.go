package manager

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// renewals notes when fuses were moved, and to what.
type renewals struct {
	*fake.Extension
	mu   *sync.Mutex
	at   *[]time.Time
	fuse *time.Time
}

func (r *renewals) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	err := r.Extension.Renew(ctx, h, until)
	r.mu.Lock()
	defer r.mu.Unlock()
	*r.at, *r.fuse = append(*r.at, time.Now()), until
	return err
}

func byUse(idle, longest time.Duration) sandboxer.Profile {
	return sandboxer.Profile{ID: "profile.used", Extension: "ext.fake", TTL: sandboxer.TTLIdle, Idle: idle, MaxTTL: longest}
}

// TestTTLIdle: it lives as long as it is used, and not longer than its profile allows; the backend keeps it
// until then and a little longer, and its deadline moves once a minute at most.
func TestTTLIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := renewals{mu: new(sync.Mutex), at: new([]time.Time), fuse: new(time.Time)}
		r := newRig(t, func(s *setup) {
			s.opts.SweepEvery = 20 * time.Second
			s.profiles = append(s.profiles, byUse(5*time.Minute, 70*time.Minute))
			s.wrap = func(f *fake.Extension) sandboxer.Extension { x.Extension = f; return &x }
		})
		sb := r.create(sandboxer.CreateRequest{Profile: "used"})
		if sb.ExpiresAt != sb.CreatedAt.Add(70*time.Minute) || sb.EndsAt() != sb.UsedAt.Add(5*time.Minute) || !sb.Spec.Fuse.Before(sb.CreatedAt.Add(40*time.Minute)) {
			t.Errorf("unused it ends at %s, in any case at %s; its fuse is at %s", sb.EndsAt(), sb.ExpiresAt, sb.Spec.Fuse)
		}
		_, _, end, err := r.Manager.beginStream(acme, sandboxer.ScopeWrite, sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			time.Sleep(time.Minute)
			synctest.Wait()
			cur := r.get(sb.ID)
			if cur.State != sandboxer.Running {
				t.Fatalf("used, it is %s (%s) after %s", cur.State, cur.Reason, time.Since(sb.CreatedAt))
			}
			if !cur.Spec.Fuse.After(time.Now().Add(5*time.Minute)) || !cur.EndsAt().Equal(time.Now().Add(5*time.Minute)) {
				t.Fatalf("at %s it ends at %s, and its fuse is at %s", time.Now(), cur.EndsAt(), cur.Spec.Fuse)
			}
		}
		end()
		x.mu.Lock()
		if n := len(*x.at); n < 7 || n > 20 {
			t.Errorf("its fuse was moved %d times within the 20 minutes in which it has to be", n)
		}
		for i := 1; i < len(*x.at); i++ {
			if gap := (*x.at)[i].Sub((*x.at)[i-1]); gap < time.Minute {
				t.Errorf("its fuse was moved %s after it was", gap)
			}
		}
		x.mu.Unlock()
		time.Sleep(4*time.Minute + 30*time.Second)
		synctest.Wait()
		if cur := r.get(sb.ID); cur.State != sandboxer.Running {
			t.Errorf("it is %s before its idle time is over", cur.State)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if cur := r.get(sb.ID); cur.State != sandboxer.Terminated || cur.Reason != sandboxer.ReasonIdle {
			t.Errorf("unused it is %s (%s)", cur.State, cur.Reason)
		}

		// However much it is used, it ends.
		sb = r.create(sandboxer.CreateRequest{Profile: "used"})
		_, _, end, err = r.Manager.beginStream(acme, sandboxer.ScopeWrite, sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer end()
		time.Sleep(70*time.Minute + time.Second)
		synctest.Wait()
		if cur := r.get(sb.ID); cur.State != sandboxer.Terminated || cur.Reason != sandboxer.ReasonExpired {
			t.Errorf("after the longest life it is %s (%s)", cur.State, cur.Reason)
		}
		x.mu.Lock()
		if !x.fuse.Equal(sb.CreatedAt.Add(70*time.Minute + lifecycle.FuseMargin)) {
			t.Errorf("its last fuse was %s after its end", x.fuse.Sub(sb.CreatedAt.Add(70*time.Minute)))
		}
		x.mu.Unlock()
		r.sound(0)
	})
}

// TestTTLIdlePauses: with on_idle pause its life stops while it is not in use, and goes on with its use.
func TestTTLIdlePauses(t *testing.T) {
	for depth := range map[sandboxer.PauseDepth]bool{sandboxer.PauseFreeze: true, sandboxer.PauseFiles: true} {
		t.Run(string(depth), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(s *setup) {
					s.opts.SweepEvery = time.Minute
					p := byUse(5*time.Minute, 2*time.Hour)
					p.OnIdle, p.AutoResume, p.PauseDepth = sandboxer.ExpiryPause, true, depth
					s.profiles = append(s.profiles, p)
				})
				sb := r.create(sandboxer.CreateRequest{Profile: "used"})
				for range 2 {
					time.Sleep(7 * time.Minute)
					synctest.Wait()
					if cur := r.get(sb.ID); cur.State != sandboxer.Paused || cur.Pause.Cause != sandboxer.ReasonIdle {
						t.Fatalf("unused it is %s (%s)", cur.State, cur.Reason)
					}
					time.Sleep(time.Hour)
					_, _, end, err := r.Manager.beginStream(acme, sandboxer.ScopeWrite, sb.ID)
					if err != nil {
						t.Fatal(err)
					}
					time.Sleep(20 * time.Minute)
					end()
					if cur := r.get(sb.ID); cur.State != sandboxer.Running || !cur.Spec.Fuse.After(cur.EndsAt()) {
						t.Fatalf("in use it is %s, ends at %s, and its fuse is at %s", cur.State, cur.EndsAt(), cur.Spec.Fuse)
					}
				}
				r.destroy(sb.ID)
				r.sound(0)
			})
		})
	}
}

// TestTTLIdleRequests: what a request may say of it, and what can be done with one that lives so.
func TestTTLIdleRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { s.profiles = append(s.profiles, byUse(5*time.Minute, 2*time.Hour)) })
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", TTL: sandboxer.TTLIdle})
		wantErr(t, err, sandboxer.Invalid, "needs an idle time, and profile profile.test has none")
		sb := r.create(sandboxer.CreateRequest{TTL: sandboxer.TTLIdle, Idle: time.Minute})
		if !sb.LivesByUse() || sb.EndsAt() != sb.UsedAt.Add(time.Minute) || sb.ExpiresAt != sb.CreatedAt.Add(2*time.Hour) {
			t.Errorf("%+v", sb)
		}
		plan, err := r.Plan(acme, sandboxer.CreateRequest{Profile: "used"})
		if err != nil || plan.TTL != sandboxer.TTLIdle || plan.Quote.Duration != 2*time.Hour {
			t.Errorf("%+v, %v", plan, err)
		}
		for name, err := range map[string]error{
			"extend": errOf(r.Extend(acme, sb.ID, Extend{Add: time.Minute})),
			"resume": errOf(r.Resume(acme, sb.ID, ResumeRequest{TTL: time.Minute})),
		} {
			if sandboxer.KindOf(err) != sandboxer.Invalid {
				t.Errorf("%s: %v", name, err)
			}
			wantErr(t, err, sandboxer.Invalid, "it lives as long as it is used")
		}
		fixed := r.create(sandboxer.CreateRequest{Profile: "used", TTL: time.Hour, Inputs: map[string]string{"sandbox_id": "fixed"}})
		if fixed.LivesByUse() || fixed.EndsAt() != fixed.CreatedAt.Add(time.Hour) {
			t.Errorf("%+v", fixed)
		}
		if _, err := r.Extend(acme, fixed.ID, Extend{Add: time.Minute}); err != nil {
			t.Error(err)
		}
		_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "used", TTL: sandboxer.TTLIdle, Inputs: map[string]string{"sandbox_id": "fixed"}})
		wantErr(t, err, sandboxer.Conflict, "belongs to another sandbox")
		copies, err := r.Fork(acme, fixed.ID, ForkRequest{Count: 1, TTL: sandboxer.TTLIdle})
		if err != nil || !copies[0].LivesByUse() {
			t.Fatalf("%+v, %v", copies, err)
		}
		for _, id := range []string{sb.ID, fixed.ID, copies[0].ID} {
			r.destroy(id)
		}
		r.sound(0)
	})
}

func errOf(_ *sandboxer.Sandbox, err error) error { return err }

// TestTTLIdleWithoutRenew: a backend without Renew gets the longest life at once.
func TestTTLIdleWithoutRenew(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.fake.Drop = []sandboxer.Capability{sandboxer.CanRenew}
		s.profiles = append(s.profiles, byUse(5*time.Minute, 2*time.Hour))
	})
	sb := r.create(sandboxer.CreateRequest{Profile: "used"})
	if sb.Spec.Fuse != sb.CreatedAt.Add(2*time.Hour+lifecycle.FuseMargin) {
		t.Errorf("its fuse is %s after its creation", sb.Spec.Fuse.Sub(sb.CreatedAt))
	}
	r.destroy(sb.ID)
	r.sound(0)
}

// TestTTLIdleWentBack: it is not known when a sandbox was last used before the database went back. It counts as
// used then.
func TestTTLIdleWentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			sweeping(s)
			s.profiles = append(s.profiles, byUse(5*time.Minute, 2*time.Hour))
		})
		sb := r.create(sandboxer.CreateRequest{Profile: "used"})
		back := r.backUp()
		for range 10 {
			time.Sleep(4 * time.Minute)
			if _, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
				t.Fatal(err)
			}
		}
		back()
		r.accept()
		time.Sleep(4 * time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Running {
			t.Errorf("it is %s (%s)", got.State, got.Reason)
		}
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonIdle {
			t.Errorf("it is %s (%s), and nobody used it", got.State, got.Reason)
		}
		r.sound(0)
	})
}
