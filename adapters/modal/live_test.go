//go:build linux

package modal

import (
	"context"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/hosted/hostedtest"
)

// TestLive runs the suite at Modal itself.
func TestLive(t *testing.T) {
	key, budget, owner, dir := hostedtest.Key(t, "SANDBOXER_TEST_MODAL_KEY"), hostedtest.NewBudget(t), "live-"+sandboxer.NewID(), t.TempDir()
	open := func(t *testing.T, owner, dir string) sandboxer.Extension {
		x, err := openWith(t, owner, dir, map[string]any{"key": key, "agent": buildtest.Program(t, "cmd/sandboxer-agent")})
		if err != nil {
			t.Fatal(err)
		}
		return live{x.(*extension), budget}
	}
	extensiontest.Run(t, extensiontest.Harness{
		Open:     func(t *testing.T) sandboxer.Extension { return open(t, owner, dir) },
		Stranger: func(t *testing.T) sandboxer.Extension { return open(t, "stranger-"+owner, t.TempDir()) },
		Inputs:   Adapter.Inputs,
		Want:     Adapter.Capabilities,
		Enforces: []extensiontest.Feature{extensiontest.CPU, extensiontest.Memory},
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
