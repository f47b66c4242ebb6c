// Package buildtest builds programs of this module for tests.
package buildtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/filelock"
)

const module = "github.com/sand-boxer/sandboxer"

// Products are the programs of the product.
const Products = module + "/cmd/..."

// top is the directory of this module. Tests of bench, a module of its own that replaces this one by its source, find it too.
var top = sync.OnceValues(func() (string, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return "", fmt.Errorf("go list -m %s: %w", module, err)
	}
	return strings.TrimSpace(string(dir)), nil
})

var programs struct {
	sync.Mutex
	dir   string
	built map[string]error
}

// Program builds the program of the package pkg of this module ("cmd/sandboxer-agent"), or of a module that
// this one needs ("gvisor.dev/gvisor/runsc"), once for all tests of a process, and returns its path. The
// process's TestMain calls Remove at its end.
func Program(t testing.TB, pkg string) string {
	t.Helper()
	programs.Lock()
	defer programs.Unlock()
	if programs.dir == "" {
		dir, err := os.MkdirTemp("", "sandboxer-programs")
		if err != nil {
			t.Fatal(err)
		}
		programs.dir, programs.built = dir, map[string]error{}
	}
	err, done := programs.built[pkg]
	if !done {
		full := module + "/" + pkg
		if first, _, _ := strings.Cut(pkg, "/"); strings.Contains(first, ".") {
			full = pkg
		}
		err = Build(programs.dir, full)
		programs.built[pkg] = err
	}
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(programs.dir, path.Base(pkg))
}

// Remove removes what Program built.
func Remove() {
	programs.Lock()
	defer programs.Unlock()
	if programs.dir != "" {
		os.RemoveAll(programs.dir)
		programs.dir = ""
	}
}

// Build puts the programs of pkgs, which are import paths or patterns, into dir: static, and built with the flags of the
// Makefile, so that its compiled packages are used again. All tests share what is linked, in bin/tests. It calls Reads.
func Build(dir string, pkgs ...string) error {
	in, err := top()
	if err != nil {
		return err
	}
	shared := filepath.Join(in, "bin", "tests")
	// os.MkdirAll would look at the directory first, and go test's cache would then depend on its other programs.
	for _, d := range []string{filepath.Dir(shared), shared} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	l, err := filelock.Take(context.Background(), shared+".lock", filelock.Exclusive)
	if err != nil {
		return err
	}
	defer l.Release()
	env := append(os.Environ(), "CGO_ENABLED=0")
	// It links no program that is there and up to date.
	build := exec.Command("go", append([]string{"build", "-trimpath", "-ldflags=-s -w", "-o", shared + "/"}, pkgs...)...)
	build.Dir, build.Env = in, env
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s: %w\n%s", strings.Join(pkgs, " "), err, out)
	}
	list := exec.Command("go", append([]string{"list", "-f", "{{.ImportPath}}"}, pkgs...)...)
	list.Dir, list.Env = in, env
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list %s: %w", strings.Join(pkgs, " "), err)
	}
	// Copies, because tests may change what they are given. Another process makes them, because go build gives the program a new
	// time even if it is up to date, and go test compares the times of files that this process opens.
	var args []string
	for _, pkg := range strings.Fields(string(out)) {
		args = append(args, filepath.Join(shared, path.Base(pkg)))
	}
	if out, err := exec.Command("cp", append(args, dir)...).CombinedOutput(); err != nil {
		return fmt.Errorf("cp: %w\n%s", err, out)
	}
	return Reads(pkgs...)
}

// Reads makes the result of this test process depend on the sources of pkgs: go test answers from its
// cache unless a file changed that the process itself opened, and it does not see what a compiler or
// another child process read. A test that starts a built program needs Reads or Build.
func Reads(pkgs ...string) error {
	in, err := top()
	if err != nil {
		return err
	}
	list := exec.Command("go", append([]string{"list", "-deps", "-f",
		`{{if .Module}}{{if .Module.Main}}{{.Module.GoMod}}{{"\n"}}{{if ne .Dir .Module.Dir}}{{.Dir}}{{else}}{{range .GoFiles}}{{$.Dir}}/{{.}}{{"\n"}}{{end}}{{end}}{{range .EmbedFiles}}{{"\n"}}{{$.Dir}}/{{.}}{{end}}{{end}}{{end}}`}, pkgs...)...)
	list.Dir, list.Env = in, append(os.Environ(), "CGO_ENABLED=0")
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list %s: %w", strings.Join(pkgs, " "), err)
	}
	// Not the module's own directory, for its times: git and make change .git and bin there. This notices a new file.
	if _, err := os.Stat(in); err != nil {
		return err
	}
	names := strings.Fields(string(out)) // no path of a module has a space
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if err := open(name); err != nil {
			return err
		}
	}
	return nil
}

// ReadsFiles does for the files below dir what Reads does for packages. It leaves out hidden directories
// and bin, where make puts its results.
func ReadsFiles(dir string) error {
	return filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if base := d.Name(); base == "bin" || len(base) > 1 && base[0] == '.' && base != ".." {
			return fs.SkipDir
		}
		return open(name)
	})
}

// open opens name for go test to see. For a directory, go test compares names, sizes and times of its files.
func open(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return f.Close()
}
