package manager

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestBreaker: the steps of each row, with seconds since its begin, and when the next create may go there after
// the last one. F is a fault of a create that began before or has no route, T a try (which becomes a trial, "+",
// or is refused, "-"), f a fault of the last trial, e its end without a result, s a success.
func TestBreaker(t *testing.T) {
	for _, c := range []struct {
		steps string
		free  int // seconds; 0: at once
	}{
		{"", 0},
		{"F0 F0 F0 F0 T0=", 0},
		{"F0 F0 F0 F0 s0 F0", 0},
		{"F0 F1 F2 F3 F4", 9},
		{"F0 F0 F0 F0 F0 F1 F2", 5}, // others do not let it grow
		{"F0 F0 F0 F0 F0 T4- T5+", 10},
		{"F0 F0 F0 F0 F0 T5+ T6-", 11},
		{"F0 F0 F0 F0 F0 T5+ e6", 0},
		{"F0 F0 F0 F0 F0 T5+ e6 T6+ T6-", 11},
		{"F0 F0 F0 F0 F0 T5+ f6", 16},
		{"F0 F0 F0 F0 F0 T5+ f6 T16+ f16", 36},
		{"F0 F0 F0 F0 F0 T5+ f5 T15+ f15 T35+ f35 T75+ f75 T155+ f155", 315},
		{"F0 F0 F0 F0 F0 T5+ f5 T15+ f15 T35+ f35 T75+ f75 T155+ f155 T315+ f315 T615+ f615", 915}, // five minutes at most
		{"F0 F0 F0 F0 F0 T5+ s6 T6=", 0},
		{"F0 F0 F0 F0 F0 T5+ s6 F6 F6 F6 F6", 0},
		{"F0 F0 F0 F0 F0 s1", 0},                      // of one that has no route
		{"F0 F0 F0 F0 F0 T5+ T304- T305+ T305-", 310}, // the first one takes too long
	} {
		b, zero := new(breaker), time.Unix(1e9, 0)
		var last *trial
		now := zero
		for _, step := range strings.Fields(c.steps) {
			var s int
			if _, err := fmt.Sscanf(step[1:], "%d", &s); err != nil {
				t.Fatal(err)
			}
			now = zero.Add(time.Duration(s) * time.Second)
			switch step[0] {
			case 'F':
				b.fault(nil, now)
			case 'f':
				b.fault(last, now)
			case 'e':
				b.end(last)
			case 's':
				b.success()
			case 'T':
				trial, until := b.begin(now)
				got := "="
				switch {
				case trial != nil:
					got, last = "+", trial
				case !until.IsZero():
					got = "-"
				}
				if got != step[len(step)-1:] {
					t.Errorf("%q: %s gives %s", c.steps, step, got)
				}
			}
		}
		at := 0
		if until := b.retryAt(now); !until.IsZero() {
			at = int(until.Sub(zero).Seconds())
		}
		if at != c.free {
			t.Errorf("%q: a create may go there at %ds, want %d", c.steps, at, c.free)
		}
	}
}

// TestIsFault: only the backend's side counts, and not what the caller chose.
func TestIsFault(t *testing.T) {
	r := newRig(t, nil)
	e, counts := r.extension("ext.fake"), []sandboxer.Kind{sandboxer.Unavailable, sandboxer.Timeout, sandboxer.Internal}
	for _, kind := range sandboxer.Kinds() {
		want := strings.Contains(fmt.Sprint(counts), string(kind))
		if got := e.isFault(new(sandboxer.Sandbox), sandboxer.E(kind, nil, "it")); got != want {
			t.Errorf("%s counts: %v", kind, got)
		}
	}
	down := sandboxer.E(sandboxer.Unavailable, nil, "10.0.0.9 is down")
	for what, s := range map[string]sandboxer.Spec{"host": {Host: "h"}, "image": {Image: "their/image"}} {
		if e.isFault(&sandboxer.Sandbox{Spec: s}, down) {
			t.Errorf("a fault counts although the caller chose the %s", what)
		}
	}
	if e.isFault(new(sandboxer.Sandbox), down.WithPublic("the address does not answer")) {
		t.Error("an answer of an address that the caller may have chosen counts")
	}
}

// failingRig is a routed rig whose first candidate fails each provision.
func failingRig(t *testing.T, policy sandboxer.RoutePolicy, kind sandboxer.Kind) *rig {
	r := routedRig(t, func(s *setup) {
		p := &s.profiles[len(s.profiles)-1]
		p.Route.Policy = policy
		if policy != sandboxer.RouteWait {
			p.Wait = 0
		}
	})
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Kind: kind})
	return r
}

