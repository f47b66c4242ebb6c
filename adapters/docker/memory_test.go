package docker

import (
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestMemoryKillsAgent has the memory limit kill the agent, and with it the sandbox. The connection to the agent breaks before the engine
// knows that the container has ended.
func TestMemoryKillsAgent(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can have the agent killed first")
	}
	o := engines["docker"](t).options(t, "memory") // Podman does not say that memory was the cause
	e := o.opened(t)
	h := up(t, e, order("memory", o, func(s *sandboxer.Spec) { s.Limits.MemoryBytes = 128 << 20 }))
	b, err := e.find(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	c, err := b.host.api.InspectContainer(t.Context(), b.container)
	if err != nil {
		t.Fatal(err)
	}
	in, begin := io.Pipe()
	started, out := io.Pipe()
	go func() { // The command keeps the agent's former score.
		_, err := started.Read(make([]byte, 1))
		if err == nil {
			err = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", c.State.Pid), []byte("1000"), 0o600)
		}
		begin.CloseWithError(err)
	}()
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo; read x; head -c 400000000 /dev/zero | tail -n 1"}, Stdin: in, Stdout: out})
	if err != nil || x != (sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}) {
		t.Errorf("got %+v, %v", x, err)
	}
}
