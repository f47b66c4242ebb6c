package docker

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
)

// Renew implements sandboxer.Renewer: the agent has the fuse. The agent of a paused sandbox gets it at the resume; until then no
// time passes inside.
func (e *extension) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	b, unlock, err := e.alone(ctx, h) // the lock prevents pause and resume meanwhile
	if err != nil {
		return err
	}
	defer unlock()
	if b.state == "paused" {
		r, err := e.recall(ctx, b.key())
		if err != nil {
			return err
		}
		r.Fuse, r.FuseDue = until, true
		return e.remember(ctx, b.key(), r)
	}
	if err := e.runs(ctx, b); err != nil {
		return err
	}
	return e.setFuse(ctx, b, until)
}

// setFuse moves the fuse, and records it. The caller holds the sandbox's lock.
func (e *extension) setFuse(ctx context.Context, b *box, until time.Time) error {
	call, err := e.call(ctx, b)
	if err != nil {
		return err
	}
	if err := call.End(call.Agent.Init(call.Ctx, agent.Settings{Fuse: &until})); err != nil {
		return err
	}
	r, err := e.recall(ctx, b.key())
	if err != nil {
		return err
	}
	r.Fuse, r.FuseDue = until, false
	return e.remember(ctx, b.key(), r)
}
