package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A farEnd serves the connections that its dial opens, and answers all requests. It is for use in a bubble of fake time.
type farEnd struct {
	conns chan net.Conn
	ended chan struct{}
	gate  chan struct{} // if not nil, a dial receives from it before it connects
	dials atomic.Int32  // started
	open  atomic.Int32  // connections that are open
}

func newFarEnd(t *testing.T) *farEnd {
	f := &farEnd{conns: make(chan net.Conn), ended: make(chan struct{})}
	s := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }),
		ConnState: func(_ net.Conn, s http.ConnState) {
			switch s {
			case http.StateNew:
				f.open.Add(1)
			case http.StateClosed:
				f.open.Add(-1)
			}
		},
	}
	go s.Serve(f)
	t.Cleanup(func() { s.Close() })
	return f
}

func (f *farEnd) Accept() (net.Conn, error) {
	select {
	case c := <-f.conns:
		return c, nil
	case <-f.ended:
		return nil, net.ErrClosed
	}
}

func (f *farEnd) Close() error   { close(f.ended); return nil }
func (f *farEnd) Addr() net.Addr { return &net.UnixAddr{} }

func (f *farEnd) dial(ctx context.Context) (net.Conn, error) {
	f.dials.Add(1)
	if f.gate != nil {
		select {
		case <-f.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	ours, theirs := net.Pipe()
	select {
	case f.conns <- theirs:
		return ours, nil
	case <-f.ended:
		return nil, net.ErrClosed
	}
}

// TestClients: the client of a name is kept, with its connection, until it is dropped or its object changes.
func TestClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cs Clients
		f := newFarEnd(t)
		get := func(name, object string) *Client {
			return cs.Get(name, object, ClientOptions{IdleTime: time.Hour, Dial: f.dial})
		}
		call := func(c *Client, dials, open int32) {
			t.Helper()
			if err := c.Health(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if f.dials.Load() != dials || f.open.Load() != open {
				t.Errorf("%d dials, %d connections are open; want %d, %d", f.dials.Load(), f.open.Load(), dials, open)
			}
		}
		one := get("a", "1")
		call(one, 1, 1)
		call(get("a", "1"), 1, 1)
		call(get("b", "1"), 2, 2)

		var same sync.WaitGroup // all callers at the same time get one client
		var former atomic.Pointer[Client]
		for range 50 {
			same.Go(func() {
				c := get("a", "2")
				if !former.CompareAndSwap(nil, c) && former.Load() != c {
					t.Error("two clients have one name")
				}
			})
		}
		same.Wait()
		two := former.Load()
		if two == one {
			t.Error("the client of another object is kept")
		}
		call(two, 3, 2) // the earlier one's is closed

		cs.Drop("a")
		cs.Drop("c") // there is none
		three := get("a", "2")
		if three == two {
			t.Error("the client that was dropped is kept")
		}
		call(three, 4, 2)

		if err := cs.Close(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if n := f.open.Load(); n != 0 {
			t.Errorf("%d connections are open after Close", n)
		}
		late := get("a", "2")
		if late == get("a", "2") {
			t.Error("a client is kept after Close")
		}
		call(late, 5, 1)
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := f.open.Load(); n != 0 {
			t.Errorf("%d connections are open after their idle time", n)
		}
	})
}

// TestClientsCancelled: a caller that leaves during a dial takes nothing from the other callers.
func TestClientsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cs Clients
		defer cs.Close()
		f := newFarEnd(t)
		f.gate = make(chan struct{})
		defer close(f.gate)
		call := func(ctx context.Context) chan error {
			done := make(chan error, 1)
			go func() { done <- cs.Get("a", "1", ClientOptions{Dials: 1, DialsWait: true, Dial: f.dial}).Health(ctx) }()
			synctest.Wait()
			return done
		}
		ctx, leave := context.WithCancel(t.Context())
		first, second, third := call(ctx), call(t.Context()), call(t.Context())
		leave()
		if err := <-first; sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("the caller that left: %v", err)
		}
		synctest.Wait()
		if n := f.dials.Load(); n != 1 {
			t.Errorf("%d dials are under way; 1 may be", n)
		}
		for _, done := range []chan error{second, third} {
			for waiting := true; waiting; {
				select {
				case err := <-done:
					if waiting = false; err != nil {
						t.Errorf("a caller that stayed: %v", err)
					}
				case f.gate <- struct{}{}:
				}
			}
		}
	})
}

// hangs is a command that never writes anything.
func hangs(ctx context.Context, _ []string, _ io.Reader, _, _ io.Writer) (sandboxer.Exit, error) {
	<-ctx.Done()
	return sandboxer.Exit{}, ctx.Err()
}

