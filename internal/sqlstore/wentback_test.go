package sqlstore

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestWentBack has the database be older than it was in every way, and not be.
func TestWentBack(t *testing.T) {
	sandbox := func(id string) (*sandboxer.Sandbox, sandboxer.Writes) {
		sb := benchSandbox(id)
		sb.State = sandboxer.Running
		return sb, sandboxer.Writes{Events: []sandboxer.Event{{At: time.Now(), SandboxID: id, Generation: 1, Tenant: "acme", Type: sandboxer.EventState, To: sandboxer.Creating, Actor: "test"}}}
	}
	add := func(t *testing.T, s *Store, ids ...string) {
		t.Helper()
		for _, id := range ids {
			sb, w := sandbox(id)
			if err := s.CreateSandbox(t.Context(), sb, w); err != nil {
				t.Fatal(err)
			}
		}
	}
	// dead is a copy of a data directory as a killed process leaves it.
	dead := func(t *testing.T, dir string) string {
		t.Helper()
		to := t.TempDir()
		if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		return to
	}
	marked := func(t *testing.T, s *Store) { // until what was committed is marked
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if m, ok := readMark(s.dir); ok && m.position == s.marker.reached.Load() {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("the mark does not follow")
			}
		}
	}
	for _, c := range []struct {
		name string
		do   func(t *testing.T, dir string) string // to a directory where two sandboxes were made
		why  string                                // "": it did not go back
	}{
		{"it is opened again", func(t *testing.T, dir string) string { return dir }, ""},
		{"its process is killed", func(t *testing.T, dir string) string {
			s := openTest(t, dir)
			add(t, s, "c")
			return dead(t, dir)
		}, ""},
		{"its process is killed while it starts", func(t *testing.T, dir string) string {
			m, _ := readMark(dir)
			openTest(t, dir).Close()
			if err := writeMark(dir, m); err != nil {
				t.Fatal(err)
			}
			return dir
		}, ""},
		{"its log is lost", func(t *testing.T, dir string) string {
			s := openTest(t, dir)
			add(t, s, "c")
			marked(t, s)
			dir = dead(t, dir)
			if err := os.Remove(filepath.Join(dir, dbFile+"-wal")); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "it is older than the mark"},
		{"its latest writes are lost", func(t *testing.T, dir string) string {
			s := openTest(t, dir)
			old := dead(t, dir)
			add(t, s, "c", "d")
			marked(t, s)
			m, err := os.ReadFile(filepath.Join(dir, markFile))
			if err == nil {
				err = os.WriteFile(filepath.Join(old, markFile), m, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			return old
		}, "it is older than the mark"},
		{"a copy is put back", func(t *testing.T, dir string) string {
			old, err := os.ReadFile(filepath.Join(dir, dbFile))
			if err != nil {
				t.Fatal(err)
			}
			openTest(t, dir).Close()
			openTest(t, dir).Close()
			if err := os.WriteFile(filepath.Join(dir, dbFile), old, 0o600); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "it is not the one that was used last"},
		{"a backup is restored", func(t *testing.T, dir string) string {
			if _, err := BackUp(t.Context(), dir, "", 1); err != nil {
				t.Fatal(err)
			}
			if _, _, err := Restore(t.Context(), dir, ""); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "it was restored"},
		{"the mark is lost", func(t *testing.T, dir string) string {
			if err := os.Remove(filepath.Join(dir, markFile)); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "the mark is missing"},
		{"the mark is torn", func(t *testing.T, dir string) string {
			if err := os.Truncate(filepath.Join(dir, markFile), 40); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "the mark cannot be read"},
		{"the mark is another", func(t *testing.T, dir string) string {
			file := filepath.Join(dir, markFile)
			b, err := os.ReadFile(file)
			if err == nil {
				b[30] ^= 1
				err = os.WriteFile(file, b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			return dir
		}, "the mark cannot be read"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s := openTest(t, dir)
			if !s.WentBack().IsZero() {
				t.Error("a new database went back")
			}
			add(t, s, "a", "b")
			b, err := s.Sandbox(t.Context(), "b")
			if err != nil {
				t.Fatal(err)
			}
			b.State, b.EndedAt = sandboxer.Terminated, time.Now()
			if err := s.UpdateSandbox(t.Context(), b, sandboxer.Writes{}); err != nil {
				t.Fatal(err)
			}
			pooled, w := sandbox("pooled")
			pooled.Tenant, pooled.Pool, pooled.State = "", "p", sandboxer.Warm
			if err := s.CreateSandbox(t.Context(), pooled, w); err != nil {
				t.Fatal(err)
			}
			s.Close()
			dir = c.do(t, dir)
			var log bytes.Buffer
			for i := range 2 { // what was noticed stays
				s, err = OpenSQLite(t.Context(), dir, Options{Reserve: -1, Log: slog.New(slog.NewTextHandler(&log, nil))})
				if err != nil {
					t.Fatal(err)
				}
				if s.WentBack().IsZero() != (c.why == "") {
					t.Errorf("start %d: went back at %s", i, s.WentBack())
				}
				a, err := s.Sandbox(t.Context(), "a")
				if err != nil || a.UsedAt.Equal(s.WentBack()) != (c.why != "") || a.Unconfirmed != "" {
					t.Errorf("a living record is %+v, %v", a, err)
				}
				if b, err = s.Sandbox(t.Context(), "b"); err != nil || b.Unconfirmed != "" {
					t.Errorf("a record that ended is %+v, %v", b, err)
				}
				if p, err := s.Sandbox(t.Context(), "pooled"); err != nil || (p.Unconfirmed == sandboxer.Claimed) != (c.why != "") {
					t.Errorf("a record of a pool is %+v, %v", p, err)
				}
				events, err := s.Events(t.Context(), sandboxer.EventQuery{})
				told := 0
				for _, ev := range events {
					if ev.Type == sandboxer.EventWarning && strings.Contains(ev.Message, c.why) {
						told++
					}
				}
				if want := strings.Count(log.String(), "went back"); err != nil || (told == 1) != (c.why != "") || want != told {
					t.Errorf("start %d: told %d times in the events, %d times in the log: %v", i, told, want, err)
				}
				add(t, s, fmt.Sprint("new", i))
				if n, err := s.Sandbox(t.Context(), fmt.Sprint("new", i)); err != nil || n.Unconfirmed != "" {
					t.Errorf("a new record is %+v, %v", n, err)
				}
				s.Close()
			}
			s = openTest(t, dir) // it is accepted, and stays so
			if err := s.Write(t.Context(), sandboxer.Writes{WentBackAccepted: true}); err != nil {
				t.Fatal(err)
			}
			s.Close()
			if s = openTest(t, dir); !s.WentBack().IsZero() {
				t.Errorf("it went back at %s, and was accepted", s.WentBack())
			}
		})
	}
}
