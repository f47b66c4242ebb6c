package docker

import (
	"context"
	"strconv"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosts"
)

// IsAlive implements sandboxer.Prober. A container that has not started yet is alive: a call is making
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

// room returns how many further sandboxes fit on a host, by count and by memory.
func (e *extension) room(ctx context.Context, h *host, limits sandboxer.Limits) ([]hosts.Room, error) {
	info, err := h.look(ctx)
	if err != nil {
		return nil, err
	}
	all, err := e.on(ctx, h, "", 0)
	if err != nil {
		return nil, err
	}
	taken := int64(0)
	for _, b := range all {
		taken += b.made.Memory
	}
	what := "docker "
	if info.Podman {
		what = "podman "
	}
	each := max(limits.Or(e.DefaultLimits(sandboxer.Spec{})).MemoryBytes, 1)
	free := max(min(int64(h.capacity-len(all)), (info.MemTotal-taken)/each), 0)
	return []hosts.Room{{Host: h.name, Free: int(free), About: what + info.ServerVersion + " linux/" + info.Arch() + ", " + strconv.Itoa(info.NCPU) + " processors"}}, nil
}

// Capacity implements sandboxer.CapacityReporter.
func (e *extension) Capacity(ctx context.Context, name string) (sandboxer.HostCapacity, error) {
	at, err := e.where(name)
	if err != nil {
		return sandboxer.HostCapacity{}, err
	}
	rooms, silent := hosts.Ask(at, func(h *host) ([]hosts.Room, error) { return e.room(ctx, h, sandboxer.Limits{}) })
	if len(rooms) == 0 {
		return sandboxer.HostCapacity{}, silent.Err()
	}
	return hosts.Capacity(rooms), nil
}

// Stats implements sandboxer.StatsReader with the engine's values. It does not count the sandbox's writes to
// the disk.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	b, err := e.find(ctx, h)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	if err := e.lives(ctx, b); err != nil {
		return sandboxer.Stats{}, err
	}
	st, err := b.host.api.ContainerStats(ctx, b.container)
	st.MemoryLimit, st.DiskLimit = b.made.Memory, b.made.Disk
	return st, err
}
