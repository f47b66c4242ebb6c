package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
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
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, "../cmd/...")
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
	r, err := run(t.Context(), options{bin: bin, before: bin, runsc: "none", rounds: 1, quick: true, dir: dir}, func(s string) { t.Log(s) })
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{viaAPI + ": create to first exec", viaAPIImage + ": create to first exec", belowImage + ": create to first exec", apiRun, apiImageRun} {
		if !slices.ContainsFunc(r.Metrics.All(), func(s *measure.Series) bool { return s.Name == want && len(s.Samples) > 0 }) {
			t.Errorf("%s was not measured; skipped: %q", want, r.Skipped)
		}
	}
	besides := []string{saysVersion, viaAPI + ": create to first exec", apiRun, apiStream, claimFirst, "idle " + viaAPI + idleMemory, overMachine}
	for _, want := range besides {
		i := slices.IndexFunc(r.Beside.Changes, func(c measure.Change) bool { return c.Name == want })
		if i < 0 && (want != overMachine || !skipped(r, beforeStep)) {
			t.Errorf("%s was not measured beside the other build; skipped: %q", want, r.Skipped)
		} else if i >= 0 && (r.Beside.Changes[i].NA != r.Beside.Changes[i].NB || r.Beside.Changes[i].A <= 0 || r.Beside.Changes[i].B <= 0) {
			t.Errorf("%+v", r.Beside.Changes[i])
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}
}

func skipped(r *report, step string) bool {
	return slices.ContainsFunc(r.Skipped, func(s string) bool { return strings.HasPrefix(s, step) })
}

// TestReport: what a run writes is read by another, which is set against it.
func TestReport(t *testing.T) {
	of := func(each float64) *report {
		r := &report{Revision: "v1", Rounds: 8, Beside: &beside{Before: &build{Bin: "old"}, Now: &build{Bin: "new"}}}
		for i := range 8 {
			r.Metrics.Add(apiRun, "ms", each+float64(i))
			r.Metrics.Rate("output", "MB/s", 300)
			r.Beside.Before.Metrics.Add(claimFirst, "ms", 10)
			r.Beside.Now.Metrics.Add(claimFirst, "ms", each/10)
			r.Beside.Now.Metrics.Add(idleServer, "MB", 50) // of which the older build has none
		}
		r.Beside.Changes = measure.Compare(&r.Beside.Before.Metrics, &r.Beside.Now.Metrics)
		return r
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "a.json")
	if err := of(100).write(file); err != nil {
		t.Fatal(err)
	}
	former, err := readReport(file)
	if err != nil {
		t.Fatal(err)
	}
	r := of(200)
	b := &bench{r: r, to: &r.Metrics}
	b.bars()
	r.compare(former, file)
	got := map[string]float64{}
	for _, c := range r.Against.Changes {
		got[c.Name] = c.Value
	}
	if want := map[string]float64{apiRun: 1.966, "output": 1, claimFirst + ", " + beforeStep: 2, idleServer + ", " + beforeStep: 1}; !maps.Equal(got, want) {
		t.Errorf("against the former: %v", got)
	}
	var text strings.Builder
	if err := r.print(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"revision v1", "now:  in new; by turns", "2.000  2.000 to 2.000 " + claimFirst, "former: revision v1", file, "1.966",
		"MISSED  " + claimFirst + ", now / before", "ok      output "} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	for name, says := range map[string]string{
		`{"metrics":[{"name":"x","unit":"ms","n":3,"p50":1,"p95":1,"best":1}]}`: "an older bench wrote it",
		`{"beside":{"now":{}}}`: "a build of two is missing",
		`{`:                     "is not what -o writes",
	} {
		if err := os.WriteFile(file, []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readReport(file); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if r, err := readReport(""); r != nil || err != nil {
		t.Errorf("no file: %v, %v", r, err)
	}
}
