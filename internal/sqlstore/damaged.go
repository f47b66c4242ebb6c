package sqlstore

import (
	"context"
	"database/sql"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

const (
	sandboxColumns = `SELECT version, tenant, name, profile, extension, state FROM sandboxes WHERE id = ? AND generation = ?`

	// identities are read from the index alone, which lies on other pages than the
	// records. Only the index has them in this order, so it is what is scanned.
	identities = `SELECT seq, id, generation FROM sandboxes INDEXED BY sqlite_autoindex_sandboxes_1 ORDER BY +seq DESC`
)

// remains returns what can still be read of a damaged record: its columns if its page
// is whole, else its identity.
func (s *Store) remains(ctx context.Context, id string, generation int, cause error) *sandboxer.Sandbox {
	sb := &sandboxer.Sandbox{ID: id, Generation: generation, Damaged: cause.Error()}
	cols := *sb
	if found, err := s.row(ctx, sandboxColumns, []any{id, generation},
		&cols.Version, &cols.Tenant, &cols.Name, &cols.Profile, &cols.Extension, &cols.State); found && err == nil {
		return &cols
	}
	return sb
}

// damagedRecord is the error for a record asked for by name.
func damagedRecord(id string, generation int, cause error) error {
	return sandboxer.E(sandboxer.Failed, cause, "the record of sandbox %s, generation %d, is damaged", id, generation).
		WithHint("get rid of it with: sandboxer destroy %s; or restore the database from a backup: sandboxer backup restore", id)
}

// one reads the record that the query selects, which is known to be that of id.
func (s *Store) one(ctx context.Context, query string, id string, generation int) (*sandboxer.Sandbox, error) {
	args := []any{id}
	if generation > 0 {
		args = append(args, generation)
	}
	var r sandboxRow
	found, err := s.row(ctx, query, args, r.dest()...)
	switch {
	case isCorrupt(err):
		if generation == 0 { // the index still knows it
			if gerr := s.readers.QueryRowContext(ctx, `SELECT max(generation) FROM sandboxes WHERE id = ?`, id).Scan(&generation); gerr != nil {
				return nil, err
			}
		}
		return s.remains(ctx, id, generation, err), damagedRecord(id, generation, err)
	case err != nil:
		return nil, err
	case !found:
		return nil, noSandbox(id, generation)
	}
	sb, err := r.sandbox()
	if err != nil {
		return s.remains(ctx, r.id, r.generation, err), damagedRecord(r.id, r.generation, err)
	}
	return sb, nil
}

// identity is what the index knows of a record.
type identity struct {
	seq        int64
	id         string
	generation int // of sandboxes
}

// salvaged is how records of one kind are read from a damaged database.
type salvaged[T any] struct {
	cursor     cursor // also the name of the table
	identities string // query of all identities, newest first, from the index alone
	from       string // query of records, without its conditions
	scan       func(*sql.Rows) (*T, error)
	remains    func(identity, error) *T // what is left of a damaged one
}

// salvage lists records although a page cannot be read: it takes them one by one, so
// that only those on that page are missed. Those it returns as damaged, if they are
// wanted as far as their ID can tell.
func salvage[T any](ctx context.Context, s *Store, k salvaged[T], after string, f filter, limit int, wanted func(id string) bool) (items []*T, next string, err error) {
	before := int64(0)
	if after != "" {
		if before, err = k.cursor.decode(after); err != nil {
			return nil, "", err
		}
	}
	var all []identity
	err = s.rows(ctx, k.identities, nil, func(rows *sql.Rows) error {
		var i identity
		err := rows.Scan(&i.seq, &i.id, &i.generation)
		if before == 0 || i.seq < before {
			all = append(all, i)
		}
		return err
	})
	if err != nil {
		return nil, "", err
	}
	one := f
	one.where = append(one.where[:len(one.where):len(one.where)], "seq = ?")
	query, matches := k.from+one.String(), `SELECT 1 FROM `+string(k.cursor)+one.String()
	var last int64
	for _, i := range all {
		var item *T
		args := append(f.args[:len(f.args):len(f.args)], i.seq)
		err := s.rows(ctx, query, args, func(rows *sql.Rows) (err error) { item, err = k.scan(rows); return err })
		switch {
		case isCorrupt(err):
			matched := false // by its columns, which may lie on a page before the damaged one
			cerr := s.rows(ctx, matches, args, func(*sql.Rows) error { matched = true; return nil })
			if isCorrupt(cerr) {
				matched = wanted(i.id)
			} else if cerr != nil {
				return nil, "", cerr
			}
			if !matched {
				continue
			}
			item = k.remains(i, err)
		case err != nil:
			return nil, "", err
		case item == nil:
			continue
		}
		if len(items) == limit {
			return items, k.cursor.encode(last), nil
		}
		items, last = append(items, item), i.seq
	}
	return items, "", nil
}

// salvageSandboxes is Sandboxes for a damaged database.
func (s *Store) salvageSandboxes(ctx context.Context, q sandboxer.Query, f filter, limit int) ([]*sandboxer.Sandbox, string, error) {
	k := salvaged[sandboxer.Sandbox]{
		cursor: sandboxCursor, identities: identities, from: selectSandbox,
		scan: func(rows *sql.Rows) (*sandboxer.Sandbox, error) {
			var r sandboxRow
			if err := rows.Scan(r.dest()...); err != nil {
				return nil, err
			}
			sb, err := r.sandbox()
			if err != nil {
				return s.remains(ctx, r.id, r.generation, err), nil
			}
			return sb, nil
		},
		remains: func(i identity, err error) *sandboxer.Sandbox { return s.remains(ctx, i.id, i.generation, err) },
	}
	anybody := q.Tenant == "" && q.Profile == "" && q.Extension == "" && q.Name == "" && len(q.Labels) == 0
	return salvage(ctx, s, k, q.After, f, limit, func(id string) bool { return anybody && strings.HasPrefix(id, q.IDPrefix) })
}
