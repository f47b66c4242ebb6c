// Package upload makes bodies of HTTP requests of what may be silent for long: somebody's input.
//
// net/http waits for the read of a body that it is in, also when the request is over since its context or its
// connection has ended. A Body ends its request then, and leaves the read behind.
package upload

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http/httptrace"
	"sync"

	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

// A Body is the body of one request. Its methods are net/http's to call, but for Err.
type Body struct {
	r    *io.PipeReader
	done chan struct{} // closed with the last read

	mu  sync.Mutex
	err error
}

// New returns a body that has what r has, and the context that the request has to have. When that request ends before r
// does, one read of r may go on until r has something to give. r is not closed.
func New(ctx context.Context, r io.Reader) (*Body, context.Context) {
	pr, pw := io.Pipe()
	b := &Body{r: pr, done: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { pr.CloseWithError(context.Cause(ctx)) })
	go func() {
		defer stop()
		defer close(b.done)
		_, err := io.CopyBuffer(struct{ io.Writer }{pw}, &source{r: r, b: b}, make([]byte, 64<<10))
		pw.CloseWithError(err)
	}()
	return b, httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		c := i.Conn
		if t, ok := c.(*tls.Conn); ok {
			c = t.NetConn()
		}
		if c, ok := c.(*conn); ok {
			go func() {
				select {
				case <-c.closed:
					pr.CloseWithError(net.ErrClosed)
				case <-b.done:
				}
			}()
		}
	}})
}

// Err is why what is uploaded could not be read; nil when it could.
func (b *Body) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

func (b *Body) Read(p []byte) (int, error) { return b.r.Read(p) }

func (b *Body) Close() error { return b.r.Close() }

// source tells failures of a reader from those of who takes what it gives.
type source struct {
	r io.Reader
	b *Body
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.b.mu.Lock()
		s.b.err = err
		s.b.mu.Unlock()
	}
	return n, err
}

// conn is a connection whose end can be waited for.
type conn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

// Dial is the DialContext of an http.Transport whose requests with a Body end with their connections, which are dial's.
func Dial(dial func(ctx context.Context, network, addr string) (net.Conn, error)) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &conn{Conn: c, closed: make(chan struct{})}, nil
	}
}

func (c *conn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func (c *conn) CloseWrite() error { return halfclose.CloseWrite(c.Conn) }
