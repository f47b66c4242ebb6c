package sqlstore

import (
	"context"
	"database/sql"
	"math"
	"time"

	sqlite3 "modernc.org/sqlite/lib"

	"github.com/sand-boxer/sandboxer"
)

const (
	insertEntry = `INSERT INTO entries (key, tenant, sandbox_id, shown_id, generation, type, amount, note, at, key_id)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`

	entryByKey = `SELECT tenant, sandbox_id, generation, type, amount FROM entries WHERE key = ?`

	addToBalance = `INSERT INTO balances (tenant, balance) VALUES (?, ?)
ON CONFLICT (tenant) DO UPDATE SET balance = balances.balance + excluded.balance`

	addToHold = `INSERT INTO open_holds (tenant, sandbox_id, generation, amount, key_id) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (tenant, sandbox_id, generation) DO UPDATE SET amount = open_holds.amount + excluded.amount,
key_id = CASE excluded.key_id WHEN '' THEN open_holds.key_id ELSE excluded.key_id END RETURNING amount, key_id`

	removeHold = `DELETE FROM open_holds WHERE tenant = ? AND sandbox_id = ? AND generation = ?`

	addToSpent = `INSERT INTO spent (tenant, day, key_id, amount) VALUES (?, ?, ?, ?)
ON CONFLICT (tenant, day, key_id) DO UPDATE SET amount = spent.amount + excluded.amount`

	tenantBalance = `SELECT balance FROM balances WHERE tenant = ?`
)

// putEntries adds the entries whose key is new. A key that was used for the same booking
// is skipped; for another booking it is a Conflict. With cover it fails with NoCredit if that
// leaves one of their tenants in debt, or if an API key spends more than it may.
func (t *tx) putEntries(entries []sandboxer.Entry, cover bool) error {
	var holds []sandboxer.Entry // what keys spend more
	for _, e := range entries {
		if e.Key == "" || e.Tenant == "" {
			return sandboxer.E(sandboxer.Invalid, nil, "a ledger entry needs a key and a tenant (have %q, %q)", e.Key, e.Tenant)
		}
		if e.Amount == math.MinInt64 { // has no opposite
			return sandboxer.E(sandboxer.Invalid, nil, "the amount %d of entry %q is too large for the ledger", int64(e.Amount), e.Key)
		}
		n, err := t.exec(insertEntry, e.Key, e.Tenant, e.SandboxID, e.ShownID, e.Generation, string(e.Type), int64(e.Amount), e.Note, micros(e.At), e.KeyID)
		if err != nil {
			return err
		}
		if n == 0 {
			if err := t.sameEntry(e); err != nil {
				return err
			}
			continue
		}
		var balance, hold sandboxer.Credits // what e adds to the sums
		switch e.Type {
		case sandboxer.EntryGrant:
			balance = e.Amount
		case sandboxer.EntryHold, sandboxer.EntryVoid:
			balance, hold = e.Amount, -e.Amount
		case sandboxer.EntryPost:
			hold = -e.Amount
		default:
			return sandboxer.E(sandboxer.Invalid, nil, "%q is not a type of ledger entry", e.Type)
		}
		if balance != 0 {
			if _, err := t.exec(addToBalance, e.Tenant, int64(balance)); err != nil {
				return overflow(err, e)
			}
		}
		if hold != 0 {
			key, err := t.addHold(e, hold)
			if err != nil {
				return err
			}
			if e.Type == sandboxer.EntryHold && key != "" {
				holds = append(holds, e)
				holds[len(holds)-1].KeyID = key
			}
		}
	}
	if !cover {
		return nil
	}
	for _, e := range holds {
		if err := t.checkKeySpend(e); err != nil {
			return err
		}
	}
	for _, e := range entries {
		var balance sandboxer.Credits
		if _, err := t.row(tenantBalance, []any{e.Tenant}, &balance); err != nil {
			return err
		}
		if balance < 0 {
			return sandboxer.E(sandboxer.NoCredit, nil, "tenant %q has not enough credit: %s short", e.Tenant, -balance)
		}
	}
	return nil
}

// addHold adds to what is on hold for e's sandbox, and a post to what was spent. It returns the API key for which
// both count, if any.
func (t *tx) addHold(e sandboxer.Entry, hold sandboxer.Credits) (key string, err error) {
	var left int64
	if _, err := t.row(addToHold, []any{e.Tenant, e.SandboxID, e.Generation, int64(hold), e.KeyID}, &left, &key); err != nil {
		return "", overflow(err, e)
	}
	if left == 0 {
		if _, err := t.exec(removeHold, e.Tenant, e.SandboxID, e.Generation); err != nil {
			return "", err
		}
	}
	if e.Type == sandboxer.EntryPost {
		if _, err := t.exec(addToSpent, e.Tenant, dayOf(e.At), key, int64(e.Amount)); err != nil {
			return "", overflow(err, e)
		}
	}
	return key, nil
}

