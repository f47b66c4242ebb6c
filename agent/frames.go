package agent

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Input to attach and connect comes in frames: the number of octets in four, most significant first, and then these. An empty frame is the end of the input.
// If the stream ends without one, the caller is gone. Nothing else shows that: engines end the input of a command whose caller has left, read its output for
// ever, and never end it.
const (
	frameHead = 4
	maxFrame  = 32<<10 - frameHead // so that a frame fits into one read of a relay
)

// A frameWriter writes frames.
type frameWriter struct {
	to    net.Conn
	ended atomic.Bool

	mu  sync.Mutex
	buf []byte
	err error // nothing more can be written
}

func (w *frameWriter) Write(p []byte) (n int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(p) > 0 {
		switch {
		case w.ended.Load():
			return n, io.ErrClosedPipe
		case w.err != nil:
			return n, w.err
		}
		part := p[:min(len(p), maxFrame)]
		w.buf = append(binary.BigEndian.AppendUint32(w.buf[:0], uint32(len(part))), part...)
		m, err := w.to.Write(w.buf)
		n += max(0, m-frameHead)
		if err != nil {
			if m > 0 { // the rest of the frame is missing
				w.err = err
			}
			return n, err
		}
		p = p[len(part):]
	}
	return n, nil
}

// end sends the end of the input after the current write. It does not wait for that.
func (w *frameWriter) end() error {
	if w.ended.Swap(true) {
		return nil
	}
	go func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		_ = w.to.SetWriteDeadline(time.Time{}) // it was for earlier writes
		if w.err == nil {
			_, w.err = w.to.Write(make([]byte, frameHead))
		}
		if w.err != nil {
			w.to.Close()
		}
	}()
	return nil
}

// passFrames forwards the content of frames, and returns when their sender is gone, or sends something else.
func passFrames(to interface {
	io.Writer
	CloseWrite() error
}, from io.Reader) {
	var head [frameHead]byte
	buf := make([]byte, maxFrame)
	for ended, broken := false, false; ; {
		if _, err := io.ReadFull(from, head[:]); err != nil {
			return
		}
		n := binary.BigEndian.Uint32(head[:])
		if ended || n > maxFrame {
			return
		}
		if _, err := io.ReadFull(from, buf[:n]); err != nil {
			return
		}
		switch {
		case broken: // a peer that reads no more may still send
		case n > 0:
			_, err := to.Write(buf[:n])
			broken = err != nil
		default:
			ended = true
			_ = to.CloseWrite()
		}
	}
}
