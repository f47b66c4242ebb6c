package docker

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

// Pause implements sandboxer.Pauser.
func (e *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	return e.freeze(ctx, h, "pause", "paused")
}

// Resume implements sandboxer.Pauser.
func (e *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	return e.freeze(ctx, h, "unpause", "running")
}

func (e *extension) freeze(ctx context.Context, h sandboxer.Handle, what, want string) error {
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return err
	}
	defer unlock()
	if b.state == want {
		return e.thawed(ctx, b)
	}
	if err := e.lives(ctx, b); err != nil {
		return err
	}
	call := func(ctx context.Context) error { return b.host.api.ContainerCall(ctx, b.container, what) }
	if what == "pause" {
		err = e.agentIn(b).WithoutDials(ctx, call)
	} else {
		err = call(ctx)
	}
	if err != nil && ctx.Err() == nil {
		// Docker gets late news of its containers, and then for a moment reports one as paused that was just
		// resumed.
		c, ierr := b.host.api.InspectContainer(ctx, b.container)
		if ierr == nil && (c.State.Running || c.State.Paused) && c.State.Paused == (want == "paused") {
			err = nil
		}
	}
	if err != nil || want != "running" {
		return err
	}
	b.state = want
	return e.thawed(ctx, b)
}

// thawed sends the fuse to the agent of a resumed sandbox if it was moved meanwhile. The caller holds the sandbox's lock.
func (e *extension) thawed(ctx context.Context, b *box) error {
	if b.state != "running" {
		return nil
	}
	r, err := e.recall(ctx, b.key())
	if err != nil || !r.FuseDue {
		return err
	}
	return e.setFuse(ctx, b, r.Fuse)
}
