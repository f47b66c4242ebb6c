package sqlstore

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// garble replaces the stored form of the records of an ID.
func garble(t *testing.T, s *Store, table cursor, id string, data string) {
	t.Helper()
	err := s.writer.write(t.Context(), false, func(tx *tx) error {
		_, err := tx.exec(`UPDATE `+string(table)+` SET data = ? WHERE id = ?`, data, id)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A damageable is a kind of record as the tests below use it.
type damageable[T any] struct {
	*recordKind[T]
	create func(t *testing.T, s *Store, id, message string) error // of tenant acme
	change func(t *testing.T, s *Store, r *T) error               // to another state, and write it
	get    func(t *testing.T, s *Store, id string) (*T, error)
	list   func(t *testing.T, s *Store, tenant string, limit int, after string) ([]*T, string, error)
	is     func(r *T) (id, tenant, state, why string) // why it is damaged
	state  string                                     // that create made it in
	broken []string                                   // documents that are not that of a record called a
	newer  string                                     // the document of a newer version, of one called a
}

var damageableSandbox = damageable[sandboxer.Sandbox]{
	recordKind: sandboxes,
	create: func(t *testing.T, s *Store, id, message string) error {
		sb := benchSandbox(id)
		sb.Message = message
		return s.CreateSandbox(t.Context(), sb, sandboxer.Writes{})
	},
	change: func(t *testing.T, s *Store, sb *sandboxer.Sandbox) error {
		sb.State, sb.Version = sandboxer.Running, max(sb.Version, 1)
		return s.UpdateSandbox(t.Context(), sb, sandboxer.Writes{})
	},
	get: func(t *testing.T, s *Store, id string) (*sandboxer.Sandbox, error) { return s.Sandbox(t.Context(), id) },
	list: func(t *testing.T, s *Store, tenant string, limit int, after string) ([]*sandboxer.Sandbox, string, error) {
		return s.Sandboxes(t.Context(), sandboxer.Query{Tenant: tenant, Limit: limit, After: after})
	},
	is: func(sb *sandboxer.Sandbox) (id, tenant, state, why string) {
		return sb.ID, sb.Tenant, string(sb.State), sb.Damaged
	},
	state: string(sandboxer.Creating),
	broken: []string{"", "null", "{}", "[]", `{"id":"b","generation":1,"state":"running"}`, `{"id":"a","generation":1,"state":"lost"}`, `{"id":"a","generation":"1"}`,
		`{"id":"a","generation":1,"state":"running","State":"terminated"}`, `{"id":"a","generation":1,"state":"running","state":"terminated"}`},
	newer: `{"id":"a","generation":1,"state":"creating","since":{"then":1}}`,
}

var damageableSnapshot = damageable[sandboxer.SnapshotRecord]{
	recordKind: snapshots,
	create: func(t *testing.T, s *Store, id, message string) error {
		rec := &sandboxer.SnapshotRecord{ID: id, Tenant: "acme", State: sandboxer.SnapshotSealed, Message: message + strings.Repeat("x", 200)}
		return s.Write(t.Context(), sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{rec}})
	},
	change: func(t *testing.T, s *Store, rec *sandboxer.SnapshotRecord) error {
		rec.State, rec.Version = sandboxer.SnapshotDropping, max(rec.Version, 1)
		return s.Write(t.Context(), sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{rec}})
	},
	get: func(t *testing.T, s *Store, id string) (*sandboxer.SnapshotRecord, error) {
		return s.Snapshot(t.Context(), id)
	},
	list: func(t *testing.T, s *Store, tenant string, limit int, after string) ([]*sandboxer.SnapshotRecord, string, error) {
		return s.Snapshots(t.Context(), sandboxer.SnapshotQuery{Tenant: tenant, Limit: limit, After: after})
	},
	is: func(rec *sandboxer.SnapshotRecord) (id, tenant, state, why string) {
		return rec.ID, rec.Tenant, string(rec.State), rec.Damaged
	},
	state: string(sandboxer.SnapshotSealed),
	broken: []string{"", "null", "{}", "[]", `{"id":"b","state":"sealed"}`, `{"id":"a","state":"lost"}`, `{"id":"a","state":"sealed","generation":"1"}`,
		`{"id":"a","generation":1,"state":"sealed","State":"dropped"}`, `{"id":"a","generation":1,"state":"sealed","state":"dropped"}`},
	newer: `{"id":"a","generation":1,"state":"sealed","since":{"then":1}}`,
}

// TestDamagedForms tries records that are JSON and still not what they should be.
func TestDamagedForms(t *testing.T) {
	t.Run("sandbox", damageableSandbox.testForms)
	t.Run("snapshot", damageableSnapshot.testForms)
}

func (k damageable[T]) testForms(t *testing.T) {
	s := openTest(t, t.TempDir())
	if err := k.create(t, s, "a", ""); err != nil {
		t.Fatal(err)
	}
	for _, data := range k.broken {
		garble(t, s, k.table, "a", data)
		got, err := k.get(t, s, "a")
		if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.HintOf(err), k.remove+" a") || got == nil {
			t.Fatalf("record %q: %+v, %v (hint %q); want it named as damaged", data, got, err, sandboxer.HintOf(err))
		}
		if _, tenant, state, why := k.is(got); tenant != "acme" || state != k.state || why == "" {
			t.Errorf("record %q: left is %+v; want its columns", data, got)
		}
		items, _, err := k.list(t, s, "", 0, "")
		if err != nil || len(items) != 1 {
			t.Fatalf("record %q: listed as %+v, %v", data, items, err)
		}
		if _, _, _, why := k.is(items[0]); why == "" {
			t.Errorf("record %q is listed as whole", data)
		}
	}
	garble(t, s, k.table, "a", k.newer)
	r, err := k.get(t, s, "a")
	if err != nil {
		t.Fatalf("a record of a newer version: %v", err)
	}
	if _, _, state, why := k.is(r); state != k.state || why != "" {
		t.Errorf("a record of a newer version: %+v", r)
	}
}

