package spec

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A change makes one view of the table below another.
type change func(*View)

func price(c sandboxer.Credits) change { return func(v *View) { v.Asked, v.Price = true, &c } }

var (
	unknownPrice change = func(v *View) { v.Asked, v.Price = true, nil }
	metered      change = func(v *View) { v.Metered = true }
	unusable     change = func(v *View) { v.Problem = "its engine at 10.0.0.9 is down" }
	lacks        change = func(v *View) { v.Can = nil }
	weak         change = func(v *View) { v.Isolation = []sandboxer.Isolation{sandboxer.IsolationProcess} }
	noInputs     change = func(v *View) { v.Inputs = nil }
	needsBranch  change = func(v *View) {
		v.Inputs = append(slices.Clone(v.Inputs), sandboxer.Input{Name: "branch", Required: true})
	}
	anyInput  change = func(v *View) { v.Inputs = []sandboxer.Input{{Name: sandboxer.AnyInput}} }
	oneOf     change = func(v *View) { v.Inputs = []sandboxer.Input{{Name: "a", OneOf: "x"}, {Name: "b", OneOf: "x"}} }
	fixedRepo change = func(v *View) { v.Bounds.Inputs = map[string]string{"repo": "fixed"} }
	fixed     change = func(v *View) { v.Bounds.Image = "large" }
	small     change = func(v *View) { v.Bounds.Limits = sandboxer.Limits{MilliCPU: 1000, MemoryBytes: 1 << 30, PIDs: 10} }
	offline   change = func(v *View) { v.Bounds.Network = &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone} }
	full      change = func(v *View) { v.Full = sandboxer.E(sandboxer.Exhausted, nil, "host 10.0.0.9 is full") }
	failing   change = func(v *View) { v.RetryAt = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC) }
)

func refuses(kind sandboxer.Kind) change {
	return func(v *View) { v.Refusal = sandboxer.E(kind, nil, "our rule").WithHint("our hint") }
}

func check(kind sandboxer.Kind) change {
	return func(v *View) { v.Check = sandboxer.E(kind, nil, "10.0.0.9 said no") }
}

