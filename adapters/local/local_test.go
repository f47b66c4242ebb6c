//go:build linux

package local

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	program "github.com/sand-boxer/sandboxer/extension"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/procs/procstest"
)

// helpers is where TestMain builds the programs that gVisor starts. The test binary
// cannot be one of them: with the race detector it is linked dynamically, and has no
// libraries inside gVisor's empty root.
var helpers string

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == served {
		os.Args = os.Args[:1]
		program.Main(Adapter)
	}
	if dir := os.Getenv("SANDBOXER_TEST_CHURN"); dir != "" {
		churn(dir)
	}
	os.Exit(func() int {
		if dir := os.Getenv("SANDBOXER_TEST_HELPERS"); dir != "" { // we are a child of a test
			helpers = dir
			return m.Run()
		}
		dir, err := os.MkdirTemp("", "sandboxer-local-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		if err := os.Chmod(dir, 0o755); err != nil { // sandboxes read it
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		if err := buildtest.Build(dir, "github.com/sand-boxer/sandboxer/cmd/sandboxer-runner", "github.com/sand-boxer/sandboxer/cmd/sandboxer-agent",
			"github.com/sand-boxer/sandboxer/adapters/local/testdata/tool"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		helpers = dir
		// Parallel tests wait for fuses and deadlines, and do little else.
		flag.Parse()
		if p := flag.Lookup("test.parallel"); p.Value.String() == p.DefValue {
			p.Value.Set("4")
		}
		return m.Run()
	}())
}

// ours is the installation called name of this run of the tests. Control groups have an
// installation's name: another run at the same time must not treat ours as its own. The
// processes that tests start belong to the run, identified by the helpers' directory.
func ours(name string) string {
	return name + "-" + strings.TrimPrefix(filepath.Base(helpers), "sandboxer-local-")
}

// shortDir returns a directory with a short name: gVisor's sockets are in it.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// A failed test's remains must not disturb the next.
		e := &extension{env: sandboxer.Env{Dir: dir}}
		if err := removeSkeletons(e.dir("skel"), e.mounts(), noSkeleton, noSkeleton); err != nil {
			t.Error(err)
		}
		if err := errors.Join(unmountBelow(e.mounts()), os.RemoveAll(filepath.Join(e.mounts(), boxMounts))); err != nil {
			t.Error(err)
		}
		if err := unmountBelow(dir); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func openIn(t testing.TB, dir, owner string, change ...func(*Config)) *extension {
	t.Helper()
	ext, err := Adapter.Open(t.Context(), sandboxer.Env{
		Extension: "ext.local", Owner: owner, Dir: dir, Log: testLog(t),
		Decode: func(v any) error {
			c := v.(*Config)
			c.Runner, c.Agent = filepath.Join(helpers, "sandboxer-runner"), filepath.Join(helpers, "sandboxer-agent")
			c.Paths = []string{helpers} // for the programs that tests run inside
			for _, f := range change {
				f(c)
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return ext.(*extension)
}

func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) { w.t.Logf("%s", p); return len(p), nil }

// needsGVisor skips a test if gVisor cannot run, and says why.
func needsGVisor(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		if err := checkUserNamespaces(); err != nil {
			t.Skipf("gVisor cannot run here: %v", err)
		}
	}
}

func TestConformance(t *testing.T) {
	needsGVisor(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dir := shortDir(t)
	extensiontest.Run(t, harness(t, dir, func(t *testing.T, m Mounts) sandboxer.Extension {
		return openIn(t, dir, ours("conformance"), func(c *Config) { c.Mounts = m })
	}))
}

// harness is the harness of the extension that open opens in dir.
func harness(t *testing.T, dir string, open func(t *testing.T, m Mounts) sandboxer.Extension) extensiontest.Harness {
	t.Helper()
	enforces := []extensiontest.Feature{extensiontest.Disk, extensiontest.Network, extensiontest.Hostname, extensiontest.OwnName, extensiontest.Locale, extensiontest.Owned}
	if findCgroups(ours("conformance")).usable() {
		enforces = append(enforces, extensiontest.CPU, extensiontest.Memory, extensiontest.PIDs)
	}
	mounts := Mounts{Roots: []MountRoot{{Path: t.TempDir()}, {Path: t.TempDir(), ReadOnly: true}}}
	e := openIn(t, dir, ours("conformance"))
	if e.ids != nil && e.ids.why == nil {
		enforces = append(enforces, extensiontest.Mounts)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	return extensiontest.Harness{
		Inputs:    Adapter.Inputs,
		Open:      func(t *testing.T) sandboxer.Extension { return open(t, mounts) },
		MountRoot: mounts.Roots[0].Path, ReadOnlyRoot: mounts.Roots[1].Path,
		Spec:     sandboxer.Spec{Owner: ours("conformance")},
		Want:     Adapter.Capabilities,
		Enforces: enforces,
		Parallel: 3,
		Kill: func(t *testing.T, h sandboxer.Handle) {
			e := openIn(t, dir, ours("conformance"))
			defer e.Close()
			b, err := e.hold(h.Ref)
			if err != nil {
				t.Fatal(err)
			}
			killKernel(t, b)
		},
		Hang: func(t *testing.T, _ sandboxer.Handle) (resume func()) {
			e := openIn(t, dir, ours("conformance"))
			defer e.Close()
			var all []func()
			for _, pids := range processes(t, e) { // kernels and file servers of all sandboxes
				for _, pid := range pids {
					all = append(all, procstest.Stop(t, pid))
				}
			}
			return func() {
				for _, goOn := range all {
					goOn()
				}
			}
		},
		Outside: func(t *testing.T) netip.AddrPort {
			w := outside(t)
			greet(t, w.run, w.host+":7")
			return netip.MustParseAddrPort(w.host + ":7")
		},
		Connect: func(to netip.AddrPort) []string {
			return []string{filepath.Join(helpers, "tool"), "connect", to.String()}
		},
		Socket: func(family int) []string {
			return []string{filepath.Join(helpers, "tool"), "socket", fmt.Sprint(family)}
		},
		Listen: func(port int) []string {
			return []string{filepath.Join(helpers, "tool"), "echo", fmt.Sprintf("127.0.0.1:%d", port)}
		},
	}
}

// killKernel ends the kernel of a sandbox, and returns when it has ended.
func killKernel(t *testing.T, b *liveSandbox) {
	t.Helper()
	if err := unix.Kill(b.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); b.alive(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the sandbox survives SIGKILL")
		}
	}
}
