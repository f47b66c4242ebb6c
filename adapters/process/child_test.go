package process_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/procs/procstest"
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
	h := harness(t)
	open := func(owner string) func(*testing.T) sandboxer.Extension {
		state := t.TempDir()
		return func(t *testing.T) sandboxer.Extension {
			e, err := openProgram(t, state, owner, sandboxer.Program{Command: []string{self(t), "extension"}}, map[string]any{
				"server": socket, "images": []string{"demo"}, "per_hour": sandboxer.Credit, "hosts": []string{"one", "two"}, "agent": self(t),
				"mounts": offered(h),
			})
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
	}
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
		return procstest.Stop(t, cmd.Process.Pid)
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

// Whatever it is asked when it is killed, before it has done anything, after it has and in the middle of a stream: the call
// fails as unavailable, the next one works, and what a repeat makes is there once.
func TestKilledInEveryCall(t *testing.T) {
	socket, _, _, r := startWorld(t)
	t.Setenv("TMPDIR", t.TempDir()) // for what one that is killed leaves there
	dir := t.TempDir()
	e, err := openProgram(t, dir, "o", sandboxer.Program{Command: []string{self(t), "extension"}}, map[string]any{
		"server": socket, "images": []string{"demo"}, "per_hour": sandboxer.Credit, "hosts": []string{"one", "two"}, "agent": self(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	process.NoRest(e)
	b := backend.New("ext.test", e, backend.Options{Close: time.Minute})
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	spec := sandboxer.Spec{ID: "k", Generation: 1, Owner: "o", Place: "one", Image: "demo", Vouched: []string{"image"}}
	unplaced, copied, restored, warm := spec, spec, spec, spec
	unplaced.Place = ""
	copied.ID, restored.ID, warm.ID, warm.Warm = "copy", "restored", "warm", true
	claimed := warm
	claimed.Warm = false
	handle := func(id string) sandboxer.Handle {
		return sandboxer.Handle{SandboxID: id, Generation: 1, Host: "one", Ref: sandboxer.ExternalName("o", id, 1)}
	}
	h := handle("k")
	var snap sandboxer.Snapshot
	var pid int
	var workspace, checkpoint bytes.Buffer // tar files
	port := freePort(t)
	for _, c := range []struct {
		verb fake.Verb
		name string // default verb
		// do is the call. In the middle of its stream it calls mid, which returns when the process was killed there,
		// if it is to be, and says so.
		do     func(ctx context.Context, mid func() bool) error
		stream bool // it has one
		logs   bool // what it does is in the world's log
	}{
		{verb: fake.VerbPlace, do: func(ctx context.Context, _ func() bool) error { return second(b.Place(ctx, unplaced, nil)) }},
		{verb: fake.VerbQuote, do: func(ctx context.Context, _ func() bool) error { return second(b.EstimateCost(ctx, spec, time.Hour)) }},
		{verb: fake.VerbProvision, logs: true, do: func(ctx context.Context, _ func() bool) error { return second(b.Provision(ctx, spec)) }},
		{verb: fake.VerbWaitReady, do: func(ctx context.Context, _ func() bool) error { return second(b.WaitReady(ctx, h)) }},
		{verb: fake.VerbProbe, do: func(ctx context.Context, _ func() bool) error { return second(b.IsAlive(ctx, h)) }},
		{verb: fake.VerbDiscover, do: func(ctx context.Context, _ func() bool) error { return second(b.Discover(ctx, "k")) }},
		{verb: fake.VerbList, do: func(ctx context.Context, _ func() bool) error { return last(b.ListRunning(ctx, "o")) }},
		{verb: fake.VerbNotify, stream: true, do: func(ctx context.Context, mid func() bool) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			news, err := b.Notify(ctx, "o")
			if err != nil {
				return err
			}
			if !mid() {
				return nil
			}
			return last(news)
		}},
		{verb: fake.VerbFiles, name: "write_file", stream: true, do: func(ctx context.Context, mid func() bool) error {
			return b.WriteFile(ctx, h, "/workspace/f", 0o644, io.MultiReader(strings.NewReader(strings.Repeat("x", 1<<20)), &hook{do: mid}))
		}},
		{verb: fake.VerbFiles, name: "read_file", stream: true, do: func(ctx context.Context, mid func() bool) error {
			f, err := b.ReadFile(ctx, h, "/workspace/f")
			if err != nil {
				return err
			}
			defer f.Close()
			if _, err := io.ReadFull(f, make([]byte, 1)); err != nil {
				return err
			}
			mid()
			_, err = io.Copy(io.Discard, f)
			return err
		}},
		{verb: fake.VerbFiles, name: "stat_file", do: func(ctx context.Context, _ func() bool) error { return second(b.StatFile(ctx, h, "/workspace/f")) }},
		{verb: fake.VerbFiles, name: "list_files", do: func(ctx context.Context, _ func() bool) error { return last(b.ListFiles(ctx, h, "/workspace", "")) }},
		{verb: fake.VerbFiles, name: "make_dir", do: func(ctx context.Context, _ func() bool) error { return b.MakeDir(ctx, h, "/workspace/d") }},
		{verb: fake.VerbFiles, name: "move_file", do: func(ctx context.Context, _ func() bool) error {
			err := b.MoveFile(ctx, h, "/workspace/f", "/workspace/g")
			if errors.Is(err, sandboxer.NotFound) { // it was moved before
				return second(b.StatFile(ctx, h, "/workspace/g"))
			}
			return err
		}},
		{verb: fake.VerbFiles, name: "remove_file", do: func(ctx context.Context, _ func() bool) error {
			if err := b.RemoveFile(ctx, h, "/workspace/d"); !errors.Is(err, sandboxer.NotFound) { // it was removed before
				return err
			}
			return nil
		}},
		{verb: fake.VerbExec, stream: true, do: func(ctx context.Context, mid func() bool) error {
			in, out := io.Pipe()
			defer in.Close()
			go func() { // what comes back shows that it runs
				_, _ = out.Write([]byte("x"))
			}()
			_, err := b.Exec(ctx, h, sandboxer.Cmd{Args: []string{"cat"}, Stdin: in, Stdout: &hook{do: func() bool { mid(); out.Close(); return false }}})
			return err
		}},
		{verb: fake.VerbArchive, stream: true, do: func(ctx context.Context, mid func() bool) error {
			workspace.Reset()
			return b.Archive(ctx, h, "", io.MultiWriter(&workspace, &hook{do: mid}))
		}},
		{verb: fake.VerbUnarchive, stream: true, do: func(ctx context.Context, mid func() bool) error {
			return b.Unarchive(ctx, h, "", cut(workspace.Bytes(), mid))
		}},
		{verb: fake.VerbCheckpoint, stream: true, do: func(ctx context.Context, mid func() bool) error {
			checkpoint.Reset()
			return b.Checkpoint(ctx, h, func(sandboxer.Contents) io.Writer { return io.MultiWriter(&checkpoint, &hook{do: mid}) })
		}},
		{verb: fake.VerbProvisionFrom, stream: true, logs: true, do: func(ctx context.Context, mid func() bool) error {
			return second(b.ProvisionFrom(ctx, restored, sandboxer.Contents{}, cut(checkpoint.Bytes(), mid)))
		}},
		{verb: fake.VerbAgent, name: "start_process", do: func(ctx context.Context, _ func() bool) (err error) {
			pid, err = b.StartProcess(ctx, h, sandboxer.ProcessSpec{Args: []string{"sh", "-c", fmt.Sprintf("echo up; exec %s echo 127.0.0.1:%d", self(t), port)}})
			return err
		}},
		{verb: fake.VerbAgent, name: "list_processes", do: func(ctx context.Context, _ func() bool) error { return second(b.ListProcesses(ctx, h)) }},
		{verb: fake.VerbAgent, name: "attach_process", stream: true, do: func(ctx context.Context, mid func() bool) error {
			ctx, detach := context.WithCancel(ctx)
			defer detach()
			stay := false
			_, err := b.AttachProcess(ctx, h, pid, sandboxer.ProcessStreams{Replay: true, Stdout: &hook{do: func() bool {
				if stay = mid(); !stay {
					detach()
				}
				return stay
			}}})
			if ctx.Err() != nil && !stay {
				return nil
			}
			return err
		}},
		{verb: fake.VerbAgent, name: "watch_files", stream: true, do: func(ctx context.Context, mid func() bool) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			var at bytes.Buffer // which the agent of a fake calls otherwise
			if _, err := b.Exec(ctx, h, sandboxer.Cmd{Args: []string{"pwd"}, Stdout: &at}); err != nil {
				return err
			}
			changes, err := b.WatchFiles(ctx, h, strings.TrimSpace(at.String()), true)
			if err != nil || !mid() {
				return err
			}
			return last(changes)
		}},
		{verb: fake.VerbAgent, name: "dial_agent", stream: true, do: func(ctx context.Context, mid func() bool) error {
			c, err := b.DialAgent(ctx, h)
			if err != nil {
				return err
			}
			defer c.Close()
			if mid() {
				_, err = c.Read(make([]byte, 1))
			}
			return broken(err)
		}},
		{verb: fake.VerbDial, stream: true, do: func(ctx context.Context, mid func() bool) error {
			c, err := b.Dial(ctx, h, port)
			if err != nil {
				return err
			}
			defer c.Close()
			mid()
			one := []byte("x")
			if _, err = c.Write(one); err == nil {
				_, err = io.ReadFull(c, one)
			}
			return broken(err)
		}},
		{verb: fake.VerbExpose, do: func(ctx context.Context, _ func() bool) error { return second(b.Expose(ctx, h, port)) }},
		{verb: fake.VerbAgent, name: "signal_process", do: func(ctx context.Context, _ func() bool) error {
			return b.SignalProcess(ctx, h, pid, int(syscall.SIGCONT))
		}},
		{verb: fake.VerbSnapshot, logs: true, do: func(ctx context.Context, _ func() bool) (err error) {
			snap, err = b.Snapshot(ctx, h, "s1")
			return err
		}},
		{verb: fake.VerbRestore, logs: true, do: func(ctx context.Context, _ func() bool) error {
			return second(b.RestoreFromSnapshot(ctx, copied, snap))
		}},
		{verb: fake.VerbListSnapshots, do: func(ctx context.Context, _ func() bool) error { return last(b.ListSnapshots(ctx, "o")) }},
		{verb: fake.VerbDropSnapshot, logs: true, do: func(ctx context.Context, _ func() bool) error { return b.DropSnapshot(ctx, snap) }},
		{verb: fake.VerbPause, logs: true, do: func(ctx context.Context, _ func() bool) error { return b.Pause(ctx, h) }},
		{verb: fake.VerbResume, logs: true, do: func(ctx context.Context, _ func() bool) error { return b.Resume(ctx, h) }},
		{verb: fake.VerbRenew, logs: true, do: func(ctx context.Context, _ func() bool) error { return b.Renew(ctx, h, time.Now().Add(time.Hour)) }},
		{verb: fake.VerbNetwork, logs: true, do: func(ctx context.Context, _ func() bool) error {
			return b.SetNetwork(ctx, h, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkNone})
		}},
		{verb: fake.VerbStats, do: func(ctx context.Context, _ func() bool) error { return second(b.Stats(ctx, h)) }},
		{verb: fake.VerbCapacity, do: func(ctx context.Context, _ func() bool) error { return second(b.Capacity(ctx, "")) }},
		{verb: fake.VerbMeter, do: func(ctx context.Context, _ func() bool) error { return second(b.MeterActual(ctx, h, time.Hour)) }},
		{verb: fake.VerbBasis, do: func(ctx context.Context, _ func() bool) error { return second(b.Basis(ctx, warm)) }},
		{verb: fake.VerbProvision, name: "provision of a warm one", do: func(ctx context.Context, _ func() bool) error { return second(b.Provision(ctx, warm)) }},
		{verb: fake.VerbClaim, logs: true, do: func(ctx context.Context, _ func() bool) error { return second(b.Claim(ctx, handle("warm"), claimed)) }},
		{verb: fake.VerbTeardown, logs: true, do: func(ctx context.Context, _ func() bool) error { return second(b.Teardown(ctx, h)) }},
	} {
		if !t.Run(cmp.Or(c.name, string(c.verb)), func(t *testing.T) {
			// in makes the call until it is where reached says, and kills the process there.
			in := func(reached func() bool, mid func() bool, release func()) {
				t.Helper()
				var there atomic.Bool
				done := make(chan error, 1)
				go func() {
					for {
						err := c.do(t.Context(), mid)
						if sandboxer.KindOf(err) != sandboxer.Unavailable || there.Load() { // else it just starts
							done <- err
							return
						}
					}
				}()
				eventually(t, "the call", func() bool { return reached() || len(done) > 0 })
				there.Store(true)
				for _, pid := range inDir(dir) {
					_ = syscall.Kill(pid, syscall.SIGKILL)
					eventually(t, "the end of the process", func() bool { return !running(pid) })
				}
				release()
				select {
				case err := <-done:
					if sandboxer.KindOf(err) != sandboxer.Unavailable {
						t.Errorf("killed: %v; want unavailable", err)
					}
				case <-time.After(time.Minute):
					t.Fatal("it does not end when its process is killed")
				}
			}
			for _, lost := range []bool{false, true} {
				before, err := r.Log(t.Context())
				if err == nil {
					err = r.Inject(t.Context(), fake.Fault{Verb: c.verb, Hang: true, Lost: lost, Times: 1})
				}
				if err != nil {
					t.Fatal(err)
				}
				in(func() bool {
					log, err := r.Log(t.Context())
					if err != nil {
						return false
					}
					i := slices.IndexFunc(log[len(before):], func(e fake.Entry) bool { return e.Op == fake.OpFault })
					return i >= 0 && (!lost || !c.logs || len(log) > len(before)+i+1)
				}, func() bool { return false }, func() {})
			}
			if c.stream {
				mid, over := make(chan struct{}), make(chan struct{})
				var once sync.Once
				in(func() bool {
					select {
					case <-mid:
						return true
					default:
						return false
					}
				}, func() bool {
					once.Do(func() { close(mid) })
					<-over
					return true
				}, func() { close(over) })
			}
			// What was cut short is asked again until it is done, as the broker does.
			var err error
			for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
				err = c.do(t.Context(), func() bool { return false })
				if err == nil || sandboxer.KindOf(err) != sandboxer.Unavailable || time.Now().After(end) {
					break
				}
			}
			if err != nil {
				t.Errorf("again: %v", err)
			}
		}) {
			break // the next ones need it
		}
	}
	for _, id := range []string{"copy", "restored", "warm"} {
		if _, err := b.Teardown(t.Context(), handle(id)); err != nil {
			t.Error(err)
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

// broken turns the error of a connection, which breaks in its own way, into our error.
func broken(err error) error {
	if err == nil {
		return nil
	}
	return sandboxer.E(sandboxer.Unavailable, err, "the connection broke")
}

// A hook calls do when it is read, or written to, for the first time.
type hook struct {
	do   func() bool
	once sync.Once
}

func (h *hook) Write(p []byte) (int, error) {
	h.once.Do(func() { h.do() })
	return len(p), nil
}

func (h *hook) Read([]byte) (int, error) {
	h.once.Do(func() { h.do() })
	return 0, io.EOF
}

// cut reads data, and calls mid in the middle.
func cut(data []byte, mid func() bool) io.Reader {
	half := len(data) / 2
	return io.MultiReader(bytes.NewReader(data[:half]), &hook{do: mid}, bytes.NewReader(data[half:]))
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// last is the last error of a sequence.
func last[T any](seq iter.Seq2[T, error]) (err error) {
	for _, err = range seq {
	}
	return err
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
