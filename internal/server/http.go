package server

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/portproxy"
)

// call is what is known about one request besides the request itself.
type call struct {
	id    string // request ID
	route string // pattern, for log and metrics
	actor string
	w     http.ResponseWriter
	r     *http.Request
	body  *requestBody // nil if the request has none
	err   error        // what the caller was told, with the cause

	admitted atomic.Bool // somebody was authenticated
	holds    []*held     // of the memory, until the end
	rest     func()      // what goes on after the handler; see apart
}

// hold begins to account for memory of the request. What it grows to is given back at
// the end of the request.
func (s *Server) hold(ctx context.Context) *held {
	c := callOf(ctx)
	h := &held{of: s.memory, p: sandboxer.PrincipalFrom(ctx)}
	c.holds = append(c.holds, h)
	return h
}

type callKey struct{}

// callOf returns the call that ctx belongs to.
func callOf(ctx context.Context) *call {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c
	}
	return &call{}
}

var requestID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// serve is the way of every request: identify it, refuse what must not come in,
// find its route, and note how it went.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	s.work.Add(1)
	s.open.Add(1)
	start := time.Now()
	c := &call{id: r.Header.Get("X-Request-Id"), route: "none"}
	if !requestID.MatchString(c.id) {
		c.id = strings.ToLower(rand.Text()[:16])
	}
	rec := &recorder{ResponseWriter: w, call: c}
	c.w = rec
	r = r.WithContext(context.WithValue(r.Context(), callKey{}, c))
	if r.Body != nil && r.Body != http.NoBody {
		c.body = &requestBody{ReadCloser: r.Body, call: c, rc: http.NewResponseController(w), waits: r.Header.Get("Expect") != "", late: s.settle}
		r.Body = c.body
	}
	h := rec.Header()
	h.Set("X-Request-Id", c.id)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")

	defer func() {
		v := recover()
		if v == nil && c.rest != nil {
			go s.goOn(&http.Request{Method: r.Method, URL: r.URL, Host: r.Host}, c, &recorder{call: c, status: rec.status}, start)
			return
		}
		if v = s.end(r, c, rec, start, v); v != nil {
			panic(v)
		}
	}()

	if _, _, named := s.ports.Host(r.Host); named {
		c.route = "port proxy"
		s.ports.ServeHTTP(rec, r)
		return
	}
	if err := s.checkHost(r); err != nil {
		s.fail(rec, r, err)
		return
	}
	if s.ports.Mine(r) { // pages of sandboxes may be of any origin, and have no credential but their address
		c.route = "port proxy"
		s.ports.ServeHTTP(rec, r)
		return
	}
	if err := s.cross.Check(r); err != nil {
		s.fail(rec, r, sandboxer.E(sandboxer.Denied, err, "requests from other web pages are refused"))
		return
	}
	handler, pattern := s.mux.Handler(r)
	if pattern == "" {
		s.noRoute(rec, r, handler)
		return
	}
	c.route = pattern
	s.mux.ServeHTTP(rec, r)
}

// apart has f go on with the request of ctx when its handler has returned. A stream may
// last for days, and until then would hold what its request took: a stack that has grown,
// and net/http's buffers. f must not use the request or the answer any more; its ctx ends
// only as f has it end.
func (s *Server) apart(ctx context.Context, f func(context.Context)) {
	callOf(ctx).rest = func() { f(context.WithoutCancel(ctx)) }
}

// goOn does the rest of a request, of which r and rec are what is needed for the log.
func (s *Server) goOn(r *http.Request, c *call, rec *recorder, start time.Time) {
	r = r.WithContext(context.WithValue(context.Background(), callKey{}, c))
	rest := c.rest
	c.r, c.w, c.rest = r, nil, nil
	defer func() { s.end(r, c, rec, start, recover()) }()
	rest()
}

// end notes the end of a request whose handler panicked with v, if that is not nil, and
// gives back what the request held. What it returns goes on to net/http.
func (s *Server) end(r *http.Request, c *call, rec *recorder, start time.Time, v any) any {
	defer s.work.Done()
	defer s.open.Add(-1)
	defer func() {
		for _, h := range c.holds {
			h.end()
		}
	}()
	if v != nil && v != http.ErrAbortHandler {
		err := sandboxer.E(sandboxer.Internal, fmt.Errorf("panic: %v\n%s", v, debug.Stack()), "the request handler panicked")
		if rec.status == 0 {
			s.fail(rec, r, err)
			v = nil
		} else {
			s.problem(r.Context(), err) // to the log
			v = http.ErrAbortHandler
		}
	}
	s.note(r, c, rec, time.Since(start), v != nil)
	return v
}

// noRoute answers where the mux has nothing, in our form. The mux's own answer
// tells a wrong method from a wrong path.
func (s *Server) noRoute(w http.ResponseWriter, r *http.Request, mux http.Handler) {
	probe := &discard{header: http.Header{}}
	mux.ServeHTTP(probe, r)
	if probe.status == http.StatusMethodNotAllowed {
		allow := probe.header.Get("Allow")
		w.Header().Set("Allow", allow)
		s.fail(w, r, withStatus(http.StatusMethodNotAllowed,
			sandboxer.E(sandboxer.Invalid, nil, "%s has no method %s", portproxy.Redact(r.URL.Path), r.Method).WithHint("it has: %s", allow)))
		return
	}
	s.fail(w, r, sandboxer.E(sandboxer.NotFound, nil, "there is nothing at %s", portproxy.Redact(r.URL.Path)).
		WithHint("the routes are listed at /openapi.yaml"))
}

// note writes the access log and the metrics. Query values may name files and are
// left out.
func (s *Server) note(r *http.Request, c *call, rec *recorder, took time.Duration, aborted bool) {
	status := rec.status
	if status == 0 && !aborted {
		status = http.StatusOK
	}
	s.metrics.request(c.route, status, took)
	level := slog.LevelInfo
	if r.URL.Path == "/healthz" || r.URL.Path == "/metrics" {
		level = slog.LevelDebug
	}
	attrs := []slog.Attr{
		slog.String("request_id", c.id), slog.String("method", r.Method), slog.String("path", portproxy.Redact(r.URL.EscapedPath())),
		slog.Int("status", status), slog.Duration("dur", took), slog.Int64("bytes", rec.bytes), slog.String("actor", c.actor),
	}
	if c.err != nil {
		attrs = append(attrs, slog.String("kind", string(sandboxer.KindOf(c.err))), slog.Any("err", c.err))
	}
	if aborted {
		attrs = append(attrs, slog.Bool("aborted", true))
	}
	s.log.LogAttrs(context.WithoutCancel(r.Context()), level, "request", attrs...)
}

// recorder notes the status and the size of an answer.
type recorder struct {
	http.ResponseWriter
	call   *call
	status int
	bytes  int64
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 || r.status < 200 {
		if r.status = status; status >= 200 && r.call.body != nil {
			r.call.body.settle(r.Header())
		}
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.status < 200 {
		r.WriteHeader(http.StatusOK)
	}
	n, err := r.ResponseWriter.Write(p)
	r.bytes += int64(n)
	return n, err
}

// Unwrap lets http.ResponseController reach the connection.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// Hijack hands out the connection for a WebSocket.
func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	hj, ok := r.ResponseWriter.(http.Hijacker)
	if !ok {
		return nil, nil, errors.ErrUnsupported
	}
	r.status = http.StatusSwitchingProtocols
	return hj.Hijack()
}

// discard takes an answer that nobody gets.
type discard struct {
	header http.Header
	status int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) WriteHeader(status int)      { d.status = status }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
