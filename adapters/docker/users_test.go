package docker

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestUsersWithoutEnd: root inside makes a file that is opened when a command is started a named pipe. No more than a few
// connections wait there, the error says why, and the sandbox can be destroyed.
func TestUsersWithoutEnd(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "users")
			e := o.opened(t)
			for _, file := range []string{"/etc/passwd", "/etc/group"} {
				h := up(t, e, order("users", o))
				b, err := e.find(t.Context(), h)
				if err != nil {
					t.Fatal(err)
				}
				run(t, e, h, "rm -f "+file+"; mkfifo "+file)
				e.dropAgent(e.name(b.id, b.generation))
				said := []string{file, "without an end", "destroy"}
				if name == "docker" {
					e.connectTime = time.Second // none comes
					var hang sync.WaitGroup
					for range maxHung { // at once
						hang.Go(func() {
							if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err == nil {
								t.Errorf("a new connection came: %+v", x)
							}
						})
					}
					hang.Wait()
					e.connectTime = time.Hour // none is tried
				}
				_, err = e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
				wantKind(t, err, sandboxer.Failed, said...)
				e.connectTime = connectTime
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if _, err := e.Teardown(ctx, h); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestHangs: connections that hang one after the other end the trying, but for one now and then; one that came makes up for all.
func TestHangs(t *testing.T) {
	var h hangs
	now := time.Now()
	for i := range 2 * maxHung {
		if h.refuse(now) {
			t.Fatalf("refused after %d, with one that came in between", i)
		}
		if i == maxHung-1 {
			h.came()
		} else {
			h.hung(now)
		}
	}
	h.hung(now)
	if !h.refuse(now) || !h.refuse(now.Add(hungPause-1)) {
		t.Errorf("after %d in a row one more is tried", maxHung)
	}
	if later := now.Add(hungPause); h.refuse(later) || !h.refuse(later) {
		t.Error("after a while not exactly one is tried")
	}
}
