package sqlstore

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/sand-boxer/sandboxer"
)

func openTest(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := OpenSQLite(context.Background(), dir, Options{Reserve: 1 << 20})
	if err != nil {
		t.Fatalf("OpenSQLite(%s) = %v (hint: %s)", dir, err, sandboxer.HintOf(err))
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// used returns a closed data directory with n sandboxes in it.
func used(t *testing.T, n int) string {
	t.Helper()
	dir := t.TempDir()
	s := openTest(t, dir)
	for i := range n {
		if err := s.CreateSandbox(t.Context(), benchSandbox(fmt.Sprint("s", i)), sandboxer.Writes{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, dbFile+"-*")); left != nil {
		t.Fatalf("Close left %v behind", left)
	}
	return dir
}

func TestSettings(t *testing.T) {
	s := openTest(t, t.TempDir())
	for _, c := range []struct {
		db   *sql.DB
		name string
		want string
	}{
		{s.readers, "journal_mode", "wal"},
		{s.readers, "query_only", "1"},
		{s.readers, "busy_timeout", "5000"},
		{s.readers, "temp_store", "2"},
		{nil, "journal_mode", "wal"},
		{nil, "synchronous", "2"},
		{nil, "foreign_keys", "1"},
		{nil, "busy_timeout", "5000"},
		{nil, "application_id", fmt.Sprint(applicationID)},
	} {
		var got string
		var err error
		if c.db != nil {
			err = c.db.QueryRow("PRAGMA " + c.name).Scan(&got)
		} else {
			err = s.writer.write(t.Context(), false, func(tx *tx) error {
				_, err := tx.row("PRAGMA "+c.name, nil, &got)
				return err
			})
		}
		if err != nil || got != c.want {
			t.Errorf("%s = %q, %v; want %s", c.name, got, err, c.want)
		}
	}
}

func TestVersionGate(t *testing.T) {
	for _, c := range []struct {
		have string
		want bool
	}{{"3.51.3", true}, {"3.51.2", false}, {"3.54.1", true}, {"3.9.99", false}, {"4.0.0", true}, {"", false}} {
		if got := versionAtLeast(c.have, oldestSQLite); got != c.want {
			t.Errorf("atLeast(%q, %s) = %t; want %t", c.have, oldestSQLite, got, c.want)
		}
	}
}

func TestDirectory(t *testing.T) {
	mode := func(t *testing.T, dir string) fs.FileMode {
		st, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		return st.Mode().Perm()
	}
	t.Run("is made private", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "a", "data %41?#&")
		openTest(t, dir)
		if m := mode(t, dir); m != 0o700 {
			t.Errorf("mode = %o; want 700", m)
		}
		if _, err := os.Stat(filepath.Join(dir, dbFile)); err != nil {
			t.Error(err)
		}
	})
	t.Run("is closed to others when empty or ours", func(t *testing.T) {
		dir := t.TempDir()
		for range 2 {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			openTest(t, dir).Close()
			if m := mode(t, dir); m != 0o700 {
				t.Errorf("mode = %o; want 700", m)
			}
		}
	})
	t.Run("of somebody else is left alone", func(t *testing.T) {
		dir := t.TempDir()
		if err := errors.Join(os.WriteFile(filepath.Join(dir, "thesis.tex"), nil, 0o644), os.Chmod(dir, 0o755)); err != nil {
			t.Fatal(err)
		}
		_, err := OpenSQLite(t.Context(), dir, Options{})
		refused(t, err, sandboxer.Invalid, dir, "chmod 700")
		if m := mode(t, dir); m != 0o755 {
			t.Errorf("mode = %o; want it unchanged", m)
		}
	})
	t.Run("cannot be a file", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := OpenSQLite(t.Context(), file, Options{})
		refused(t, err, sandboxer.Invalid, file)
	})
	t.Run("in use by this process", func(t *testing.T) {
		dir := t.TempDir()
		openTest(t, dir)
		_, err := OpenSQLite(t.Context(), dir, Options{})
		refused(t, err, sandboxer.Conflict, dir, fmt.Sprint("process ", os.Getpid()), fmt.Sprint("kill ", os.Getpid()))
	})
}

// refused checks an error's kind and that its message and hint together say words.
func refused(t *testing.T, err error, kind sandboxer.Kind, words ...string) {
	t.Helper()
	if sandboxer.KindOf(err) != kind {
		t.Fatalf("error %v (%s); want %s", err, sandboxer.KindOf(err), kind)
	}
	said := sandboxer.Message(err) + "\n" + sandboxer.HintOf(err)
	for _, w := range words {
		if !strings.Contains(said, w) {
			t.Errorf("%q does not say %q", said, w)
		}
	}
}

