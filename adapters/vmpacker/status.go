package vmpacker

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// IsAlive implements sandboxer.Prober.
func (e *extension) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Unknown, err
	}
	switch _, err := e.find(ctx, h); {
	case err == nil:
		return sandboxer.Alive, nil
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return sandboxer.Gone, nil
	default:
		return sandboxer.Unknown, err
	}
}

// Capacity implements sandboxer.CapacityReporter.
func (e *extension) Capacity(ctx context.Context, host string) (sandboxer.HostCapacity, error) {
	return e.attachedCapacity(ctx, host)
}

// Stats implements sandboxer.StatsReader.
func (e *extension) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	p, err := e.find(ctx, h)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	g, err := e.guest(p)
	if err != nil {
		return sandboxer.Stats{}, err
	}
	if p.Kind == managed {
		return e.machineStats(ctx, p, g)
	}
	return g.stats(ctx)
}

// now is the time of a measurement.
func now() time.Time { return time.Now().UTC().Truncate(time.Millisecond) }
