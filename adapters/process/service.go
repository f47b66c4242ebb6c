package process

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// dialTime bounds connecting to a service.
const dialTime = 10 * time.Second

// beginService connects to the service.
func (s *supervisor) beginService() (*session, error) {
	v, err := newService(s.p)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(s.base, dialTime)
	defer cancel()
	conn, err := v.connect(ctx)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the service at %s cannot be reached: %s", s.p.Connect, text(err))
	}
	c := &connection{conn: conn, at: s.p.Connect, ended: make(chan struct{})}
	r := protocol.NewReader(conn)
	d, err := s.greet(r, conn, "", c.stop)
	if err != nil {
		c.stop(err)
		if k := sandboxer.KindOf(err); k != sandboxer.Invalid && k != sandboxer.Unsupported && k != sandboxer.Unavailable {
			err = c.why()
		}
		return nil, err
	}
	sess := &session{streams: v, ended: c.ended, reason: c.why, stop: c.stop, description: d}
	s.connect(sess, r, conn)
	return sess, nil
}

func text(err error) string {
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err
	}
	return strings.TrimPrefix(err.Error(), "tls: ")
}

// A connection is the control connection to a service.
type connection struct {
	conn  net.Conn
	at    string
	once  sync.Once
	ended chan struct{}
	cause error
}

func (c *connection) stop(why error) {
	c.once.Do(func() {
		c.cause = why
		c.conn.Close()
		close(c.ended)
	})
}

func (c *connection) why() error {
	<-c.ended
	if c.cause == nil || errors.Is(c.cause, io.EOF) || errors.Is(c.cause, errClosed) {
		return sandboxer.E(sandboxer.Unavailable, nil, "the service at %s has closed the connection", c.at)
	}
	return sandboxer.E(sandboxer.Unavailable, nil, "the connection to the service at %s ended: %s", c.at, sandboxer.Message(plain(c.cause)))
}

// A service is where a service is, and how to connect to it.
type service struct {
	network, addr string
	tls           *tls.Config // nil for a Unix socket
}

func newService(p *program) (*service, error) {
	kind, addr, _ := strings.Cut(p.Connect, ":")
	if kind == "unix" {
		return &service{network: "unix", addr: addr}, nil
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "connect: %q is not host:port", addr)
	}
	config, err := protocol.TLS(p.TLS.CA, p.TLS.Cert, p.TLS.Key)
	if err != nil {
		return nil, sandboxer.E(sandboxer.KindOf(err), err, "tls: %s", sandboxer.Message(err))
	}
	config.ServerName = cmp.Or(p.TLS.Name, host)
	return &service{network: "tcp", addr: addr, tls: config}, nil
}

func (v *service) connect(ctx context.Context) (net.Conn, error) {
	if v.tls == nil {
		return new(net.Dialer).DialContext(ctx, v.network, v.addr)
	}
	return (&tls.Dialer{NetDialer: new(net.Dialer), Config: v.tls}).DialContext(ctx, v.network, v.addr)
}

// expect implements streamer: it connects once more.
func (v *service) expect(token string) (<-chan arrival, func()) {
	c := make(chan arrival, 1)
	ctx, cancel := context.WithTimeout(context.Background(), protocol.TokenTime)
	go func() {
		defer cancel()
		conn, err := v.connect(ctx)
		if err == nil {
			_ = conn.SetWriteDeadline(time.Now().Add(protocol.TokenTime))
			if _, err = fmt.Fprintln(conn, token); err == nil {
				_ = conn.SetWriteDeadline(time.Time{})
				c <- arrival{s: protocol.NewStream(conn, protocol.NewReader(conn))}
				return
			}
			conn.Close()
		}
		c <- arrival{err: sandboxer.E(sandboxer.Unavailable, err, "a stream to the service at %s cannot be opened", v.addr)}
	}()
	return c, func() {
		cancel()
		go func() {
			if a := <-c; a.s != nil {
				a.s.Close()
			}
		}()
	}
}
