package spec

import (
	"maps"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/vmpacker"
)

// TestInputs: what a request has to keep of the declarations of an extension, and what it gets.
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
		v := &View{Profile: sandboxer.Profile{Extension: "ext.x", Inputs: c.prof}, Inputs: c.declared}
		got, _, err := v.inputs(c.asked, c.host, c.image)
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
