// Package sqlstore keeps the broker's database in SQLite: it implements
// sandboxer.Store. Writes of concurrent callers share commits (writer.go); reads run
// concurrently on connections of their own.
//
// SQL is written by hand and kept to what SQLite and Postgres share; what belongs to
// SQLite alone is in sqlite.go, writer.go and errors.go.
package sqlstore

import (
	"context"
	"database/sql"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A Store is a database. It is safe for concurrent use.
type Store struct {
	db      *sql.DB // one connection, which belongs to writer
	readers *sql.DB
	writer  *writer
	lock    *os.File
	dir     string
	marker  *marker
	revoked *revocations

	wentBack time.Time

	prepared sync.Map // text of a hot query → *sql.Stmt on readers
	closing  sync.Once
	closed   error
}

var _ sandboxer.Store = (*Store)(nil)

// Close waits for the writes that were accepted, closes the database and lets other
// processes use the data directory. Later calls fail with Unavailable.
func (s *Store) Close() error {
	s.closing.Do(func() {
		s.closed = wrap(errors.Join(s.writer.stop(), s.marker.stop(), s.readers.Close(), s.db.Close(), s.lock.Close()), "close the database")
	})
	return s.closed
}

// Write commits w alone.
func (s *Store) Write(ctx context.Context, w sandboxer.Writes) error {
	return s.commit(ctx, false, func(*tx) error { return nil }, w)
}

// commit runs do and makes the writes of w in one transaction. Once it is durable,
// the events in w have their numbers.
func (s *Store) commit(ctx context.Context, grows bool, do func(*tx) error, w sandboxer.Writes) error {
	if k := w.APIKey; k != nil && !k.RevokedAt.IsZero() {
		if err := s.revoked.add(k.ID); err != nil {
			return err
		}
	}
	seqs := make([]int64, len(w.Events))
	err := s.writer.write(ctx, grows, func(t *tx) error {
		before, err := t.quotaUse(w.Quota)
		if err != nil {
			return err
		}
		room, err := t.roomUse(w.Room)
		if err != nil {
			return err
		}
		if err := do(t); err != nil {
			return err
		}
		if w.FreeKey != nil {
			if err := t.freeIdempotencyKey(*w.FreeKey); err != nil {
				return err
			}
		}
		if w.Key != nil {
			if err := t.putIdempotencyKey(*w.Key); err != nil {
				return err
			}
		}
		if err := t.putEntries(w.Entries, w.Cover); err != nil {
			return err
		}
		if err := t.putUsage(w.Usage); err != nil {
			return err
		}
		if err := t.changeSink(w.Sink); err != nil {
			return err
		}
		if w.WentBackAccepted {
			if _, err := t.exec(`UPDATE installation SET went_back_at = 0`); err != nil {
				return err
			}
		}
		if w.APIKey != nil {
			if err := t.putAPIKey(*w.APIKey); err != nil {
				return err
			}
		}
		if w.Secret != nil {
			if err := t.putSecret(*w.Secret); err != nil {
				return err
			}
		}
		if w.NoSecret != nil {
			if err := t.removeSecret(*w.NoSecret); err != nil {
				return err
			}
		}
		for _, r := range w.Snapshots {
			if err := t.putSnapshot(r); err != nil {
				return err
			}
		}
		if w.Quota != nil {
			after, err := t.quotaUse(w.Quota)
			if err == nil {
				err = w.Quota.Check(before, after)
			}
			if err != nil {
				return err
			}
		}
		if w.Room != nil {
			after, err := t.roomUse(w.Room)
			if err == nil {
				err = w.Room.Check(room, after)
			}
			if err != nil {
				return err
			}
		}
		return t.putEvents(w.Events, seqs)
	})
	if err != nil {
		return s.withBackupHint(wrap(err, "write the database"))
	}
	for i := range w.Events {
		w.Events[i].Seq = seqs[i]
		s.marker.reach(seqs[i])
	}
	for _, r := range w.Snapshots {
		r.Version++
	}
	return nil
}

// row scans the only row of a hot query into dest and reports whether there was one.
// The text of query must be constant: it is prepared once.
func (s *Store) row(ctx context.Context, query string, args []any, dest ...any) (bool, error) {
	v, ok := s.prepared.Load(query)
	if !ok {
		st, err := s.readers.PrepareContext(ctx, query)
		if err != nil {
			return false, s.readError(err)
		}
		if v, ok = s.prepared.LoadOrStore(query, st); ok {
			st.Close()
		}
	}
	err := v.(*sql.Stmt).QueryRowContext(ctx, args...).Scan(dest...)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, s.readError(err)
}

// rows calls scan for every row of query.
func (s *Store) rows(ctx context.Context, query string, args []any, scan func(*sql.Rows) error) error {
	rows, err := s.readers.QueryContext(ctx, query, args...)
	if err != nil {
		return s.readError(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return s.readError(err)
		}
	}
	return s.readError(rows.Err())
}

func (s *Store) readError(err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-s.writer.closing:
		return errClosed()
	default:
		return s.withBackupHint(wrap(err, "read the database"))
	}
}

