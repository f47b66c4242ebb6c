package manager

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/adapters/vmpacker"
)

// TestInputs is what of an extension's declarations an order has to keep, and what it gets.
func TestInputs(t *testing.T) {
	any := sandboxer.Input{Name: sandboxer.AnyInput, Help: "whatever", Required: true, OneOf: "source", Default: "x", Restricted: true}
	branch := sandboxer.Input{Name: "branch", Default: "main"}
	sources := []sandboxer.Input{{Name: "repo", OneOf: "source"}, {Name: "dir", OneOf: "source"}}
	machine := vmpacker.Adapter.Inputs
	type in = map[string]string
	for name, c := range map[string]struct {
		declared    []sandboxer.Input
		prof, asked in
		host, image string
		want        in
		refused     string
	}{
		"nothing declared":           {asked: in{"a": "b"}, refused: `does not take the input "a"`},
		"any":                        {declared: []sandboxer.Input{any}, asked: in{"a": "b", "C.d-e": "f"}, prof: in{"g": "h"}, want: in{"a": "b", "C.d-e": "f", "g": "h"}},
		"any, and none is given":     {declared: []sandboxer.Input{any}, want: in{}},
		"any beside a default":       {declared: []sandboxer.Input{any, branch}, asked: in{"a": "b"}, want: in{"a": "b", "branch": "main"}},
		"any as a name":              {declared: []sandboxer.Input{any}, asked: in{sandboxer.AnyInput: "b"}, refused: `"*" cannot be the name of an input`},
		"the image as an input":      {declared: []sandboxer.Input{any}, asked: in{"image": "b"}, refused: `"image" cannot be the name of an input`},
		"the host as an input":       {declared: []sandboxer.Input{any}, asked: in{"host": "b"}, refused: `"host" cannot be the name of an input`},
		"the host of a profile":      {declared: []sandboxer.Input{any}, prof: in{"host": "b"}, refused: "--host"},
		"a name with a line feed":    {declared: []sandboxer.Input{any}, asked: in{"a\nb": "c"}, refused: "cannot be the name"},
		"a name with =":              {declared: []sandboxer.Input{any}, asked: in{"a=b": "c"}, refused: "cannot be the name"},
		"no name":                    {declared: []sandboxer.Input{any}, asked: in{"": "c"}, refused: "cannot be the name"},
		"a long name":                {declared: []sandboxer.Input{any}, asked: in{strings.Repeat("a", 129): "c"}, refused: "cannot be the name"},
		"a password under any":       {declared: []sandboxer.Input{any}, asked: in{"from": "https://u:p@example.org/x"}, refused: "contains credentials"},
		"one of, beside any":         {declared: append([]sandboxer.Input{any}, sources...), asked: in{"a": "b"}, refused: "needs one of the inputs repo, dir"},
		"one of, by the profile":     {declared: sources, prof: in{"dir": "/x"}, want: in{"dir": "/x"}},
		"one of, taken away":         {declared: sources, prof: in{"dir": "/x"}, asked: in{"dir": ""}, refused: "needs one of"},
		"no machine":                 {declared: machine, asked: in{"ssh_port": "22"}, refused: "needs one of the inputs vm, ssh_target, tunnel_port"},
		"a machine by its alias":     {declared: machine, asked: in{"vm": "haskell-build"}, host: "localhost", want: in{"vm": "haskell-build"}},
		"a machine by a tunnel":      {declared: machine, asked: in{"tunnel_port": "2222"}, want: in{"tunnel_port": "2222"}},
		"a machine that is the host": {declared: machine, host: "build", want: in{}},
		"a machine of an image":      {declared: machine, image: "debian", want: in{}},
	} {
		e := &extension{Extension: Extension{Info: sandboxer.ExtensionInfo{ID: "ext.x", Inputs: c.declared}}}
		got, err := e.inputs(sandboxer.Profile{Inputs: c.prof}, c.asked, c.host, c.image)
		switch {
		case c.refused != "":
			if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(sandboxer.Message(err)+sandboxer.HintOf(err), c.refused) {
				t.Errorf("%s: %v, %v; want %q", name, got, err, c.refused)
			}
		case err != nil || !maps.Equal(got, c.want):
			t.Errorf("%s: %q, %v; want %q", name, got, err, c.want)
		}
	}
}

// TestAnyInput: inputs that are not declared reach an extension that takes any, from whom they may come.
func TestAnyInput(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.fake.Drop = []sandboxer.Capability{sandboxer.CanAdmit} // as one that knows of nobody
		s.inputs = []sandboxer.Input{{Name: sandboxer.AnyInput, Restricted: true}, {Name: "open"}}
		s.profiles = []sandboxer.Profile{{ID: "profile.test", Extension: "ext.fake", Inputs: map[string]string{"of-profile": "x"}}}
	})
	sb := r.create(sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"open": "y"}})
	if want := (map[string]string{"of-profile": "x", "open": "y"}); !maps.Equal(sb.Spec.Inputs, want) {
		t.Errorf("inputs %q; want %q", sb.Spec.Inputs, want)
	}
	order := sandboxer.CreateRequest{Profile: "test", NoWaiting: true, Inputs: map[string]string{"free": "y", "free-too": "z"}}
	_, err := r.Create(acme, order)
	wantErr(t, err, sandboxer.Denied, `takes "free" only from an administrator`)
	sb, err = r.Create(as(sandboxer.DefaultTenant, sandboxer.ScopeRead, sandboxer.ScopeWrite, sandboxer.ScopeAdmin), order)
	if err != nil || sb.Spec.Inputs["free"] != "y" || !slices.Equal(sb.Spec.Vouched, []string{"free", "free-too", "of-profile"}) {
		t.Errorf("an administrator's: %+v, %v", sb, err)
	}
}

// TestLacks: what an extension has not is said in the words of those who first wrote extensions.
func TestLacks(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.other = fake.NewWorld()
		s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.other", Extension: "ext.other"})
	})
	sb := r.create(sandboxer.CreateRequest{Profile: "other"})
	_, err := r.Pause(acme, sb.ID, PauseRequest{})
	wantErr(t, err, sandboxer.Unsupported, "ext.other does not support pause")
	_, err = r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotNative})
	wantErr(t, err, sandboxer.Unsupported, "ext.other does not support snapshots")
}
