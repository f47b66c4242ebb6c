package manager

import (
	"context"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/events"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// Extend moves the expiry of a running sandbox and adjusts its hold. For a paused sandbox it moves the time until which it is
// kept, which costs nothing. Kinds: Conflict if the sandbox is neither running nor paused; Invalid for a time beyond the
// profile's longest life, or not in the future; NoCredit if the tenant cannot pay, and then nothing has changed.
func (m *Manager) Extend(ctx context.Context, ref string, e Extend) (*sandboxer.Sandbox, error) {
	return m.extend(ctx, ref, e, false)
}

// extend is Extend; with longer, a time to live never shortens.
func (m *Manager) extend(ctx context.Context, ref string, e Extend, longer bool) (*sandboxer.Sandbox, error) {
	if (e.TTL == 0) == (e.Add == 0) || e.TTL < 0 || e.Add < 0 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "want either a time to live from now or a time to add, above zero").
			WithHint("give one of the two: sandboxer extend ID --ttl 1h")
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
		return m.box(sb).update(ctx, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.State != sandboxer.Running && sb.State != sandboxer.Paused {
				return notRunning(sb)
			}
			until := sb.ExpiresAt.Add(e.Add)
			if at := now(); !m.WentBack().IsZero() && sb.ExpiresAt.Before(at) {
				until = at.Add(e.Add)
			}
			if e.TTL > 0 {
				until = now().Add(e.TTL)
			}
			if sb.LivesByUse() && sb.State == sandboxer.Running {
				return livesByUse(sb)
			}
			if sb.State == sandboxer.Paused {
				return m.box(sb).extendPaused(ctx, w, until)
			}
			if longer && !until.After(sb.ExpiresAt) {
				return errNotNeeded
			}
			life := lifecycle.LifeUntil(sb, until)
			if longest := lifecycle.MaxTTL(sb.Spec.Profile); life > longest {
				return sandboxer.E(sandboxer.Invalid, nil, "sandbox %s would live for %s; profile %s allows %s", sb.Shown(), life.Round(time.Second), sb.Profile, longest).
					WithHint("at most until %s", lifecycle.LatestExpiry(sb).Format(time.RFC3339))
			}
			// The backend's deadline moves first. If the rest fails, that deadline is later than necessary, which costs nothing
			// while a broker lives. In the opposite order a sandbox might end before the time that was promised and paid for.
			if err := m.box(sb).renew(ctx, until); err != nil {
				if isKind(err, sandboxer.NotFound) { // its end may have been faster, and is in the database then
					if cur, gerr := m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); gerr == nil && cur.State != sb.State {
						return notRunning(cur)
					}
				}
				return err
			}
			holdMore(ctx, sb, w, life)
			sb.ExpiresAt = until
			w.Events = append(w.Events, events.Of(ctx, sb, sandboxer.EventExtend, "expires at "+until.Format(time.RFC3339)))
			return nil
		})
	})
	if err != nil && err != errNotNeeded {
		return nil, err
	}
	return m.withLastUse(sb), nil
}

// livesByUse refuses to move the expiry of a sandbox that lives as long as it is used.
func livesByUse(sb *sandboxer.Sandbox) error {
	return sandboxer.E(sandboxer.Invalid, nil, "the expiry of sandbox %s cannot be moved: it lives as long as it is used, and at most as long as profile %s allows", sb.Shown(), sb.Profile).
		WithHint("each command in it counts as use; for a fixed time, create one with --ttl 1h")
}

// keepFuse moves the fuse of a running sandbox that lives as long as it is used behind its last use, if that is due (fuseDue).
// It moves the fuse further than needed, so that it need not move again within lifecycle.FuseStep.
func (bx box) keepFuse(ctx context.Context) error {
	return bx.renew(ctx, lifecycle.KeepUntil(bx.sb))
}

// fuseDue reports whether the fuse of sb, whose last use is up to date, has to be moved.
func (bx box) fuseDue() bool {
	if !lifecycle.IsFuseLate(bx.sb) {
		return false
	}
	b, err := bx.m.backend(bx.sb.Extension)
	return err == nil && renews(b)
}

// renews reports whether the fuses of a backend can be moved; there may be none.
func renews(b *backend.Backend) bool { return b != nil && b.Can(sandboxer.CanRenew) }

// renew moves the backend's own deadline of sb to until or later, or refuses that as Unsupported.
func (bx box) renew(ctx context.Context, until time.Time) error {
	b, err := bx.m.backend(bx.sb.Extension)
	if err != nil {
		return err
	}
	if !b.Can(sandboxer.CanRenew) {
		return bx.checkFuse(ctx, b, until)
	}
	fuse := until.Add(lifecycle.MarginOf(bx.sb.Spec.Profile))
	if err := bx.m.step(pRenew, func() error { return b.Renew(ctx, bx.sb.Handle, fuse) }); err != nil {
		return err
	}
	bx.sb.Spec.Fuse = fuse
	return nil
}

// checkFuse refuses a life beyond the deadline of a backend that cannot move it. One that does not tell a deadline has none.
func (bx box) checkFuse(ctx context.Context, b *backend.Backend, until time.Time) error {
	if !until.After(bx.sb.Spec.Fuse) || !b.Can(sandboxer.CanDiscover) {
		return nil
	}
	found, err := b.Discover(ctx, bx.sb.ID)
	if err != nil || found.Fuse.IsZero() || !until.After(found.Fuse) {
		return err
	}
	return sandboxer.E(sandboxer.Unsupported, nil, "%s ends sandbox %s at %s, and cannot move that", bx.sb.Extension, bx.sb.Shown(), found.Fuse.UTC().Format(time.RFC3339)).
		WithHint("save it and restore the snapshot, or create one with the time to live that it needs: --ttl")
}
