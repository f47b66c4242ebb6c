package process_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"testing"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/extension"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// The test binary plays more parts: what runs inside a sandbox of the fake, and an extension.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 3 && os.Args[1] == "echo":
		panic(extensiontest.Echo(os.Args[2]))
	case len(os.Args) > 1 && os.Args[1] == "init":
		os.Exit(agent.Main(os.Args[1:]))
	case len(os.Args) == 3 && os.Args[1] == "broker":
		broker(os.Args[2])
	case len(os.Args) > 2 && os.Args[1] == "script":
		if err := process.ServeScript(context.Background(), os.Args[2:], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case len(os.Args) == 2 && os.Args[1] == "json": // the other end of a bare round trip
		for in := bufio.NewReader(os.Stdin); ; {
			line, err := in.ReadBytes('\n')
			var v struct{ ID int }
			if err != nil || json.Unmarshal(line, &v) != nil {
				return
			}
			fmt.Printf(`{"id":%d,"result":{"liveness":"alive"}}`+"\n", v.ID)
		}
	case len(os.Args) > 1 && os.Args[1] == "service":
		os.Args = append(os.Args[:1], os.Args[2:]...)
		extension.Main(fake.Adapter)
	case len(os.Args) == 2 && os.Args[1] == "extension":
		os.Args = os.Args[:1]
		extension.Main(fake.Adapter)
	case len(os.Args) == 2 && os.Args[1] == "evil":
		os.Exit(evil())
	case len(os.Args) == 4 && os.Args[1] == "world":
		os.Exit(world(os.Args[2], os.Args[3]))
	case len(os.Args) == 3 && os.Args[1] == "holder":
		os.Exit(holder(os.Args[2]))
	}
	// It spares the second that the race detector otherwise waits at the end of every process.
	os.Setenv("GORACE", "atexit_sleep_ms=0")
	goleak.VerifyTestMain(m)
}

func self(t testing.TB) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// openProgram opens what p says, with a configuration.
func openProgram(t testing.TB, dir, owner string, p sandboxer.Program, config map[string]any) (sandboxer.Extension, error) {
	t.Helper()
	if config == nil {
		config = map[string]any{}
	}
	p.Env = append(p.Env[:len(p.Env):len(p.Env)], "GORACE")
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return process.Adapter.Open(context.WithoutCancel(t.Context()), sandboxer.Env{
		Extension: "ext.test", Owner: owner, Dir: dir, Program: p,
		Config: func(bool) (json.RawMessage, error) { return data, nil },
	})
}

// A service that serves a world of this process: the protocol loses nothing on a socket either.
func TestConformanceOfService(t *testing.T) {
	w := fake.NewWorld()
	defer w.Close()
	a := fake.Adapter
	h := harness(t)
	offered := offered(h)
	a.Open = func(_ context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
		return fake.New(w, fake.Config{Owner: env.Owner, Images: []string{"demo"}, PerHour: sandboxer.Credit, Agent: self(t), Hosts: []string{"one", "two"}, Mounts: offered}), nil
	}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- extension.ServeListener(ctx, a, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	open := func(owner string) func(*testing.T) sandboxer.Extension {
		return func(t *testing.T) sandboxer.Extension {
			e, err := openProgram(t, dir, owner, sandboxer.Program{Connect: "unix:" + socket}, nil)
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
	}
	h.Open, h.Stranger = open("conformance"), open("stranger")
	h.Kill = func(_ *testing.T, h sandboxer.Handle) { w.Kill(h.SandboxID) }
	h.OutOfMemory = func(t *testing.T, h sandboxer.Handle) {
		if err := w.OOMKill(h.SandboxID); err != nil {
			t.Fatal(err)
		}
	}
	h.Hang = func(*testing.T, sandboxer.Handle) func() {
		w.Inject(fake.Fault{Verb: fake.VerbAny, Silent: true})
		return w.Forgive
	}
	h.Hosts = []string{"one", "two"}
	h.Away = func(_ *testing.T, host string) func() {
		w.SetAway(host, true)
		return func() { w.SetAway(host, false) }
	}
	extensiontest.RunWire(t, h)
	if live := w.Live(); len(live) > 0 {
		t.Errorf("left over: %+v", live)
	}
	if faults := fake.Audit(w.Log(), true); len(faults) > 0 {
		t.Errorf("audit: %q", faults)
	}
}

func harness(t *testing.T) extensiontest.Harness {
	t.Helper()
	h := extensiontest.Harness{
		Inputs:       fake.Adapter.Inputs,
		MountRoot:    t.TempDir(),
		ReadOnlyRoot: t.TempDir(),
		Spec:         sandboxer.Spec{Owner: "conformance", Image: "demo", Inputs: map[string]string{"volume": "data"}},
		Volume:       "../volumes/data",
		Want:         sandboxer.Capabilities(),
		Enforces:     []extensiontest.Feature{extensiontest.Owned},
		Parallel:     4,
		Listen: func(port int) []string {
			return []string{self(t), "echo", "127.0.0.1:" + strconv.Itoa(port)}
		},
	}
	h.User = otherUser(t)
	if canMount(t) {
		h.Enforces = append(h.Enforces, extensiontest.Mounts)
	}
	return h
}

// offered are the roots of h.
func offered(h extensiontest.Harness) mounts.Settings {
	return mounts.Settings{Roots: []mounts.Root{{Path: h.MountRoot}, {Path: h.ReadOnlyRoot, ReadOnly: true}}}
}

// canMount reports whether the fake can mount anything here.
func canMount(t *testing.T) bool {
	t.Helper()
	err := fake.CanMount(t.TempDir())
	if err != nil && sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Fatal(err)
	}
	return err == nil
}

// otherUser returns who else commands can run as; "" for the suite's own choice.
func otherUser(t *testing.T) string {
	t.Helper()
	if os.Getuid() == 0 {
		return ""
	}
	me, err := user.Current() // only itself can it be
	if err != nil {
		t.Fatal(err)
	}
	return me.Username
}

// openSecret opens p with a configuration that has one secret, "key": that of the variable HUSH.
func openSecret(t testing.TB, dir string, p sandboxer.Program) (sandboxer.Extension, error) {
	t.Helper()
	return process.Adapter.Open(context.WithoutCancel(t.Context()), sandboxer.Env{
		Extension: "ext.test", Owner: "o", Dir: dir, Program: p,
		Config: func(secrets bool) (json.RawMessage, error) {
			if secrets {
				return json.Marshal(map[string]string{"key": os.Getenv("HUSH")})
			}
			return json.RawMessage(`{"key": "${env:HUSH}"}`), nil
		},
	})
}
