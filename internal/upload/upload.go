// Package upload makes bodies of HTTP requests from readers that may be silent for long, such as a user's input.
//
// net/http waits for the read of a body that it is in, even if the request is over because its context or its
// connection has ended. A Body ends its request then, and abandons the read. A connection of Dial keeps the answer of
// a peer that read only a part of a body.
package upload

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http/httptrace"
	"os"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

// A Body is the body of one request. Only net/http calls its methods, except Err.
type Body struct {
	r    *io.PipeReader
	done chan struct{} // closed with the last read

	mu  sync.Mutex
	err error
}

// New returns a body with the content of r, and the context that the request must have. When that request ends before r
// does, one read of r may go on until r has data. r is not closed.
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

// Err is why the source of the upload could not be read; nil if it could.
func (b *Body) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

func (b *Body) Read(p []byte) (int, error) { return b.r.Read(p) }

func (b *Body) Close() error { return b.r.Close() }

// source distinguishes failures of a reader from those of its user.
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

// conn is a connection with a signal for its end.
type conn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

// answerTime is how long it may take to read an answer that a peer gave before it closed the connection.
const answerTime = 10 * time.Second

// Write fails when the answer was read, or there is none. A peer that wants no more of a body answers and closes the
// connection; net/http would fail the request with the error of the write, and lose the answer.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t := time.NewTimer(answerTime)
		defer t.Stop()
		select {
		case <-c.closed: // by the reader of the answer, or because there is none
		case <-t.C:
		}
	}
	return n, err
}

// Dial is the DialContext for an http.Transport whose requests with a Body end with their connections, which dial makes.
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
