package manager

import (
	"context"
	"fmt"

	"github.com/sand-boxer/sandboxer"
)

// A damaged record cannot be read, but for what stands in columns of its own. The sweep leaves
// it, and what it stands for, alone: what it would have to know stood in the record. Whoever asks
// for it gets an error beside what is left, and may get rid of both.

// damagedError says that the record called what is damaged, and how to get rid of what it
// stands for; nil if damaged is empty.
func damagedError(what, damaged, remedy string) error {
	if damaged == "" {
		return nil
	}
	return sandboxer.E(sandboxer.Failed, nil, "the record of %s is damaged: %s", what, damaged).
		WithHint("%s; or restore the database from a backup: sandboxer backup restore", remedy)
}

// nothingLeft says that of the record called what not even the row is left.
func nothingLeft(what string, cause error) error {
	return sandboxer.E(sandboxer.Failed, cause, "nothing but its name is left of the record of %s", what).
		WithHint("restore the database from a backup: sandboxer backup restore")
}

// readable returns sb, and as an error what is wrong with its record if that is damaged.
func readable(sb *sandboxer.Sandbox) (*sandboxer.Sandbox, error) {
	return sb, damagedError("sandbox "+sb.ID, sb.Damaged, fmt.Sprintf("get rid of it with: sandboxer destroy %s", sb.ID))
}

// readableSnapshot is readable for a snapshot.
func readableSnapshot(rec *sandboxer.SnapshotRecord) (*sandboxer.SnapshotRecord, error) {
	return rec, damagedError("snapshot "+rec.ID, rec.Damaged, fmt.Sprintf("get rid of it with: sandboxer snapshot rm %s", rec.ID))
}

// reportDamaged says once that the record of sb is damaged.
func (m *Manager) reportDamaged(sb *sandboxer.Sandbox) {
	if m.reportedDamage.add(generationKey{sb.ID, sb.Generation}) {
		m.log.Error("a record is damaged; its sandbox is left as it is until somebody destroys it",
			"sandbox", sb.ID, "generation", sb.Generation, "extension", sb.Extension, "err", sb.Damaged)
	}
}

// reportDamagedSnapshot is reportDamaged for a snapshot.
func (m *Manager) reportDamagedSnapshot(rec *sandboxer.SnapshotRecord) {
	if m.reportedDamage.add(generationKey{rec.ID, 0}) {
		m.log.Error("a record is damaged; its snapshot is left as it is until somebody drops it",
			"snapshot", rec.ID, "sandbox", rec.SandboxID, "err", rec.Damaged)
	}
}

// repairRecord makes of what is left of a damaged record one by which its sandbox can be
// ended. Nothing is written yet. What the sandbox cost cannot be known any more, so all
// that is on hold for it will be given back.
func (m *Manager) repairRecord(ctx context.Context, sb *sandboxer.Sandbox, cause error) (*sandboxer.Sandbox, error) {
	if !sb.State.Valid() {
		return nil, nothingLeft("sandbox "+sb.ID, cause)
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

// repairSnapshotRecord makes of what is left of a damaged record one by which the snapshot is
// dropped, and writes it. In which forms it was saved, and by which extension, is not
// known any more: all of them will be asked to drop it.
func (m *Manager) repairSnapshotRecord(ctx context.Context, rec *sandboxer.SnapshotRecord, cause error) (*sandboxer.SnapshotRecord, error) {
	if !rec.State.Valid() {
		return nil, nothingLeft("snapshot "+rec.ID, cause)
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
