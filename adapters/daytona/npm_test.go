package daytona

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSDK drives the fake with the unmodified SDK of Daytona, so that it is not our own misreading.
func TestSDK(t *testing.T) {
	const sdk = "@daytonaio/sdk@0.218.0"
	if os.Getenv("SANDBOXER_TEST_NPM") != "1" {
		t.Skip("set SANDBOXER_TEST_NPM=1 to fetch " + sdk + " with npm and run it")
	}
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(tool + " is not installed")
		}
	}
	w := newWorld(t)
	script, err := filepath.Abs("testdata/sdk.mjs")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	install := exec.CommandContext(t.Context(), "npm", "install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "--cache", filepath.Join(dir, "cache"), sdk)
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		t.Skipf("npm cannot fetch the SDK: %v\n%s", err, out)
	}
	run := exec.CommandContext(t.Context(), "node", script, w.srv.URL+"/api", "key")
	run.Dir, run.Env = dir, append(os.Environ(), "NODE_NO_WARNINGS=1")
	out, err := run.CombinedOutput()
	t.Log(string(out))
	if err != nil || strings.Contains(string(out), "FAIL") || strings.Count("\n"+string(out), "\nok ") != 13 {
		t.Errorf("the SDK was not served as it should be: %v", err)
	}
}
