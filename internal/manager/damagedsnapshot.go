package manager

import (
	"context"

	"github.com/sand-boxer/sandboxer"
)

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
	m.mu.Lock()
	known := m.reported[k]
	m.reported[k] = true
	m.mu.Unlock()
	if !known {
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
