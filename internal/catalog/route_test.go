package catalog

import (
	"reflect"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/sand-boxer/sandboxer"
)

// two are two extensions of the stand-in adapter.
var two = fstest.MapFS{
	"extensions/ext.fake.yaml":  base["extensions/ext.fake.yaml"],
	"extensions/ext.other.yaml": {Data: []byte("id: ext.other\nhandler: fake\ncapabilities:\n  isolation_levels: [container]\n  pricing_model: self-hosted\n")},
}

const routed = `id: profile.r
image: small
limits: {cpus: 1, memory: 4GiB}
max_limits: {memory: 8GiB}
network: public
inputs: {repo: .}
wait: 1m
route:
  policy: wait
  prefer: price
  candidates:
  - extension: ext.fake
  - extension: ext.other
    image: large
    limits: {memory: 2GiB, pids: 9}
    network: none
    inputs: {branch: main}
    price: {per_hour: "0.5"}
`

// TestRoute: a route becomes one profile for each candidate, with what is different there.
func TestRoute(t *testing.T) {
	c, err := loadOver(t, two, map[string]string{"profiles/r.yaml": routed})
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Profile("r")
	if err != nil {
		t.Fatal(err)
	}
	want := &sandboxer.Route{Policy: sandboxer.RouteWait, Prefer: sandboxer.PreferPrice, Candidates: []sandboxer.Candidate{
		{Extension: "ext.fake"},
		{Extension: "ext.other", Image: "large", Limits: sandboxer.Limits{MemoryBytes: 2 << 30, PIDs: 9}, Network: &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone},
			Inputs: map[string]string{"branch": "main"}, Price: &sandboxer.Price{PerHour: 500_000}},
	}}
	if p.Extension != "" || !reflect.DeepEqual(p.Route, want) {
		t.Errorf("the route is %+v", p.Route)
	}
	if err := compiled(t, KindProfile).Validate(plain(t, []byte(routed))); err != nil {
		t.Errorf("the schema refuses what the loader accepts: %v", err)
	}
	on := p.Candidates()
	first, second := p.Profile, p.Profile
	first.Route, first.Extension, first.MaxLimits = nil, "ext.fake", sandboxer.Limits{MilliCPU: 1000, MemoryBytes: 8 << 30}
	second.Route, second.Extension, second.Image = nil, "ext.other", "large"
	second.Limits = sandboxer.Limits{MilliCPU: 1000, MemoryBytes: 2 << 30, PIDs: 9}
	second.MaxLimits = second.Limits
	second.Network, second.Inputs, second.Price = sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone}, map[string]string{"repo": ".", "branch": "main"}, sandboxer.Price{PerHour: 500_000}
	if len(on) != 2 || !reflect.DeepEqual(on[0], first) || !reflect.DeepEqual(on[1], second) {
		t.Errorf("its candidates are %+v\nwant %+v\nand %+v", on, first, second)
	}
	if got, ok := p.On("ext.other"); !ok || !reflect.DeepEqual(got, second) {
		t.Errorf("on ext.other it is %+v, %v", got, ok)
	}
	if _, ok := p.On("ext.none"); ok {
		t.Error("it is on an extension that is no candidate")
	}
	if p.Inputs["branch"] != "" {
		t.Error("a candidate changes the inputs of the profile")
	}
}

// TestBadRoutes: a fault of a candidate is reported with its line and column.
func TestBadRoutes(t *testing.T) {
	head := "id: profile.r\n"
	route := head + "route:\n  policy: reject\n  candidates:\n"
	for _, c := range []struct{ name, text, want string }{
		{"both", head + "extension: ext.fake\nroute:\n  policy: reject\n  candidates: [{extension: ext.fake}]\n", "3:1   route: a profile has either extension or route"},
		{"neither", head, "1:1   extension: required, but missing: give it, or else route"},
		{"nothing", head + "route:\n", "2:1   route: expected a mapping"},
		{"policy", head + "route:\n  policy: rejct\n  candidates: [{extension: ext.fake}]\n", `3:11  route.policy: unknown policy "rejct"`},
		{"preference", head + "route:\n  policy: reject\n  prefer: speed\n  candidates: [{extension: ext.fake}]\n", `4:11  route.prefer: unknown preference "speed": expected price`},
		{"no policy", head + "route:\n  candidates: [{extension: ext.fake}]\n", "2:1   route.policy: required, but missing"},
		{"no candidates", head + "route:\n  policy: reject\n", "2:1   route.candidates: required, but missing"},
		{"empty", head + "route:\n  policy: reject\n  candidates: []\n", "4:3   route.candidates: expected at least one element"},
		{"too many", route + strings.Repeat("  - extension: ext.fake\n", 33), "4:3   route.candidates: 33 candidates are too many: want at most 32"},
		{"twice", route + "  - extension: ext.fake\n  - extension: ext.fake\n", "6:16  route.candidates[1].extension: ext.fake is already a candidate"},
		{"no extension", route + "  - image: x\n", "5:5   route.candidates[0].extension: required, but missing"},
		{"unknown", route + "  - extension: ext.fake\n  - extension: ext.othre\n", `6:16  route.candidates[1].extension: there is no extension "ext.othre": there is ext.fake and ext.other (did you mean "ext.other"?)`},
		{"unknown field", route + "  - extension: ext.fake\n    limit: {cpus: 1}\n", `6:5   route.candidates[0].limit: unknown field (did you mean "limits"?)`},
		{"isolation", head + "isolation: vm\nroute:\n  policy: reject\n  candidates:\n  - extension: ext.fake\n", `6:16  route.candidates[0].extension: ext.fake does not offer isolation level "vm"`},
		{"limits", head + "max_limits: {memory: 1GiB}\nroute:\n  policy: reject\n  candidates:\n  - extension: ext.fake\n    limits: {memory: 2GiB}\n", "7:5   route.candidates[0].limits: limit memory_bytes=2147483648 is more than max_limits allows"},
		{"network", route + "  - extension: ext.fake\n    network: public\n", "6:14  route.candidates[0].network: "},
		{"list", route + "  - extension: ext.fake\n    network: {mode: none, allow: [a.b]}\n", "6:27  route.candidates[0].network.allow: a list has no effect"},
		{"inputs", route + "  - extension: ext.fake\n    inputs: {rep: x}\n", `6:14  route.candidates[0].inputs.rep: ext.fake (adapter "fake") takes no such input`},
		{"inputs of all", head + "inputs: {rep: x}\nroute:\n  policy: reject\n  candidates: [{extension: ext.fake}, {extension: ext.other}]\n", `2:10  inputs.rep: none of ext.fake (adapter "fake") and ext.other (adapter "fake") takes such an input`},
		{"no wait", head + "route:\n  policy: wait\n  candidates: [{extension: ext.fake}]\n", "3:11  route.policy: the policy wait needs a time to wait"},
		{"idle wait", head + "wait: 1m\nroute:\n  policy: reject\n  candidates: [{extension: ext.fake}]\n", "2:1   wait: a time to wait has no effect"},
		{"burst that waits", head + "wait: 1m\nroute:\n  policy: burst\n  candidates: [{extension: ext.fake}]\n", "2:1   wait: a time to wait has no effect with the policy burst"},
		{"pool", head + "pool: {size: 1}\nroute:\n  policy: reject\n  prefer: price\n  candidates: [{extension: ext.fake}]\n", "2:1   pool: a pool holds sandboxes of the first candidate"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := loadOver(t, two, map[string]string{"profiles/r.yaml": c.text})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v\nwant %s", err, c.want)
			}
		})
	}
}
