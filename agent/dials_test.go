package agent

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestDials: abandoned calls leave their dials behind, up to the bound.
func TestDials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var under atomic.Int32
		release := make(chan struct{})
		c := NewClient(ClientOptions{Dials: 3, Dial: func(context.Context) (net.Conn, error) {
			under.Add(1)
			<-release
			return nil, sandboxer.E(sandboxer.Unsupported, nil, "it cannot run there").WithHint("try another")
		}})
		defer c.Close()
		for i := range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := c.Processes(ctx)
			cancel()
			if full := errors.Is(err, ErrNotReached); full != (i >= 3) || full && sandboxer.KindOf(err) != sandboxer.Unavailable {
				t.Errorf("call %d: %v", i, err)
			}
		}
		if n := under.Load(); n != 3 {
			t.Errorf("%d dials are under way; 3 may be", n)
		}
		close(release)
		synctest.Wait()
		_, err := c.Processes(t.Context())
		if !errors.Is(err, ErrNotReached) || sandboxer.KindOf(err) != sandboxer.Unsupported || sandboxer.HintOf(err) != "try another" {
			t.Errorf("what a dial says: %v", err)
		}
	})
}
