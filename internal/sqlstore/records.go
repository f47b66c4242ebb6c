package sqlstore

import (
	"context"
	"database/sql"
	"fmt"
	"sync"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// A recordKind describes the records of one table: all that is needed to read them, even
// if they are damaged. A record is a JSON document; values to search by, and values that must not go
// into the document, are in columns next to it.
type recordKind[T any] struct {
	table  cursor // also the kind of its cursors
	read   string // selects rows, as row has them; conditions follow
	update string // writes what values returns over the row of a version, which follows

	// index selects seq, ID and generation of every record, newest first, from the index
	// alone: the index is on other pages than the records. Only the index has the columns in
	// this order, so that SQLite scans it.
	index   string
	latest  string // selects the latest generation of an ID from the index; "" without generations
	columns string // selects, for a record named by ID, or ID and generation, what remains scans

	complete func(item *T, r *row) error // adds the other columns to a decoded document; an error means damage
	values   func(*T) ([]any, error)

	// remains returns the record that stands for a damaged one, and the destinations of
	// its columns.
	remains func(k recordKey, cause error) (item *T, columns []any)
	title   func(recordKey) string // in messages
	remove  string                 // the command that gets rid of one
	missing func(recordKey) error
}

// A recordKey names a record. Generation is 0 for the latest, and for kinds without.
type recordKey struct {
	id         string
	generation int
}

func (k recordKey) args() []any {
	if k.generation > 0 {
		return []any{k.id, k.generation}
	}
	return []any{k.id}
}

// A row is what recordKind.read selects.
type row struct {
	seq int64
	recordKey
	version                     int64
	data, handleData, sealedEnv []byte
}

func (r *row) dest() []any {
	return []any{&r.seq, &r.id, &r.generation, &r.version, &r.data, &r.handleData, &r.sealedEnv}
}

// decode returns the record in r. Any error means that it is damaged.
func (k *recordKind[T]) decode(r *row) (*T, error) {
	item := new(T)
	if _, err := strictjson.DecodeStored(r.data, item); err != nil {
		return nil, err
	}
	if err := k.complete(item, r); err != nil {
		return nil, err
	}
	return item, nil
}

// one reads the record that the query selects for key. The error about a damaged one
// comes with what is left of it.
func (k *recordKind[T]) one(ctx context.Context, s *Store, query string, key recordKey) (*T, error) {
	var r row
	found, err := s.row(ctx, query, key.args(), r.dest()...)
	switch {
	case isCorrupt(err):
		if key.generation == 0 && k.latest != "" { // the index still knows it
			if lerr := s.readers.QueryRowContext(ctx, k.latest, key.id).Scan(&key.generation); lerr != nil {
				return nil, err
			}
		}
		return k.left(ctx, s, key, err), k.damaged(key, err)
	case err != nil:
		return nil, err
	case !found:
		return nil, k.missing(key)
	}
	item, err := k.decode(&r)
	if err != nil {
		return k.left(ctx, s, r.recordKey, err), k.damaged(r.recordKey, err)
	}
	return item, nil
}

// page returns a page of the records that f selects, newest first.
func (k *recordKind[T]) page(ctx context.Context, s *Store, f filter, after string, limit int) (items []*T, next string, err error) {
	var before int64
	if after != "" {
		if before, err = k.table.decode(after); err != nil {
			return nil, "", err
		}
		f.add("seq < ?", before)
	}
	limit = pageSize(limit)
	found := make([]row, 0, limit)
	items = make([]*T, limit)
	// Decoding costs more than reading, so it runs concurrently.
	const chunk = 128
	var decode sync.WaitGroup
	decodeFrom := func(lo int) {
		from, to := found[lo:], items[lo:]
		decode.Go(func() {
			for i := range from {
				to[i] = k.decodeOrLeft(ctx, s, &from[i])
			}
		})
	}
	err = s.rows(ctx, k.read+f.String()+` ORDER BY seq DESC LIMIT ?`, append(f.args, limit+1), func(rows *sql.Rows) error {
		n := len(found)
		if n == limit {
			next = k.table.encode(found[n-1].seq)
			return nil
		}
		found = found[:n+1]
		if err := rows.Scan(found[n].dest()...); err != nil {
			return err
		}
		if len(found)%chunk == 0 {
			decodeFrom(len(found) - chunk)
		}
		return nil
	})
	decodeFrom(len(found) / chunk * chunk)
	decode.Wait()
	if isCorrupt(err) {
		return k.salvage(ctx, s, f, before, limit)
	}
	if err != nil {
		return nil, "", err
	}
	return items[:len(found):len(found)], next, nil
}

// rewrite changes, within tx, the records that a condition selects. Damaged ones stay as
// they are.
func (k *recordKind[T]) rewrite(ctx context.Context, tx *sql.Tx, where string, change func(*T)) error {
	rows, err := tx.QueryContext(ctx, k.read+` WHERE `+where)
	if err != nil {
		return err
	}
	defer rows.Close()
	type versioned struct {
		item    *T
		version int64
	}
	var found []versioned
	for rows.Next() {
		var r row
		if err := rows.Scan(r.dest()...); err != nil {
			return err
		}
		if item, err := k.decode(&r); err == nil {
			found = append(found, versioned{item, r.version})
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for _, v := range found {
		change(v.item)
		values, err := k.values(v.item)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, k.update, append(values, v.version)...); err != nil {
			return err
		}
	}
	return nil
}

var sandboxes = &recordKind[sandboxer.Sandbox]{
	table: sandboxCursor, read: selectSandbox, update: updateSandbox,
	index:   `SELECT seq, id, generation FROM sandboxes INDEXED BY sqlite_autoindex_sandboxes_1 ORDER BY +seq DESC`,
	latest:  `SELECT max(generation) FROM sandboxes WHERE id = ?`,
	columns: `SELECT version, tenant, CASE shown_id WHEN id THEN '' ELSE shown_id END, name, profile, extension, state FROM sandboxes WHERE id = ? AND generation = ?`,
	values:  sandboxValues,
	complete: func(sb *sandboxer.Sandbox, r *row) error {
		if sb.ID != r.id || sb.Generation != r.generation || !sb.State.Valid() {
			return fmt.Errorf("it says that it is generation %d of %q in state %q", sb.Generation, sb.ID, sb.State)
		}
		sb.Version, sb.Handle.Data, sb.SealedEnv = r.version, r.handleData, r.sealedEnv
		return nil
	},
	remains: func(k recordKey, cause error) (*sandboxer.Sandbox, []any) {
		sb := &sandboxer.Sandbox{ID: k.id, Generation: k.generation, Damaged: cause.Error()}
		return sb, []any{&sb.Version, &sb.Tenant, &sb.ShownID, &sb.Name, &sb.Profile, &sb.Extension, &sb.State}
	},
	title:   func(k recordKey) string { return fmt.Sprintf("sandbox %s, generation %d,", k.id, k.generation) },
	remove:  "sandboxer destroy",
	missing: func(k recordKey) error { return noSandbox(k.id, k.generation) },
}

var snapshots = &recordKind[sandboxer.SnapshotRecord]{
	table: snapshotCursor, read: selectSnapshot, update: updateSnapshot,
	index:   `SELECT seq, id, 0 FROM snapshots INDEXED BY sqlite_autoindex_snapshots_1 ORDER BY +seq DESC`,
	columns: `SELECT version, tenant, name, sandbox_id, parent, purpose, state FROM snapshots WHERE id = ?`,
	values:  snapshotValues,
	complete: func(rec *sandboxer.SnapshotRecord, r *row) error {
		if rec.ID != r.id || !rec.State.Valid() {
			return fmt.Errorf("it says that it is snapshot %q in state %q", rec.ID, rec.State)
		}
		rec.Version, rec.SealedEnv = r.version, r.sealedEnv
		return nil
	},
	remains: func(k recordKey, cause error) (*sandboxer.SnapshotRecord, []any) {
		rec := &sandboxer.SnapshotRecord{ID: k.id, Damaged: cause.Error()}
		return rec, []any{&rec.Version, &rec.Tenant, &rec.Name, &rec.SandboxID, &rec.Parent, &rec.Purpose, &rec.State}
	},
	title:   func(k recordKey) string { return "snapshot " + k.id },
	remove:  "sandboxer snapshot rm",
	missing: func(k recordKey) error { return noSnapshot(k.id) },
}
