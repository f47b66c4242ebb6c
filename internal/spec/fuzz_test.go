package spec

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

// FuzzDestination wants no private address counted as public.
func FuzzDestination(f *testing.F) {
	for _, s := range []string{"example.org", "*.example.org:443", "10.0.0.1", "::1", "[::1]:80", "::ffff:127.0.0.1", "169.254.169.254:80", "8.8.8.0/24", "0.0.0.0/0", "fd00::/8", "100.64.0.1", "localhost:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := netip.ParseAddr(s)
		p := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{s}}
		if err == nil && CheckNetwork(sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}, &p) == nil && (a.Unmap().IsPrivate() || a.Unmap().IsLoopback() || a.Unmap().IsLinkLocalUnicast()) {
			t.Errorf("%q counts as public", s)
		}
	})
}
