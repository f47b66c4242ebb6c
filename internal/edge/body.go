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
	maxDrained = 256 << 10        // of such a rest is read, so that the connection serves on
)

// requestBody is the body of a request. Nothing of it is read before the caller is
// authenticated, and nothing delays the answer for longer than drainTime.
type requestBody struct {
	io.ReadCloser
	call            *call
	rc              *http.ResponseController
	expectsContinue bool          // the client waits for permission to send it
	drainTime       time.Duration // for the rest, when the answer is there
	lingerTime      time.Duration // after the answer, for what still comes
	conn            *conn         // nil if it is none of ours
	ended           atomic.Bool
	ownDeadline     atomic.Bool // has a deadline of its own
	deadlineMoved   atomic.Int64
}

func (b *requestBody) Read(p []byte) (int, error) {
	if !b.call.admitted.Load() {
		return 0, sandboxer.E(sandboxer.Unauthenticated, nil, "the body of a request without a known caller is not read")
	}
	if now := time.Now(); !b.ownDeadline.Load() && now.Unix()-b.deadlineMoved.Load() > 60 { // moving a deadline costs
		b.deadlineMoved.Store(now.Unix())
		b.rc.SetReadDeadline(now.Add(bodyIdle)) // an error means the connection has none
	}
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.ended.Store(true)
		if b.deadlineMoved.Load() > 0 {
			b.rc.SetReadDeadline(time.Time{})
		}
	}
	return n, err
}

// setDeadline gives the whole body that much time; 0 ends that.
func (b *requestBody) setDeadline(d time.Duration) {
	if b == nil {
		return
	}
	b.ownDeadline.Store(true)
	if d == 0 {
		b.rc.SetReadDeadline(time.Time{})
	} else {
		b.rc.SetReadDeadline(time.Now().Add(d))
	}
}

// drain is called before the answer is written. It reads the rest of the body
// if that comes soon; else the connection ends with the answer.
func (b *requestBody) drain(answer http.Header) {
	if b.ended.Load() {
		return
	}
	if b.call.admitted.Load() && !b.expectsContinue {
		b.setDeadline(b.drainTime)
		if _, err := io.CopyN(io.Discard, b, maxDrained); err == io.EOF {
			b.setDeadline(0)
			return
		}
	}
	answer.Set("Connection", "close")
	if b.conn != nil && b.call.admitted.Load() {
		b.conn.linger.Store(int64(b.lingerTime))
	}
	b.ownDeadline.Store(true)
	b.rc.SetReadDeadline(time.Unix(1, 0)) // net/http would wait for it
}

// ReadAll reads the body of a request that is kept in memory: most bytes at most, within
// d. Kinds: Invalid for a body that is larger, which answers 413, or does not arrive
// completely; Exhausted if there is no memory for it.
func ReadAll(r *http.Request, most int64, d time.Duration) ([]byte, error) {
	c := callOf(r.Context())
	c.body.setDeadline(d)
	body, err := io.ReadAll(ReserveMemory(r.Context()).Reader(http.MaxBytesReader(c.w, r.Body, most)))
	c.body.setDeadline(0)
	var tooBig *http.MaxBytesError
	switch {
	case errors.As(err, &tooBig):
		return nil, WithStatus(http.StatusRequestEntityTooLarge, sandboxer.E(sandboxer.Invalid, nil, "the request body is larger than %d bytes", most).
			WithHint("send less in one request; files have no such limit: sandboxer cp"))
	case errors.Is(err, sandboxer.Exhausted):
		return nil, err
	case err != nil:
		return nil, sandboxer.E(sandboxer.Invalid, err, "the request body did not arrive whole")
	}
	return body, nil
}
