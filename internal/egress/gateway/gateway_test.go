//go:build linux

package gateway

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/egress"
)

func dial(t *testing.T, socket string) *net.UnixConn {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
		if err == nil {
			t.Cleanup(func() { c.Close() })
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			return c
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// device is something that carries packets, as a TAP device does.
func device(t *testing.T) int {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fds[0]); unix.Close(fds[1]) })
	return fds[0]
}

// TestGateway: a waiting program gets an answer when all links are there, and an invalid message, or one about no
// link, ends only the connection that it came over.
func TestGateway(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	cfg := &egress.Config{V: 1, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}, Links: map[string][]string{"a": nil, "b": nil}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, cfg, socket) }()

	waits := make(chan error, 1)
	waiter := dial(t, socket)
	go func() { waits <- ask(waiter, egress.Message{Wait: []string{"a", "b"}}, -1) }()
	for name, send := range map[string]func(c *net.UnixConn) error{
		"garbage":   func(c *net.UnixConn) error { _, err := c.Write([]byte("{{")); return err },
		"too long":  func(c *net.UnixConn) error { _, err := c.Write(make([]byte, maxWords+1)); return err },
		"no device": func(c *net.UnixConn) error { _, err := c.Write([]byte(`{"link":"a"}`)); return err },
		"two devices": func(c *net.UnixConn) error {
			_, _, err := c.WriteMsgUnix([]byte(`{"link":"a"}`), unix.UnixRights(device(t), device(t)), nil)
			return err
		},
	} {
		c := dial(t, socket)
		if err := send(c); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 4096)
		if n, err := c.Read(buf); err != nil || string(buf[:n]) == "ok" {
			t.Errorf("%s: %q, %v", name, buf[:n], err)
		}
	}
	if err := ask(dial(t, socket), egress.Message{Link: "unknown"}, device(t)); err == nil || !strings.Contains(err.Error(), "no link") {
		t.Errorf("of a link that is not known: %v", err)
	}
	a := dial(t, socket)
	if err := ask(a, egress.Message{Link: "a"}, device(t)); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-waits:
		t.Errorf("b has no device, and who waits for it was answered: %v", err)
	default:
	}
	if err := ask(dial(t, socket), egress.Message{Link: "b"}, device(t)); err != nil {
		t.Fatal(err)
	}
	if err := <-waits; err != nil {
		t.Error(err)
	}
	// A link that is gone is waited for again.
	a.Close()
	again := dial(t, socket)
	go func() { waits <- ask(again, egress.Message{Wait: []string{"a"}}, -1) }()
	if err := ask(dial(t, socket), egress.Message{Link: "a"}, device(t)); err != nil {
		t.Fatal(err)
	}
	if err := <-waits; err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestResolveBy: only the servers are others.
func TestResolveBy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	for old, want := range map[string]string{
		"": "nameserver 10.0.2.2\n",
		"# Docker\nsearch a.example\nnameserver 127.0.0.11\n\toptions ndots:0\n": "nameserver 10.0.2.2\nsearch a.example\noptions ndots:0\n",
	} {
		if err := os.WriteFile(file, []byte(old), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := resolveBy(file); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.ReadFile(file); string(got) != want {
			t.Errorf("%q became %q; want %q", old, got, want)
		}
	}
}
