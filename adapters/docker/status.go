package docker

import (
	"context"
	"errors"
	"iter"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/filelock"
)

// IsAlive implements sandboxer.Prober. What was made and has not started yet is alive: somebody is making
// it.
func (e *extension) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Unknown, err
	}
	b, err := e.find(ctx, h)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return sandboxer.Gone, nil
	case err != nil:
		return sandboxer.Unknown, err
	}
	switch b.state {
	case "running", "paused", "created", "configured", "initialized":
		return sandboxer.Alive, nil
	}
	c, err := b.host.api.InspectContainer(ctx, b.container)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return sandboxer.Gone, nil
	case err != nil:
		return sandboxer.Unknown, err
	case c.State.Running:
		return sandboxer.Alive, nil
	case outOfMemory(c):
		return sandboxer.OOMKilled, nil
	}
	return sandboxer.Gone, nil
}

// Discover implements sandboxer.Discoverer.
func (e *extension) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	b, err := e.find(ctx, sandboxer.Handle{SandboxID: id})
	if err != nil {
		return sandboxer.Found{}, err
	}
	m, err := readMade(b.labels)
	if err != nil {
		return sandboxer.Found{}, err
	}
	r, err := e.recall(b.key())
	if err != nil {
		return sandboxer.Found{}, err
	}
	f := sandboxer.Found{Handle: e.handle(b), Stamp: m.Stamp, Fuse: m.Fuse}
	if !r.Fuse.IsZero() {
		f.Fuse = r.Fuse
	}
	if r.Stamp != nil {
		f.Stamp = r.Stamp
	}
	return f, nil
}

// ListRunning implements sandboxer.Lister.
func (e *extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		if owner != e.env.Owner { // nothing of others is known here
			return
		}
		var failed error
		for _, n := range e.names {
			all, err := e.on(ctx, e.hosts[n], "", 0)
			failed = errors.Join(failed, err)
			for _, b := range all {
				if !yield(e.handle(b), nil) {
					return
				}
			}
		}
		if failed != nil {
			yield(sandboxer.Handle{}, failed)
		}
	}
}

// room is how many further sandboxes fit on a host, by count and by memory.
func (e *extension) room(ctx context.Context, h *host, limits sandboxer.Limits) (int, error) {
	info, err := h.look(ctx)
	if err != nil {
		return 0, err
	}
	all, err := e.on(ctx, h, "", 0)
	if err != nil {
		return 0, err
	}
	taken := int64(0)
	for _, b := range all {
		if m, err := readMade(b.labels); err == nil {
			taken += m.Memory
		}
	}
	each := max(limits.Or(e.DefaultLimits(sandboxer.Spec{})).MemoryBytes, 1)
	free := min(int64(h.capacity-len(all)), (info.MemTotal-taken)/each)
	return int(max(free, 0)), nil
}

// Capacity implements sandboxer.CapacityReporter.
func (e *extension) Capacity(ctx context.Context, name string) (sandboxer.HostCapacity, error) {
	out := sandboxer.HostCapacity{Attrs: map[string]string{}}
	hosts, err := e.where(sandboxer.Handle{Host: name})
	if err != nil {
		return out, err
	}
	var failed error
	for _, h := range hosts {
		free, err := e.room(ctx, h, sandboxer.Limits{})
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		out.Free += free
		out.Hosts = append(out.Hosts, h.name)
		if info, err := h.look(ctx); err == nil {
			what := "docker "
			if info.Podman {
				what = "podman "
			}
			out.Attrs[h.name] = what + info.ServerVersion + " linux/" + info.Arch() + ", " + strconv.Itoa(info.NCPU) + " processors"
		}
	}
	if len(out.Hosts) == 0 {
		return out, failed
	}
	return out, nil
}

// Stats implements sandboxer.StatsReader, by the engine's word. It does not count what the sandbox has written.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	b, err := e.find(ctx, h)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	if b.state != "paused" {
		if err := e.runs(ctx, b); err != nil {
			return sandboxer.Stats{}, err
		}
	}
	m, err := readMade(b.labels)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	st, err := b.host.api.ContainerStats(ctx, b.container)
	st.MemoryLimit, st.DiskLimit = m.Memory, m.Disk
	return st, err
}

// Pause implements sandboxer.Pauser.
func (e *extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	return e.freeze(ctx, h, "pause", "paused")
}

// Resume implements sandboxer.Pauser.
func (e *extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	return e.freeze(ctx, h, "unpause", "running")
}

func (e *extension) freeze(ctx context.Context, h sandboxer.Handle, what, want string) error {
	b, err := e.find(ctx, h)
	if err != nil {
		return err
	}
	l, err := e.lock(ctx, b.key(), filelock.Exclusive)
	if err != nil {
		return err
	}
	defer l.Remove()
	if b, err = e.find(ctx, e.handle(b)); err != nil {
		return err
	}
	if b.state == want {
		return e.thawed(ctx, b)
	}
	if b.state != "paused" {
		if err := e.runs(ctx, b); err != nil {
			return err
		}
	}
	call := func(ctx context.Context) error { return b.host.api.ContainerCall(ctx, b.container, what) }
	if what == "pause" {
		err = e.agentIn(b.host, e.name(b.id, b.generation), b.container).WithoutDials(ctx, call)
	} else {
		err = call(ctx)
	}
	if err != nil && ctx.Err() == nil {
		// Docker hears late from what it runs containers by, and then says for a moment that one is paused that
		// was let go on just now.
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

// thawed tells the agent of a sandbox that goes on where its fuse was moved meanwhile. The caller holds the sandbox's lock.
func (e *extension) thawed(ctx context.Context, b *box) error {
	if b.state != "running" {
		return nil
	}
	r, err := e.recall(b.key())
	if err != nil || !r.FuseDue {
		return err
	}
	m, err := readMade(b.labels)
	if err != nil {
		return err
	}
	return e.setFuse(ctx, b, m, r.Fuse)
}

// Renew implements sandboxer.Renewer: the agent has the fuse. That of a paused sandbox stands still and is told when it goes on; until
// then nothing passes.
func (e *extension) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	b, err := e.find(ctx, h)
	if err != nil {
		return err
	}
	l, err := e.lock(ctx, b.key(), filelock.Exclusive) // it is neither paused nor let go on meanwhile
	if err != nil {
		return err
	}
	defer l.Remove()
	if b, err = e.find(ctx, e.handle(b)); err != nil {
		return err
	}
	if b.state == "paused" {
		r, err := e.recall(b.key())
		if err != nil {
			return err
		}
		r.Fuse, r.FuseDue = until, true
		return e.remember(b.key(), r)
	}
	if err := e.runs(ctx, b); err != nil {
		return err
	}
	m, err := readMade(b.labels)
	if err != nil {
		return err
	}
	return e.setFuse(ctx, b, m, until)
}

// setFuse moves the fuse, and writes it down. The caller holds the sandbox's lock.
func (e *extension) setFuse(ctx context.Context, b *box, m made, until time.Time) error {
	call, err := e.call(ctx, b, m)
	if err != nil {
		return err
	}
	if err := call.End(call.Agent.Init(call.Ctx, agent.Settings{Fuse: &until})); err != nil {
		return err
	}
	r, err := e.recall(b.key())
	if err != nil {
		return err
	}
	r.Fuse, r.FuseDue = until, false
	return e.remember(b.key(), r)
}
