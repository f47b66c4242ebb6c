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

// attempts is how often in a row a request may stall before its whole call fails.
// A request that is answered, if only with "busy", is retried
// as often as the library does, which takes some seconds.
const attempts = 3

// connectTime is how long a connection, and then TLS, may take.
const connectTime = 10 * time.Second

type failuresKey struct{}

// bounded returns ctx for one call of a Bucket, and counts attempts in it.
func bounded(ctx context.Context) context.Context {
	if ctx.Value(failuresKey{}) != nil {
		return ctx
	}
	return context.WithValue(ctx, failuresKey{}, new(atomic.Int32))
}

// stall is how long a request may move no data, neither way, until it is cut. A request
// that moves data has no time limit. Tests shorten it.
var stall = 30 * time.Second

// errStalled is why a request ends that moved no data.
var errStalled = errors.New("nothing moved")

// transport ends every request even if the other side hangs.
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
		// If the transport itself sent the body again, that would not count as movement.
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
	w.timer.Stop() // until the next read: a slow reader is not the store's fault
	res.Body = receiving{res.Body, w}
	return res, nil
}

// A watch cuts a request that moves no data.
type watch struct {
	timer  *time.Timer
	cancel context.CancelCauseFunc
	fired  atomic.Bool
}

func (w *watch) end() {
	w.timer.Stop()
	w.cancel(nil)
}

// cause replaces the error that a cut by the watch looks like to others.
func (w *watch) cause(err error) error {
	if err != nil && err != io.EOF && w.fired.Load() {
		return errStalled
	}
	return err
}

// sending is the body of a request: each read of it counts as movement.
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
