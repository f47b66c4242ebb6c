package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

const (
	insertSnapshot = `INSERT INTO snapshots (tenant, name, sandbox_id, parent, purpose, state, due_at, data, sealed_env, id, version)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO NOTHING`

	updateSnapshot = `UPDATE snapshots SET tenant = ?, name = ?, sandbox_id = ?, parent = ?, purpose = ?, state = ?, due_at = ?, data = ?,
sealed_env = ?, version = version + 1 WHERE id = ? AND version = ?`

	snapshotVersion = `SELECT version FROM snapshots WHERE id = ?`

	selectSnapshot = `SELECT seq, id, version, tenant, name, sandbox_id, parent, purpose, state, data, sealed_env FROM snapshots`
	snapshotByID   = selectSnapshot + ` WHERE id = ?`
)

// putSnapshot inserts or replaces r; see sandboxer.Writes.
func (t *tx) putSnapshot(r *sandboxer.SnapshotRecord) error {
	values, err := snapshotValues(r)
	if err != nil {
		return err
	}
	taken := sandboxer.E(sandboxer.Conflict, nil, "a snapshot named %q exists", r.Name).
		WithHint("choose another name, or drop that snapshot first")
	var stored int64
	found, err := t.row(snapshotVersion, []any{r.ID}, &stored)
	switch {
	case err != nil:
		return err
	case r.Version == 0 && found:
		return sandboxer.E(sandboxer.Conflict, nil, "the snapshot %s exists", r.ID)
	case r.Version == 0:
		n, err := t.exec(insertSnapshot, values...)
		if err == nil && n == 0 {
			err = taken
		}
		return err
	case !found:
		return noSnapshot(r.ID)
	case stored != r.Version:
		return sandboxer.E(sandboxer.Conflict, nil, "snapshot %s was changed by somebody else: version %d is stale, it is at %d", r.ID, r.Version, stored)
	}
	_, err = t.exec(updateSnapshot, append(values, r.Version)...)
	if isTaken(err) {
		return taken
	}
	return err
}

// Snapshot returns the record of one snapshot.
func (s *Store) Snapshot(ctx context.Context, id string) (*sandboxer.SnapshotRecord, error) {
	var r snapshotRow
	found, err := s.row(ctx, snapshotByID, []any{id}, r.dest()...)
	switch {
	case isCorrupt(err):
		return s.snapshotRemains(ctx, id, err), damagedSnapshot(id, err)
	case err != nil:
		return nil, err
	case !found:
		return nil, noSnapshot(id)
	}
	rec := r.snapshot()
	if rec.Damaged != "" {
		return rec, damagedSnapshot(id, errors.New(rec.Damaged))
	}
	return rec, nil
}

// Snapshots returns a page of records, newest first.
func (s *Store) Snapshots(ctx context.Context, q sandboxer.SnapshotQuery) (items []*sandboxer.SnapshotRecord, next string, err error) {
	f, err := snapshotFilter(q)
	if err != nil {
		return nil, "", err
	}
	limit := pageSize(q.Limit)
	var last int64
	err = s.rows(ctx, selectSnapshot+f.String()+` ORDER BY seq DESC LIMIT ?`, append(f.args, limit+1), func(rows *sql.Rows) error {
		if len(items) == limit {
			next = snapshotCursor.encode(last)
			return nil
		}
		var r snapshotRow
		if err := rows.Scan(r.dest()...); err != nil {
			return err
		}
		last = r.seq
		items = append(items, r.snapshot())
		return nil
	})
	if isCorrupt(err) {
		return s.salvageSnapshots(ctx, q, f, limit)
	}
	if err != nil {
		return nil, "", err
	}
	return items, next, nil
}

func snapshotFilter(q sandboxer.SnapshotQuery) (f filter, err error) {
	live := len(q.States) > 0 && !slices.Contains(q.States, sandboxer.SnapshotDropped)
	if q.Tenant != "" {
		f.tenant(q.Tenant, live && q.Name == "" || q.IDPrefix != "" || q.SandboxID != "" || q.Parent != "")
	}
	if q.SandboxID != "" {
		f.add("sandbox_id = ?", q.SandboxID)
	}
	if q.Parent != "" {
		f.add("parent = ? AND parent <> ''", q.Parent)
	}
	if q.Name != "" {
		f.add("name = ? AND name <> ''", q.Name)
	}
	if q.IDPrefix != "" {
		f.add("id >= ? AND id < ?", q.IDPrefix, q.IDPrefix+"\U0010FFFF")
	}
	if len(q.States) > 0 {
		in(&f, "state", q.States)
		if live {
			f.add("state <> 'dropped'")
		}
	}
	if len(q.Purposes) > 0 {
		in(&f, "purpose", q.Purposes)
	}
	if !q.DueBefore.IsZero() {
		f.add("due_at <= ? AND state <> 'dropped'", micros(q.DueBefore))
	}
	if q.After != "" {
		seq, err := snapshotCursor.decode(q.After)
		if err != nil {
			return f, err
		}
		f.add("seq < ?", seq)
	}
	return f, nil
}

// in restricts column to some values.
func in[S ~string](f *filter, column string, values []S) {
	args := make([]any, len(values))
	for i, v := range values {
		args[i] = string(v)
	}
	f.add(column+" IN (?"+strings.Repeat(", ?", len(args)-1)+")", args...)
}

// snapshotValues returns the columns of r in the order of insertSnapshot and
// updateSnapshot.
func snapshotValues(r *sandboxer.SnapshotRecord) ([]any, error) {
	if r.ID == "" || !r.State.Valid() {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "a snapshot needs an ID and a state (has %q and %q)", r.ID, r.State)
	}
	c := *r
	for _, t := range []*time.Time{&c.RetryAt, &c.CreatedAt, &c.SealedAt, &c.ExpiresAt, &c.DroppedAt, &c.Spec.Fuse} {
		*t = toMicros(*t)
	}
	data, err := json.Marshal(&c)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the record of snapshot %s cannot be stored", r.ID)
	}
	due := earlier(c.ExpiresAt, c.RetryAt)
	if r.State == sandboxer.SnapshotDropped {
		due = earlier(c.DroppedAt, time.Time{}) // for ForgetHistory
	}
	return []any{r.Tenant, r.Name, r.SandboxID, r.Parent, string(r.Purpose), string(r.State),
		due, string(data), r.SealedEnv, r.ID}, nil
}

// A snapshotRow is a row of selectSnapshot.
type snapshotRow struct {
	seq             int64
	left            sandboxer.SnapshotRecord // what the columns say
	data, sealedEnv []byte
}

func (r *snapshotRow) dest() []any {
	l := &r.left
	return []any{&r.seq, &l.ID, &l.Version, &l.Tenant, &l.Name, &l.SandboxID, &l.Parent, &l.Purpose, &l.State, &r.data, &r.sealedEnv}
}

// snapshot decodes the record. Of a damaged one it returns what is left.
func (r *snapshotRow) snapshot() *sandboxer.SnapshotRecord {
	rec := new(sandboxer.SnapshotRecord)
	_, err := strictjson.DecodeStored(r.data, rec)
	if err == nil && (rec.ID != r.left.ID || !rec.State.Valid()) {
		err = fmt.Errorf("it says that it is snapshot %q in state %q", rec.ID, rec.State)
	}
	if err != nil {
		rec = &r.left
		rec.Damaged = err.Error()
		return rec
	}
	rec.Version = r.left.Version
	rec.SealedEnv = r.sealedEnv
	return rec
}

func noSnapshot(id string) error {
	return sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %s", id)
}
