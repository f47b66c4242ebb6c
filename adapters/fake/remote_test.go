package fake_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/procs/procstest"
)

// openRemote opens the adapter on a world in another process, as a configuration
// file would.
func openRemote(ctx context.Context, socket, owner string, cfg string) (*fake.Extension, error) {
	ext, err := fake.Adapter.Open(ctx, sandboxer.Env{Owner: owner, Decode: func(v any) error {
		if cfg != "" {
			if err := json.Unmarshal([]byte(cfg), v); err != nil {
				return err
			}
		}
		j, err := json.Marshal(map[string]string{"server": socket})
		if err != nil {
			return err
		}
		return json.Unmarshal(j, v)
	}})
	if err != nil {
		return nil, err
	}
	return ext.(*fake.Extension), nil
}

// worldProcess starts this binary as a world and returns its socket and its log.
func worldProcess(t *testing.T) (socket, log string) {
	t.Helper()
	socket, log, _ = stoppableWorld(t)
	return socket, log
}

// stoppableWorld is worldProcess, with the process.
func stoppableWorld(t *testing.T) (socket, log string, _ *os.Process) {
	t.Helper()
	dir, err := os.MkdirTemp("", "world") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket, log = filepath.Join(dir, "s"), filepath.Join(dir, "log")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "world", socket, log)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
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
	return socket, log, cmd.Process
}

func readLog(t *testing.T, name string) []fake.Entry {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	log, err := fake.ReadLog(f)
	if err != nil {
		t.Fatal(err)
	}
	return log
}

func TestConformanceOfAWorldApart(t *testing.T) {
	socket, log, world := stoppableWorld(t)
	r := fake.Connect(socket)
	defer r.Close()
	h := harness(t, nil)
	roots, err := json.Marshal(offered(h))
	if err != nil {
		t.Fatal(err)
	}
	open := func(owner string) func(*testing.T) sandboxer.Extension {
		return func(t *testing.T) sandboxer.Extension {
			e, err := openRemote(t.Context(), socket, owner, `{"images":["demo"],"per_hour":1000000,"hosts":["one","two"],"agent":"`+self(t)+`","mounts":`+string(roots)+`}`)
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
	}
	h.Open, h.Stranger = open("conformance"), open("stranger")
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
	h.Kill = func(t *testing.T, h sandboxer.Handle) {
		if err := r.Kill(t.Context(), h.SandboxID); err != nil {
			t.Fatal(err)
		}
	}
	h.Hang = func(t *testing.T, _ sandboxer.Handle) func() {
		return procstest.Stop(t, world.Pid)
	}
	extensiontest.RunWire(t, h)
	if faults := fake.Audit(readLog(t, log), true); len(faults) > 0 {
		t.Errorf("audit: %q", faults)
	}
}

// broker is what the test binary does as a broker that will be killed: it provisions
// one sandbox after another and runs a command in each.
func broker(socket string) error {
	ctx := context.Background()
	e, err := openRemote(ctx, socket, "me", "")
	if err != nil {
		return err
	}
	for {
		s := specOf(sandboxer.NewID())
		h, err := e.Provision(ctx, s)
		if err != nil {
			return err
		}
		if _, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "sleep 1000 & sleep 1000 &"}}); err != nil {
			return err
		}
	}
}

func TestTheWorldSurvivesItsBroker(t *testing.T) {
	socket, log := worldProcess(t)
	r := fake.Connect(socket)
	defer r.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "broker", socket)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if live, err := r.Live(t.Context()); err != nil || time.Now().After(end) {
			t.Fatalf("waiting for sandboxes: %d, %v", len(live), err)
		} else if len(live) >= 5 {
			break
		}
	}
	cmd.Process.Kill()
	cmd.Wait()

	live, err := r.Live(t.Context())
	if err != nil || len(live) < 5 {
		t.Fatalf("after the kill: %d sandboxes, %v", len(live), err)
	}
	// The durable log knows exactly these, and it is the same the world tells.
	alive := map[string]int{}
	written := readLog(t, log)
	for _, e := range written {
		if e.Op == fake.OpCreate {
			alive[e.SandboxID] = e.Live
		}
	}
	for _, o := range live {
		if alive[o.Spec.ID] != 1 {
			t.Errorf("the log says %d of %s live", alive[o.Spec.ID], o.Spec.ID)
		}
	}
	told, err := r.Log(t.Context())
	if err != nil || !slices.EqualFunc(told, written, func(a, b fake.Entry) bool { return a.Seq == b.Seq && a.Op == b.Op && a.Ref == b.Ref }) {
		t.Errorf("the world tells %d entries, %v; its file has %d", len(told), err, len(written))
	}

	// The next broker finds and ends all, with the commands of the dead one.
	e, err := openRemote(t.Context(), socket, "me", "")
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for h, err := range e.ListRunning(t.Context(), "me") {
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Errorf("Teardown(%s): %v", h.SandboxID, err)
		}
	}
	for _, o := range live {
		if pids := running(o.Dir); len(pids) > 0 {
			t.Errorf("commands of %s run on: %v", o.Spec.ID, pids)
		}
		if _, err := os.Stat(o.Dir); err == nil {
			t.Errorf("the files of %s are left", o.Spec.ID)
		}
	}
	if faults := fake.Audit(readLog(t, log), true); len(faults) > 0 {
		t.Errorf("audit: %q", faults)
	}
}

