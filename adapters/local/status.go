//go:build linux

package local

import (
	"context"
	"errors"
	"fmt"
	"time"

	"gvisor.dev/gvisor/pkg/sentry/control"

	"github.com/sand-boxer/sandboxer"
)

// IsAlive implements sandboxer.Prober. The process shows that a sandbox exists; its kernel
// shows whether it works.
func (e *extension) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	b, err := e.of(h)
	switch {
	case err == nil:
		err := b.pulse.check(ctx, b.pulse.period())
		if !b.goferAlive() {
			b.endWithFiles()
			if b.ended() {
				e.drop(b.name)
				return sandboxer.Gone, nil
			}
			return sandboxer.Unresponsive, nil // until it has ended
		}
		switch {
		case err == nil && b.alive():
			return sandboxer.Alive, nil
		case err == nil: // it ended during the check
			e.drop(b.name)
			return sandboxer.Gone, nil
		case errors.Is(err, errUnresponsive) && b.pulse.quiet():
			return sandboxer.Alive, nil
		case errors.Is(err, errUnresponsive):
			b.pulse.doubt() // calls then get this result
			return sandboxer.Unresponsive, nil
		}
		return sandboxer.Unknown, err
	case errors.Is(err, errDamaged):
		// Its processes may run, but no call can reach them any more.
		if name, ferr := e.find(h); ferr == nil {
			pids, perr := e.processes(name)
			if perr != nil {
				return sandboxer.Unknown, perr
			}
			if len(pids) > 0 {
				return sandboxer.Unresponsive, nil
			}
		}
		return sandboxer.Gone, nil
	case errors.Is(err, sandboxer.NotFound):
		if name, ferr := e.find(h); ferr == nil && e.cgroups.oomKilled(name) {
			return sandboxer.OOMKilled, nil
		}
		return sandboxer.Gone, nil
	}
	return sandboxer.Unknown, err
}

// Capacity implements sandboxer.CapacityReporter. Free is the present free memory: sandboxes
// that grow later can still exceed the machine's, if their limits allow it.
func (e *extension) Capacity(_ context.Context, host string) (sandboxer.HostCapacity, error) {
	if host != "" && host != "localhost" {
		return sandboxer.HostCapacity{}, sandboxer.E(sandboxer.NotFound, nil, "%s has no host %q", e.env.Extension, host)
	}
	mode := "root"
	if !e.asRoot {
		mode = "ordinary user"
	}
	o := sandboxer.HostCapacity{Free: -1, Hosts: []string{"localhost"}, Attrs: map[string]string{"platform": "systrap", "runs_as": mode}}
	if !e.cgroups.usable() {
		o.Attrs["limits"] = e.cgroups.why
	}
	left := e.memory.room()
	if left < 0 {
		return o, nil
	}
	names, err := e.names()
	if err != nil {
		return o, sandboxer.E(sandboxer.Internal, err, "the state directory of %s cannot be read", e.env.Extension)
	}
	size := e.memory.size(names)
	o.Free = int(left / size)
	o.Attrs["memory"] = fmt.Sprintf("%d MiB for sandboxes, counted with %d MiB each", left>>20, size>>20)
	return o, nil
}

// Stats implements sandboxer.StatsReader.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	b, err := e.of(h)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	s := sandboxer.Stats{At: time.Now().UTC(), DiskBytes: -1, DiskLimit: b.rec.Limits.DiskBytes, PIDs: -1, RxBytes: -1, TxBytes: -1}
	s.CPU, s.MemoryBytes, s.MemoryLimit = e.cgroups.usage(b.name)
	var procs []*control.Process
	err = b.ask(ctx, func(ctx context.Context) (err error) { procs, err = b.ctl.processes(ctx); return err })
	if errors.Is(err, errUnresponsive) {
		return sandboxer.Stats{}, err
	}
	if err == nil {
		s.PIDs = 0
		for _, p := range procs {
			s.PIDs += int64(max(1, len(p.Threads)))
		}
	}
	if e.frozen(b.name) != "" {
		return s, nil // the agent does not answer
	}
	var in sandboxer.Stats
	err = b.within(ctx, false, func(ctx context.Context) (err error) { in, err = b.agent.Stats(ctx); return err })
	if errors.Is(err, errUnresponsive) {
		return sandboxer.Stats{}, err
	}
	if err == nil {
		s.DiskBytes = in.DiskBytes
		if s.CPU < 0 {
			s.CPU = in.CPU
		}
		if s.MemoryBytes < 0 {
			s.MemoryBytes = in.MemoryBytes
		}
	}
	return s, nil
}
