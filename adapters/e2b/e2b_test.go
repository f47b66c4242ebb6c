package e2b

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

func TestMain(m *testing.M) {
	code := m.Run()
	buildtest.Remove()
	os.Exit(code)
}

var book = []sandboxer.PriceRow{
	{Provider: "e2b", SKU: "vcpu", Unit: sandboxer.UnitVCPUSecond, NanoUSD: 14000, AsOf: "2026-08-01"},
	{Provider: "e2b", SKU: "memory", Unit: sandboxer.UnitGiBSecond, NanoUSD: 4500, AsOf: "2026-08-01"},
}

// opens opens the extension as a process of the broker does, with more of a config than key and URLs.
func (p *plane) opens(t testing.TB, owner, dir, more string) *extension {
	t.Helper()
	config := fmt.Sprintf(`{"key":%q,"api_url":%q,"sandbox_url":%[2]q%s}`, testKey, p.url, more)
	x, err := Adapter.Open(t.Context(), sandboxer.Env{Extension: "ext.e2b", Owner: owner, Dir: dir, Prices: book, Notes: notes.New(dir, "ext.e2b", []byte("key")), Decode: func(v any) error {
		d := json.NewDecoder(bytes.NewReader([]byte(config)))
		d.DisallowUnknownFields()
		return d.Decode(v)
	}})
	if err != nil {
		t.Fatal(err)
	}
	e := x.(*extension)
	e.memory = false // a World saves files
	return e
}

func TestConformance(t *testing.T) {
	p, dir := newPlane(t), t.TempDir()
	extensiontest.Run(t, extensiontest.Harness{
		Open:      func(t *testing.T) sandboxer.Extension { return p.opens(t, "conformance", dir, `,"settle":0`) },
		Stranger:  func(t *testing.T) sandboxer.Extension { return p.opens(t, "stranger", t.TempDir(), "") },
		Inputs:    []sandboxer.Input{}, // none
		Want:      Adapter.Capabilities,
		PauseCuts: true,
		Parallel:  4,
		Kill: func(t *testing.T, h sandboxer.Handle) {
			p.set(func(p *plane) { p.kill(p.boxes[h.Ref]) })
		},
		Hang: func(t *testing.T, _ sandboxer.Handle) func() { return p.hang() },
	})
	if live := p.world.Live(); len(live) > 0 {
		t.Errorf("left over: %+v", live)
	}
}
