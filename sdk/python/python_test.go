package python

import (
	"archive/zip"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// python returns an interpreter, as the broker starts one.
func python(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3")
	}
	if err := buildtest.ReadsFiles("."); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestUnits runs the package's own tests.
func TestUnits(t *testing.T) {
	cmd := exec.Command(python(t), "-W", "error::ResourceWarning", "-m", "unittest", "discover", "-s", "tests")
	cmd.Env = append(os.Environ(), "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestWheel builds the wheel without a network, and uses it.
func TestWheel(t *testing.T) {
	p := python(t)
	dir := t.TempDir()
	out, err := exec.Command(p, "-B", "-c", "import sys; sys.path.insert(0, 'build_backend'); import wheel; print(wheel.build_wheel(sys.argv[1])); wheel.build_sdist(sys.argv[1])", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	name := filepath.Join(dir, strings.TrimSpace(string(out)))
	z, err := zip.OpenReader(name)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	has := map[string]bool{}
	for _, f := range z.File {
		has[f.Name] = true
	}
	// It has what the program carries.
	err = fs.WalkDir(FS, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !has[name] {
			t.Errorf("the wheel lacks %s", name)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	cmd := exec.Command(p, "-I", "-c", "import sys; sys.path.insert(0, sys.argv[1]); from sandboxer.extensions.base import SandboxExtension; import sandboxer.host, sandboxer.conformance, sandboxer.testing", name)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("what is in the wheel cannot be imported: %v\n%s", err, out)
	}
}
