package vmpacker

import (
	"context"
	"net"

	"github.com/sand-boxer/sandboxer"
)

// Dial implements sandboxer.Dialer. Sandboxes of one machine share its ports: a port
// belongs to the sandbox if one of its processes listens there.
func (e *extension) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	p, err := e.one(ctx, h)
	if err != nil {
		return nil, err
	}
	if p.Kind == managed {
		if err := e.machineIs(ctx, p); err != nil {
			return nil, err
		}
	}
	g, err := e.guest(p)
	if err != nil {
		return nil, err
	}
	return g.dial(ctx, port)
}
