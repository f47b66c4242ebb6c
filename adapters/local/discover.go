//go:build linux

package local

import (
	"context"
	"iter"
	"slices"

	"github.com/sand-boxer/sandboxer"
)

// Discover implements sandboxer.Discoverer.
func (e *extension) Discover(_ context.Context, id string) (sandboxer.Found, error) {
	name, err := e.find(sandboxer.Handle{SandboxID: id})
	if err != nil {
		return sandboxer.Found{}, err
	}
	if _, err := e.hold(name); err != nil {
		return sandboxer.Found{}, err
	}
	rec, err := e.record(name)
	if err != nil || !rec.Ready || rec.Owner != e.env.Owner {
		return sandboxer.Found{}, sandboxer.E(sandboxer.NotFound, err, "there is no complete sandbox %s on this machine", id)
	}
	h := sandboxer.Handle{SandboxID: id, Generation: rec.Generation, Host: "localhost", Ref: name}
	return sandboxer.Found{Handle: h, Fuse: rec.Fuse}, nil
}

// find returns the name of h's sandbox; without a generation, the newest one.
func (e *extension) find(h sandboxer.Handle) (string, error) {
	if h.Generation > 0 {
		return boxName(h.SandboxID, h.Generation), nil
	}
	gens, err := e.generations(h.SandboxID)
	if err != nil {
		return "", err
	}
	if len(gens) == 0 {
		return "", sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s on this machine", h.SandboxID)
	}
	return boxName(h.SandboxID, gens[len(gens)-1]), nil
}

// generations lists the generations of id that have any remains, oldest first.
func (e *extension) generations(id string) ([]int, error) {
	names, err := e.names()
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "the state directory of %s cannot be read", e.env.Extension)
	}
	var gens []int
	for _, n := range names {
		if i, g, ok := parseBoxName(n); ok && i == id {
			gens = append(gens, g)
		}
	}
	slices.Sort(gens)
	return gens, nil
}

// ListRunning implements sandboxer.Lister.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		names, err := e.names()
		if err != nil {
			yield(sandboxer.Handle{}, sandboxer.E(sandboxer.Internal, err, "the state directory of %s cannot be read", e.env.Extension))
			return
		}
		for _, n := range names {
			if err := ctx.Err(); err != nil {
				yield(sandboxer.Handle{}, err)
				return
			}
			id, g, _ := parseBoxName(n)
			// Without a record (a create died first) the state directory determines the
			// owner: it belongs to this installation alone.
			by := e.env.Owner
			if rec, err := e.record(n); err == nil {
				by = rec.Owner
			}
			if by != owner {
				continue
			}
			if !yield(sandboxer.Handle{SandboxID: id, Generation: g, Host: "localhost", Ref: n}, nil) {
				return
			}
		}
	}
}
