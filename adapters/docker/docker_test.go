package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

var dockerEngine enginetest.Docker

func TestMain(m *testing.M) {
	code := m.Run()
	dockerEngine.Stop()
	enginetest.StopPodman()
	buildtest.Remove()
	os.Exit(code)
}

// An engine of tests.
type testEngine struct {
	address, image string
}

var engines = map[string]func(t testing.TB) testEngine{
	"docker": func(t testing.TB) testEngine {
		return testEngine{strings.TrimPrefix(dockerEngine.Start(t), "DOCKER_HOST="), "engine:" + enginetest.Image}
	},
	"podman": func(t testing.TB) testEngine {
		return testEngine{enginetest.PodmanSocket(t), "engine:localhost/" + enginetest.Image}
	},
}

// options are what a test opens the adapter with.
type options struct {
	owner, dir string
	config     map[string]any
}

func (en testEngine) options(t testing.TB, owner string) options {
	return options{owner, t.TempDir(), map[string]any{
		"engines": map[string]any{"one": map[string]any{"address": en.address}}, "image": en.image, "agent": buildtest.Program(t, "cmd/sandboxer-agent"),
		"memory": 256 << 20,
	}}
}

func (o options) open(ctx context.Context, log *slog.Logger) (*extension, error) {
	ext, err := Adapter.Open(ctx, sandboxer.Env{Extension: "ext.docker", Owner: o.owner, Dir: o.dir, Notes: notes.New(o.dir, "ext.docker", []byte(o.owner)), Log: log,
		Decode: func(v any) error {
			data, err := json.Marshal(o.config)
			if err != nil {
				return err
			}
			d := json.NewDecoder(bytes.NewReader(data))
			d.DisallowUnknownFields()
			return d.Decode(v)
		}})
	if err != nil {
		return nil, err
	}
	return ext.(*extension), nil
}

func (o options) must(t testing.TB) *extension {
	t.Helper()
	e, err := o.open(t.Context(), slog.New(slog.NewTextHandler(testWriter{t}, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// opened is an extension that is closed when the test ends.
func (o options) opened(t testing.TB) *extension {
	t.Helper()
	e := o.must(t)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) { w.t.Logf("%s", p); return len(p), nil }

func TestConformance(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			o, stranger := en.options(t, "conformance"), en.options(t, "stranger")
			h := extensiontest.Harness{
				Inputs:   Adapter.Inputs,
				Open:     func(t *testing.T) sandboxer.Extension { return o.must(t) },
				Stranger: func(t *testing.T) sandboxer.Extension { return stranger.must(t) },
				Spec:     sandboxer.Spec{Owner: "conformance"},
				Parallel: 3,
				Want:     Adapter.Capabilities,
				Enforces: []extensiontest.Feature{extensiontest.CPU, extensiontest.Memory, extensiontest.PIDs, extensiontest.Network, extensiontest.Hostname, extensiontest.OwnName, extensiontest.Locale, extensiontest.Owned},
				Kill: func(t *testing.T, h sandboxer.Handle) {
					e := o.opened(t)
					b, err := e.find(t.Context(), h)
					if err == nil {
						err = b.host.api.ContainerCall(t.Context(), b.container, "kill")
					}
					if err != nil {
						t.Fatal(err)
					}
					for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
						c, err := b.host.api.InspectContainer(t.Context(), b.container)
						if err == nil && !c.State.Running {
							return
						}
						if time.Now().After(end) {
							t.Fatalf("it survives SIGKILL: %+v, %v", c.State, err)
						}
					}
				},
				Outside: func(t *testing.T) netip.AddrPort { return netip.MustParseAddrPort(outside(t).public + ":7") },
				Connect: func(to netip.AddrPort) []string { return connect(to.String()) },
				Socket:  func(family int) []string { return []string{"/bin/echoer", "socket", fmt.Sprint(family)} },
				Listen:  func(port int) []string { return []string{"/bin/echoer", fmt.Sprintf("127.0.0.1:%d", port)} },
				Bare: func(t *testing.T) sandboxer.Extension {
					bare := o
					bare.dir = t.TempDir()
					return bare.must(t)
				},
			}
			roots := []string{t.TempDir(), t.TempDir()}
			o.config["mounts"] = map[string]any{"roots": []any{map[string]any{"path": roots[0]}, map[string]any{"path": roots[1], "read_only": true}}}
			h.Enforces, h.MountRoot, h.ReadOnlyRoot = append(h.Enforces, extensiontest.Mounts), roots[0], roots[1]
			if name == "docker" {
				h.Hang = func(t *testing.T, _ sandboxer.Handle) func() { return dockerEngine.Hang(t) }
			}
			stays := o.stays(t)
			if name == "podman" && os.Getenv("SANDBOXER_TEST_WHOLE") == "" {
				// Tests that depend on the engine; SANDBOXER_TEST_WHOLE=1 runs the rest, which takes
				// minutes.
				extensiontest.RunGroups(t, h, "core", "exec", "probe", "list", "snapshot", "pause", "network", "notify", "mounts")
			} else {
				extensiontest.Run(t, h)
			}
			stays()
			nothingLeft(t, o)
		})
	}
}

