package access

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// visiting is the ctx of a visit of a port (0: of the agent) that has entered a.
func visiting(a *Visits, id string, port int) (context.Context, func()) {
	ctx, cut := context.WithCancelCause(context.Background())
	return ctx, a.Enter(id, port, cut)
}

// A visit ends with its port, or with its sandbox, and with no other.
func TestVisitsEnd(t *testing.T) {
	for _, c := range []struct {
		name string
		port int
		ends []bool // port 80 of box, port 81, its agent, port 80 of another
	}{
		{"port", 80, []bool{true, false, false, false}},
		{"sandbox", 0, []bool{true, true, true, false}},
		{"port that nobody visits", 82, []bool{false, false, false, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := NewVisits(bytes.Repeat([]byte{7}, 32))
			var visits []context.Context
			var leaves []func()
			for _, x := range []struct {
				id   string
				port int
			}{{"box", 80}, {"box", 81}, {"box", 0}, {"other", 80}} {
				v, leave := visiting(a, x.id, x.port)
				visits, leaves = append(visits, v), append(leaves, leave)
			}
			a.End("box", c.port)
			for i, v := range visits {
				cause := context.Cause(v)
				if ended := cause != nil; ended != c.ends[i] || ended && sandboxer.KindOf(cause) != sandboxer.Denied {
					t.Errorf("visit %d: %v; want ended: %t", i, cause, c.ends[i])
				}
			}
			for _, leave := range leaves {
				leave()
				leave()
			}
			if len(a.visits) != 0 {
				t.Errorf("left: %v", a.visits)
			}
		})
	}
}

// A token says what was signed, with this key and no other.
func TestPortTokens(t *testing.T) {
	a := NewVisits(bytes.Repeat([]byte{7}, 32))
	want := PortClaim{ID: "box", Generation: 3, Port: 65535, Rev: 1 << 40, Until: time.Unix(1<<33, 0).UTC()}
	token := a.SignPort(want)
	if got, ok := a.ReadPort(token); !ok || got != want {
		t.Errorf("read %+v, %t; want %+v", got, ok, want)
	}
	if got, ok := NewVisits(bytes.Repeat([]byte{8}, 32)).ReadPort(token); ok {
		t.Errorf("another key reads %+v", got)
	}
	for i := range token {
		forged := []byte(token)
		forged[i] ^= 1
		if got, ok := a.ReadPort(sandboxer.Secret(forged)); ok {
			t.Errorf("with byte %d changed it says %+v", i, got)
		}
	}
}

func TestVisitsAreConcurrent(t *testing.T) {
	a := NewVisits(bytes.Repeat([]byte{7}, 32))
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 100 {
				v, leave := visiting(a, "box", i)
				a.End("box", i)
				if v.Err() == nil {
					t.Error("a visit outlives its port")
				}
				leave()
			}
		})
	}
	all.Wait()
	if len(a.visits) != 0 {
		t.Errorf("left: %v", a.visits)
	}
}
