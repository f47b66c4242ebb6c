//go:build linux

package e2b

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
)

// envdVar names the variable with the path of the vendor's own daemon.
const envdVar = "SANDBOXER_TEST_ENVD"

// TestVendorsDaemon runs what the daemon of a sandbox does against the vendor's own program, envd, and not our agent. It is run
// by hand, and fails in what docs/reference/e2b.md lists as what the provider cannot do.
func TestVendorsDaemon(t *testing.T) {
	program := os.Getenv(envdVar)
	if program == "" {
		t.Skipf("%s=PATH runs it, as root, with a build of envd from the vendor's repository", envdVar)
	}
	p, dir := newPlane(t), t.TempDir()
	p.daemon = func(b *box) (string, func(), error) { return startEnvd(t, program, b) }
	extensiontest.RunGroups(t, extensiontest.Harness{
		Open:   func(t *testing.T) sandboxer.Extension { return p.opens(t, "conformance", dir, `,"settle":0`) },
		Inputs: []sandboxer.Input{},
		Want:   Adapter.Capabilities,
	}, "exec", "files", "archive", "processes", "watch")
}

// startEnvd starts envd for a sandbox, with processes and a home of its own, and tells it what the service would.
func startEnvd(t *testing.T, program string, b *box) (addr string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	addr = l.Addr().String()
	l.Close()
	_, port, _ := net.SplitHostPort(addr)
	cmd := exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
		`mkdir -p /home/user && mount -t tmpfs tmpfs /home/user && mount -t tmpfs tmpfs /run && exec "$@"`, "sh",
		program, "-isnotfc", "-no-cgroups", "-port", port)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Stderr = t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	stop = func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	body, _ := json.Marshal(map[string]any{"accessToken": b.token, "envVars": b.EnvVars, "defaultUser": "root", "defaultWorkdir": "/home/user"})
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		res, err := http.Post("http://"+addr+"/init", "application/json", bytes.NewReader(body))
		if err == nil {
			res.Body.Close()
			if res.StatusCode/100 == 2 {
				return addr, stop, nil
			}
			err = fmt.Errorf("init: %s", res.Status)
		}
		if time.Now().After(end) || !strings.Contains(err.Error(), "refused") {
			stop()
			return "", nil, err
		}
	}
}
