package manager

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

func ticking(s *setup) { s.opts.SweepEvery = 5 * time.Second }

// sweeping is ticking for tests of hours: a sweep takes milliseconds.
func sweeping(s *setup) { s.opts.SweepEvery = 20 * time.Second }

// TestExpiry wants the end at the very moment, between two ticks.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { s.opts.SweepEvery = 25 * time.Minute })
		var ids []string
		for _, ttl := range []time.Duration{time.Second, 61700 * time.Millisecond, time.Hour} {
			ids = append(ids, r.create(sandboxer.CreateRequest{TTL: ttl}).ID)
		}
		ended := func() (n int) {
			synctest.Wait()
			for _, id := range ids {
				if r.get(id).State == sandboxer.Terminated {
					n++
				}
			}
			return n
		}
		for _, c := range []struct {
			sleep time.Duration
			want  int
		}{{999 * time.Millisecond, 0}, {2 * time.Millisecond, 1}, {60690 * time.Millisecond, 1}, {20 * time.Millisecond, 2}, {59 * time.Minute, 3}} {
			time.Sleep(c.sleep)
			if got := ended(); got != c.want {
				t.Errorf("%d ended, want %d", got, c.want)
			}
		}
		for _, id := range ids {
			sb := r.get(id)
			if sb.Reason != sandboxer.ReasonExpired || sb.Message == "" || sb.EndedAt.Sub(sb.ExpiresAt) > time.Second {
				t.Errorf("%+v", sb)
			}
		}
		r.sound(0)
	})
}

// TestExpiryPassesWhileWritten: a time that is over by the time its record says so is
// seen to at once, not an hour later.
func TestExpiryPassesWhileWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			s.opts.fail = func(p point) {
				if p == pRenew+".after" {
					time.Sleep(10 * time.Second) // a slow backend
				}
			}
		})
		sb := r.create(sandboxer.CreateRequest{TTL: 10 * time.Minute})
		if _, err := r.Extend(acme, sb.ID, Extend{TTL: time.Second}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonExpired {
			t.Errorf("it is %s %s, and expired at %s", got.State, got.Reason, got.ExpiresAt)
		}
		r.sound(0)
	})
}

// TestExpiryAtStart ends at once what expired while no broker lived.
func TestExpiryAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		r.world.Inject(fake.Fault{Verb: fake.VerbWaitReady, Hang: true, Times: 1})
		half := r.create(sandboxer.CreateRequest{NoWaiting: true, TTL: time.Minute})
		synctest.Wait()
		whole := r.create(sandboxer.CreateRequest{TTL: time.Minute})
		keep := r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.close()
		time.Sleep(2 * time.Minute)
		r.open()
		time.Sleep(time.Second)
		synctest.Wait()
		for _, id := range []string{half.ID, whole.ID} {
			if sb := r.get(id); sb.State != sandboxer.Terminated || sb.Reason != sandboxer.ReasonExpired {
				t.Errorf("%s is %s (%s)", id, sb.State, sb.Reason)
			}
		}
		if r.get(keep.ID).State != sandboxer.Running {
			t.Error("the one that had time was ended")
		}
		r.sound(1)
	})
}

// TestHangingCreateExpires ends a create that hangs when its sandbox expires.
func TestHangingCreateExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Hang: true, Lost: true, Times: 1})
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", TTL: time.Minute})
		wantErr(t, err, sandboxer.Conflict, "ended while it was being created")
		synctest.Wait()
		r.sound(0)
	})
}

