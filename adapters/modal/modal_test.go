//go:build linux

package modal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "echo" {
		panic(extensiontest.Echo(os.Args[2]))
	}
	code := m.Run()
	buildtest.Remove()
	os.Exit(code)
}

func poll(ready func() bool) bool {
	tick, late := time.NewTicker(5*time.Millisecond), time.After(time.Minute)
	defer tick.Stop()
	for !ready() {
		select {
		case <-tick.C:
		case <-late:
			return false
		}
	}
	return true
}

// opens opens the extension as a process of the broker does.
func opens(t testing.TB, f *fake, owner, dir string, change ...func(map[string]any)) *extension {
	t.Helper()
	canBox(t)
	config := map[string]any{"key": fakeKey, "url": f.url, "settle": 0, "agent": buildtest.Program(t, "cmd/sandboxer-agent")}
	for _, c := range change {
		c(config)
	}
	x, err := openWith(t, owner, dir, config)
	if err != nil {
		t.Fatal(err)
	}
	return x.(*extension)
}

func openWith(t testing.TB, owner, dir string, config map[string]any) (sandboxer.Extension, error) {
	t.Helper()
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	env := sandboxer.Env{Extension: "ext.modal", Owner: owner, Dir: dir, Notes: notes.New(dir, "ext.modal", []byte("key")), Prices: book, Decode: func(v any) error {
		d := json.NewDecoder(bytes.NewReader(data))
		d.DisallowUnknownFields()
		return d.Decode(v)
	}}
	return Adapter.Open(t.Context(), env)
}

var book = []sandboxer.PriceRow{
	{Provider: "modal", SKU: "vcpu", Unit: sandboxer.UnitVCPUSecond, NanoUSD: 19710, Basis: sandboxer.BasisMax, AsOf: "2026-10-08", Source: "test", Confidence: sandboxer.PriceReported},
	{Provider: "modal", SKU: "memory", Unit: sandboxer.UnitGiBSecond, NanoUSD: 6670, Basis: sandboxer.BasisMax, AsOf: "2026-10-08", Source: "test", Confidence: sandboxer.PriceReported},
}

func TestConformance(t *testing.T) {
	canBox(t)
	f, dir := newFake(t), t.TempDir()
	extensiontest.Run(t, extensiontest.Harness{
		Open:     func(t *testing.T) sandboxer.Extension { return opens(t, f, "conformance", dir) },
		Stranger: func(t *testing.T) sandboxer.Extension { return opens(t, f, "stranger", t.TempDir()) },
		Inputs:   Adapter.Inputs,
		Want:     Adapter.Capabilities,
		Enforces: []extensiontest.Feature{extensiontest.CPU, extensiontest.Memory, extensiontest.Locale, extensiontest.Owned},
		Parallel: 4,
		Listen:   func(port int) []string { return []string{"/echoer", "echo", fmt.Sprintf("127.0.0.1:%d", port)} },
		Kill:     func(t *testing.T, h sandboxer.Handle) { f.kill(h.Ref, 137) },
		Hang: func(*testing.T, sandboxer.Handle) func() {
			silent := make(chan struct{})
			f.set(func(f *faults) { f.silent = silent })
			return func() { f.set(func(f *faults) { f.silent = nil }); close(silent) }
		},
	})
}