// overwrite changes bytes of the database file behind SQLite's back.
func overwrite(t *testing.T, dir string, at int, with ...byte) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, dbFile), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(with, int64(at)); err != nil {
		t.Fatal(err)
	}
}

// TestDamagedPages breaks pages of a database in use: one that only one record is on,
// then one that several share. Everybody else stays readable and writable.
func TestDamagedPages(t *testing.T) {
	t.Run("sandbox", damageableSandbox.testPages)
	t.Run("snapshot", damageableSnapshot.testPages)
}

func (k damageable[T]) testPages(t *testing.T) {
	dir := t.TempDir()
	s := openTest(t, dir)
	const n = 40
	mark := "the mark of s7 "
	for i := range n {
		message := ""
		if i == 7 { // long enough for pages of its own
			message = strings.Repeat(mark, 4000)
		}
		if err := k.create(t, s, fmt.Sprint("s", i), message); err != nil {
			t.Fatal(err)
		}
	}
	s.Close()
	s = openTest(t, dir)
	file, err := os.ReadFile(filepath.Join(dir, dbFile))
	if err != nil {
		t.Fatal(err)
	}
	const page = 4096
	var chain []int // the record's own pages, which each name the next one in their first bytes
	for at := 0; at < len(file); at += page {
		if bytes.Count(file[at:at+page], []byte(mark)) > page/len(mark)-3 {
			chain = append(chain, at)
		}
	}
	if len(chain) < 5 {
		t.Fatalf("the long record is on %d pages", len(chain))
	}
	at := chain[len(chain)/2]
	overwrite(t, dir, at, 0xff, 0xff, 0xff, 0xff)

	// list returns how many are listed, and how many of them can be read.
	list := func(tenant string, lost func(id string) bool) (listed, good int) {
		t.Helper()
		seen := map[string]bool{}
		for after := ""; ; {
			items, next, err := k.list(t, s, tenant, 2, after)
			if err != nil {
				t.Fatalf("list: %v", err)
			}
			for _, r := range items {
				id, _, _, why := k.is(r)
				if seen[id] {
					t.Errorf("%s is listed twice", id)
				}
				seen[id] = true
				if why == "" {
					good++
				} else if !lost(id) {
					t.Errorf("%s is listed as damaged: %s", id, why)
				}
			}
			if after = next; next == "" {
				return len(seen), good
			}
		}
	}
	s7 := func(id string) bool { return id == "s7" }
	for _, tenant := range []string{"", "acme"} { // the columns can be read
		if listed, good := list(tenant, s7); listed != n || good != n-1 {
			t.Errorf("of tenant %q %d are listed, %d of them readable; want %d and all but one", tenant, listed, good, n)
		}
	}
	r, err := k.get(t, s, "s7")
	if sandboxer.KindOf(err) != sandboxer.Failed || r == nil {
		t.Fatalf("the damaged one: %v, %v; want that it is damaged", r, err)
	}
	if _, tenant, state, why := k.is(r); tenant != "acme" || state != k.state || why == "" {
		t.Errorf("the damaged one is of %q and %q; want its columns", tenant, state)
	}

	// Now the page that the last records begin on.
	leaf := bytes.Index(file, []byte(`"id":"s3"`))
	for file[leaf/page*page] != 0x0d { // else it is what once stood on a page of another kind
		leaf += 1 + bytes.Index(file[leaf+1:], []byte(`"id":"s3"`))
	}
	s.Close()
	if s, err = OpenSQLite(t.Context(), dir, Options{Reserve: -1}); err == nil {
		t.Fatal("a damaged database was opened")
	}
	overwrite(t, dir, at, file[at:at+4]...)
	s = openTest(t, dir)
	overwrite(t, dir, leaf/page*page, 0xff)
	anyone := func(string) bool { return true }
	if listed, good := list("", anyone); listed != n || good < n/2 {
		t.Errorf("%d are listed, %d of them readable; want %d and at least %d", listed, good, n, n/2)
	}
	if listed, _ := list("acme", anyone); listed < n/2 || listed == n {
		t.Errorf("by tenant %d are listed; want those whose tenant can be read", listed)
	}
	r, err = k.get(t, s, "s3")
	if sandboxer.KindOf(err) != sandboxer.Failed || r == nil {
		t.Fatalf("one of the lost page: %+v, %v; want that it is damaged", r, err)
	}
	if id, tenant, _, why := k.is(r); id != "s3" || tenant != "" || why == "" {
		t.Errorf("one of the lost page: %+v; want its identity", r)
	}
	ok := 0
	errs := make(chan error, n)
	for i := range n { // together, so that they share commits with those that fail
		go func() {
			r, err := k.get(t, s, fmt.Sprint("s", i))
			if err == nil {
				err = k.change(t, s, r)
			} else if r != nil {
				k.change(t, s, r)
			}
			errs <- err
		}()
	}
	for range n {
		if <-errs == nil {
			ok++
		}
	}
	if ok < n/2 {
		t.Errorf("%d records could be written; want those of whole pages", ok)
	}
}
