package manager

import (
	"context"
	"errors"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/spec"
)

// SetNetwork changes the network policy of a running sandbox, within the limits of its profile. It needs the write scope. When
// it returns nil the policy is in force, also for open connections; after an error the former policy is. Kinds: Conflict if the
// sandbox does not run; Invalid if the policy is malformed, or wider than the profile's; Unsupported if the extension cannot
// change it.
func (m *Manager) SetNetwork(ctx context.Context, ref string, p sandboxer.NetworkPolicy) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.wg.Done()
	// A change that has begun is finished, even if its caller leaves.
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
	// The database comes first: after a crash between the two steps the next process enforces the policy of the database
	// (enforceNetwork).
	var former sandboxer.NetworkPolicy
	err = m.step(pNetworkRecord, func() error {
		return m.box(sb).update(work, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Running {
				return notRunning(sb)
			}
			if err := spec.CheckNetwork(sb.Spec.Profile.Network, &p); err != nil {
				return err
			}
			former = sb.Spec.Network
			sb.Spec.Network = p
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventNetwork, "network "+policyText(p)+", before "+policyText(former)))
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
	back := m.box(sb).update(work, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
		if sb.State != sandboxer.Running {
			return nil // it ends; the policy does not matter any more
		}
		sb.Spec.Network = former
		w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventWarning, "network "+policyText(former)+" again: "+sandboxer.Message(err)))
		return nil
	})
	if k := sandboxer.KindOf(err); k == sandboxer.Timeout || k == sandboxer.Unavailable || k == sandboxer.Internal {
		// The policy may be in force despite the error.
		back = errors.Join(back, b.SetNetwork(work, sb.Handle, former))
	}
	return nil, errors.Join(err, back)
}

// enforceNetwork enforces the policy of the database on a sandbox of a former process, which may have died between the commit
// and the call of the backend.
func (bx box) enforceNetwork() {
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil || bx.sb.State != sandboxer.Running {
		return
	}
	if !b.Can(sandboxer.CanNetwork) {
		bx.m.networkEnforced.add(generationKey{bx.sb.ID, bx.sb.Generation})
		return
	}
	unlock, err := bx.m.networkChanges.lock(bx.m.ctx, bx.sb.ID)
	if err != nil {
		return
	}
	defer unlock()
	now, err := bx.m.store.SandboxGeneration(bx.m.ctx, bx.sb.ID, bx.sb.Generation)
	if err == nil && now.State == sandboxer.Running {
		err = b.SetNetwork(bx.m.ctx, now.Handle, now.Spec.Network)
	}
	if err != nil && bx.m.ctx.Err() == nil {
		bx.m.log.Warn("the network policy of an adopted sandbox could not be enforced again", "sandbox", bx.sb.ID, "err", err)
	}
	if err == nil {
		bx.m.networkEnforced.add(generationKey{bx.sb.ID, bx.sb.Generation})
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
