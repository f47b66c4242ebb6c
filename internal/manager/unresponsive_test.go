package manager

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// A sandbox that is there and does not respond is shown so from the first call that ends for
// that, and kept; it can be destroyed, and is well again when it responds.
func TestUnresponsive(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(sandboxer.CreateRequest{})
	shown := func(want bool) *sandboxer.Sandbox {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			got := r.get(sb.ID)
			if !got.UnresponsiveSince.IsZero() == want {
				return got
			}
			if time.Now().After(end) {
				t.Fatalf("unresponsive since %s", got.UnresponsiveSince)
			}
		}
	}
	r.world.Inject(fake.Fault{Verb: fake.VerbProbe, Silent: true}, fake.Fault{Verb: fake.VerbExec, Kind: sandboxer.Unavailable}, fake.Fault{Verb: fake.VerbStats, Kind: sandboxer.Unavailable})
	if _, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"true"}}); !errors.Is(err, sandboxer.Unavailable) {
		t.Errorf("exec: %v", err)
	}
	if got := shown(true); got.State != sandboxer.Running {
		t.Errorf("it is %s", got.State)
	}
	r.Manager.probedLongAgo()
	if _, err := r.Sweep(admin); err != nil {
		t.Fatal(err)
	}
	if got := shown(true); got.State != sandboxer.Running || !got.AbsentSince.IsZero() {
		t.Errorf("after another look: %+v", got)
	}
	since := shown(true).UnresponsiveSince
	if _, err := r.Sweep(admin); err != nil { // that it is listed does not show that it responds
		t.Fatal(err)
	}
	if got := r.get(sb.ID); !got.UnresponsiveSince.Equal(since) {
		t.Errorf("a listing changed it to unresponsive since %s", got.UnresponsiveSince)
	}
	r.world.Forgive()
	r.Manager.probedLongAgo()
	if _, err := r.Sweep(admin); err != nil {
		t.Fatal(err)
	}
	shown(false)
	r.world.Inject(fake.Fault{Verb: fake.VerbProbe, Silent: true}, fake.Fault{Verb: fake.VerbStats, Kind: sandboxer.Unavailable})
	if _, err := r.Stats(acme, sb.ID); !errors.Is(err, sandboxer.Unavailable) {
		t.Errorf("stats: %v", err)
	}
	shown(true)
	r.destroy(sb.ID)
	r.sound(0)
}

// probedLongAgo has the next survey probe what is listed.
func (m *Manager) probedLongAgo() {
	for _, e := range m.extensions() {
		e.survey <- struct{}{}
		*e.probed = time.Time{}
		<-e.survey
	}
}

// deaf is an extension whose freezing ignores its context.
type deaf struct {
	*fake.Extension
	release chan struct{}
}

func (d deaf) Pause(context.Context, sandboxer.Handle) error {
	<-d.release
	return errors.New("at last")
}

// A manager closes although a backend does not stop.
func TestCloseLeavesTheHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newRig(t, func(s *setup) {
			s.opts.Stop = 3 * time.Second
			s.backend = backend.Options{Linger: time.Hour}
			s.wrap = func(e *fake.Extension) sandboxer.Extension { return deaf{e, release} }
		})
		const n = 10
		over := make(chan error, n)
		for range n {
			sb := r.create(sandboxer.CreateRequest{})
			go func() {
				_, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFreeze})
				over <- err
			}()
		}
		synctest.Wait()
		begun := time.Now()
		if err := r.Manager.Close(); err != nil {
			t.Error(err)
		}
		if took := time.Since(begun); took != 3*time.Second {
			t.Errorf("it closed after %s", took)
		}
		close(release)
		for range n {
			<-over
		}
		synctest.Wait()
	})
}
