package manager

import (
	"context"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestHistory: what ended long ago goes, the ledger stays, and an ID that comes again
// does not meet its own former bookings.
func TestHistory(t *testing.T) {
	r := newRig(t, func(s *setup) { s.opts.History = 48 * time.Hour })
	if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
		t.Fatal(err)
	}
	thread := sandboxer.CreateRequest{Profile: "paid", Thread: sandboxer.Thread{ID: "t"}}
	old := r.create(thread)
	r.destroy(old.ID)
	kept := r.create(sandboxer.CreateRequest{})
	r.destroy(kept.ID)
	sb := r.get(old.ID)
	sb.EndedAt = now().Add(-49 * time.Hour)
	if err := r.store.UpdateSandbox(context.Background(), sb, sandboxer.Writes{}); err != nil {
		t.Fatal(err)
	}
	before, _, err := r.Entries(admin, sandboxer.EntryQuery{Tenant: sandboxer.DefaultTenant})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Sweep(admin); err != nil {
		t.Fatal(err)
	}
	_, err = r.Get(admin, old.ID)
	wantErr(t, err, sandboxer.NotFound, "")
	r.get(kept.ID)
	events, err := r.Events(admin, sandboxer.EventQuery{})
	if err != nil {
		t.Fatal(err)
	}
	for _, ev := range events {
		if ev.SandboxID == old.ID {
			t.Errorf("an event of the forgotten sandbox is left: %+v", ev)
		}
	}
	after, _, err := r.Entries(admin, sandboxer.EntryQuery{Tenant: sandboxer.DefaultTenant})
	if err != nil || len(after) != len(before) {
		t.Errorf("the ledger has %d entries, %v; want the %d of before", len(after), err, len(before))
	}
	r.sound(0)
	again := r.create(thread)
	if again.ID != old.ID || again.Generation != old.Generation+1 {
		t.Errorf("the thread's next sandbox is %s, generation %d; want generation %d", again.ID, again.Generation, old.Generation+1)
	}
	r.sound(1)
	r.destroy(again.ID)
	r.sound(0)
	r.noHolds()
}

func TestHistoryTooShort(t *testing.T) {
	_, err := New(nil, nil, nil, Options{Owner: "test", Key: testKey, History: time.Hour})
	wantErr(t, err, sandboxer.Invalid, "too short")
}
