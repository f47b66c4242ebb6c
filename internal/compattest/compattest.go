// Package compattest checks today's programs against what former ones stored. It has fixtures, the
// data directories of former builds, which scripts/fixture.sh makes, and listings of every
// stored form, which change with each change of that form.
package compattest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"embed"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

//go:embed testdata
var testdata embed.FS

// A Fixture is what the programs of one commit left in a data directory. It was made on
// another machine, so that its sandboxes are gone; of a native snapshot it has only what
// the extension recorded, without memory.
type Fixture struct {
	Name   string `json:"-"`      // time and commit; fixtures are in its order
	Commit string `json:"commit"` // whose programs
	At     string `json:"at"`     // when that was
	Schema int64  `json:"schema"` // of the database
	GVisor string `json:"gvisor"` // version

	// Names of sandboxes and snapshots. All sandboxes that were not destroyed had the same
	// workspace. Of the snapshots, "base" is portable and "memory" native; of the paused
	// sandboxes, "sleeps" is on disk with its memory, and "rests" as files.
	Running   []string `json:"running"`
	Ended     []string `json:"ended"`
	Snapshots []string `json:"snapshots"`
	Paused    []string `json:"paused"`

	Workspace map[string]string `json:"-"` // SHA-256 of each file by its path in the workspace
}

// The parts of an installed fixture.
const (
	DataDir   = "d" // data directory
	ConfigDir = "c" // configuration directory, with the profile of all its sandboxes
)

// Fixtures returns all fixtures, oldest first.
func Fixtures(t testing.TB) []Fixture {
	t.Helper()
	names, err := fs.Glob(testdata, "testdata/*.tar.gz")
	if err != nil || len(names) == 0 {
		t.Fatalf("there are no fixtures: %v", err)
	}
	var all []Fixture
	for _, name := range names {
		f := Fixture{Name: strings.TrimSuffix(path.Base(name), ".tar.gz"), Workspace: map[string]string{}}
		f.each(t, func(h *tar.Header, r io.Reader) error {
			switch path.Clean(h.Name) {
			case "fixture.json":
				return json.NewDecoder(r).Decode(&f)
			case "workspace.sha256":
				data, err := io.ReadAll(r)
				for line := range strings.Lines(string(data)) {
					sum, file, _ := strings.Cut(strings.TrimSpace(line), "  ")
					f.Workspace[path.Clean(file)] = sum
				}
				return err
			}
			return nil
		})
		if f.Commit == "" || f.Schema == 0 || len(f.Workspace) == 0 {
			t.Fatalf("fixture %s does not say what it is", f.Name)
		}
		all = append(all, f)
	}
	return all
}

func (f *Fixture) each(t testing.TB, do func(*tar.Header, io.Reader) error) {
	t.Helper()
	data, err := testdata.ReadFile("testdata/" + f.Name + ".tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatalf("fixture %s: %v", f.Name, err)
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil {
			err = do(h, r)
		}
		if err != nil {
			t.Fatalf("fixture %s: %v", f.Name, err)
		}
	}
}

// Install unpacks the fixture into dir, an existing directory: see DataDir and ConfigDir.
func (f *Fixture) Install(t testing.TB, dir string) {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	f.each(t, func(h *tar.Header, r io.Reader) error {
		name := path.Clean(h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			return root.MkdirAll(name, 0o700)
		case tar.TypeReg:
			data, err := io.ReadAll(r)
			if err != nil {
				return err
			}
			return root.WriteFile(name, data, 0o600)
		}
		return errors.New(h.Name + " is neither a file nor a directory")
	})
}

// Glob returns the files of an installed fixture that match pattern, and fails if none does
// though want says so.
func Glob(t testing.TB, want bool, elem ...string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(elem...))
	if err != nil {
		t.Fatal(err)
	}
	if want && len(found) == 0 {
		t.Fatalf("the fixture has no %s", filepath.Join(elem...))
	}
	return found
}
