package manager

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Extend moves the expiry of a running sandbox, and what is on hold for it; of a
// paused one it moves how long that is kept, which costs nothing. Conflict: it neither
// runs nor is paused (any more). Invalid: beyond the profile's longest life, or not in
// the future. NoCredit: the tenant cannot pay for it; nothing has changed.
func (m *Manager) Extend(ctx context.Context, ref string, e Extend) (*sandboxer.Sandbox, error) {
	return m.extend(ctx, ref, e, false)
}

// extend is Extend; with longer, a time to live never shortens.
func (m *Manager) extend(ctx context.Context, ref string, e Extend, longer bool) (*sandboxer.Sandbox, error) {
	if (e.TTL == 0) == (e.Add == 0) || e.TTL < 0 || e.Add < 0 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "want either a time to live from now or a time to add, above zero")
	}
	sb, err := m.find(ctx, sandboxer.ScopeWrite, ref)
	if err != nil {
		return nil, err
	}
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.wg.Done()
	err = m.step(pExtended, func() error {
		return m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Running && sb.State != sandboxer.Paused {
				return notRunning(sb)
			}
			until := sb.ExpiresAt.Add(e.Add)
			if at := now(); sb.Unconfirmed != "" && sb.ExpiresAt.Before(at) {
				until = at.Add(e.Add)
			}
			if e.TTL > 0 {
				until = now().Add(e.TTL)
			}
			if sb.LivesByUse() && sb.State == sandboxer.Running && !(sb.Unconfirmed == sandboxer.Untold && !longer) {
				return livesByUse(sb)
			}
			if sb.Unconfirmed == sandboxer.Untold { // now it is known
				sb.Unconfirmed = ""
			}
			if sb.State == sandboxer.Paused {
				return m.extendPaused(ctx, sb, w, until)
			}
			if sb.LivesByUse() { // it is only told that it is to live on
				sb.UsedAt, until = now(), sb.ExpiresAt
			}
			if longer && !until.After(sb.ExpiresAt) {
				return errNotNeeded
			}
			life := until.Sub(sb.CreatedAt) - sb.PausedFor
			if longest := maxTTL(sb.Spec.Profile); life > longest {
				return sandboxer.E(sandboxer.Invalid, nil, "sandbox %s would live for %s; profile %s allows %s", sb.Shown(), life.Round(time.Second), sb.Profile, longest).
					WithHint("at most until %s", sb.CreatedAt.Add(sb.PausedFor+longest).Format(time.RFC3339))
			}
			// The backend's deadline moves first. Should the rest fail, it is later than
			// need be, which costs nothing while a broker lives; the other way round a
			// sandbox might vanish before the time that was promised and paid for.
			if err := m.renew(ctx, sb, until); err != nil {
				if isKind(err, sandboxer.NotFound) { // its end may have been faster, and is in the database then
					if cur, gerr := m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); gerr == nil && cur.State != sb.State {
						return notRunning(cur)
					}
				}
				return err
			}
			holdMore(sb, w, life)
			sb.ExpiresAt = until
			w.Events = append(w.Events, event(ctx, sb, sandboxer.EventExtend, "expires at "+until.Format(time.RFC3339)))
			return nil
		})
	})
	if err != nil && err != errNotNeeded {
		return nil, err
	}
	return m.withLastUse(sb), nil
}

// livesByUse refuses to move the expiry of what has none but that of its use.
func livesByUse(sb *sandboxer.Sandbox) error {
	return sandboxer.E(sandboxer.Invalid, nil, "sandbox %s has no time to live that could be moved: it lives as long as it is used, and at most as long as profile %s allows", sb.Shown(), sb.Profile).
		WithHint("a command in it is use; for a fixed time, make one with --ttl 1h")
}

// keepFuse moves the fuse of a running sandbox that lives as long as it is used behind that, if it is due
// (fuseDue), by more than that takes, so that it need not be moved again within fuseStep.
func (m *Manager) keepFuse(ctx context.Context, sb *sandboxer.Sandbox) error {
	until := sb.EndsAt().Add(fuseStep)
	if until.After(sb.ExpiresAt) {
		until = sb.ExpiresAt
	}
	return m.renew(ctx, sb, until)
}

// fuseDue reports whether the fuse of sb, whose last use is up to date, has to be moved.
func (m *Manager) fuseDue(sb *sandboxer.Sandbox) bool {
	if !sb.LivesByUse() || sb.State != sandboxer.Running || sb.Unconfirmed != "" || sb.Spec.Fuse.IsZero() {
		return false
	}
	b, err := m.backend(sb.Extension)
	return err == nil && b.Can(sandboxer.CanRenew) && sb.Spec.Fuse.Before(sb.EndsAt().Add(marginOf(sb.Spec.Profile)))
}

// renew moves the backend's own deadline of sb behind until.
func (m *Manager) renew(ctx context.Context, sb *sandboxer.Sandbox, until time.Time) error {
	b, err := m.backend(sb.Extension)
	if err != nil {
		return err
	}
	if !b.Can(sandboxer.CanRenew) {
		return nil
	}
	fuse := until.Add(marginOf(sb.Spec.Profile))
	if err := m.step(pRenew, func() error { return b.Renew(ctx, sb.Handle, fuse) }); err != nil {
		return err
	}
	sb.Spec.Fuse = fuse
	return nil
}
