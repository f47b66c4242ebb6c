//go:build linux

package local

import (
	"os"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// The memory of a sandbox that another version of gVisor runs is not saved, since nothing
// could restore it; the sandbox is not touched, and the error says what to do.
func TestVersionOfGVisor(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	sh(t, e, h, "echo kept >/workspace/f")
	name := boxName(h.SandboxID, h.Generation)
	rec, err := e.record(name)
	if err != nil {
		t.Fatal(err)
	}
	if rec.GVisor != runtimeVersion() {
		t.Errorf("its record says %q; want %q", rec.GVisor, runtimeVersion())
	}
	rec.GVisor = "v0-old"
	if err := e.writeRecord(name, rec); err != nil {
		t.Fatal(err)
	}
	_, err = e.Snapshot(t.Context(), h, "other")
	said := sandboxer.Message(err) + "\n" + sandboxer.HintOf(err)
	if sandboxer.KindOf(err) != sandboxer.Unsupported || !strings.Contains(said, "v0-old") || !strings.Contains(said, "snapshot create --portable") {
		t.Errorf("saving it: %v (%s)", err, said)
	}
	if _, err := os.Stat(e.dir("snapshot", "other")); err == nil {
		t.Error("something was begun")
	}
	if got := sh(t, e, h, "cat /workspace/f"); got != "kept" {
		t.Errorf("it has %q", got)
	}
	if err := e.Pause(t.Context(), h); err != nil { // it can be paused
		t.Error(err)
	}
	if err := e.Resume(t.Context(), h); err != nil {
		t.Error(err)
	}
}
