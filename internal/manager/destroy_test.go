package manager

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// TestDestroyWhileCreating destroys at every step of a create.
func TestDestroyWhileCreating(t *testing.T) {
	for _, at := range []point{pRecord + ".after", pProvision + ".before", pProvision + ".after", pHandle + ".before", pHandle + ".after",
		pReady + ".before", pReady + ".after", pRunning + ".before", pRunning + ".after"} {
		t.Run(string(at), func(t *testing.T) {
			reached, once := make(chan struct{}), sync.Once{}
			r := newRig(t, func(s *setup) {
				s.opts.fail = func(p point) {
					if p == at {
						once.Do(func() { close(reached); time.Sleep(5 * time.Millisecond) })
					}
				}
			})
			req := sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "x"}, Key: "k"}
			made := make(chan error, 1)
			go func() { _, err := r.Create(acme, req); made <- err }()
			<-reached
			sb := r.destroy("x")
			if sb.State != sandboxer.Terminated || sb.Reason != sandboxer.ReasonRequested {
				t.Errorf("%+v", sb)
			}
			if provisioned := at != pRecord+".after" && at != pProvision+".before"; provisioned && sb.Handle.Ref == "" {
				t.Error("its handle was lost")
			}
			if err := <-made; err != nil {
				wantErr(t, err, sandboxer.Conflict, "ended while it was being created")
			}
			r.sound(0)
			r.noHolds()
		})
	}
}

// TestDestroyHanging destroys what hangs: the create is stopped, not waited for.
func TestDestroyHanging(t *testing.T) {
	for _, verb := range []fake.Verb{fake.VerbProvision, fake.VerbWaitReady} {
		r := newRig(t, nil)
		r.world.Inject(fake.Fault{Verb: verb, Hang: true, Lost: true, Times: 1})
		sb := r.create(sandboxer.CreateRequest{NoWaiting: true})
		eventually(t, "an object", func() bool { return len(r.world.Live()) == 1 })
		r.destroy(sb.ID)
		r.sound(0)
	}
}

// TestLateDestroy finishes an old generation while the next one is being made, which
// must not feel it.
func TestLateDestroy(t *testing.T) {
	r := newRig(t, nil)
	req := sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "x"}}
	r.create(req)
	old := *r.destroy("x")
	old.State, old.Version = sandboxer.Terminating, old.Version-1 // as somebody read it a moment before
	r.world.Inject(fake.Fault{Verb: fake.VerbWaitReady, Delay: 50 * time.Millisecond})
	req.NoWaiting = true
	next := r.create(req)
	got, err := r.box(&old).finishTeardown(acme)
	if err != nil || got.Generation != 1 || got.State != sandboxer.Terminated {
		t.Errorf("%+v, %v", got, err)
	}
	if sb := r.await("x", sandboxer.Running); next.Generation != 2 || sb.Generation != 2 {
		t.Errorf("%+v", sb)
	}
	r.sound(1)
}

// TestDestroyAtOnce lets many destroy one sandbox.
func TestDestroyAtOnce(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(sandboxer.CreateRequest{})
	sbs, errs := many(50, func(int) (*sandboxer.Sandbox, error) { return r.Destroy(acme, sb.ID) })
	for i := range sbs {
		if errs[i] != nil || sbs[i].State != sandboxer.Terminated {
			t.Fatalf("%+v, %v", sbs[i], errs[i])
		}
	}
	n := 0
	for _, e := range r.world.Log() {
		if e.SandboxID == sb.ID && e.Op == "remove" {
			n++
		}
	}
	if n > 1 {
		t.Errorf("%d objects were removed", n)
	}
	r.sound(0)
}

