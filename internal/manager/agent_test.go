package manager

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// withAgent gives sandboxes an agent, which is this test binary, too.
func withAgent(s *setup) {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	s.fake.Agent = self
	s.profiles = append(s.profiles,
		sandboxer.Profile{ID: "profile.agent", Extension: "ext.fake"},
		sandboxer.Profile{ID: "profile.resuming", Extension: "ext.fake", AutoResume: true},
		sandboxer.Profile{ID: "profile.idle", Extension: "ext.fake", Idle: time.Minute})
}

// healthy reports whether the agent answers on c.
func healthy(t *testing.T, c net.Conn) bool {
	t.Helper()
	c.SetDeadline(time.Now().Add(time.Minute))
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://sandbox/health", nil)
	if err != nil {
		t.Fatal(err)
	}
	if r.Write(c) != nil {
		return false
	}
	res, err := http.ReadResponse(bufio.NewReader(c), r)
	if err != nil {
		return false
	}
	res.Body.Close()
	return res.StatusCode == http.StatusNoContent
}

// visited opens the way to the agent of sb, and a connection.
func (r *rig) visited(ctx context.Context, id string) (*AgentVisit, net.Conn) {
	r.t.Helper()
	v, err := r.VisitAgent(ctx, id)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(v.End)
	c, err := v.Dial(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	t, ok := r.t.(*testing.T)
	if !ok || !healthy(t, c) {
		r.t.Fatal("the agent does not answer")
	}
	return v, c
}

// cutOff waits for the end of a visit and of its connection.
func cutOff(t *testing.T, v *AgentVisit, c net.Conn, kinds ...sandboxer.Kind) {
	t.Helper()
	select {
	case <-v.Context().Done():
	case <-time.After(time.Minute):
		t.Fatal("the visit goes on")
	}
	cause := context.Cause(v.Context())
	ok := len(kinds) == 0
	for _, k := range kinds {
		ok = ok || sandboxer.KindOf(cause) == k
	}
	if !ok {
		t.Errorf("it ended with %v; want %q", cause, kinds)
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("its connection is open: %v", err)
	}
	if _, err := v.Dial(t.Context()); err == nil {
		t.Error("it still dials")
	}
}

func TestVisitAgent(t *testing.T) {
	r := newRig(t, withAgent)
	sb := r.create(sandboxer.CreateRequest{Profile: "agent"})

	t.Run("whose it is", func(t *testing.T) {
		_, err := r.VisitAgent(rival, sb.ID)
		wantErr(t, err, sandboxer.NotFound, "")
		_, err = r.VisitAgent(as(sandboxer.DefaultTenant, sandboxer.ScopeRead), sb.ID)
		wantErr(t, err, sandboxer.Denied, "")
		_, err = r.VisitAgent(t.Context(), sb.ID)
		wantErr(t, err, sandboxer.Unauthenticated, "")
	})
	t.Run("ends when it is over", func(t *testing.T) {
		v, c := r.visited(acme, sb.ID)
		v.End()
		v.End()
		cutOff(t, v, c)
	})
	t.Run("ends with the key", func(t *testing.T) {
		secret, key, err := r.CreateKey(as(sandboxer.DefaultTenant, sandboxer.ScopeAdmin), NewKey{Name: "short", Tenant: sandboxer.DefaultTenant, Scopes: []sandboxer.Scope{sandboxer.ScopeWrite}})
		if err != nil {
			t.Fatal(err)
		}
		p, err := r.Authenticate(t.Context(), secret)
		if err != nil {
			t.Fatal(err)
		}
		v, c := r.visited(sandboxer.WithPrincipal(t.Context(), p), sb.ID)
		if err := r.RevokeKey(as(sandboxer.DefaultTenant, sandboxer.ScopeAdmin), key.ID); err != nil {
			t.Fatal(err)
		}
		cutOff(t, v, c, sandboxer.Unauthenticated)
		_, err = r.VisitAgent(sandboxer.WithPrincipal(t.Context(), p), sb.ID)
		wantErr(t, err, sandboxer.Unauthenticated, "")
	})
	t.Run("ends with a pause, and resumes where that is allowed", func(t *testing.T) {
		own := r.create(sandboxer.CreateRequest{Profile: "resuming"})
		v, c := r.visited(acme, own.ID)
		if _, err := r.Pause(acme, own.ID, PauseRequest{}); err != nil {
			t.Fatal(err)
		}
		cutOff(t, v, c)
		r.visited(acme, own.ID)
		if got := r.get(own.ID); got.State != sandboxer.Running {
			t.Errorf("after a visit it is %s", got.State)
		}

		if _, err := r.Pause(acme, sb.ID, PauseRequest{}); err != nil {
			t.Fatal(err)
		}
		_, err := r.VisitAgent(acme, sb.ID)
		wantErr(t, err, sandboxer.Conflict, "")
		if _, err := r.Resume(acme, sb.ID, ResumeRequest{}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("ends with the sandbox", func(t *testing.T) {
		own := r.create(sandboxer.CreateRequest{Profile: "agent"})
		v, c := r.visited(acme, own.ID)
		r.destroy(own.ID)
		cutOff(t, v, c)
		_, err := r.VisitAgent(acme, own.ID)
		wantErr(t, err, sandboxer.Conflict, "")
	})
	t.Run("is a use", func(t *testing.T) {
		own := r.create(sandboxer.CreateRequest{Profile: "idle"})
		v, _ := r.visited(acme, own.ID)
		if _, busy := r.usage.last(own.ID); !busy {
			t.Error("a sandbox whose agent is visited counts as idle")
		}
		v.End()
		if _, busy := r.usage.last(own.ID); busy {
			t.Error("a sandbox counts as used after the visit")
		}
	})
	t.Run("an agent that fails", func(t *testing.T) {
		r.world.Inject(fake.Fault{Verb: fake.VerbAgent, Kind: sandboxer.Unavailable, Times: 1})
		v, err := r.VisitAgent(acme, sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer v.End()
		_, err = v.Dial(t.Context())
		wantErr(t, err, sandboxer.Unavailable, "")
	})
	t.Run("none", func(t *testing.T) {
		plain := newRig(t, nil)
		sb := plain.create(sandboxer.CreateRequest{})
		_, err := plain.VisitAgent(acme, sb.ID)
		wantErr(t, err, sandboxer.Unsupported, "agent")
	})
}
