package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

// serveRelay turns the request's connection into one to a port of the sandbox,
// including ports on the loopback only.
func (s *server) serveRelay(w http.ResponseWriter, r *http.Request) {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	if err != nil || port == 0 {
		writeFailure(w, sandboxer.E(sandboxer.Invalid, nil, "%q is not a port (want 1 to 65535)", r.URL.Query().Get("port")))
		return
	}
	if r.ProtoMajor != 1 || r.Header.Get("Upgrade") != relayName {
		writeFailure(w, sandboxer.E(sandboxer.Invalid, nil, "request an upgrade to %q over HTTP/1.1", relayName))
		return
	}
	target, err := dialLoopback(r.Context(), int(port))
	if err != nil {
		writeFailure(w, sandboxer.E(sandboxer.Unavailable, err, "nothing listens on port %d of the sandbox", port))
		return
	}
	target = s.calls.conn(target)
	defer target.Close()
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		writeFailure(w, err)
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Time{})
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+relayName+"\r\n\r\n"); err != nil {
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if n := rw.Reader.Buffered(); n > 0 {
			if _, err := io.CopyN(target, rw, int64(n)); err != nil {
				return
			}
		}
		_, err := io.Copy(target, conn)
		passEnd(target, err)
	})
	_, err = io.Copy(conn, target)
	passEnd(conn, err)
	wg.Wait()
}

// passEnd forwards the end of one direction; a broken direction ends both.
func passEnd(c net.Conn, err error) {
	if err != nil || errors.Is(halfclose.CloseWrite(c), errors.ErrUnsupported) {
		c.Close()
	}
}

func dialLoopback(ctx context.Context, port int) (net.Conn, error) {
	var d net.Dialer
	p := strconv.Itoa(port)
	c, err := d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", p))
	if err != nil {
		var err6 error
		if c, err6 = d.DialContext(ctx, "tcp", net.JoinHostPort("::1", p)); err6 == nil {
			return c, nil
		}
	}
	return c, err
}
