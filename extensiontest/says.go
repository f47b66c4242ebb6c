package extensiontest

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// says is what an extension must do that disclaims capabilities, or describes itself: its description is kept, and
// read without opening it.
func (s *suite) says(t *testing.T) {
	ext := s.Open(t)
	b := s.wrap(t, ext)
	all := slices.Concat(sandboxer.Capabilities(), sandboxer.Besides())
	if n, ok := ext.(sandboxer.Narrower); ok {
		for _, c := range n.Without() {
			if !slices.Contains(all, c) {
				t.Errorf("it disclaims %q, which is no capability", c)
			}
		}
	}
	d, ok := ext.(sandboxer.Describer)
	if !ok {
		return
	}
	said := d.Describe()
	known(t, "capability", said.Capabilities, all)
	known(t, "isolation level", said.Isolation, sandboxer.Isolations())
	known(t, "pricing model", said.Pricing, sandboxer.PricingModels())
	if len(said.Isolation) == 0 || len(said.Pricing) == 0 {
		t.Errorf("it says no isolation level, or no pricing model: %q, %q", said.Isolation, said.Pricing)
	}
	for _, c := range said.Capabilities {
		is, besides := facets[c]
		if besides && !is(ext) || !besides && !b.Can(c) {
			t.Errorf("it says that it has %q, and has no methods for it", c)
		}
	}
	var names []string
	for _, in := range said.Inputs {
		if err := sandboxer.CheckInputName(in.Name); err != nil && in.Name != sandboxer.AnyInput {
			t.Error(describe(err))
		}
		if slices.Contains(names, in.Name) {
			t.Errorf("it says the input %q twice", in.Name)
		}
		names = append(names, in.Name)
		if !slices.ContainsFunc(s.Inputs, func(h sandboxer.Input) bool { return h.Name == in.Name && h.Restricted == in.Restricted }) {
			t.Errorf("it declares the input %q (restricted: %t), which is not in the harness", in.Name, in.Restricted)
		}
	}
	for _, in := range s.Inputs {
		if !slices.Contains(names, in.Name) {
			t.Errorf("the harness has the input %q, which it does not declare", in.Name)
		}
	}
	if _, err := json.Marshal(said); err != nil {
		t.Fatalf("what it says cannot be kept: %v", err)
	}
	later := s.Open(t)
	s.wrap(t, later)
	for when, d := range map[string]any{"asked again": d, "opened again": later} {
		d, ok := d.(sandboxer.Describer)
		if !ok {
			t.Errorf("%s it says nothing of itself", when)
		} else if again := d.Describe(); !same(again, said) {
			t.Errorf("%s it says %+v; first it said %+v", when, again, said)
		}
	}
}

func known[T ~string](t *testing.T, what string, said, all []T) {
	t.Helper()
	for i, x := range said {
		if !slices.Contains(all, x) || slices.Contains(said[:i], x) {
			t.Errorf("it says the %s %q, which is none, or is said twice", what, x)
		}
	}
}

// same compares as JSON, which is how descriptions are kept.
func same(a, b sandboxer.Description) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && string(x) == string(y)
}

// facets are the interfaces of sandboxer.Besides.
var facets = map[sandboxer.Capability]func(any) bool{
	sandboxer.CanCheck: is[sandboxer.Checker], sandboxer.CanPlace: is[sandboxer.Placer], sandboxer.CanAdmit: is[sandboxer.Admitter],
	sandboxer.CanLimits: is[sandboxer.Limiter], sandboxer.CanNotices: is[sandboxer.Noticer], sandboxer.CanCaches: is[sandboxer.Cacher],
	sandboxer.CanPorts: is[sandboxer.PortLister], sandboxer.CanForget: is[sandboxer.Forgetter], sandboxer.CanServices: is[sandboxer.Serviced],
}

func is[T any](x any) bool { _, ok := x.(T); return ok }