// TestRoutedBreaker: after five faults in a row a route leaves the extension alone, says so, and comes back when
// a trial has been good; its policy says whether another candidate serves meanwhile.
func TestRoutedBreaker(t *testing.T) {
	for _, policy := range []sandboxer.RoutePolicy{sandboxer.RouteBurst, sandboxer.RouteReject, sandboxer.RouteWait} {
		synctest.Test(t, func(t *testing.T) {
			r := failingRig(t, policy, sandboxer.Unavailable)
			routed := sandboxer.CreateRequest{Profile: "routed"}
			failed := func(err error) bool {
				if policy == sandboxer.RouteBurst { // the next candidate served it
					return err == nil
				}
				return isKind(err, sandboxer.Unavailable) && !strings.Contains(err.Error(), "in a row")
			}
			for i := range breakerFaults {
				if _, err := r.Create(acme, routed); !failed(err) {
					t.Fatalf("%s: create %d: %v", policy, i, err)
				}
			}
			if at := r.Extensions(acme)[0].FailingUntil; !at.Equal(time.Now().Add(breakerFirst)) {
				t.Errorf("%s: it is left alone until %s", policy, at)
			}
			sb, err := r.Create(acme, routed)
			if policy == sandboxer.RouteBurst {
				if err != nil || sb.Extension != "ext.other" || routeOf(sb.Route) != "ext.fake refused failing, ext.other chosen first 0.10" {
					t.Fatalf("%+v, %v", sb, err)
				}
			} else {
				wantErr(t, err, sandboxer.Unavailable, "it failed several times in a row")
				if after := sandboxer.RetryAfterOf(err); after != breakerFirst {
					t.Errorf("%s: try again after %s", policy, after)
				}
			}
			if _, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"}); !isKind(err, sandboxer.Unavailable) || strings.Contains(err.Error(), "in a row") {
				t.Errorf("a profile without a route: %v", err)
			}
			time.Sleep(breakerFirst)
			if _, err := r.Plan(acme, routed); err != nil { // is no trial
				t.Errorf("%s: plan: %v", policy, err)
			}
			if _, err := r.Create(acme, routed); !failed(err) {
				t.Errorf("%s: the trial: %v", policy, err)
			}
			if at := r.Extensions(acme)[0].FailingUntil; !at.Equal(time.Now().Add(2 * breakerFirst)) {
				t.Errorf("%s: after a trial it is left alone until %s", policy, at)
			}
			r.world.Forgive()
			time.Sleep(2 * breakerFirst)
			sb, err = r.Create(acme, routed)
			if err != nil || sb.Extension != "ext.fake" || !r.Extensions(acme)[0].FailingUntil.IsZero() {
				t.Errorf("%s: it works again: %+v, %v", policy, sb, err)
			}
			page, err := r.Events(admin, sandboxer.EventQuery{Limit: sandboxer.MaxPage})
			if err != nil {
				t.Fatal(err)
			}
			var told []string
			for _, ev := range page {
				if ev.Type == sandboxer.EventWarning {
					told = append(told, ev.Message)
				}
			}
			if len(told) != 3 || !strings.Contains(told[0], "ext.fake failed several times in a row") || !strings.Contains(told[2], "works again") {
				t.Errorf("%s: events %q", policy, told)
			}
		})
	}
}

// TestRoutedBreakerSparesRequests: faults of requests do not count.
func TestRoutedBreakerSparesRequests(t *testing.T) {
	for _, kind := range []sandboxer.Kind{sandboxer.Failed, sandboxer.Invalid, sandboxer.Exhausted} {
		r := failingRig(t, sandboxer.RouteReject, kind)
		for range breakerFaults + 1 {
			_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
			wantErr(t, err, kind, "the fake is configured")
		}
	}
}

// TestOneTrial: of many creates at the same time one goes to an extension that failed.
func TestOneTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := failingRig(t, sandboxer.RouteReject, sandboxer.Unavailable)
		for range breakerFaults {
			_, _ = r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		}
		r.world.Forgive()
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Delay: time.Minute})
		time.Sleep(breakerFirst)
		var wg sync.WaitGroup
		var mu sync.Mutex
		results := map[sandboxer.Kind]int{}
		for range 5 {
			wg.Go(func() {
				_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
				mu.Lock()
				defer mu.Unlock()
				results[sandboxer.KindOf(err)]++
			})
		}
		wg.Wait()
		if results[""] != 1 || results[sandboxer.Unavailable] != 4 {
			t.Errorf("the creates end so: %v", results)
		}
	})
}

