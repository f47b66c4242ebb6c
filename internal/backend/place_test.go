package backend_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

type placer struct {
	plain
	host string
	err  error
	told sandboxer.Spec
}

func (p *placer) Place(_ context.Context, s sandboxer.Spec, _ []string) (string, error) {
	p.told = s
	return p.host, p.err
}

func (p *placer) Provision(_ context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	p.told = s
	return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation, Host: p.host}, nil
}

// A place is a name that can be kept, and none that failed; nothing is made nowhere, or
// elsewhere than it was placed.
func TestPlace(t *testing.T) {
	p := &placer{host: "one"}
	b := backend.New("ext.test", p, backend.Options{})
	s := sandboxer.Spec{ID: "x", Generation: 1, Owner: "test", Place: "left over"}
	if host, err := b.Place(t.Context(), s, []string{"two"}); host != "one" || err != nil || p.told.Place != "" || !b.Places() {
		t.Errorf("Place = %q, %v", host, err)
	}
	for _, bad := range []string{"", "two", "a b", "a\n", "\x00", strings.Repeat("x", sandboxer.MaxPlaceBytes+1)} {
		p.host = bad
		if host, err := b.Place(t.Context(), s, []string{"two"}); host != "" || sandboxer.KindOf(err) != sandboxer.Internal {
			t.Errorf("Place said %.20q: %q, %v", bad, host, err)
		}
	}
	p.err = sandboxer.E(sandboxer.Exhausted, nil, "full")
	if _, err := b.Place(t.Context(), s, nil); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("Place without room: %v", err)
	}
	p.host = "one"
	for place, want := range map[string]sandboxer.Kind{"": sandboxer.Internal, "one": "", "two": sandboxer.Internal} {
		s.Place = place
		if _, err := b.Provision(t.Context(), s); sandboxer.KindOf(err) != want {
			t.Errorf("Provision on %q: %v", place, err)
		}
	}
	if host, err := backend.New("ext.test", &plain{}, backend.Options{}).Place(t.Context(), s, nil); host != "" || err != nil {
		t.Errorf("Place of what places nothing = %q, %v", host, err)
	}
}

// What was not touched is said through whatever an error is wrapped in, and keeps its kind.
func TestUntouched(t *testing.T) {
	away := sandboxer.E(sandboxer.Unavailable, nil, "away").WithHint("wait").WithPublic("it is away")
	for name, err := range map[string]error{"own": away, "joined": errors.Join(away), "foreign": context.Canceled} {
		if sandboxer.IsUntouched(err) {
			t.Errorf("%s: untouched from the start", name)
		}
		u := sandboxer.Untouched(err)
		for what, err := range map[string]error{"itself": u, "wrapped": sandboxer.E(sandboxer.Unavailable, u, "x"), "discreet": sandboxer.Discreet(u)} {
			if !sandboxer.IsUntouched(err) {
				t.Errorf("%s, %s: it is not", name, what)
			}
		}
		if sandboxer.KindOf(u) != sandboxer.KindOf(err) || sandboxer.HintOf(u) != sandboxer.HintOf(err) {
			t.Errorf("%s: %v became %v", name, err, u)
		}
	}
	if sandboxer.IsUntouched(away) {
		t.Error("the original was changed")
	}
}
