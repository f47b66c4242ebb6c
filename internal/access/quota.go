package access

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Bounds are the limits of tenants, keys and sandboxes: quotas, simultaneous operations, and the rate of API requests. They are
// safe for concurrent use.
type Bounds struct {
	Execs   *Limiter // commands at once
	Streams *Limiter // other uses at once

	store    sandboxer.Store
	quotas   atomic.Pointer[sandboxer.Quotas]
	requests requests // to the API, of tenants with a bound
}

// NewBounds returns bounds with these quotas.
func NewBounds(store sandboxer.Store, q sandboxer.Quotas, execs, streams AtOnce) *Bounds {
	b := &Bounds{Execs: NewLimiter("commands", execs), Streams: NewLimiter("streams", streams), store: store}
	b.Execs.quota = func(tenant string) (int64, bool) { return b.Quota(tenant, sandboxer.QuotaExecs) }
	b.requests.full = map[string]time.Time{}
	b.SetQuotas(q)
	return b
}

// Quota is the quota of a tenant for a resource, if there is one.
func (b *Bounds) Quota(tenant string, r sandboxer.Resource) (most int64, bounded bool) {
	most, bounded = b.quotas.Load().Of(tenant)[r]
	return most, bounded
}

// SetQuotas sets the quotas from now on. Existing use above a quota stays; only new use is refused.
func (b *Bounds) SetQuotas(q sandboxer.Quotas) {
	b.quotas.Store(&q)
	b.requests.forgetUnbounded(q)
}

// QuotaFor is the quota that the store checks when a change of tenant uses some of these resources; nil if there is none.
func (b *Bounds) QuotaFor(tenant string, rs ...sandboxer.Resource) *sandboxer.TenantQuota {
	q := b.quotas.Load().Of(tenant).Only(rs...)
	if q == nil {
		return nil
	}
	return &sandboxer.TenantQuota{Tenant: tenant, Quota: q, At: now()}
}

// CheckSnapshotBytes refuses to begin a snapshot if the quota is used up. The size of the snapshot is known, and checked, when
// it is sealed.
func (b *Bounds) CheckSnapshotBytes(ctx context.Context, tenant string) error {
	most, bounded := b.quotas.Load().Of(tenant)[sandboxer.QuotaSnapshotBytes]
	if !bounded {
		return nil
	}
	items, _, err := b.store.QuotaUse(ctx, sandboxer.QuotaUseQuery{Tenant: tenant})
	if err == nil && len(items) == 1 && items[0].Used[sandboxer.QuotaSnapshotBytes] >= most {
		err = sandboxer.OverQuota(tenant, sandboxer.QuotaSnapshotBytes, items[0].Used[sandboxer.QuotaSnapshotBytes], most, 0)
	}
	return err
}

// AdmitRequest counts one request of p. Exhausted, with the time to retry: its tenant made as many requests within a minute as
// its quota allows. Requests of administrators do not count, so that they can always raise the quota.
func (b *Bounds) AdmitRequest(p sandboxer.Principal) error {
	most, bounded := b.quotas.Load().Of(p.Tenant)[sandboxer.QuotaRequests]
	if !bounded || p.Can(sandboxer.ScopeAdmin) {
		return nil
	}
	return b.requests.take(p.Tenant, most, time.Now())
}

// requests are token buckets, one for each tenant with such a quota. A full bucket allows as many requests at once as the
// quota; it refills evenly within a minute.
type requests struct {
	mu   sync.Mutex
	full map[string]time.Time // when the bucket is full again
}

// Metered is the number of tenants whose requests are counted.
func (b *Bounds) Metered() int {
	b.requests.mu.Lock()
	defer b.requests.mu.Unlock()
	return len(b.requests.full)
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

// used is the number of requests that are missing in the bucket of a tenant.
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

// QuotaStatus is one tenant's use and bound of every resource that a quota can bound.
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
func (b *Bounds) Quotas(ctx context.Context, q QuotaQuery) (items []QuotaStatus, next string, err error) {
	p, err := May(ctx, sandboxer.ScopeRead)
	if err != nil {
		return nil, "", err
	}
	if err := CheckPage(q.Limit); err != nil {
		return nil, "", err
	}
	uq := sandboxer.QuotaUseQuery{Tenant: q.Tenant, After: q.After, Limit: q.Limit, At: now()}
	switch {
	case q.All && !p.Can(sandboxer.ScopeAdmin), q.Tenant != "" && q.Tenant != p.Tenant && !p.Can(sandboxer.ScopeAdmin):
		return nil, "", sandboxer.E(sandboxer.Denied, nil, "you cannot see the quota of another tenant").
			WithHint("leave out the tenant to see your own; an administrator sees all")
	case q.All && q.Tenant != "":
		return nil, "", sandboxer.E(sandboxer.Invalid, nil, "the request names a tenant, and asks for all tenants").WithHint("leave out one of them")
	case !q.All && q.Tenant == "":
		uq.Tenant = p.Tenant
	}
	if !q.All {
		uq.After = ""
	}
	uses, next, err := b.store.QuotaUse(ctx, uq)
	if err != nil {
		return nil, "", err
	}
	quotas := b.quotas.Load()
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
		s.Used[sandboxer.QuotaExecs] = int64(b.Execs.Of(u.Tenant))
		if most, bounded := s.Quota[sandboxer.QuotaRequests]; bounded {
			s.Used[sandboxer.QuotaRequests] = b.requests.used(u.Tenant, most, at)
		}
		items = append(items, s)
	}
	return items, next, nil
}
