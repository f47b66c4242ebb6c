package vmpacker

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

// Exec implements sandboxer.Execer.
func (e *extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	p, err := e.one(ctx, h)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	if p.Kind == managed {
		if err := e.machineIs(ctx, p); err != nil {
			return sandboxer.Exit{}, err
		}
	}
	g, err := e.guest(p)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	return g.exec(ctx, cmd)
}
