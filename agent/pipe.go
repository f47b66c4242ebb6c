package agent

import (
	"errors"
	"net"
	"os"
	"time"
)

// PipeConn is a connection made of two pipes, one for each direction. Open files of an agent inside
// gVisor must be pipes, because a snapshot supports them: the agent of a restored copy finds them
// closed. (A copy with an outside socket cannot be restored.)
type PipeConn struct {
	r, w *os.File
}

// NewPipeConn returns a connection that reads from r, writes to w, and owns both.
func NewPipeConn(r, w *os.File) *PipeConn { return &PipeConn{r, w} }

// Pipes returns the two ends of a new connection.
func Pipes() (ours *PipeConn, theirs [2]*os.File, err error) {
	r1, w1, err := os.Pipe()
	if err != nil {
		return nil, theirs, err
	}
	r2, w2, err := os.Pipe()
	if err != nil {
		return nil, theirs, errors.Join(err, r1.Close(), w1.Close())
	}
	return NewPipeConn(r1, w2), [2]*os.File{r2, w1}, nil
}

// Read reads from the other side. A passed deadline is a net.Error with Timeout.
func (c *PipeConn) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	return n, netError(err)
}

// Write writes to the other side. A passed deadline is a net.Error with Timeout.
func (c *PipeConn) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	return n, netError(err)
}

// netError turns a passed deadline into a net.Error, which package net/http
// recognises.
func netError(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return os.ErrDeadlineExceeded
	}
	return err
}

// Close closes both directions.
func (c *PipeConn) Close() error { return errors.Join(c.r.Close(), closed(c.w.Close())) }

// CloseWrite closes the writing direction; the other side reads the end of file.
func (c *PipeConn) CloseWrite() error { return c.w.Close() }

// CloseRead closes the reading direction; writes of the other side fail.
func (c *PipeConn) CloseRead() error { return c.r.Close() }

func closed(err error) error {
	if errors.Is(err, os.ErrClosed) { // by CloseWrite
		return nil
	}
	return err
}

// LocalAddr returns a placeholder, because a pipe has no address.
func (c *PipeConn) LocalAddr() net.Addr { return pipeAddr{} }

// RemoteAddr returns a placeholder, because a pipe has no address.
func (c *PipeConn) RemoteAddr() net.Addr { return pipeAddr{} }

// SetDeadline sets the deadlines of both directions.
func (c *PipeConn) SetDeadline(t time.Time) error {
	return errors.Join(c.r.SetReadDeadline(t), closed(c.w.SetWriteDeadline(t)))
}

// SetReadDeadline sets the deadline of reads.
func (c *PipeConn) SetReadDeadline(t time.Time) error { return c.r.SetReadDeadline(t) }

// SetWriteDeadline sets the deadline of writes.
func (c *PipeConn) SetWriteDeadline(t time.Time) error { return c.w.SetWriteDeadline(t) }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }
