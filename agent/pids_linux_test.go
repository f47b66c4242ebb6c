package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// pidsGroup makes a control group, and returns its directory and what sets its limit of processes.
func pidsGroup(t *testing.T) (dir string, limit func(n int)) {
	t.Helper()
	parent := "/sys/fs/cgroup/pids"
	if b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil && strings.Contains(string(b), "pids") {
		parent = "/sys/fs/cgroup"
	}
	dir = filepath.Join(parent, fmt.Sprintf("sbx-agent-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("no control groups can be made here: %v", err)
	}
	t.Cleanup(func() {
		eventually(t, "the control group stays", func() bool { return os.Remove(dir) == nil })
	})
	if err := os.WriteFile(filepath.Join(dir, "pids.max"), []byte("32"), 0o600); err != nil {
		t.Skipf("control groups cannot be bounded here: %v", err)
	}
	return dir, func(n int) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "pids.max"), fmt.Append(nil, n), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFullOfProcesses: the limit of processes of a container holds for the agent, and for what
// leads to it, as for what it started. Both live on and serve while there is no room for a single
// thread more.
func TestFullOfProcesses(t *testing.T) {
	group, limit := pidsGroup(t)
	p := abstract(t)
	run := func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(group, "cgroup.procs"), p.program}, args...)...)
		cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=always", "GORACE=atexit_sleep_ms=0")
		cmd.Stdout, cmd.Stderr = out, errs
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		feed, err := cmd.StdinPipe()
		if err != nil {
			return sandboxer.Exit{}, err
		}
		go func() { _, _ = io.Copy(feed, in); feed.Close() }()
		err = cmd.Run()
		if x := (*exec.ExitError)(nil); errors.As(err, &x) {
			err = nil
		}
		return sandboxer.Exit{Code: cmd.ProcessState.ExitCode()}, err
	}
	attached := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		return DialCommand(ctx, run, "attach", "--socket", p.socket)
	}})
	t.Cleanup(func() { attached.Close() })
	ctx := t.Context()
	if _, err := attached.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		t.Fatal(err)
	}
	agent := p.agent()
	direct := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", p.socket)
	}})
	t.Cleanup(func() { direct.Close() })

	limit(0)
	dir := t.TempDir()
	content := strings.Repeat("x", 256<<10)
	call := func(c *Client, dir string) error {
		name := filepath.Join(dir, "f")
		if err := c.WriteFile(ctx, name, 0o644, strings.NewReader(content)); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		f, err := c.ReadFile(ctx, name)
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		got, err := io.ReadAll(f)
		f.Close()
		if err != nil || string(got) != content {
			return fmt.Errorf("read: %d bytes, %w", len(got), err)
		}
		if _, err := c.Stats(ctx); err != nil {
			return fmt.Errorf("stats: %w", err)
		}
		for _, err := range c.ListFiles(ctx, dir, "") {
			if err != nil {
				return fmt.Errorf("list: %w", err)
			}
		}
		if err := c.Archive(ctx, dir, io.Discard); err != nil {
			return fmt.Errorf("archive: %w", err)
		}
		if _, err := c.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}}); sandboxer.KindOf(err) != sandboxer.Exhausted {
			return fmt.Errorf("exec: %w; want exhausted", err)
		}
		return nil
	}
	for i := range 5 {
		if err := call(attached, filepath.Join(dir, "attached")); err != nil {
			t.Fatalf("by way of attach, %d: %v", i, err)
		}
	}
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			for j := range 3 {
				if err := call(direct, filepath.Join(dir, fmt.Sprint(i))); err != nil {
					t.Errorf("%d of 50, %d: %v", i, j, err)
					return
				}
			}
			w, err := direct.Watch(ctx, dir, true) // a call that ends its connection
			if err != nil {
				t.Errorf("%d of 50, watch: %v", i, err)
				return
			}
			w.Close()
		})
	}
	all.Wait()
	stranded := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		return DialCommand(ctx, run, "attach", "--socket", p.socket)
	}})
	defer stranded.Close()
	if err := stranded.Health(ctx); sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("by way of another attach: %v; want exhausted", err)
	}
	limit(32)
	if _, err := attached.Exec(ctx, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		t.Errorf("with room: %v", err)
	}
	if pid := p.agent(); pid != agent {
		t.Errorf("the agent is %d; want %d, which it was", pid, agent)
	}
}
