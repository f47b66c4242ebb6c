package manager

import (
	"context"
	"fmt"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/lifecycle"
)

// A recordKind describes a kind of record to the code that handles unreadable ones. A damaged record is listed with the fields
// that can still be read. The sweep leaves the record and its object alone, because it lacks the data to decide. The audit
// names the record. To remove both, the record is repaired as far as necessary.
type recordKind[T any] struct {
	recordWords
	key     func(*T) generationKey
	why     func(*T) *string // the field that says why it is damaged
	hasRow  func(*T) bool    // whether more than its name is left
	log     func(*T) []any   // attributes that name it
	violate func(*T) Violation

	// repair turns the readable part, in r, into a record by which the object can be ended. cause is the error about the
	// damage.
	repair func(ctx context.Context, m *Manager, r *T, cause error) error
}

// recordWords are the words of messages about one kind of record.
type recordWords struct {
	name   string // of what it is the record
	ends   string // the command that ends that
	remove string // the command for it
	object string // what an extension has, with its article
}

var (
	sandboxRecords = &recordKind[sandboxer.Sandbox]{
		recordWords: recordWords{"sandbox", "destroys", "sandboxer destroy", "an object"},
		key:         func(sb *sandboxer.Sandbox) generationKey { return generationKey{sb.ID, sb.Generation} },
		why:         func(sb *sandboxer.Sandbox) *string { return &sb.Damaged },
		hasRow:      func(sb *sandboxer.Sandbox) bool { return sb.State.Valid() },
		log: func(sb *sandboxer.Sandbox) []any {
			return []any{"sandbox", sb.ID, "generation", sb.Generation, "extension", sb.Extension}
		},
		violate: func(sb *sandboxer.Sandbox) Violation {
			return Violation{invWhole, sb.ID, fmt.Sprintf("the record of generation %d is damaged: %s", sb.Generation, sb.Damaged)}
		},
		repair: repairSandbox,
	}
	snapshotRecords = &recordKind[sandboxer.SnapshotRecord]{
		recordWords: recordWords{"snapshot", "drops", "sandboxer snapshot rm", "a snapshot"},
		key:         func(rec *sandboxer.SnapshotRecord) generationKey { return generationKey{rec.ID, 0} },
		why:         func(rec *sandboxer.SnapshotRecord) *string { return &rec.Damaged },
		hasRow:      func(rec *sandboxer.SnapshotRecord) bool { return rec.State.Valid() },
		log: func(rec *sandboxer.SnapshotRecord) []any {
			return []any{"snapshot", rec.ID, "sandbox", rec.SandboxID}
		},
		violate: func(rec *sandboxer.SnapshotRecord) Violation {
			return Violation{invWhole, rec.SandboxID, fmt.Sprintf("snapshot %s: %s", rec.ID, rec.Damaged)}
		},
		repair: repairSnapshot,
	}
)

// whole returns r, and as an error what is wrong with it if it is damaged.
func (k *recordKind[T]) whole(r *T) (*T, error) {
	why, id := *k.why(r), k.key(r).id
	if why == "" {
		return r, nil
	}
	return r, sandboxer.E(sandboxer.Failed, nil, "the record of %s %s is damaged: %s", k.name, id, why).
		WithHint("remove it with: %s %s; or restore the database from a backup: sandboxer backup restore", k.remove, id)
}

// report logs once that r is damaged.
func (k *recordKind[T]) report(m *Manager, r *T) {
	if m.reportedDamage.add(k.key(r)) {
		m.log.Error(fmt.Sprintf("a record is damaged; its %s stays as it is until a user %s it", k.name, k.ends),
			append(k.log(r), "err", *k.why(r))...)
	}
}

// repaired returns r, which is damaged as cause says, as a record by which its object can be ended.
func (k *recordKind[T]) repaired(ctx context.Context, m *Manager, r *T, cause error) (*T, error) {
	if !k.hasRow(r) {
		return nil, sandboxer.E(sandboxer.Failed, cause, "only the name is left in the record of %s %s", k.name, k.key(r).id).
			WithHint("restore the database from a backup: sandboxer backup restore")
	}
	repaired := *r
	*k.why(&repaired) = ""
	if err := k.repair(ctx, m, &repaired, cause); err != nil {
		return nil, err
	}
	return &repaired, nil
}

// repairSandbox writes nothing yet. The cost of the sandbox is no longer known, so its whole hold will be released.
func repairSandbox(ctx context.Context, m *Manager, sb *sandboxer.Sandbox, _ error) error {
	sb.Spec = sandboxer.Spec{ID: sb.ID, Generation: sb.Generation, Owner: m.opts.Owner}
	sb.Message = "its record was damaged; nothing was charged for it"
	sb.EndingAt = now()
	holds, err := m.store.OpenHolds(ctx)
	if err != nil {
		return err
	}
	for _, h := range holds {
		if h.SandboxID == sb.ID && h.Generation == sb.Generation {
			sb.Quote.Amount = h.Amount
		}
	}
	events, err := m.store.Events(ctx, sandboxer.EventQuery{SandboxID: sb.ID, Limit: sandboxer.MaxPage})
	if err != nil {
		return err
	}
	for _, ev := range events {
		if ev.Generation == sb.Generation {
			sb.CreatedAt = ev.At
			break
		}
	}
	return nil
}

// repairSnapshot writes the record, dropping. Conflict: a paused sandbox resumes from it.
func repairSnapshot(ctx context.Context, m *Manager, rec *sandboxer.SnapshotRecord, cause error) error {
	release, err := m.pins.claim(rec.ID)
	if err != nil {
		return err
	}
	defer release()
	*rec = *droppable(rec)
	if sb, err := m.store.Sandbox(ctx, rec.SandboxID); err == nil {
		rec.Generation, rec.Profile = sb.Generation, sb.Profile
	}
	if rec.Purpose == sandboxer.ForPause {
		sb, err := m.store.SandboxGeneration(ctx, rec.SandboxID, max(1, rec.Generation))
		if err == nil && lifecycle.ResumesFrom(sb, rec.ID) {
			return sandboxer.E(sandboxer.Conflict, cause, "sandbox %s is paused and resumes from snapshot %s, whose record is damaged", sb.Shown(), rec.ID).
				WithHint("restore the database from a backup: sandboxer backup restore; or give the sandbox up: sandboxer destroy %s", sb.Shown())
		}
	}
	return m.step(pDropping, func() error { return m.putSnapshot(ctx, rec, "") })
}

// droppable returns the record by which the snapshot of rec, which is damaged, is dropped. Its forms and its extension are no
// longer known, so all extensions will be asked to drop it.
func droppable(rec *sandboxer.SnapshotRecord) *sandboxer.SnapshotRecord {
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
