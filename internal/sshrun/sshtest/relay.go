package sshtest

import (
	"fmt"
	"net"
	"sync"
	"time"
)

// A Relay passes connections on to a server, with a delay if one is set.
type Relay struct {
	Port int

	l      net.Listener
	to     string
	delay  time.Duration
	wg     sync.WaitGroup
	mu     sync.Mutex
	conns  map[net.Conn]bool
	frozen chan struct{} // closed while data passes
}

// NewRelay starts a relay to a port of loopback. Each byte arrives delay later than
// it was sent, as over a long distance with any bandwidth.
func NewRelay(t T, port int, delay time.Duration) *Relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &Relay{Port: l.Addr().(*net.TCPAddr).Port, l: l, to: fmt.Sprintf("127.0.0.1:%d", port), delay: delay,
		conns: map[net.Conn]bool{}, frozen: make(chan struct{})}
	close(r.frozen)
	r.wg.Go(func() { r.serve(l) })
	t.Cleanup(func() {
		r.mu.Lock()
		r.l.Close()
		r.mu.Unlock()
		r.Thaw()
		r.Cut()
		r.wg.Wait()
	})
	return r
}

func (r *Relay) serve(l net.Listener) {
	for {
		in, err := l.Accept()
		if err != nil {
			return
		}
		r.wg.Go(func() {
			out, err := net.Dial("tcp", r.to)
			if err != nil {
				in.Close()
				return
			}
			r.mu.Lock()
			r.conns[in], r.conns[out] = true, true
			r.mu.Unlock()
			var both sync.WaitGroup
			both.Go(func() { r.copy(out, in) })
			both.Go(func() { r.copy(in, out) })
			both.Wait()
			in.Close()
			out.Close()
			r.mu.Lock()
			delete(r.conns, in)
			delete(r.conns, out)
			r.mu.Unlock()
		})
	}
}

type chunk struct {
	data []byte
	due  time.Time
}

func (r *Relay) copy(to, from net.Conn) {
	// Room for data on its way: enough never to be the limit.
	way := make(chan chunk, 4096)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for c := range way {
			time.Sleep(time.Until(c.due))
			r.mu.Lock()
			frozen := r.frozen
			r.mu.Unlock()
			<-frozen
			if _, err := to.Write(c.data); err != nil {
				from.Close()
				for range way {
				}
				return
			}
		}
		if tcp, ok := to.(*net.TCPConn); ok {
			tcp.CloseWrite()
		}
	}()
	for {
		buf := make([]byte, 64<<10)
		n, err := from.Read(buf)
		if n > 0 {
			way <- chunk{buf[:n], time.Now().Add(r.delay)}
		}
		if err != nil {
			break
		}
	}
	close(way)
	<-done
}

// Away cuts every connection and refuses others, like a machine that is off, until back is
// called.
func (r *Relay) Away(t T) (back func()) {
	t.Helper()
	r.mu.Lock()
	r.l.Close()
	r.mu.Unlock()
	r.Cut()
	return func() {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", r.Port))
		if err != nil {
			t.Fatal(err)
		}
		r.mu.Lock()
		r.l = l
		r.mu.Unlock()
		r.wg.Go(func() { r.serve(l) })
	}
}

// Freeze keeps every connection open and passes nothing on, like a network that drops
// every packet.
func (r *Relay) Freeze() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.frozen = make(chan struct{})
}

// Thaw ends Freeze.
func (r *Relay) Thaw() {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.frozen:
	default:
		close(r.frozen)
	}
}

// Cut closes every connection.
func (r *Relay) Cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.Close()
	}
}