// routeRows: what is asked of candidates a, b, c, and the verdict and the reason of each in the order in which they are
// considered: "b first, a later" begins with the chosen one; "-" marks a refused one.
var routeRows = []struct {
	name    string
	policy  sandboxer.RoutePolicy // "": a profile with the one extension a
	price   bool                  // prefer: price
	ask     Ask
	a, b, c []change // of the views; nil c: there is no third candidate
	want    string
}{
	{name: "one", want: "a only"},
	{name: "one unusable", a: []change{unusable}, want: "-a unusable"},
	{name: "one lacks", a: []change{lacks}, want: "-a lacks_capability"},
	{name: "one weak", a: []change{weak}, want: "-a lacks_isolation"},
	{name: "one full", a: []change{full}, want: "-a no_room"},
	{name: "one refuses", a: []change{check(sandboxer.Unsupported)}, want: "-a unsupported"},
	{name: "one with an unknown input", ask: Ask{Inputs: map[string]string{"x": "y"}}, want: "-a unknown_input"},
	{name: "one without an input that it needs", a: []change{needsBranch}, want: "-a missing_input"},
	{name: "one too dear", ask: Ask{MaxCost: 5}, a: []change{price(6)}, want: "-a above_max_cost"},
	{name: "one that costs as much as is allowed", ask: Ask{MaxCost: 5}, a: []change{price(5)}, want: "a only"},
	{name: "one of an unknown price", ask: Ask{MaxCost: 5}, a: []change{metered, unknownPrice}, want: "-a price_unknown"},
	{name: "one of our own, of an unknown price", ask: Ask{MaxCost: 5}, a: []change{unknownPrice}, want: "a only"},
	{name: "one that was not asked for its price yet", ask: Ask{MaxCost: 5}, a: []change{metered}, want: "a only"},
	{name: "one that fails", a: []change{failing}, want: "-a failing"},

	{name: "as listed", policy: "burst", want: "a first, b later"},
	{name: "as listed, three", policy: "burst", c: []change{}, want: "a first, b later, c later"},
	{name: "unusable", policy: "burst", a: []change{unusable}, want: "-a unusable, b first"},
	{name: "lacks", policy: "burst", a: []change{lacks}, want: "-a lacks_capability, b first"},
	{name: "weak", policy: "burst", a: []change{weak}, want: "-a lacks_isolation, b first"},
	{name: "full", policy: "burst", a: []change{full}, want: "-a no_room, b first"},
	{name: "failing", policy: "burst", a: []change{failing}, want: "-a failing, b first"},
	{name: "backend full", policy: "burst", a: []change{check(sandboxer.Exhausted)}, want: "-a no_room, b first"},
	{name: "backend unavailable", policy: "burst", a: []change{check(sandboxer.Unavailable)}, want: "-a unavailable, b first"},
	{name: "backend silent", policy: "burst", a: []change{check(sandboxer.Timeout)}, want: "-a unavailable, b first"},
	{name: "backend broken", policy: "burst", a: []change{check(sandboxer.Internal)}, want: "-a unavailable, b first"},
	{name: "backend refuses", policy: "burst", a: []change{check(sandboxer.Invalid)}, want: "-a invalid, b first"},
	{name: "backend does not admit", policy: "burst", a: []change{check(sandboxer.Denied)}, want: "-a not_allowed, b first"},
	{name: "backend cannot", policy: "burst", a: []change{check(sandboxer.Unsupported)}, want: "-a unsupported, b first"},
	{name: "provider is not paid", policy: "burst", a: []change{check(sandboxer.NoCredit)}, want: "-a above_max_cost, b first"},
	{name: "rules deny", policy: "burst", a: []change{refuses(sandboxer.Denied)}, want: "-a not_allowed, b first"},
	{name: "rules refuse", policy: "burst", a: []change{refuses(sandboxer.Invalid)}, want: "-a invalid, b first"},
	{name: "snapshot is of another", policy: "burst", a: []change{refuses(sandboxer.Unsupported)}, want: "-a unsupported, b first"},
	{name: "the second is full, too", policy: "burst", a: []change{full}, b: []change{full}, c: []change{}, want: "-a no_room, -b no_room, c first"},
	{name: "all full", policy: "burst", a: []change{full}, b: []change{full}, want: "-a no_room, -b no_room"},
	{name: "a later one is full", policy: "burst", b: []change{full}, c: []change{}, want: "a first, -b no_room, c later"},

	{name: "input of the second alone", policy: "burst", ask: Ask{Inputs: map[string]string{"repo": "."}}, a: []change{noInputs}, want: "-a unknown_input, b first"},
	{name: "input of none", policy: "burst", ask: Ask{Inputs: map[string]string{"x": "y"}}, want: "-a unknown_input, -b unknown_input"},
	{name: "input of any name", policy: "burst", ask: Ask{Inputs: map[string]string{"x": "y"}}, b: []change{anyInput}, want: "-a unknown_input, b first"},
	{name: "input with a password", policy: "burst", ask: Ask{Inputs: map[string]string{"repo": "https://u:p@example.org/x"}}, want: "-a invalid, -b invalid"},
	{name: "input that the first needs", policy: "burst", a: []change{needsBranch}, want: "-a missing_input, b first"},
	{name: "input that the first needs is given", policy: "burst", ask: Ask{Inputs: map[string]string{"branch": "x"}}, a: []change{needsBranch}, want: "a first, -b unknown_input"},
	{name: "input that the first needs, of a source", policy: "burst", ask: Ask{Restored: true}, a: []change{needsBranch}, want: "a first, b later"},
	{name: "input of a source that is not taken", policy: "burst", ask: Ask{Restored: true, Inputs: map[string]string{"repo": "."}}, a: []change{noInputs}, want: "-a unknown_input, b first"},
	{name: "one of a group", policy: "burst", a: []change{oneOf}, want: "-a missing_input, b first"},
	{name: "a group and a host", policy: "burst", ask: Ask{Host: "h"}, a: []change{oneOf}, want: "a first, b later"},
	{name: "a group and an image", policy: "burst", ask: Ask{Image: "i"}, a: []change{oneOf}, want: "a first, b later"},
	{name: "fixed input", policy: "burst", ask: Ask{Inputs: map[string]string{"repo": "."}}, a: []change{fixedRepo}, want: "-a fixed_input, b first"},
	{name: "fixed input, the same", policy: "burst", ask: Ask{Inputs: map[string]string{"repo": "fixed"}}, a: []change{fixedRepo}, want: "a first, b later"},
	{name: "fixed input, not given", policy: "burst", a: []change{fixedRepo}, want: "a first, b later"},
	{name: "fixed image", policy: "burst", ask: Ask{Image: "small"}, a: []change{fixed}, want: "-a fixed_image, b first"},
	{name: "fixed image, the same", policy: "burst", ask: Ask{Image: "large"}, a: []change{fixed}, want: "a first, b later"},
	{name: "fixed image, not given", policy: "burst", a: []change{fixed}, want: "a first, b later"},
	{name: "processor", policy: "burst", ask: Ask{Limits: sandboxer.Limits{MilliCPU: 1001}}, a: []change{small}, want: "-a above_limits, b first"},
	{name: "memory", policy: "burst", ask: Ask{Limits: sandboxer.Limits{MemoryBytes: 2 << 30}}, a: []change{small}, want: "-a above_limits, b first"},
	{name: "processes", policy: "burst", ask: Ask{Limits: sandboxer.Limits{PIDs: 11}}, a: []change{small}, want: "-a above_limits, b first"},
	{name: "limits that fit", policy: "burst", ask: Ask{Limits: sandboxer.Limits{MilliCPU: 1000, MemoryBytes: 1 << 30}}, a: []change{small}, want: "a first, b later"},
	{name: "a limit that the candidate does not set", policy: "burst", ask: Ask{Limits: sandboxer.Limits{DiskBytes: 1 << 40}}, a: []change{small}, want: "a first, b later"},
	{name: "too large for all", policy: "burst", ask: Ask{Limits: sandboxer.Limits{PIDs: 11}}, a: []change{small}, b: []change{small}, want: "-a above_limits, -b above_limits"},
	{name: "network", policy: "burst", ask: Ask{Network: &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}}, a: []change{offline}, want: "-a above_network, b first"},
	{name: "no network", policy: "burst", ask: Ask{Network: &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone}}, a: []change{offline}, want: "a first, b later"},
	{name: "network not asked", policy: "burst", a: []change{offline}, want: "a first, b later"},

	{name: "too dear", policy: "burst", ask: Ask{MaxCost: 5}, a: []change{price(6)}, b: []change{price(5)}, want: "-a above_max_cost, b first"},
	{name: "all too dear", policy: "burst", ask: Ask{MaxCost: 5}, a: []change{price(6)}, b: []change{price(7)}, want: "-a above_max_cost, -b above_max_cost"},
	{name: "unknown price", policy: "burst", ask: Ask{MaxCost: 5}, a: []change{metered, unknownPrice}, b: []change{price(5)}, want: "-a price_unknown, b first"},
	{name: "unknown price without a bound", policy: "burst", a: []change{metered, unknownPrice}, want: "a first, b later"},

	{name: "by price", policy: "burst", price: true, a: []change{price(3)}, b: []change{price(2)}, c: []change{price(1)}, want: "c cheapest, b later, a later"},
	{name: "by price, as listed where equal", policy: "burst", price: true, a: []change{price(2)}, b: []change{price(2)}, c: []change{price(2)}, want: "a cheapest, b later, c later"},
	{name: "self-hosted before metered", policy: "burst", price: true, a: []change{metered, price(1)}, b: []change{price(9)}, want: "b cheapest, a later"},
	{name: "self-hosted of an unknown price before metered", policy: "burst", price: true, a: []change{metered, price(1)}, b: []change{unknownPrice}, want: "b cheapest, a later"},
	{name: "an unknown price is not zero", policy: "burst", price: true, a: []change{metered, unknownPrice}, b: []change{metered, price(9)}, want: "b cheapest, a later"},
	{name: "zero is a price", policy: "burst", price: true, a: []change{price(1)}, b: []change{price(0)}, want: "b cheapest, a later"},
	{name: "unknown prices as listed", policy: "burst", price: true, a: []change{unknownPrice}, b: []change{unknownPrice}, want: "a cheapest, b later"},
	{name: "the cheapest is full", policy: "burst", price: true, a: []change{price(3)}, b: []change{price(2), full}, want: "-b no_room, a cheapest"},
	{name: "the cheapest lacks", policy: "burst", price: true, a: []change{price(3)}, b: []change{price(2), lacks}, want: "-b lacks_capability, a cheapest"},
	{name: "price of no interest", policy: "burst", a: []change{price(3)}, b: []change{price(2)}, want: "a first, b later"},

	{name: "reject", policy: "reject", want: "a first, b later"},
	{name: "reject: full", policy: "reject", a: []change{full}, want: "-a no_room, -b policy"},
	{name: "reject: all full", policy: "reject", a: []change{full}, b: []change{full}, want: "-a no_room, -b no_room"},
	{name: "reject: unusable", policy: "reject", a: []change{unusable}, want: "-a unusable, -b policy"},
	{name: "reject: failing", policy: "reject", a: []change{failing}, want: "-a failing, -b policy"},
	{name: "reject: unavailable", policy: "reject", a: []change{check(sandboxer.Unavailable)}, want: "-a unavailable, -b policy"},
	{name: "reject: unsupported goes on", policy: "reject", a: []change{check(sandboxer.Unsupported)}, want: "-a unsupported, b first"},
	{name: "reject: too large goes on", policy: "reject", ask: Ask{Limits: sandboxer.Limits{PIDs: 11}}, a: []change{small}, want: "-a above_limits, b first"},
	{name: "reject: the one that it goes on to is full", policy: "reject", ask: Ask{Limits: sandboxer.Limits{PIDs: 11}}, a: []change{small}, b: []change{full}, c: []change{}, want: "-a above_limits, -b no_room, -c policy"},
	{name: "reject: a later one is full", policy: "reject", b: []change{full}, want: "a first, -b no_room"},
	{name: "reject by price", policy: "reject", price: true, a: []change{price(3)}, b: []change{price(2), full}, want: "-b no_room, -a policy"},

	{name: "wait", policy: "wait", want: "a first, b later"},
	{name: "wait: full", policy: "wait", a: []change{full}, want: "a waits, b later"},
	{name: "wait: all full", policy: "wait", a: []change{full}, b: []change{full}, want: "a waits, b later"},
	{name: "wait: unusable", policy: "wait", a: []change{unusable}, want: "-a unusable, -b policy"},
	{name: "wait: failing", policy: "wait", a: []change{failing}, want: "-a failing, -b policy"},
	{name: "wait: too large goes on, and waits", policy: "wait", ask: Ask{Limits: sandboxer.Limits{PIDs: 11}}, a: []change{small}, b: []change{full}, want: "-a above_limits, b waits"},
	{name: "wait by price", policy: "wait", price: true, a: []change{price(3)}, b: []change{price(2), full}, want: "b waits, a later"},
}

