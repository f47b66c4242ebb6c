package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/measure"
)

// TestMeasure: what every run measures can be measured. Only what it needs for that is
// judged, never a figure.
func TestMeasure(t *testing.T) {
	runtime.LockOSThread() // the server is told to end when this thread does
	defer runtime.UnlockOSThread()
	if os.Geteuid() != 0 {
		t.Skip("gVisor's images and control groups need root")
	}
	bin := t.TempDir()
	build := exec.Command("go", "build", "-trimpath", "-o", bin, "../cmd/...")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Setenv("DOCKER_HOST", "unix://"+filepath.Join(bin, "none.sock"))
	dir, err := os.MkdirTemp("/tmp", "sbb") // short, for gVisor's sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	r, err := run(t.Context(), options{bin: bin, runsc: "none", rounds: 1, quick: true, dir: dir}, func(s string) { t.Log(s) })
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{viaAPI + ": create to first exec", viaAPIImage + ": create to first exec", belowImage + ": create to first exec", apiRun, apiImageRun} {
		if !slices.ContainsFunc(r.Metrics.All(), func(s *measure.Series) bool { return s.Name == want && len(s.Samples) > 0 }) {
			t.Errorf("%s was not measured; skipped: %q", want, r.Skipped)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}
}
