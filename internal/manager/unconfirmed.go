package manager

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A database that went back (Options.WentBack) has records that are older than their
// sandboxes: one may have been extended since, claimed from a pool, paused, resumed or
// finished. Each living record says so (Sandbox.Unconfirmed), and the sweep acts on no
// deadline of it, resumes nothing and hands nothing out, until the survey of its extension
// has asked the backend. What the backend cannot tell, people decide.

// confirmRecord holds the unconfirmed record of sb against its backend.
func (m *Manager) confirmRecord(t *tracker, e *extension, sb *sandboxer.Sandbox) {
	if m.working(sb.ID) || !m.sweepLocks.tryLock(sb.ID) {
		return
	}
	m.async(t, func() {
		release, err := m.slot(m.ctx, e.Info.ID)
		if err != nil {
			m.unlockSweep(sb.ID)
			return
		}
		err = m.compareWithBackend(m.ctx, e, sb)
		release()
		m.unlockSweep(sb.ID)
		switch {
		case err == nil:
			m.sweepOne(t, sb, sandboxer.Unknown)
		case err != errNotNeeded && m.ctx.Err() == nil:
			m.log.Warn("a record could not be confirmed after the database went back; it is tried again", "sandbox", sb.ID, "generation", sb.Generation, "err", err)
		}
	})
}

// compareWithBackend asks the backend about sb, and settles what its record says. An error leaves it
// unconfirmed.
func (m *Manager) compareWithBackend(ctx context.Context, e *extension, sb *sandboxer.Sandbox) error {
	b := e.Backend
	var found sandboxer.Found
	var err error
	if b.Can(sandboxer.CanDiscover) {
		if found, err = b.Discover(ctx, sb.ID); err != nil && !isKind(err, sandboxer.NotFound) {
			return err
		}
	}
	if found.Handle.Generation > objectGeneration(sb) {
		// It went on without the record, and is quarantined.
		if sb.State == sandboxer.Creating {
			return m.endStaleRecord(ctx, sb, "the database went back, and a later generation of it exists by now")
		}
		return m.commitConfirmed(ctx, sb, "", sandboxer.Found{}, "")
	}
	if found.Handle.SandboxID != "" {
		return m.compareWithObject(ctx, e, sb, found)
	}
	if sb.State == sandboxer.Paused && !hasReadyObject(sb) { // it has no object, as far as anybody knows
		return m.commitConfirmed(ctx, sb, sandboxer.Untold, found, "the database went back, and nobody can tell whether it was to be kept for longer")
	}
	there := sandboxer.Unknown
	if b.Can(sandboxer.CanProbe) {
		if there, err = b.IsAlive(ctx, handleOf(sb)); err != nil {
			return err
		}
	}
	gone := there == sandboxer.Gone || there == sandboxer.OOMKilled
	switch {
	case there == sandboxer.Unknown && b.Can(sandboxer.CanProbe):
		return sandboxer.E(sandboxer.Unavailable, nil, "%s cannot say whether it is there", e.Info.ID)
	case gone && sb.State == sandboxer.Creating:
		return m.endStaleRecord(ctx, sb, "the database went back, and its backend does not have it any more")
	case gone && sb.State == sandboxer.Pausing && sb.Pause.Snapshot != "":
		return sandboxer.E(sandboxer.Unavailable, nil, "it may be paused by now, or removed") // and what it was paused to must not be dropped
	case gone:
		return m.commitConfirmed(ctx, sb, "", found, "")
	case isPooled(sb):
		return m.commitConfirmed(ctx, sb, sandboxer.Claimed, found, "the database went back, and nobody can tell whether it was claimed since")
	}
	return m.commitConfirmed(ctx, sb, sandboxer.Untold, found, "the database went back, and its backend cannot tell how long it was to live")
}

// compareWithObject settles the record of sb by what the backend found of its object.
func (m *Manager) compareWithObject(ctx context.Context, e *extension, sb *sandboxer.Sandbox, found sandboxer.Found) error {
	if isPooled(sb) {
		if was := m.openStamp(found); was != nil && isPooled(was) {
			return m.commitConfirmed(ctx, sb, "", found, "")
		}
		return m.commitConfirmed(ctx, sb, sandboxer.Claimed, found, "the database went back, and it was claimed since, as far as its stamp can tell")
	}
	if sb.State == sandboxer.Running && e.Backend.Can(sandboxer.CanPause) { // it may be frozen since
		if err := m.step(pUnfreeze, func() error { return e.Backend.Resume(ctx, found.Handle) }); err != nil {
			return err
		}
	}
	if found.Fuse.IsZero() && !sb.ExpiresAt.IsZero() {
		return m.commitConfirmed(ctx, sb, sandboxer.Untold, found, "the database went back, and its backend cannot tell how long it was to live")
	}
	return m.commitConfirmed(ctx, sb, "", found, "")
}

