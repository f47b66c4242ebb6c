package fake_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"os/user"
	"strconv"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// The test binary plays more parts: the echo server inside a sandbox, a world in a
// process of its own, and a broker that is killed.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 3 && os.Args[1] == "echo":
		panic(extensiontest.Echo(os.Args[2]))
	case len(os.Args) > 1 && os.Args[1] == "init":
		os.Exit(agent.Main(os.Args[1:]))
	case len(os.Args) == 3 && os.Args[1] == "broker":
		panic(broker(os.Args[2]))
	case len(os.Args) == 4 && os.Args[1] == "world":
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		err := fake.Serve(ctx, fake.ServeOptions{Socket: os.Args[2], Log: os.Args[3], Ready: func() { fmt.Println("ready") }})
		if err != nil {
			panic(err)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// harness is the suite's view of a world.
func harness(t *testing.T, open func(owner string, m mounts.Settings) *fake.Extension) extensiontest.Harness {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := extensiontest.Harness{Inputs: fake.Adapter.Inputs, MountRoot: t.TempDir(), ReadOnlyRoot: t.TempDir(),
		Spec:     sandboxer.Spec{Owner: "conformance", Image: "demo", Inputs: map[string]string{"volume": "data"}},
		Volume:   "../volumes/data",
		Want:     sandboxer.Capabilities(),
		Enforces: []extensiontest.Feature{extensiontest.Owned, extensiontest.Locale},
		Parallel: 4,
		Listen: func(port int) []string {
			return []string{self, "echo", "127.0.0.1:" + strconv.Itoa(port)}
		},
	}
	m := offered(h)
	h.Open = func(*testing.T) sandboxer.Extension { return open("conformance", m) }
	h.Stranger = func(*testing.T) sandboxer.Extension { return open("stranger", m) }
	if canMount(t) {
		h.Enforces = append(h.Enforces, extensiontest.Mounts)
	}
	if os.Getuid() != 0 { // only itself can it be
		me, err := user.Current()
		if err != nil {
			t.Fatal(err)
		}
		h.User = me.Username
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

func TestConformance(t *testing.T) {
	w := fake.NewWorld()
	defer w.Close()
	h := harness(t, func(owner string, m mounts.Settings) *fake.Extension {
		return fake.New(w, fake.Config{Owner: owner, Images: []string{"demo"}, PerHour: sandboxer.Credit, Agent: self(t), Hosts: []string{"one", "two"}, Mounts: m})
	})
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
	extensiontest.Run(t, h)
	if live := w.Live(); len(live) > 0 {
		t.Errorf("left over: %+v", live)
	}
	if faults := fake.Audit(w.Log(), true); len(faults) > 0 {
		t.Errorf("audit: %q", faults)
	}
}
