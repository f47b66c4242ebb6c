package extensiontest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
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

// freePort returns a free port of this machine, for backends that share
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

	s.test(t, "loopback listener", func(t *testing.T) {
		c := dial(t)
		for _, word := range []string{"one", "two"} {
			io.WriteString(c, word)
			buf := make([]byte, 3)
			if _, err := io.ReadFull(c, buf); err != nil || string(buf) != word {
				t.Fatalf("echo of %q: %q, %v", word, buf, err)
			}
		}
	})

	// listed reports whether port, and no port without a listener, is among the listeners.
	listed := func(t *testing.T, port int) {
		t.Helper()
		if ports, err := sb.b.ListPorts(ctx(t), sb.h); err != nil {
			t.Errorf("ListPorts: %s", describe(err))
		} else if !slices.Contains(ports, port) || slices.Contains(ports, freePort(t)) {
			t.Errorf("ListPorts = %v; want %d, and no port without a listener", ports, port)
		}
	}
	s.test(t, "listed", func(t *testing.T) { listed(t, port) })

	s.test(t, "listed on IPv6", func(t *testing.T) {
		port := freePort(t)
		at := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		args := slices.Clone(s.Listen(port))
		i := slices.Index(args, at)
		if i < 0 {
			t.Skip("no argument of the harness's Listen is " + at)
		}
		args[i] = net.JoinHostPort("::1", strconv.Itoa(port))
		r := sb.start(t, sandboxer.Cmd{Args: args})
		poll(t, "the echo server inside to be listed", s.long(), func() bool {
			ports, err := sb.b.ListPorts(ctx(t), sb.h)
			select {
			case <-r.done:
				t.Skip("the sandbox has no IPv6")
			default:
			}
			return err != nil || slices.Contains(ports, port)
		})
		listed(t, port)
	})

	s.test(t, "half close", func(t *testing.T) {
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

	s.test(t, "1 MiB both ways", func(t *testing.T) {
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

	s.test(t, "16 in parallel", func(t *testing.T) {
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

	s.test(t, "a read deadline holds", func(t *testing.T) {
		c := dial(t)
		c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, err := c.Read(make([]byte, 1))
		var ne net.Error
		if !errors.As(err, &ne) || !ne.Timeout() {
			t.Errorf("Read past its deadline: %v", err)
		}
	})

	s.test(t, "closed port", func(t *testing.T) {
		c, err := sb.b.Dial(ctx(t), sb.h, freePort(t))
		wantKind(t, err, "Dial", sandboxer.Unavailable)
		if err == nil {
			c.Close()
		}
	})

	s.test(t, "another sandbox's port", func(t *testing.T) {
		c, err := s.up(t).b.Dial(ctx(t), s.up(t).h, port)
		wantKind(t, err, "Dial", sandboxer.Unavailable)
		if err == nil {
			c.Close()
		}
	})

	s.test(t, "survives the context of the call", func(t *testing.T) {
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

	s.test(t, "ports out of range", func(t *testing.T) {
		for _, p := range []int{-1, 0, 65536} {
			_, err := sb.b.Dial(ctx(t), sb.h, p)
			wantKind(t, err, "Dial", sandboxer.Invalid)
		}
	})

	s.test(t, "unknown sandbox", func(t *testing.T) {
		_, err := sb.b.Dial(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}, port)
		wantKind(t, err, "Dial", sandboxer.NotFound)
	})

	s.test(t, "teardown ends the stream", func(t *testing.T) {
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
	s.test(t, "names a URL", func(t *testing.T) {
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
	s.test(t, "unknown sandbox", func(t *testing.T) {
		_, err := s.opened.Expose(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}, 8080)
		wantKind(t, err, "Expose", sandboxer.NotFound)
	})
}
