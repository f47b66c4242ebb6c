package process_test

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/backend"
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

// startWorld starts a world in a process of its own, which ends with the test.
func startWorld(t *testing.T) (socket, log string, cmd *exec.Cmd, r *fake.Remote) {
	t.Helper()
	dir, err := os.MkdirTemp("", "world") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket = filepath.Join(dir, "s")
	log = filepath.Join(dir, "log")
	cmd = exec.Command(self(t), "world", socket, log)
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
	r = fake.Connect(socket)
	t.Cleanup(func() { r.Close() })
	return socket, log, cmd, r
}

// The fake as a child of the broker, with a world in a third process, passes the whole suite over standard input and output.
func TestConformanceOfChild(t *testing.T) {
	socket, log, cmd, r := startWorld(t)
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

// Whatever it is asked when it is killed: the call fails as unavailable or was done, the next one works, and
// what a repeat makes is there once.
func TestKilledInEveryCall(t *testing.T) {
	socket, _, _, r := startWorld(t)
	dir := t.TempDir()
	e, err := openProgram(t, dir, "o", sandboxer.Program{Command: []string{self(t), "extension"}}, map[string]any{"server": socket, "images": []string{"demo"}})
	if err != nil {
		t.Fatal(err)
	}
	process.NoRest(e)
	b := backend.New("ext.test", e, backend.Options{})
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	spec := sandboxer.Spec{ID: "k", Generation: 1, Owner: "o", Place: "localhost", Image: "demo", Vouched: []string{"image"}}
	other := spec
	other.ID = "copy"
	h := sandboxer.Handle{SandboxID: "k", Generation: 1}
	var snap sandboxer.Snapshot
	calls := []struct {
		name string
		do   func(ctx context.Context) error
	}{
		{"provision", func(ctx context.Context) error { got, err := b.Provision(ctx, spec); h = or(got, err, h); return err }},
		{"wait_ready", func(ctx context.Context) error { _, err := b.WaitReady(ctx, h); return err }},
		{"is_alive", func(ctx context.Context) error { _, err := b.IsAlive(ctx, h); return err }},
		{"discover", func(ctx context.Context) error { _, err := b.Discover(ctx, "k"); return err }},
		{"list_running", func(ctx context.Context) (err error) {
			for _, err = range b.ListRunning(ctx, "o") {
			}
			return err
		}},
		{"write_file", func(ctx context.Context) error {
			return b.WriteFile(ctx, h, "/workspace/f", 0o644, strings.NewReader(strings.Repeat("x", 1<<20)))
		}},
		{"read_file", func(ctx context.Context) error {
			f, err := b.ReadFile(ctx, h, "/workspace/f")
			if err == nil {
				_, err = io.Copy(io.Discard, f)
				f.Close()
			}
			return err
		}},
		{"stat_file", func(ctx context.Context) error { _, err := b.StatFile(ctx, h, "/workspace/f"); return err }},
		{"list_files", func(ctx context.Context) (err error) {
			for _, err = range b.ListFiles(ctx, h, "/workspace", "") {
			}
			return err
		}},
		{"exec", func(ctx context.Context) error {
			_, err := b.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "cat; sleep 0.01"}, Stdin: strings.NewReader(strings.Repeat("y", 1<<20)), Stdout: io.Discard})
			return err
		}},
		{"archive", func(ctx context.Context) error { return b.Archive(ctx, h, "", io.Discard) }},
		{"snapshot", func(ctx context.Context) error {
			got, err := b.Snapshot(ctx, h, "s1")
			snap = or(got, err, snap)
			return err
		}},
		{"restore", func(ctx context.Context) error { return second(b.RestoreFromSnapshot(ctx, other, snap)) }},
		{"list_snapshots", func(ctx context.Context) (err error) {
			for _, err = range b.ListSnapshots(ctx, "o") {
			}
			return err
		}},
		{"drop_snapshot", func(ctx context.Context) error { return b.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: "s1"}) }},
		{"pause", func(ctx context.Context) error { return b.Pause(ctx, h) }},
		{"resume", func(ctx context.Context) error { return b.Resume(ctx, h) }},
		{"renew", func(ctx context.Context) error { return b.Renew(ctx, h, time.Now().Add(time.Hour)) }},
		{"stats", func(ctx context.Context) error { return second(b.Stats(ctx, h)) }},
		{"capacity", func(ctx context.Context) error { return second(b.Capacity(ctx, "")) }},
		{"meter", func(ctx context.Context) error { return second(b.MeterActual(ctx, h, time.Hour)) }},
		{"teardown of the copy", func(ctx context.Context) error {
			return second(b.Teardown(ctx, sandboxer.Handle{SandboxID: "copy", Generation: 1}))
		}},
		{"teardown", func(ctx context.Context) error { return second(b.Teardown(ctx, h)) }},
	}
	for _, c := range calls {
		for i := range 4 {
			done := make(chan error, 1)
			go func() { done <- c.do(t.Context()) }()
			time.Sleep(time.Duration(i) * 700 * time.Microsecond)
			for _, pid := range inDir(dir) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			select {
			case err := <-done:
				if err != nil && sandboxer.KindOf(err) != sandboxer.Unavailable {
					t.Errorf("%s, killed: %s: %v", c.name, sandboxer.KindOf(err), err)
				}
			case <-time.After(time.Minute):
				t.Fatalf("%s does not end when its process is killed", c.name)
			}
		}
		// What was cut short is asked again until it is done, as the broker does.
		var err error
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if err = c.do(t.Context()); err == nil || sandboxer.KindOf(err) != sandboxer.Unavailable || time.Now().After(end) {
				break
			}
		}
		if err != nil {
			t.Errorf("%s, again: %v", c.name, err)
		}
	}
	if live, err := r.Live(t.Context()); err != nil || len(live) > 0 {
		t.Errorf("left over: %+v, %v", live, err)
	}
	log, err := r.Log(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if faults := fake.Audit(log, true); len(faults) > 0 {
		t.Errorf("audit: %q", faults)
	}
}

// or is got, or what it was before an error.
func or[T any](got T, err error, before T) T {
	if err != nil {
		return before
	}
	return got
}

func second[T any](_ T, err error) error { return err }

// inDir returns the processes whose directory is dir.
func inDir(dir string) (pids []int) {
	names, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, name := range names {
		if at, err := os.Readlink(name); err == nil && at == dir {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
