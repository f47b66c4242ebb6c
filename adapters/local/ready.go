//go:build linux

package local

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// WaitReady implements sandboxer.Extension.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	// Provision releases the sandbox's lock only after the workspace is filled.
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return sandboxer.Reachability{}, err
	}
	defer unlock()
	rec, err := e.record(b.name)
	if err != nil || !rec.Ready {
		return sandboxer.Reachability{}, sandboxer.E(sandboxer.Unavailable, err, "the sandbox is incomplete; it must be provisioned again")
	}
	r := sandboxer.Reachability{
		Host: "localhost", RemoteDir: b.rec.Workspace,
		Extra: map[string]string{"gvisor": b.name},
	}
	maps.Copy(r.Extra, b.rec.About)
	if slices.ContainsFunc(b.rec.Mounts, func(m sandboxer.Mount) bool { return !m.ReadOnly }) {
		r.Extra[sandboxer.ExtraChanged] = strings.TrimPrefix(r.Extra[sandboxer.ExtraChanged]+"; "+sandboxer.ChangedMounts, "; ")
	}
	for _, p := range b.rec.Ports {
		r.Ports = append(r.Ports, sandboxer.Port{Port: p})
	}
	return r, nil
}
