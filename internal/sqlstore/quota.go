package sqlstore

import (
	"context"
	"database/sql"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// The sums say how much of a resource the rows of live records use; an unreadable value of
// a damaged record counts as nothing.
var (
	sandboxSums = map[sandboxer.Resource]string{
		sandboxer.QuotaSandboxes: `count(*)`,
		sandboxer.QuotaDisk:      `coalesce(sum(CASE WHEN json_valid(data) THEN CAST(data ->> '$.spec.limits.disk_bytes' AS INTEGER) END), 0)`,
		sandboxer.QuotaImages: `count(DISTINCT CASE WHEN json_valid(data) AND data ->> '$.spec.image' <> coalesce(data ->> '$.spec.profile.image', '')
THEN data ->> '$.spec.image' END)`,
	}
	snapshotSums = map[sandboxer.Resource]string{
		sandboxer.QuotaSnapshots:     `count(*)`,
		sandboxer.QuotaSnapshotBytes: `coalesce(sum(CASE WHEN json_valid(data) THEN CAST(coalesce(data ->> '$.native.bytes', 0) AS INTEGER) + CAST(coalesce(data ->> '$.portable.size', 0) AS INTEGER) END), 0)`,
	}
)

// tenantSpend is what was charged to a tenant in a period, and what is on hold now.
const tenantSpend = `SELECT coalesce((SELECT sum(amount) FROM open_holds WHERE tenant = ?), 0) +
coalesce((SELECT sum(amount) FROM spent WHERE tenant = ? AND day >= ? AND day < ?), 0)`

// keySpend is the same of an API key.
const keySpend = `SELECT coalesce((SELECT sum(amount) FROM open_holds WHERE key_id = ? AND key_id <> ''), 0) +
coalesce((SELECT sum(amount) FROM spent WHERE key_id = ? AND key_id <> '' AND day >= ? AND day < ?), 0)`

// quotaUseQuery returns the query for one tenant's use of one resource. The expression over
// tenant keeps the planner from the index of all that a tenant ever had.
func quotaUseQuery(r sandboxer.Resource) string {
	if sum, ok := sandboxSums[r]; ok {
		return `SELECT ` + sum + ` FROM sandboxes WHERE tenant || '' = ? AND state <> 'terminated'`
	}
	if sum, ok := snapshotSums[r]; ok {
		return `SELECT ` + sum + ` FROM snapshots WHERE tenant || '' = ? AND state <> 'dropped'`
	}
	return ""
}

// quotaUse returns how much q's tenant uses of each resource that q bounds.
func (t *tx) quotaUse(q *sandboxer.TenantQuota) (sandboxer.Amounts, error) {
	if q == nil {
		return nil, nil
	}
	out := sandboxer.Amounts{}
	for r := range q.Quota {
		query, args := quotaUseQuery(r), []any{q.Tenant}
		if from, until, spends := r.Period(q.At); spends {
			query, args = tenantSpend, []any{q.Tenant, q.Tenant, dayOf(from), dayOf(until)}
		}
		if query == "" {
			continue
		}
		var n int64
		if _, err := t.row(query, args, &n); err != nil {
			return nil, err
		}
		out[r] = n
	}
	return out, nil
}

// QuotaUse returns what tenants have; see sandboxer.Store.
func (s *Store) QuotaUse(ctx context.Context, q sandboxer.QuotaUseQuery) (items []sandboxer.QuotaUse, next string, err error) {
	limit := pageSize(q.Limit)
	all := map[string]sandboxer.Amounts{}
	if q.Tenant != "" {
		all[q.Tenant] = sandboxer.Amounts{}
	}
	type source struct {
		table, counts string
		args          []any
		sums          map[sandboxer.Resource]string
	}
	sources := []source{{"sandboxes", "state <> 'terminated'", nil, sandboxSums}, {"snapshots", "state <> 'dropped'", nil, snapshotSums}}
	for _, r := range sandboxer.Resources() {
		if from, until, spends := r.Period(q.At); spends {
			sum := map[sandboxer.Resource]string{r: "sum(amount)"}
			sources = append(sources, source{"open_holds", "amount <> 0", nil, sum},
				source{"spent", "day >= ? AND day < ?", []any{dayOf(from), dayOf(until)}, sum})
		}
	}
	for _, of := range sources {
		var f filter
		f.add(of.counts, of.args...)
		f.add("tenant <> ''") // a pooled sandbox has no tenant
		if q.Tenant != "" {
			f.add("tenant || '' = ?", q.Tenant)
		}
		if q.After != "" {
			f.add("tenant || '' > ?", q.After)
		}
		var rs []sandboxer.Resource
		columns := []string{"tenant"}
		for _, r := range sandboxer.Resources() {
			if sum, ok := of.sums[r]; ok {
				rs, columns = append(rs, r), append(columns, sum)
			}
		}
		query := `SELECT ` + strings.Join(columns, ", ") + ` FROM ` + of.table + f.String() + ` GROUP BY tenant ORDER BY tenant LIMIT ?`
		err := s.rows(ctx, query, append(f.args, limit+1), func(rows *sql.Rows) error {
			var tenant string
			ns := make([]int64, len(rs))
			dest := []any{&tenant}
			for i := range ns {
				dest = append(dest, &ns[i])
			}
			if err := rows.Scan(dest...); err != nil {
				return err
			}
			u := all[tenant]
			if u == nil {
				u = sandboxer.Amounts{}
				all[tenant] = u
			}
			for i, r := range rs {
				u[r] += ns[i]
			}
			return nil
		})
		if err != nil {
			return nil, "", err
		}
	}
	for tenant, u := range all {
		for _, of := range sources {
			for r := range of.sums {
				u[r] += 0
			}
		}
		items = append(items, sandboxer.QuotaUse{Tenant: tenant, Used: u})
	}
	slices.SortFunc(items, func(a, b sandboxer.QuotaUse) int { return strings.Compare(a.Tenant, b.Tenant) })
	if len(items) > limit {
		items = items[:limit]
		next = items[limit-1].Tenant
	}
	return items, next, nil
}
