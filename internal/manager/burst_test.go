package manager

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// burstRig is a routedRig whose profile bursts; quiet, for a bubble of synctest.
func burstRig(t *testing.T, change func(*setup)) *rig {
	t.Helper()
	return routedRig(t, func(s *setup) {
		quiet(s)
		s.opts.SweepEvery = 30 * time.Second
		s.backend = backend.Options{Provision: time.Minute, Ready: time.Minute, Teardown: time.Minute, Save: time.Minute, Short: 10 * time.Second}
		p := &s.profiles[len(s.profiles)-1]
		p.Route.Policy, p.Wait = sandboxer.RouteBurst, 0
		if change != nil {
			change(s)
		}
	})
}

// elsewhere is sound of the other world.
func (r *rig) elsewhere(want int) {
	r.t.Helper()
	if n := len(r.setup.other.Live()); n != want {
		r.t.Errorf("%d objects live elsewhere, want %d", n, want)
	}
	for _, f := range fake.Audit(r.setup.other.Log(), want == 0) {
		r.t.Errorf("the other world: %s", f)
	}
}

func messages(t *testing.T, r *rig, id string) string {
	t.Helper()
	page, err := r.Events(acme, sandboxer.EventQuery{SandboxID: id, Limit: sandboxer.MaxPage})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, ev := range page {
		text := ev.Message
		if ev.Cause == sandboxer.ReasonReplaced {
			text += " [replaced]"
		}
		all = append(all, text)
	}
	return strings.Join(all, "\n")
}

