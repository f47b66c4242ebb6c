//go:build linux

package local

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	kindprocess "github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/extensiontest"
)

// served is the argument that makes the test binary a program that serves the adapter.
const served = "extension"

// openServed opens the extension like openIn, but served by a program of its own.
func openServed(t testing.TB, dir, owner string, m Mounts) sandboxer.Extension {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(map[string]any{
		"runner": filepath.Join(helpers, "sandboxer-runner"), "agent": filepath.Join(helpers, "sandboxer-agent"), "paths": []string{helpers}, "mounts": m,
	})
	if err != nil {
		t.Fatal(err)
	}
	ext, err := kindprocess.Adapter.Open(t.Context(), sandboxer.Env{
		Extension: "ext.local", Owner: owner, Dir: dir, Log: testLog(t), Program: sandboxer.Program{Command: []string{self, served}},
		Config: func(bool) (json.RawMessage, error) { return config, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	return ext
}

// TestConformanceServed: an adapter that a program of its own serves (package extension) loses nothing on the way.
func TestConformanceServed(t *testing.T) {
	needsGVisor(t)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dir := shortDir(t)
	h := harness(t, dir, func(t *testing.T, m Mounts) sandboxer.Extension { return openServed(t, dir, ours("conformance"), m) })
	extensiontest.RunWire(t, h)
}

// BenchmarkServed reports the cost of a program of its own: the median time from the create of a sandbox to the end of its
// first command, compared with the same adapter in this process, in turns.
func BenchmarkServed(b *testing.B) {
	needsGVisor(b)
	owners := []string{ours("served"), ours("here")}
	exts := []sandboxer.Extension{openServed(b, shortDir(b), owners[0], Mounts{}), openIn(b, shortDir(b), owners[1])}
	took := make([][]float64, len(exts))
	for round := range 62 {
		for turn := range exts {
			i := (round + turn) % len(exts)
			e, spec := exts[i], sandboxer.Spec{ID: fmt.Sprintf("b%d", round), Generation: 1, Owner: owners[i]}
			began := time.Now()
			h, err := e.Provision(b.Context(), spec)
			if err == nil {
				_, err = e.WaitReady(b.Context(), h)
			}
			if err != nil {
				b.Fatal(err)
			}
			if x, err := e.(sandboxer.Execer).Exec(b.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
				b.Fatal(x, err)
			}
			if round > 0 { // the first makes shared objects
				took[i] = append(took[i], float64(time.Since(began)))
			}
			if _, err := e.Teardown(b.Context(), h); err != nil {
				b.Fatal(err)
			}
		}
	}
	for i, e := range exts {
		slices.Sort(took[i])
		if err := e.(io.Closer).Close(); err != nil {
			b.Error(err)
		}
	}
	served, here := took[0][len(took[0])/2], took[1][len(took[1])/2]
	b.ReportMetric(served/here, "served/here")
	b.ReportMetric(served/1e6, "served-ms")
	b.ReportMetric(here/1e6, "here-ms")
	b.ReportMetric(0, "ns/op")
}
