package manager

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

const (
	// lookEvery is the shortest time between two probes of a sandbox that its extension reports.
	lookEvery = 100 * time.Millisecond
	// maxNotices bounds the sandboxes of one extension that wait to be probed. When it is reached, no more notices are read.
	maxNotices = 1000
)

// listen has the sandboxes probed that the extension e reports, until the manager closes. The survey
// finds those that it reports while nothing listens.
func (e *extension) listen() {
	if e.Backend == nil || !e.Backend.Can(sandboxer.CanNotify) {
		return
	}
	for n := 1; ; n++ {
		began := time.Now()
		err := e.hear()
		if time.Since(began) > reopenEvery {
			n = 1
		}
		wait := min(lifecycle.Backoff(n, rand.Float64()), reopenEvery)
		e.m.log.Debug("notices", "extension", e.Info.ID, "err", err, "again", wait)
		select {
		case <-time.After(wait):
		case <-e.m.ctx.Done():
			return
		}
	}
}

// hear is one connection of listen: it returns why the notices ended.
func (e *extension) hear() error {
	ctx, stop := context.WithCancel(e.m.ctx)
	defer stop()
	told, err := e.Backend.Notify(ctx, e.m.opts.Owner)
	if err != nil {
		return err
	}
	ids := make(chan string)
	over := make(chan error, 1)
	go func() {
		over <- func() error {
			for id, err := range told {
				if err != nil {
					return err
				}
				select {
				case ids <- id:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		}()
	}()
	waiting := map[string]struct{}{}
	var look <-chan time.Time
	var last time.Time
	for {
		more := ids
		if len(waiting) == maxNotices {
			more = nil
		}
		select {
		case id := <-more:
			waiting[id] = struct{}{}
			if look == nil {
				look = time.After(time.Until(last.Add(lookEvery)))
			}
		case <-look:
			for id := range waiting {
				e.lookAt(id)
			}
			clear(waiting)
			look, last = nil, time.Now()
		case err := <-over:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// lookAt probes a sandbox that its extension reported, if its object exists by its record. A job that makes, moves or removes
// the sandbox checks it itself.
func (e *extension) lookAt(id string) {
	sb, err := e.m.store.Sandbox(e.m.ctx, id)
	if err != nil || sb.Extension != e.Info.ID || sb.Damaged != "" || !lifecycle.HasReadyObject(sb) ||
		!e.Backend.Can(sandboxer.CanProbe) {
		return
	}
	e.m.newPass().probe(e, sb, false, true)
}
