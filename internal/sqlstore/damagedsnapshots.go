package sqlstore

import (
	"context"
	"database/sql"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

const (
	snapshotColumns = `SELECT version, tenant, name, sandbox_id, parent, purpose, state FROM snapshots WHERE id = ?`

	// As identities: only the index, which lies on other pages than the records, is read.
	snapshotIdentities = `SELECT seq, id FROM snapshots INDEXED BY sqlite_autoindex_snapshots_1 ORDER BY +seq DESC`
)

// snapshotRemains returns what can still be read of a damaged record: its columns if
// its page is whole, else its ID.
func (s *Store) snapshotRemains(ctx context.Context, id string, cause error) *sandboxer.SnapshotRecord {
	r := sandboxer.SnapshotRecord{ID: id, Damaged: cause.Error()}
	cols := r
	if found, err := s.row(ctx, snapshotColumns, []any{id},
		&cols.Version, &cols.Tenant, &cols.Name, &cols.SandboxID, &cols.Parent, &cols.Purpose, &cols.State); found && err == nil {
		return &cols
	}
	return &r
}

// damagedSnapshot is the error for a record asked for by name.
func damagedSnapshot(id string, cause error) error {
	return sandboxer.E(sandboxer.Failed, cause, "the record of snapshot %s is damaged", id).
		WithHint("get rid of it with: sandboxer snapshot rm %s; or restore the database from a backup: sandboxer backup restore", id)
}

// salvageSnapshots is Snapshots for a database with a page that cannot be read; see
// salvage.
func (s *Store) salvageSnapshots(ctx context.Context, q sandboxer.SnapshotQuery, f filter, limit int) (items []*sandboxer.SnapshotRecord, next string, err error) {
	type identity struct {
		seq int64
		id  string
	}
	var all []identity
	before := int64(0)
	if q.After != "" {
		if before, err = snapshotCursor.decode(q.After); err != nil {
			return nil, "", err
		}
	}
	err = s.rows(ctx, snapshotIdentities, nil, func(rows *sql.Rows) error {
		var i identity
		err := rows.Scan(&i.seq, &i.id)
		if before == 0 || i.seq < before {
			all = append(all, i)
		}
		return err
	})
	if err != nil {
		return nil, "", err
	}
	anybody := q.Tenant == "" && q.SandboxID == "" && q.Parent == "" && q.Name == ""
	one := f
	one.where = append(one.where[:len(one.where):len(one.where)], "seq = ?")
	query, matches := selectSnapshot+one.String(), `SELECT 1 FROM snapshots`+one.String()
	var last int64
	for _, i := range all {
		var rec *sandboxer.SnapshotRecord
		args := append(f.args[:len(f.args):len(f.args)], i.seq)
		err := s.rows(ctx, query, args, func(rows *sql.Rows) error {
			var r snapshotRow
			if err := rows.Scan(r.dest()...); err != nil {
				return err
			}
			rec = r.snapshot()
			return nil
		})
		switch {
		case isCorrupt(err):
			wanted := false // by its columns, which may lie on a page before the damaged one
			cerr := s.rows(ctx, matches, args, func(*sql.Rows) error { wanted = true; return nil })
			if isCorrupt(cerr) {
				wanted = anybody && strings.HasPrefix(i.id, q.IDPrefix)
			} else if cerr != nil {
				return nil, "", cerr
			}
			if !wanted {
				continue
			}
			rec = s.snapshotRemains(ctx, i.id, err)
		case err != nil:
			return nil, "", err
		case rec == nil:
			continue
		}
		if len(items) == limit {
			return items, snapshotCursor.encode(last), nil
		}
		items, last = append(items, rec), i.seq
	}
	return items, "", nil
}