// TestRoute: the verdict and the reason of every candidate.
func TestRoute(t *testing.T) {
	if len(routeRows) < 80 {
		t.Fatalf("%d rows; want 80", len(routeRows))
	}
	for _, row := range routeRows {
		t.Run(row.name, func(t *testing.T) {
			p := sandboxer.Profile{ID: "profile.p", Extension: "a", Requires: []sandboxer.Capability{sandboxer.CanExec}, Isolation: sandboxer.IsolationVM, Wait: time.Minute}
			changes := [][]change{row.a}
			if row.policy != "" {
				p.Route, p.Extension = &sandboxer.Route{Policy: row.policy}, ""
				if row.price {
					p.Route.Prefer = sandboxer.PreferPrice
				}
				if changes = append(changes, row.b); row.c != nil {
					changes = append(changes, row.c)
				}
			}
			var views []View
			for i, of := range changes {
				on := p
				on.Route, on.Extension = nil, string(rune('a'+i))
				v := View{Profile: on, Can: []sandboxer.Capability{sandboxer.CanExec}, Isolation: []sandboxer.Isolation{sandboxer.IsolationVM}, Inputs: []sandboxer.Input{{Name: "repo"}}, TTL: time.Hour}
				for _, change := range of {
					change(&v)
				}
				views = append(views, v)
			}
			choices := Route(p, &row.ask, views)
			var got []string
			for _, c := range choices {
				mark := ""
				if c.Verdict == sandboxer.RouteRefused {
					mark = "-"
				}
				got = append(got, mark+c.Extension+" "+string(c.Reason))
				if (c.Verdict == sandboxer.RouteRefused) != (c.Err != nil) || c.Detail == "" || !slices.Contains(sandboxer.RouteReasons(), c.Reason) {
					t.Errorf("%+v", c)
				}
				if strings.Contains(c.Detail, "10.0.0.9") {
					t.Errorf("tenants read the words of a backend: %s", c.Detail)
				}
				if c.Verdict == sandboxer.RouteRefused && !strings.Contains(c.Detail, ";") {
					t.Errorf("nothing says what would change it: %s", c.Detail)
				}
				if views[c.At].Profile.Extension != c.Extension {
					t.Errorf("%s is at %d", c.Extension, c.At)
				}
			}
			if have := strings.Join(got, ", "); have != row.want {
				t.Errorf("%s\nwant %s", have, row.want)
			}
			if err := refusedByAll(p, choices, false); len(choices) > 1 && err != nil && strings.Contains(sandboxer.Message(err)+sandboxer.HintOf(err), "10.0.0.9") {
				t.Errorf("tenants read the words of a backend: %v", err)
			}
		})
	}
}

