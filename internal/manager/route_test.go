package manager

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// routedRig has a profile whose candidates have an image each, and a tenant that can pay.
func routedRig(t *testing.T, change func(*setup)) *rig {
	t.Helper()
	other := fake.NewWorld()
	t.Cleanup(func() { other.Close() })
	r := newRig(t, func(s *setup) {
		s.other = other
		s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.routed", TTL: 10 * time.Minute, MaxTTL: time.Hour, Wait: time.Minute,
			Route: &sandboxer.Route{Policy: sandboxer.RouteWait, Candidates: []sandboxer.Candidate{
				{Extension: "ext.fake", Image: "small"},
				{Extension: "ext.other", Image: "large", Price: &sandboxer.Price{PerHour: 600_000}},
			}}})
		if change != nil {
			change(s)
		}
	})
	if err := r.Grant(admin, sandboxer.DefaultTenant, 5*sandboxer.Credit, "g", ""); err != nil {
		t.Fatal(err)
	}
	return r
}

func routeOf(choices []sandboxer.RouteChoice) string {
	var all []string
	for _, c := range choices {
		text := c.Extension + " " + string(c.Verdict) + " " + string(c.Reason)
		if c.Price != nil {
			text += " " + c.Price.String()
		}
		all = append(all, text)
	}
	return strings.Join(all, ", ")
}

// TestRouted: plan and create go to the candidate that can serve the request, and say why; the sandbox stays there.
func TestRouted(t *testing.T) {
	r := routedRig(t, nil)
	large := sandboxer.CreateRequest{Profile: "routed", Image: "large", Inputs: map[string]string{"sandbox_id": "mine"}}
	for _, c := range []struct {
		req      sandboxer.CreateRequest
		on, want string
	}{
		{sandboxer.CreateRequest{Profile: "routed"}, "ext.fake", "ext.fake chosen first 0.00, ext.other standby later 0.10"},
		{large, "ext.other", "ext.fake refused fixed_image, ext.other chosen first 0.10"},
		{sandboxer.CreateRequest{Profile: "test"}, "ext.fake", "ext.fake chosen only 0.00"},
	} {
		p, err := r.Plan(acme, c.req)
		if err != nil || p.Extension != c.on || routeOf(p.Route) != c.want {
			t.Errorf("%+v: it goes to %s by %s, %v", c.req, p.Extension, routeOf(p.Route), err)
		}
	}
	sb, err := r.Create(acme, large)
	if err != nil {
		t.Fatal(err)
	}
	if sb.Extension != "ext.other" || sb.Spec.Profile.Extension != "ext.other" || sb.Quote.Amount != 100_000 || routeOf(sb.Route) != "ext.fake refused fixed_image, ext.other chosen first 0.10" {
		t.Errorf("it is on %s for %s by %s", sb.Extension, sb.Quote.Amount, routeOf(sb.Route))
	}
	found, err := r.Create(acme, large)
	if err != nil || !found.Found || found.Extension != "ext.other" {
		t.Errorf("the same request gives %+v, %v", found, err)
	}
	page, err := r.Events(acme, sandboxer.EventQuery{SandboxID: sb.ID, Limit: sandboxer.MaxPage})
	if err != nil {
		t.Fatal(err)
	}
	told := false
	for _, ev := range page {
		told = told || ev.Message == "routed to ext.other, not to ext.fake: fixed_image"
	}
	if !told {
		t.Error("no event says where it went")
	}
	_, err = r.Create(acme, sandboxer.CreateRequest{Profile: "routed", Image: "huge"})
	wantErr(t, err, sandboxer.Invalid, "profile.routed has no extension for this request: ext.fake: ")
	dear := large
	dear.MaxCost, dear.Inputs = 99_999, nil
	_, err = r.Create(acme, dear)
	wantErr(t, err, sandboxer.Invalid, "ext.other: it would cost up to 0.10 credits")
}

// TestRoutedPrice: the lowest price is first, and what the request allows is a reason.
func TestRoutedPrice(t *testing.T) {
	r := routedRig(t, func(s *setup) {
		route := s.profiles[len(s.profiles)-1].Route
		route.Prefer = sandboxer.PreferPrice
		route.Candidates[0].Price = &sandboxer.Price{PerHour: 1_200_000}
	})
	sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
	if err != nil || sb.Extension != "ext.other" || routeOf(sb.Route) != "ext.other chosen cheapest 0.10, ext.fake standby later 0.20" {
		t.Errorf("%+v, %v", sb, err)
	}
}

