package docker

import (
	"context"
	"errors"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// sweepSoon removes, in a while, what no sandbox of a host needs any more.
func (e *extension) sweepSoon(h *host) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ctx.Err() != nil {
		return
	}
	if t := e.sweeps[h.name]; t != nil {
		t.Reset(sweepTime)
		return
	}
	e.sweeps[h.name] = time.AfterFunc(sweepTime, func() {
		e.mu.Lock()
		if e.ctx.Err() != nil {
			e.mu.Unlock()
			return
		}
		e.work.Add(1)
		delete(e.sweeps, h.name)
		e.mu.Unlock()
		defer e.work.Done()
		e.sweep(e.ctx, h)
	})
}

// sweep removes images beyond the bound, and, if there is no sandbox, volumes with agents and names of images of
// restored ones. It does not disturb calls that make a sandbox there; then the next sweep does it.
func (e *extension) sweep(ctx context.Context, h *host) {
	unlock, err := e.tryLock("host-" + h.name)
	if err != nil {
		return
	}
	defer unlock()
	if err := e.sweepLocked(ctx, h); err != nil && ctx.Err() == nil {
		e.log.Warn("shared data of sandboxes could not be removed from an engine", "extension", e.env.Extension, "engine", h.name, "err", err)
	}
}

func (e *extension) sweepLocked(ctx context.Context, h *host) error {
	if _, err := e.pruneLocked(ctx, h, e.cfg.Images.Keep); err != nil {
		return err
	}
	boxes, err := e.on(ctx, h, "", 0)
	if err != nil || len(boxes) > 0 {
		return err
	}
	if err := e.removeFillers(ctx, h); err != nil {
		return err
	}
	volumes, err := e.volumesOn(ctx, h)
	if err != nil {
		return err
	}
	if err := e.noteAgent(ctx, h, ""); err != nil {
		return err
	}
	var errs []error
	for _, v := range volumes {
		if err := h.api.RemoveVolume(ctx, v.Name); sandboxer.KindOf(err) != sandboxer.Conflict {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(append(errs, e.removeRestored(ctx, h, ""))...); err != nil {
		return err
	}
	if left, err := e.volumesOn(ctx, h); err != nil || len(left) > 0 { // a container of another owner may use one
		return err
	}
	return e.env.Notes.Delete(ctx, h.name)
}
