package docker

import (
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// TestGVisor: a runtime of the engine that is gVisor provides the isolation of that name, and another does not,
// whatever its name.
func TestGVisor(t *testing.T) {
	en := engines["docker"](t)
	dockerEngine.GVisor(t, buildtest.Program(t, "gvisor.dev/gvisor/runsc"))
	gvisor := func(s *sandboxer.Spec) { s.Profile.Isolation = sandboxer.IsolationGVisor }
	o := en.options(t, "gvisor")
	o.config["runtime"] = "runsc"
	e := o.opened(t)
	if !slices.Contains(e.Without(), sandboxer.CanSnapshot) {
		t.Error("an image of its containers is offered as a snapshot")
	}
	h := up(t, e, order("inside", o, gvisor))
	if got := run(t, e, h, "dmesg"); !strings.Contains(got, "gVisor") {
		t.Errorf("the kernel inside says %q", got)
	}
	if err := e.WriteFile(t.Context(), h, "/workspace/f", 0o644, strings.NewReader("text")); err != nil {
		t.Fatal(err)
	}
	if err := e.Pause(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if err := e.Resume(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if got := run(t, e, h, "cat /workspace/f"); got != "text" {
		t.Errorf("after a pause the file has %q", got)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}

	for runtime, want := range map[string]string{"runc": "does not give it", "other": `no runtime "other"`, "": "runtime: runsc"} {
		o := en.options(t, "gvisor")
		o.config["runtime"] = runtime
		e := o.opened(t)
		_, err := e.Provision(t.Context(), order("none", o, gvisor))
		wantKind(t, err, sandboxer.Unsupported, want)
		if l, err := e.IsAlive(t.Context(), sandboxer.Handle{SandboxID: "none", Generation: 1}); l != sandboxer.Gone || err != nil {
			t.Errorf("after a refusal it is %s, %v", l, err)
		}
	}
	// Podman's service would ignore the runtime without an error.
	wantKind(t, (&extension{cfg: Config{Runtime: "runsc"}}).hasRuntime(&host{name: "one"}, engine.Info{Podman: true}), sandboxer.Unsupported, "Podman")
}
