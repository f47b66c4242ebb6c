package manager

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
)

// FuzzAuthenticate wants every token but the right one refused alike.
func FuzzAuthenticate(f *testing.F) {
	r := newRig(f, func(s *setup) { quiet(s); s.idle = true })
	token, key, err := r.CreateKey(admin, NewKey{Name: "x", Scopes: sandboxer.Scopes()})
	if err != nil {
		f.Fatal(err)
	}
	right := token.Reveal()
	for _, s := range []string{"", right, right[:len(right)-1], "sbx_key_" + key.ID + "_", "sbx_key___", strings.Repeat("_", 100), "sbx_key_\x00_x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := r.Authenticate(t.Context(), sandboxer.Secret(s))
		if (err == nil) != (s == right) || err != nil && (err != access.ErrNotLoggedIn || p.Tenant != "") {
			t.Errorf("%q: %+v, %v", s, p, err)
		}
	})
}
