package manager

import (
	"context"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
)

// Forget ends the record of a sandbox whose object cannot be removed because its host is gone for good. The extension forgets
// the object's place. The parts that may remain are in Cleanup of the returned sandbox and in an event, and Audit names them
// until they are known to be gone. Forget needs the admin scope. Kinds: Conflict for a sandbox that is not ending, or that may
// still be removed; Unsupported if the extension cannot forget objects.
func (m *Manager) Forget(ctx context.Context, ref string) (*sandboxer.Sandbox, error) {
	sb, err := m.find(ctx, sandboxer.ScopeAdmin, ref)
	if err == nil {
		_, err = access.May(ctx, sandboxer.ScopeAdmin)
	}
	if err != nil {
		return nil, err
	}
	switch {
	case sb.State == sandboxer.Terminated:
		return sb, nil
	case sb.State != sandboxer.Terminating:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is %s; only a sandbox that could not be removed can be forgotten", sb.Shown(), sb.State).
			WithHint("first: sandboxer destroy %s", sb.Shown())
	case sb.LastError == "":
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is being removed, and nothing has failed so far", sb.Shown()).
			WithHint("check its state: sandboxer get %s", sb.Shown())
	}
	if len(sb.Debts) > 0 {
		return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s cannot be forgotten: something of it may exist on %s, too", sb.Shown(), sb.Debts[0].Extension).
			WithHint("bring that extension back; what is there is then removed automatically")
	}
	b, err := m.backend(sb.Extension)
	if err != nil {
		return nil, err
	}
	remains, err := b.Forget(ctx, handleOf(sb))
	if err != nil {
		return nil, err
	}
	report := sandboxer.CleanupReport{Forgotten: true, Kept: remains,
		Warnings: []string{"it was given up while its host did not answer; these may remain: " + strings.Join(remains, "; ")}}
	if err := m.box(sb).commitTerminated(ctx, report, reading{}); err != nil {
		if now, gerr := m.store.SandboxGeneration(ctx, sb.ID, sb.Generation); gerr == nil && now.State == sandboxer.Terminated {
			return now, nil // it could be removed after all
		}
		return nil, err
	}
	return sb, nil
}

// auditForgotten names the remains of forgotten sandboxes until their backend reports that they are gone.
func (a *auditing) auditForgotten(ctx context.Context) error {
	return a.m.records(ctx, sandboxer.Query{States: []sandboxer.State{sandboxer.Terminated}}, func(sb *sandboxer.Sandbox) {
		if sb.Damaged != "" || sb.Cleanup == nil || !sb.Cleanup.Forgotten || ctx.Err() != nil {
			return
		}
		if b, err := a.m.backend(sb.Extension); err == nil && b.Can(sandboxer.CanProbe) && (sb.Handle.SandboxID != "" || sb.Host != "") {
			if alive, err := b.IsAlive(ctx, handleOf(sb)); err == nil && alive == sandboxer.Gone {
				return
			}
		}
		a.violated(invForgotten, sb.ID, "these may remain: %s", strings.Join(sb.Cleanup.Kept, "; "))
	})
}
