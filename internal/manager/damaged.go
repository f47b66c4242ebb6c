package manager

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

// whole returns sb, and as an error what is wrong with its record if that is damaged.
func whole(sb *sandboxer.Sandbox) (*sandboxer.Sandbox, error) {
	if sb.Damaged == "" {
		return sb, nil
	}
	return sb, sandboxer.E(sandboxer.Failed, nil, "the record of sandbox %s is damaged: %s", sb.ID, sb.Damaged).
		WithHint("get rid of it with: sandboxer destroy %s; or restore the database from a backup: sandboxer backup restore", sb.ID)
}

// reportDamaged says once that a record is damaged. The sweep leaves such a one, and its
// object, alone: what it would have to know stood in the record.
func (m *Manager) reportDamaged(sb *sandboxer.Sandbox) {
	k := generationKey{sb.ID, sb.Generation}
	if m.reportedDamage.add(k) {
		m.log.Error("a record is damaged; its sandbox is left as it is until somebody destroys it",
			"sandbox", sb.ID, "generation", sb.Generation, "extension", sb.Extension, "err", sb.Damaged)
	}
}

// repairRecord makes of what is left of a damaged record one by which its sandbox can be
// ended. Nothing is written yet. What the sandbox cost cannot be known any more, so all
// that is on hold for it will be given back.
func (m *Manager) repairRecord(ctx context.Context, sb *sandboxer.Sandbox, cause error) (*sandboxer.Sandbox, error) {
	if !sb.State.Valid() { // not even the row is left
		return nil, sandboxer.E(sandboxer.Failed, cause, "nothing but its name is left of the record of sandbox %s", sb.ID).
			WithHint("restore the database from a backup: sandboxer backup restore")
	}
	repaired := *sb
	repaired.Damaged = ""
	repaired.Spec = sandboxer.Spec{ID: sb.ID, Generation: sb.Generation, Owner: m.opts.Owner}
	repaired.Message = "its record was damaged; nothing was charged for it"
	repaired.EndingAt = now()
	holds, err := m.store.OpenHolds(ctx)
	if err != nil {
		return nil, err
	}
	for _, h := range holds {
		if h.SandboxID == sb.ID && h.Generation == sb.Generation {
			repaired.Quote.Amount = h.Amount
		}
	}
	events, err := m.store.Events(ctx, sandboxer.EventQuery{SandboxID: sb.ID, Limit: sandboxer.MaxPage})
	if err != nil {
		return nil, err
	}
	for _, ev := range events {
		if ev.Generation == sb.Generation {
			repaired.CreatedAt = ev.At
			break
		}
	}
	return &repaired, nil
}

// wholeSnapshot returns rec, and as an error what is wrong with its record if that is
// damaged.
func wholeSnapshot(rec *sandboxer.SnapshotRecord) (*sandboxer.SnapshotRecord, error) {
	if rec.Damaged == "" {
		return rec, nil
	}
	return rec, sandboxer.E(sandboxer.Failed, nil, "the record of snapshot %s is damaged: %s", rec.ID, rec.Damaged).
		WithHint("get rid of it with: sandboxer snapshot rm %s; or restore the database from a backup: sandboxer backup restore", rec.ID)
}

// reportDamagedSnapshot says once that a record is damaged. The sweep leaves such a one, and
// what was saved, alone.
func (m *Manager) reportDamagedSnapshot(rec *sandboxer.SnapshotRecord) {
	k := generationKey{rec.ID, 0}
	if m.reportedDamage.add(k) {
		m.log.Error("a record is damaged; its snapshot is left as it is until somebody drops it",
			"snapshot", rec.ID, "sandbox", rec.SandboxID, "err", rec.Damaged)
	}
}

// repairSnapshotRecord makes of what is left of a damaged record one by which the snapshot is
// dropped, and writes it. In which forms it was saved, and by which extension, is not
// known any more: all of them will be asked to drop it.
func (m *Manager) repairSnapshotRecord(ctx context.Context, rec *sandboxer.SnapshotRecord, cause error) (*sandboxer.SnapshotRecord, error) {
	if !rec.State.Valid() { // not even the row is left
		return nil, sandboxer.E(sandboxer.Failed, cause, "nothing but its name is left of the record of snapshot %s", rec.ID).
			WithHint("restore the database from a backup: sandboxer backup restore")
	}
	release, err := m.pins.claim(rec.ID)
	if err != nil {
		return nil, err
	}
	defer release()
	repaired := repairedSnapshot(rec)
	if sb, err := m.store.Sandbox(ctx, rec.SandboxID); err == nil {
		repaired.Generation, repaired.Profile = sb.Generation, sb.Profile
	}
	if rec.Purpose == sandboxer.ForPause {
		sb, err := m.store.SandboxGeneration(ctx, rec.SandboxID, max(1, repaired.Generation))
		if err == nil && sb.Pause.Snapshot == rec.ID && sb.State != sandboxer.Terminated {
			return nil, sandboxer.E(sandboxer.Conflict, cause, "sandbox %s is paused and resumes from snapshot %s, whose record is damaged", sb.ID, rec.ID).
				WithHint("restore the database from a backup: sandboxer backup restore; or give the sandbox up: sandboxer destroy %s", sb.ID)
		}
	}
	if err := m.step(pDropping, func() error { return m.putSnapshot(ctx, repaired, "") }); err != nil {
		return nil, err
	}
	return repaired, nil
}

// repairedSnapshot returns the record by which rec, which is damaged, is dropped.
func repairedSnapshot(rec *sandboxer.SnapshotRecord) *sandboxer.SnapshotRecord {
	repaired := *rec
	repaired.Damaged = ""
	repaired.Kind = sandboxer.SnapshotBoth
	repaired.Message = "its record was damaged"
	repaired.CreatedAt = now()
	if rec.State != sandboxer.SnapshotDropped {
		repaired.State = sandboxer.SnapshotDropping
	} else {
		repaired.DroppedAt = now()
	}
	return &repaired
}
