package docker

import (
	"io"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestGuestRootCannotAnswerForTheAgent: root inside can neither trace the agent nor read or write its memory or take its sockets; the same is true for the programs
// that another machine's engine starts to reach it.
func TestGuestRootCannotAnswerForTheAgent(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "trace")
			e := o.opened(t)
			h := up(t, e, order("trace", o))
			if got := run(t, e, h, "id -u; echoer trace 1"); got != "0" {
				t.Errorf("of the agent root inside gets at %q", got)
			}
			if got := run(t, e, h, "sleep 1000 & echoer trace $!; kill -9 $!"); got == "" {
				t.Error("nothing gets at another process either: the test sees nothing")
			}
			e.agents.Drop(e.name(h.SandboxID, h.Generation))
			b, err := e.find(t.Context(), h)
			if err != nil {
				t.Fatal(err)
			}
			here := b.host.socket
			b.host.socket = "" // as if on another machine
			defer func() { b.host.socket = here }()
			hold, release := io.Pipe() // the connection stays until this command has ended
			ended := make(chan error, 1)
			go func() {
				_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"cat"}, Stdin: hold})
				ended <- err
			}()
			if got := run(t, e, h, `for p in /proc/[0-9]*; do case $(tr '\0' ' ' <$p/cmdline 2>/dev/null) in "`+agentPath+` connect"*) echoer trace ${p#/proc/} | tr '\n' ' '; n=1;; esac; done; [ "$n" = 1 ] || echo none is there`); got != "" {
				t.Errorf("of what leads to the agent root inside gets at %q", got)
			}
			release.Close()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}
