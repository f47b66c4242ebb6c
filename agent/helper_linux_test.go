package agent

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestMain can run the test binary as the agent itself, so that the tests run it
// as a process of its own, over its real wire.
func TestMain(m *testing.M) {
	switch os.Getenv("AGENT_TEST_RUN") {
	case "1":
		os.Unsetenv("AGENT_TEST_RUN")
		fallthrough
	case "always": // and its own child processes
		os.Exit(Main(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// A running is an agent under test.
type running struct {
	*Client
	t      testing.TB
	cmd    *exec.Cmd
	socket string
	dir    string // its default directory
	stderr *awaited
}

const testToken = "tok-1"

// startAgent runs an agent on a Unix socket with the token, and extra arguments.
func startAgent(t testing.TB, args ...string) *running {
	t.Helper()
	return startAgentWith(t, testToken, args...)
}

func startAgentWith(t testing.TB, token string, args ...string) *running {
	t.Helper()
	dir, err := os.MkdirTemp("", "ag")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	work := filepath.Join(dir, "work")
	if err := os.Mkdir(work, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	r := &running{t: t, socket: filepath.Join(dir, "s"), dir: work, stderr: &awaited{}}
	args = append([]string{"init", "--listen", "unix:" + r.socket, "--workdir", work, "--grace", "1s"}, args...)
	r.cmd = exec.Command(os.Args[0], args...)
	r.cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=1", "GORACE=atexit_sleep_ms=0", envToken+"="+token)
	r.cmd.Stderr = r.stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.stop)
	r.Client = r.client(ClientOptions{Token: token})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := r.WaitReady(ctx); err != nil {
		t.Fatalf("WaitReady: %v\n%s", err, r.stderr)
	}
	return r
}

func (r *running) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", r.socket)
}

func (r *running) client(o ClientOptions) *Client {
	o.Dial = r.dial
	c := NewClient(o)
	r.t.Cleanup(func() { c.Close() })
	return c
}

// stop ends the agent as its sandbox would.
func (r *running) stop() {
	if r.cmd.ProcessState != nil {
		return
	}
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.AfterFunc(15*time.Second, func() { _ = r.cmd.Process.Kill() })
	defer timer.Stop()
	if err := r.cmd.Wait(); err != nil {
		r.t.Errorf("the agent ended with %v\n%s", err, r.stderr)
	}
}

// sh runs a shell command and returns its output.
func (r *running) sh(script string) (stdout, stderr string, x sandboxer.Exit) {
	r.t.Helper()
	var out, errs bytes.Buffer
	x, err := r.Exec(r.t.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: &out, Stderr: &errs})
	if err != nil {
		r.t.Fatalf("Exec(%q): %v", script, err)
	}
	return out.String(), errs.String(), x
}