// TestRoutedCapacity: a candidate without room is passed over or refused, as the policy says; one that cannot say
// is out of routing; and it is asked once a second. A profile without a route asks nobody.
func TestRoutedCapacity(t *testing.T) {
	for _, c := range []struct {
		policy sandboxer.RoutePolicy
		fault  sandboxer.Kind
		want   string
	}{
		{sandboxer.RouteBurst, "", "ext.fake refused no_room 0.00, ext.other chosen first 0.10"},
		{sandboxer.RouteReject, "", ""},
		{sandboxer.RouteWait, "", "ext.fake chosen first 0.00, ext.other standby later 0.10"},
		{sandboxer.RouteBurst, sandboxer.Internal, "ext.fake refused unavailable, ext.other chosen first 0.10"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var asked atomic.Int32
			r := routedRig(t, func(s *setup) {
				s.backend.Observe = func(extension, op string, _ sandboxer.Kind, _ time.Duration) {
					if extension == "ext.fake" && op == "capacity" {
						asked.Add(1)
					}
				}
				s.profiles[len(s.profiles)-1].Route.Policy = c.policy
				if c.policy != sandboxer.RouteWait {
					s.profiles[len(s.profiles)-1].Wait = 0
				}
				s.fake.Capacity = 1
			})
			r.create(sandboxer.CreateRequest{})
			if n := asked.Load(); n != 0 {
				t.Errorf("a profile without a route asks %d times", n)
			}
			if c.fault != "" {
				r.world.Inject(fake.Fault{Verb: fake.VerbCapacity, Kind: c.fault})
			}
			for range 10 {
				p, err := r.Plan(acme, sandboxer.CreateRequest{Profile: "routed"})
				if c.want == "" {
					wantErr(t, err, sandboxer.Exhausted, "it has no room now")
				} else if got := routeOf(p.Route); err != nil || got != c.want {
					t.Errorf("%s: %s, %v", c.policy, got, err)
				}
			}
			want := int32(1)
			if c.policy == sandboxer.RouteWait {
				want = 0
			}
			if n := asked.Load(); n != want {
				t.Errorf("%s: it was asked %d times in one moment, want %d", c.policy, n, want)
			}
		})
	}
}

// TestSilentCapacity: a candidate that does not say how much room it has delays nothing for more than a second.
func TestSilentCapacity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := routedRig(t, func(s *setup) {
			s.profiles[len(s.profiles)-1].Route.Policy, s.profiles[len(s.profiles)-1].Wait = sandboxer.RouteBurst, 0
		})
		r.world.Inject(fake.Fault{Verb: fake.VerbCapacity, Hang: true})
		began := time.Now()
		sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
		if took := time.Since(began); err != nil || sb.Extension != "ext.fake" || took != capacityFor {
			t.Errorf("it took %s: %+v, %v", took, sb, err)
		}
	})
}

// TestBreakerOfCapacity: a backend that cannot say how much room it has fails, as one that makes nothing. An answer counts once, for
// however many creates.
func TestBreakerOfCapacity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := routedRig(t, func(s *setup) {
			s.profiles[len(s.profiles)-1].Route.Policy, s.profiles[len(s.profiles)-1].Wait = sandboxer.RouteBurst, 0
		})
		r.world.Inject(fake.Fault{Verb: fake.VerbCapacity, Kind: sandboxer.Unavailable})
		create := func(why sandboxer.RouteReason) {
			t.Helper()
			sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"})
			if err != nil || sb.Extension != "ext.other" || sb.Route[0].Reason != why {
				t.Errorf("%+v, %v", sb, err)
			}
		}
		for range 2 * breakerFaults {
			create(sandboxer.WhyUnavailable)
		}
		for range breakerFaults - 1 {
			if !r.Extensions(acme)[0].FailingUntil.IsZero() {
				t.Fatal("it is left alone after too few faults")
			}
			time.Sleep(2 * capacityFor)
			create(sandboxer.WhyUnavailable)
		}
		create(sandboxer.WhyFailing)
		time.Sleep(breakerFirst)
		create(sandboxer.WhyUnavailable) // the trial
		if at := r.Extensions(acme)[0].FailingUntil; !at.Equal(time.Now().Add(2 * breakerFirst)) {
			t.Errorf("after the trial it is left alone until %s", at)
		}
		r.world.Forgive()
		time.Sleep(2 * breakerFirst)
		if sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "routed"}); err != nil || sb.Extension != "ext.fake" {
			t.Errorf("it works again: %+v, %v", sb, err)
		}
	})
}

// TestBreakerGrows: each trial that fails doubles the time until the next, up to five minutes.
func TestBreakerGrows(t *testing.T) {
	var b breaker
	at := time.Now()
	for range breakerFaults - 1 {
		b.fault(nil, at)
	}
	until := b.fault(nil, at)
	for _, want := range []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, 80 * time.Second, 160 * time.Second, 5 * time.Minute, 5 * time.Minute} {
		if got := until.Sub(at); got != want {
			t.Fatalf("the next trial is after %s; want %s", got, want)
		}
		at = until
		trial, retryAt := b.begin(at)
		if trial == nil {
			t.Fatalf("there is no trial before %s", retryAt)
		}
		until = b.fault(trial, at)
	}
}
