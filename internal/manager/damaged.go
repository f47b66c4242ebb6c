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
	m.mu.Lock()
	known := m.reported[k]
	m.reported[k] = true
	m.mu.Unlock()
	if !known {
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
