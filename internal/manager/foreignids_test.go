package manager

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestForeignIDs: a caller that asks for an ID that is another tenant's gets a sandbox of that ID, at
// once, and learns nothing of the other's.
func TestForeignIDs(t *testing.T) {
	r := newRig(t, func(s *setup) {
		pooled(1)(s)
		s.opts.Grace = time.Nanosecond
		s.opts.Stop = time.Second
	})
	if err := r.Grant(admin, sandboxer.DefaultTenant, 10*sandboxer.Credit, "", ""); err != nil {
		t.Fatal(err)
	}
	made := func(id, profile string) {
		t.Helper()
		r.create(sandboxer.CreateRequest{Profile: profile, Inputs: map[string]string{"sandbox_id": id}})
	}
	later := func(id string) {
		t.Helper()
		if _, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", NoWaiting: true, Inputs: map[string]string{"sandbox_id": id}}); err != nil {
			t.Fatal(err)
		}
	}
	ids := []string{"running", "paused", "ended", "forgotten", "terminating", "damaged", "creating", "failing", "stuck", "quarantined"}

	r.full("test", 1) // it is kept, and given to nobody, once the database went back
	back := r.backUp()
	made("quarantined", "test")
	back() // the database does not know it any more
	if _, err := r.Sweep(admin); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is quarantined", func() bool {
		qs, err := r.Quarantine(admin)
		return err == nil && slices.ContainsFunc(qs, func(q Quarantined) bool { return q.ID == "quarantined" })
	})
	r.accept()
	if err := r.Grant(admin, sandboxer.DefaultTenant, 10*sandboxer.Credit, "again", ""); err != nil {
		t.Fatal(err)
	}

	made("forgotten", "paid")
	r.destroy("forgotten")
	if n, err := r.store.ForgetHistory(t.Context(), now().Add(time.Hour), 100); err != nil || n == 0 {
		t.Fatalf("forgot %d, %v", n, err)
	}
	made("running", "test")
	made("paused", "test")
	if _, err := r.Pause(acme, "paused", PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	made("ended", "test")
	r.destroy("ended")
	made("damaged", "test")
	r.garble("damaged")
	made("terminating", "test")
	made("stuck", "test")
	r.world.Inject(
		fake.Fault{Verb: fake.VerbTeardown, ID: "terminating", Kind: sandboxer.Unavailable}, // tried again and again
		fake.Fault{Verb: fake.VerbTeardown, ID: "stuck", Hang: true},                        // never answers
		fake.Fault{Verb: fake.VerbTeardown, ID: "failing", Hang: true},
		fake.Fault{Verb: fake.VerbProvision, ID: "creating", Hang: true},
		fake.Fault{Verb: fake.VerbProvision, ID: "failing", Kind: sandboxer.Failed},
	)
	if _, err := r.Destroy(acme, "terminating"); err == nil {
		t.Fatal("it was torn down")
	}
	gone, leave := context.WithCancel(acme)
	left := make(chan struct{})
	go func() {
		defer close(left)
		_, _ = r.Destroy(gone, "stuck")
	}()
	later("creating")
	later("failing")
	eventually(t, "it is on its way out", func() bool { return r.get("failing").State == sandboxer.Terminating })
	eventually(t, "it is on its way out", func() bool { return r.get("stuck").State == sandboxer.Terminating })
	leave()
	<-left
	ids = append(ids, r.full("test", 1)[0])

	for _, id := range ids {
		own := ""
		for _, c := range []struct {
			what string
			req  sandboxer.CreateRequest
		}{
			{"at once", sandboxer.CreateRequest{Profile: "test", NoWaiting: true, Name: "mine-" + id}},
			{"plain", sandboxer.CreateRequest{Profile: "test"}},
			{"keyed", sandboxer.CreateRequest{Profile: "test", Key: "k-" + id}},
		} {
			c.req.Inputs = map[string]string{"sandbox_id": id}
			ctx, cancel := context.WithTimeout(rival, 20*time.Second)
			sb, err := r.Create(ctx, c.req)
			cancel()
			if err != nil || sb.Shown() != id || sb.Tenant != "rival" || sb.Generation != 1 || sb.ID != sandboxer.DerivedID("rival", id) || own != "" && own != sb.ID {
				t.Fatalf("%s, %s: %+v, %v", id, c.what, sb, err)
			}
			own = sb.ID
		}
		_, err := r.Create(rival, sandboxer.CreateRequest{Profile: "paid", Inputs: map[string]string{"sandbox_id": id}})
		wantErr(t, err, sandboxer.Conflict, "sandbox ID "+id+" belongs to another sandbox")
	}
	items, _, err := r.List(rival, sandboxer.Query{})
	if err != nil || len(items) != len(ids) {
		t.Errorf("the rival has %d, %v; want %d", len(items), err, len(ids))
	}
}