// TestRoutedElsewhere: a native snapshot is restored on its extension, a portable one on the candidate that serves
// it; a resume stays, and is refused once the route has left the extension.
func TestRoutedElsewhere(t *testing.T) {
	r := routedRig(t, func(s *setup) { s.opts.SnapshotStore = dirStore{t.TempDir()} })
	sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
	if err != nil || sb.Extension != "ext.fake" {
		t.Fatalf("%+v, %v", sb, err)
	}
	rec, err := r.Snapshot(acme, sb.ID, sandboxer.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	portable, err := r.Snapshot(acme, sb.ID, sandboxer.SnapshotRequest{Kind: sandboxer.SnapshotPortable})
	if err != nil {
		t.Fatal(err)
	}
	same, err := r.Restore(acme, rec.ID, sandboxer.RestoreRequest{})
	if err != nil || same.Extension != "ext.fake" || same.RestoredAs != sandboxer.SnapshotNative {
		t.Errorf("%+v, %v", same, err)
	}
	copies, err := r.Fork(acme, sb.ID, sandboxer.ForkRequest{Count: 1})
	if err != nil || copies[0].Extension != "ext.fake" {
		t.Errorf("%+v, %v", copies, err)
	}
	if _, err := r.Pause(acme, sb.ID, sandboxer.PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	profiles := r.Profiles(admin)
	last := &profiles[len(profiles)-1]
	route := *last.Route
	route.Candidates = route.Candidates[1:]
	last.Route = &route
	if err := r.SetProfiles(profiles); err != nil {
		t.Fatal(err)
	}
	_, err = r.Resume(acme, sb.ID, sandboxer.ResumeRequest{})
	wantErr(t, err, sandboxer.Denied, "no longer routes to extension ext.fake")
	_, err = r.Restore(acme, rec.ID, sandboxer.RestoreRequest{})
	wantErr(t, err, sandboxer.Unsupported, "native to ext.fake")
	moved, err := r.Restore(acme, portable.ID, sandboxer.RestoreRequest{})
	if err != nil || moved.Extension != "ext.other" || moved.RestoredAs != sandboxer.SnapshotPortable || moved.Spec.Image != "large" || moved.Quote.Amount != 100_000 {
		t.Errorf("%+v, %v; want it on ext.other, with its image and price", moved, err)
	}
}

// TestRoutedPool: a pool holds the first candidate, and answers only requests that go there.
func TestRoutedPool(t *testing.T) {
	r := routedRig(t, func(s *setup) { s.profiles[len(s.profiles)-1].Pool.Size = 1 })
	if p := r.poolOf("profile.routed"); p == nil || p.profile.Extension != "ext.fake" || p.profile.Route != nil {
		t.Fatalf("%+v", p)
	}
	o, err := r.resolve(operator, sandboxer.CreateRequest{Profile: "routed", Image: "large"})
	if err != nil {
		t.Fatal(err)
	}
	if why := r.poolOf("profile.routed").whyCold(o); why != "another extension serves it" {
		t.Errorf("it is not answered from the pool: %q", why)
	}
}

// TestRoutedFair: in the line of each candidate tenants take turns, however many requests one of them has there and goes on sending.
func TestRoutedFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := routedRig(t, func(s *setup) {
			s.max = 2
			s.profiles[len(s.profiles)-1].Wait = time.Hour
		})
		if err := r.Grant(admin, "rival", sandboxer.Credit, "r", ""); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		var left atomic.Int32 // requests of the rival
		live := func(ctx context.Context, image string) error {
			sb, err := r.Create(ctx, sandboxer.CreateRequest{Profile: "routed", Image: image})
			if err == nil {
				time.Sleep(time.Minute)
				_, err = r.Destroy(ctx, sb.ID)
			}
			if err != nil {
				t.Errorf("%s: %v", image, err)
			}
			return err
		}
		for _, image := range []string{"small", "large"} {
			for range 8 {
				wg.Go(func() {
					for live(acme, image) == nil && left.Load() > 0 { // and asks for another one
					}
				})
			}
		}
		synctest.Wait() // two live on each, and the others wait
		for _, image := range []string{"small", "large"} {
			for range 3 {
				left.Add(1)
				wg.Go(func() {
					defer left.Add(-1)
					live(rival, image)
				})
			}
		}
		wg.Wait()
		all, err := r.Events(admin, sandboxer.EventQuery{Limit: sandboxer.MaxPage})
		if err != nil {
			t.Fatal(err)
		}
		order := map[string]string{} // on each extension
		for _, ev := range all {
			if ev.Type == sandboxer.EventState && ev.To == sandboxer.Creating {
				order[r.get(ev.SandboxID).Extension] += ev.Tenant[:1]
			}
		}
		for _, ext := range []string{"ext.fake", "ext.other"} {
			if got := order[ext]; !strings.HasPrefix(got, "dd"+"drdrdr"+"dd") {
				t.Errorf("on %s they are made in the order %s", ext, got)
			}
		}
		r.sound(0)
		r.elsewhere(0)
	})
}

