package process_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/extensiontest"
)

// world is the test binary as a world of the fake, in a process of its own.
func world(socket, log string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	err := fake.Serve(ctx, fake.ServeOptions{Socket: socket, Log: log, Ready: func() { os.Stdout.WriteString("ready\n") }})
	if err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		return 1
	}
	return 0
}

// The fake as a child of the broker, with a world in a third process, passes the whole suite over standard input and output.
func TestConformanceOfChild(t *testing.T) {
	dir, err := os.MkdirTemp("", "world") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket, log := filepath.Join(dir, "s"), filepath.Join(dir, "log")
	cmd := exec.Command(self(t), "world", socket, log)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the world ended with %v", err)
		}
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("the world says %q, %v", line, err)
	}
	r := fake.Connect(socket)
	defer r.Close()
	open := func(owner string) func(*testing.T) sandboxer.Extension {
		state := t.TempDir()
		return func(t *testing.T) sandboxer.Extension {
			e, err := openProgram(t, state, owner, sandboxer.Program{Command: []string{self(t), "extension"}}, map[string]any{
				"server": socket, "images": []string{"demo"}, "per_hour": sandboxer.Credit, "hosts": []string{"one", "two"}, "agent": self(t),
			})
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
	}
	h := harness(t)
	h.Open, h.Stranger = open("conformance"), open("stranger")
	h.Kill = func(t *testing.T, h sandboxer.Handle) {
		if err := r.Kill(t.Context(), h.SandboxID); err != nil {
			t.Fatal(err)
		}
	}
	h.OutOfMemory = func(t *testing.T, h sandboxer.Handle) {
		if err := r.OOMKill(t.Context(), h.SandboxID); err != nil {
			t.Fatal(err)
		}
	}
	h.Hosts = []string{"one", "two"}
	h.Away = func(t *testing.T, host string) func() {
		set := func(away bool) {
			if err := r.SetAway(context.WithoutCancel(t.Context()), host, away); err != nil {
				t.Error(err)
			}
		}
		set(true)
		return func() { set(false) }
	}
	h.Hang = func(t *testing.T, _ sandboxer.Handle) func() {
		send := func(s syscall.Signal) {
			if err := cmd.Process.Signal(s); err != nil {
				t.Error(err)
			}
		}
		send(syscall.SIGSTOP)
		return func() { send(syscall.SIGCONT) }
	}
	extensiontest.Run(t, h)
	f, err := os.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	entries, err := fake.ReadLog(f)
	if err != nil {
		t.Fatal(err)
	}
	if faults := fake.Audit(entries, true); len(faults) > 0 {
		t.Errorf("audit: %q", faults)
	}
}
