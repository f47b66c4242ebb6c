package manager

import (
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// FuzzCheckURL wants no address with a password through, and no password repeated.
func FuzzCheckURL(f *testing.F) {
	for _, s := range []string{"", ".", "https://example.org/a.git", "https://tok@example.org/a", "ssh://git@example.org/a", "git@example.org:a/b",
		"ssh://git:pw@example.org/a", "https://:pw@example.org", "http://%zz@x", "//u:pw@host/", "ssh://u:p%40w@h", "https://u:p\x7fw@h/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		err := checkURL("repo", s)
		u, perr := url.Parse(s)
		secret := ""
		if perr == nil && u.User != nil && u.Host != "" {
			secret, _ = u.User.Password()
			if secret == "" && (u.Scheme == "http" || u.Scheme == "https") {
				secret = u.User.Username()
			}
		}
		switch {
		case secret != "" && err == nil:
			t.Errorf("%q contains %q and was let through", s, secret)
		case err == nil:
		case sandboxer.KindOf(err) != sandboxer.Invalid:
			t.Errorf("%q: %v", s, err)
		case len(secret) > 8 && strings.Contains(err.Error()+sandboxer.HintOf(err), secret):
			t.Errorf("%v repeats %q", err, secret)
		}
	})
}

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
		if (err == nil) != (s == right) || err != nil && (err != errNotLoggedIn || p.Tenant != "") {
			t.Errorf("%q: %+v, %v", s, p, err)
		}
	})
}

// FuzzDestination wants no private address counted as public.
func FuzzDestination(f *testing.F) {
	for _, s := range []string{"example.org", "*.example.org:443", "10.0.0.1", "::1", "[::1]:80", "::ffff:127.0.0.1", "169.254.169.254:80", "8.8.8.0/24", "0.0.0.0/0", "fd00::/8", "100.64.0.1", "localhost:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := netip.ParseAddr(s)
		p := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{s}}
		if err == nil && checkNetwork(public, &p) == nil && (a.Unmap().IsPrivate() || a.Unmap().IsLoopback() || a.Unmap().IsLinkLocalUnicast()) {
			t.Errorf("%q counts as public", s)
		}
	})
}
