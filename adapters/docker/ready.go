package docker

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

// WaitReady implements sandboxer.Extension.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	var r sandboxer.Reachability
	b, unlock, err := e.alone(ctx, h) // Provision holds the lock until it is complete
	if err != nil {
		return r, err
	}
	defer unlock()
	rec, err := e.recall(ctx, b.key())
	if err == nil {
		err = e.lives(ctx, b)
	}
	if err != nil {
		return r, err
	}
	if !rec.Ready {
		return r, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s was not completed; it has to be provisioned again", b.id)
	}
	m := b.made
	r = sandboxer.Reachability{Host: b.host.name, RemoteDir: m.Workspace, Extra: map[string]string{"container": e.name(b.id, b.generation)}}
	if m.Image != "" {
		r.Extra["image"] = m.Image
	}
	if m.Changed != "" {
		r.Extra[sandboxer.ExtraChanged] = m.Changed
	}
	r.Ports, err = e.ports(ctx, b)
	return r, err
}
