package manager

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// A situation is a state of a sandbox, and what is being done with it.
type situation struct {
	name  string
	state sandboxer.State
	// enter brings a sandbox there and returns its ID.
	enter func(t *testing.T, r *rig) string
	// keeps says that nothing of its backend's is needed.
	keeps bool
}

// during calls do in the background, which ends with the test.
func (r *rig) during(t *testing.T, do func() error) {
	over := make(chan struct{})
	go func() {
		defer close(over)
		if err := do(); err != nil {
			t.Logf("the caller was told: %v", err)
		}
	}()
	t.Cleanup(func() { <-over })
	synctest.Wait()
}

func (r *rig) hangs(verb fake.Verb) { r.world.Inject(fake.Fault{Verb: verb, Hang: true}) }

func (r *rig) fails(kind sandboxer.Kind, verbs ...fake.Verb) {
	for _, v := range verbs {
		r.world.Inject(fake.Fault{Verb: v, Kind: kind})
	}
}

// long is so long that what is tried again waits as long as it ever does.
const long = 10 * time.Minute

var situations = []situation{
	{name: "creating", state: sandboxer.Creating, enter: func(t *testing.T, r *rig) string {
		r.hangs(fake.VerbWaitReady)
		return r.create(sandboxer.CreateRequest{NoWaiting: true, TTL: time.Hour}).ID
	}},
	{name: "resuming what is frozen", state: sandboxer.Creating, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.pause(sb.ID, sandboxer.PauseFreeze)
		r.hangs(fake.VerbResume)
		r.during(t, func() error { _, err := r.Resume(acme, sb.ID, ResumeRequest{}); return err })
		return sb.ID
	}},
	{name: "resuming from disk", state: sandboxer.Creating, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.pause(sb.ID, sandboxer.PauseFiles)
		r.hangs(fake.VerbWaitReady)
		r.during(t, func() error { _, err := r.Resume(acme, sb.ID, ResumeRequest{}); return err })
		return sb.ID
	}},
	{name: "warm", state: sandboxer.Warm, enter: func(t *testing.T, r *rig) string {
		return r.full("pooled", 1)[0]
	}},
	{name: "running", state: sandboxer.Running, enter: func(t *testing.T, r *rig) string {
		return r.create(sandboxer.CreateRequest{TTL: time.Hour}).ID
	}},
	{name: "running, being saved", state: sandboxer.Running, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.hangs(fake.VerbSnapshot)
		r.during(t, func() error { _, err := r.Snapshot(acme, sb.ID, SnapshotRequest{TTL: time.Hour}); return err })
		return sb.ID
	}},
	{name: "freezing", state: sandboxer.Pausing, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.hangs(fake.VerbPause)
		r.during(t, func() error {
			_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFreeze})
			return err
		})
		return sb.ID
	}},
	{name: "pausing to disk, being saved", state: sandboxer.Pausing, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.hangs(fake.VerbSnapshot)
		r.during(t, func() error {
			_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
			return err
		})
		return sb.ID
	}},
	{name: "pausing again, later", state: sandboxer.Pausing, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.pause(sb.ID, sandboxer.PauseFreeze)
		r.fails(sandboxer.Invalid, fake.VerbResume)
		r.fails(sandboxer.Unavailable, fake.VerbPause)
		if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); err == nil {
			t.Fatal("it was resumed")
		}
		time.Sleep(long)
		return sb.ID
	}},
	{name: "frozen", state: sandboxer.Paused, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		return r.pause(sb.ID, sandboxer.PauseFreeze).ID
	}},
	{name: "paused to disk", state: sandboxer.Paused, keeps: true, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		return r.pause(sb.ID, sandboxer.PauseFiles).ID
	}},
	{name: "saved, being removed", state: sandboxer.Pausing, keeps: true, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.hangs(fake.VerbTeardown)
		r.during(t, func() error {
			_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
			return err
		})
		return sb.ID
	}},
	{name: "terminating", state: sandboxer.Terminating, enter: func(t *testing.T, r *rig) string {
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.fails(sandboxer.Unavailable, fake.VerbTeardown)
		if _, err := r.Destroy(acme, sb.ID); err == nil {
			t.Fatal("it was destroyed")
		}
		time.Sleep(long)
		return sb.ID
	}},
}

// newMortalRig is a rig whose sandboxes die, once dead is set, and are listed still.
func newMortalRig(t *testing.T, dead *atomic.Bool, opts backend.Options) *rig {
	return newRig(t, func(s *setup) {
		s.backend = opts
		ticking(s)
		quiet(s)
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return remains{e, dead} }
		p := s.profiles[0]
		p.ID, p.Pool.Size = "profile.pooled", 1
		s.profiles = append(s.profiles, p)
	})
}

