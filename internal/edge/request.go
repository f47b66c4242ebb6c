package edge

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// call is what is known about one request in addition to the request itself.
type call struct {
	edge  *Edge
	door  *Door
	id    string // request ID
	route string // pattern, for log and metrics
	quiet bool   // see Route
	actor string
	w     http.ResponseWriter
	r     *http.Request
	body  *requestBody // nil if the request has none
	err   error        // the caller's error, with the cause

	admitted     atomic.Bool               // a caller was authenticated
	hasStream    atomic.Bool               // by Stream
	streams      []context.CancelCauseFunc // of Stream, called again at the end
	reservations []*MemoryReservation      // of the memory, until the end
	endGuest     func()                    // what Admit returned, called at the end
	detached     func()                    // what goes on after the handler; see Detach
}

type callKey struct{}

// callOf returns the call that ctx belongs to.
func callOf(ctx context.Context) *call {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c
	}
	panic("edge: this is the ctx of no request that came through an Edge")
}

// RequestID returns the ID of the request that ctx belongs to: its X-Request-Id if that is
// a usable one.
func RequestID(ctx context.Context) string { return callOf(ctx).id }

// Exchange returns the request that ctx belongs to, and its answer, for code that gets
// only a ctx. Both are nil after Detach.
func Exchange(ctx context.Context) (http.ResponseWriter, *http.Request) {
	c := callOf(ctx)
	return c.w, c.r
}

// LogError logs err for the request that ctx belongs to, which gets another answer.
func LogError(ctx context.Context, err error) { callOf(ctx).err = err }

// BaseURL returns the address below which the caller reaches this server
// over TCP; nil if there is no such listener.
func BaseURL(ctx context.Context) *url.URL {
	c := callOf(ctx)
	if r := c.r; r != nil && r.Host != "" {
		if _, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
			u := &url.URL{Scheme: "http", Host: r.Host}
			if r.TLS != nil {
				u.Scheme = "https"
			}
			return u
		}
	}
	return c.edge.address.Load()
}

var requestID = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// serve handles every request: it finds its door, refuses requests that must not come in, finds
// the route, identifies the caller, and logs the result.
func (e *Edge) serve(w http.ResponseWriter, r *http.Request) {
	e.work.Add(1)
	e.open.Add(1)
	start := time.Now()
	c := &call{edge: e, id: r.Header.Get("X-Request-Id"), route: "none"}
	if !requestID.MatchString(c.id) {
		c.id = strings.ToLower(rand.Text()[:16])
	}
	d, named := e.doorOf(r)
	c.door = d
	rec := &recorder{ResponseWriter: w, call: c}
	c.w = rec
	r = r.WithContext(context.WithValue(r.Context(), callKey{}, c))
	if r.Body != nil && r.Body != http.NoBody {
		c.body = &requestBody{ReadCloser: r.Body, call: c, rc: http.NewResponseController(w), expectsContinue: r.Header.Get("Expect") != "", drainTime: e.drainTime,
			lingerTime: e.lingerTime, conn: connOf(r.Context())}
		r.Body = c.body
	}
	h := rec.Header()
	h.Set("X-Request-Id", c.id)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")

	defer func() {
		v := recover()
		if v == nil && c.detached != nil {
			go e.runDetached(&http.Request{Method: r.Method, URL: r.URL, Host: r.Host}, c, &recorder{call: c, status: rec.status}, start)
			return
		}
		if v = e.finish(r, c, rec, start, v); v != nil {
			panic(v)
		}
	}()

	if !named {
		if err := e.checkHost(r); err != nil {
			Fail(rec, r, err)
			return
		}
	}
	if !d.AnyOrigin {
		if err := e.cross.Check(r); err != nil {
			Fail(rec, r, sandboxer.E(sandboxer.Denied, err, "requests from other web pages are refused"))
			return
		}
	}
	route := d.Routes.Route(r)
	c.route, c.quiet = route.Pattern, route.Quiet
	r, err := e.authorize(r, route.Access)
	if err != nil {
		Fail(rec, r, err)
		return
	}
	c.r = r
	route.Handler.ServeHTTP(rec, r)
}

// runDetached does the rest of a request; r and rec are needed for the log.
func (e *Edge) runDetached(r *http.Request, c *call, rec *recorder, start time.Time) {
	r = r.WithContext(context.WithValue(context.Background(), callKey{}, c))
	rest := c.detached
	c.r, c.w, c.detached = nil, nil, nil
	defer func() { e.finish(r, c, rec, start, recover()) }()
	rest()
}

// finish notes the end of a request whose handler panicked with v, if that is not nil, and
// releases what the request held. Its return value goes on to net/http.
func (e *Edge) finish(r *http.Request, c *call, rec *recorder, start time.Time, v any) any {
	defer e.work.Done()
	defer e.open.Add(-1)
	defer func() {
		for _, cancel := range c.streams {
			cancel(nil)
		}
		for _, h := range c.reservations {
			h.release()
		}
		if c.endGuest != nil {
			c.endGuest()
		}
	}()
	if v != nil && v != http.ErrAbortHandler {
		err := sandboxer.E(sandboxer.Internal, fmt.Errorf("panic: %v\n%s", v, debug.Stack()), "the request handler panicked")
		if rec.status == 0 {
			Fail(rec, r, err)
			v = nil
		} else {
			Problem(r.Context(), err) // to the log
			v = http.ErrAbortHandler
		}
	}
	e.logRequest(r, c, rec, time.Since(start), v != nil)
	return v
}

// logRequest writes the access log and the metrics. Query values may name files and are
// left out.
func (e *Edge) logRequest(r *http.Request, c *call, rec *recorder, took time.Duration, aborted bool) {
	status := rec.status
	if status == 0 && !aborted {
		status = http.StatusOK
	}
	e.opts.Observe(c.route, status, took)
	level := slog.LevelInfo
	if c.quiet {
		level = slog.LevelDebug
	}
	attrs := []slog.Attr{
		slog.String("request_id", c.id), slog.String("method", r.Method), slog.String("path", Redact(r.URL.EscapedPath())),
		slog.Int("status", status), slog.Duration("dur", took), slog.Int64("bytes", rec.bytes), slog.String("actor", c.actor),
	}
	if c.err != nil {
		attrs = append(attrs, slog.String("kind", string(sandboxer.KindOf(c.err))), slog.Any("err", c.err))
	}
	if aborted {
		attrs = append(attrs, slog.Bool("aborted", true))
	}
	e.log.LogAttrs(context.WithoutCancel(r.Context()), level, "request", attrs...)
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
			r.call.body.drain(r.Header())
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

// Hijack hands out the connection, for a WebSocket for example.
func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	r.requireStream("took over the connection")
	hj, ok := r.ResponseWriter.(http.Hijacker)
	if !ok {
		return nil, nil, errors.ErrUnsupported
	}
	r.status = http.StatusSwitchingProtocols
	return hj.Hijack()
}

// FlushError sends what was written, for an answer that comes piece by piece.
func (r *recorder) FlushError() error {
	r.requireStream("answers piece by piece")
	return http.NewResponseController(r.ResponseWriter).Flush()
}

// Flush is FlushError for callers that need an http.Flusher.
func (r *recorder) Flush() { _ = r.FlushError() }

// requireStream keeps a long answer from outliving the caller's right to it.
func (r *recorder) requireStream(what string) {
	if !r.call.hasStream.Load() {
		panic(fmt.Sprintf("edge: the route %q %s without edge.Stream", r.call.route, what))
	}
}
