package sqlstore

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	insertSnapshot = `INSERT INTO snapshots (tenant, name, sandbox_id, parent, purpose, state, due_at, data, sealed_env, id, version)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO NOTHING`

	updateSnapshot = `UPDATE snapshots SET tenant = ?, name = ?, sandbox_id = ?, parent = ?, purpose = ?, state = ?, due_at = ?, data = ?,
sealed_env = ?, version = version + 1 WHERE id = ? AND version = ?`

	snapshotVersion = `SELECT version FROM snapshots WHERE id = ?`

	selectSnapshot = `SELECT seq, id, 0, version, data, NULL, sealed_env FROM snapshots`
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
		return sandboxer.E(sandboxer.Conflict, nil, "snapshot %s was changed by another request: version %d is stale, it is at %d", r.ID, r.Version, stored)
	}
	_, err = t.exec(updateSnapshot, append(values, r.Version)...)
	if isTaken(err) {
		return taken
	}
	return err
}

// Snapshot returns the record of one snapshot.
func (s *Store) Snapshot(ctx context.Context, id string) (*sandboxer.SnapshotRecord, error) {
	return snapshots.one(ctx, s, snapshotByID, recordKey{id: id})
}

// Snapshots returns a page of records, newest first.
func (s *Store) Snapshots(ctx context.Context, q sandboxer.SnapshotQuery) (items []*sandboxer.SnapshotRecord, next string, err error) {
	return snapshots.page(ctx, s, snapshotFilter(q), q.After, q.Limit)
}

func snapshotFilter(q sandboxer.SnapshotQuery) filter {
	f := filter{byColumns: q.Tenant != "" || q.SandboxID != "" || q.Parent != "" || q.Name != "", idPrefix: q.IDPrefix}
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
	return f
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
	for _, t := range []*time.Time{&c.RetryAt, &c.CreatedAt, &c.SealedAt, &c.ExpiresAt, &c.DroppedAt, &c.Spec.Fuse, &c.Native.ExpiresAt} {
		*t = toMicros(*t)
	}
	data, err := json.Marshal(&c)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the record of snapshot %s cannot be stored", r.ID)
	}
	due := earliest(c.ExpiresAt, c.RetryAt)
	if r.State == sandboxer.SnapshotDropped {
		due = earliest(c.DroppedAt, time.Time{}) // for ForgetHistory
	}
	return []any{r.Tenant, r.Name, r.SandboxID, r.Parent, string(r.Purpose), string(r.State),
		due, string(data), r.SealedEnv, r.ID}, nil
}

func noSnapshot(id string) error {
	return sandboxer.E(sandboxer.NotFound, nil, "there is no snapshot %s", id)
}
