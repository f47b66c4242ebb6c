package vmpacker_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/vmpacker"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// The test binary also runs as the echo server inside a sandbox, and as a broker that
// is killed.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 3 && os.Args[1] == "echo":
		panic(extensiontest.Echo(os.Args[2]))
	case len(os.Args) == 2 && os.Args[1] == "broker":
		if err := broker(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		buildtest.Remove()
		if imageDir != "" {
			os.RemoveAll(imageDir)
		}
		os.Exit(code)
	}))
}

// owner is the owner of this run's machines and builds: another run on the same machine would remove those of the same
// owner.
var owner = "run" + sandboxer.NewID()

// options are what a test opens the adapter with, like a broker; another process gets
// them as JSON.
type options struct {
	Owner, Dir, Hosts string
	Config            map[string]any
	recorded          []sandboxer.Handle // machines in records of sandboxes
}

func (o options) notes() sandboxer.Notes { return notes.New(o.Dir, "ext.vm-packer", []byte(o.Owner)) }

func (o options) open(ctx context.Context) (sandboxer.Extension, error) {
	return vmpacker.Adapter.Open(ctx, sandboxer.Env{
		Extension: "ext.vm-packer", Owner: o.Owner, Dir: o.Dir, Hosts: o.Hosts, Notes: o.notes(),
		Recorded: func(context.Context) ([]sandboxer.Handle, error) { return o.recorded, nil },
		Decode: func(v any) error {
			j, err := json.Marshal(o.Config)
			if err != nil {
				return err
			}
			d := json.NewDecoder(bytes.NewReader(j))
			d.DisallowUnknownFields()
			return d.Decode(v)
		},
	})
}

func (o options) must(t *testing.T) sandboxer.Extension {
	t.Helper()
	e, err := o.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// opened is an extension that is closed when the test ends.
func (o options) opened(t *testing.T) extension {
	t.Helper()
	e := o.must(t).(extension)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// extension is what the adapter's extensions are.
type extension interface {
	sandboxer.Extension
	sandboxer.Placer
	sandboxer.Checker
	sandboxer.Execer
	sandboxer.Dialer
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Pauser
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	Close() error
}

// attachTo configures a machine, called vm, that is the server s.
func attachTo(t *testing.T, s *sshtest.Server, change map[string]any) options {
	t.Helper()
	base := filepath.Join(s.Dir, "build")
	vm := map[string]any{"ssh_target": s.User + "@127.0.0.1", "ssh_port": s.Port, "identity_file": s.Identity, "host_keys": []string{s.HostKey},
		"workspace_dir": base, "capacity": 100}
	for k, v := range change {
		vm[k] = v
	}
	return options{Owner: "conformance", Dir: t.TempDir(), Hosts: t.TempDir(), Config: map[string]any{
		"vms": map[string]any{"vm": vm}, "workspace_dir": base, "agent": buildtest.Program(t, "cmd/sandboxer-agent"),
	}}
}

func TestConformance(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	o := attachTo(t, s, nil)
	stranger := o
	stranger.Owner, stranger.Dir = "stranger", t.TempDir()
	base := filepath.Join(s.Dir, "build")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := extensiontest.Harness{
		Inputs:   vmpacker.Adapter.Inputs,
		Open:     o.must,
		Stranger: stranger.must,
		Spec:     sandboxer.Spec{Owner: "conformance", Inputs: map[string]string{"vm": "vm"}},
		Want: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanDial, sandboxer.CanProbe, sandboxer.CanDiscover,
			sandboxer.CanList, sandboxer.CanCapacity, sandboxer.CanStats, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch},
		Kill: func(t *testing.T, h sandboxer.Handle) {
			if err := os.RemoveAll(filepath.Join(base, "sbx-"+h.SandboxID)); err != nil {
				t.Fatal(err)
			}
		},
		Listen:   func(port int) []string { return []string{self, "echo", "127.0.0.1:" + strconv.Itoa(port)} },
		Parallel: 3,
		Hang:     func(*testing.T, sandboxer.Handle) func() { return s.Hang() },
	}
	if os.Getuid() != 0 {
		h.User = s.User
	}
	// Another user must be able to reach the workspace.
	h.Enforces = []extensiontest.Feature{extensiontest.Owned}
	for _, dir := range []string{filepath.Dir(s.Dir), s.Dir} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	extensiontest.Run(t, h)
	left, _ := filepath.Glob(base + "/sbx-*")
	locks, _ := filepath.Glob(base + "/.sandboxer/*")
	notes, _ := filepath.Glob(o.Dir + "/box/*")
	if left = append(append(left, locks...), notes...); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
	if n := marked("sbx-conformance-"); n != "" {
		t.Errorf("processes left over: %s", n)
	}
}

// marked lists the processes of this machine whose mark begins with prefix what.
func marked(what string) string {
	out, _ := exec.Command("sh", "-c", `grep -lsaF "SANDBOXER_SANDBOX=$1" /proc/[0-9]*/environ`, "sh", what).Output()
	return strings.TrimSpace(string(out))
}

func order(id string, inputs map[string]string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "conformance", Inputs: inputs}
}

