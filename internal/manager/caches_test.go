package manager

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// cacher is an extension that keeps things.
type cacher struct {
	*fake.Extension
	kept   *[]sandboxer.Cache
	silent error
}

func (c cacher) Caches(_ context.Context, host string) (out []sandboxer.Cache, _ error) {
	for _, k := range *c.kept {
		if host == "" || k.Host == host {
			out = append(out, k)
		}
	}
	return out, c.silent
}

func (c cacher) PruneCaches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	gone, err := c.Caches(ctx, host)
	*c.kept = slices.DeleteFunc(*c.kept, func(k sandboxer.Cache) bool { return slices.Contains(gone, k) })
	return gone, err
}

// Administrators see what extensions keep, also if a part cannot be asked, and
// audit names what should be gone.
func TestCaches(t *testing.T) {
	kept := []sandboxer.Cache{{Host: "a", Name: "shop/web", Bytes: 7}, {Host: "b", Name: "shop/db", Problem: "it should be gone"}}
	silent := sandboxer.E(sandboxer.Unavailable, nil, "host c does not answer")
	r := newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return cacher{e, &kept, silent} }
	})
	if _, err := r.Caches(acme, ""); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("a tenant gets %v", err)
	}
	if _, err := r.PruneCaches(acme, ""); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("a tenant may prune: %v", err)
	}
	got, err := r.Caches(admin, "")
	if len(got) != 2 || got[0].Extension != "ext.fake" || got[0].Cache != kept[0] || err == nil || !strings.Contains(err.Error(), "host c does not answer") {
		t.Errorf("Caches = %+v, %v", got, err)
	}
	a, err := r.Audit(admin)
	if err != nil || len(a.Violations) != 1 || a.Violations[0].Invariant != invCache || !strings.Contains(a.Violations[0].Detail, "shop/db on host b: it should be gone") {
		t.Errorf("%+v, %v", a, err)
	}
	if got, _ := r.PruneCaches(admin, "b"); len(got) != 1 || got[0].Name != "shop/db" || len(kept) != 1 {
		t.Errorf("PruneCaches = %+v; left are %+v", got, kept)
	}
	if a, err := r.Audit(admin); err != nil || len(a.Violations) != 0 {
		t.Errorf("%+v, %v", a, err)
	}
}