// stays makes a sandbox that exists until end is called: shared objects of sandboxes stay with
// it.
func (o options) stays(t *testing.T) (end func()) {
	t.Helper()
	e := o.must(t)
	spec := sandboxer.Spec{ID: "stays", Generation: 1, Owner: o.owner, Place: e.hosts.Names()[0]}
	if _, err := e.Provision(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	return func() {
		if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: spec.ID}); err != nil {
			t.Error(err)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

// nothingLeft reports the objects on the engines of an extension without a sandbox or a snapshot.
func nothingLeft(t *testing.T, o options) {
	t.Helper()
	e := o.must(t)
	defer e.Close()
	for _, h := range e.hosts {
		e.sweep(t.Context(), h)
		list, err := h.api.ListContainers(t.Context(), e.ours())
		if err != nil || len(list) > 0 {
			t.Errorf("containers are left: %+v, %v", list, err)
		}
		volumes, err := e.volumesOn(t.Context(), h)
		if err != nil || len(volumes) > 0 {
			t.Errorf("volumes are left: %+v, %v", volumes, err)
		}
		for _, what := range []string{"restored", "snapshot"} {
			if images, err := h.api.ListImages(t.Context(), e.repo(what), nil); err != nil || len(images) > 0 {
				t.Errorf("images are left: %+v, %v", images, err)
			}
		}
		dangling, err := h.api.ListImages(t.Context(), "", e.ours())
		if err != nil || len(dangling) > 0 {
			t.Errorf("images without a name are left: %+v, %v", dangling, err)
		}
	}
	keys, err := e.env.Notes.List(t.Context())
	if files, _ := filepath.Glob(e.dir("mount", "*")); err != nil || len(keys)+len(files) > 0 {
		t.Errorf("left over: %q, %q, %v", keys, files, err)
	}
}

// BenchmarkCreate measures a create, its first command, further ones, and a destroy.
func BenchmarkCreate(b *testing.B) {
	for name, start := range engines {
		b.Run(name, func(b *testing.B) {
			o := start(b).options(b, "bench")
			e := o.must(b)
			defer e.Close()
			var took [4]time.Duration
			for i := range b.N {
				spec := sandboxer.Spec{ID: fmt.Sprintf("b%d", i), Generation: 1, Owner: o.owner, Place: "one"}
				began := time.Now()
				lap := func(n int) { now := time.Now(); took[n] += now.Sub(began); began = now }
				h, err := e.Provision(b.Context(), spec)
				if err != nil {
					b.Fatal(err)
				}
				lap(0)
				for n := 1; n <= 2; n++ {
					if x, err := e.Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
						b.Fatal(x, err)
					}
					lap(n)
				}
				if _, err := e.Teardown(b.Context(), h); err != nil {
					b.Fatal(err)
				}
				lap(3)
			}
			for n, what := range []string{"create", "first", "next", "destroy"} {
				b.ReportMetric(float64(took[n].Microseconds())/1000/float64(b.N), what+"-ms")
			}
		})
	}
}
