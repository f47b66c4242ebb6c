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
	snapshotIdentities = `SELECT seq, id, 0 FROM snapshots INDEXED BY sqlite_autoindex_snapshots_1 ORDER BY +seq DESC`
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

// salvageSnapshots is Snapshots for a damaged database.
func (s *Store) salvageSnapshots(ctx context.Context, q sandboxer.SnapshotQuery, f filter, limit int) ([]*sandboxer.SnapshotRecord, string, error) {
	k := salvaged[sandboxer.SnapshotRecord]{
		cursor: snapshotCursor, identities: snapshotIdentities, from: selectSnapshot,
		scan: func(rows *sql.Rows) (*sandboxer.SnapshotRecord, error) {
			var r snapshotRow
			if err := rows.Scan(r.dest()...); err != nil {
				return nil, err
			}
			return r.snapshot(), nil
		},
		remains: func(i identity, err error) *sandboxer.SnapshotRecord { return s.snapshotRemains(ctx, i.id, err) },
	}
	anybody := q.Tenant == "" && q.SandboxID == "" && q.Parent == "" && q.Name == ""
	return salvage(ctx, s, k, q.After, f, limit, func(id string) bool { return anybody && strings.HasPrefix(id, q.IDPrefix) })
}
