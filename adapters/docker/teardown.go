package docker

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosts"
)

// Teardown implements sandboxer.Extension. Without a generation it removes all of them. An engine that
// cannot be asked is an error, returned after the others are done.
func (e *extension) Teardown(ctx context.Context, h sandboxer.Handle) (report sandboxer.CleanupReport, err error) {
	if err := ctx.Err(); err != nil {
		return report, err
	}
	at, err := e.where(h.Host)
	if err != nil {
		return report, err
	}
	reports, silent := hosts.Ask(at, func(ho *host) ([]sandboxer.CleanupReport, error) {
		r, err := e.teardownOn(ctx, ho, h)
		return []sandboxer.CleanupReport{r}, err
	})
	err = silent.Err()
	if err == nil && h.Host == "" && h.Generation != 0 { // there is none
		err = e.forget(ctx, key(h.SandboxID, h.Generation))
	}
	for _, r := range reports {
		report.Removed = append(report.Removed, r.Removed...)
		report.Kept = append(report.Kept, r.Kept...)
		report.Warnings = append(report.Warnings, r.Warnings...)
	}
	return report, err
}

func (e *extension) teardownOn(ctx context.Context, ho *host, h sandboxer.Handle) (report sandboxer.CleanupReport, err error) {
	made, err := container(h)
	if err != nil {
		return report, err
	}
	there, strangers, err := e.sort(ctx, ho, h.SandboxID, h.Generation)
	if err != nil {
		return report, err
	}
	left := func(name, id string) {
		report.Warnings = append(report.Warnings, fmt.Sprintf("container %s (%.12s) on %s has the labels of sandbox %s and is another one: it was left alone", name, id, ho.name, h.SandboxID))
	}
	for _, s := range strangers {
		left(strings.TrimPrefix(strings.Join(s.Names, ","), "/"), s.ID)
	}
	generations := map[int]bool{}
	if h.Generation != 0 { // also a record without a container
		generations[h.Generation] = true
	}
	for _, b := range there {
		generations[b.generation] = true
	}
	for g := range generations {
		k := key(h.SandboxID, g)
		unlock, err := e.env.Notes.Lock(ctx, k)
		if err != nil {
			return report, err
		}
		err = func() error {
			defer unlock()
			// A sandbox on another host keeps its network; those found below lose theirs.
			r, unread := e.recall(ctx, k)
			if unread != nil || r.Host == ho.name {
				e.unplug(k)
			}
			now, err := e.on(ctx, ho, h.SandboxID, g)
			if err != nil {
				return err
			}
			if made != "" {
				now = slices.DeleteFunc(now, func(b *box) bool {
					if b.container != made {
						left(e.name(b.id, b.generation), b.container)
					}
					return b.container != made
				})
			}
			removed, err := e.remove(ctx, now)
			report.Removed = append(report.Removed, removed...)
			if err != nil {
				return err
			}
			for _, b := range now {
				for _, s := range b.made.Mounts {
					report.Kept = append(report.Kept, s.Source+", which was mounted")
				}
			}
			if err := e.hide(k); err != nil {
				return err
			}
			if err := e.removeRestored(ctx, ho, e.restoredTag(h.SandboxID, g)); err != nil {
				return err
			}
			if unread != nil || r.Host != ho.name { // it is another host's
				return unread
			}
			return e.forget(ctx, k)
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
		e.agents.Drop(e.name(b.id, b.generation))
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
		if sandboxer.KindOf(err) != sandboxer.Conflict { // otherwise another call is removing it
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