// TestBurst: a create goes on where the backend has no room or cannot be reached, and nowhere else. What is not proven absent is a
// debt, which is removed; what it costs is what the last candidate costs.
func TestBurst(t *testing.T) {
	for _, c := range []struct {
		name   string
		faults []fake.Fault
		kind   sandboxer.Kind // of the failure; empty: it goes on
		why    string
		debt   bool
	}{
		{name: "unavailable", faults: []fake.Fault{{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable}}, why: "unavailable"},
		{name: "exhausted", faults: []fake.Fault{{Verb: fake.VerbProvision, Kind: sandboxer.Exhausted}}, why: "no_room"},
		{name: "failed", faults: []fake.Fault{{Verb: fake.VerbProvision, Kind: sandboxer.Failed}}, kind: sandboxer.Failed},
		{name: "invalid", faults: []fake.Fault{{Verb: fake.VerbProvision, Kind: sandboxer.Invalid}}, kind: sandboxer.Invalid},
		{name: "lost, and removed", faults: []fake.Fault{{Verb: fake.VerbProvision, Lost: true}}, why: "unavailable"},
		{name: "not ready", faults: []fake.Fault{{Verb: fake.VerbWaitReady, Kind: sandboxer.Unavailable}}, why: "unavailable"},
		{name: "not ready in time", faults: []fake.Fault{{Verb: fake.VerbWaitReady, Hang: true}}, kind: sandboxer.Timeout},
		{name: "nothing sent", faults: []fake.Fault{{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable, Untouched: true}, {Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable}}, why: "unavailable"},
		{name: "no proof", faults: []fake.Fault{{Verb: fake.VerbProvision, Lost: true}, {Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable, Times: 2}}, why: "unavailable", debt: true},
		{name: "no proof in time", faults: []fake.Fault{{Verb: fake.VerbProvision, Lost: true}, {Verb: fake.VerbTeardown, Hang: true, Times: 2}}, why: "unavailable", debt: true},
		{name: "a lie", faults: []fake.Fault{{Verb: fake.VerbProvision, Lost: true}, {Verb: fake.VerbTeardown, Lie: true, Times: 2}}, why: "unavailable", debt: true},
		{name: "no answer", faults: []fake.Fault{{Verb: fake.VerbProvision, Lost: true, Hang: true}}, why: "unavailable", debt: true},
		{name: "nothing, and no answer", faults: []fake.Fault{{Verb: fake.VerbProvision, Hang: true}}, why: "unavailable", debt: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := burstRig(t, func(s *setup) { s.fake.Setup, s.fake.PerHour = 0, 0 })
				for _, f := range c.faults {
					r.world.Inject(f)
				}
				sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed", Name: "box", Key: "k", Env: map[string]string{"S": "x"}})
				if c.kind != "" {
					if sandboxer.KindOf(err) != c.kind {
						t.Fatalf("%+v, %v", sb, err)
					}
					r.world.Forgive()
					time.Sleep(10 * time.Minute)
					r.sound(0)
					r.elsewhere(0)
					r.noHolds()
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if sb.State != sandboxer.Running || sb.Extension != "ext.other" || sb.Generation != 1 || sb.Spec.Generation != 2 || sb.Spec.Image != "large" || sb.Quote.Amount != 100_000 {
					t.Errorf("%+v", sb)
				}
				if got := routeOf(sb.Route); got != "ext.fake refused "+c.why+", ext.other chosen first 0.10" {
					t.Errorf("route %s", got)
				}
				if len(sb.Debts) > 1 || (len(sb.Debts) == 1) != c.debt {
					t.Fatalf("debts %+v", sb.Debts)
				}
				said := messages(t, r, sb.ID)
				if !strings.Contains(said, "routed to ext.other, not to ext.fake: "+c.why) || strings.Contains(said, "[replaced]") == (c.name == "nothing sent") {
					t.Errorf("events: %s", said)
				}
				r.sound(len(r.world.Live()))
				if c.debt {
					if d := sb.Debts[0]; d.Extension != "ext.fake" || d.Handle.SandboxID != sb.ID || d.Handle.Generation != 1 || d.Reason != sandboxer.ReasonReplaced {
						t.Errorf("debt %+v", d)
					}
					time.Sleep(10 * time.Minute / 2)
					if sb = r.get(sb.ID); len(sb.Debts) != 0 || sb.State != sandboxer.Running {
						t.Errorf("later it is %s and has %+v", sb.State, sb.Debts)
					}
					if said := messages(t, r, sb.ID); !strings.Contains(said, "nothing of it is left on ext.fake [replaced]") {
						t.Errorf("events: %s", said)
					}
				}
				r.sound(0)
				r.elsewhere(1)
				again, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed", Name: "box", Key: "k", Env: map[string]string{"S": "x"}})
				if err != nil || again.ID != sb.ID {
					t.Errorf("the same request gives %+v, %v", again, err)
				}
				if sb = r.destroy(sb.ID); sb.Cost == 0 && c.debt {
					t.Errorf("it cost %s", sb.Cost)
				}
				r.world.Forgive()
				r.sound(0)
				r.elsewhere(0)
				r.noHolds()
				if left, err := r.Balance(acme, ""); err != nil || left != 5*sandboxer.Credit-sb.Cost {
					t.Errorf("%s left, %v; it cost %s", left, err, sb.Cost)
				}
			})
		})
	}
}

// TestDebtHoldsUp: a sandbox does not end, and keeps its name and its hold, before what may exist of it elsewhere is proven gone. That
// is tried with back-off, also by the next process.
func TestDebtHoldsUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := burstRig(t, nil)
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Lost: true})
		r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable})
		req := sandboxer.CreateRequest{Profile: "routed", Name: "box"}
		sb, err := r.Create(acme, req)
		if err != nil || len(sb.Debts) != 1 {
			t.Fatalf("%+v, %v", sb, err)
		}
		sb, err = r.Destroy(acme, sb.ID)
		wantErr(t, err, sandboxer.Unavailable, "parts of it on ext.fake are not removed yet")
		if sb.State != sandboxer.Terminating {
			t.Errorf("it is %s", sb.State)
		}
		_, err = r.Create(acme, req)
		wantErr(t, err, sandboxer.Conflict, "box")
		if holds, err := r.store.OpenHolds(admin); err != nil || len(holds) != 1 {
			t.Errorf("holds %+v, %v", holds, err)
		}
		if _, err := r.Forget(admin, sb.ID); !isKind(err, sandboxer.Conflict) {
			t.Errorf("forget: %v", err)
		}
		handles, err := Recorded(admin, r.store, "ext.fake")
		if err != nil || len(handles) != 1 || handles[0].Generation != 1 {
			t.Errorf("recorded %+v, %v", handles, err)
		}
		r.sound(1)
		r.elsewhere(0)
		time.Sleep(time.Hour)
		r.restart()
		synctest.Wait()
		if sb = r.get(sb.ID); sb.State != sandboxer.Terminating || sb.Debts[0].Retries > 80 {
			t.Errorf("after an hour it is %s, after %d tries", sb.State, sb.Debts[0].Retries)
		}
		r.world.Forgive()
		time.Sleep(15 * time.Minute)
		if sb = r.get(sb.ID); sb.State != sandboxer.Terminated || len(sb.Debts) != 0 {
			t.Errorf("at last it is %s and has %+v", sb.State, sb.Debts)
		}
		r.sound(0)
		r.noHolds()
	})
}

