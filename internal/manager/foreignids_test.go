package manager

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestForeignIDs: whoever asks for an ID that is another tenant's learns that it cannot be
// had, at once, and nothing of what the other did with it.
func TestForeignIDs(t *testing.T) {
	hold, let := heldUp(pRecord)
	var held atomic.Bool
	r := newRig(t, func(s *setup) {
		pooled(1)(s)
		hold(s)
		wait := s.opts.fail
		s.opts.fail = func(p point) {
			if held.Load() {
				wait(p)
			}
		}
		s.opts.Grace = time.Nanosecond
		s.opts.Stop = time.Second
	})
	defer let()
	if err := r.Grant(admin, "acme", 10*sandboxer.Credit, "", ""); err != nil {
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

	back := r.backUp()
	made("quarantined", "test")
	back() // the database does not know it any more
	if _, err := r.Sweep(admin); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was made for the pool is known to be nobody's", func() bool {
		qs, err := r.Quarantine(admin)
		return err == nil && len(qs) == 1
	})
	r.quarantine("quarantined")
	if err := r.Grant(admin, "acme", 10*sandboxer.Credit, "again", ""); err != nil {
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

	// Last, since all creates stop there: one that is not written down yet.
	held.Store(true)
	begun := make(chan struct{})
	go func() {
		defer close(begun)
		_, _ = r.Create(acme, sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"sandbox_id": "begun"}})
	}()
	defer func() { let(); <-begun }()
	eventually(t, "it has begun", func() bool { return r.working("begun") })
	ids = append(ids, "begun")

	for _, id := range ids {
		for what, req := range map[string]sandboxer.CreateRequest{
			"plain":     {Profile: "test"},
			"keyed":     {Profile: "test", Key: "k-" + id},
			"elsewhere": {Profile: "paid"},
			"at once":   {Profile: "test", NoWaiting: true, Name: "mine"},
		} {
			req.Inputs = map[string]string{"sandbox_id": id}
			ctx, cancel := context.WithTimeout(rival, 20*time.Second)
			_, err := r.Create(ctx, req)
			cancel()
			got := fmt.Sprint(sandboxer.KindOf(err), ": ", sandboxer.Message(err), " | ", sandboxer.HintOf(err), " | ", sandboxer.RetryAfterOf(err))
			if want := "conflict: the sandbox ID " + id + " cannot be had | choose another ID or thread | 0s"; got != want {
				t.Errorf("%s, %s: %s\nwant %s", id, what, got, want)
			}
		}
	}
	items, _, err := r.List(rival, sandboxer.Query{})
	if err != nil || len(items) > 0 {
		t.Errorf("the rival got %v, %v", items, err)
	}
}