// TestRefusedByAll: the kind is that of a refusal that may pass, if there is one, with when to try again.
func TestRefusedByAll(t *testing.T) {
	room := sandboxer.E(sandboxer.Exhausted, nil, "full")
	room.RetryAfter = 5 * time.Second
	p := sandboxer.Profile{ID: "profile.p", Route: &sandboxer.Route{Policy: sandboxer.RouteBurst}}
	views := []View{{Profile: sandboxer.Profile{Extension: "ext.a"}, Check: sandboxer.E(sandboxer.Unsupported, nil, "no")}, {Profile: sandboxer.Profile{Extension: "ext.b"}, Full: room}}
	err := refusedByAll(p, Route(p, &Ask{}, views), false)
	if sandboxer.KindOf(err) != sandboxer.Exhausted || sandboxer.RetryAfterOf(err) != room.RetryAfter || !errors.Is(err, room) ||
		!strings.Contains(sandboxer.Message(err), "profile.p has no extension for this request: ext.a: its backend cannot") {
		t.Errorf("%v", err)
	}
	views[1].Full = nil
	views[1].Problem = "x"
	if err := refusedByAll(p, Route(p, &Ask{}, views), false); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("%v", err)
	}
}

// TestRefusedAlike: what is wrong with a request wherever it goes is said once, with its own hint.
func TestRefusedAlike(t *testing.T) {
	p := sandboxer.Profile{ID: "profile.p", Route: &sandboxer.Route{Policy: sandboxer.RouteBurst}}
	long := sandboxer.E(sandboxer.Invalid, nil, "too long").WithHint("ask for less")
	views := []View{{Profile: sandboxer.Profile{Extension: "ext.a"}, Refusal: long}, {Profile: sandboxer.Profile{Extension: "ext.b"}, Refusal: long}}
	if err := refusedByAll(p, Route(p, &Ask{}, views), false); err != error(long) {
		t.Errorf("%v", err)
	}
	views[0].Refusal, views[1].Refusal = nil, nil
	views[0].Check, views[1].Check = long, long
	if err := refusedByAll(p, Route(p, &Ask{}, views), true); !strings.Contains(sandboxer.Message(err), "ext.b: its backend refuses the request; change the request (too long)") {
		t.Errorf("%v", err)
	}
}

