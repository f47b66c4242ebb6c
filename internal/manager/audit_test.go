package manager

import (
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestAuditFinds spoils the books in every way the audit knows.
func TestAuditFinds(t *testing.T) {
	paid := func(r *rig) *sandboxer.Sandbox {
		if err := r.Grant(admin, "acme", sandboxer.Credit, "", ""); err != nil {
			r.t.Fatal(err)
		}
		return r.create(sandboxer.CreateRequest{Profile: "paid"})
	}
	write := func(r *rig, w sandboxer.Writes) {
		if err := r.store.Write(r.t.Context(), w); err != nil {
			r.t.Fatal(err)
		}
	}
	book := func(r *rig, e sandboxer.Entry) { write(r, sandboxer.Writes{Entries: []sandboxer.Entry{e}}) }
	change := func(r *rig, id string, f func(*sandboxer.Sandbox)) {
		sb, err := r.store.Sandbox(r.t.Context(), id)
		if err != nil {
			r.t.Fatal(err)
		}
		f(sb)
		if err := r.store.UpdateSandbox(r.t.Context(), sb, sandboxer.Writes{}); err != nil {
			r.t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		spoil func(*rig)
		want  string
	}{
		"nothing": {func(r *rig) { r.destroy(paid(r).ID) }, ""},
		"a charge too high": {func(r *rig) {
			sb := paid(r)
			r.destroy(sb.ID)
			book(r, booking(sb, "again", sandboxer.EntryPost, 10*sandboxer.Credit))
		}, invOver},
		"an open hold": {func(r *rig) {
			sb := paid(r)
			r.destroy(sb.ID)
			book(r, hold(sb, "more", 5))
		}, invResolve},
		"a hold nobody was quoted": {func(r *rig) { book(r, hold(paid(r), "more", 5)) }, invQuote},
		"a cost nobody was charged": {func(r *rig) {
			id := paid(r).ID
			r.destroy(id)
			change(r, id, func(sb *sandboxer.Sandbox) { sb.Cost++ })
		}, invCost},
		"entries of nobody": {func(r *rig) {
			book(r, sandboxer.Entry{Key: "x", Tenant: "acme", SandboxID: "nobody", Generation: 1, Type: sandboxer.EntryVoid, Amount: 5, At: now()})
		}, invResolve},
		"a debt": {func(r *rig) {
			book(r, sandboxer.Entry{Key: "x", Tenant: "acme", Type: sandboxer.EntryGrant, Amount: -5, At: now()})
		}, invNegate},
		"a state without its event": {func(r *rig) {
			id := r.create(sandboxer.CreateRequest{}).ID
			change(r, id, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Warm })
		}, invState},
		"a leap": {func(r *rig) {
			sb := r.create(sandboxer.CreateRequest{})
			ev := event(acme, sb, sandboxer.EventState, "")
			ev.From, ev.To, ev.Cause = sandboxer.Terminated, sandboxer.Running, sandboxer.ReasonRequested
			write(r, sandboxer.Writes{Events: []sandboxer.Event{ev}})
		}, invStates},
		"a change by nobody": {func(r *rig) {
			sb := r.create(sandboxer.CreateRequest{})
			ev := event(acme, sb, sandboxer.EventState, "")
			ev.From, ev.To, ev.Cause, ev.Actor = sandboxer.Running, sandboxer.Pausing, sandboxer.ReasonRequested, ""
			change(r, sb.ID, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Pausing })
			write(r, sandboxer.Writes{Events: []sandboxer.Event{ev}})
		}, invStates},
		"a sandbox past its time": {func(r *rig) {
			id := r.create(sandboxer.CreateRequest{}).ID
			change(r, id, func(sb *sandboxer.Sandbox) { sb.ExpiresAt = now().Add(-24 * time.Hour) })
		}, invExpired},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(s *setup) { s.idle = true })
			c.spoil(r)
			a, err := r.Audit(admin)
			switch {
			case err != nil:
				t.Fatal(err)
			case c.want == "" && len(a.Violations) > 0, c.want != "" && (len(a.Violations) != 1 || a.Violations[0].Invariant != c.want):
				t.Errorf("found %+v, want %q", a.Violations, c.want)
			case a.Checked == 0:
				t.Error("checked nothing")
			}
		})
	}

	// What cannot be asked is not sound.
	r := newRig(t, nil)
	r.world.Inject(listFails)
	_, err := r.Audit(admin)
	wantErr(t, err, sandboxer.Unavailable, "")
}

var listFails = fake.Fault{Verb: fake.VerbList, Kind: sandboxer.Unavailable}
