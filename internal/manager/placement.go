package manager

import (
	"context"
	"fmt"
	"slices"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// choosePlace has the extension of sb say on which of its hosts, none of avoid, sb is made,
// and sets sb.Host to that; the caller commits it. Extensions that have no choice keep what
// they were asked for. Naming a place may mean to ask hosts, and is done for creates of which
// neither credit nor quota is known yet: so many ask an extension at once, and the others wait
// until ctx ends. It is a limit apart from that of provisions, which recorded creates wait for.
func (m *Manager) choosePlace(ctx context.Context, sb *sandboxer.Sandbox, env map[string]string, avoid []string) error {
	e := m.extension(sb.Extension)
	if e == nil || e.Backend == nil || !e.Backend.Places() {
		return nil // making it says why
	}
	release, err := takeSlot(ctx, e.placements)
	if err != nil {
		return err
	}
	defer release()
	spec := sb.Spec
	spec.Env, spec.Tenant = env, sb.Tenant
	host, err := e.Backend.Place(ctx, spec, avoid)
	if err == nil {
		sb.Host = host
	}
	return err
}

// clearPlace has a place chosen again for sb, of which the next generation is to be made.
func (m *Manager) clearPlace(sb *sandboxer.Sandbox) {
	if e := m.extension(sb.Extension); e != nil && e.Backend != nil && e.Backend.Places() {
		sb.Host, sb.Untouched = "", true
	}
}

// ensurePlace commits where sb is made, if its record does not say. What an older broker may
// have made of it is looked for first.
func (m *Manager) ensurePlace(ctx context.Context, b *backend.Backend, j *job, sb *sandboxer.Sandbox, env map[string]string) error {
	if !b.Places() || sb.Host != "" {
		if sb.Untouched { // of a former process, which did not come to end it
			return m.commitPlace(ctx, j, sb, sb.Host, "")
		}
		return nil
	}
	if !sb.Untouched {
		where, err := m.discoverHost(ctx, b, sb)
		if err != nil {
			return err
		}
		if where != "" {
			return m.commitPlace(ctx, nil, sb, where, "")
		}
	}
	found := *sb
	if from := sourceOf(sb); from != "" && isNative(sb) { // it is where its snapshot is
		rec, err := m.store.Snapshot(ctx, from)
		if err != nil && !isKind(err, sandboxer.NotFound) {
			return err
		}
		if err == nil && rec.Damaged == "" {
			found.Host = rec.Host
		}
	}
	if found.Host == "" {
		if err := m.choosePlace(ctx, &found, env, nil); err != nil {
			return err
		}
	}
	return m.commitPlace(ctx, j, sb, found.Host, "")
}

// discoverHost returns the host that has the object of sb, "" if none has.
func (m *Manager) discoverHost(ctx context.Context, b *backend.Backend, sb *sandboxer.Sandbox) (string, error) {
	if !b.Can(sandboxer.CanDiscover) {
		return "", nil
	}
	found, err := b.Discover(ctx, sb.ID)
	switch {
	case isKind(err, sandboxer.NotFound):
		return "", nil
	case err != nil:
		return "", err
	case found.Handle.Generation != objectGeneration(sb):
		return "", nil
	}
	return found.Handle.Host, nil
}

// tryOtherHost commits another host for sb, which could not be made at the last one of avoid
// because of err, and reports whether there is one. Nothing may be left behind first. It is
// the only way on to another host.
func (m *Manager) tryOtherHost(ctx context.Context, b *backend.Backend, j *job, sb *sandboxer.Sandbox, env map[string]string, avoid []string, untouched bool, err error) bool {
	retryable := isKind(err, sandboxer.Unavailable) || isKind(err, sandboxer.Exhausted)
	if !b.Places() || !retryable || sb.Spec.Host != "" || sourceOf(sb) != "" && isNative(sb) {
		return false
	}
	next := *sb
	if perr := m.choosePlace(ctx, &next, env, avoid); perr != nil || slices.Contains(avoid, next.Host) {
		return false
	}
	if !untouched {
		terr := m.step(pLeaveHost, func() error { _, err := b.Teardown(ctx, handleOf(sb)); return err })
		if terr != nil {
			m.log.WarnContext(ctx, "not made on another host: it may be left on this one", "sandbox", sb.ID, "host", sb.Host, "err", terr)
			return false
		}
	}
	step := fmt.Sprintf("it could not be made on %s (%s), and is made on %s", sb.Host, sandboxer.Message(err), next.Host)
	if cerr := m.commitPlace(ctx, j, sb, next.Host, step); cerr != nil {
		m.log.WarnContext(ctx, "not made on another host", "sandbox", sb.ID, "host", next.Host, "err", cerr)
		return false
	}
	return true
}

// commitPlace writes down that sb is made on host, before the host hears of it. j, if the
// place is new, makes use of that. step, if there is one, is told as an event.
func (m *Manager) commitPlace(ctx context.Context, j *job, sb *sandboxer.Sandbox, host, step string) error {
	err := m.step(pPlaced, func() error {
		return m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Creating {
				return errTerminating
			}
			sb.Host, sb.Untouched = host, false
			if step != "" {
				w.Events = append(w.Events, event(ctx, sb, sandboxer.EventStep, step))
			}
			return nil
		})
	})
	if err == nil && j != nil {
		j.untried = true
	}
	return err
}

// commitUntouched commits that there is nothing of sb at its place, so that its end need not
// wait for a host that never heard of it; also when a destroy has come in between.
func (m *Manager) commitUntouched(ctx context.Context, sb *sandboxer.Sandbox) error {
	keep := context.WithoutCancel(ctx)
	return m.step(pUntouched, func() error {
		return m.update(keep, sb, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if sb.State != sandboxer.Creating && sb.State != sandboxer.Terminating {
				return errTerminating
			}
			sb.Untouched = true
			return nil
		})
	})
}

// recordHost fills in where sb is, of which the record does not say it.
func (m *Manager) recordHost(t *tracker, sb *sandboxer.Sandbox, at sandboxer.Handle) {
	m.async(t, func() {
		err := m.update(m.ctx, sb, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
			if sb.Host != "" || objectGeneration(sb) != at.Generation || !sb.State.Live() {
				return errNotNeeded
			}
			sb.Host = at.Host
			return nil
		})
		if err != nil && err != errNotNeeded && m.ctx.Err() == nil {
			m.log.Warn("where a sandbox was found is not written down", "sandbox", sb.ID, "host", at.Host, "err", err)
		}
	})
}

// Recorded returns the handles of the sandboxes of an extension that have not ended as far as
// their records say. What is left of a damaged record has no more than ID and generation.
func Recorded(ctx context.Context, store sandboxer.Store, extension string) ([]sandboxer.Handle, error) {
	var all []sandboxer.Handle
	q := sandboxer.Query{Extension: extension, States: liveStates, Limit: sandboxer.MaxPage}
	for {
		items, next, err := store.Sandboxes(ctx, q)
		if err != nil {
			return nil, err
		}
		for _, sb := range items {
			all = append(all, handleOf(sb))
		}
		if next == "" {
			return all, nil
		}
		q.After = next
	}
}
