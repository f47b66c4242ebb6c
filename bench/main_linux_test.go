package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// bin is the directory with the programs, which built fills.
var bin string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if bin, err = os.MkdirTemp("", "sandboxer-bench"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(bin)
		return m.Run()
	}())
}

// built builds the programs, once for all tests.
var built = sync.OnceValue(func() error {
	plugin, err := filepath.Abs("../bin/docker-compose") // scripts/setup.sh builds it
	return errors.Join(err, os.Symlink(plugin, filepath.Join(bin, "docker-compose")), buildtest.Build(bin, buildtest.Products))
})

// runOnce measures what o asks for, as small as it can be, with the programs of this tree. The run must leave nothing behind.
func runOnce(t *testing.T, o options) *report {
	t.Helper()
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	if os.Geteuid() != 0 {
		t.Skip("gVisor's images and control groups need root")
	}
	if err := built(); err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread() // the server ends when this thread does
	defer runtime.UnlockOSThread()
	dir, err := os.MkdirTemp("/tmp", "sbb") // short, for gVisor's sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	o.bin, o.runsc, o.rounds, o.quick, o.once, o.dir = bin, "none", 1, true, true, dir
	began := time.Now()
	r, err := run(t.Context(), o, func(s string) { t.Logf("%4.1fs %s", time.Since(began).Seconds(), s) })
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("skipped: %q", r.Skipped)
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v, %v", left, err)
	}
	return r
}

// TestMeasure: a build can be measured beside another one.
func TestMeasure(t *testing.T) {
	t.Setenv("DOCKER_HOST", "unix://"+filepath.Join(t.TempDir(), "none.sock"))
	r := runOnce(t, options{before: bin, only: []string{beforeStep}})
	for _, want := range []string{saysVersion, viaAPI + ": create to first exec", viaAPIImage + ": create to first exec", apiRun, apiStream, apiImageRun,
		claimFirst, "idle " + viaAPI + idleMemory, overMachine, viaRoute + ": create", sizeOf + "sandboxer"} {
		i := slices.IndexFunc(r.Beside.Changes, func(c Change) bool { return c.Name == want })
		if i < 0 && (want != overMachine || !skipped(r, beforeStep)) {
			t.Errorf("%s was not measured beside the other build; skipped: %q", want, r.Skipped)
		} else if i >= 0 && (r.Beside.Changes[i].NA != r.Beside.Changes[i].NB || r.Beside.Changes[i].A <= 0 || r.Beside.Changes[i].B <= 0) {
			t.Errorf("%+v", r.Beside.Changes[i])
		}
	}
}

// TestParts: every other part works, also parts that use the same engine one after the other. A part that this machine has
// nothing for is left out.
func TestParts(t *testing.T) {
	t.Setenv("DOCKER_HOST", engine(t))
	r := runOnce(t, options{})
	for _, want := range []string{viaAPI + ": create to first exec", viaAPIImage + ": create to first exec", belowImage + ": create to first exec",
		apiRun, apiImageRun, densityMem, snapSmall, burstRate, claimFirst, routeOf100, viaRoute + ": create", rowsKept, rowsTaken} {
		if !slices.ContainsFunc(r.Metrics.All(), func(s *Series) bool { return s.Name == want && len(s.Samples) > 0 }) {
			t.Errorf("%s was not measured", want)
		}
	}
}

// TestQuick: -quick leaves out the slow parts, and says so.
func TestQuick(t *testing.T) {
	r, err := run(t.Context(), options{rounds: 1, quick: true, dir: t.TempDir(), only: []string{checkpointStep}}, func(s string) { t.Log(s) })
	if err != nil || !skipped(r, checkpointStep+" (-quick)") || len(r.Metrics.All()) > 0 {
		t.Errorf("%v, skipped: %q", err, r.Skipped)
	}
}

// TestPartFails: a part that fails is told, and what the others measured counts.
func TestPartFails(t *testing.T) {
	if _, err := exec.LookPath("zstd"); err != nil {
		t.Skip("no zstd to measure with")
	}
	dir := t.TempDir()
	r, err := run(t.Context(), options{bin: filepath.Join(dir, "missing"), rounds: 1, once: true, dir: dir,
		only: []string{prepareStep, poolStep, checkpointStep}}, func(s string) { t.Log(s) })
	if err == nil || !strings.Contains(err.Error(), prepareStep) {
		t.Fatalf("without programs: %v", err)
	}
	var text strings.Builder
	if err := r.print(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"FAILED: " + prepareStep, "skipped: " + poolStep, ckptFirst} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	if strings.Contains(text.String(), "FAILED: "+poolStep) {
		t.Error(text.String())
	}
}

// engine starts a private Docker engine and returns its address; where none is installed,
// that of none.
func engine(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "sbd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("sh", "../scripts/dockerd.sh", "stop", dir).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		os.RemoveAll(dir)
	})
	host, err := exec.Command("sh", "../scripts/dockerd.sh", "start", dir).Output()
	if err != nil {
		t.Logf("no Docker engine: %v", err)
		return "unix://" + filepath.Join(dir, "none.sock")
	}
	return strings.TrimSpace(string(host))
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
		r.Beside.Changes = Compare(&r.Beside.Before.Metrics, &r.Beside.Now.Metrics)
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