// checkKeySpend fails with NoCredit if e, a hold that counts for the API key e.KeyID, makes it spend more than it may.
func (t *tx) checkKeySpend(e sandboxer.Entry) error {
	var r apiKeyRow
	if found, err := t.row(apiKeyByID, []any{e.KeyID}, r.dest()...); err != nil || !found {
		return err
	}
	key, err := r.apiKey()
	if err != nil {
		return err
	}
	q := sandboxer.TenantQuota{Tenant: key.Tenant, Key: key.Name, Quota: key.MaxSpend.Quota(), At: e.At}
	before, after := sandboxer.Amounts{}, sandboxer.Amounts{}
	for r := range q.Quota {
		from, until, _ := r.Period(q.At)
		var n int64
		if _, err := t.row(keySpend, []any{e.KeyID, e.KeyID, dayOf(from), dayOf(until)}, &n); err != nil {
			return err
		}
		before[r], after[r] = n+int64(e.Amount), n
	}
	return q.Check(before, after)
}

// sameEntry checks that the entry under e's key is equal to e.
func (t *tx) sameEntry(e sandboxer.Entry) error {
	var have sandboxer.Entry
	found, err := t.row(entryByKey, []any{e.Key}, &have.Tenant, &have.SandboxID, &have.Generation, &have.Type, &have.Amount)
	if err != nil {
		return err
	}
	if !found || have.Tenant != e.Tenant || have.SandboxID != e.SandboxID || have.Generation != e.Generation || have.Type != e.Type || have.Amount != e.Amount {
		return sandboxer.E(sandboxer.Conflict, nil, "the ledger has another entry under the key %q: a %s of %s for tenant %q", e.Key, have.Type, have.Amount, have.Tenant)
	}
	return nil
}

// dayOf numbers the days of spent since 1970 in UTC; at is a time that the store keeps.
func dayOf(at time.Time) int64 { return at.UTC().Truncate(24*time.Hour).Unix() / 86400 }

// overflow recognizes a sum that does not fit into an integer.
func overflow(err error, e sandboxer.Entry) error {
	if code(err) == sqlite3.SQLITE_CONSTRAINT_DATATYPE {
		return sandboxer.E(sandboxer.Invalid, err, "the amount %s of entry %q is too large for the ledger", e.Amount, e.Key)
	}
	return err
}

// Balance returns what the tenant may still spend.
func (s *Store) Balance(ctx context.Context, tenant string) (sandboxer.Credits, error) {
	var balance sandboxer.Credits
	_, err := s.row(ctx, tenantBalance, []any{tenant}, &balance)
	return balance, err
}

func entryFilter(q sandboxer.EntryQuery) filter {
	if q.ShownID == "" {
		return pageFilter(q.Tenant, q.SandboxID)
	}
	var f filter
	if q.Tenant != "" {
		f.tenant(q.Tenant, true)
	}
	f.add("(shown_id = ? AND shown_id <> '' OR sandbox_id = ? AND shown_id = '')", q.ShownID, q.ShownID)
	if q.SandboxID != "" {
		f.add("sandbox_id = ?", q.SandboxID)
	}
	return f
}

// Entries returns a page of the ledger, oldest first.
func (s *Store) Entries(ctx context.Context, q sandboxer.EntryQuery) (items []sandboxer.Entry, next string, err error) {
	f := entryFilter(q)
	if q.After != "" {
		seq, err := entryCursor.decode(q.After)
		if err != nil {
			return nil, "", err
		}
		f.add("seq > ?", seq)
	}
	limit := pageSize(q.Limit)
	var last int64
	query := `SELECT seq, key, tenant, sandbox_id, shown_id, generation, type, amount, note, at, key_id FROM entries` + f.String() + ` ORDER BY seq LIMIT ?`
	err = s.rows(ctx, query, append(f.args, limit+1), func(rows *sql.Rows) error {
		if len(items) == limit {
			next = entryCursor.encode(last)
			return nil
		}
		var e sandboxer.Entry
		var at int64
		if err := rows.Scan(&last, &e.Key, &e.Tenant, &e.SandboxID, &e.ShownID, &e.Generation, &e.Type, &e.Amount, &e.Note, &at, &e.KeyID); err != nil {
			return err
		}
		e.At = fromMicros(at)
		items = append(items, e)
		return nil
	})
	if err != nil {
		return nil, "", err
	}
	return items, next, nil
}

// OpenHolds returns what is still on hold, per sandbox generation.
func (s *Store) OpenHolds(ctx context.Context) (holds []sandboxer.OpenHold, err error) {
	query := `SELECT tenant, sandbox_id, generation, amount FROM open_holds ORDER BY tenant, sandbox_id, generation`
	err = s.rows(ctx, query, nil, func(rows *sql.Rows) error {
		var h sandboxer.OpenHold
		if err := rows.Scan(&h.Tenant, &h.SandboxID, &h.Generation, &h.Amount); err != nil {
			return err
		}
		holds = append(holds, h)
		return nil
	})
	return holds, err
}
