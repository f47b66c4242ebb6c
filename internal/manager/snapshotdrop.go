package manager

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// DropSnapshot removes a snapshot and returns its record, dropped. Sandboxes restored from it are not affected. A snapshot that
// is dropped already is success. An administrator may name one that the database does not know, by its whole ID. Conflict: a
// sandbox is being restored from it, or a paused sandbox resumes from it. If the backend cannot drop it now, the error is
// Unavailable and the sweep continues until it is dropped.
func (m *Manager) DropSnapshot(ctx context.Context, ref string) (*sandboxer.SnapshotRecord, error) {
	rec, err := m.findSnapshot(ctx, sandboxer.ScopeWrite, ref)
	if isKind(err, sandboxer.NotFound) {
		if dropped, derr := m.droppedSnapshot(ctx, ref); derr == nil && dropped != nil {
			rec, err = dropped, nil
		}
	}
	if rec != nil && rec.Damaged != "" {
		rec, err = snapshotRecords.repaired(ctx, m, rec, err)
	}
	if isKind(err, sandboxer.NotFound) && strings.HasPrefix(ref, "snap-") && sandboxer.CheckID(ref) == nil {
		if lost, lerr := m.dropQuarantined(ctx, ref); !isKind(lerr, sandboxer.NotFound) && !isKind(lerr, sandboxer.Denied) {
			rec, err = lost, lerr
		}
	}
	if err != nil {
		return nil, err
	}
	if rec.State == sandboxer.SnapshotDropped {
		return rec, nil
	}
	if rec.Purpose == sandboxer.ForPause {
		if sb, err := m.store.Sandbox(ctx, rec.SandboxID); err == nil && lifecycle.ResumesFrom(sb, rec.ID) {
			return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused and resumes from snapshot %s", sb.Shown(), rec.ID).
				WithHint("destroy or resume that sandbox instead")
		}
	}
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.wg.Done()
	bg, cancel := m.untilClosed(context.WithoutCancel(ctx))
	defer cancel(nil)
	return m.dropByID(bg, rec.ID, nil)
}

// dropInternal drops a snapshot that the broker made for itself, as far as that is possible
// now; the sweep does the rest.
func (m *Manager) dropInternal(ctx context.Context, id string) {
	if _, err := m.dropByID(ctx, id, nil); err != nil && ctx.Err() == nil {
		m.log.WarnContext(ctx, "drop of a snapshot that is no longer needed", "snapshot", id, "err", err)
	}
}

// dropByID drops one snapshot unless it is in use. due, if not nil, decides by the current record whether the drop is still
// due, and returns the reason to note.
func (m *Manager) dropByID(ctx context.Context, id string, due func(*sandboxer.SnapshotRecord) (bool, string, error)) (*sandboxer.SnapshotRecord, error) {
	release, err := m.pins.claim(id)
	if err != nil {
		return nil, err
	}
	defer release()
	rec, err := m.store.Snapshot(ctx, id)
	if err != nil {
		return nil, err
	}
	why := ""
	if due != nil {
		var is bool
		if is, why, err = due(rec); err != nil || !is {
			return rec, err
		}
	}
	if user, err := m.restoringFrom(ctx, rec); err != nil {
		return nil, err
	} else if user != "" {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "snapshot %s is in use: sandbox %s is being restored from it", id, user).
			WithHint("try again when that sandbox runs")
	}
	return rec, m.dropClaimed(ctx, rec, why)
}

// restoringFrom returns a sandbox that is being made from rec, or "". A sandbox whose
// object exists does not need the snapshot any more, but making it may be repeated.
func (m *Manager) restoringFrom(ctx context.Context, rec *sandboxer.SnapshotRecord) (user string, err error) {
	if rec.State != sandboxer.SnapshotSealed {
		return "", nil
	}
	err = m.records(ctx, sandboxer.Query{States: []sandboxer.State{sandboxer.Creating}}, func(sb *sandboxer.Sandbox) {
		if lifecycle.SourceOf(sb) == rec.ID {
			user = sb.ID
		}
	})
	return user, err
}

