package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/hosted/hostedtest"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

// TestLive runs the suite at the service itself.
func TestLive(t *testing.T) {
	config, err := json.Marshal(map[string]string{"key": hostedtest.Key(t, "SANDBOXER_TEST_E2B_KEY")})
	if err != nil {
		t.Fatal(err)
	}
	budget, owner := hostedtest.NewBudget(t), "live-"+sandboxer.NewID()
	open := func(t *testing.T, owner, dir string) sandboxer.Extension {
		x, err := Adapter.Open(t.Context(), sandboxer.Env{Extension: "ext.e2b", Owner: owner, Dir: dir, Prices: book, Notes: notes.New(dir, "ext.e2b", []byte("key")), Decode: func(v any) error {
			return json.NewDecoder(bytes.NewReader(config)).Decode(v)
		}})
		if err != nil {
			t.Fatal(err)
		}
		return live{x.(*extension), budget}
	}
	dir := t.TempDir()
	extensiontest.Run(t, extensiontest.Harness{
		Open:      func(t *testing.T) sandboxer.Extension { return open(t, owner, dir) },
		Stranger:  func(t *testing.T) sandboxer.Extension { return open(t, "stranger-"+owner, t.TempDir()) },
		Inputs:    []sandboxer.Input{},
		Want:      Adapter.Capabilities,
		PauseCuts: true,
	})
}

// live is the extension with a bound of what its sandboxes cost.
type live struct {
	*extension
	budget *hostedtest.Budget
}

func (l live) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	return l.budget.Make(ctx, l.extension, spec, func(spec sandboxer.Spec) (sandboxer.Handle, error) { return l.extension.Provision(ctx, spec) })
}

func (l live) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	return l.budget.Make(ctx, l.extension, spec, func(spec sandboxer.Spec) (sandboxer.Handle, error) {
		return l.extension.RestoreFromSnapshot(ctx, spec, s)
	})
}

func (l live) Teardown(ctx context.Context, h sandboxer.Handle) (sandboxer.CleanupReport, error) {
	return l.budget.Teardown(ctx, h, l.extension.Teardown)
}
