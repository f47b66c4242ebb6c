package sqlstore

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// flipped opens a database whose bytes at the given places are others.
func flipped(t *testing.T, dir string, pristine []byte, change func([]byte)) error {
	t.Helper()
	file := filepath.Join(dir, dbFile)
	data := bytes.Clone(pristine)
	change(data)
	for _, suffix := range []string{"-wal", "-shm"} {
		os.Remove(file + suffix)
	}
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := OpenSQLite(t.Context(), dir, Options{Reserve: -1})
	if err == nil {
		s.Close()
	}
	return err
}

// backedUp returns a directory with a database that has something in it, and a backup.
func backedUp(t *testing.T) (dir string, pristine []byte) {
	t.Helper()
	dir = t.TempDir()
	s, err := OpenSQLite(t.Context(), dir, Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		id := sandboxer.NewID()
		sb := &sandboxer.Sandbox{ID: id, Generation: 1, Tenant: "acme", Profile: "profile.test", Extension: "ext.fake", State: sandboxer.Creating,
			Spec: sandboxer.Spec{ID: id, Generation: 1, Owner: "test"}, CreatedAt: time.Now()}
		w := sandboxer.Writes{
			Events:  []sandboxer.Event{{At: time.Now(), SandboxID: id, Generation: 1, Tenant: "acme", Type: sandboxer.EventState, To: sandboxer.Creating, Actor: "test"}},
			Entries: []sandboxer.Entry{{Key: "grant:" + id, Tenant: "acme", Type: sandboxer.EntryGrant, Amount: 1000, At: time.Now()}},
		}
		if err := s.CreateSandbox(t.Context(), sb, w); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := BackUp(t.Context(), dir, "", 1); err != nil {
		t.Fatal(err)
	}
	pristine, err = os.ReadFile(filepath.Join(dir, dbFile))
	if err != nil {
		t.Fatal(err)
	}
	return dir, pristine
}

// TestDamagedHeader spoils every byte of the header, which says what form the database
// has. However SQLite reacts, the user who starts the server gets the name of the backup.
func TestDamagedHeader(t *testing.T) {
	dir, pristine := backedUp(t)
	for i := range 100 {
		for _, bits := range []byte{0x01, 0xff} {
			err := flipped(t, dir, pristine, func(b []byte) { b[i] ^= bits })
			if err == nil {
				continue // a counter, or a place that nobody reads
			}
			if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), regularPrefix) {
				t.Errorf("byte %d ^ %#x: %s (%s)", i, bits, sandboxer.Message(err), sandboxer.KindOf(err))
			}
		}
	}
}

// TestFlips measures what the check at start finds of single flipped bits.
func TestFlips(t *testing.T) {
	dir, pristine := backedUp(t)
	r := rand.New(rand.NewPCG(1, 2))
	found, n := 0, 40
	for range n {
		err := flipped(t, dir, pristine, func(b []byte) { b[r.IntN(len(b))] ^= 1 << r.IntN(8) })
		if err != nil {
			found++
			if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), regularPrefix) {
				t.Errorf("%s (%s)", sandboxer.Message(err), sandboxer.KindOf(err))
			}
		}
	}
	t.Logf("%d of %d flipped bits were found at start", found, n)
}
