package agent

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
)

// TestClientLeavesNothing checks that a closed client has no goroutine left, however
// its calls ended.
func TestClientLeavesNothing(t *testing.T) {
	a := startAgent(t)
	a.Client.Close()
	ignore := goleak.IgnoreCurrent() // the test's own hold on the agent's log
	c := NewClient(ClientOptions{Token: testToken, Dial: a.dial})
	x, err := c.Exec(t.Context(), sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("x"), Stdout: io.Discard})
	if err != nil || x.Code != 0 {
		t.Fatal(x, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w, err := c.Watch(ctx, a.dir, false)
	if err != nil {
		t.Fatal(err)
	}
	started := &awaited{}
	done := make(chan error)
	go func() {
		_, err := c.Exec(ctx, sandboxer.Cmd{Args: []string{"sh", "-c", "echo up; sleep 1000"}, Stdout: started})
		done <- err
	}()
	started.wait(t, "up")
	cancel()
	if err := <-done; sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Error(err)
	}
	if _, err := w.Next(); err == nil {
		t.Error("the watch goes on")
	}
	if f, err := c.ReadFile(t.Context(), "/etc/passwd"); err != nil {
		t.Error(err)
	} else {
		f.Close()
	}
	c.Close()
	goleak.VerifyNone(t, ignore)
}

func TestUnreachable(t *testing.T) {
	c := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", t.TempDir()+"/nothing")
	}})
	defer c.Close()
	_, exec := c.Exec(t.Context(), sandboxer.Cmd{Args: []string{"true"}})
	_, stats := c.Stats(t.Context())
	_, dial := c.Dial(t.Context(), 80)
	_, watch := c.Watch(t.Context(), "/", false)
	for what, err := range map[string]error{"Exec": exec, "Stats": stats, "Dial": dial, "Watch": watch} {
		if sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Errorf("%s: %v (%s)", what, err, sandboxer.KindOf(err))
		}
	}
	gone := NewClient(ClientOptions{Dial: func(context.Context) (net.Conn, error) {
		return nil, sandboxer.E(sandboxer.NotFound, nil, "sandbox x is gone")
	}})
	defer gone.Close()
	if _, err := gone.Exec(t.Context(), sandboxer.Cmd{Args: []string{"true"}}); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("the Kind of the dial function is lost: %v (%s)", err, sandboxer.KindOf(err))
	}
}
