// Package buildtest builds programs of this module for tests.
package buildtest

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/sand-boxer/sandboxer/"

var programs struct {
	sync.Mutex
	dir   string
	built map[string]error
}

// Program builds the program of the package pkg of this module ("cmd/sandboxer-agent"), or of one that
// it needs ("gvisor.dev/gvisor/runsc"), static and of what make has compiled, once for all tests of a process, and returns its path. The process's TestMain calls Remove at its end.
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
	file := filepath.Join(programs.dir, path.Base(pkg))
	err, done := programs.built[pkg]
	if !done {
		full := module + pkg
		if first, _, _ := strings.Cut(pkg, "/"); strings.Contains(first, ".") {
			full = pkg
		}
		build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", file, full)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, berr := build.CombinedOutput(); berr != nil {
			err = fmt.Errorf("building %s: %w: %s", pkg, berr, out)
		}
		programs.built[pkg] = err
	}
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// Remove removes what was built.
func Remove() {
	programs.Lock()
	defer programs.Unlock()
	if programs.dir != "" {
		os.RemoveAll(programs.dir)
		programs.dir = ""
	}
}
