package sandboxer

import (
	"strconv"
	"strings"
	"time"
)

// Resource is something that a quota bounds.
type Resource string

// The resources. A tenant's use of them is counted from the records. Execs and requests, which end with
// the broker, are counted in memory.
const (
	// QuotaSandboxes counts sandboxes that are not terminated: also paused ones, and those whose
	// teardown is not done; not those that wait in a pool.
	QuotaSandboxes Resource = "sandboxes"
	// QuotaDisk is the sum of their disk limits, in bytes.
	QuotaDisk Resource = "disk"
	// QuotaImages counts the different images that their requests named, apart from those of their
	// profiles.
	QuotaImages Resource = "images"
	// QuotaSnapshots counts snapshots that are not dropped, including those that the broker makes for
	// pauses and forks.
	QuotaSnapshots Resource = "snapshots"
	// QuotaSnapshotBytes is the size of their content in bytes ([SnapshotRecord.Bytes]).
	QuotaSnapshotBytes Resource = "snapshot_bytes"
	// QuotaExecs counts commands that run at the same time.
	QuotaExecs Resource = "execs"
	// QuotaRequests counts requests to the API within a minute.
	QuotaRequests Resource = "requests"
	// QuotaSpendMonth is what was charged in this calendar month in UTC, and what is on hold now, in
	// millionths of a credit.
	QuotaSpendMonth Resource = "spend_month"
	// QuotaSpendDay is the same of this day in UTC.
	QuotaSpendDay Resource = "spend_day"
)

// Resources lists every resource. A month's spending is before a day's: where both are used, the end of the day
// does not help.
func Resources() []Resource {
	return []Resource{QuotaSandboxes, QuotaDisk, QuotaImages, QuotaSnapshots, QuotaSnapshotBytes, QuotaExecs, QuotaRequests, QuotaSpendMonth, QuotaSpendDay}
}

// Period returns the period that contains the time at and in which r is counted, a day or a month in UTC: from
// its first moment until the first of the next one. ok is false where r is not counted by days.
func (r Resource) Period(at time.Time) (from, until time.Time, ok bool) {
	y, m, d := at.UTC().Date()
	switch r {
	case QuotaSpendDay:
		return time.Date(y, m, d, 0, 0, 0, 0, time.UTC), time.Date(y, m, d+1, 0, 0, 0, 0, time.UTC), true
	case QuotaSpendMonth:
		return time.Date(y, m, 1, 0, 0, 0, 0, time.UTC), time.Date(y, m+1, 1, 0, 0, 0, 0, time.UTC), true
	}
	return time.Time{}, time.Time{}, false
}

// InBytes reports whether r is measured in bytes.
func (r Resource) InBytes() bool { return r == QuotaDisk || r == QuotaSnapshotBytes }

// Format writes an amount of r for display.
func (r Resource) Format(n int64) string {
	if r == QuotaSpendDay || r == QuotaSpendMonth {
		return Credits(n).String()
	}
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

// A Quota bounds a tenant's use by resource. A resource that is missing is not bounded; 0 permits none.
type Quota map[Resource]int64

// Only returns the bounds of q for the resources rs; nil if there are none.
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

// Amounts is an amount of each resource.
type Amounts map[Resource]int64

// Quotas holds the quotas of all tenants: a tenant's own entry, otherwise Default.
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

// OverQuota returns the Exhausted error for a tenant whose use of r would exceed its quota: it uses
// used of most and asks for more. RetryAfter is set if waiting may help.
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
		return e.WithHint("send fewer requests, or ask an administrator for more; see: sandboxer quota")
	case QuotaExecs:
		e.RetryAfter = time.Second
		return e.WithHint("try again when a command has ended, or ask an administrator for more; see: sandboxer quota")
	case QuotaSnapshots, QuotaSnapshotBytes:
		return e.WithHint("drop some (sandboxer snapshot rm ID), or ask an administrator for more; see: sandboxer quota")
	}
	return e.WithHint("destroy some (sandboxer destroy ID), or ask an administrator for more; see: sandboxer quota")
}

// overSpend is OverQuota for what a tenant or a key may spend: NoCredit.
func overSpend(who string, r Resource, at time.Time, used, most, more int64) *Error {
	_, until, _ := r.Period(at)
	return E(NoCredit, nil, "%s may spend %s credits in a %s (UTC): %s are charged or on hold, and this holds %s more",
		who, r.Format(most), strings.TrimPrefix(string(r), "spend_"), r.Format(used), r.Format(more)).
		WithHint("ask for a shorter time to live, wait until %s, when what was charged no longer counts, or ask an administrator for more; see: sandboxer quota", until.Format(time.RFC3339))
}

// Check compares use before and after a change. It returns Exhausted if the change increases
// the use of a resource beyond the quota; NoCredit if that is of spending.
func (q TenantQuota) Check(before, after Amounts) error {
	for _, r := range Resources() {
		most, ok := q.Quota[r]
		if !ok || after[r] <= most || after[r] <= before[r] {
			continue
		}
		if _, _, spends := r.Period(q.At); spends {
			who := "tenant " + q.Tenant
			if q.Key != "" {
				who = "API key " + q.Key
			}
			return overSpend(who, r, q.At, before[r], most, after[r]-before[r])
		}
		return OverQuota(q.Tenant, r, before[r], most, after[r]-before[r])
	}
	return nil
}

// A TenantQuota bounds one tenant's use of the resources that are counted from records.
type TenantQuota struct {
	Tenant string
	Quota  Quota
	Key    string    // name of the API key, if it is what that spends
	At     time.Time // whose day and month count
}

// MaxSpend bounds the credits that are charged in a day or a month, both in UTC, and on hold now. 0 means no bound.
type MaxSpend struct {
	Month CreditsText `json:"month,omitzero" example:"50.00" doc:"In a calendar month in UTC"`
	Day   CreditsText `json:"day,omitzero" example:"5.00" doc:"In a day in UTC"`
}

// Quota is the same as a quota.
func (m MaxSpend) Quota() Quota {
	q := Quota{}
	for r, most := range map[Resource]CreditsText{QuotaSpendMonth: m.Month, QuotaSpendDay: m.Day} {
		if most != 0 {
			q[r] = int64(most)
		}
	}
	return q
}

// QuotaUse is one tenant's use of resources.
type QuotaUse struct {
	Tenant string
	Used   Amounts
}

// QuotaUseQuery selects tenants.
type QuotaUseQuery struct {
	Tenant string    // only this tenant, even if it uses nothing; empty means all that use something
	After  string    // name of a tenant; the page begins after it
	Limit  int       // at most MaxPage; 0 means DefaultPage
	At     time.Time // whose day and month count
}
