package server

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// newKeepalive serves one WebSocket that is watched with a short period and returns the
// client's end, the server's keepalive, and what is closed when the client counts as dead.
func newKeepalive(t *testing.T, period time.Duration) (*websocket.Conn, *keepalive, <-chan struct{}) {
	t.Helper()
	made := make(chan *keepalive, 1)
	dead := make(chan struct{})
	over := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ws := accept(w, r, "test")
		if ws == nil {
			return
		}
		defer ws.CloseNow()
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		p := &keepalive{ws: ws}
		read := make(chan struct{})
		go func() { // as both streams do
			defer close(read)
			for {
				r, err := p.next()
				if err != nil {
					return
				}
				io.Copy(io.Discard, r)
			}
		}()
		made <- p
		p.watch(ctx, period, func() { close(dead) })
		<-over
		cancel()
		ws.CloseNow()
		<-read
	}))
	ws, _, err := websocket.Dial(t.Context(), "ws"+srv.URL[len("http"):], &websocket.DialOptions{Subprotocols: []string{"test"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		close(over)
		ws.CloseNow()
		srv.Close()
	})
	return ws, <-made, dead
}

func TestKeepalive(t *testing.T) {
	const (
		period  = 20 * time.Millisecond
		patient = 20 * period // with who is not to be taken for dead on a busy machine
	)
	t.Run("a silent client is dead", func(t *testing.T) {
		_, _, dead := newKeepalive(t, period) // it reads nothing, so it answers nothing
		within(t, 10*time.Second, "noticing it", dead)
	})
	t.Run("an idle client that reads lives", func(t *testing.T) {
		ws, _, dead := newKeepalive(t, patient)
		ctx, cancel := context.WithTimeout(t.Context(), 5*patient)
		defer cancel()
		ws.Read(ctx)
		select {
		case <-dead:
			t.Error("it was taken for dead")
		default:
		}
	})
	t.Run("a client with output left to read lives", func(t *testing.T) {
		_, p, dead := newKeepalive(t, patient)
		if err := p.write([]byte("something to read at leisure")); err != nil {
			t.Fatal(err)
		}
		select {
		case <-dead:
			t.Error("it was taken for dead")
		case <-time.After(5 * patient):
		}
	})
	t.Run("a client that sends lives", func(t *testing.T) {
		ws, _, dead := newKeepalive(t, patient)
		for range 50 {
			if err := ws.Write(t.Context(), websocket.MessageBinary, []byte("x")); err != nil {
				t.Fatal(err)
			}
			time.Sleep(period)
		}
		select {
		case <-dead:
			t.Error("it was taken for dead")
		default:
		}
	})
}
