package wholefile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestWrite replaces a file, fails where it cannot, and leaves nothing else. What a writer that
// died left is removed when it is old enough to be one's who died.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "file")
	for _, want := range []string{"one", "another"} {
		if err := Write(name, []byte(want)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("it has %q, %v; want %q", got, err, want)
		}
		if fi, err := os.Stat(name); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("its mode is %v, %v", fi.Mode(), err)
		}
	}
	if err := Replace(name, []byte("a third")); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(name); err != nil || string(got) != "a third" {
		t.Errorf("replaced, it has %q, %v", got, err)
	}
	occupied := filepath.Join(dir, "directory")
	if err := os.Mkdir(occupied, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, write := range []func(string, []byte) error{Write, Replace} {
		if err := write(occupied, []byte("x")); err == nil {
			t.Error("a directory was replaced by a file")
		}
	}
	names := func() (out []string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range entries {
			out = append(out, d.Name())
		}
		return out
	}
	if got := names(); len(got) != 2 {
		t.Errorf("there are %v", got)
	}
	for _, n := range []string{".new-old", ".new-young", "old"} {
		p := filepath.Join(dir, n)
		if err := os.WriteFile(p, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if n != ".new-young" {
			then := time.Now().Add(-2 * age)
			if err := os.Chtimes(p, then, then); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := Sweep(dir); err != nil {
		t.Fatal(err)
	}
	if got := names(); len(got) != 4 || got[0] != ".new-young" {
		t.Errorf("after a sweep there are %v", got)
	}
	if err := Sweep(filepath.Join(dir, "nowhere")); err != nil {
		t.Errorf("a directory that is not there: %v", err)
	}
}

// TestPublish moves a finished file as it is, and nothing where there is none.
func TestPublish(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	for _, n := range []string{from, to} {
		if err := os.WriteFile(n, []byte(n), 0o400); err != nil {
			t.Fatal(err)
		}
	}
	if err := Publish(from, to); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(to); err != nil || string(got) != from {
		t.Errorf("there is %q, %v", got, err)
	}
	if fi, err := os.Stat(to); err != nil || fi.Mode().Perm() != 0o400 {
		t.Errorf("its mode is %v, %v", fi.Mode(), err)
	}
	if err := Publish(from, to); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of nothing: %v", err)
	}
	if got, err := os.ReadFile(to); err != nil || string(got) != from {
		t.Errorf("of nothing, there is %q, %v", got, err)
	}
	if err := SyncDir(filepath.Join(dir, "nowhere")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
}
