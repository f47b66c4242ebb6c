package sqlstore

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func files(t *testing.T, dir, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// TestBackup backs up a database that is being written, keeps the newest, and walks the
// way back that docs/how-to/back-up-and-restore.md tells.
func TestBackup(t *testing.T) {
	dir := t.TempDir()
	s := openTest(t, dir)
	if err := s.CreateSandbox(t.Context(), benchSandbox("first"), sandboxer.Writes{}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range 200 {
			if err := s.CreateSandbox(t.Context(), benchSandbox(fmt.Sprint("w", i)), sandboxer.Writes{}); err != nil {
				t.Error(err)
			}
		}
	})
	var last Backup
	for range 5 {
		var err error
		if last, err = BackUp(t.Context(), dir, "", 3); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	if got := files(t, dir, regularPrefix+"*"); len(got) != 3 || got[2] != last.File {
		t.Errorf("kept: %v; want the newest three up to %s", got, last.File)
	}
	if st, err := os.Stat(last.File); err != nil || st.Mode().Perm() != 0o600 || st.Size() != last.Size {
		t.Errorf("the backup: %v, %v; want mode 0600 and %d bytes", st, err, last.Size)
	}
	elsewhere := filepath.Join(t.TempDir(), "copy.db")
	if _, err := BackUp(t.Context(), dir, elsewhere, 3); err != nil {
		t.Fatal(err)
	}
	_, err := BackUp(t.Context(), dir, elsewhere, 3)
	refused(t, err, sandboxer.Conflict, elsewhere, "exists")
	_, err = BackUp(t.Context(), t.TempDir(), "", 3)
	refused(t, err, sandboxer.NotFound, "no database")

	// In use it is not restored.
	_, _, err = Restore(t.Context(), dir, "")
	refused(t, err, sandboxer.Conflict, "in use")
	s.Close()

	// The database breaks; opening says what to type, and that is right.
	overwrite(t, dir, 0, []byte("no database at all")...)
	_, err = OpenSQLite(t.Context(), dir, Options{Reserve: -1})
	refused(t, err, sandboxer.Failed, "sandboxer backup restore --data-dir "+dir+" "+last.File)
	// The newest backup is broken too: the one before it is taken.
	if err := os.WriteFile(last.File, []byte("nor this"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, err = Restore(t.Context(), dir, last.File)
	refused(t, err, sandboxer.Failed, last.File, "damaged")
	from, suffix, err := Restore(t.Context(), dir, "")
	if err != nil || from == last.File || suffix == "" {
		t.Fatalf("Restore = %q, %q, %v", from, suffix, err)
	}
	if kept, err := os.ReadFile(filepath.Join(dir, dbFile+suffix)); err != nil || !strings.HasPrefix(string(kept), "no database") {
		t.Errorf("what stood there is not kept: %v", err)
	}
	s = openTest(t, dir)
	if _, err := s.Sandbox(t.Context(), "first"); err != nil {
		t.Error(err)
	}
	if err := s.CreateSandbox(t.Context(), benchSandbox("after"), sandboxer.Writes{}); err != nil {
		t.Error(err)
	}
	var mode string
	if err := s.readers.QueryRow("PRAGMA journal_mode").Scan(&mode); err != nil || mode != "wal" {
		t.Errorf("journal mode %q, %v; want wal", mode, err)
	}
	s.Close()

	// A crash between moving the old away and putting the new in place.
	if err := os.Rename(filepath.Join(dir, dbFile), filepath.Join(dir, "moved")); err != nil {
		t.Fatal(err)
	}
	_, err = OpenSQLite(t.Context(), dir, Options{Reserve: -1})
	refused(t, err, sandboxer.Failed, "sandboxer backup restore")
	if _, suffix, err = Restore(t.Context(), dir, elsewhere); err != nil || suffix != "" {
		t.Fatalf("Restore again = %q, %v", suffix, err)
	}
	if _, err := openTest(t, dir).Sandbox(t.Context(), "first"); err != nil {
		t.Error(err)
	}
	_, _, err = Restore(t.Context(), t.TempDir(), "")
	refused(t, err, sandboxer.NotFound, "no backup")
}