func TestDamage(t *testing.T) {
	zeroPage := func(at float64) func(*testing.T, string) {
		return func(t *testing.T, file string) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			page := int(at*float64(len(b))) / 4096 * 4096
			clear(b[page:min(page+4096, len(b))])
			if err := os.WriteFile(file, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	truncate := func(size int64) func(*testing.T, string) {
		return func(t *testing.T, file string) {
			if err := os.Truncate(file, size); err != nil {
				t.Fatal(err)
			}
		}
	}
	remove := func(t *testing.T, file string) {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	whole := filepath.Join(used(t, 300), dbFile)
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, file string)
	}{
		{"first page zeroed", zeroPage(0)},
		{"table page zeroed", zeroPage(0.5)},
		{"last page zeroed", zeroPage(0.9999)},
		{"cut to half", truncate(200 << 10)},
		{"cut to nothing", truncate(0)},
		{"cut within the header", truncate(50)},
		{"not a database", func(t *testing.T, file string) {
			if err := os.WriteFile(file, bytes.Repeat([]byte("garbage "), 10_000), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"another program's database", func(t *testing.T, file string) {
			remove(t, file)
			db, err := sql.Open("sqlite", file)
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if _, err := db.Exec("CREATE TABLE songs (title TEXT)"); err != nil {
				t.Fatal(err)
			}
		}},
		{"removed, its log left", func(t *testing.T, file string) {
			remove(t, file)
			if err := os.WriteFile(file+"-wal", []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		for _, backup := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, backup %t", c.name, backup), func(t *testing.T) {
				dir := t.TempDir()
				file := filepath.Join(dir, dbFile)
				copyFile(t, whole, file)
				words := []string{file, "holds no backup"}
				if backup {
					copyFile(t, file, filepath.Join(dir, "sandboxer-before-0002.db"))
					newest := filepath.Join(dir, "sandboxer-before-0003.db")
					copyFile(t, file, newest)
					words = []string{file, "newest backup is " + newest, "sandboxer backup restore --data-dir " + dir + " " + newest}
				}
				c.damage(t, file)
				before, _ := os.ReadFile(file)
				for range 2 { // nor does it heal by itself into an empty database
					_, err := OpenSQLite(t.Context(), dir, Options{Reserve: -1})
					refused(t, err, sandboxer.Failed, words...)
				}
				if after, _ := os.ReadFile(file); !bytes.Equal(before, after) {
					t.Error("the damaged file was changed")
				}
			})
		}
	}
	t.Run("removed, a backup left", func(t *testing.T) {
		dir := used(t, 3)
		if err := os.Rename(filepath.Join(dir, dbFile), filepath.Join(dir, "sandboxer-before-0002.db")); err != nil {
			t.Fatal(err)
		}
		_, err := OpenSQLite(t.Context(), dir, Options{Reserve: -1})
		refused(t, err, sandboxer.Failed, "sandboxer-before-0002.db", "sandboxer backup restore ")
	})
}

// TestRandomDamage flips bytes: either it is noticed, or every record is whole.
func TestRandomDamage(t *testing.T) {
	dir := used(t, 100)
	file := filepath.Join(dir, dbFile)
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	noticed := 0
	for i := range 50 {
		b := bytes.Clone(whole)
		at := (i*len(b)/50 + i*37) % len(b)
		for j := range 16 {
			b[(at+j)%len(b)] ^= 0x5a
		}
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := OpenSQLite(t.Context(), dir, Options{Reserve: -1})
		if err != nil {
			if kind := sandboxer.KindOf(err); kind != sandboxer.Failed {
				t.Errorf("bytes from %d: %v (%s); want failed", at, err, kind)
			}
			noticed++
			continue
		}
		items, _, err := s.Sandboxes(t.Context(), sandboxer.Query{})
		if err == nil && len(items) != 100 {
			t.Errorf("bytes from %d: %d of 100 sandboxes and no error", at, len(items))
		}
		if err != nil {
			noticed++
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d of 50 damages were noticed", noticed)
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// later returns the schema of this program with one more migration.
func later(t *testing.T, migration string) fs.FS {
	t.Helper()
	files := fstest.MapFS{"0900_later.sql": {Data: []byte("-- +goose Up\n" + migration)}}
	entries, err := migrations.ReadDir("migrations/sqlite")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := migrations.ReadFile("migrations/sqlite/" + e.Name())
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = &fstest.MapFile{Data: b}
	}
	return files
}

func TestMigration(t *testing.T) {
	dir := used(t, 3)
	open := func(schema fs.FS) error {
		s, err := openSQLite(t.Context(), dir, Options{Reserve: -1}, schema)
		if err != nil {
			return err
		}
		if _, err := s.Sandbox(t.Context(), "s2"); err != nil {
			t.Error(err)
		}
		return s.Close()
	}
	backup := filepath.Join(dir, "sandboxer-before-0900.db")

	// One that fails leaves everything as it was, and a backup that is complete.
	err := open(later(t, "CREATE TABLE later (n INTEGER);\nINSERT INTO nowhere VALUES (1);"))
	refused(t, err, sandboxer.Failed, dir, backup)
	openTest(t, dir).Close()
	restored := t.TempDir()
	copyFile(t, backup, filepath.Join(restored, dbFile))
	if _, err := openTest(t, restored).Sandbox(t.Context(), "s2"); err != nil {
		t.Errorf("the backup: %v", err)
	}

	for range 2 {
		if err := open(later(t, "CREATE TABLE later (n INTEGER);")); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.new*")); left != nil {
		t.Errorf("left behind: %v", left)
	}

	// The program from before does not touch it.
	_, err = OpenSQLite(t.Context(), dir, Options{Reserve: -1})
	refused(t, err, sandboxer.Failed, dir, "newer sandboxer", "schema 900")
}

// TestUnfinishedCreation starts where a process died while it made the database.
func TestUnfinishedCreation(t *testing.T) {
	dir := t.TempDir()
	for _, suffix := range []string{"", "-wal", "-journal"} {
		if err := os.WriteFile(filepath.Join(dir, newDBFile+suffix), []byte("half a database"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	openTest(t, dir)
	if left, _ := filepath.Glob(filepath.Join(dir, newDBFile+"*")); left != nil {
		t.Errorf("left behind: %v", left)
	}
}

// TestGroup checks that each request of one commit succeeds and fails separately.
func TestGroup(t *testing.T) {
	s := openTest(t, t.TempDir())
	broken := errors.New("broken")
	insert := func(key string, result error) func(*tx) error {
		return func(tx *tx) error {
			if err := tx.putIdempotencyKey(sandboxer.IdempotencyKey{Tenant: "t", Key: key}); err != nil {
				return err
			}
			return result
		}
	}
	requests := []func(*tx) error{insert("a", broken), insert("a", nil), insert("b", broken), insert("a", nil), insert("b", nil)}
	first := requests[0]
	requests[0] = func(tx *tx) error { // the others arrive meanwhile
		for _, do := range requests[1:] {
			s.writer.group = append(s.writer.group, &request{do: do, done: make(chan error, 1)})
		}
		return first(tx)
	}
	var group []*request
	last := requests[4]
	requests[4] = func(tx *tx) error {
		group = slices.Clone(s.writer.group)
		return last(tx)
	}
	if err := s.writer.write(t.Context(), false, requests[0]); !errors.Is(err, broken) {
		t.Errorf("request 0: %v; want broken", err)
	}
	for i, want := range []error{broken, nil, broken, sandboxer.Conflict, nil} {
		if i == 0 {
			continue
		}
		if err := <-group[i].done; !errors.Is(err, want) {
			t.Errorf("request %d: %v; want %v", i, err, want)
		}
	}
	for _, key := range []string{"a", "b"} {
		if _, err := s.IdempotencyKey(t.Context(), "t", key); err != nil {
			t.Errorf("key %s: %v", key, err)
		}
	}
}

// TestTooFull limits the database instead of the disk.
func TestTooFull(t *testing.T) {
	s := openTest(t, t.TempDir())
	limit := func(pages int) {
		err := s.writer.write(t.Context(), false, func(tx *tx) error {
			var n int
			_, err := tx.row(fmt.Sprintf("PRAGMA max_page_count = %d", pages), nil, &n)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	limit(1)
	big := sandboxer.Event{Message: strings.Repeat("x", 1<<20)}
	refused(t, s.Write(t.Context(), sandboxer.Writes{Events: []sandboxer.Event{big}}), sandboxer.Exhausted, "full", "free some space")
	if events, err := s.Events(t.Context(), sandboxer.EventQuery{}); err != nil || len(events) != 0 {
		t.Errorf("events = %v, %v; want none", events, err)
	}
	limit(1 << 20)
	if err := s.Write(t.Context(), sandboxer.Writes{Events: []sandboxer.Event{big}}); err != nil {
		t.Errorf("with room: %v", err)
	}
}

func FuzzCursor(f *testing.F) {
	f.Add(sandboxCursor.encode(1))
	f.Add(entryCursor.encode(1 << 40))
	f.Add("")
	f.Fuzz(func(t *testing.T, s string) {
		seq, err := sandboxCursor.decode(s)
		if err == nil && sandboxCursor.encode(seq) != s {
			t.Errorf("decode(%q) = %d, which is %q", s, seq, sandboxCursor.encode(seq))
		}
		if err != nil && sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("decode(%q): %v; want invalid", s, err)
		}
		if _, other := entryCursor.decode(s); err == nil && other == nil {
			t.Errorf("%q is a cursor of two lists", s)
		}
	})
}

func TestLockedByAnother(t *testing.T) {
	err := wrap(lockedError(t), "write the database")
	refused(t, err, sandboxer.Unavailable, "locked")
}

// lockedError returns what SQLite says when another program holds the database.
func lockedError(t *testing.T) error {
	t.Helper()
	name := filepath.Join(t.TempDir(), "db") + "?_txlock=immediate"
	var dbs [2]*sql.DB
	for i := range dbs {
		db, err := sql.Open("sqlite", name)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		dbs[i] = db
	}
	tx, err := dbs[0].Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	_, err = dbs[1].Exec("CREATE TABLE t (n INTEGER)")
	if err == nil {
		t.Fatal("the second writer was not kept out")
	}
	return err
}

func BenchmarkOpen(b *testing.B) {
	for b.Loop() {
		s, err := OpenSQLite(b.Context(), b.TempDir(), Options{})
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
}