// dropClaimed drops rec, which the caller has claimed.
func (m *Manager) dropClaimed(ctx context.Context, rec *sandboxer.SnapshotRecord, why string) error {
	if rec.State == sandboxer.SnapshotDropped {
		return nil
	}
	if rec.State != sandboxer.SnapshotDropping {
		err := m.step(pDropping, func() error {
			rec.State = sandboxer.SnapshotDropping
			if why != "" {
				rec.Message = why
			}
			rec.Retries, rec.RetryAt, rec.LastError = 0, time.Time{}, ""
			return m.putSnapshot(ctx, rec, "")
		})
		if err != nil {
			return err
		}
	}
	err := m.removeSnapshotData(ctx, rec)
	if err == nil {
		return m.step(pDropped, func() error {
			rec.State, rec.DroppedAt = sandboxer.SnapshotDropped, now()
			rec.RetryAt, rec.LastError, rec.SealedEnv, rec.Secrets = time.Time{}, "", nil, nil
			return m.putSnapshot(ctx, rec, "dropped")
		})
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	rec.Retries++
	rec.LastError = sandboxer.Message(err)
	rec.RetryAt = now().Add(lifecycle.Backoff(rec.Retries, rand.Float64()))
	if werr := m.step(pRetry, func() error { return m.putSnapshot(ctx, rec, "") }); werr != nil {
		return werr
	}
	e := sandboxer.E(sandboxer.Unavailable, err, "snapshot %s is not dropped yet: %s", rec.ID, rec.LastError).
		WithHint("it is retried automatically")
	e.RetryAfter = time.Until(rec.RetryAt)
	return e
}

// removeSnapshotData removes the data of rec outside the database.
func (m *Manager) removeSnapshotData(ctx context.Context, rec *sandboxer.SnapshotRecord) error {
	if rec.Extension == "" && rec.Kind == sandboxer.SnapshotBoth { // repaired
		if err := m.removeFromAllExtensions(ctx, rec.ID); err != nil || m.opts.SnapshotStore == nil {
			return err
		}
	} else if rec.Kind.Has(sandboxer.SnapshotNative) {
		b, err := m.backend(rec.Extension)
		if err != nil {
			return err
		}
		receipt := rec.Native
		receipt.SnapshotID, receipt.Credential = rec.ID, rec.Spec.Credential
		if err := m.step(pDrop, func() error { return b.DropSnapshot(ctx, receipt) }); err != nil {
			return err
		}
	}
	if rec.Kind.Has(sandboxer.SnapshotPortable) {
		if m.opts.SnapshotStore == nil {
			return sandboxer.E(sandboxer.Unavailable, nil, "this installation no longer stores portable snapshots")
		}
		return m.step(pDelete, func() error { return m.opts.SnapshotStore.Drop(ctx, rec.ID) })
	}
	return nil
}

// sweepSnapshots drops the snapshots that are due: those that a former process was saving, those that expired, and those that
// the broker made for a sandbox or a fork that no longer needs them.
func (ps *pass) sweepSnapshots(ctx context.Context, at time.Time) error {
	for _, q := range []sandboxer.SnapshotQuery{
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSaving, sandboxer.SnapshotDropping}},
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}, Purposes: []sandboxer.SnapshotPurpose{sandboxer.ForPause, sandboxer.ForFork}},
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}, DueBefore: at},
	} {
		err := ps.m.snapshots(ctx, q, func(rec *sandboxer.SnapshotRecord) error { return ps.sweepSnapshot(ctx, rec, at) })
		if err != nil {
			return err
		}
	}
	return nil
}

// sweepSnapshot starts the drop of rec, if it is due.
func (ps *pass) sweepSnapshot(ctx context.Context, rec *sandboxer.SnapshotRecord, at time.Time) error {
	if rec.Damaged != "" { // what it is would have to be known
		snapshotRecords.report(ps.m, rec)
		return nil
	}
	why, err := ps.m.whyDrop(ctx, rec, at)
	if err != nil {
		return err
	}
	if why == "" || ps.m.pins.inUse(rec.ID) || !ps.m.sweepLocks.tryLock(rec.ID) {
		return nil
	}
	ps.async(func() {
		defer ps.m.unlockSweep(rec.ID)
		release, err := ps.m.dropSlot(ps.m.ctx, rec)
		if err != nil {
			return
		}
		defer release()
		// Its save may have finished since it was listed.
		due := func(rec *sandboxer.SnapshotRecord) (bool, string, error) {
			why, err := ps.m.whyDrop(ps.m.ctx, rec, at)
			due := why != ""
			if rec.State != sandboxer.SnapshotSaving {
				why = ""
			}
			return due, why, err
		}
		if _, err := ps.m.dropByID(ps.m.ctx, rec.ID, due); err != nil && ps.m.ctx.Err() == nil && !isKind(err, sandboxer.Conflict) {
			ps.count(func(r *SweepReport) { r.Failed++ })
			ps.m.log.Warn("sweep", "snapshot", rec.ID, "err", err)
		}
	})
	return nil
}

// whyDrop returns why rec is due to be dropped, or "".
func (m *Manager) whyDrop(ctx context.Context, rec *sandboxer.SnapshotRecord, at time.Time) (why string, err error) {
	if m.hold.held() && rec.State != sandboxer.SnapshotDropping {
		return "", nil
	}
	if rec.Purpose == sandboxer.ForPause && (rec.State == sandboxer.SnapshotSaving || rec.State == sandboxer.SnapshotSealed) {
		sb, err := m.store.SandboxGeneration(ctx, rec.SandboxID, rec.Generation)
		switch {
		case isKind(err, sandboxer.NotFound):
		case err != nil:
			return "", err
		case lifecycle.ResumesFrom(sb, rec.ID):
			return "", nil
		}
		return "its sandbox is no longer paused", nil
	}
	switch {
	case rec.State == sandboxer.SnapshotSaving:
		return "the broker stopped while it was being saved", nil
	case rec.State == sandboxer.SnapshotDropping && !at.Before(rec.RetryAt):
		return "it is being dropped", nil
	case rec.State == sandboxer.SnapshotSealed && rec.Purpose == sandboxer.ForFork:
		return "its fork is over", nil
	case rec.State == sandboxer.SnapshotSealed && !rec.ExpiresAt.IsZero() && !at.Before(rec.ExpiresAt) && !m.clock.inGracePeriod(time.Now()):
		return "its time to live ran out", nil
	}
	return "", nil
}

// removeFromAllExtensions drops a snapshot at every extension that has snapshots. An extension that
// does not know it reports success.
func (m *Manager) removeFromAllExtensions(ctx context.Context, id string) error {
	for _, e := range m.extensions() {
		if e.Backend == nil || !e.Backend.Can(sandboxer.CanSnapshot) {
			continue
		}
		if err := m.step(pDrop, func() error { return e.Backend.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: id}) }); err != nil {
			return err
		}
	}
	return nil
}
