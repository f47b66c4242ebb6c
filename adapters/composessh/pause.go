package composessh

import (
	"context"
	"path"

	"github.com/sand-boxer/sandboxer"
)

// Pause implements sandboxer.Pauser: the engine freezes every container.
func (e *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	ho, m, _, err := e.findRunning(ctx, h)
	if err != nil {
		return err
	}
	defer e.agents.Drop(m.Name) // a paused agent would take calls, and answer after the resume
	return e.withoutDials(ctx, ho, m, func(ctx context.Context) error { return ho.engine.Pause(ctx, m.Name) })
}

// Resume implements sandboxer.Pauser.
func (e *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	ho, m, _, err := e.findRunning(ctx, h)
	if err != nil {
		return err
	}
	return ho.engine.Unpause(ctx, m.Name)
}

// Stats implements sandboxer.StatsReader, over all containers. Values that a host does not report are
// negative.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	ho, m, s, err := e.findRunning(ctx, h)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	return ho.engine.Stats(ctx, s.containers, path.Join(ho.known.root, m.Name))
}