func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		idle := r.create(sandboxer.CreateRequest{Profile: "lazy"})
		busy := r.create(sandboxer.CreateRequest{Profile: "lazy"})
		now, then := time.Now(), r.get(busy.ID).Version
		_, _, end, err := r.Manager.beginStream(acme, sandboxer.ScopeWrite, busy.ID) // a command that runs for long
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(30 * time.Second)
		if _, err := r.Stats(acme, idle.ID); err != nil { // looking is not using
			t.Error(err)
		}
		time.Sleep(40 * time.Second)
		synctest.Wait()
		if sb := r.get(idle.ID); sb.State != sandboxer.Terminated || sb.Reason != sandboxer.ReasonIdle {
			t.Errorf("the idle one is %s (%s)", sb.State, sb.Reason)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		sb := r.get(busy.ID)
		if sb.State != sandboxer.Running {
			t.Fatalf("the busy one is %s (%s)", sb.State, sb.Reason)
		}
		if writes, most := sb.Version-then, int64(time.Since(now)/touchEvery); writes < 10 || writes > most {
			t.Errorf("using it for %s wrote %d times, want at most %d", time.Since(now), writes, most)
		}
		end()
		r.restart() // the time of last use survives
		if used := r.get(busy.ID).UsedAt; time.Since(used) > time.Second {
			t.Errorf("last used %s ago", time.Since(used))
		}
		time.Sleep(70 * time.Second)
		synctest.Wait()
		if sb := r.get(busy.ID); sb.Reason != sandboxer.ReasonIdle {
			t.Errorf("in the end it is %s (%s)", sb.State, sb.Reason)
		}
		r.sound(0)
	})
}

// TestLost removes a sandbox behind the broker's back.
func TestLost(t *testing.T) {
	for name, drop := range map[string][]sandboxer.Capability{
		"list and probe": {sandboxer.CanNotify},
		"probe":          {sandboxer.CanNotify, sandboxer.CanList},
		"list":           {sandboxer.CanProbe},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(s *setup) { ticking(s); s.fake.Drop = drop })
				if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
					t.Fatal(err)
				}
				sb := r.create(sandboxer.CreateRequest{Profile: "paid"})
				keep := r.create(sandboxer.CreateRequest{TTL: time.Hour})
				time.Sleep(30*time.Minute - 2*time.Second)
				r.world.Kill(sb.ID)
				time.Sleep(4 * time.Second)
				synctest.Wait()
				if got := r.get(sb.ID); got.State != sandboxer.Running || got.AbsentSince.IsZero() {
					t.Errorf("after one absence it is %s, absent since %s", got.State, got.AbsentSince)
				}
				time.Sleep(20 * time.Second)
				synctest.Wait()
				got := r.get(sb.ID)
				if got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonLost || !got.EndingAt.Before(got.ReadyAt.Add(30*time.Minute+time.Second)) {
					t.Errorf("%s (%s), ended %s after it was ready", got.State, got.Reason, got.EndingAt.Sub(got.ReadyAt))
				}
				if r.get(keep.ID).State != sandboxer.Running {
					t.Error("its neighbour was ended too")
				}
				r.destroy(keep.ID)
				r.noHolds()
				if len(drop) == 1 && drop[0] == sandboxer.CanNotify {
					r.sound(0)
				}
			})
		})
	}
}

// TestUnknownIsNotGone lets a backend lie, fail, hang and lag for a while: nothing
// may be given up.
func TestUnknownIsNotGone(t *testing.T) {
	for name, c := range map[string]struct {
		cfg    fake.Config
		faults []fake.Fault
	}{
		"listing fails":           {faults: []fake.Fault{{Verb: fake.VerbList, Kind: sandboxer.Unavailable}}},
		"listing hangs":           {faults: []fake.Fault{{Verb: fake.VerbList, Hang: true}}},
		"everything fails":        {faults: []fake.Fault{{Verb: fake.VerbAny, Kind: sandboxer.Unavailable}}},
		"listing lies":            {faults: []fake.Fault{{Verb: fake.VerbList, Lie: true}}},
		"listing lies, probe out": {faults: []fake.Fault{{Verb: fake.VerbList, Lie: true}, {Verb: fake.VerbProbe, Kind: sandboxer.Denied}}},
		"probe lies once":         {cfg: fake.Config{Drop: []sandboxer.Capability{sandboxer.CanList}}, faults: []fake.Fault{{Verb: fake.VerbProbe, Lie: true, Times: 1}}},
		"probe fails":             {cfg: fake.Config{Drop: []sandboxer.Capability{sandboxer.CanList}}, faults: []fake.Fault{{Verb: fake.VerbProbe, Kind: sandboxer.NotFound}}},
		"nobody can tell":         {cfg: fake.Config{Drop: []sandboxer.Capability{sandboxer.CanList, sandboxer.CanProbe}}},
		"listing lags":            {cfg: fake.Config{ListDelay: 40 * time.Second}},
		"listing lags, no probe":  {cfg: fake.Config{ListDelay: 40 * time.Second, Drop: []sandboxer.Capability{sandboxer.CanProbe}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(s *setup) { ticking(s); quiet(s); s.fake = c.cfg })
				sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
				r.world.Inject(c.faults...)
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				if got := r.get(sb.ID); got.State != sandboxer.Running {
					t.Errorf("it is %s (%s)", got.State, got.Reason)
				}
				r.world.Forgive()
				time.Sleep(time.Minute)
				synctest.Wait()
				if got := r.get(sb.ID); got.State != sandboxer.Running || !got.AbsentSince.IsZero() {
					t.Errorf("afterwards it is %s, absent since %s", got.State, got.AbsentSince)
				}
				r.destroy(sb.ID)
				time.Sleep(2 * time.Minute) // a listing that lags shows it for a while
				synctest.Wait()
				if len(r.world.Live()) != 0 {
					t.Error("it was not removed")
				}
			})
		})
	}
}

