package composessh

import (
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// TestCopiedLabels: a container of an image that was made of a service's container has all labels of the sandbox, and compose's. No command gets into it, and
// nothing stops, lists or removes it, or the image; the destroy of the sandbox reports it.
func TestCopiedLabels(t *testing.T) {
	for _, compose := range []string{current(t), "podman-compose"} {
		t.Run(compose, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, compose, 1)
			e := r.opened(t, "copied-"+r.program)
			s := order("copied", repo(t, single, nil))
			h, _ := provision(t, e, s)
			env := r.engines[0]
			ids := strings.Fields(r.engine(t, env, "ps", "-q", "--filter", "label="+engine.LabelName+"="+h.Ref))
			if len(ids) != 1 {
				t.Fatalf("it has %q", ids)
			}
			r.engine(t, env, "commit", ids[0], "precious:1")
			t.Cleanup(func() { r.engine(t, env, "rmi", "-f", "precious:1") })
			id := r.engine(t, env, "run", "-d", "--name", "precious", "--entrypoint", "sleep", "precious:1", "86400")
			t.Cleanup(func() { r.engine(t, env, "rm", "-f", id) })
			lives := func(when string) {
				t.Helper()
				if s := r.engine(t, env, "inspect", "--format", `{{.State.Status}} {{index .Config.Labels "`+engine.LabelName+`"}}`, id); s != "running "+h.Ref {
					t.Errorf("%s the stranger is %q", when, s)
				}
			}
			lives("at first")
			e.forgetSandbox(h.Ref)
			if at := run(t, e, h, "cat /etc/hostname"); strings.HasPrefix(id, at) {
				t.Error("a command got into the stranger")
			}
			if err := e.Pause(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			lives("while the sandbox is paused")
			if err := e.Resume(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			report, err := e.Teardown(t.Context(), h)
			if err != nil || len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], "precious") {
				t.Errorf("Teardown = %+v, %v", report, err)
			}
			lives("after Teardown")
			r.engine(t, env, "image", "inspect", "precious:1")
			if _, err := e.Discover(t.Context(), h.SandboxID); sandboxer.KindOf(err) != sandboxer.NotFound {
				t.Errorf("Discover of a sandbox that is gone: %v", err)
			}
			for l, err := range e.ListRunning(t.Context(), "copied-"+r.program) {
				t.Errorf("ListRunning has %+v, %v", l, err)
			}
		})
	}
}
