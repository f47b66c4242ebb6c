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
	defer func() {
		e.mu.Lock()
		e.dropAgent(m.Name) // what stands still would take calls, and answer when it goes on
		e.mu.Unlock()
	}()
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

// Stats implements sandboxer.StatsReader, over all containers. What a host does not tell is
// negative.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	ho, m, s, err := e.findRunning(ctx, h)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	return ho.engine.Stats(ctx, s.containers, path.Join(ho.known.root, m.Name))
}