// TestMaxHung: dials that hang one after the other stop further attempts, except for one now and then. A successful one
// resets the count, and a failure of another kind does not count.
func TestMaxHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dials atomic.Int32
		hung := func(ctx context.Context) (net.Conn, error) { return DialAttached(ctx, hangs) }
		dial := hung
		refused := func(context.Context) (net.Conn, error) {
			return nil, sandboxer.E(sandboxer.Timeout, context.DeadlineExceeded, "late")
		}
		comes := func(context.Context) (net.Conn, error) { c, _ := net.Pipe(); return c, nil }
		c := NewClient(ClientOptions{MaxHung: 3, Dial: func(ctx context.Context) (net.Conn, error) {
			dials.Add(1)
			return dial(ctx)
		}})
		defer c.Close()
		try := func(want sandboxer.Kind, tried bool) {
			t.Helper()
			before := dials.Load()
			conn, err := c.Connect(t.Context())
			if err == nil {
				conn.Close()
			}
			if sandboxer.KindOf(err) != want || err != nil && !errors.Is(err, ErrNotReached) {
				t.Errorf("%v; want the kind %q", err, want)
			}
			if (dials.Load() > before) != tried {
				t.Errorf("%d dials; want one: %v", dials.Load()-before, tried)
			}
		}
		for _, step := range []struct {
			dial func(context.Context) (net.Conn, error)
			want sandboxer.Kind
		}{
			{hung, sandboxer.Timeout}, {hung, sandboxer.Timeout},
			{refused, sandboxer.Timeout}, {refused, sandboxer.Timeout}, {comes, ""},
			{hung, sandboxer.Timeout}, {refused, sandboxer.Timeout}, {hung, sandboxer.Timeout},
		} {
			dial = step.dial
			try(step.want, true)
		}
		try(sandboxer.Timeout, true) // the third since one succeeded
		try(sandboxer.Failed, false)
		time.Sleep(hungPause - 2*time.Minute) // the last dial took one
		try(sandboxer.Failed, false)
		time.Sleep(time.Minute)
		dial = hung
		both := make(chan error, 2)
		before := dials.Load()
		for range 2 {
			go func() { _, err := c.Connect(t.Context()); both <- err }()
		}
		kinds := map[sandboxer.Kind]bool{sandboxer.KindOf(<-both): true, sandboxer.KindOf(<-both): true}
		if !kinds[sandboxer.Timeout] || !kinds[sandboxer.Failed] || dials.Load() != before+1 {
			t.Errorf("after a while: %v, %d dials; want one", kinds, dials.Load()-before)
		}
		time.Sleep(hungPause)
		dial = comes
		try("", true)
		try("", true)
	})
}

// TestDialFailed: a client remembers a failed dial for a while, unless one has succeeded since.
func TestDialFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var err error
		c := NewClient(ClientOptions{Dial: func(context.Context) (net.Conn, error) {
			conn, _ := net.Pipe()
			return conn, err
		}})
		defer c.Close()
		try := func(fails error, want bool) {
			t.Helper()
			err = fails
			if conn, err := c.Connect(t.Context()); err == nil {
				conn.Close()
			}
			if c.DialFailed(time.Minute) != want {
				t.Errorf("after a dial with the error %v: %v", fails, !want)
			}
		}
		if c.DialFailed(time.Minute) {
			t.Error("before a dial")
		}
		away := errors.New("away")
		try(nil, false)
		try(away, true)
		try(nil, false)
		try(away, true)
		time.Sleep(time.Minute)
		if c.DialFailed(time.Minute) {
			t.Error("after a minute")
		}
	})
}

// TestCallEnd: the reason why a sandbox cannot be used replaces an error that it may have caused.
func TestCallEnd(t *testing.T) {
	e := func(k sandboxer.Kind) error {
		if k == "" {
			return nil
		}
		return sandboxer.E(k, nil, "it is")
	}
	for _, c := range []struct {
		err, why, want sandboxer.Kind
		asked          bool
	}{
		{"", sandboxer.NotFound, "", false},
		{sandboxer.Denied, sandboxer.NotFound, sandboxer.Denied, false},
		{sandboxer.Unavailable, "", sandboxer.Unavailable, true},
		{sandboxer.Unavailable, sandboxer.NotFound, sandboxer.NotFound, true},
		{sandboxer.Timeout, sandboxer.Unavailable, sandboxer.Unavailable, true},
		{sandboxer.NotFound, "", sandboxer.NotFound, true},
		{sandboxer.NotFound, sandboxer.Conflict, sandboxer.Conflict, true},
		{sandboxer.NotFound, sandboxer.Unavailable, sandboxer.NotFound, true}, // a file is missing, and the engine is unreachable by now
		{sandboxer.Conflict, sandboxer.NotFound, sandboxer.NotFound, true},
	} {
		ctx, leave := context.WithCancel(t.Context())
		asked, done := false, 0
		call := Call{
			Ctx:  ctx,
			Done: func(err error) error { leave(); done++; return err }, // as that of an engine's calls
			Why:  func() error { asked = true; return e(c.why) },
		}
		if got := call.End(e(c.err)); sandboxer.KindOf(got) != c.want || asked != c.asked || done != 1 {
			t.Errorf("%q, because of %q: %v; asked: %v", c.err, c.why, got, asked)
		}
		asked = false
		if got := call.End(e(c.err)); sandboxer.KindOf(got) != c.err || asked { // the caller has left
			t.Errorf("%q, after the caller left: %v; asked: %v", c.err, got, asked)
		}
		call.Done, call.Why = nil, nil
		if got := call.End(e(c.err)); sandboxer.KindOf(got) != c.err {
			t.Errorf("%q, without more: %v", c.err, got)
		}
	}
}