// TestNoStateOutlivesItsBackend: whatever state a sandbox is in and whatever is being done
// with it, when its backend proves it dead, it ends within two periods of the sweep's
// probes, and nothing of it is left.
func TestNoStateOutlivesItsBackend(t *testing.T) {
	covered := map[sandboxer.State]bool{sandboxer.Terminated: true}
	for _, s := range situations {
		covered[s.state] = true
		for _, listed := range []bool{false, true} {
			name := s.name + ", gone"
			if listed {
				name = s.name + ", remains are listed"
			}
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var dead atomic.Bool
					r := newMortalRig(t, &dead, backend.Options{})
					id := s.enter(t, r)
					synctest.Wait()
					if got := r.get(id); got.State != s.state {
						t.Fatalf("it is %s", got.State)
					}
					time.Sleep(7 * time.Second)
					if listed {
						dead.Store(true)
					} else {
						r.world.Kill(id)
					}
					if s.state == sandboxer.Terminating || s.keeps {
						r.world.Forgive() // what is gone is removed without anybody's help
					}
					time.Sleep(2 * probeEvery)
					synctest.Wait()
					got := r.get(id)
					if s.keeps {
						if got.State == sandboxer.Terminating || got.State == sandboxer.Terminated {
							t.Errorf("what was saved is %s (%s)", got.State, got.Reason)
						}
						time.Sleep(10 * time.Minute) // what hangs is over
						if got = r.get(id); got.State != sandboxer.Paused {
							t.Errorf("it is %s", got.State)
						}
						return
					}
					want := sandboxer.ReasonLost
					if s.state == sandboxer.Terminating {
						want = sandboxer.ReasonRequested
					}
					if got.State != sandboxer.Terminated || got.Reason != want {
						t.Errorf("%s after it died it is %s (%s), tried again at %s", 2*probeEvery, got.State, got.Reason, got.RetryAt)
					}
					for _, o := range r.world.Live() {
						if o.Spec.ID == id {
							t.Errorf("%s is left", o.Ref)
						}
					}
				})
			})
		}
	}
	for _, s := range sandboxer.States() {
		if !covered[s] {
			t.Errorf("no situation has the state %s", s)
		}
	}
}

// TestOneAbsenceKillsNobody: a backend that says once that a sandbox is gone, and then that
// it is there, ends nothing.
func TestOneAbsenceKillsNobody(t *testing.T) {
	for _, s := range situations {
		if s.keeps {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var dead atomic.Bool
				r := newMortalRig(t, &dead, backend.Options{})
				id := s.enter(t, r)
				time.Sleep(2 * lookEvery) // what its extension told of its making or pausing is looked at
				synctest.Wait()
				dead.Store(true)
				for range 2 * probeEvery / time.Second { // until it was asked once
					if time.Sleep(time.Second); !r.get(id).AbsentSince.IsZero() {
						break
					}
				}
				dead.Store(false)
				if r.get(id).AbsentSince.IsZero() {
					t.Errorf("nobody missed it")
				}
				time.Sleep(2 * probeEvery)
				synctest.Wait()
				if got := r.get(id); got.State != s.state || !got.AbsentSince.IsZero() {
					t.Errorf("it is %s (%s), absent since %s", got.State, got.Reason, got.AbsentSince)
				}
				r.world.Forgive()
			})
		})
	}
}

// TestOutOfReachKillsNobody: what cannot be asked, or never answers, is unknown; nothing is
// lost of it, for however long, and when it is back all goes on within two periods.
func TestOutOfReachKillsNobody(t *testing.T) {
	for how, fault := range map[string]fake.Fault{
		"out of reach": {Verb: fake.VerbAny, Kind: sandboxer.Unavailable},
		"hangs":        {Verb: fake.VerbAny, Hang: true},
	} {
		for _, s := range situations {
			t.Run(how+", "+s.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var dead atomic.Bool
					r := newMortalRig(t, &dead, backend.Options{Provision: time.Minute, Ready: time.Minute, Teardown: time.Minute, Save: time.Minute})
					id := s.enter(t, r)
					r.world.Forgive()
					r.world.Inject(fault)
					time.Sleep(long)
					synctest.Wait()
					got := r.get(id)
					failed := got.Reason == sandboxer.ReasonFailed && got.State == sandboxer.Terminating && s.state == sandboxer.Creating && !lifecycle.IsPaused(got)
					switch {
					case got.Reason == sandboxer.ReasonLost || got.State == sandboxer.Terminated:
						t.Errorf("%s later it is %s (%s)", long, got.State, got.Reason)
					case got.State == sandboxer.Terminating && s.state != sandboxer.Terminating && !failed:
						t.Errorf("%s later it is %s (%s)", long, got.State, got.Reason)
					}
					r.world.Forgive()
					ctx, cancel := context.WithTimeout(admin, 2*probeEvery+time.Minute) // and the call that began before it came back
					defer cancel()
					rest := []sandboxer.State{sandboxer.Running, sandboxer.Paused, sandboxer.Warm, sandboxer.Terminated}
					got, err := r.Wait(ctx, id, rest...)
					if err != nil || got.Reason == sandboxer.ReasonLost {
						t.Errorf("after it came back: %+v, %v", got, err)
					}
				})
			})
		}
	}
}