// TestRaces creates and destroys one ID in wild disorder.
func TestRaces(t *testing.T) {
	r := newRig(t, func(s *setup) { quiet(s); s.opts.SweepEvery = 5 * time.Millisecond })
	if err := r.Grant(admin, sandboxer.DefaultTenant, 100*sandboxer.Credit, "", ""); err != nil {
		t.Fatal(err)
	}
	r.world.Inject(
		fake.Fault{Verb: fake.VerbProvision, Times: 20, Skip: 3, Kind: sandboxer.Failed},
		fake.Fault{Verb: fake.VerbWaitReady, Times: 10, Skip: 5, Kind: sandboxer.Unavailable},
		fake.Fault{Verb: fake.VerbTeardown, Times: 10, Skip: 7, Lost: true},
	)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 20 {
				id := fmt.Sprint("id-", rand.IntN(3))
				var err error
				if rand.IntN(2) == 0 {
					_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "paid", Inputs: map[string]string{"sandbox_id": id}})
				} else {
					_, err = r.Destroy(acme, id)
				}
				switch sandboxer.KindOf(err) {
				case "", sandboxer.NotFound, sandboxer.Failed, sandboxer.Unavailable:
				case sandboxer.Conflict:
					wantErr(t, err, sandboxer.Conflict, "ended while it was being created")
				default:
					t.Errorf("unexpected: %v", err)
				}
			}
		})
	}
	wg.Wait()
	r.world.Forgive()
	for i := range 3 {
		if _, err := r.Destroy(acme, fmt.Sprint("id-", i)); err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Error(err)
		}
	}
	r.sound(0)
	r.noHolds()
}

// TestTeardownIsRepeated lets a teardown fail in every way and watches the sweep.
func TestTeardownIsRepeated(t *testing.T) {
	for name, f := range map[string]fake.Fault{
		"fails":       {Kind: sandboxer.Unavailable, Times: 3},
		"lost answer": {Lost: true, Times: 1},
		"lies":        {Lie: true, Times: 2},
		"hangs":       {Hang: true, Times: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(s *setup) {
					s.opts.SweepEvery = 7 * time.Second // none at the moment of the destroy
					s.backend = backend.Options{Teardown: 10 * time.Second}
				})
				if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
					t.Fatal(err)
				}
				sb := r.create(sandboxer.CreateRequest{Profile: "paid"})
				time.Sleep(30 * time.Minute)
				f.Verb = fake.VerbTeardown
				r.world.Inject(f)
				got, err := r.Destroy(acme, sb.ID)
				wantErr(t, err, sandboxer.Unavailable, "sandbox "+sb.ID+" is not removed yet")
				if got == nil || got.State != sandboxer.Terminating || got.LastError == "" || got.RetryAt.IsZero() {
					t.Fatalf("%+v", got)
				}
				time.Sleep(time.Minute)
				got = r.get(sb.ID)
				if got.State != sandboxer.Terminated || got.Cost != 80_000 { // 0.02 + half an hour of 0.12: not what we dawdled
					t.Errorf("%s, cost %s", got.State, got.Cost)
				}
				r.sound(0)
				r.noHolds()
				left, err := r.Balance(acme, "")
				if err != nil || left != sandboxer.Credit-80_000 {
					t.Errorf("%s left, %v", left, err)
				}
			})
		})
	}
}

// TestExtensionIsMissing destroys a sandbox whose extension is not there any more.
func TestExtensionIsMissing(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(sandboxer.CreateRequest{})
	r.Manager.Close()
	m, err := New(r.store, nil, nil, r.setup.opts)
	if err != nil {
		t.Fatal(err)
	}
	if a, err := m.Audit(admin); err != nil || len(a.Violations) != 1 || a.Violations[0].SandboxID != sb.ID || !strings.Contains(a.Violations[0].Detail, "ext.fake, which has it or may have it, is no longer configured") {
		t.Errorf("audit: %+v, %v", a, err)
	}
	got, err := m.Destroy(acme, sb.ID)
	wantErr(t, err, sandboxer.Unavailable, `extension "ext.fake" is no longer configured`)
	if got.State != sandboxer.Terminating {
		t.Errorf("%+v", got)
	}
	m.Close()
	r.restart()
	r.await(sb.ID, sandboxer.Terminated)
	r.sound(0)
}