// withBackupHint adds to an error about a damaged database which backup there is.
func (s *Store) withBackupHint(err error) error {
	var own *sandboxer.Error
	if !isCorrupt(err) || !errors.As(err, &own) {
		return err
	}
	told := *own
	if backup := newestBackup(s.dir); backup != "" {
		return told.WithHint("stop the server and put the newest backup in place: sandboxer backup restore --data-dir %s %s", s.dir, backup)
	}
	return told.WithHint("stop the server and put a copy of your own in place of %s: the data directory holds no backup", filepath.Join(s.dir, dbFile))
}

// A filter collects the conditions of a query.
type filter struct {
	where []string
	args  []any

	// A damaged record whose ID alone can be read is selected by that: if it begins
	// with idPrefix, and the conditions ask for no owner, origin or name (byColumns).
	byColumns bool
	idPrefix  string
}

func (f *filter) add(condition string, args ...any) {
	f.where = append(f.where, condition)
	f.args = append(f.args, args...)
}

// tenant restricts to one tenant. With narrower set, another condition is known to
// leave fewer rows than all that a tenant ever had; the expression then keeps the
// planner, which knows nothing of that, from the index by tenant.
func (f *filter) tenant(name string, narrower bool) {
	if narrower {
		f.add("tenant || '' = ?", name)
	} else {
		f.add("tenant = ?", name)
	}
}

// pageFilter selects events or entries.
func pageFilter(tenant, sandboxID string) (f filter) {
	if tenant != "" {
		f.tenant(tenant, sandboxID != "")
	}
	if sandboxID != "" {
		f.add("sandbox_id = ?", sandboxID)
	}
	return f
}

func (f *filter) String() string {
	if f.where == nil {
		return ""
	}
	return " WHERE " + strings.Join(f.where, " AND ")
}

// pageSize applies the bounds of every list to a caller's limit.
func pageSize(limit int) int {
	if limit <= 0 {
		return sandboxer.DefaultPage
	}
	return min(limit, sandboxer.MaxPage)
}

// A cursor is the place of a row in one kind of list. Its text is opaque to callers
// and carries a checksum over the kind, so that a cursor of another list is recognized.
type cursor string

const (
	sandboxCursor  cursor = "sandboxes"
	snapshotCursor cursor = "snapshots"
	entryCursor    cursor = "entries"
)

func (c cursor) encode(seq int64) string {
	b := binary.BigEndian.AppendUint64(nil, uint64(seq))
	return hex.EncodeToString(binary.BigEndian.AppendUint32(b, c.sum(b)))
}

func (c cursor) decode(s string) (seq int64, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 12 || s != strings.ToLower(s) || binary.BigEndian.Uint32(b[8:]) != c.sum(b[:8]) {
		return 0, sandboxer.E(sandboxer.Invalid, nil, "%q is not a cursor of this list", s).
			WithHint("pass the cursor of the page before exactly as it was given, or none to start from the first page")
	}
	return int64(binary.BigEndian.Uint64(b)), nil
}

func (c cursor) sum(b []byte) uint32 {
	return crc32.Update(crc32.ChecksumIEEE([]byte(c)), crc32.IEEETable, b)
}

// micros and fromMicros store a time as an integer. The zero time is kept.
func micros(t time.Time) int64 { return t.UnixMicro() }

func fromMicros(n int64) time.Time { return time.UnixMicro(n).UTC() }

// toMicros truncates t to the store's precision.
func toMicros(t time.Time) time.Time { return fromMicros(micros(t)) }
