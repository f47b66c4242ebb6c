package manager

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
)

// A Cache is data that an extension keeps between sandboxes.
type Cache struct {
	Extension string
	sandboxer.Cache
}

// Caches lists the caches of extensions, on one host or, with "", on all. If some did not answer, it returns an error together
// with the caches that were found. It needs the admin scope.
func (m *Manager) Caches(ctx context.Context, host string) ([]Cache, error) {
	return m.caches(ctx, host, func(e *extension) ([]sandboxer.Cache, error) { return e.Backend.Caches(ctx, host) })
}

// PruneCaches removes the caches that Caches lists, and returns those that were removed.
func (m *Manager) PruneCaches(ctx context.Context, host string) ([]Cache, error) {
	return m.caches(ctx, host, func(e *extension) ([]sandboxer.Cache, error) { return e.Backend.PruneCaches(ctx, host) })
}

func (m *Manager) caches(ctx context.Context, host string, of func(*extension) ([]sandboxer.Cache, error)) ([]Cache, error) {
	if _, err := access.May(ctx, sandboxer.ScopeAdmin); err != nil {
		return nil, err
	}
	out := []Cache{}
	var failed []error
	for _, e := range m.extensions() {
		if e.Backend == nil {
			continue
		}
		caches, err := of(e)
		if err != nil {
			failed = append(failed, err)
		}
		for _, c := range caches {
			out = append(out, Cache{e.Info.ID, c})
		}
	}
	slices.SortStableFunc(out, func(a, b Cache) int { return strings.Compare(a.Extension, b.Extension) })
	return out, errors.Join(failed...)
}

// auditCaches names caches that should not exist. auditObjects reports a host that cannot be
// asked.
func (a *auditing) auditCaches(ctx context.Context) error {
	all, _ := a.m.Caches(ctx, "")
	for _, c := range all {
		if c.Problem != "" {
			a.violated(invCache, "", "%s keeps %s on host %s: %s", c.Extension, c.Name, c.Host, c.Problem)
		}
	}
	return ctx.Err()
}