// TestExtensionComesBack resumes a half-made sandbox when its extension, which was
// not there at the start, can be used again.
func TestExtensionComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		r.world.Inject(fake.Fault{Verb: fake.VerbWaitReady, Hang: true, Times: 1})
		req := sandboxer.CreateRequest{Profile: "test", Key: "k", NoWaiting: true, TTL: time.Hour}
		sb := r.create(req)
		synctest.Wait()
		r.Manager.Close()
		exts := []Extension{{Info: sandboxer.ExtensionInfo{ID: "ext.fake", Problem: "the engine is not up"}}}
		m, err := New(r.store, r.setup.profiles, exts, r.setup.opts)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Creating || got.Retries < 3 || got.LastError == "" {
			t.Errorf("without its extension it is %s after %d tries (%s)", got.State, got.Retries, got.LastError)
		}
		m.Close()
		r.world.Forgive()
		r.restart()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Running {
			t.Errorf("with its extension it is %s", got.State)
		}
		r.sound(1)
	})
}

func TestExtend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { s.opts.SweepEvery = time.Minute })
		if err := r.Grant(admin, sandboxer.DefaultTenant, 300_000, "", ""); err != nil {
			t.Fatal(err)
		}
		balance := func() sandboxer.Credits {
			c, err := r.Balance(acme, sandboxer.DefaultTenant)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		sb := r.create(sandboxer.CreateRequest{Profile: "paid"}) // 0.14 held for an hour
		for _, bad := range []Extend{{}, {TTL: 1, Add: 1}, {TTL: -1}, {Add: -1}} {
			_, err := r.Extend(acme, sb.ID, bad)
			wantErr(t, err, sandboxer.Invalid, "either")
		}
		_, err := r.Extend(acme, sb.ID, Extend{TTL: 25 * time.Hour})
		wantErr(t, err, sandboxer.Invalid, "profile profile.paid allows 24h0m0s")
		_, err = r.Extend(rival, sb.ID, Extend{Add: time.Hour})
		wantErr(t, err, sandboxer.NotFound, "there is no sandbox")
		_, err = r.Extend(acme, sb.ID, Extend{Add: 2 * time.Hour})
		wantErr(t, err, sandboxer.NoCredit, "")
		if got := r.get(sb.ID); !got.ExpiresAt.Equal(sb.ExpiresAt) || balance() != 160_000 {
			t.Errorf("a refused extension left %s, %s", got.ExpiresAt, balance())
		}
		got, err := r.Extend(acme, sb.ID, Extend{Add: time.Hour})
		if err != nil || !got.ExpiresAt.Equal(sb.ExpiresAt.Add(time.Hour)) || balance() != 40_000 {
			t.Errorf("%v, expires %s, %s left", err, got.ExpiresAt, balance())
		}
		if live := r.world.Live(); !live[0].Fuse.Equal(got.ExpiresAt.Add(lifecycle.FuseMargin)) {
			t.Errorf("the fuse is at %s", live[0].Fuse)
		}
		time.Sleep(90 * time.Minute)
		if r.get(sb.ID).State != sandboxer.Running {
			t.Error("it did not live on")
		}
		// Shorter: what is on hold stays until it ends.
		if _, err := r.Extend(acme, sb.ID, Extend{TTL: time.Minute}); err != nil || balance() != 40_000 {
			t.Errorf("%v, %s left", err, balance())
		}
		// A fuse that cannot be moved: nothing is promised.
		r.world.Inject(fake.Fault{Verb: fake.VerbRenew, Kind: sandboxer.Unavailable, Times: 1})
		_, err = r.Extend(acme, sb.ID, Extend{Add: time.Minute})
		wantErr(t, err, sandboxer.Unavailable, "")
		time.Sleep(time.Minute + time.Millisecond)
		synctest.Wait()
		end := r.get(sb.ID)
		if end.State != sandboxer.Terminated || end.Reason != sandboxer.ReasonExpired {
			t.Errorf("%s %s", end.State, end.Reason)
		}
		if want := sandboxer.Credits(20_000 + 182_000); end.Cost != want || balance() != 300_000-want { // 91 minutes
			t.Errorf("cost %s, %s left", end.Cost, balance())
		}
		_, err = r.Extend(acme, sb.ID, Extend{Add: time.Hour})
		wantErr(t, err, sandboxer.Conflict, "is terminated, not running (expired)")
		r.sound(0)
		r.noHolds()
	})
}

