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