// TestBurstLate: what its backend makes after a teardown said that nothing is left is removed like any object whose record has ended.
func TestBurstLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := burstRig(t, nil)
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Late: 5 * time.Second})
		sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		if err != nil || sb.Extension != "ext.other" || len(sb.Debts) != 0 {
			t.Fatalf("%+v, %v", sb, err)
		}
		time.Sleep(6 * time.Second)
		if n := len(r.world.Live()); n != 1 {
			t.Fatalf("%d objects came late", n)
		}
		time.Sleep(4 * time.Minute)
		if n := len(r.world.Live()); n != 0 || r.get(sb.ID).State != sandboxer.Running {
			t.Errorf("%d objects are left, and it is %s", n, r.get(sb.ID).State)
		}
		r.elsewhere(1)
	})
}

// TestBurstNowhere: where no candidate is left, the create fails with what each of them is not, and pays nothing.
func TestBurstNowhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := burstRig(t, nil)
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Exhausted})
		r.setup.other.Inject(fake.Fault{Verb: fake.VerbProvision, Lost: true})
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		wantErr(t, err, sandboxer.Exhausted, "ext.fake: its backend has no room now; try again later. ext.other: its backend cannot be asked now")
		r.sound(0)
		r.elsewhere(0)
		r.noHolds()
		r.world.Forgive()
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable})
		_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "routed", Image: "small"})
		wantErr(t, err, sandboxer.Unavailable, "ext.other: its image is large")
		dear := sandboxer.CreateRequest{Profile: "routed", MaxCost: 99_999}
		_, err = r.Create(acme, dear)
		wantErr(t, err, sandboxer.Unavailable, "ext.other: it would cost up to 0.10 credits")
		if err := r.Grant(admin, sandboxer.DefaultTenant, -5*sandboxer.Credit, "back", ""); err != nil {
			t.Fatal(err)
		}
		_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		wantErr(t, err, sandboxer.NoCredit, "it costs up to 0.10 credits")
		r.sound(0)
		r.elsewhere(0)
		r.noHolds()
	})
}

// TestBurstMoney: the hold follows the candidate, down as well as up, and is settled once.
func TestBurstMoney(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := burstRig(t, func(s *setup) {
			s.profiles[len(s.profiles)-1].Route.Candidates[0].Price = &sandboxer.Price{Setup: 50_000, PerHour: 1_200_000}
		})
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable})
		sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		if err != nil || sb.Quote.Amount != 100_000 {
			t.Fatalf("%+v, %v", sb, err)
		}
		if left, err := r.Balance(acme, ""); err != nil || left != 4_900_000 {
			t.Errorf("%s left, %v", left, err)
		}
		r.sound(0)
		time.Sleep(6 * time.Minute)
		if sb := r.destroy(sb.ID); sb.Cost != 60_000 {
			t.Errorf("it cost %s", sb.Cost)
		}
		r.sound(0)
		r.noHolds()
	})
}

