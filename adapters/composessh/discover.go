package composessh

import (
	"context"
	"encoding/json"
	"errors"
	"iter"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosts"
)

// Discover implements sandboxer.Discoverer. It reports no fuse: the fuse does not move with the
// expiry. Without hosts there is nothing: only a host that cannot be asked leaves that in doubt.
func (e *extension) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	if names, err := e.configured(); err == nil && len(names) == 0 {
		return sandboxer.Found{}, hosts.Missing(id)
	}
	p, err := e.locate(ctx, sandboxer.Handle{SandboxID: id})
	if err != nil {
		return sandboxer.Found{}, err
	}
	if _, err := e.use(ctx, p.host); err != nil {
		return sandboxer.Found{}, err
	}
	return sandboxer.Found{Handle: e.handle(p.name, p.host)}, nil
}

func (e *extension) handle(name, host string) sandboxer.Handle {
	id, g, _ := e.split(name)
	return sandboxer.Handle{SandboxID: id, Generation: g, Host: host, Ref: name, Data: json.RawMessage(`{"v":1}`)}
}

// ListRunning implements sandboxer.Lister. A host that cannot be asked, or whose record cannot be
// read, is an error of the listing, after what the others have. Without hosts there is nothing.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return hosts.List(func() (all []sandboxer.Handle, err error) {
		if owner != e.env.Owner { // nothing of others is known here
			return nil, nil
		}
		names, unread := e.configured()
		places, silent := e.placesOn(ctx, names)
		for _, p := range places {
			all = append(all, e.handle(p.name, p.host))
		}
		return all, errors.Join(silent.Err(), unread)
	})
}
