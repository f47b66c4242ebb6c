package docker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
)

// Teardown implements sandboxer.Extension. Without a generation it removes all of them. An engine that
// cannot be asked is an error, after the others were seen to.
func (e *extension) Teardown(ctx context.Context, h sandboxer.Handle) (report sandboxer.CleanupReport, err error) {
	if err := ctx.Err(); err != nil {
		return report, err
	}
	hosts, err := e.where(h)
	if err != nil {
		return report, err
	}
	reports := make(chan sandboxer.CleanupReport, len(hosts))
	err = each(hosts, func(ho *host) error {
		r, err := e.teardownOn(ctx, ho, h)
		reports <- r
		if err != nil {
			var se *sandboxer.Error
			if errors.As(err, &se) && se.Kind == sandboxer.Unavailable {
				return sandboxer.E(sandboxer.Unavailable, err, "host %s: %s", ho.name, se.Msg).WithHint("%s", se.Hint)
			}
		}
		return err
	})
	if err == nil && h.Host == "" && h.Generation != 0 { // it is nowhere
		err = e.forget(key(h.SandboxID, h.Generation))
	}
	close(reports)
	for r := range reports {
		report.Removed = append(report.Removed, r.Removed...)
		report.Kept = append(report.Kept, r.Kept...)
		report.Warnings = append(report.Warnings, r.Warnings...)
	}
	return report, err
}

func (e *extension) teardownOn(ctx context.Context, ho *host, h sandboxer.Handle) (report sandboxer.CleanupReport, err error) {
	there, err := e.on(ctx, ho, h.SandboxID, h.Generation)
	if err != nil {
		return report, err
	}
	generations := map[int]bool{}
	if h.Generation != 0 { // what was written down and not made, too
		generations[h.Generation] = true
	}
	for _, b := range there {
		generations[b.generation] = true
	}
	for g := range generations {
		k := key(h.SandboxID, g)
		l, err := e.lock(ctx, k, filelock.Exclusive)
		if err != nil {
			return report, err
		}
		err = func() error {
			defer l.Remove()
			// The network is not that of one on another host, which stays; what is found below loses its own.
			if r, err := e.recall(k); err != nil || r.Host == ho.name {
				e.unplug(k)
			}
			now, err := e.on(ctx, ho, h.SandboxID, g)
			if err != nil {
				return err
			}
			removed, err := e.remove(ctx, now)
			report.Removed = append(report.Removed, removed...)
			for _, b := range now {
				if m, merr := readMade(b.labels); err == nil && merr == nil {
					for _, s := range m.Mounts {
						report.Kept = append(report.Kept, s.Source+", which was mounted")
					}
				}
			}
			if err == nil {
				err = e.hide(k)
			}
			if err == nil {
				err = e.removeRestored(ctx, ho, e.restoredTag(h.SandboxID, g))
			}
			if err != nil {
				return err
			}
			r, err := e.recall(k)
			if err == nil && r.Host == ho.name { // else it is another host's
				err = e.forget(k)
			}
			return err
		}()
		if err != nil {
			return report, err
		}
	}
	if len(there) > 0 {
		e.sweepSoon(ho)
	}
	return report, nil
}

// remove removes containers. When it returns nil they are gone.
func (e *extension) remove(ctx context.Context, all []*box) (removed []string, err error) {
	for _, b := range all {
		e.dropAgent(e.name(b.id, b.generation))
		e.unplug(b.key())
		if err := e.removeContainer(ctx, b); err != nil {
			return removed, err
		}
		removed = append(removed, fmt.Sprintf("container %s on %s", e.name(b.id, b.generation), b.host.name))
	}
	return removed, nil
}

func (e *extension) removeContainer(ctx context.Context, b *box) error {
	for {
		err := b.host.api.RemoveContainer(ctx, b.container)
		switch sandboxer.KindOf(err) {
		case "", sandboxer.NotFound:
			return nil
		case sandboxer.Conflict: // somebody else is removing it
		default:
			return err
		}
		if _, ierr := b.host.api.InspectContainer(ctx, b.container); sandboxer.KindOf(ierr) == sandboxer.NotFound {
			return nil
		}
		select {
		case <-ctx.Done():
			return sandboxer.E(sandboxer.KindOf(ctx.Err()), err, "the container of sandbox %s is still being removed", b.id)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