// commitConfirmed commits what became known of sb, and when it ends by the fuse that was found.
func (m *Manager) commitConfirmed(ctx context.Context, sb *sandboxer.Sandbox, as sandboxer.Unconfirmed, found sandboxer.Found, why string) error {
	settle := func(covered bool) error {
		return m.update(ctx, sb, func(sb *sandboxer.Sandbox, w *sandboxer.Writes) error {
			if sb.Unconfirmed != sandboxer.Unasked || sb.State == sandboxer.Terminated {
				return errNotNeeded
			}
			sb.Unconfirmed, sb.ConfirmedAt = as, now()
			if sb.State == sandboxer.Running && sb.UsedAt.Before(sb.ConfirmedAt) {
				sb.UsedAt = sb.ConfirmedAt // when it really was, nobody knows
			}
			if found.Handle.SandboxID != "" && sb.Handle.SandboxID == "" && sb.State == sandboxer.Creating && !isClaimed(sb) {
				sb.Handle = found.Handle
			}
			if as == "" && !found.Fuse.IsZero() {
				m.followFuse(sb, w, found.Fuse, covered)
			}
			if why != "" {
				w.Events = append(w.Events, event(ctx, sb, sandboxer.EventWarning, why))
			}
			return nil
		})
	}
	err := settle(true)
	if isKind(err, sandboxer.NoCredit) {
		err = settle(false)
	}
	if err == nil && why != "" {
		m.log.Warn(why, "sandbox", sb.ID, "generation", sb.Generation, "extension", sb.Extension)
	}
	return err
}

// followFuse has the record of sb expire as its backend's fuse says, which was moved since. What
// that costs is put on hold, unless the tenant does not have it (covered is not set):
// then no more is charged than is on hold.
func (m *Manager) followFuse(sb *sandboxer.Sandbox, w *sandboxer.Writes, fuse time.Time, covered bool) {
	const tolerance = 2 * time.Second // of backends that keep whole seconds
	if fuse.Sub(sb.Spec.Fuse).Abs() < tolerance || sb.ExpiresAt.IsZero() {
		return
	}
	if sb.LivesByUse() && sb.State == sandboxer.Running { // it was used since
		sb.Spec.Fuse = fuse
		if used := fuse.Add(-marginOf(sb.Spec.Profile) - fuseStep - sb.Spec.Profile.Idle).UTC().Truncate(time.Microsecond); used.After(sb.UsedAt) && used.Before(now()) {
			sb.UsedAt = used
		}
		return
	}
	until := fuse.Add(-fuseMargin).UTC().Truncate(time.Microsecond)
	if sb.State != sandboxer.Paused && sb.State != sandboxer.Pausing {
		if last := sb.CreatedAt.Add(sb.PausedFor + maxTTL(sb.Spec.Profile)); until.After(last) { // nobody can have asked for more
			until = last
		}
	}
	sb.Spec.Fuse = fuse
	if until.Equal(sb.ExpiresAt) {
		return
	}
	sb.ExpiresAt = until
	w.Events = append(w.Events, event(m.ctx, sb, sandboxer.EventExtend, "the database went back; by its backend it expires at "+until.Format(time.RFC3339)))
	life := until.Sub(sb.CreatedAt) - sb.PausedFor
	if covered && (sb.State == sandboxer.Running || sb.State == sandboxer.Creating) {
		holdMore(sb, w, life)
	}
}

// endStaleRecord ends a record whose create is over since.
func (m *Manager) endStaleRecord(ctx context.Context, sb *sandboxer.Sandbox, why string) error {
	err := m.beginTeardown(ctx, sb, ending{reason: sandboxer.ReasonLost, message: why, still: func(sb *sandboxer.Sandbox) bool {
		return sb.State == sandboxer.Creating && sb.Unconfirmed == sandboxer.Unasked
	}})
	if err != nil {
		return err
	}
	m.log.Warn(why, "sandbox", sb.ID, "generation", sb.Generation, "extension", sb.Extension)
	return nil
}

// unconfirmedText says for the audit what is not known of sb, and what to do.
func unconfirmedText(sb *sandboxer.Sandbox) string {
	switch sb.Unconfirmed {
	case sandboxer.Untold:
		return fmt.Sprintf("the database went back, and %s cannot tell whether it was extended; it is kept until somebody decides; sandboxer extend %s --ttl 1h; or sandboxer destroy %s", sb.Extension, sb.ID, sb.ID)
	case sandboxer.Claimed:
		return fmt.Sprintf("the database went back, and it may have been claimed from its pool since; it is kept until its fuse; sandboxer adopt %s; or sandboxer destroy %s", sb.ID, sb.ID)
	}
	return fmt.Sprintf("the database went back, and %s did not say yet whether what it knows still holds", cmp.Or(sb.Extension, "its extension"))
}

// mayBeClaimed reports whether the database may be wrong about whose the object of sb is.
func mayBeClaimed(sb *sandboxer.Sandbox) bool { return sb.Unconfirmed == sandboxer.Claimed }
