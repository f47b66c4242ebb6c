package agent

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
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

// TestDialByURL: a stream begins with a request to the server of BaseURL, by its name and over TLS.
func TestDialByURL(t *testing.T) {
	asked := make(chan string, 1)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.Host
		w.WriteHeader(http.StatusConflict)
	})
	plain, secure := httptest.NewServer(h), httptest.NewTLSServer(h)
	defer plain.Close()
	defer secure.Close()
	client := func(base string, to net.Listener) *Client {
		return NewClient(ClientOptions{BaseURL: base, Dial: func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", to.Addr().String())
		}})
	}
	c := client("http://box.example", plain.Listener)
	defer c.Close()
	if _, err := c.Dial(t.Context(), 80); err == nil || <-asked != "box.example" {
		t.Errorf("Dial: %v", err)
	}
	c = client("https://box.example", secure.Listener)
	defer c.Close()
	if _, err := c.Dial(t.Context(), 80); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("Dial to a server that nobody vouches for: %v", err)
	}
}
