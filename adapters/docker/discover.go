package docker

import (
	"cmp"
	"context"
	"iter"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosts"
)

// Discover implements sandboxer.Discoverer.
func (e *extension) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	b, err := e.find(ctx, sandboxer.Handle{SandboxID: id})
	if err != nil {
		return sandboxer.Found{}, err
	}
	r, err := e.recall(ctx, b.key())
	if err = cmp.Or(b.unread, err); err != nil {
		return sandboxer.Found{}, err
	}
	f := sandboxer.Found{Handle: e.handle(b), Fuse: b.made.Fuse}
	if !r.Fuse.IsZero() {
		f.Fuse = r.Fuse
	}
	return f, nil
}

// ListRunning implements sandboxer.Lister.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return hosts.List(func() ([]sandboxer.Handle, error) {
		if owner != e.env.Owner { // another owner has no sandboxes here
			return nil, nil
		}
		found, silent := hosts.Ask(e.hosts, func(h *host) (all []sandboxer.Handle, err error) {
			boxes, err := e.on(ctx, h, "", 0)
			for _, b := range boxes {
				all = append(all, e.handle(b))
			}
			return all, err
		})
		return found, silent.Err()
	})
}
