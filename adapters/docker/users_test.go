package docker

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
)

// TestUsersWithoutEnd: root inside replaces a file that an engine reads at the start of a command by a named pipe. The agent is still reached if the
// container is on this machine. Elsewhere only a few connections wait there, the error says why, and the sandbox can be destroyed.
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
				e.agents.Drop(e.name(b.id, b.generation))
				if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}, User: "0:0"}); err != nil || x.Code != 0 {
					t.Errorf("with a named pipe at %s: %+v, %v", file, x, err)
				}
				e.agents.Drop(e.name(b.id, b.generation))
				here := b.host.socket
				b.host.socket = "" // as if on another machine
				said := []string{file}
				if name == "docker" {
					said = []string{file, "that never ends", "destroy"}
					e.connectTime = time.Second // no connection succeeds
					var hang sync.WaitGroup
					for range maxHung { // immediately
						hang.Go(func() {
							if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err == nil {
								t.Errorf("a new connection came: %+v", x)
							}
						})
					}
					hang.Wait()
					e.connectTime = time.Hour // no connection is tried
				}
				_, err = e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
				wantKind(t, err, sandboxer.Failed, said...)
				e.connectTime = connectTime
				b.host.socket = here
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if _, err := e.Teardown(ctx, h); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestUsersFillNoMemory: large files of root inside that an engine reads for each command do not get into the engine's memory, nor do those of an image, or of a
// snapshot.
func TestUsersFillNoMemory(t *testing.T) {
	const most = 256 << 20
	pids := map[string]func() int{"docker": func() int { return dockerEngine.PID(t) }, "podman": enginetest.PodmanPID}
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "memory")
			e := o.opened(t)
			h := up(t, e, order("memory", o))
			b, err := e.find(t.Context(), h)
			if err != nil {
				t.Fatal(err)
			}
			peak := func() int64 {
				status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pids[name]()))
				_, after, _ := strings.Cut(string(status), "\nVmHWM:")
				var kib int64
				if _, serr := fmt.Sscan(after, &kib); err != nil || serr != nil {
					t.Fatal(err, serr)
				}
				return kib << 10
			}
			before := peak()
			run(t, e, h, "rm -f /etc/group; truncate -s 1G /etc/group; for i in $(seq 14); do echo root:x:0:0::/: ; done >/etc/passwd")
			for range 3 {
				e.agents.Drop(e.name(b.id, b.generation))
				run(t, e, h, "true")
			}
			if grown := peak() - before; grown > most {
				t.Errorf("the engine has taken %d MiB more", grown>>20)
			}
			run(t, e, h, "truncate -s 2M /etc/group") // a snapshot is written out in full
			if _, err := e.Snapshot(t.Context(), h, "memory"); err != nil {
				t.Fatal(err)
			}
			defer e.DropSnapshot(context.WithoutCancel(t.Context()), sandboxer.Snapshot{SnapshotID: "memory"})
			_, err = e.RestoreFromSnapshot(t.Context(), order("again", o), sandboxer.Snapshot{SnapshotID: "memory"})
			wantKind(t, err, sandboxer.Failed, "/etc/group", "larger than 1 MiB")
			if name == "podman" { // on another machine it is asked before
				e.agents.Drop(e.name(b.id, b.generation))
				b.host.socket = ""
				_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
				wantKind(t, err, sandboxer.Failed, "/etc/group", "larger than 1 MiB", "destroy")
			}
		})
	}
}
