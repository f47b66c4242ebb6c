package docker

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// Basis implements sandboxer.Pooler: the agent's program and the image. On several engines they are the same.
func (e *extension) Basis(ctx context.Context, spec sandboxer.Spec) (string, error) {
	if err := e.check(spec); err != nil {
		return "", err
	}
	ref, vouched, err := e.imageOf(spec)
	if err != nil {
		return "", err
	}
	name := spec.Place
	if name == "" {
		if name, err = e.Place(ctx, spec, nil); err != nil {
			return "", err
		}
	}
	h, err := e.host(name)
	if err != nil {
		return "", err
	}
	info, err := h.look(ctx)
	if err != nil {
		return "", err
	}
	prog, err := e.agentFor(info)
	if err != nil {
		return "", err
	}
	unlock, err := e.env.Notes.RLock(ctx, "host-"+h.name)
	if err != nil {
		return "", err
	}
	defer unlock()
	img, err := e.image(ctx, h, info, ref, vouched)
	if err != nil {
		return "", err
	}
	config, err := json.Marshal(img.Config)
	if err != nil {
		return "", sandboxer.E(sandboxer.Internal, err, "the configuration of image %q does not encode", ref)
	}
	sources, err := e.opener().OpenToShow(spec)
	if err != nil {
		return "", err
	}
	defer mounts.Close(sources)
	mounted := ""
	for _, s := range sources { // as it is now: another one may have the same name tomorrow
		i, err := s.ID()
		if err != nil {
			return "", sandboxer.E(sandboxer.Unavailable, err, "mount %s cannot be looked at", s.Mount.Source)
		}
		mounted += " mount " + i
	}
	id := img.ID
	if img.pinned != "" {
		id = img.pinned // engines may have another ID for it
	}
	return "agent " + prog.Digest + " image " + id + " " + string(config) + mounted, nil
}

// Claim implements sandboxer.Pooler. The record says first that a claim has begun, and last that it is
// done: a sandbox with an interrupted claim is of no use.
func (e *extension) Claim(ctx context.Context, h sandboxer.Handle, spec sandboxer.Spec) (sandboxer.Handle, error) {
	if err := e.Check(ctx, spec); err != nil {
		return h, err
	}
	b, err := e.running(ctx, h)
	if err != nil {
		return h, err
	}
	unlock, err := e.env.Notes.Lock(ctx, b.key())
	if err != nil {
		return h, err
	}
	defer unlock()
	h = e.handle(b)
	m := b.made
	r, err := e.recall(ctx, b.key())
	if err != nil {
		return h, err
	}
	digest := spec.ClaimDigest()
	switch {
	case !m.Warm, r.Claim != "" && r.Claim != digest:
		return h, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is not a warm one that could be claimed", b.id)
	case r.Claim != "" && r.Done:
		return h, nil
	case r.Claim != "" || !r.Ready:
		return h, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s was not completed", b.id)
	case e.unfiltered(spec.Network) != (m.Mode == string(sandboxer.NetworkPublic)):
		return h, sandboxer.E(sandboxer.Unsupported, nil, "a warm sandbox keeps the engine's network, or does without")
	}
	if err := e.checkNetwork(b.host, spec.Network); err != nil {
		return h, err
	}
	if grants, err := e.grants(spec); err != nil {
		return h, err
	} else if !slices.Equal(grants, m.Grants) {
		return h, sandboxer.E(sandboxer.Unsupported, nil, "a warm sandbox keeps the capabilities that it was made with")
	}
	r.Claim, r.Network = digest, sandboxer.NetworkPolicy{}
	if m.Mode != string(sandboxer.NetworkPublic) && networked(spec.Network) {
		r.Network = spec.Network
	}
	if err := e.remember(ctx, b.key(), r); err != nil {
		return h, err
	}
	if err := e.apply(ctx, b, r.Network); err != nil {
		return h, err
	}
	spec.Warm = false
	if err := e.complete(ctx, b, spec); err != nil {
		return h, err
	}
	call, err := e.call(ctx, b)
	if err != nil {
		return h, err
	}
	if err := call.End(call.Agent.Init(call.Ctx, agent.Settings{Fuse: &spec.Fuse})); err != nil {
		return h, err
	}
	r.Fuse, r.Done = spec.Fuse, true
	return h, e.remember(ctx, b.key(), r)
}