// TestExtendBeyondFuse: a backend that ends its sandboxes, and cannot move that, is not promised to keep one for longer.
func TestExtendBeyondFuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { s.fake.Drop = []sandboxer.Capability{sandboxer.CanRenew} })
		sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		for _, e := range []Extend{{TTL: 2 * time.Hour}, {Add: time.Hour}} {
			_, err := r.Extend(acme, sb.ID, e)
			wantErr(t, err, sandboxer.Unsupported, "and cannot move that")
		}
		if got := r.get(sb.ID); !got.ExpiresAt.Equal(sb.ExpiresAt) {
			t.Errorf("after that it expires at %s; want %s", got.ExpiresAt, sb.ExpiresAt)
		}
		if _, err := r.Extend(acme, sb.ID, Extend{TTL: 30 * time.Minute}); err != nil {
			t.Errorf("within its deadline: %v", err)
		}
		if _, err := r.Extend(acme, sb.ID, Extend{TTL: time.Hour}); err != nil {
			t.Errorf("back to its deadline: %v", err)
		}
	})
}

// TestExtendRacesExpiry extends sandboxes in the moment they expire: each is either
// extended and lives, or refused and ends.
func TestExtendRacesExpiry(t *testing.T) {
	r := newRig(t, func(s *setup) { quiet(s); s.opts.SweepEvery = 10 * time.Millisecond })
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", TTL: 4 * time.Second})
			if err == errTerminating {
				return // it took longer than that to make
			}
			if err != nil {
				t.Error(err)
				return
			}
			time.Sleep(time.Until(sb.ExpiresAt) - time.Duration(rand.IntN(4))*time.Millisecond)
			_, err = r.Extend(acme, sb.ID, Extend{TTL: time.Hour})
			if err == nil {
				time.Sleep(50 * time.Millisecond)
				if got := r.get(sb.ID); got.State != sandboxer.Running {
					t.Errorf("extended, and yet %s (%s)", got.State, got.Reason)
				}
				return
			}
			wantErr(t, err, sandboxer.Conflict, "not running (expired)")
			if _, err := r.Wait(admin, sb.ID, sandboxer.Terminated); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestClose(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(sandboxer.CreateRequest{})
	started, done := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "echo up; sleep 600"}, Stdout: writerFunc(func([]byte) { close(started) })})
		done <- err
	}()
	<-started
	if err := r.Manager.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err == nil {
		t.Error("a command outlived the manager")
	}
	_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
	wantErr(t, err, sandboxer.Unavailable, "the broker is stopping")
	if err := r.Manager.Start(context.Background()); sandboxer.KindOf(err) != sandboxer.Conflict {
		t.Errorf("started after the end: %v", err)
	}
	if len(r.world.Live()) != 1 {
		t.Error("closing the manager touched a sandbox")
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }

// A caller that pauses or saves a sandbox that is destroyed meanwhile gets that as the error.
func TestDestroyedAmidPauseAndSnapshot(t *testing.T) {
	for name, c := range map[string]struct {
		verb fake.Verb
		do   func(r *rig, id string) error
	}{
		"pause": {fake.VerbPause, func(r *rig, id string) error {
			_, err := r.Pause(acme, id, PauseRequest{Depth: sandboxer.PauseFreeze})
			return err
		}},
		"snapshot": {fake.VerbSnapshot, func(r *rig, id string) error {
			_, err := r.Snapshot(acme, id, SnapshotRequest{TTL: time.Hour})
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
			r.world.Inject(fake.Fault{Verb: c.verb, Hang: true, Times: 1})
			said := make(chan error, 1)
			go func() { said <- c.do(r, sb.ID) }()
			eventually(t, "the call that hangs", func() bool {
				return slices.ContainsFunc(r.world.Log(), func(e fake.Entry) bool { return e.Op == fake.OpFault })
			})
			r.destroy(sb.ID)
			err := <-said
			wantErr(t, err, sandboxer.Conflict, "ended meanwhile")
		})
	}
}
