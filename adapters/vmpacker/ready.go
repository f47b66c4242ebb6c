package vmpacker

import (
	"context"
	"path"

	"github.com/sand-boxer/sandboxer"
)

// WaitReady implements sandboxer.Extension.
func (e *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	p, err := e.find(ctx, h)
	if err != nil {
		return sandboxer.Reachability{}, err
	}
	if p.Kind == managed {
		return e.machineReady(ctx, p)
	}
	return e.attachedReady(ctx, p)
}

func (e *extension) attachedReady(ctx context.Context, p *place) (r sandboxer.Reachability, err error) {
	was, err := e.condition(ctx, p)
	if err != nil {
		return r, err
	}
	if was != "ready" {
		return r, sandboxer.E(sandboxer.Failed, nil, "sandbox %s on %s was never completed", p.ID, p.Host).
			WithHint("destroy it and create it again")
	}
	r.Host, r.SSH, r.RemoteDir = p.Host, p.Target.Name, path.Join(p.Base, workspaceName(p.ID))
	for _, n := range p.Ports {
		r.Ports = append(r.Ports, sandboxer.Port{Port: n})
	}
	return r, nil
}
