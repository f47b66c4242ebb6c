package manager

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// A mortal extension loses its object just as it is looked at, when told to.
type mortal struct {
	*fake.Extension
	world *fake.World
	dies  atomic.Bool
}

func (m *mortal) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	if m.dies.CompareAndSwap(true, false) {
		m.world.Kill(h.SandboxID)
	}
	return m.Extension.WaitReady(ctx, h)
}

// TestDiesWithItsBroker: what a broker that was cut short had made, and that dies with it only after its successor
// has found it, is made again, also where the answer of Provision was not written down. What dies as it is made is not.
func TestDiesWithItsBroker(t *testing.T) {
	ext := &mortal{}
	r := newRig(t, func(s *setup) {
		s.wrap = func(f *fake.Extension) sandboxer.Extension { ext.Extension = f; return ext }
	})
	ext.world = r.world
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Hang: true, Lost: true, Times: 1})
	sb := r.create(sandboxer.CreateRequest{NoWaiting: true})
	eventually(t, "an object", func() bool { return len(r.world.Live()) == 1 })
	ext.dies.Store(true)
	r.restart()
	eventually(t, "its end, or that it runs", func() bool {
		now := r.get(sb.ID)
		return now.State != sandboxer.Creating
	})
	if now := r.get(sb.ID); now.State != sandboxer.Running || len(r.world.Live()) != 1 || ext.dies.Load() {
		t.Fatalf("it is %s (%s), and there are %d objects; want it made again", now.State, now.Message, len(r.world.Live()))
	}

	ext.dies.Store(true)
	if _, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"}); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("one that dies as it is made: %v; want %s", err, sandboxer.Failed)
	}
	r.destroy(sb.ID)
	r.sound(0)
}
