package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestPrograms has extensions that are programs of their own live through the command line.
func TestPrograms(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("there is no python3")
	}
	seeds, err := filepath.Abs("../catalog/testdata/seeds")
	if err != nil {
		t.Fatal(err)
	}
	examples, err := filepath.Abs("../../docs/examples")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata/programs",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": cmdCode, "capture": cmdCapture, "freeport": cmdFreePort, "waitfor": cmdWaitFor,
		},
		Setup: func(e *testscript.Env) error {
			home, err := os.MkdirTemp("", "sbx")
			if err != nil {
				return err
			}
			e.Defer(func() {
				stopServer(t, home)
				os.RemoveAll(home)
			})
			for k, v := range map[string]string{
				"SANDBOXER_HOME": home, "SANDBOXER_DATA_DIR": home + "/data", "SANDBOXER_PROGRESS": "none", "TZ": "UTC", "SEEDS": seeds, "EXAMPLES": examples,
			} {
				e.Setenv(k, v)
			}
			return nil
		},
	})
}