// TestOrphans puts objects into the world that the database do not know.
func TestOrphans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		make := func(owner, id string, generation int) {
			t.Helper()
			b := backend.New("x", fake.New(r.world, fake.Config{Owner: owner}), backend.Options{})
			if _, err := b.Provision(t.Context(), sandboxer.Spec{ID: id, Generation: generation, Owner: owner, Place: "localhost"}); err != nil {
				t.Fatal(err)
			}
		}
		make("other", "theirs", 1)
		r.destroy(r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": "mine"}}).ID)
		mine := r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": "mine"}})
		make("test", "mine", 1) // of a former generation
		r.destroy(r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": "ended"}}).ID)
		make("test", "ended", 1) // came to be after its record had ended

		time.Sleep(59 * time.Second)
		synctest.Wait()
		if n := len(r.world.Live()); n != 4 {
			t.Errorf("%d objects within the grace period, want 4", n)
		}
		a, err := r.Audit(admin)
		if err != nil || len(a.Violations) != 2 {
			t.Errorf("audit: %+v, %v", a, err)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		left := map[string]bool{}
		for _, o := range r.world.Live() {
			left[fmt.Sprint(o.Spec.ID, "/", o.Spec.Generation)] = true
		}
		if len(left) != 2 || !left["theirs/1"] || !left["mine/2"] {
			t.Errorf("left: %v", left)
		}
		if r.get(mine.ID).State != sandboxer.Running {
			t.Error("a living sandbox suffered")
		}
		// Explained by now: it must be left alone however it came to be on the list.
		err = r.Manager.extensions()[0].removeOrphan(admin, objectKey{"ext.fake", "mine", 2}, mine.Handle, "")
		if err != errNotNeeded || len(r.world.Live()) != 2 {
			t.Errorf("%v, %d objects", err, len(r.world.Live()))
		}
		orphans := 0
		events, err := r.Events(admin, sandboxer.EventQuery{})
		for _, ev := range events {
			if ev.Type == sandboxer.EventOrphan && ev.Actor == "sweep" {
				orphans++
			}
		}
		if orphans != 2 || err != nil {
			t.Errorf("%d events of orphans, %v", orphans, err)
		}
	})
}

// TestOrphansWaitAfterStart has a fresh broker watch for a grace period first.
func TestOrphansWaitAfterStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Late: time.Second, Times: 1})
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
		wantErr(t, err, sandboxer.Unavailable, "")
		time.Sleep(2 * time.Second)
		for range 5 {
			time.Sleep(50 * time.Second)
			r.restart()
		}
		synctest.Wait()
		if len(r.world.Live()) != 1 {
			t.Error("removed within the grace period of a start")
		}
		r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable, Times: 1})
		time.Sleep(70 * time.Second)
		synctest.Wait()
		if len(r.world.Live()) != 1 {
			t.Error("a failed removal ripens again")
		}
		time.Sleep(70 * time.Second)
		synctest.Wait()
		r.sound(0)
	})
}

// TestLateObject has an object appear long after its create was given up.
func TestLateObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Late: time.Minute, Times: 1})
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
		wantErr(t, err, sandboxer.Unavailable, "")
		if n := len(r.world.Live()); n != 0 {
			t.Errorf("%d objects", n)
		}
		time.Sleep(61 * time.Second)
		if n := len(r.world.Live()); n != 1 {
			t.Errorf("%d objects: the fake should have been late", n)
		}
		time.Sleep(70 * time.Second)
		synctest.Wait()
		r.sound(0)
	})
}

