package manager

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// remains is a backend whose sandboxes can die and still be listed, as those of a
// crashed engine are.
type remains struct {
	*fake.Extension
	dead *atomic.Bool
}

func (r remains) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	if r.dead.Load() {
		return sandboxer.Gone, nil
	}
	return r.Extension.IsAlive(ctx, h)
}

func (r remains) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	if r.dead.Load() {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.NotFound, nil, "it crashed")
	}
	return r.Extension.Exec(ctx, h, cmd)
}

// TestListedButDead: what is listed exists, but need not be alive. It is found out by
// the next probe, and at once when somebody uses it.
func TestListedButDead(t *testing.T) {
	for name, within := range map[string]time.Duration{"probed": probeEvery + 15*time.Second, "used": 15 * time.Second} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var dead atomic.Bool
				r := newRig(t, func(s *setup) {
					ticking(s)
					s.wrap = func(e *fake.Extension) sandboxer.Extension { return remains{e, &dead} }
				})
				sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
				time.Sleep(time.Minute)
				dead.Store(true)
				if name == "used" {
					if _, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"true"}}); !isKind(err, sandboxer.NotFound) {
						t.Fatalf("Exec: %v", err)
					}
				}
				time.Sleep(within)
				synctest.Wait()
				if got := r.get(sb.ID); got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonLost {
					t.Errorf("%s after it died it is %s (%s)", within, got.State, got.Reason)
				}
				if n := len(r.world.Live()); n != 0 {
					t.Errorf("%d objects are left", n)
				}
			})
		})
	}
}

// picky refuses specs before anything is made.
type picky struct{ *fake.Extension }

func (picky) Check(_ context.Context, spec sandboxer.Spec) error {
	if spec.User == "picky" || spec.Image == "no-such" {
		return sandboxer.E(sandboxer.Unsupported, nil, "not that image")
	}
	return nil
}

// TestRefusedByTheBackend: what the backend would refuse leaves no record, and a dry
// run says so.
func TestRefusedByTheBackend(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return picky{e} }
	})
	req := sandboxer.CreateRequest{Profile: "test", Image: "no-such", Key: "k"}
	if _, err := r.Plan(acme, req); !isKind(err, sandboxer.Unsupported) {
		t.Errorf("Plan: %v", err)
	}
	if _, err := r.Create(acme, req); !isKind(err, sandboxer.Unsupported) {
		t.Errorf("Create: %v", err)
	}
	items, _, err := r.List(acme, sandboxer.Query{States: sandboxer.States()})
	if err != nil || len(items) != 0 {
		t.Errorf("left: %v %v", items, err)
	}
	req.Image = ""
	if _, err := r.Create(acme, req); err != nil { // the key was not used up
		t.Errorf("a sound order under the same key: %v", err)
	}
}

// hog is a backend whose sandboxes all die of their memory once somebody uses it up.
type hog struct {
	*fake.Extension
	kill func(id string) error
}

func (e hog) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	if cmd.Args[0] == "hog" {
		return sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}, e.kill(h.SandboxID)
	}
	return e.Extension.Exec(ctx, h, cmd)
}

// TestOutOfMemory: a sandbox that its memory limit killed says so in the record and in
// the event, at once when that shows in a command and by the next probe otherwise.
func TestOutOfMemory(t *testing.T) {
	for name, within := range map[string]time.Duration{"probed": probeEvery + 15*time.Second, "used": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				counted := map[string]int{}
				var r *rig
				r = newRig(t, func(s *setup) {
					ticking(s)
					s.wrap = func(e *fake.Extension) sandboxer.Extension {
						return hog{e, func(id string) error { return r.world.OOMKill(id) }}
					}
					s.opts.OOMKilled = func(extension, what string) {
						mu.Lock()
						defer mu.Unlock()
						counted[what]++
					}
				})
				sb := r.create(sandboxer.CreateRequest{TTL: time.Hour})
				time.Sleep(time.Minute)
				commands := 0
				if name == "used" {
					commands = 1
					x, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"hog"}})
					if err != nil || x != (sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}) {
						t.Fatalf("Exec: %+v, %v", x, err)
					}
				} else if err := r.world.OOMKill(sb.ID); err != nil {
					t.Fatal(err)
				}
				time.Sleep(within)
				synctest.Wait()
				got := r.get(sb.ID)
				if got.State != sandboxer.Terminated || got.Reason != sandboxer.ReasonOOMKilled || got.Message == "" {
					t.Errorf("%s after it died it is %s (%s: %s)", within, got.State, got.Reason, got.Message)
				}
				events, err := r.Events(acme, sandboxer.EventQuery{SandboxID: sb.ID})
				told := 0
				for _, ev := range events {
					if ev.Type == sandboxer.EventState && ev.To == sandboxer.Terminating && ev.Cause == sandboxer.ReasonOOMKilled {
						told++
					}
				}
				if err != nil || told != 1 {
					t.Errorf("%d events tell it (%v): %+v", told, err, events)
				}
				mu.Lock()
				defer mu.Unlock()
				if counted["sandbox"] != 1 || counted["command"] != commands {
					t.Errorf("counted %v", counted)
				}
				if n := len(r.world.Live()); n != 0 {
					t.Errorf("%d objects are left", n)
				}
			})
		})
	}
}
