package agent

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestE2BSDK drives an agent with the unmodified SDK of E2B.
func TestE2BSDK(t *testing.T) {
	const version = "2.51.0"
	if os.Getenv("SANDBOXER_TEST_NPM") != "1" {
		t.Skip("set SANDBOXER_TEST_NPM=1 to fetch e2b@" + version + " with npm and run it")
	}
	for _, tool := range []string{"node", "npm", "bash"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(tool + " is not installed")
		}
	}
	l, err := net.Listen("tcp", DefaultAddress) // the SDK's debug mode has no other address
	for end := time.Now().Add(time.Minute); err != nil && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		l, err = net.Listen("tcp", DefaultAddress) // any process may get this port from the kernel
	}
	if err != nil {
		t.Skip("the agent's port is in use: ", err)
	}
	l.Close()
	script, err := filepath.Abs("testdata/e2b.mjs")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run := func(env []string, name string, args ...string) string {
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s %q: %v", name, args, err)
		}
		return string(out)
	}
	install := exec.CommandContext(t.Context(), "npm", "install", "--no-save", "--no-audit", "--no-fund", "--cache", filepath.Join(dir, "cache"), "e2b@"+version)
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		t.Skipf("npm cannot fetch the SDK: %v\n%s", err, out)
	}
	a := startAgentWith(t, "", "--listen", DefaultAddress) // without a control plane the SDK has no token
	out := run([]string{"E2B_DEBUG=true", "E2B_API_KEY=e2b_0000000000000000000000000000000000000000", "NODE_NO_WARNINGS=1"}, "node", script, a.dir)
	t.Log(out)
	if strings.Contains(out, "FAIL") || strings.Count("\n"+out, "\nok ") != 15 {
		t.Error("the SDK was not served as it should be")
	}
}
