package manager

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestJoinedOnlyAsAsked: a request for a thread's sandbox is answered with the one
// there is only if that has everything the request itself names.
func TestJoinedOnlyAsAsked(t *testing.T) {
	r := newRig(t, nil)
	base := func() sandboxer.CreateRequest {
		return sandboxer.CreateRequest{Profile: "test", Thread: sandboxer.Thread{ID: "t"}, Name: "box",
			Env: map[string]string{"A": "1", "B": "2"}, Labels: map[string]string{"l": "1"}, Command: []string{"sleep", "100"}}
	}
	sb, err := r.Create(acme, base())
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*sandboxer.CreateRequest){
		"the same":       func(*sandboxer.CreateRequest) {},
		"only the ID":    func(q *sandboxer.CreateRequest) { *q = sandboxer.CreateRequest{Profile: "test", Thread: q.Thread} },
		"part of it":     func(q *sandboxer.CreateRequest) { q.Env = map[string]string{"B": "2"}; q.Command = nil },
		"another time":   func(q *sandboxer.CreateRequest) { q.TTL = 20 * 60e9 },
		"network stated": func(q *sandboxer.CreateRequest) { q.Network = &sandboxer.NetworkPolicy{} },
	} {
		q := base()
		change(&q)
		if got, err := r.Create(acme, q); err != nil || got.ID != sb.ID || got.Generation != sb.Generation {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	for name, change := range map[string]func(*sandboxer.CreateRequest){
		"name":     func(q *sandboxer.CreateRequest) { q.Name = "other" },
		"env":      func(q *sandboxer.CreateRequest) { q.Env["A"] = "2" },
		"more env": func(q *sandboxer.CreateRequest) { q.Env["C"] = "3" },
		"label":    func(q *sandboxer.CreateRequest) { q.Labels["l"] = "2" },
		"command":  func(q *sandboxer.CreateRequest) { q.Command = []string{"sleep", "200"} },
		"image":    func(q *sandboxer.CreateRequest) { q.Image = "x" },
		"host":     func(q *sandboxer.CreateRequest) { q.Host = "elsewhere" },
	} {
		q := base()
		change(&q)
		if got, err := r.Create(acme, q); !isKind(err, sandboxer.Conflict) {
			t.Errorf("another %s: %v, %v", name, got, err)
		}
	}
	q := base()
	q.Inputs = map[string]string{"sandbox_id": "mine"}
	if _, err := r.Create(acme, q); !isKind(err, sandboxer.Invalid) {
		t.Errorf("an ID and a thread: %v", err)
	}
}

// TestFound: a create says whether it made the sandbox, also when many ask at once and
// when the answer was lost; and a caller that finds one gets the requested time.
func TestFound(t *testing.T) {
	r := newRig(t, nil)
	ask := func(req sandboxer.CreateRequest) *sandboxer.Sandbox {
		t.Helper()
		req.Profile, req.Thread = "test", sandboxer.Thread{ID: "t"}
		sb, err := r.Create(acme, req)
		if err != nil {
			t.Fatal(err)
		}
		return sb
	}
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Delay: 50 * time.Millisecond, Times: 1})
	const n = 6
	found := make(chan bool, n)
	for i := range n {
		go func() {
			req := sandboxer.CreateRequest{Profile: "test", Thread: sandboxer.Thread{ID: "t"}, Key: fmt.Sprint("k", i), NoWaiting: i%2 == 0}
			sb, err := r.Create(acme, req)
			if err != nil {
				t.Error(err)
				found <- false
				return
			}
			again, err := r.Create(acme, req) // the answer was lost
			if err != nil || again.Found != sb.Found {
				t.Errorf("key %d: found %t, repeated %t (%v)", i, sb.Found, again.Found, err)
			}
			found <- sb.Found
		}()
	}
	made := 0
	for range n {
		if !<-found {
			made++
		}
	}
	if made != 1 {
		t.Errorf("%d of %d made it; want one", made, n)
	}
	if r.create(sandboxer.CreateRequest{}).Found {
		t.Error("one without a thread is found")
	}
	sb := ask(sandboxer.CreateRequest{})
	if !sb.Found || r.get(sb.ID).Found {
		t.Errorf("found %t, stored %t; want true and false", sb.Found, r.get(sb.ID).Found)
	}

	// The time to live: later is granted, earlier is not taken away, none is left alone.
	at := sb.ExpiresAt
	for _, c := range []struct {
		ttl   time.Duration
		later bool
	}{{0, false}, {time.Minute, false}, {time.Hour, true}, {30 * time.Minute, false}} {
		got := ask(sandboxer.CreateRequest{TTL: c.ttl})
		if got.ExpiresAt.After(at) != c.later || got.ExpiresAt.Before(at) || !got.Found {
			t.Errorf("ttl %s: expires at %s, before that at %s, found %t; want later %t", c.ttl, got.ExpiresAt, at, got.Found, c.later)
		}
		at = got.ExpiresAt
	}
	old := r.get(sb.ID)
	old.CreatedAt = old.CreatedAt.Add(-90 * time.Minute) // it may live for two hours
	if err := r.store.UpdateSandbox(context.Background(), old, sandboxer.Writes{}); err != nil {
		t.Fatal(err)
	}
	_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Thread: sandboxer.Thread{ID: "t"}, TTL: 100 * time.Minute})
	wantErr(t, err, sandboxer.Invalid, "its time to live cannot be changed to the requested one")
}