// TestBurstRoom: a bound on the sandboxes of an extension sends requests to the next candidate before anything is recorded; each
// extension takes no more than it may, whoever asks, and tenants pay for what they have alone.
func TestBurstRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := burstRig(t, func(s *setup) { s.max = 3 })
		if err := r.Grant(admin, "rival", sandboxer.Credit, "r", ""); err != nil {
			t.Fatal(err)
		}
		type answer struct {
			sb  *sandboxer.Sandbox
			err error
		}
		answers := make(chan answer, 6)
		for i := range 6 {
			ctx := acme
			if i%2 == 1 {
				ctx = rival
			}
			go func() {
				sb, err := r.Create(ctx, sandboxer.CreateRequest{Profile: "routed"})
				answers <- answer{sb, err}
			}()
		}
		on := map[string]int{}
		for range 6 {
			a := <-answers
			if a.err != nil {
				t.Fatal(a.err)
			}
			on[a.sb.Extension]++
			if a.sb.Extension == "ext.other" && routeOf(a.sb.Route) != "ext.fake refused no_room, ext.other chosen first 0.10" {
				t.Errorf("route %s", routeOf(a.sb.Route))
			}
		}
		if on["ext.fake"] != 3 || on["ext.other"] != 3 {
			t.Errorf("they are on %v", on)
		}
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		wantErr(t, err, sandboxer.Exhausted, "has no extension for this request")
		r.sound(3)
		r.elsewhere(3)
		for tenant, start := range map[string]sandboxer.Credits{sandboxer.DefaultTenant: 5 * sandboxer.Credit, "rival": sandboxer.Credit} {
			var held sandboxer.Credits
			items, _, err := r.store.Sandboxes(admin, sandboxer.Query{Tenant: tenant})
			if err != nil || len(items) != 3 {
				t.Errorf("%s has %d, %v", tenant, len(items), err)
			}
			for _, sb := range items {
				held += sb.Quote.Amount
			}
			if left, err := r.Balance(admin, tenant); err != nil || left != start-held {
				t.Errorf("%s has %s left and %s on hold, %v", tenant, left, held, err)
			}
		}
	})
}

// TestBurstPool: a sandbox of the pool that cannot be claimed, and cannot be replaced where it was, is made by the next candidate.
// The route is in the record of a claimed one, too.
func TestBurstPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := burstRig(t, func(s *setup) { s.profiles[len(s.profiles)-1].Pool.Size = 1 })
		fill := func() {
			t.Helper()
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		fill()
		sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		if err != nil || sb.Pool == "" || routeOf(sb.Route) != "ext.fake chosen first 0.00, ext.other standby later" {
			t.Fatalf("%+v, %v", sb, err)
		}
		fill()
		r.world.Inject(fake.Fault{Verb: fake.VerbClaim, Kind: sandboxer.Unavailable})
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: sandboxer.Unavailable})
		moved, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		if err != nil || moved.Extension != "ext.other" || moved.Pool != "" || moved.Spec.Generation != 3 || len(moved.Debts) != 0 {
			t.Fatalf("%+v, %v", moved, err)
		}
		r.elsewhere(1)
	})
}

// TestBurstStays: a create that another process continues, a native restore and a resume stay where they were.
func TestBurstStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := burstRig(t, nil)
		sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		if err != nil {
			t.Fatal(err)
		}
		rec, err := r.Snapshot(acme, sb.ID, sandboxer.SnapshotRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Pause(acme, sb.ID, sandboxer.PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
			t.Fatal(err)
		}
		r.world.Inject(fake.Fault{Verb: fake.VerbRestore, Kind: sandboxer.Unavailable})
		if _, err := r.Restore(acme, rec.ID, sandboxer.RestoreRequest{}); !isKind(err, sandboxer.Unavailable) {
			t.Errorf("restore: %v", err)
		}
		if _, err := r.Resume(acme, sb.ID, sandboxer.ResumeRequest{}); !isKind(err, sandboxer.Unavailable) {
			t.Errorf("resume: %v", err)
		}
		r.elsewhere(0)
	})
}
