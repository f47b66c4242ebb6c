package s3

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// attempts is how often in a row a request may come to nothing because nothing moves, until
// what it belongs to is given up. What is answered, if only that the service is busy, is tried
// again as often as the library does, which takes some seconds.
const attempts = 3

// connectTime is how long a connection, and then TLS, may take.
const connectTime = 10 * time.Second

type failuresKey struct{}

// bounded returns ctx for one call of a Bucket, in which attempts are counted.
func bounded(ctx context.Context) context.Context {
	if ctx.Value(failuresKey{}) != nil {
		return ctx
	}
	return context.WithValue(ctx, failuresKey{}, new(atomic.Int32))
}

// stall is how long nothing of a request may move, neither way, until it is cut. One that
// moves may take as long as it does. Tests shorten it.
var stall = 30 * time.Second

// errStalled is why a request ends of which nothing moved.
var errStalled = errors.New("nothing moved")

// transport ends every request without the other side's help.
type transport struct{ next http.RoundTripper }

func newTransport() http.RoundTripper {
	return transport{&http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: connectTime, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout: connectTime,
		TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12},
		MaxIdleConns:        256,
		MaxIdleConnsPerHost: 16,
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true, // objects come as they are
	}}
}

// RoundTrip implements http.RoundTripper.
func (t transport) RoundTrip(req *http.Request) (*http.Response, error) {
	failures, _ := req.Context().Value(failuresKey{}).(*atomic.Int32)
	if failures == nil {
		failures = new(atomic.Int32)
	}
	if failures.Load() >= attempts {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, errStalled // what is left of the library's own attempts takes no time
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	w := &watch{cancel: cancel}
	begun := time.Now()
	w.timer = time.AfterFunc(stall, func() {
		w.fired.Store(true)
		cancel(errStalled)
	})
	req = req.Clone(ctx)
	if req.Body != nil && req.Body != http.NoBody {
		// What is sent again by the transport itself would not be seen to move.
		req.Body, req.GetBody = sending{req.Body, w}, nil
	}
	res, err := t.next.RoundTrip(req)
	if err != nil {
		if w.fired.Load() || time.Since(begun) >= connectTime {
			failures.Add(1)
		}
		w.end()
		return nil, w.cause(err)
	}
	failures.Store(0)
	w.timer.Stop() // until somebody reads: who takes his time is not the store's fault
	res.Body = receiving{res.Body, w}
	return res, nil
}

// A watch cuts a request of which nothing moves.
type watch struct {
	timer  *time.Timer
	cancel context.CancelCauseFunc
	fired  atomic.Bool
}

func (w *watch) end() {
	w.timer.Stop()
	w.cancel(nil)
}

// cause puts the watch in the place of what its cut looks like to others.
func (w *watch) cause(err error) error {
	if err != nil && err != io.EOF && w.fired.Load() {
		return errStalled
	}
	return err
}

// sending is the body of a request: that more of it is asked for says that it moves.
type sending struct {
	io.ReadCloser
	w *watch
}

func (s sending) Read(p []byte) (int, error) {
	if !s.w.fired.Load() {
		s.w.timer.Reset(stall)
	}
	return s.ReadCloser.Read(p)
}

// receiving is the body of an answer.
type receiving struct {
	io.ReadCloser
	w *watch
}

func (r receiving) Read(p []byte) (int, error) {
	if !r.w.fired.Load() {
		r.w.timer.Reset(stall)
	}
	n, err := r.ReadCloser.Read(p)
	r.w.timer.Stop()
	return n, r.w.cause(err)
}

func (r receiving) Close() error {
	err := r.ReadCloser.Close()
	r.w.end()
	return err
}
