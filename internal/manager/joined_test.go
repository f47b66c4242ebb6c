package manager

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
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
