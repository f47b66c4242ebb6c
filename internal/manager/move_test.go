package manager

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestMove tries every pair of states on real records.
func TestMove(t *testing.T) {
	r := newRig(t, func(s *setup) { s.idle = true })
	n := 0
	for _, from := range sandboxer.States() {
		for _, to := range sandboxer.States() {
			n++
			sb := &sandboxer.Sandbox{ID: sandboxer.NewID(), Generation: 1, Tenant: sandboxer.DefaultTenant, State: from, CreatedAt: now(), Retries: 3, RetryAt: now(), LastError: "x", AbsentSince: now()}
			if err := r.store.CreateSandbox(t.Context(), sb, sandboxer.Writes{}); err != nil {
				t.Fatal(err)
			}
			err := r.box(sb).move(acme, to, func(sb *sandboxer.Sandbox, _ *sandboxer.Writes) error {
				sb.Reason, sb.Message = sandboxer.ReasonRequested, "because"
				return nil
			})
			stored, gerr := r.store.Sandbox(t.Context(), sb.ID)
			events, eerr := r.store.Events(t.Context(), sandboxer.EventQuery{SandboxID: sb.ID})
			if gerr != nil || eerr != nil {
				t.Fatal(gerr, eerr)
			}
			if !from.CanBecome(to) {
				wantErr(t, err, sandboxer.Conflict, "cannot become")
				if stored.State != from || stored.Version != 1 || len(events) != 0 {
					t.Errorf("%s→%s was refused and yet changed the record", from, to)
				}
				continue
			}
			if err != nil || stored.State != to || stored.Retries != 0 || !stored.RetryAt.IsZero() || stored.LastError != "" || !stored.AbsentSince.IsZero() {
				t.Errorf("%s→%s: %v, %+v", from, to, err, stored)
			}
			if len(events) != 1 || events[0].From != from || events[0].To != to || events[0].Cause != sandboxer.ReasonRequested || events[0].Actor != "user:default" {
				t.Errorf("%s→%s: events %+v", from, to, events)
			}
		}
	}
	if n != 49 {
		t.Errorf("%d pairs of states: a new state needs a look at decide and Destroy", n)
	}
}