// running finds processes by the directory in their environment.
func running(dir string) (pids []string) {
	all, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, name := range all {
		if env, err := os.ReadFile(name); err == nil && strings.Contains(string(env), "SANDBOXER_ROOT="+dir+"\x00") {
			pids = append(pids, filepath.Base(filepath.Dir(name)))
		}
	}
	return pids
}

func TestRemoteFaults(t *testing.T) {
	socket, _ := worldProcess(t)
	r := fake.Connect(socket)
	defer r.Close()
	e, err := openRemote(t.Context(), socket, "me", "")
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if err := r.Inject(t.Context(), fake.Fault{Verb: "nonsense"}); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("Inject of nonsense: %v; want invalid", err)
	}
	if err := r.Inject(t.Context(), fake.Fault{Verb: fake.VerbProvision, Lost: true, Times: 1}, fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Denied}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Provision(t.Context(), specOf("a")); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("Provision: %v; want the lost answer", err)
	}
	if live, err := r.Live(t.Context()); err != nil || len(live) != 1 {
		t.Errorf("%d sandboxes, %v; want one in spite of the lost answer", len(live), err)
	}
	if _, err := e.Teardown(t.Context(), a1); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("Teardown: %v; want denied", err)
	}
	if err := r.Forgive(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := e.Teardown(t.Context(), a1); err != nil {
		t.Errorf("Teardown, all forgiven: %v", err)
	}
}

// A world that stops between a question and the next does not answer, as one that was
// stopped before.
func TestRemoteStopsInBetween(t *testing.T) {
	t.Parallel()
	socket, _, p := stoppableWorld(t)
	e, err := openRemote(t.Context(), socket, "me", `{"faults": [{"verb": "provision", "delay": 1}]}`) // it asks nobody what goes wrong
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	defer procstest.Stop(t, p.Pid)()
	if _, err := e.Provision(t.Context(), specOf("a")); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("Provision: %v; want unavailable", err)
	}
}

// The environment travels to the world, but its secrets not into its log.
func TestRemoteEnv(t *testing.T) {
	socket, log := worldProcess(t)
	e, err := openRemote(t.Context(), socket, "me", "")
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s := specOf("a")
	s.Env = map[string]string{"TOKEN": "canary"}
	h := mustProvision(t, e, s)
	var out bytes.Buffer
	if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo $TOKEN"}, Stdout: &out}); err != nil || out.String() != "canary\n" {
		t.Errorf("echo $TOKEN: %q, %v", out.String(), err)
	}
	if b, err := os.ReadFile(log); err != nil || strings.Contains(string(b), "canary") {
		t.Errorf("the log: %v, %s", err, b)
	}
}

func TestReadLog(t *testing.T) {
	for text, want := range map[string]int{
		"":                                  0,
		"{\"op\":\"create\"}\n":             1,
		"{\"op\":\"create\"}\n{\"op\":\"re": 1, // cut off by a crash
		"{\"op\":\"create\"}\nnonsense\n":   -1,
	} {
		log, err := fake.ReadLog(strings.NewReader(text))
		if want < 0 != (err != nil) || want >= 0 && len(log) != want {
			t.Errorf("ReadLog(%q) = %v, %v; want %d", text, log, err, want)
		}
	}
}

func TestServeErrors(t *testing.T) {
	if err := fake.Serve(t.Context(), fake.ServeOptions{Socket: "/no/such/dir/s"}); err == nil {
		t.Error("Serve on a socket that cannot be: no error")
	}
	if err := fake.Serve(t.Context(), fake.ServeOptions{Socket: "s", Faults: []fake.Fault{{Verb: "x"}}}); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("Serve with a bad fault: %v", err)
	}
}

// self is the test binary, which is also the agent's program.
func self(t *testing.T) string {
	t.Helper()
	name, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return name
}
