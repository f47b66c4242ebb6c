package manager

import (
	"context"
	"fmt"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// choosePlace has the extension of sb choose one of its hosts, except those of avoid, and sets sb.Host to it; the caller
// commits it. Extensions without a choice keep the requested host. The choice may have to ask hosts, also for creates whose
// credit and quota are not checked yet. So only a limited number of creates asks an extension at once, and the others wait
// until ctx ends. This limit is separate from that of provisions, for which recorded creates wait.
func (bx box) choosePlace(ctx context.Context, env map[string]string, avoid []string) error {
	e := bx.m.extension(bx.sb.Extension)
	if e == nil || e.Backend == nil || !e.Backend.Places() {
		return nil // making it says why
	}
	release, err := takeSlot(ctx, e.placements)
	if err != nil {
		return err
	}
	defer release()
	spec := bx.sb.Spec
	spec.Env, spec.Tenant = env, bx.sb.Tenant
	host, err := e.Backend.Place(ctx, spec, avoid)
	if err == nil {
		bx.sb.Host = host
	}
	return err
}

// clearPlace removes the host from the record of sb, so that the next generation gets a new choice.
func (bx box) clearPlace() {
	if e := bx.m.extension(bx.sb.Extension); e != nil && e.Backend != nil && e.Backend.Places() {
		bx.sb.Host, bx.sb.Untouched = "", true
	}
}

// ensurePlace commits the host on which sb is made, if its record has none. It first looks for an object that an older broker
// may have made.
func (wk backed) ensurePlace(ctx context.Context, env map[string]string) error {
	if !wk.b.Places() || wk.sb.Host != "" {
		if wk.sb.Untouched { // of a former process, which did not come to end it
			return wk.commitPlace(ctx, wk.sb.Host, "")
		}
		return nil
	}
	if !wk.sb.Untouched {
		where, err := wk.discoverHost(ctx, wk.b)
		if err != nil {
			return err
		}
		if where != "" {
			return wk.box.in(nil).commitPlace(ctx, where, "")
		}
	}
	found := *wk.sb
	if from := lifecycle.SourceOf(wk.sb); from != "" && lifecycle.IsNative(wk.sb) { // it is where its snapshot is
		rec, err := wk.m.store.Snapshot(ctx, from)
		if err != nil && !isKind(err, sandboxer.NotFound) {
			return err
		}
		if err == nil && rec.Damaged == "" {
			found.Host = rec.Host
		}
	}
	if found.Host == "" {
		if err := wk.m.box(&found).choosePlace(ctx, env, nil); err != nil {
			return err
		}
	}
	return wk.commitPlace(ctx, found.Host, "")
}

// discoverHost returns the host that has the object of sb, "" if none has.
func (bx box) discoverHost(ctx context.Context, b *backend.Backend) (string, error) {
	if !b.Can(sandboxer.CanDiscover) {
		return "", nil
	}
	found, err := b.Discover(ctx, bx.sb.ID)
	switch {
	case isKind(err, sandboxer.NotFound):
		return "", nil
	case err != nil:
		return "", err
	case found.Handle.Generation != lifecycle.ObjectGeneration(bx.sb):
		return "", nil
	}
	return found.Handle.Host, nil
}

// tryOtherHost commits another host for sb, which the last host of avoid could not make because of err, and reports whether
// there is one. Nothing may be left on the former host. This is the only way by which sb gets another host.
func (wk backed) tryOtherHost(ctx context.Context, env map[string]string, avoid []string, untouched bool, err error) bool {
	retryable := isKind(err, sandboxer.Unavailable) || isKind(err, sandboxer.Exhausted)
	if !wk.b.Places() || !retryable || wk.sb.Spec.Host != "" || lifecycle.SourceOf(wk.sb) != "" && lifecycle.IsNative(wk.sb) {
		return false
	}
	next := *wk.sb
	if perr := wk.m.box(&next).choosePlace(ctx, env, avoid); perr != nil || slices.Contains(avoid, next.Host) {
		return false
	}
	if !untouched {
		terr := wk.m.step(pLeaveHost, func() error { _, err := wk.b.Teardown(ctx, handleOf(wk.sb)); return err })
		if terr != nil {
			wk.m.log.WarnContext(ctx, "not made on another host: parts may remain on this one", "sandbox", wk.sb.ID, "host", wk.sb.Host, "err", terr)
			return false
		}
	}
	step := fmt.Sprintf("it could not be created on %s (%s), and is created on %s", wk.sb.Host, sandboxer.Message(err), next.Host)
	if cerr := wk.commitPlace(ctx, next.Host, step); cerr != nil {
		wk.m.log.WarnContext(ctx, "not made on another host", "sandbox", wk.sb.ID, "host", next.Host, "err", cerr)
		return false
	}
	return true
}

// commitPlace records that sb is made on host, before the host is asked. If the place is
// new, j uses that. step, if there is one, is written as an event.
func (wk work) commitPlace(ctx context.Context, host, step string) error {
	err := wk.m.step(pPlaced, func() error {
		return wk.update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Creating {
				return errTerminating
			}
			sb.Host, sb.Untouched = host, false
			if step != "" {
				w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventStep, step))
			}
			return nil
		})
	})
	if err == nil && wk.j != nil {
		wk.j.untried = true
	}
	return err
}

// commitUntouched commits that nothing of sb is at its place, so that its end need not
// wait for a host that was never asked; also when a destroy has come in between.
func (bx box) commitUntouched(ctx context.Context) error {
	keep := context.WithoutCancel(ctx)
	return bx.m.step(pUntouched, func() error {
		return bx.update(keep, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if sb.State != sandboxer.Creating && sb.State != sandboxer.Terminating {
				return errTerminating
			}
			sb.Untouched = true
			return nil
		})
	})
}

// recordHost adds the host of sb to its record, which has none.
func (ps *pass) recordHost(sb *sandboxer.Sandbox, at sandboxer.Handle) {
	ps.async(func() {
		err := ps.m.box(sb).update(ps.m.ctx, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if sb.Host != "" || lifecycle.ObjectGeneration(sb) != at.Generation || !sb.State.Live() {
				return errNotNeeded
			}
			sb.Host = at.Host
			return nil
		})
		if err != nil && err != errNotNeeded && ps.m.ctx.Err() == nil {
			ps.m.log.Warn("the host of a sandbox that was found could not be stored", "sandbox", sb.ID, "host", at.Host, "err", err)
		}
	})
}

// Recorded returns the handles of the sandboxes of an extension that have not ended by their records, and of the debts of
// others there. A damaged record yields only ID and generation.
func Recorded(ctx context.Context, store sandboxer.Store, extension string) ([]sandboxer.Handle, error) {
	var all []sandboxer.Handle
	for _, q := range []sandboxer.Query{{Extension: extension}, {DebtsAt: extension}} {
		q.States, q.Limit = liveStates, sandboxer.MaxPage
		for {
			items, next, err := store.Sandboxes(ctx, q)
			if err != nil {
				return nil, err
			}
			for _, sb := range items {
				if q.DebtsAt == "" {
					all = append(all, handleOf(sb))
				}
				for _, d := range sb.Debts {
					if q.DebtsAt == d.Extension {
						all = append(all, d.Handle)
					}
				}
			}
			if next == "" {
				break
			}
			q.After = next
		}
	}
	return all, nil
}
