package sqlstore

import (
	"context"
	"database/sql"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// left returns what can still be read of a damaged record: its columns if its page is
// whole, else its key.
func (k *recordKind[T]) left(ctx context.Context, s *Store, key recordKey, cause error) *T {
	item, columns := k.remains(key, cause)
	if found, err := s.row(ctx, k.columns, key.args(), columns...); err != nil || !found {
		item, _ = k.remains(key, cause) // of a row, the first columns may have been read
	}
	return item
}

func (k *recordKind[T]) decodeOrLeft(ctx context.Context, s *Store, r *row) *T {
	item, err := k.decode(r)
	if err != nil {
		return k.left(ctx, s, r.recordKey, err)
	}
	return item
}

// damaged is the error for a record asked for by name.
func (k *recordKind[T]) damaged(key recordKey, cause error) error {
	return sandboxer.E(sandboxer.Failed, cause, "the record of %s is damaged", k.title(key)).
		WithHint("remove it with: %s %s; or restore the database from a backup: sandboxer backup restore", k.remove, key.id)
}

// salvage is page for a damaged database: it reads the records one by one, so that only
// those on an unreadable page are missing. It returns those as damaged if f
// selects them as far as is known. before is 0 for the first page.
func (k *recordKind[T]) salvage(ctx context.Context, s *Store, f filter, before int64, limit int) (items []*T, next string, err error) {
	type place struct {
		seq int64
		recordKey
	}
	var all []place
	err = s.rows(ctx, k.index, nil, func(rows *sql.Rows) error {
		var p place
		err := rows.Scan(&p.seq, &p.id, &p.generation)
		if before == 0 || p.seq < before {
			all = append(all, p)
		}
		return err
	})
	if err != nil {
		return nil, "", err
	}
	one := f
	one.where = append(one.where[:len(one.where):len(one.where)], "seq = ?")
	query, matches := k.read+one.String(), `SELECT 1 FROM `+string(k.table)+one.String()
	var last int64
	for _, p := range all {
		var r row
		found := false
		args := append(f.args[:len(f.args):len(f.args)], p.seq)
		err := s.rows(ctx, query, args, func(rows *sql.Rows) error { found = true; return rows.Scan(r.dest()...) })
		if isCorrupt(err) {
			found = false // by its columns, which may lie on a page before the damaged one
			cerr := s.rows(ctx, matches, args, func(*sql.Rows) error { found = true; return nil })
			if isCorrupt(cerr) {
				found = !f.byColumns && strings.HasPrefix(p.id, f.idPrefix)
			} else if cerr != nil {
				return nil, "", cerr
			}
		} else if err != nil {
			return nil, "", err
		}
		if !found {
			continue
		}
		if len(items) == limit {
			return items, k.table.encode(last), nil
		}
		item := (*T)(nil)
		if err != nil {
			item = k.left(ctx, s, p.recordKey, err)
		} else {
			item = k.decodeOrLeft(ctx, s, &r)
		}
		items, last = append(items, item), p.seq
	}
	return items, "", nil
}
