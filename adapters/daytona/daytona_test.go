package daytona

import (
	"bytes"
	"encoding/json"
	"os"
	"strconv"
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

var book = []sandboxer.PriceRow{
	{Provider: "daytona", SKU: "vcpu", Unit: sandboxer.UnitVCPUSecond, NanoUSD: 14_000, AsOf: "2026-05-25"},
	{Provider: "daytona", SKU: "memory", Unit: sandboxer.UnitGiBSecond, NanoUSD: 4_500, AsOf: "2026-05-25"},
	{Provider: "daytona", SKU: "disk", Unit: sandboxer.UnitGiBSecond, NanoUSD: 30, AsOf: "2026-05-25"},
}

// opens opens the extension as a process of the broker does, with more of a config, and changes of the environment.
func (w *world) opens(t testing.TB, owner, dir string, more map[string]any, changes ...func(*sandboxer.Env)) *extension {
	t.Helper()
	config := map[string]any{"key": "key", "url": w.srv.URL + "/api", "agent": buildtest.Program(t, "cmd/sandboxer-agent")}
	for k, v := range more {
		config[k] = v
	}
	data, _ := json.Marshal(config)
	env := sandboxer.Env{Extension: "ext.daytona", Owner: owner, Dir: dir, Prices: book, Notes: notes.New(dir, "ext.daytona", []byte("key")), Decode: func(v any) error {
		d := json.NewDecoder(bytes.NewReader(data))
		d.DisallowUnknownFields()
		return d.Decode(v)
	}}
	for _, change := range changes {
		change(&env)
	}
	x, err := Adapter.Open(t.Context(), env)
	if err != nil {
		t.Fatal(err)
	}
	return x.(*extension)
}

func specOf(id string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "test", Fuse: time.Now().Add(time.Hour)}
}

func wantKind(t testing.TB, what string, err error, kind sandboxer.Kind) {
	t.Helper()
	if sandboxer.KindOf(err) != kind {
		t.Errorf("%s: %v (%s); want %s", what, err, sandboxer.KindOf(err), kind)
	}
}

func TestConformance(t *testing.T) {
	w, dir := newWorld(t), t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	extensiontest.Run(t, extensiontest.Harness{
		Open:     func(t *testing.T) sandboxer.Extension { return w.opens(t, "conformance", dir, nil) },
		Stranger: func(t *testing.T) sandboxer.Extension { return w.opens(t, "stranger", t.TempDir(), nil) },
		Inputs:   Adapter.Inputs,
		Want:     Adapter.Capabilities,
		Parallel: 4,
		Patience: 2 * time.Minute, // Daytona counts lifetimes in minutes
		Kill:     func(_ *testing.T, h sandboxer.Handle) { w.set(h.Ref, "destroyed") },
		Hang:     func(*testing.T, sandboxer.Handle) func() { return w.hang() },
		Listen:   func(port int) []string { return []string{self, "echo", "127.0.0.1:" + strconv.Itoa(port)} },
	})
}
