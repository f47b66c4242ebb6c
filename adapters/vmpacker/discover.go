package vmpacker

import (
	"context"
	"errors"
	"iter"

	"github.com/sand-boxer/sandboxer"
)

// Discover implements sandboxer.Discoverer. A machine that cannot be reached is an error
// only if nothing was found: the sandbox may be there.
func (e *extension) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	var best *place
	var failed error
	for p, err := range e.all(ctx, e.env.Owner) {
		if err != nil {
			failed = errors.Join(failed, err)
		} else if p.ID == id && (best == nil || p.Generation > best.Generation) {
			best = p
		}
	}
	if err := ctx.Err(); err != nil {
		return sandboxer.Found{}, err
	}
	if best == nil && failed != nil {
		return sandboxer.Found{}, failed
	}
	if best == nil {
		return sandboxer.Found{}, missing(id)
	}
	if err := e.complete(ctx, best); err != nil {
		return sandboxer.Found{}, err
	}
	return sandboxer.Found{Handle: best.handle()}, nil
}

func missing(id string) error {
	return sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s", id)
}

// ListRunning implements sandboxer.Lister: it lists the sandboxes on the configured
// machines and on those in records of sandboxes. A machine that cannot be reached is an
// error, yielded last.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		var failed error
		for p, err := range e.all(ctx, owner) {
			if err != nil {
				failed = errors.Join(failed, err)
			} else if !yield(p.handle(), nil) {
				return
			}
		}
		if failed != nil {
			yield(sandboxer.Handle{}, failed)
		}
	}
}
