package backend_test

import (
	"context"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// besides is an extension with all that one can be besides its capabilities.
type besides struct{ full }

func (*besides) Check(context.Context, sandboxer.Spec) error {
	return sandboxer.E(sandboxer.Invalid, nil, "checked")
}

func (*besides) Place(context.Context, sandboxer.Spec, []string) (string, error) { return "h", nil }
func (*besides) Admit(sandboxer.Spec, string) error                              { return nil }
func (*besides) DefaultLimits(sandboxer.Spec) sandboxer.Limits                   { return sandboxer.Limits{PIDs: 1} }
func (*besides) Notices(context.Context) []string                                { return []string{"n"} }

func (*besides) Caches(context.Context, string) ([]sandboxer.Cache, error) {
	return []sandboxer.Cache{{Name: "c"}}, nil
}

func (*besides) PruneCaches(context.Context, string) ([]sandboxer.Cache, error) {
	return []sandboxer.Cache{{Name: "c"}}, nil
}

func (*besides) ListPorts(context.Context, sandboxer.Handle) ([]int, error) { return []int{1}, nil }

func (*besides) Forget(context.Context, sandboxer.Handle) ([]string, error) {
	return []string{"r"}, nil
}

func (*besides) Services(context.Context, sandboxer.Handle) ([]string, error) {
	return []string{"web"}, nil
}

// describer is besides with a description.
type describer struct {
	besides
	says sandboxer.Description
}

func (d *describer) Describe() sandboxer.Description { return d.says }

// seen is what of Besides b shows by what it does.
func seen(t *testing.T, b *backend.Backend) (out []sandboxer.Capability) {
	t.Helper()
	spec := sandboxer.Spec{ID: "a", Generation: 1, Owner: "o", Inputs: map[string]string{"kept": "x"}}
	open := spec
	open.Inputs = nil
	caches, _ := b.Caches(t.Context(), "")
	pruned, _ := b.PruneCaches(t.Context(), "")
	if len(caches) != len(pruned) {
		t.Errorf("%d caches, and %d are removed", len(caches), len(pruned))
	}
	ports, _ := b.ListPorts(t.Context(), handle)
	known := len(ports) > 0
	_, forgetErr := b.Forget(t.Context(), handle)
	_, serviceErr := b.Exec(t.Context(), handle, sandboxer.Cmd{Args: []string{"a"}, Service: "web"})
	_, openErr := b.Check(t.Context(), open)
	_, specErr := b.Check(t.Context(), spec)
	for _, s := range []struct {
		c   sandboxer.Capability
		has bool
	}{
		{sandboxer.CanCheck, openErr != nil},
		{sandboxer.CanPlace, b.Places()},
		{sandboxer.CanAdmit, sandboxer.KindOf(specErr) != sandboxer.Denied},
		{sandboxer.CanLimits, b.DefaultLimits(spec) != sandboxer.Limits{}},
		{sandboxer.CanNotices, len(b.Notices(t.Context())) > 0},
		{sandboxer.CanCaches, len(caches) > 0},
		{sandboxer.CanPorts, known},
		{sandboxer.CanForget, forgetErr == nil},
		{sandboxer.CanServices, serviceErr == nil},
	} {
		if s.has {
			out = append(out, s.c)
		}
	}
	for c, err := range map[sandboxer.Capability]error{sandboxer.CanForget: forgetErr, sandboxer.CanServices: serviceErr} {
		if want := "ext.test does not support " + string(c); err != nil && (sandboxer.KindOf(err) != sandboxer.Unsupported || sandboxer.Message(err) != want) {
			t.Errorf("%s: %v; want %q", c, err, want)
		}
	}
	return out
}

// What an extension disclaims, or does not say of itself, is never called, whatever its Go type has.
func TestBesides(t *testing.T) {
	inputs := []sandboxer.Input{{Name: "kept", Restricted: true}}
	all := sandboxer.Besides()
	if got := seen(t, backend.New("ext.test", &besides{}, backend.Options{Inputs: inputs})); !slices.Equal(got, all) {
		t.Fatalf("with everything: %q; want %q", got, all)
	}
	for i, c := range all {
		without := &besides{full{without: []sandboxer.Capability{c}}}
		b := backend.New("ext.test", without, backend.Options{Inputs: inputs})
		want := slices.Delete(slices.Clone(all), i, i+1)
		if got := seen(t, b); !slices.Equal(got, want) {
			t.Errorf("without %s: %q; want %q", c, got, want)
		}
		if !slices.Equal(b.Capabilities(), sandboxer.Capabilities()) {
			t.Errorf("without %s it has %q", c, b.Capabilities())
		}
		// Exec is there so that a command can name a service.
		only := &describer{says: sandboxer.Description{Inputs: inputs, Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, c}}}
		b = backend.New("ext.test", only, backend.Options{}) // its inputs are its own
		if got := seen(t, b); !slices.Equal(got, []sandboxer.Capability{c}) {
			t.Errorf("one that says %s: %q", c, got)
		}
		if got := b.Capabilities(); !slices.Equal(got, only.says.Capabilities[:3]) {
			t.Errorf("one that says %s has %q; want %q", c, got, only.says.Capabilities[:3])
		}
	}
	both := &describer{besides{full{without: all}}, sandboxer.Description{Inputs: inputs, Capabilities: append(slices.Clone(all), sandboxer.CanExec)}}
	if got := seen(t, backend.New("ext.test", both, backend.Options{})); len(got) > 0 {
		t.Errorf("what it says and disclaims it has: %q", got)
	}
}

// An input that is not declared counts as the one that stands for all others.
func TestAnyInput(t *testing.T) {
	says := func(inputs ...sandboxer.Input) *backend.Backend {
		return backend.New("ext.test", &describer{says: sandboxer.Description{Inputs: inputs}}, backend.Options{Inputs: []sandboxer.Input{{Name: "x"}}})
	}
	open, free := sandboxer.Input{Name: "open"}, sandboxer.Input{Name: sandboxer.AnyInput}
	restricted := sandboxer.Input{Name: sandboxer.AnyInput, Restricted: true, Default: "d"}
	for _, tt := range []struct {
		name   string
		b      *backend.Backend
		input  string
		value  string
		vouch  bool
		denied bool
	}{
		{"any, free", says(free), "x", "v", false, false},
		{"any, restricted", says(restricted), "x", "v", false, true},
		{"any, restricted, as its default would be", says(restricted), "x", "d", false, true},
		{"any, restricted, vouched for", says(restricted), "x", "v", true, false},
		{"declared beside it", says(open, restricted), "open", "v", false, false},
		{"declared behind it", says(restricted, open), "open", "v", false, false},
		{"restricted beside it", says(free, sandboxer.Input{Name: "x", Restricted: true}), "x", "v", false, true},
	} {
		spec := sandboxer.Spec{ID: "a", Generation: 1, Owner: "o", Inputs: map[string]string{tt.input: tt.value}}
		if tt.vouch {
			spec.Vouched = []string{tt.input}
		}
		_, err := tt.b.Provision(t.Context(), spec)
		if got := sandboxer.KindOf(err) == sandboxer.Denied; got != tt.denied || err != nil && !got {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
