//go:build linux

package cli

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// TestMoves takes snapshots from one real extension to another, with a program that has
// all of them and the fake.
func TestMoves(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: what an ordinary user may do depends on the kernel's settings")
	}
	bin, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(bin) })
	if err := buildtest.Build(bin, "github.com/sand-boxer/sandboxer/cmd/sandboxer-runner", "github.com/sand-boxer/sandboxer/cmd/sandboxer-agent"); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(bin, 0o755); err != nil { // a sandbox's processes are other users
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", "move"),
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			home, err := os.MkdirTemp("", "sbx")
			if err != nil {
				return err
			}
			e.Defer(func() {
				stopServer(t, home)
				removeHome(t, home)
			})
			e.Setenv("SANDBOXER_HOME", home)
			e.Setenv("SANDBOXER_PROGRESS", "none")
			e.Setenv("TZ", "UTC")
			e.Setenv("GORACE", noRaceSleep)
			e.Setenv("HELPERS", bin)
			return errors.Join(os.Chmod(home, 0o755), os.Mkdir(filepath.Join(home, "extensions"), 0o755), os.Mkdir(filepath.Join(home, "profiles"), 0o755))
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"capture": cmdCapture,
			"waitfor": cmdWaitFor,
			"expand":  cmdExpand,
		},
	})
}
