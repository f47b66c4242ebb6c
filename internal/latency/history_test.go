package latency

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func TestHistory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bench")
	h := NewHistory(dir)
	if all, err := h.Results(); err != nil || len(all) != 0 {
		t.Errorf("a fresh history: %v, %v", all, err)
	}
	if _, err := h.Result("latest"); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("the latest of none: %v", err)
	}
	cpu := Millis(3.5)
	var ids []string
	for i, id := range []string{"20261121-150000000-aaaa", "20261121-150001000-bbbb", "20261122-090000000-aaaa"} {
		it := Iteration{N: 1, Sandbox: "sb", OK: true, TTI: Millis(10 * (i + 1)), Create: 8, Split: true, Accept: 1, Provision: 6, Ready: 1, Exec: 2}
		s := Series{Profile: "p", Mode: Sequential, ClientCPU: &cpu, Iterations: []Iteration{it}}
		s.close(2)
		r := &Result{SchemaVersion: 1, ID: id, At: time.Date(2026, 11, 21, 15, 0, i, 0, time.UTC), Command: []string{"true"}, Series: []Series{s}}
		if err := h.Save(r); err != nil {
			t.Fatal(err)
		}
		got, err := h.Result(id)
		if err != nil || !reflect.DeepEqual(got, r) {
			t.Errorf("read back %+v, %v\nwant %+v", got, err, r)
		}
		ids = append(ids, id)
	}
	for ref, want := range map[string]string{"20261122": ids[2], "latest": ids[2], "20261121-150000": ids[0]} {
		if got, err := h.Result(ref); err != nil || got.ID != want {
			t.Errorf("%q means %+v, %v", ref, got, err)
		}
	}
	for ref, kind := range map[string]sandboxer.Kind{"20261121": sandboxer.Conflict, "2027": sandboxer.NotFound, "": sandboxer.NotFound, "../x": sandboxer.NotFound} {
		if _, err := h.Result(ref); !errors.Is(err, kind) {
			t.Errorf("%q: %v, want %s", ref, err, kind)
		}
	}
	// A damaged file is named, and the rest is there.
	for name, text := range map[string]string{ids[1] + ".json": "{", "notes.txt": "mine", "20261123-000000000-cccc.json": `{"id":"20261121-150000000-aaaa"}`,
		"20261123-000000000-dddd.json": `{"id":"x","ID":"20261123-000000000-dddd"}`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all, err := h.Results()
	if len(all) != 2 || all[0].ID != ids[2] || all[1].ID != ids[0] {
		t.Errorf("listed %+v", all)
	}
	if !errors.Is(err, sandboxer.Failed) || !strings.Contains(err.Error(), ids[1]) || !strings.Contains(err.Error(), "20261123-000000000-cccc") || !strings.Contains(err.Error(), "20261123-000000000-dddd") {
		t.Errorf("damaged: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".new-*")); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}

func TestNewID(t *testing.T) {
	at := time.Date(2026, 11, 21, 15, 4, 5, 67_890_000, time.FixedZone("", 3600))
	a, b := NewID(at), NewID(at)
	if a == b || !runID.MatchString(a) || !strings.HasPrefix(a, "20261121-140405067-") {
		t.Errorf("%s, %s", a, b)
	}
}

func series(profile string, mode Mode, count int, success float64, median, p95, p99 Millis) Series {
	p := Percentiles{N: count, Median: median, P95: p95, P99: p99}
	return Series{Profile: profile, Mode: mode, Count: count, Success: success, TTI: Summary{Raw: p, Trimmed: p}}
}

func TestCompare(t *testing.T) {
	a := &Result{ID: "a", Command: []string{"true"}, Probe: true, Client: Machine{Cores: 2}, Series: []Series{
		series("p", Sequential, 100, 1, 100, 200, 300),
		series("p", Burst, 10, 1, 500, 600, 700),
		series("q", Staggered, 100, 0, 0, 0, 0),
		series("gone", Sequential, 1, 1, 1, 1, 1),
	}}
	b := &Result{ID: "b", Command: []string{"node", "-v"}, Probe: true, Client: Machine{Cores: 2}, Series: []Series{
		series("p", Sequential, 50, 1, 150, 190, 300),
		series("p", Burst, 20, 1, 500, 600, 700),
		series("q", Staggered, 100, 1, 10, 20, 30),
	}}
	c := Compare(a, b)
	if len(c.Rows) != 2 {
		t.Fatalf("%+v", c)
	}
	if r := c.Rows[0]; r.Median != (Change{100, 150, 1.5}) || r.P95 != (Change{200, 190, 0.95}) || r.RawP99 != (Change{300, 300, 1}) || r.CountA != 100 || r.CountB != 50 {
		t.Errorf("%+v", r)
	}
	if r := c.Rows[1]; r.Median.Ratio != 0 || r.Success != [2]float64{0, 1} {
		t.Errorf("%+v", r)
	}
	want := []string{"command: true and node -v", "p burst 10 is only in a", "gone sequential 1 is only in a", "p burst 20 is only in b"}
	if !slices.Equal(c.Warnings, want) {
		t.Errorf("warnings %q", c.Warnings)
	}
	for limit, want := range map[float64]bool{1.4: true, 1.5: false, 2: false} {
		if got := c.Rows[0].Regressed(limit); got != want {
			t.Errorf("above %v: %v", limit, got)
		}
	}
	if (&Row{Success: [2]float64{1, 0.99}}).Regressed(9) != true {
		t.Error("fewer that succeed are no regression")
	}
}

// TestCompareTellsHowSure: from six iterations on a ratio has bounds.
func TestCompareTellsHowSure(t *testing.T) {
	of := func(n int, each Millis) *Result {
		s := Series{Profile: "p", Mode: Sequential, Iterations: []Iteration{{OK: false, TTI: 9999}}}
		for i := range n {
			s.Iterations = append(s.Iterations, Iteration{OK: true, TTI: each + Millis(i%2)})
		}
		s.close(1)
		return &Result{Series: []Series{s}}
	}
	if r := Compare(of(20, 100), of(20, 200)).Rows[0]; r.Median.Ratio != 1.995 || r.MedianLow < 1.9 || r.MedianLow > 1.995 || r.MedianHigh < 1.995 || r.MedianHigh > 2.1 {
		t.Errorf("twice as long: %+v", r)
	}
	if r := Compare(of(5, 100), of(20, 200)).Rows[0]; r.Median.Ratio == 0 || r.MedianLow != 0 || r.MedianHigh != 0 {
		t.Errorf("of five: %+v", r)
	}
}