// TestPlanRoom: a plan knows of the room below max, as a create does: of an extension and of a profile, and without what waits in
// a pool.
func TestPlanRoom(t *testing.T) {
	for _, c := range []struct {
		policy  sandboxer.RoutePolicy
		max, of int
		want    string // empty: Exhausted
	}{
		{sandboxer.RouteBurst, 2, 0, "ext.fake chosen first 0.00, ext.other standby later 0.10"},
		{sandboxer.RouteBurst, 1, 0, "ext.fake refused no_room 0.00, ext.other chosen first 0.10"},
		{sandboxer.RouteWait, 1, 0, "ext.fake chosen waits 0.00, ext.other standby later 0.10"},
		{sandboxer.RouteReject, 1, 0, ""},
		{sandboxer.RouteBurst, 0, 1, ""},
	} {
		r := routedRig(t, func(s *setup) {
			p := &s.profiles[len(s.profiles)-1]
			s.max, p.Max, p.Route.Policy = c.max, c.of, c.policy
			if c.policy != sandboxer.RouteWait {
				p.Wait = 0
			}
		})
		routed := sandboxer.CreateRequest{Profile: "routed"}
		sb := r.create(routed)
		p, err := r.Plan(acme, routed)
		if c.want == "" {
			wantErr(t, err, sandboxer.Exhausted, "it has no room now")
		} else if got := routeOf(p.Route); err != nil || got != c.want {
			t.Errorf("%s: %s, %v", c.policy, got, err)
		}
		r.destroy(sb.ID)
		if p, err := r.Plan(acme, routed); err != nil || p.Extension != "ext.fake" || p.Route[0].Reason != sandboxer.WhyFirst {
			t.Errorf("%s: with room: %s, %v", c.policy, routeOf(p.Route), err)
		}
	}
}

type envless struct{ *fake.Extension }

func (e envless) Check(_ context.Context, spec sandboxer.Spec) error {
	if len(spec.Env) > 0 {
		return sandboxer.E(sandboxer.Unsupported, nil, "host 10.0.0.9 takes no environment")
	}
	return nil
}

// TestRoutedSecret: a candidate that can give a sandbox no environment is refused for a request with a secret. What its backend
// said is in the error for administrators.
func TestRoutedSecret(t *testing.T) {
	r := routedRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return envless{e} }
		s.profiles[len(s.profiles)-1].Secrets = []string{"token"}
	})
	r.setSecret(acme, "token", "one")
	req := sandboxer.CreateRequest{Profile: "routed", Secrets: tokenAsked}
	if sb, err := r.Create(acme, req); err != nil || routeOf(sb.Route) != "ext.fake refused unsupported, ext.other chosen first 0.10" {
		t.Errorf("%+v, %v", sb, err)
	}
	req.Image = "small"
	_, err := r.Create(acme, req)
	wantErr(t, err, sandboxer.Unsupported, "cannot do what the request asks for")
	if strings.Contains(sandboxer.Message(err), "10.0.0.9") {
		t.Errorf("a tenant reads %v", err)
	}
	_, err = r.Create(chief, req)
	wantErr(t, err, sandboxer.Unsupported, "(host 10.0.0.9 takes no environment)")
}

// TestUnknownPrice: a plan does not show a price that nobody knows as zero.
func TestUnknownPrice(t *testing.T) {
	r := newRig(t, nil)
	for pricing, want := range map[sandboxer.PricingModel]string{sandboxer.PricingMetered: "the price is not known, and nothing is billed", sandboxer.PricingSelfHosted: ""} {
		r.extension("ext.fake").Info.Pricing = pricing
		if p, err := r.Plan(acme, sandboxer.CreateRequest{Profile: "test"}); err != nil || p.Quote.Detail != want {
			t.Errorf("%s: %+v, %v", pricing, p.Quote, err)
		}
	}
}
