package edge

import (
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	bodyIdle   = 15 * time.Minute // nothing arrives: the request is given up
	settleMost = 256 << 10        // of such a rest is read, so that the connection serves on
)

// requestBody is the body of a request. Nothing of it is read before somebody was
// authenticated, and nothing holds the answer up for longer than late.
type requestBody struct {
	io.ReadCloser
	call  *call
	rc    *http.ResponseController
	waits bool          // the client waits to be told to send it
	late  time.Duration // for the rest, when the answer is there
	ended atomic.Bool
	fixed atomic.Bool // has a deadline of its own
	moved atomic.Int64
}

func (b *requestBody) Read(p []byte) (int, error) {
	if !b.call.admitted.Load() {
		return 0, sandboxer.E(sandboxer.Unauthenticated, nil, "nothing is read of a request that nobody is known to make")
	}
	if now := time.Now(); !b.fixed.Load() && now.Unix()-b.moved.Load() > 60 { // moving a deadline costs
		b.moved.Store(now.Unix())
		b.rc.SetReadDeadline(now.Add(bodyIdle)) // an error means the connection has none
	}
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.ended.Store(true)
		if b.moved.Load() > 0 {
			b.rc.SetReadDeadline(time.Time{})
		}
	}
	return n, err
}

// within gives the whole body so much time; 0 ends that.
func (b *requestBody) within(d time.Duration) {
	if b == nil {
		return
	}
	b.fixed.Store(true)
	if d == 0 {
		b.rc.SetReadDeadline(time.Time{})
	} else {
		b.rc.SetReadDeadline(time.Now().Add(d))
	}
}

// settle is called before the answer is written. A rest of the body that is still to
// come is read if it comes soon; else the connection ends with the answer.
func (b *requestBody) settle(answer http.Header) {
	if b.ended.Load() {
		return
	}
	if b.call.admitted.Load() && !b.waits {
		b.within(b.late)
		if _, err := io.CopyN(io.Discard, b, settleMost); err == io.EOF {
			b.within(0)
			return
		}
	}
	answer.Set("Connection", "close")
	b.fixed.Store(true)
	b.rc.SetReadDeadline(time.Unix(1, 0)) // net/http would wait for it
}

// ReadAll reads the body of a request that is kept in memory: most bytes at most, within
// d. Kinds: Invalid for a body that is larger, which answers 413, or does not arrive
// whole; Exhausted where there is no memory for it.
func ReadAll(r *http.Request, most int64, d time.Duration) ([]byte, error) {
	c := callOf(r.Context())
	c.body.within(d)
	body, err := io.ReadAll(Hold(r.Context()).Reader(http.MaxBytesReader(c.w, r.Body, most)))
	c.body.within(0)
	var tooBig *http.MaxBytesError
	switch {
	case errors.As(err, &tooBig):
		return nil, WithStatus(http.StatusRequestEntityTooLarge, sandboxer.E(sandboxer.Invalid, nil, "the request body is larger than %d bytes", most))
	case errors.Is(err, sandboxer.Exhausted):
		return nil, err
	case err != nil:
		return nil, sandboxer.E(sandboxer.Invalid, err, "the request body did not arrive whole")
	}
	return body, nil
}
