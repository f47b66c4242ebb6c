package enginetest

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

// A Gate is between an engine's users and its socket, and can stop them at any request that changes something: so a user
// can be killed just before the engine gets it, and just after it has done it.
type Gate struct {
	to string // path of the engine's socket

	mu    sync.Mutex
	stop  *stop
	conns map[net.Conn]struct{} // nil once it is closed
}

// A stop is where a Gate holds a request.
type stop struct {
	left   int // changing requests until then
	after  bool
	held   chan string   // gets what it is
	opened chan struct{} // closed by Open
}

// NewGate passes connections to the socket at path on to the engine at host (unix://…), until the test ends.
func NewGate(t testing.TB, path, host string) *Gate {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := &Gate{to: strings.TrimPrefix(host, "unix://"), conns: map[net.Conn]struct{}{}}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() { g.serve(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		g.Open()
		g.mu.Lock()
		conns := g.conns
		g.conns = nil
		g.mu.Unlock()
		for c := range conns {
			c.Close()
		}
		work.Wait()
	})
	return g
}

// Hold makes the n-th request from now on that changes something, from 1, wait for Open: before the engine gets
// it, or after it has answered. The channel receives its description when it arrives.
func (g *Gate) Hold(n int, after bool) <-chan string {
	s := &stop{left: n, after: after, held: make(chan string, 1), opened: make(chan struct{})}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stop != nil {
		panic("one is held already")
	}
	g.stop = s
	return s.held
}

// Open stops holding requests. A held request is lost: its connection ends, and the engine never gets one
// that it had not got.
func (g *Gate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stop != nil {
		close(g.stop.opened)
		g.stop = nil
	}
}

// met returns the stop that r is held at, if it is.
func (g *Gate) met(r *http.Request) *stop {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stop == nil || g.stop.left == 0 {
		return nil
	}
	if g.stop.left--; g.stop.left > 0 {
		return nil
	}
	return g.stop
}

// add makes a connection end with the gate.
func (g *Gate) add(c net.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conns == nil {
		return false
	}
	g.conns[c] = struct{}{}
	return true
}

func (g *Gate) end(c net.Conn) {
	c.Close()
	g.mu.Lock()
	delete(g.conns, c)
	g.mu.Unlock()
}

// serve passes the requests of one connection on.
func (g *Gate) serve(from net.Conn) {
	defer g.end(from)
	to, err := net.Dial("unix", g.to)
	if err != nil {
		return
	}
	defer g.end(to)
	if !g.add(from) || !g.add(to) {
		return
	}
	asks, answers := bufio.NewReader(from), bufio.NewReader(to)
	for {
		r, err := http.ReadRequest(asks)
		if err != nil {
			return
		}
		s := g.met(r)
		what := r.Method + " " + r.URL.Path
		if s != nil && !s.after {
			s.held <- what
			<-s.opened
			return
		}
		if r.Write(to) != nil {
			return
		}
		res, err := http.ReadResponse(answers, r)
		if err != nil {
			return
		}
		if s != nil {
			if res.StatusCode != http.StatusSwitchingProtocols {
				_, _ = io.Copy(io.Discard, res.Body) // until it is done
			}
			s.held <- what
			<-s.opened
			return
		}
		if res.StatusCode == http.StatusSwitchingProtocols {
			if res.Write(from) == nil {
				splice(from, asks, to, answers)
			}
			return
		}
		err = res.Write(from)
		res.Body.Close()
		if err != nil || res.Close || r.Close {
			return
		}
	}
}

// splice passes on data that is not HTTP any more, each direction until it ends.
func splice(a net.Conn, fromA io.Reader, b net.Conn, fromB io.Reader) {
	var both sync.WaitGroup
	pass := func(to net.Conn, from io.Reader) {
		_, err := io.Copy(to, from)
		if err == nil {
			err = halfclose.CloseWrite(to)
		}
		if err != nil {
			a.Close()
			b.Close()
		}
	}
	both.Go(func() { pass(b, fromA) })
	both.Go(func() {
		pass(a, fromB)
		a.Close() // the engine has nothing more to say
		b.Close()
	})
	both.Wait()
}
