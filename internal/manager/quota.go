package manager

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// SetQuotas bounds what each tenant has from now on. What is too much by then stays; only
// what is new is refused.
func (m *Manager) SetQuotas(q sandboxer.Quotas) {
	m.quotas.Store(&q)
	m.requests.forgetUnbounded(q)
}

// ofSandboxes are the resources that a new sandbox takes.
var ofSandboxes = []sandboxer.Resource{sandboxer.QuotaSandboxes, sandboxer.QuotaDisk, sandboxer.QuotaImages}

// quotaFor is what the store holds tenant to when a change takes some of these resources;
// nil where nothing bounds them.
func (m *Manager) quotaFor(tenant string, rs ...sandboxer.Resource) *sandboxer.TenantQuota {
	q := m.quotas.Load().Of(tenant).Only(rs...)
	if q == nil {
		return nil
	}
	return &sandboxer.TenantQuota{Tenant: tenant, Quota: q}
}

// boundDisk gives sb the disk limit that its backend would take anyway, where a quota
// counts it. What has none cannot be counted, and is refused.
func (m *Manager) boundDisk(o *resolvedRequest, sb *sandboxer.Sandbox) error {
	if _, counted := m.quotas.Load().Of(sb.Tenant)[sandboxer.QuotaDisk]; !counted || sb.Spec.Limits.DiskBytes > 0 {
		return nil
	}
	if b := o.ext.Backend; b != nil {
		sb.Spec.Limits.DiskBytes = b.DefaultLimits(sb.Spec).DiskBytes
	}
	if sb.Spec.Limits.DiskBytes == 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "tenant %s has a quota for disk, and this sandbox of %s would have no disk limit", sb.Tenant, sb.Profile).
			WithHint("ask for one: --disk 4GiB; or have limits.disk set in the profile")
	}
	return nil
}

// checkSnapshotBytes refuses to begin a snapshot of which nothing may be kept. How much it has
// is known, and checked, once it is sealed.
func (m *Manager) checkSnapshotBytes(ctx context.Context, tenant string) error {
	most, bounded := m.quotas.Load().Of(tenant)[sandboxer.QuotaSnapshotBytes]
	if !bounded {
		return nil
	}
	items, _, err := m.store.QuotaUse(ctx, sandboxer.QuotaUseQuery{Tenant: tenant})
	if err == nil && len(items) == 1 && items[0].Used[sandboxer.QuotaSnapshotBytes] >= most {
		err = sandboxer.OverQuota(tenant, sandboxer.QuotaSnapshotBytes, items[0].Used[sandboxer.QuotaSnapshotBytes], most, 0)
	}
	return err
}

// AdmitRequest counts one request of p's. Exhausted, with the time to come back: its tenant has
// made as many in the last minute as its quota allows. Administrators are not counted: they are
// who raises it.
func (m *Manager) AdmitRequest(p sandboxer.Principal) error {
	most, bounded := m.quotas.Load().Of(p.Tenant)[sandboxer.QuotaRequests]
	if !bounded || p.Can(sandboxer.ScopeAdmin) {
		return nil
	}
	return m.requests.take(p.Tenant, most, time.Now())
}

// requests are a bucket for each tenant with such a quota: as many as it allows at once, which
// come back evenly within a minute.
type requests struct {
	mu   sync.Mutex
	full map[string]time.Time // when the bucket is full again
}

// forgetUnbounded drops the buckets of tenants whose requests q does not bound.
func (r *requests) forgetUnbounded(q sandboxer.Quotas) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.full, func(tenant string, _ time.Time) bool {
		_, bounded := q.Of(tenant)[sandboxer.QuotaRequests]
		return !bounded
	})
}

func (r *requests) take(tenant string, most int64, at time.Time) error {
	if most <= 0 {
		return sandboxer.OverQuota(tenant, sandboxer.QuotaRequests, 0, most, 0)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	each := time.Minute / time.Duration(most)
	full := r.full[tenant]
	if full.Before(at) {
		full = at
	}
	if wait := full.Add(each).Sub(at) - time.Minute; wait > 0 {
		e := sandboxer.OverQuota(tenant, sandboxer.QuotaRequests, most, most, 0)
		e.RetryAfter = wait
		return e
	}
	r.full[tenant] = full.Add(each)
	return nil
}

// used is how many a tenant's bucket is short of.
func (r *requests) used(tenant string, most int64, at time.Time) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := r.full[tenant].Sub(at)
	if most <= 0 || left <= 0 {
		return 0
	}
	each := time.Minute / time.Duration(most)
	return min(int64((left+each-1)/each), most)
}

// QuotaStatus is what one tenant has of everything that a quota can bound, and may have.
type QuotaStatus struct {
	Tenant string
	Quota  sandboxer.Quota   // what is left out is not bounded
	Used   sandboxer.Amounts // requests only where they are bounded
}

// QuotaQuery selects tenants.
type QuotaQuery struct {
	Tenant string // empty means the caller's own
	All    bool   // every tenant that has something, or an entry of its own; needs the admin scope
	After  string // cursor
	Limit  int    // at most MaxPage; 0 means DefaultPage
}

// Quotas returns use and bounds of the caller's tenant; for administrators also of another
// one, or a page of all.
func (m *Manager) Quotas(ctx context.Context, q QuotaQuery) (items []QuotaStatus, next string, err error) {
	p, err := may(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, "", err
	}
	if err := checkPage(q.Limit); err != nil {
		return nil, "", err
	}
	uq := sandboxer.QuotaUseQuery{Tenant: q.Tenant, After: q.After, Limit: q.Limit}
	switch {
	case q.All && !p.Can(sandboxer.ScopeAdmin), q.Tenant != "" && q.Tenant != p.Tenant && !p.Can(sandboxer.ScopeAdmin):
		return nil, "", sandboxer.E(sandboxer.Denied, nil, "the quota of another tenant is not yours to see")
	case q.All && q.Tenant != "":
		return nil, "", sandboxer.E(sandboxer.Invalid, nil, "one tenant is asked for, and all").WithHint("ask for one of both")
	case !q.All && q.Tenant == "":
		uq.Tenant = p.Tenant
	}
	if !q.All {
		uq.After = ""
	}
	uses, next, err := m.store.QuotaUse(ctx, uq)
	if err != nil {
		return nil, "", err
	}
	quotas := m.quotas.Load()
	if q.All { // those that have nothing yet
		for tenant := range quotas.Tenants {
			has := slices.ContainsFunc(uses, func(u sandboxer.QuotaUse) bool { return u.Tenant == tenant })
			if !has && tenant > q.After && (next == "" || tenant < next) {
				uses = append(uses, sandboxer.QuotaUse{Tenant: tenant, Used: sandboxer.Amounts{}})
			}
		}
		slices.SortFunc(uses, func(a, b sandboxer.QuotaUse) int { return strings.Compare(a.Tenant, b.Tenant) })
	}
	at := time.Now()
	for _, u := range uses {
		s := QuotaStatus{Tenant: u.Tenant, Quota: quotas.Of(u.Tenant), Used: u.Used}
		s.Used[sandboxer.QuotaExecs] = int64(m.execs.of(u.Tenant))
		if most, bounded := s.Quota[sandboxer.QuotaRequests]; bounded {
			s.Used[sandboxer.QuotaRequests] = m.requests.used(u.Tenant, most, at)
		}
		items = append(items, s)
	}
	return items, next, nil
}
