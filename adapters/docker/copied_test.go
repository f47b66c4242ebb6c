package docker

import (
	"context"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// TestCopiedLabels: a user makes an image of a sandbox's container, and a container of that image, which has all labels of the sandbox. No command enters it, it is
// not listed or reported, and nothing removes it; a destroy of the sandbox reports it.
func TestCopiedLabels(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "copied")
			e := o.opened(t)
			h := up(t, e, order("copied", o))
			ours, err := e.find(t.Context(), h)
			if err != nil {
				t.Fatal(err)
			}
			api := ours.host.api
			en.raw(t, "POST", "/commit?repo=localhost/copied&tag=1&container="+ours.container, "{}")
			defer api.RemoveImage(context.WithoutCancel(t.Context()), "localhost/copied:1")
			id, err := api.CreateContainer(t.Context(), "precious-"+name, engine.ContainerConfig{Image: "localhost/copied:1", Env: []string{}, Entrypoint: []string{"sleep"}, Cmd: []string{"1d"}})
			if err != nil {
				t.Fatal(err)
			}
			defer api.RemoveContainer(context.WithoutCancel(t.Context()), id)
			if err := api.ContainerCall(t.Context(), id, "start"); err != nil {
				t.Fatal(err)
			}
			lives := func(when string) {
				t.Helper()
				c, err := api.InspectContainer(t.Context(), id)
				if err != nil || !c.State.Running || c.Config.Labels[labelID] != h.SandboxID {
					t.Errorf("%s the stranger is %+v with %v, %v", when, c.State, c.Config.Labels, err)
				}
			}
			lives("at first")
			run(t, e, h, "touch /here")
			listed := 0
			for l, err := range e.ListRunning(t.Context(), o.owner) {
				if listed++; err != nil || l.SandboxID != h.SandboxID || string(l.Data) != string(h.Data) {
					t.Errorf("ListRunning has %+v, %v", l, err)
				}
			}
			if f, err := e.Discover(t.Context(), h.SandboxID); err != nil || string(f.Handle.Data) != string(h.Data) || listed != 1 {
				t.Errorf("Discover = %+v, %v; %d are listed", f, err, listed)
			}
			if _, err := api.StatFile(t.Context(), id, "/here"); sandboxer.KindOf(err) != sandboxer.NotFound {
				t.Error("a command got into the stranger")
			}
			e.sweep(t.Context(), ours.host)
			report, err := e.Teardown(t.Context(), h)
			if err != nil || len(report.Removed) != 1 || len(report.Warnings) != 1 || !strings.Contains(report.Warnings[0], "precious-"+name) {
				t.Errorf("Teardown = %+v, %v", report, err)
			}
			lives("after Teardown")
			if _, err := e.Discover(t.Context(), h.SandboxID); sandboxer.KindOf(err) != sandboxer.NotFound {
				t.Errorf("Discover of a sandbox that is gone: %v", err)
			}
			for l, err := range e.ListRunning(t.Context(), o.owner) {
				t.Errorf("ListRunning has %+v, %v", l, err)
			}

			// It is not the sandbox even with the same name.
			en.raw(t, "POST", "/containers/"+id+"/rename?name="+e.name(h.SandboxID, h.Generation), "")
			if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Gone || err != nil {
				t.Errorf("IsAlive = %s, %v", l, err)
			}
			_, err = e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
			wantKind(t, err, sandboxer.NotFound)
			if report, err = e.Teardown(t.Context(), h); err != nil || len(report.Removed) != 0 || len(report.Warnings) != 1 {
				t.Errorf("Teardown of it under the name = %+v, %v", report, err)
			}
			lives("under the name")
			en.raw(t, "POST", "/containers/"+id+"/rename?name=precious-"+name, "")
		})
	}
}
