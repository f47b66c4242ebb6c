package composessh

import (
	"context"
	"encoding/json"
	"iter"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// Discover implements sandboxer.Discoverer. It tells no fuse: that is not moved with the
// expiry. Where there are no hosts nothing is: only one that cannot be asked leaves it in doubt.
func (e *extension) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	if hosts, err := e.configured(); err == nil && len(hosts) == 0 {
		return sandboxer.Found{}, gone(sandboxer.Handle{SandboxID: id})
	}
	found, err := e.search(ctx, sandboxer.Handle{SandboxID: id})
	if len(found) == 0 && err != nil {
		return sandboxer.Found{}, err
	}
	if len(found) == 0 {
		return sandboxer.Found{}, gone(sandboxer.Handle{SandboxID: id})
	}
	f := sandboxer.Found{Handle: e.handle(found[0].name, found[0].host)}
	ho, err := e.host(found[0].host)
	if err == nil {
		err = e.look(ctx, ho)
	}
	if err != nil {
		return sandboxer.Found{}, err
	}
	m, err := e.meta(ctx, ho, found[0].name)
	if err != nil {
		return sandboxer.Found{}, err
	}
	if m != nil {
		f.Stamp = m.Stamp
	}
	return f, nil
}

func (e *extension) handle(name, host string) sandboxer.Handle {
	id, g, _ := e.split(name)
	return sandboxer.Handle{SandboxID: id, Generation: g, Host: host, Ref: name, Data: json.RawMessage(`{"v":1}`)}
}

// ListRunning implements sandboxer.Lister. A host that cannot be asked, or whose record cannot be
// read, is an error of the listing, after what the others have. Where there are no hosts nothing is.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		if owner != e.env.Owner { // nothing of others is known here
			return
		}
		var mu sync.Mutex
		var all []sandboxer.Handle
		var failed []error
		hosts, unread := e.configured()
		e.each(ctx, hosts, func(name string, h *host, err error) {
			var names []string
			if err == nil {
				names, err = e.namesOn(ctx, h)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, err)
			}
			for _, n := range names {
				if _, _, ok := e.split(n); ok {
					all = append(all, e.handle(n, name))
				}
			}
		})
		if unread != nil {
			failed = append(failed, unread)
		}
		for _, h := range all {
			if !yield(h, nil) {
				return
			}
		}
		for _, err := range failed {
			if !yield(sandboxer.Handle{}, err) {
				return
			}
		}
	}
}
