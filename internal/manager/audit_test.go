package manager

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/events"
)

// TestAuditFinds spoils the database in every way the audit knows.
func TestAuditFinds(t *testing.T) {
	paid := func(r *rig) *sandboxer.Sandbox {
		if err := r.Grant(admin, sandboxer.DefaultTenant, sandboxer.Credit, "", ""); err != nil {
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
	// wait puts a sandbox into a pool, as one that was made of key long ago.
	wait := func(r *rig, profile, key string) string {
		at := now().Add(-24 * time.Hour)
		r.started = at
		if p := r.poolOf("profile.test"); p != nil {
			p.key, p.keySince = "x", at
		}
		spec := sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: "test", Warm: true}
		sb := &sandboxer.Sandbox{ID: spec.ID, Generation: 1, Profile: profile, Extension: "ext.fake", State: sandboxer.Creating,
			Spec: spec, Pool: key, PooledAt: at, CreatedAt: at, ExpiresAt: now().Add(time.Hour)}
		first := events.Of(admin, sb, sandboxer.EventState, "")
		first.To, first.Cause = sandboxer.Creating, sandboxer.ReasonPool
		if err := r.store.CreateSandbox(r.t.Context(), sb, sandboxer.Writes{Events: []sandboxer.Event{first}}); err != nil {
			r.t.Fatal(err)
		}
		ready := events.Of(admin, sb, sandboxer.EventState, "")
		ready.From, ready.To, ready.Cause = sandboxer.Creating, sandboxer.Warm, sandboxer.ReasonPool
		write(r, sandboxer.Writes{Events: []sandboxer.Event{ready}})
		change(r, sb.ID, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Warm })
		return sb.ID
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
			book(r, hold(t.Context(), sb, "more", 5))
		}, invResolve},
		"a hold nobody was quoted": {func(r *rig) { book(r, hold(t.Context(), paid(r), "more", 5)) }, invQuote},
		"a cost nobody was charged": {func(r *rig) {
			id := paid(r).ID
			r.destroy(id)
			change(r, id, func(sb *sandboxer.Sandbox) { sb.Cost++ })
		}, invCost},
		"a usage row that charges another amount": {func(r *rig) {
			sb := paid(r)
			r.destroy(sb.ID)
			if err := r.store.Write(t.Context(), sandboxer.Writes{Usage: []sandboxer.UsageRow{{Key: "x", Tenant: sb.Tenant, SandboxID: sb.ID, Generation: 1, Charged: 1}}}); err != nil {
				t.Fatal(err)
			}
		}, invUsage},
		"entries of nobody": {func(r *rig) {
			book(r, sandboxer.Entry{Key: "x", Tenant: sandboxer.DefaultTenant, SandboxID: "nobody", Generation: 1, Type: sandboxer.EntryVoid, Amount: 5, At: now()})
		}, invResolve},
		"a debt": {func(r *rig) {
			book(r, sandboxer.Entry{Key: "x", Tenant: sandboxer.DefaultTenant, Type: sandboxer.EntryGrant, Amount: -5, At: now()})
		}, invNegate},
		"a state without its event": {func(r *rig) {
			id := r.create(sandboxer.CreateRequest{}).ID
			change(r, id, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Terminating })
		}, invState},
		"a warm one that is somebody's": {func(r *rig) {
			change(r, wait(r, "profile.test", "x"), func(sb *sandboxer.Sandbox) { sb.Tenant = sandboxer.DefaultTenant })
		}, invPooled},
		"one from a pool that runs for nobody": {func(r *rig) {
			id := wait(r, "profile.test", "x")
			sb, err := r.store.Sandbox(r.t.Context(), id)
			if err != nil {
				r.t.Fatal(err)
			}
			for _, to := range []sandboxer.State{sandboxer.Creating, sandboxer.Running} {
				ev := events.Of(acme, sb, sandboxer.EventState, "")
				ev.From, ev.To, ev.Cause = sb.State, to, sandboxer.ReasonPool
				write(r, sandboxer.Writes{Events: []sandboxer.Event{ev}})
				change(r, id, func(sb *sandboxer.Sandbox) { sb.State = to })
				sb.State = to
			}
		}, invPooled},
		"a pool as it should be": {func(r *rig) { wait(r, "profile.test", "x"); wait(r, "profile.test", "x") }, ""},
		"one too many":           {func(r *rig) { wait(r, "profile.test", "x"); wait(r, "profile.test", "x"); wait(r, "profile.test", "x") }, invPool},
		"one of a former basis":  {func(r *rig) { wait(r, "profile.test", "y") }, invPool},
		"one without a pool":     {func(r *rig) { wait(r, "profile.lazy", "x") }, invPool},
		"one just replaced": {func(r *rig) {
			wait(r, "profile.test", "y")
			r.poolOf("profile.test").keySince = now()
		}, ""},
		"a leap": {func(r *rig) {
			sb := r.create(sandboxer.CreateRequest{})
			ev := events.Of(acme, sb, sandboxer.EventState, "")
			ev.From, ev.To, ev.Cause = sandboxer.Terminated, sandboxer.Running, sandboxer.ReasonRequested
			write(r, sandboxer.Writes{Events: []sandboxer.Event{ev}})
		}, invStates},
		"a change by nobody": {func(r *rig) {
			sb := r.create(sandboxer.CreateRequest{})
			ev := events.Of(acme, sb, sandboxer.EventState, "")
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
			r := newRig(t, func(s *setup) {
				s.idle = true
				s.profiles[0].Pool.Size = 2
			})
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

	// What cannot be asked is not sound; the rest is looked at all the same.
	other := fake.NewWorld()
	defer other.Close()
	r := newRig(t, func(s *setup) { s.idle, s.other = true, other })
	r.world.Inject(listFails)
	spec := sandboxer.Spec{ID: "stray", Generation: 1, Owner: "test"}
	if _, err := r.ext.Provision(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if _, err := fake.New(other, fake.Config{Owner: "test"}).Provision(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	a, err := r.Audit(admin)
	if err != nil || len(a.Violations) != 2 || a.Violations[0].Invariant != invAsked || !strings.HasPrefix(a.Violations[0].Detail, "ext.fake: ") ||
		a.Violations[1].Invariant != invObject {
		t.Errorf("%+v, %v", a, err)
	}
}

var listFails = fake.Fault{Verb: fake.VerbList, Kind: sandboxer.Unavailable}

// TestAuditIsBounded has more objects outside than an audit names: the others are counted.
func TestAuditIsBounded(t *testing.T) {
	r := newRig(t, func(s *setup) { s.idle = true })
	const more = 5
	for i := range maxViolations + more {
		spec := sandboxer.Spec{ID: fmt.Sprintf("stray%d", i), Generation: 1, Owner: "test"}
		if _, err := r.ext.Provision(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
	}
	a, err := r.Audit(admin)
	if err != nil || len(a.Violations) != maxViolations || a.LeftOut != more {
		t.Errorf("%d violations are named and %d left out, %v; want %d and %d", len(a.Violations), a.LeftOut, err, maxViolations, more)
	}
}
