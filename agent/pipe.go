package agent

import (
	"errors"
	"net"
	"os"
	"time"
)

// PipeConn is a connection made of two pipes, one for each direction. Where open files
// are handed to an agent inside gVisor, pipes are what a snapshot bears: the agent of a
// restored copy finds them closed. (A socket of the outside cannot be restored, and
// the copy with it.)
type PipeConn struct {
	r, w *os.File
}

// NewPipeConn returns a connection that reads from r and writes to w and owns both.
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

func (c *PipeConn) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	return n, netError(err)
}

func (c *PipeConn) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	return n, netError(err)
}

// netError gives what a passed deadline leads to the form of a net.Error, which
// package net/http tells it by.
func netError(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return os.ErrDeadlineExceeded
	}
	return err
}

// Close closes both directions.
func (c *PipeConn) Close() error { return errors.Join(c.r.Close(), closed(c.w.Close())) }

// CloseWrite ends what the other side reads.
func (c *PipeConn) CloseWrite() error { return c.w.Close() }

// CloseRead lets the other side's writes fail.
func (c *PipeConn) CloseRead() error { return c.r.Close() }

func closed(err error) error {
	if errors.Is(err, os.ErrClosed) { // by CloseWrite
		return nil
	}
	return err
}

func (c *PipeConn) LocalAddr() net.Addr  { return pipeAddr{} }
func (c *PipeConn) RemoteAddr() net.Addr { return pipeAddr{} }

func (c *PipeConn) SetDeadline(t time.Time) error {
	return errors.Join(c.r.SetReadDeadline(t), closed(c.w.SetWriteDeadline(t)))
}
func (c *PipeConn) SetReadDeadline(t time.Time) error  { return c.r.SetReadDeadline(t) }
func (c *PipeConn) SetWriteDeadline(t time.Time) error { return c.w.SetWriteDeadline(t) }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }
