package python

import (
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

func TestFS(t *testing.T) {
	if _, err := fs.Stat(FS, Host); err != nil {
		t.Fatal(err)
	}
	// What is on the disk is carried, all of it and nothing else.
	want, got := map[string]bool{}, map[string]bool{}
	err := filepath.WalkDir("sandboxer", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && path.Ext(name) == ".py" {
			want[filepath.ToSlash(name)] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	err = fs.WalkDir(FS, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			got[name] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range want {
		if !got[name] {
			t.Errorf("%s is not carried", name)
		}
	}
	for name := range got {
		if !want[name] {
			t.Errorf("%s is carried and not there", name)
		}
	}
}

// TestPython runs the unit tests of the package.
func TestPython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3 here: ", err)
	}
	if out, err := exec.Command(python, "-c", "import sys; sys.exit(sys.version_info < (3, 9))").CombinedOutput(); err != nil {
		t.Skipf("%s is older than 3.9, or does not run: %v %s", python, err, out)
	}
	cmd := exec.CommandContext(t.Context(), python, "-B", "-m", "unittest", "discover", "-s", "tests", "-t", ".")
	cmd.Env = append(os.Environ(), "PYTHONPATH=.")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Log(strings.TrimSpace(string(out)))
}
