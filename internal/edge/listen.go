package edge

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// ListenUnix listens on a Unix socket that only this user can reach: mode 0600 in a
// directory of mode 0700, which is made if missing. A socket that a dead server
// left behind is replaced. Kinds: Conflict when a server answers there or something
// else is in the way, Invalid for a path that is too long, Unavailable otherwise.
func ListenUnix(path string) (net.Listener, error) {
	if len(path) > 107 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the socket path %s is longer than the 107 bytes a socket may have", path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the directory of the socket %s cannot be made", path)
	}
	switch fi, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the socket %s cannot be inspected", path)
	case fi.Mode().Type() != fs.ModeSocket:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "%s exists and is not a socket", path).
			WithHint("move it away, or choose another socket path")
	default:
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			c.Close()
			return nil, sandboxer.E(sandboxer.Conflict, nil, "another server answers at %s", path).
				WithHint("see it with: sandboxer status")
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, sandboxer.E(sandboxer.Conflict, err, "something that does not answer holds the socket %s", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the stale socket %s cannot be removed", path)
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the socket %s cannot be opened", path)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the socket %s cannot be made private", path)
	}
	return l, nil
}

// ListenTCP listens on a TCP address, whose clients need a key. Others can read their keys
// on the way, so an address that other machines can reach is refused unless open says
// that something else protects it. Kinds: Denied for that, Unavailable otherwise.
func ListenTCP(addr string, open bool) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		hint := "write host:port, for example 127.0.0.1:8080"
		if errors.Is(err, syscall.EADDRINUSE) {
			hint = "another program listens there; choose another port"
		}
		return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot listen on %s", addr).WithHint("%s", hint)
	}
	if a, ok := l.Addr().(*net.TCPAddr); !open && (!ok || !a.IP.IsLoopback()) {
		l.Close()
		return nil, tooOpen(addr)
	}
	return l, nil
}

// CheckTCP refuses what ListenTCP would refuse by its address alone, before anything else is opened.
func CheckTCP(addr string, open bool) error {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if open || err != nil || a.IP.IsLoopback() { // what cannot be resolved, ListenTCP tells
		return nil
	}
	return tooOpen(addr)
}

func tooOpen(addr string) error {
	return sandboxer.E(sandboxer.Denied, nil, "other machines can reach %s, and without TLS their keys can be read on the way", addr).
		WithHint("add --tls-cert and --tls-key; or --insecure where a proxy in front of it speaks TLS")
}

type peerKey struct{}

// withConn notes the connection of a request, and the user at the other end if it is a
// Unix socket.
func withConn(ctx context.Context, c net.Conn) context.Context {
	n := belowTLS(c)
	if n == nil {
		return ctx
	}
	ctx = context.WithValue(ctx, connKey{}, n)
	u, ok := n.Conn.(*net.UnixConn)
	if !ok {
		return ctx
	}
	uid, err := peerUID(u)
	if err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, uid)
}
