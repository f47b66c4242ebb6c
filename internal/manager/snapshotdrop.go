package manager

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// DropSnapshot removes a snapshot and returns its record, dropped. What was restored
// from it lives on. One that is dropped already is success. An administrator may name one that
// the database does not know, by its whole ID. Conflict: something is
// being restored from it, or a paused sandbox resumes from it. If the backend cannot
// do it now, the error is Unavailable and the sweep goes on until it is done.
func (m *Manager) DropSnapshot(ctx context.Context, ref string) (*sandboxer.SnapshotRecord, error) {
	rec, err := m.findSnapshot(ctx, sandboxer.ScopeWrite, ref)
	if rec != nil && rec.Damaged != "" {
		rec, err = snapshotRecords.repaired(ctx, m, rec, err)
	}
	if isKind(err, sandboxer.NotFound) && checkSnapshotID(ref) == nil {
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
		if sb, err := m.store.Sandbox(ctx, rec.SandboxID); err == nil && sb.Pause.Snapshot == rec.ID {
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
		m.log.WarnContext(ctx, "drop of a snapshot that is not needed any more", "snapshot", id, "err", err)
	}
}

// dropByID drops one snapshot unless it is in use. due, if it is not nil, says of the record as it then is whether that
// is still to be done, and what to note as the reason.
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
// object exists needs the snapshot no more, but its making may be repeated.
func (m *Manager) restoringFrom(ctx context.Context, rec *sandboxer.SnapshotRecord) (user string, err error) {
	if rec.State != sandboxer.SnapshotSealed {
		return "", nil
	}
	err = m.records(ctx, sandboxer.Query{States: []sandboxer.State{sandboxer.Creating}}, func(sb *sandboxer.Sandbox) {
		if sourceOf(sb) == rec.ID {
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
			rec.RetryAt, rec.LastError, rec.SealedEnv = time.Time{}, "", nil
			return m.putSnapshot(ctx, rec, "dropped")
		})
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	rec.Retries++
	rec.LastError = sandboxer.Message(err)
	rec.RetryAt = now().Add(backoff(rec.Retries, rand.Float64()))
	if werr := m.step(pRetry, func() error { return m.putSnapshot(ctx, rec, "") }); werr != nil {
		return werr
	}
	e := sandboxer.E(sandboxer.Unavailable, err, "snapshot %s is not dropped yet: %s", rec.ID, rec.LastError).
		WithHint("it is tried again by itself")
	e.RetryAfter = time.Until(rec.RetryAt)
	return e
}

// removeSnapshotData removes what there is of rec outside the database.
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
		receipt.SnapshotID = rec.ID
		if err := m.step(pDrop, func() error { return b.DropSnapshot(ctx, receipt) }); err != nil {
			return err
		}
	}
	if rec.Kind.Has(sandboxer.SnapshotPortable) {
		if m.opts.SnapshotStore == nil {
			return sandboxer.E(sandboxer.Unavailable, nil, "this installation keeps no portable snapshots any more")
		}
		return m.step(pDelete, func() error { return m.opts.SnapshotStore.Drop(ctx, rec.ID) })
	}
	return nil
}

// sweepSnapshots takes the steps that snapshots owe: those that a dead process was
// saving are dropped, as are those whose time is over, and those that the broker made
// for a sandbox or a fork that needs them no more.
func (m *Manager) sweepSnapshots(ctx context.Context, t *tracker, at time.Time) error {
	for _, q := range []sandboxer.SnapshotQuery{
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSaving, sandboxer.SnapshotDropping}},
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}, Purposes: []sandboxer.SnapshotPurpose{sandboxer.ForPause, sandboxer.ForFork}},
		{States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}, DueBefore: at},
	} {
		err := m.snapshots(ctx, q, func(rec *sandboxer.SnapshotRecord) error { return m.sweepSnapshot(ctx, t, rec, at) })
		if err != nil {
			return err
		}
	}
	return nil
}

// sweepSnapshot sets the drop of rec in motion, if it is due.
func (m *Manager) sweepSnapshot(ctx context.Context, t *tracker, rec *sandboxer.SnapshotRecord, at time.Time) error {
	if rec.Damaged != "" { // what it is would have to be known
		snapshotRecords.report(m, rec)
		return nil
	}
	why, err := m.whyDrop(ctx, rec, at)
	if err != nil {
		return err
	}
	if why == "" || m.pins.inUse(rec.ID) || !m.sweepLocks.tryLock(rec.ID) {
		return nil
	}
	m.async(t, func() {
		defer m.unlockSweep(rec.ID)
		release, err := m.dropSlot(m.ctx, rec)
		if err != nil {
			return
		}
		defer release()
		// Since it was listed it may have been saved to the end.
		due := func(rec *sandboxer.SnapshotRecord) (bool, string, error) {
			why, err := m.whyDrop(m.ctx, rec, at)
			due := why != ""
			if rec.State != sandboxer.SnapshotSaving {
				why = ""
			}
			return due, why, err
		}
		if _, err := m.dropByID(m.ctx, rec.ID, due); err != nil && m.ctx.Err() == nil && !isKind(err, sandboxer.Conflict) {
			t.count(func(r *SweepReport) { r.Failed++ })
			m.log.Warn("sweep", "snapshot", rec.ID, "err", err)
		}
	})
	return nil
}

// whyDrop says why rec is to be dropped now, or "".
func (m *Manager) whyDrop(ctx context.Context, rec *sandboxer.SnapshotRecord, at time.Time) (why string, err error) {
	if rec.Purpose == sandboxer.ForPause && (rec.State == sandboxer.SnapshotSaving || rec.State == sandboxer.SnapshotSealed) {
		sb, err := m.store.SandboxGeneration(ctx, rec.SandboxID, rec.Generation)
		switch {
		case isKind(err, sandboxer.NotFound):
		case err != nil:
			return "", err
		case sb.Pause.Snapshot == rec.ID && sb.State != sandboxer.Terminated:
			return "", nil
		}
		return "its sandbox is not paused any more", nil
	}
	switch {
	case rec.Unconfirmed && rec.State == sandboxer.SnapshotSaving:
		return "", nil // the database went back: it may be whole since
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

// removeFromAllExtensions drops a snapshot at every extension that has such; of a snapshot that
// an extension does not know, that is success.
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