// provision makes a sandbox that is torn down when the test ends.
func provision(t *testing.T, e extension, s sandboxer.Spec) sandboxer.Handle {
	t.Helper()
	t.Cleanup(func() {
		c, cancel := contextAfter(t, busy)
		defer cancel()
		if _, err := e.Teardown(c, sandboxer.Handle{SandboxID: s.ID}); err != nil {
			t.Errorf("Teardown(%s): %v", s.ID, err)
		}
	})
	began, last := time.Now(), ""
	ctx := sandboxer.WithProgress(t.Context(), func(p sandboxer.Progress) {
		if p.Step != last {
			last = p.Step
			t.Logf("%s after %s", p.Step, time.Since(began).Round(time.Millisecond))
		}
	})
	h, err := e.Provision(ctx, s)
	if err == nil {
		_, err = e.WaitReady(t.Context(), h)
	}
	if err != nil {
		t.Fatalf("Provision(%s): %v (%s)", s.ID, err, sandboxer.HintOf(err))
	}
	return h
}

// busy is how long to wait for slow work on a busy machine.
const busy = 10 * time.Minute

// await waits until ok.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(busy); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited for %s in vain", what)
		}
	}
}

func run(t *testing.T, e sandboxer.Execer, h sandboxer.Handle, script string) string {
	t.Helper()
	var out, errs bytes.Buffer
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: &out, Stderr: &errs})
	if err != nil || x.Code != 0 {
		t.Fatalf("%s: %+v, %v, %s", script, x, err, &errs)
	}
	return strings.TrimSpace(out.String())
}

func kind(t *testing.T, err error, want sandboxer.Kind, words ...string) {
	t.Helper()
	if sandboxer.KindOf(err) != want {
		t.Errorf("error %v is %q; want %q", err, sandboxer.KindOf(err), want)
		return
	}
	for _, w := range words {
		if !strings.Contains(sandboxer.Message(err)+" "+sandboxer.HintOf(err), w) {
			t.Errorf("%q, %q does not say %q", sandboxer.Message(err), sandboxer.HintOf(err), w)
		}
	}
}

// broker is the test binary as a broker that will be killed: it makes and tears down
// sandboxes until then.
func broker() error {
	var o options
	if err := json.NewDecoder(os.Stdin).Decode(&o); err != nil {
		return err
	}
	ctx := dies(context.Background())
	ext, err := o.open(ctx)
	if err != nil {
		return err
	}
	e := ext.(extension)
	for i := 0; ; i++ {
		s := order(sandboxer.NewID(), map[string]string{"vm": "vm", "repo": o.Dir})
		s.Owner = o.Owner
		if s.Image = os.Getenv("BROKER_IMAGE"); s.Image != "" {
			s.Inputs = map[string]string{"repo": o.Hosts}
		}
		var h sandboxer.Handle
		if snap := os.Getenv("BROKER_SNAPSHOT"); snap != "" {
			h, err = e.RestoreFromSnapshot(ctx, s, sandboxer.Snapshot{SnapshotID: snap})
		} else {
			h, err = e.Provision(ctx, s)
		}
		if err != nil {
			return err
		}
		if _, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "setsid sleep 1000 </dev/null >/dev/null 2>&1 & sleep 1000 </dev/null >/dev/null 2>&1 &"}}); err != nil {
			return err
		}
		if i%2 == 1 {
			if _, err := e.Teardown(ctx, h); err != nil {
				return err
			}
		}
	}
}

func contextFor(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), d)
}

// contextAfter is for work after the end of the test.
func contextAfter(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(t.Context()), d)
}

// dies makes a broker kill itself at a step.
func dies(ctx context.Context) context.Context {
	step := os.Getenv("BROKER_DIES")
	if step == "" {
		return ctx
	}
	return sandboxer.WithProgress(ctx, func(p sandboxer.Progress) {
		if strings.HasPrefix(p.Step, step) {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	})
}
