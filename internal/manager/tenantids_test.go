package manager

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestOneIDOfManyTenants: each tenant has its own sandbox under the ID it asked for, in all that
// can be done with one, and nothing outside is named by that ID alone.
func TestOneIDOfManyTenants(t *testing.T) {
	r := newRig(t, nil)
	thread := sandboxer.Thread{User: "alice", ID: "thread-1"}
	const id = "dc977b840cb8638e"                                                                            // a known answer
	tenants := map[string]*sandboxer.Sandbox{"rival": nil, sandboxer.DefaultTenant: nil, "third/floor": nil} // one with what separates a tenant from an ID
	objects := map[string]bool{}
	for who := range tenants {
		if err := r.Grant(admin, who, sandboxer.Credit, "", ""); err != nil {
			t.Fatal(err)
		}
		sb, err := r.Create(as(who), sandboxer.CreateRequest{Profile: "paid", Thread: thread})
		if err != nil || sb.Shown() != id || sb.Thread != thread || sb.Found || sb.Generation != 1 {
			t.Fatalf("%s: %+v, %v", who, sb, err)
		}
		if (sb.ID == id) != (who == sandboxer.DefaultTenant) || sb.ID != sandboxer.ObjectID(who, id) || objects[sb.ID] {
			t.Errorf("%s: its objects carry %s", who, sb.ID)
		}
		tenants[who], objects[sb.ID] = sb, true
	}
	for _, o := range r.world.Live() {
		spec, _ := json.Marshal(o.Spec)
		if !objects[o.Spec.ID] || o.Ref != sandboxer.ExternalName("test", o.Spec.ID, 1) {
			t.Errorf("an object is %s, of %s", o.Ref, spec)
		}
		if o.Spec.ID != id && strings.Contains(string(spec), id) {
			t.Errorf("an extension is told %s", spec)
		}
	}
	check := func() {
		t.Helper()
		for who, sb := range tenants {
			ctx := as(who)
			for _, ref := range []string{id, id[:5], who + "/" + id, sb.ID} {
				if got, err := r.Get(ctx, ref); err != nil || got.ID != sb.ID {
					t.Errorf("%s: %s means %+v, %v", who, ref, got, err)
				}
			}
			if got, err := r.Get(admin, sb.Ref()); err != nil || got.ID != sb.ID {
				t.Errorf("the administrator: %s means %+v, %v", sb.Ref(), got, err)
			}
			for other, theirs := range tenants {
				if other == who {
					continue
				}
				refs := []string{theirs.Ref(), other + "/" + id[:5]}
				if theirs.ID != id {
					refs = append(refs, theirs.ID)
				}
				for _, ref := range refs {
					_, err := r.Get(ctx, ref)
					wantErr(t, err, sandboxer.NotFound, fmt.Sprintf("there is no sandbox %q", ref))
				}
			}
			items, _, err := r.List(ctx, sandboxer.Query{ShownID: id})
			if err != nil || len(items) != 1 || items[0].ID != sb.ID {
				t.Errorf("%s: %v, %v", who, items, err)
			}
			events, err := r.Events(ctx, sandboxer.EventQuery{SandboxID: id})
			if err != nil || len(events) == 0 || slices.ContainsFunc(events, func(e sandboxer.Event) bool {
				return e.SandboxID != sb.ID || e.Tenant != who || (e.ShownID != "") != (sb.ID != id)
			}) {
				t.Errorf("%s: events %+v, %v", who, events, err)
			}
			for _, q := range []sandboxer.EntryQuery{{SandboxID: id}, {SandboxID: sb.Ref()}} {
				entries, _, err := r.Entries(ctx, q)
				if err != nil || len(entries) == 0 || slices.ContainsFunc(entries, func(e sandboxer.Entry) bool { return e.SandboxID != sb.ID || e.Tenant != who }) {
					t.Errorf("%s: entries %+v, %v", who, entries, err)
				}
			}
		}
		for _, ref := range []string{id, id[:5]} {
			_, err := r.Get(admin, ref)
			wantErr(t, err, sandboxer.Conflict, "means several sandboxes")
			for _, sb := range tenants {
				wantErr(t, err, sandboxer.Conflict, sb.Ref())
			}
			wantErr(t, err, sandboxer.Conflict, "TENANT/ID")
		}
	}
	check()
	r.restart()
	check()

	// One is paused, saved, restored, copied and made again, and the others do not notice.
	sb := tenants["rival"]
	snap, err := r.Snapshot(rival, id, SnapshotRequest{Name: "base"})
	if err != nil || snap.ShownSandbox() != id || snap.SandboxID != sb.ID {
		t.Fatalf("%+v, %v", snap, err)
	}
	if list, _, err := r.Snapshots(rival, sandboxer.SnapshotQuery{SandboxID: id}); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	if list, _, err := r.Snapshots(acme, sandboxer.SnapshotQuery{SandboxID: id}); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	restored, err := r.Restore(rival, "base", RestoreRequest{})
	if err != nil || restored.ShownID != "" || restored.Thread != (sandboxer.Thread{}) {
		t.Fatalf("%+v, %v", restored, err)
	}
	copies, err := r.Fork(rival, id, ForkRequest{Count: 1})
	if err != nil || copies[0].ShownID != "" {
		t.Fatalf("%+v, %v", copies, err)
	}
	if _, err := r.Pause(rival, id, PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	again, err := r.Create(rival, sandboxer.CreateRequest{Profile: "paid", Thread: thread})
	if err != nil || again.ID != sb.ID || again.State != sandboxer.Running || !again.Found {
		t.Fatalf("a create that finds it paused: %+v, %v", again, err)
	}
	for _, ref := range []string{id, restored.ID, copies[0].ID} {
		if _, err := r.Destroy(rival, ref); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := r.store.ForgetHistory(t.Context(), now().Add(time.Hour), 100); err != nil || n == 0 {
		t.Fatal(n, err)
	}
	entries, _, err := r.Entries(rival, sandboxer.EntryQuery{SandboxID: id}) // the ledger remembers
	if err != nil || len(entries) == 0 || entries[0].ShownID != id {
		t.Errorf("%+v, %v", entries, err)
	}
	next, err := r.Create(rival, sandboxer.CreateRequest{Profile: "paid", Thread: thread})
	if err != nil || next.ID != sb.ID || next.Generation != 2 {
		t.Fatalf("%+v, %v", next, err)
	}
	tenants["rival"] = next
	check()
	for _, sb := range tenants {
		if _, err := r.Destroy(admin, sb.Ref()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.DropSnapshot(rival, "base"); err != nil {
		t.Fatal(err)
	}
	r.sound(0)
	r.noHolds()
}

// TestIDsOfBefore: what carries the ID that its tenant chose, as all did before IDs were their
// tenants', stays; another who asks for that ID does not meet it.
func TestIDsOfBefore(t *testing.T) {
	r := newRig(t, nil)
	free := r.create(sandboxer.CreateRequest{}) // a random ID, which somebody else chooses
	o, err := r.resolve(sandboxer.Principal{Tenant: "rival", Actor: "x"}, sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "old"}})
	if err != nil {
		t.Fatal(err)
	}
	o.SetID("old")
	o.Shown = ""
	old, err := o.startCreate(rival)
	if err != nil || old.ID != "old" || old.ShownID != "" {
		t.Fatalf("%+v, %v", old, err)
	}
	r.restart()
	ask := func(id string) sandboxer.CreateRequest {
		return sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": id}}
	}
	for round := range 2 {
		sb, err := r.Create(rival, ask("old"))
		if err != nil || sb.ID != "old" || sb.Found != (round == 0) || sb.Generation != 1+round {
			t.Errorf("its own: %+v, %v", sb, err)
		}
		for _, id := range []string{"old", free.ID} {
			who, tenant := acme, sandboxer.DefaultTenant
			if id == free.ID {
				who, tenant = rival, "rival"
			}
			sb, err := r.Create(who, ask(id))
			if err != nil || sb.ID != sandboxer.DerivedID(tenant, id) || sb.Shown() != id {
				t.Errorf("%s, another's: %+v, %v", id, sb, err)
			}
		}
		if _, err := r.Destroy(rival, "old"); err != nil {
			t.Fatal(err)
		}
	}
	if sb := r.create(ask("new")); sb.ID != "new" {
		t.Errorf("%+v", sb)
	}
	_, err = r.Create(acme, ask(sandboxer.DerivedID("rival", free.ID)))
	wantErr(t, err, sandboxer.Invalid, "cannot be chosen")
	r.sound(4)
}

// TestThreads: an ID is one thread's for good, however it is asked for.
func TestThreads(t *testing.T) {
	r := newRig(t, nil)
	ask := func(user, thread, id string) (*sandboxer.Sandbox, error) {
		req := sandboxer.CreateRequest{Profile: "test", Thread: sandboxer.Thread{User: user, ID: thread}}
		if id != "" {
			req.Inputs = map[string]string{"sandbox_id": id}
		}
		return r.Create(acme, req)
	}
	want := func(sb *sandboxer.Sandbox, err error, id, user string, found bool) {
		t.Helper()
		if err != nil || sb.ID != id || sb.Thread.User != user || sb.Found != found {
			t.Errorf("%+v, %v; want %s of %s, found %v", sb, err, id, user, found)
		}
	}
	const known, foreign = "fe0dc8182dec7b77", "a-b-c-d648b243a3e817ea"
	sb, err := ask("", "thread-1", known)
	want(sb, err, known, "default", false)
	sb, err = ask("default", "thread-1", "")
	want(sb, err, known, "default", true)
	sb, err = ask("", "", known)
	want(sb, err, known, "default", true)
	_, err = ask("alice", "thread-1", known)
	wantErr(t, err, sandboxer.Invalid, "dc977b840cb8638e")

	// Two users whose normal form is one have one ID, and so only one of them has it.
	first, err := ask("a@b.c", "t", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, state := range []sandboxer.State{sandboxer.Running, sandboxer.Paused, sandboxer.Terminated} {
		switch state {
		case sandboxer.Paused:
			_, err = r.Pause(acme, first.ID, PauseRequest{})
		case sandboxer.Terminated:
			_, err = r.Destroy(acme, first.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = ask(foreign, "t", "")
		wantErr(t, err, sandboxer.Conflict, "belongs to another thread")
		if got := r.get(first.ID); got.State != state {
			t.Errorf("it is %s; want %s", got.State, state)
		}
	}
	sb, err = ask("", "", first.ID) // keeps whose it was
	want(sb, err, first.ID, "a@b.c", false)
	_, err = ask(foreign, "t", "")
	wantErr(t, err, sandboxer.Conflict, "belongs to another thread")

	// One that was made by its ID alone becomes the first thread's that asks for it.
	id, err := sandboxer.Thread{User: foreign, ID: "later"}.SandboxID()
	if err != nil {
		t.Fatal(err)
	}
	sb, err = ask("", "", id)
	want(sb, err, id, "", false)
	sb, err = ask(foreign, "later", "")
	want(sb, err, id, foreign, true)
	r.restart()
	_, err = ask("a@b.c", "later", "")
	wantErr(t, err, sandboxer.Conflict, "belongs to another thread")
	r.sound(3)
}

// TestPortsOfTenants: a host name has what the objects carry, a path what the tenant calls it; both
// lead to the visitor's own.
func TestPortsOfTenants(t *testing.T) {
	r := newRig(t, nil)
	ask := sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "web"}}
	theirs := r.create(ask)
	mine, err := r.Create(rival, ask)
	if err != nil {
		t.Fatal(err)
	}
	for _, who := range []string{sandboxer.DefaultTenant, "rival"} {
		if _, err := r.OpenPort(as(who), "web", 8080); err != nil {
			t.Fatal(err)
		}
	}
	token, _, _, err := r.SignPort(rival, "web", 8080, 0)
	if err != nil {
		t.Fatal(err)
	}
	visit := func(who string, a PortAccess, want *sandboxer.Sandbox, kind sandboxer.Kind) {
		t.Helper()
		a.Port = 8080
		v, err := r.Visit(as(who), a)
		if want == nil {
			wantErr(t, err, kind, "")
			return
		}
		if err != nil || v.SandboxID != want.ID || v.Tenant != want.Tenant {
			t.Fatalf("%s by %+v: %+v, %v; want %s", who, a, v, err, want.Ref())
		}
		v.End()
	}
	visit("rival", PortAccess{Ref: "web"}, mine, "")
	visit("rival", PortAccess{ID: mine.ID}, mine, "")
	visit("rival", PortAccess{Ref: mine.ID}, mine, "")
	visit(sandboxer.DefaultTenant, PortAccess{Ref: "web"}, theirs, "")
	visit(sandboxer.DefaultTenant, PortAccess{ID: theirs.ID}, theirs, "")
	visit(sandboxer.DefaultTenant, PortAccess{ID: mine.ID}, nil, sandboxer.NotFound)
	visit("rival", PortAccess{ID: theirs.ID}, nil, sandboxer.NotFound) // though the rival calls its own so
	visit("nobody", PortAccess{Ref: "web", Token: token}, mine, "")
	visit("nobody", PortAccess{ID: mine.ID, Token: token}, mine, "")
	visit("nobody", PortAccess{Ref: "other", Token: token}, nil, sandboxer.Unauthenticated)
	visit("nobody", PortAccess{ID: theirs.ID, Token: token}, nil, sandboxer.Unauthenticated)
	r.sound(2)
}