// TestClockIsSet has the clock jump: no sandbox ends because of it.
func TestClockIsSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, ticking)
		sb := r.create(sandboxer.CreateRequest{TTL: 10 * time.Second})
		r.Manager.mu.Lock()
		r.clock.until = time.Since(r.clock.start) + time.Minute // as after a jump
		r.Manager.mu.Unlock()
		time.Sleep(50 * time.Second)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Running {
			t.Errorf("it is %s while the clock is in doubt", got.State)
		}
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Terminated {
			t.Errorf("it is %s after the grace period", got.State)
		}
	})
}

// TestSickExtension has one extension hang in everything: the other's sandboxes end
// in time.
func TestSickExtension(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { ticking(s); quiet(s); s.idle = true })
		sickWorld := fake.NewWorld()
		defer sickWorld.Close()
		sick := backend.New("ext.sick", fake.New(sickWorld, fake.Config{Owner: "test"}), backend.Options{})
		profiles := append(testProfiles(), sandboxer.Profile{ID: "profile.sick", Extension: "ext.sick"})
		exts := []Extension{r.Manager.extensions()[0].Extension, {Info: sandboxer.ExtensionInfo{ID: "ext.sick"}, Backend: sick}}
		m, err := New(r.store, profiles, exts, r.setup.opts)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if err := m.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 20 {
			if _, err := m.Create(acme, sandboxer.CreateRequest{Profile: "sick", TTL: 20 * time.Second}); err != nil {
				t.Fatal(err)
			}
		}
		sickWorld.Inject(fake.Fault{Verb: fake.VerbAny, Hang: true})
		var last *sandboxer.Sandbox
		for range 10 {
			if last, err = m.Create(acme, sandboxer.CreateRequest{Profile: "test", TTL: 30 * time.Second}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(31 * time.Second)
		synctest.Wait()
		if sb, err := m.Get(acme, last.ID); err != nil || sb.State != sandboxer.Terminated {
			t.Errorf("%+v, %v", sb, err)
		}
		if n := len(r.world.Live()); n != 0 {
			t.Errorf("%d sandboxes of the healthy extension outlived their time", n)
		}
		sickWorld.Forgive()
		time.Sleep(30 * time.Minute)
		synctest.Wait()
		if n := len(sickWorld.Live()); n != 0 {
			t.Errorf("%d sandboxes of the sick extension are left after it recovered", n)
		}
	})
}

func TestSweepReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { s.idle = true }) // only Sweep does anything
		sweep := func() SweepReport {
			t.Helper()
			synctest.Wait()
			report, err := r.Sweep(admin)
			if err != nil {
				t.Fatal(err)
			}
			return report
		}
		expires := r.create(sandboxer.CreateRequest{TTL: time.Minute})
		lost := r.create(sandboxer.CreateRequest{})
		fails := r.create(sandboxer.CreateRequest{})
		if got := sweep(); got != (SweepReport{Seen: 3}) {
			t.Errorf("%+v", got)
		}
		r.world.Kill(lost.ID)
		r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, ID: fails.ID, Kind: sandboxer.Unavailable, Times: 2})
		if _, err := r.Destroy(acme, fails.ID); err == nil {
			t.Error("the teardown did not fail")
		}
		time.Sleep(5 * time.Second)
		if got := sweep(); got != (SweepReport{Seen: 3, Failed: 1}) {
			t.Errorf("%+v", got)
		}
		time.Sleep(2 * time.Minute)
		if got := sweep(); got.Expired != 1 || got.Lost != 1 || got.Torndown != 3 {
			t.Errorf("%+v", got)
		}
		if got := sweep(); got != (SweepReport{}) {
			t.Errorf("%+v", got)
		}
		if r.get(expires.ID).Reason != sandboxer.ReasonExpired {
			t.Error("not expired")
		}
		if _, err := r.Sweep(acme); sandboxer.KindOf(err) != sandboxer.Denied {
			t.Errorf("%v", err)
		}
		r.sound(0)
	})
}

