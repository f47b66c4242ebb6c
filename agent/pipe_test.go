package agent

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
)

// A connection of pipes serves request after request: after each the server ends its
// waiting read by a deadline, and must recognise that.
func TestPipeConnServesRequests(t *testing.T) {
	ours, theirs, err := Pipes()
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.Context().Err(); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}))
	srv.Listener.Close()
	srv.Listener = &oneConn{conn: NewPipeConn(theirs[0], theirs[1]), done: make(chan struct{})}
	srv.Start()
	defer srv.Close()
	c := &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return ours, nil }}}
	for i := range 5 {
		res, err := c.Get("http://sandbox/")
		if err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Fatalf("request %d: %s", i, res.Status)
		}
	}
	if _, ok := netError(&os.PathError{Err: os.ErrDeadlineExceeded}).(net.Error); !ok {
		t.Error("a passed deadline is no net.Error")
	}
	c.CloseIdleConnections()
}

type oneConn struct {
	conn net.Conn
	once sync.Once
	done chan struct{}
}

func (l *oneConn) Accept() (net.Conn, error) {
	if c := l.conn; c != nil {
		l.conn = nil
		return c, nil
	}
	<-l.done
	return nil, net.ErrClosed
}
func (l *oneConn) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *oneConn) Addr() net.Addr { return pipeAddr{} }