// TestCreateRouted: a request is resolved on the candidate that can serve it, as it is there.
func TestCreateRouted(t *testing.T) {
	repo, branch := sandboxer.Input{Name: "repo"}, sandboxer.Input{Name: "branch"}
	site := &Site{
		Profiles: []sandboxer.Profile{{ID: "profile.r", Image: "small", Inputs: map[string]string{"branch": "main"}, Limits: sandboxer.Limits{MemoryBytes: 1 << 20},
			Route: &sandboxer.Route{Policy: sandboxer.RouteReject, Candidates: []sandboxer.Candidate{
				{Extension: "ext.a", Limits: sandboxer.Limits{MemoryBytes: 2 << 20}}, {Extension: "ext.b", Image: "large", Limits: sandboxer.Limits{MemoryBytes: 8 << 20}}}}}},
		Extensions: []Extension{
			{Info: sandboxer.ExtensionInfo{ID: "ext.a", Inputs: []sandboxer.Input{repo}}, Backend: open{}},
			{Info: sandboxer.ExtensionInfo{ID: "ext.b", Inputs: []sandboxer.Input{repo, branch}}, Backend: open{}},
		},
	}
	if fault := site.CheckProfile(site.Profiles[0]); fault != "" {
		t.Fatal(fault)
	}
	user := sandboxer.Principal{Tenant: "acme", Actor: "key:1", Scopes: []sandboxer.Scope{sandboxer.ScopeWrite}}
	type req = sandboxer.CreateRequest
	for name, c := range map[string]struct {
		req         req
		on, image   string
		memory      int64
		refusedWith string
	}{
		"as it is":         {req: req{}, on: "ext.a", image: "small", memory: 1 << 20},
		"larger":           {req: req{Limits: sandboxer.Limits{MemoryBytes: 4 << 20}}, on: "ext.b", image: "large", memory: 4 << 20},
		"largest":          {req: req{Limits: sandboxer.Limits{MemoryBytes: 9 << 20}}, refusedWith: "ext.a: limit memory_bytes=9437184 is more than the candidate allows (2097152); ask for less. ext.b:"},
		"an input of b":    {req: req{Inputs: map[string]string{"branch": "x"}}, on: "ext.b", image: "large", memory: 1 << 20},
		"another image":    {req: req{Image: "own"}, on: "ext.a", image: "own", memory: 1 << 20},
		"an unknown input": {req: req{Inputs: map[string]string{"rep": "x"}}, refusedWith: `ext.b: ext.b does not take the input "rep"; did you mean "repo"?`},
	} {
		c.req.Profile = "r"
		r, err := site.Create(user, c.req)
		if c.refusedWith != "" {
			if err == nil || !strings.Contains(sandboxer.Message(err), c.refusedWith) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if r.Extension != c.on || r.Spec.Profile.Extension != c.on || r.Spec.Profile.Route != nil || r.Spec.Image != c.image || r.Spec.Limits.MemoryBytes != c.memory {
			t.Errorf("%s: it is on %s: %+v", name, r.Extension, r.Spec)
		}
		if _, has := r.Spec.Inputs["branch"]; has != (c.on == "ext.b") {
			t.Errorf("%s: its inputs are %v", name, r.Spec.Inputs)
		}
	}
	// A fork stays where its source is, without the inputs that only others take; a route that left it refuses.
	source := &sandboxer.SnapshotRecord{ID: "s", Tenant: "acme", Profile: "profile.r", Extension: "ext.a", Kind: sandboxer.SnapshotNative}
	env := func() (map[string]string, error) { return nil, nil }
	if r, err := site.Restore(user, source, env, sandboxer.RestoreRequest{}, "ext.a"); err != nil || r.Extension != "ext.a" || len(r.Spec.Inputs) > 0 {
		t.Errorf("a fork is %+v, %v", r, err)
	}
	if _, err := site.Restore(user, source, env, sandboxer.RestoreRequest{}, "ext.c"); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("a fork outside of the route: %v", err)
	}
	// A sandbox on another candidate answers the same request.
	r, err := site.Create(user, req{Profile: "r", Inputs: map[string]string{"repo": "."}})
	if err != nil {
		t.Fatal(err)
	}
	sb := r.Routing.On[1].Record(1, time.Now(), false)
	if r.Extension != "ext.a" || sb.Extension != "ext.b" || !r.Matches(sb, nil) {
		t.Errorf("a sandbox on %s does not match what was resolved on %s", sb.Extension, r.Extension)
	}
}

func BenchmarkRoute(b *testing.B) {
	p := sandboxer.Profile{ID: "profile.p", Requires: []sandboxer.Capability{sandboxer.CanExec}, Isolation: sandboxer.IsolationVM, Route: &sandboxer.Route{Policy: sandboxer.RouteBurst, Prefer: sandboxer.PreferPrice}}
	var views []View
	for i := range 100 {
		on := p
		on.Route, on.Extension = nil, fmt.Sprint("ext.", i)
		v := View{Profile: on, Can: sandboxer.Capabilities(), Isolation: sandboxer.Isolations(), Inputs: []sandboxer.Input{{Name: "repo"}, {Name: "branch"}}, Metered: i%3 == 0}
		price(sandboxer.Credits(i * 7919 % 101))(&v)
		if i%2 == 0 {
			full(&v)
		}
		if i%5 == 0 {
			check(sandboxer.Unsupported)(&v)
		}
		views = append(views, v)
	}
	ask := Ask{Inputs: map[string]string{"repo": "."}, Limits: sandboxer.Limits{MemoryBytes: 1 << 30}, MaxCost: 90}
	b.ReportAllocs()
	for b.Loop() {
		Route(p, &ask, views)
	}
}
