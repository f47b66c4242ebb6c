package manager

import (
	"context"
	"fmt"
	"iter"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestNotices has what dies be ended as soon as the backend tells of it, and nothing else.
func TestNotices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil) // its sweep comes too late for all of this
		sb, keep, frozen := r.create(sandboxer.CreateRequest{}), r.create(sandboxer.CreateRequest{}), r.create(sandboxer.CreateRequest{})
		if _, err := r.Pause(admin, frozen.ID, sandboxer.PauseRequest{Depth: sandboxer.PauseFreeze}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // until the manager listens
		r.world.Kill(sb.ID)
		r.world.Kill(frozen.ID)
		time.Sleep(time.Second)
		synctest.Wait()
		for _, id := range []string{sb.ID, frozen.ID} {
			if got := r.get(id); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonLost {
				t.Errorf("a second after its death %s is %s (%s)", id, got.State, got.Reason)
			}
		}
		if err := r.world.OOMKill(keep.ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := r.get(keep.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonOOMKilled {
			t.Errorf("a second after it was killed for its memory it is %s (%s)", got.State, got.Reason)
		}
		r.sound(0)
	})
}

// TestNoticesProveNothing: notices of live sandboxes end nothing, and the maximum of them costs no more than a few
// probes.
func TestNoticesProveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var probes atomic.Int64
		told := make(chan string)
		r := newNotifyingRig(t, &probes, told)
		sb := r.create(sandboxer.CreateRequest{})
		for range 1000 { // it floods
			told <- sb.ID
			told <- "no-such"
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := r.get(sb.ID); got.State != sandboxer.Running {
			t.Errorf("it is %s (%s)", got.State, got.Reason)
		}
		if n := probes.Load(); n < 1 || n > 12 {
			t.Errorf("%d probes within a second", n)
		}
		r.destroy(sb.ID)
	})
}

// TestNoticesAreLost: a death without a notice is found all the same, and one with a notice after the stream
// broke is noticed again.
func TestNoticesAreLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cut := make(chan struct{})
		r := newRig(t, func(s *setup) {
			ticking(s)
			s.wrap = func(e *fake.Extension) sandboxer.Extension { return cutting{e, cut} }
		})
		first, second := r.create(sandboxer.CreateRequest{TTL: time.Hour}), r.create(sandboxer.CreateRequest{TTL: time.Hour})
		r.world.Inject(fake.Fault{Verb: fake.VerbNotify, Kind: sandboxer.Unavailable, Times: 3})
		close(cut)
		synctest.Wait()
		r.world.Kill(first.ID)
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := r.get(first.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonLost {
			t.Errorf("what died while nobody listened is %s (%s)", got.State, got.Reason)
		}
		r.world.Kill(second.ID)
		time.Sleep(time.Second)
		synctest.Wait()
		if got := r.get(second.ID); got.State != sandboxer.Terminated {
			t.Errorf("what died when it listened again is %s", got.State)
		}
		r.sound(0)
	})
}

// TestManyNotices sends more notices than there is room for: the sender waits.
func TestManyNotices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		told := make(chan string)
		r := newNotifyingRig(t, new(atomic.Int64), told)
		told <- "first" // which is looked at at once
		synctest.Wait()
		for n := range 2*maxNotices + 2 {
			began := time.Now()
			told <- fmt.Sprint("n-", n)
			if waited := time.Since(began); n > 0 && waited > 0 != (n == maxNotices+1 || n == 2*maxNotices+1) || waited > lookEvery {
				t.Errorf("the notice %d waits for %s", n, waited)
			}
		}
		sb := r.create(sandboxer.CreateRequest{})
		r.destroy(sb.ID)
	})
}

func newNotifyingRig(t *testing.T, probes *atomic.Int64, told <-chan string) *rig {
	return newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return notifying{e, probes, told} }
	})
}

// cutting ends the first Notify with cut.
type cutting struct {
	*fake.Extension
	cut chan struct{}
}

func (e cutting) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	select {
	case <-e.cut:
		return e.Extension.Notify(ctx, owner)
	default:
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-e.cut:
			cancel()
		case <-ctx.Done():
		}
	}()
	return e.Extension.Notify(ctx, owner)
}

// notifying tells what comes from told, and counts the probes.
type notifying struct {
	*fake.Extension
	probes *atomic.Int64
	told   <-chan string
}

func (e notifying) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	e.probes.Add(1)
	return e.Extension.IsAlive(ctx, h)
}

func (e notifying) Notify(ctx context.Context, _ string) (iter.Seq2[string, error], error) {
	return func(yield func(string, error) bool) {
		for {
			select {
			case id := <-e.told:
				if !yield(id, nil) {
					return
				}
			case <-ctx.Done():
				yield("", ctx.Err())
				return
			}
		}
	}, nil
}
