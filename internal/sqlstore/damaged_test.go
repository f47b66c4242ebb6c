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

// garble replaces the stored form of one record.
func garble(t *testing.T, s *Store, id string, generation int, data string) {
	t.Helper()
	err := s.writer.write(t.Context(), false, func(tx *tx) error {
		_, err := tx.exec(`UPDATE sandboxes SET data = ? WHERE id = ? AND generation = ?`, data, id, generation)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// garbleSnapshot replaces the stored form of one snapshot's record.
func garbleSnapshot(t *testing.T, s *Store, id, data string) {
	t.Helper()
	err := s.writer.write(t.Context(), false, func(tx *tx) error {
		_, err := tx.exec(`UPDATE snapshots SET data = ? WHERE id = ?`, data, id)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestDamagedSnapshotForms is TestDamagedForms for snapshots.
func TestDamagedSnapshotForms(t *testing.T) {
	s := openTest(t, t.TempDir())
	rec := &sandboxer.SnapshotRecord{ID: "a", Tenant: "acme", State: sandboxer.SnapshotSealed}
	if err := s.Write(t.Context(), sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{rec}}); err != nil {
		t.Fatal(err)
	}
	for _, data := range []string{"", "null", "{}", "[]", `{"id":"b","state":"sealed"}`, `{"id":"a","state":"lost"}`, `{"id":"a","generation":"1"}`,
		`{"id":"a","generation":1,"state":"running","State":"terminated"}`, `{"id":"a","generation":1,"state":"running","state":"terminated"}`} {
		garbleSnapshot(t, s, "a", data)
		got, err := s.Snapshot(t.Context(), "a")
		if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.HintOf(err), "sandboxer snapshot rm a") || got == nil || got.Tenant != "acme" {
			t.Errorf("record %q: %+v, %v (hint %q); want it named as damaged", data, got, err, sandboxer.HintOf(err))
		}
		if items, _, err := s.Snapshots(t.Context(), sandboxer.SnapshotQuery{}); err != nil || len(items) != 1 || items[0].Damaged == "" {
			t.Errorf("record %q: listed as %+v, %v", data, items, err)
		}
	}
}

// TestDamagedSnapshotPages breaks a page that one record alone is on, then the one it
// begins on: the others stay readable.
func TestDamagedSnapshotPages(t *testing.T) {
	dir := t.TempDir()
	s := openTest(t, dir)
	const n = 40
	mark := "the mark of s7 "
	for i := range n {
		rec := &sandboxer.SnapshotRecord{ID: fmt.Sprint("s", i), Tenant: "acme", State: sandboxer.SnapshotSealed, Message: strings.Repeat("x", 200)}
		if i == 7 {
			rec.Message = strings.Repeat(mark, 4000)
		}
		if err := s.Write(t.Context(), sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{rec}}); err != nil {
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
	var chain []int // the record's own pages, which each name the next one first
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
	check := func(tenant string, atLeast int, readable int) {
		t.Helper()
		q := sandboxer.SnapshotQuery{Limit: 15, Tenant: tenant}
		seen, good := map[string]bool{}, 0
		for {
			items, next, err := s.Snapshots(t.Context(), q)
			if err != nil {
				t.Fatalf("list: %v", err)
			}
			for _, r := range items {
				if seen[r.ID] {
					t.Errorf("%s is listed twice", r.ID)
				}
				seen[r.ID] = true
				if r.Damaged == "" {
					good++
				}
			}
			if q.After = next; next == "" {
				break
			}
		}
		if len(seen) < atLeast || good < readable {
			t.Errorf("%d listed of %d, %d of them readable; want at least %d and %d", len(seen), n, good, atLeast, readable)
		}
	}
	check("", n, n-1)
	check("acme", n, n-1)
	if r, err := s.Snapshot(t.Context(), "s7"); sandboxer.KindOf(err) != sandboxer.Failed || r == nil || r.Tenant != "acme" || r.State != sandboxer.SnapshotSealed {
		t.Errorf("the damaged one: %.200v, %v; want its columns and that it is damaged", fmt.Sprint(r), err)
	}
	leaf := bytes.Index(file, []byte(`"id":"s3"`))
	for file[leaf/page*page] != 0x0d {
		leaf += 1 + bytes.Index(file[leaf+1:], []byte(`"id":"s3"`))
	}
	s.Close()
	overwrite(t, dir, at, file[at:at+4]...)
	s = openTest(t, dir)
	overwrite(t, dir, leaf/page*page, 0xff)
	check("", n, n/2)
	check("acme", n/2, n/2)
	if r, err := s.Snapshot(t.Context(), "s3"); sandboxer.KindOf(err) != sandboxer.Failed || r == nil || r.ID != "s3" || r.Tenant != "" {
		t.Errorf("one of the lost page: %+v, %v; want its ID and that it is damaged", r, err)
	}
}

// TestDamagedForms tries records that are JSON and still not what they should be.
func TestDamagedForms(t *testing.T) {
	s := openTest(t, t.TempDir())
	sb := benchSandbox("a")
	if err := s.CreateSandbox(t.Context(), sb, sandboxer.Writes{}); err != nil {
		t.Fatal(err)
	}
	for _, data := range []string{"", "null", "{}", "[]", `{"id":"b","generation":1,"state":"running"}`, `{"id":"a","generation":1,"state":"lost"}`, `{"id":"a","generation":"1"}`} {
		garble(t, s, "a", 1, data)
		if _, err := s.Sandbox(t.Context(), "a"); sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.HintOf(err), "sandboxer destroy a") {
			t.Errorf("record %q: %v (hint %q); want it named as damaged", data, err, sandboxer.HintOf(err))
		}
		if items, _, err := s.Sandboxes(t.Context(), sandboxer.Query{}); err != nil || len(items) != 1 || items[0].Damaged == "" {
			t.Errorf("record %q: listed as %+v, %v", data, items, err)
		}
	}
	garble(t, s, "a", 1, `{"id":"a","generation":1,"state":"running","since":{"then":1}}`)
	if sb, err := s.Sandbox(t.Context(), "a"); err != nil || sb.State != sandboxer.Running {
		t.Errorf("a record of a newer version: %+v, %v", sb, err)
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
	dir := t.TempDir()
	s := openTest(t, dir)
	const n = 40
	mark := "the mark of s7 "
	for i := range n {
		sb := benchSandbox(fmt.Sprint("s", i))
		if i == 7 { // long enough for pages of its own
			sb.Message = strings.Repeat(mark, 4000)
		}
		if err := s.CreateSandbox(t.Context(), sb, sandboxer.Writes{}); err != nil {
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
	at := bytes.LastIndex(file, []byte(mark))
	// An overflow page in the middle of the chain names the next one in its first bytes.
	overwrite(t, dir, (at/page-2)*page, 0xff, 0xff, 0xff, 0xff)

	check := func(lost func(id string) bool, readable int) {
		t.Helper()
		q := sandboxer.Query{Limit: 15}
		good := 0
		seen := map[string]bool{}
		for {
			items, next, err := s.Sandboxes(t.Context(), q)
			if err != nil {
				t.Fatalf("list: %v", err)
			}
			for _, sb := range items {
				if seen[sb.ID] {
					t.Errorf("%s is listed twice", sb.ID)
				}
				seen[sb.ID] = true
				if sb.Damaged == "" {
					good++
				} else if !lost(sb.ID) {
					t.Errorf("%s is listed as damaged: %s", sb.ID, sb.Damaged)
				}
			}
			if q.After = next; next == "" {
				break
			}
		}
		if len(seen) != n || good < readable {
			t.Errorf("%d listed, %d of them readable; want %d and at least %d", len(seen), good, n, readable)
		}
	}
	check(func(id string) bool { return id == "s7" }, n-1)
	sb, err := s.Sandbox(t.Context(), "s7")
	if sandboxer.KindOf(err) != sandboxer.Failed || sb == nil || sb.Tenant != "acme" || sb.State != sandboxer.Creating {
		t.Errorf("the damaged one: %+v, %v; want its columns and that it is damaged", sb, err)
	}
	if items, _, err := s.Sandboxes(t.Context(), sandboxer.Query{Tenant: "acme", Limit: n}); err != nil || len(items) != n {
		t.Errorf("by tenant: %d, %v; want %d: its columns can be read", len(items), err, n)
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
	overwrite(t, dir, (at/page-2)*page, file[(at/page-2)*page:(at/page-2)*page+4]...)
	s = openTest(t, dir)
	overwrite(t, dir, leaf/page*page, 0xff)
	check(func(string) bool { return true }, n/2)
	if sb, err := s.Sandbox(t.Context(), "s3"); sandboxer.KindOf(err) != sandboxer.Failed || sb == nil || sb.ID != "s3" || sb.Tenant != "" {
		t.Errorf("one of the lost page: %+v, %v; want its identity and that it is damaged", sb, err)
	}
	items, _, err := s.Sandboxes(t.Context(), sandboxer.Query{Tenant: "acme", Limit: n})
	if err != nil || len(items) < n/2 || len(items) == n {
		t.Errorf("by tenant: %d, %v; want those whose tenant can be read", len(items), err)
	}
	ok := 0
	errs := make(chan error, n)
	for i := range n { // together, so that they share commits with those that fail
		go func() {
			sb, err := s.Sandbox(t.Context(), fmt.Sprint("s", i))
			if err == nil {
				sb.State = sandboxer.Running
				err = s.UpdateSandbox(t.Context(), sb, sandboxer.Writes{})
			} else if sb != nil {
				sb.State, sb.Version = sandboxer.Running, 1
				s.UpdateSandbox(t.Context(), sb, sandboxer.Writes{})
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
