package manager

import (
	"context"
	"errors"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// SetNetwork changes what a running sandbox may reach, within what its profile allows.
// It needs the write scope. When it returns nil the policy is in force, also for open
// connections. Conflict: it does not run. Invalid: the policy makes no sense, or is
// wider than the profile's. Unsupported: its extension cannot. After an error the
// former policy is in force.
func (m *Manager) SetNetwork(ctx context.Context, ref string, p sandboxer.NetworkPolicy) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.wg.Done()
	// What is begun is brought to its end, also for a caller who leaves.
	work, cancel := m.untilClosed(context.WithoutCancel(ctx))
	defer cancel(nil)
	unlock, err := m.networkChanges.lock(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	defer unlock()
	b, err := m.backend(sb.Extension)
	if err != nil {
		return nil, err
	}
	if !b.Can(sandboxer.CanNetwork) {
		return nil, backend.Lacks(sb.Extension, sandboxer.CanNetwork).
			WithHint("it cannot change the network of a running sandbox: create another with that network")
	}
	// The database comes first: after a crash between the two steps the next process enforces
	// what is in it (enforceNetwork).
	var former sandboxer.NetworkPolicy
	err = m.step(pNetworkRecord, func() error {
		return m.update(work, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Running {
				return notRunning(sb)
			}
			if err := checkNetwork(sb.Spec.Profile.Network, &p); err != nil {
				return err
			}
			former = sb.Spec.Network
			sb.Spec.Network = p
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventNetwork, "network "+policyText(p)+", before "+policyText(former)))
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	err = m.step(pNetworkSet, func() error { return b.SetNetwork(work, sb.Handle, p) })
	if err == nil {
		return m.withLastUse(sb), nil
	}
	if isKind(err, sandboxer.NotFound) {
		m.probeSoon(sb.Handle)
	}
	if m.ctx.Err() != nil {
		return nil, err // the next process enforces what is in the database
	}
	back := m.update(work, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
		if sb.State != sandboxer.Running {
			return nil // it ends; nobody asks any more
		}
		sb.Spec.Network = former
		w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, "network "+policyText(former)+" again: "+sandboxer.Message(err)))
		return nil
	})
	if k := sandboxer.KindOf(err); k == sandboxer.Timeout || k == sandboxer.Unavailable || k == sandboxer.Internal {
		// Perhaps it was done all the same.
		back = errors.Join(back, b.SetNetwork(work, sb.Handle, former))
	}
	return nil, errors.Join(err, back)
}

// enforceNetwork enforces what the database says about a sandbox that a former process left:
// it may have died between the database and the backend.
func (m *Manager) enforceNetwork(sb *sandboxer.Sandbox) {
	b, err := m.backend(sb.Extension)
	if err != nil || sb.State != sandboxer.Running {
		return
	}
	if !b.Can(sandboxer.CanNetwork) {
		m.networkEnforced.add(generationKey{sb.ID, sb.Generation})
		return
	}
	unlock, err := m.networkChanges.lock(m.ctx, sb.ID)
	if err != nil {
		return
	}
	defer unlock()
	now, err := m.store.SandboxGeneration(m.ctx, sb.ID, sb.Generation)
	if err == nil && now.State == sandboxer.Running {
		err = b.SetNetwork(m.ctx, now.Handle, now.Spec.Network)
	}
	if err != nil && m.ctx.Err() == nil {
		m.log.Warn("the network policy of an adopted sandbox could not be enforced again", "sandbox", sb.ID, "err", err)
	}
	if err == nil {
		m.networkEnforced.add(generationKey{sb.ID, sb.Generation})
	}
}

func policyText(p sandboxer.NetworkPolicy) string {
	switch {
	case p.Mode == "":
		return string(sandboxer.NetworkNone)
	case len(p.Allow) > 8:
		return string(p.Mode) + " " + strings.Join(p.Allow[:8], ", ") + ", …"
	case len(p.Allow) > 0:
		return string(p.Mode) + " " + strings.Join(p.Allow, ", ")
	}
	return string(p.Mode)
}
