package extensiontest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// echo serves one connection for Echo.
func echo(c net.Conn) {
	defer c.Close()
	io.Copy(c, c)
}

// listen starts the harness's echo server inside and returns its port once it
// answers.
func (sb *sandbox) listen(t *testing.T) int {
	t.Helper()
	port := freePort(t)
	out := &buffer{}
	r := sb.start(t, sandboxer.Cmd{Args: sb.s.Listen(port), Stdout: out, Stderr: out})
	poll(t, "the echo server inside to listen", sb.s.long(), func() bool {
		conn, err := sb.b.Dial(ctx(t), sb.h, port)
		if err != nil {
			select {
			case <-r.done:
				t.Fatalf("the echo server inside ended: %+v, %s, %s", r.x, describe(r.err), out.String())
			default:
			}
			return false
		}
		conn.Close()
		return true
	})
	return port
}

// freePort returns a port that nobody uses on this machine, for backends that share
// its ports.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func (s *suite) dial(t *testing.T) {
	if s.Listen == nil {
		t.Fatal("the extension can dial, but the harness has no Listen: give it a command that listens inside")
	}
	sb := s.up(t)
	port := sb.listen(t)
	dial := func(t *testing.T) net.Conn {
		t.Helper()
		c, err := sb.b.Dial(ctx(t), sb.h, port)
		if err != nil {
			t.Fatalf("Dial: %s", describe(err))
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(time.Minute))
		return c
	}

	t.Run("loopback listener", func(t *testing.T) {
		c := dial(t)
		for _, word := range []string{"one", "two"} {
			io.WriteString(c, word)
			buf := make([]byte, 3)
			if _, err := io.ReadFull(c, buf); err != nil || string(buf) != word {
				t.Fatalf("echo of %q: %q, %v", word, buf, err)
			}
		}
	})

	t.Run("listed where ports are listed", func(t *testing.T) {
		ports, known, err := sb.b.ListPorts(ctx(t), sb.h)
		if err != nil {
			t.Fatalf("ListPorts: %s", describe(err))
		}
		if known && (!slices.Contains(ports, port) || slices.Contains(ports, freePort(t))) {
			t.Errorf("ListPorts = %v; want %d, and none that nobody listens on", ports, port)
		}
	})

	t.Run("half close", func(t *testing.T) {
		c := dial(t)
		io.WriteString(c, "last words")
		cw, ok := c.(interface{ CloseWrite() error })
		if !ok {
			t.Fatalf("a %T cannot close its writing side", c)
		}
		if err := cw.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(c); err != nil || string(got) != "last words" {
			t.Errorf("after the half close: %q, %v", got, err)
		}
	})

	t.Run("1 MiB both ways", func(t *testing.T) {
		c := dial(t)
		data := noise(1 << 20)
		go func() {
			c.Write(data)
			if cw, ok := c.(interface{ CloseWrite() error }); ok {
				cw.CloseWrite()
			}
		}()
		got := make([]byte, len(data))
		if n, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes came back (equal: %t), %v", n, bytes.Equal(got, data), err)
		}
	})

	t.Run("16 in parallel", func(t *testing.T) {
		var wg sync.WaitGroup
		for range 16 {
			c := dial(t)
			wg.Go(func() {
				data := noise(10_000)
				go c.Write(data)
				got := make([]byte, len(data))
				if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, data) {
					t.Errorf("echo: %v", err)
				}
			})
		}
		wg.Wait()
	})

	t.Run("a read deadline holds", func(t *testing.T) {
		c := dial(t)
		c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, err := c.Read(make([]byte, 1))
		var ne net.Error
		if !errors.As(err, &ne) || !ne.Timeout() {
			t.Errorf("Read past its deadline: %v", err)
		}
	})

	t.Run("closed port", func(t *testing.T) {
		c, err := sb.b.Dial(ctx(t), sb.h, freePort(t))
		wantKind(t, err, "Dial", sandboxer.Unavailable)
		if err == nil {
			c.Close()
		}
	})

	t.Run("another sandbox's port", func(t *testing.T) {
		c, err := s.up(t).b.Dial(ctx(t), s.up(t).h, port)
		wantKind(t, err, "Dial", sandboxer.Unavailable)
		if err == nil {
			c.Close()
		}
	})

	t.Run("survives the context of the call", func(t *testing.T) {
		c, cancel := context.WithCancel(t.Context())
		conn, err := sb.b.Dial(c, sb.h, port)
		if err != nil {
			t.Fatal(describe(err))
		}
		defer conn.Close()
		cancel()
		conn.SetDeadline(time.Now().Add(time.Minute))
		io.WriteString(conn, "on")
		if _, err := io.ReadFull(conn, make([]byte, 2)); err != nil {
			t.Errorf("the stream ended with the context: %v", err)
		}
	})

	t.Run("ports out of range", func(t *testing.T) {
		for _, p := range []int{-1, 0, 65536} {
			_, err := sb.b.Dial(ctx(t), sb.h, p)
			wantKind(t, err, "Dial", sandboxer.Invalid)
		}
	})

	t.Run("unknown sandbox", func(t *testing.T) {
		_, err := sb.b.Dial(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}, port)
		wantKind(t, err, "Dial", sandboxer.NotFound)
	})

	t.Run("teardown ends the stream", func(t *testing.T) {
		own := s.up(t)
		conn, err := own.b.Dial(ctx(t), own.h, own.listen(t))
		if err != nil {
			t.Fatal(describe(err))
		}
		defer conn.Close()
		if _, err := own.b.Teardown(ctx(t), own.h); err != nil {
			t.Fatal(describe(err))
		}
		conn.SetDeadline(time.Now().Add(s.long()))
		_, err = conn.Read(make([]byte, 1))
		var ne net.Error
		if err == nil || errors.As(err, &ne) && ne.Timeout() {
			t.Errorf("the stream is still open: %v", err)
		}
	})
}

func (s *suite) expose(t *testing.T) {
	t.Run("names a URL", func(t *testing.T) {
		sb := s.up(t, func(sp *sandboxer.Spec) { sp.Ports = []int{8080} })
		e, err := sb.b.Expose(ctx(t), sb.h, 8080)
		if err != nil {
			t.Fatal(describe(err))
		}
		u, err := url.Parse(e.URL)
		if err != nil || !strings.HasPrefix(u.Scheme, "http") || u.Host == "" {
			t.Errorf("URL = %q, %v", e.URL, err)
		}
		again, err := sb.b.Expose(ctx(t), sb.h, 8080)
		if err != nil || again.URL != e.URL {
			t.Errorf("asked again: %q, %v; first %q", again.URL, err, e.URL)
		}
	})
	t.Run("unknown sandbox", func(t *testing.T) {
		_, err := s.open(t).Expose(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}, 8080)
		wantKind(t, err, "Expose", sandboxer.NotFound)
	})
}
