package extensiontest

import (
	"context"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// notices is a Notify under way.
type notices struct {
	patience time.Duration
	ids      chan string
	err      error // set before ids is closed
	stop     context.CancelFunc
}

func (s *suite) listen(t *testing.T, b *backend.Backend, owner string) *notices {
	t.Helper()
	c, stop := context.WithCancel(ctx(t))
	seq, err := b.Notify(c, owner)
	if err != nil {
		stop()
		t.Fatalf("Notify: %s", describe(err))
	}
	n := &notices{patience: s.Patience, ids: make(chan string, 1000), stop: stop}
	go func() {
		defer close(n.ids)
		for id, err := range seq {
			if n.err = err; err != nil {
				return
			}
			n.ids <- id
		}
	}()
	t.Cleanup(func() {
		stop()
		for range n.ids {
		}
	})
	return n
}

// until waits for id, and returns the IDs reported before it.
func (n *notices) until(t *testing.T, id string) (others []string) {
	t.Helper()
	late := time.After(n.patience)
	for {
		select {
		case got, ok := <-n.ids:
			if !ok {
				t.Fatalf("the notices ended before %s was reported: %v", id, n.err)
			}
			if got == id {
				return others
			}
			others = append(others, got)
		case <-late:
			t.Fatalf("%s was not reported within %s", id, n.patience)
		}
	}
}

func (s *suite) notify(t *testing.T) {
	s.test(t, "tells of a death", func(t *testing.T) {
		if s.Kill == nil {
			t.Skip("the harness cannot kill a sandbox")
		}
		sb := s.up(t)
		n, second := s.listen(t, sb.b, sb.spec.Owner), s.listen(t, s.open(t), sb.spec.Owner)
		s.Kill(t, sb.h)
		n.until(t, sb.spec.ID)
		if sb.b.Can(sandboxer.CanProbe) {
			if l, err := sb.b.IsAlive(ctx(t), sb.h); err != nil || l != sandboxer.Gone {
				t.Errorf("after a reported death, IsAlive = %s, %v; want gone", l, err)
			}
		}
		second.until(t, sb.spec.ID) // each broker hears of it
	})

	s.test(t, "tells an owner of its own alone", func(t *testing.T) {
		if s.Kill == nil {
			t.Skip("the harness cannot kill a sandbox")
		}
		first, second := s.up(t), s.up(t)
		n, others := s.listen(t, first.b, s.Spec.Owner), s.listen(t, s.open(t), "somebody-else")
		for _, sb := range []*sandbox{first, second} {
			s.Kill(t, sb.h)
			n.until(t, sb.spec.ID)
		}
		others.stop()
		for id := range others.ids {
			t.Errorf("another owner gets a notice of %s", id)
		}
	})

	s.test(t, "ends", func(t *testing.T) {
		n := s.listen(t, s.opened, s.Spec.Owner)
		n.stop()
		for range n.ids {
		}
		wantKind(t, n.err, "the end of canceled notices", sandboxer.Canceled)
	})
}
