package sandboxer

import (
	"strconv"
	"time"
)

// Resource is something of which a quota bounds how much a tenant has.
type Resource string

// The resources. What of them a tenant uses is counted from the records; execs and
// requests, which end with the broker, in memory.
const (
	// Sandboxes that are not terminated: paused ones too, and those whose teardown is
	// still to be done; not those that wait in a pool.
	QuotaSandboxes Resource = "sandboxes"
	// QuotaDisk is the sum of their disk limits, in bytes.
	QuotaDisk Resource = "disk"
	// QuotaImages are the different images that they were asked for with, besides those of
	// their profiles.
	QuotaImages Resource = "images"
	// QuotaSnapshots are those that are not dropped, also those that the broker makes for
	// pauses and forks.
	QuotaSnapshots Resource = "snapshots"
	// QuotaSnapshotBytes is the size of their content ([SnapshotRecord.Bytes]).
	QuotaSnapshotBytes Resource = "snapshot_bytes"
	// QuotaExecs are commands at once.
	QuotaExecs Resource = "execs"
	// QuotaRequests are requests to the API a minute.
	QuotaRequests Resource = "requests"
)

// Resources lists every resource.
func Resources() []Resource {
	return []Resource{QuotaSandboxes, QuotaDisk, QuotaImages, QuotaSnapshots, QuotaSnapshotBytes, QuotaExecs, QuotaRequests}
}

// InBytes reports whether r is measured in bytes.
func (r Resource) InBytes() bool { return r == QuotaDisk || r == QuotaSnapshotBytes }

// Format writes an amount of r for people.
func (r Resource) Format(n int64) string {
	if !r.InBytes() {
		return strconv.FormatInt(n, 10)
	}
	units := []string{" bytes", "KiB", "MiB", "GiB", "TiB", "PiB"}
	i := 0
	for i < len(units)-1 && n >= 1<<(10*(i+1)) {
		i++
	}
	digits := 1
	if n%(1<<(10*i)) == 0 {
		digits = 0
	}
	return strconv.FormatFloat(float64(n)/float64(int64(1)<<(10*i)), 'f', digits, 64) + units[i]
}

// A Quota bounds what one tenant has, by resource. What it leaves out is not bounded; 0
// is none at all.
type Quota map[Resource]int64

// Only returns those bounds of q that are about one of rs; nil if there are none.
func (q Quota) Only(rs ...Resource) Quota {
	var out Quota
	for _, r := range rs {
		if most, ok := q[r]; ok {
			if out == nil {
				out = Quota{}
			}
			out[r] = most
		}
	}
	return out
}

// Amounts are how much there is of each resource.
type Amounts map[Resource]int64

// Quotas are those of all tenants: an entry of a tenant's own, or else Default.
type Quotas struct {
	Default Quota
	Tenants map[string]Quota
}

// Of returns the quota of a tenant.
func (q Quotas) Of(tenant string) Quota {
	if own, ok := q.Tenants[tenant]; ok {
		return own
	}
	return q.Default
}

// OverQuota is the error for a tenant that would have too much of r: it has used of most, and
// asks for more. RetryAfter may be set where time helps.
func OverQuota(tenant string, r Resource, used, most, more int64) *Error {
	have := r.Format(used) + " of " + r.Format(most)
	if r == QuotaRequests {
		have += " a minute"
	}
	if more > 0 {
		have += ", and this takes " + r.Format(more) + " more"
	}
	e := E(Exhausted, nil, "the quota of tenant %s for %s is used: %s", tenant, r, have)
	switch r {
	case QuotaRequests:
		return e.WithHint("ask less often, or ask an administrator for more; see: sandboxer quota")
	case QuotaExecs:
		e.RetryAfter = time.Second
		return e.WithHint("try again when a command has ended, or ask an administrator for more; see: sandboxer quota")
	case QuotaSnapshots, QuotaSnapshotBytes:
		return e.WithHint("drop some (sandboxer snapshot rm), or ask an administrator for more; see: sandboxer quota")
	}
	return e.WithHint("destroy some (sandboxer destroy), or ask an administrator for more; see: sandboxer quota")
}

// Check compares what a tenant has with what it had before a change. Exhausted: the
// change makes something larger that is larger than q then.
func (q Quota) Check(tenant string, before, after Amounts) error {
	for _, r := range Resources() {
		if most, ok := q[r]; ok && after[r] > most && after[r] > before[r] {
			return OverQuota(tenant, r, before[r], most, after[r]-before[r])
		}
	}
	return nil
}

// A TenantQuota bounds what one tenant has of what records tell.
type TenantQuota struct {
	Tenant string
	Quota  Quota
}

// QuotaUse is what one tenant has.
type QuotaUse struct {
	Tenant string
	Used   Amounts
}

// QuotaUseQuery selects tenants.
type QuotaUseQuery struct {
	Tenant string // only this one, whether it has anything or not; empty means all that have something
	After  string // a tenant: those behind it
	Limit  int    // at most MaxPage; 0 means DefaultPage
}
