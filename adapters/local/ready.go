//go:build linux

package local

import (
	"context"
	"maps"

	"github.com/sand-boxer/sandboxer"
)

// WaitReady implements sandboxer.Extension.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	// Provision does not leave it alone until the workspace is there.
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return sandboxer.Reachability{}, err
	}
	defer unlock()
	rec, err := e.record(b.name)
	if err != nil || !rec.Ready {
		return sandboxer.Reachability{}, sandboxer.E(sandboxer.Unavailable, err, "the sandbox was not completed; it has to be provisioned again")
	}
	r := sandboxer.Reachability{
		Host: "localhost", RemoteDir: b.rec.Workspace,
		Extra: map[string]string{"gvisor": b.name},
	}
	maps.Copy(r.Extra, b.rec.About)
	for _, p := range b.rec.Ports {
		r.Ports = append(r.Ports, sandboxer.Port{Port: p})
	}
	return r, nil
}