// TestSweepAfterASurvey has a survey in progress that saw nothing yet, or too early: a
// sweep makes its own.
func TestSweepAfterASurvey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { s.idle = true })
		r.create(sandboxer.CreateRequest{})
		e := r.extension("ext.fake")
		e.survey <- struct{}{}
		time.AfterFunc(time.Second, func() { <-e.survey })
		if report, err := r.Sweep(admin); err != nil || report.Seen != 1 {
			t.Errorf("%+v, %v", report, err)
		}
	})
}

// TestDueWhileLookedAt has a sandbox expire, and another one's object die, while the sweep
// does something with them: neither waits for the next tick.
func TestDueWhileLookedAt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		synctest.Wait()
		expires, dead := r.create(sandboxer.CreateRequest{TTL: time.Minute}), r.create(sandboxer.CreateRequest{TTL: time.Hour})
		synctest.Wait()
		for _, id := range []string{expires.ID, dead.ID} {
			if !r.sweepLocks.tryLock(id) {
				t.Fatal("somebody has it")
			}
		}
		r.world.Kill(dead.ID)
		if _, err := r.Exec(acme, dead.ID, sandboxer.Cmd{Args: []string{"true"}}); !isKind(err, sandboxer.NotFound) {
			t.Errorf("a command of the dead: %v", err)
		}
		time.Sleep(time.Minute + time.Second)
		r.unlockSweep(expires.ID)
		r.unlockSweep(dead.ID)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if got := r.get(expires.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonExpired {
			t.Errorf("%s (%s)", got.State, got.Reason)
		}
		if got := r.get(dead.ID); got.AbsentSince.IsZero() {
			t.Errorf("nobody looked at the dead: %s", got.State)
		}
	})
}

// partly lists all objects, and then says that one machine is away.
type partly struct{ *fake.Extension }

func (e partly) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		for h, err := range e.Extension.ListRunning(ctx, owner) {
			if !yield(h, err) {
				return
			}
		}
		yield(sandboxer.Handle{}, sandboxer.E(sandboxer.Unavailable, nil, "one machine is away"))
	}
}

// TestSweepOfAPart has a listing that ends in an error: orphans among what was listed
// before are removed, and nothing is taken for gone.
func TestSweepOfAPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) {
			ticking(s)
			s.fake.Drop = []sandboxer.Capability{sandboxer.CanProbe}
			s.wrap = func(e *fake.Extension) sandboxer.Extension { return partly{e} }
		})
		unseen := r.create(sandboxer.CreateRequest{})
		r.world.Kill(unseen.ID) // not listed: it may be where nobody answers
		r.destroy(r.create(sandboxer.CreateRequest{Inputs: map[string]string{"sandbox_id": "stray"}}).ID)
		spec := sandboxer.Spec{ID: "stray", Generation: 1, Owner: "test"}
		if _, err := r.ext.Provision(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		for _, o := range r.world.Live() {
			if o.Spec.ID == "stray" {
				t.Error("an orphan that was listed is still there")
			}
		}
		if sb := r.get(unseen.ID); sb.State != sandboxer.Running || !sb.AbsentSince.IsZero() {
			t.Errorf("what was not listed is %s, absent since %v", sb.State, sb.AbsentSince)
		}
	})
}

// lockedText is what several write.
type lockedText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// TestSurveyLog: an extension that cannot be surveyed is logged once in ten minutes, and when that is over.
func TestSurveyLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lockedText
		r := newRig(t, func(s *setup) {
			s.opts.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelInfo}))
			s.opts.SweepEvery = 5 * time.Second
		})
		said := func(what string) int {
			synctest.Wait()
			return strings.Count(log.String(), what)
		}
		r.world.Inject(fake.Fault{Verb: fake.VerbList, Kind: sandboxer.Unavailable})
		time.Sleep(9 * time.Minute)
		if n := said("msg=survey "); n != 1 {
			t.Errorf("in nine minutes it is told of %d times:\n%s", n, log.String())
		}
		time.Sleep(2 * time.Minute)
		if n := said("msg=survey "); n != 2 {
			t.Errorf("after eleven minutes it was told of %d times", n)
		}
		r.world.Forgive()
		time.Sleep(time.Minute)
		if n := said("survey works again"); n != 1 {
			t.Errorf("its end is told of %d times:\n%s", n, log.String())
		}
	})
}
