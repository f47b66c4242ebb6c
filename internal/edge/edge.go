// Package edge is common to all doors of the broker. It has the listeners and the limits of their connections, authentication
// and scopes, the check of origins, the limits of requests in memory, the log of requests, the answers for errors, and the ends
// of streams. A door, such as the REST interface, is a Door that is mounted on an Edge; its handlers get only requests that
// have passed all checks.
package edge

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Authenticator is the part of *manager.Manager that an Edge needs.
type Authenticator interface {
	// Authenticate returns the principal of the key token. Unauthenticated: there is none, whatever is
	// wrong with it.
	Authenticate(ctx context.Context, token sandboxer.Secret) (sandboxer.Principal, error)
	// AdmitRequest counts a request against the quota of p's tenant. Exhausted: it has
	// made too many.
	AdmitRequest(p sandboxer.Principal) error
	// Bind returns a ctx that also ends when p's key is revoked or expires, with a cause
	// that is Unauthenticated. The returned function releases it, and may be called again.
	Bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc)
}

// Options tune an Edge; the zero value works.
type Options struct {
	Log *slog.Logger // nil discards
	// Hosts are further names by which clients may address a TCP listener. A loopback
	// listener otherwise accepts only localhost and loopback addresses in the Host
	// header, so that a web page cannot reach it under a name of its own; any other
	// listener accepts every name when Hosts is empty.
	Hosts []string
	// Conns bound the connections.
	Conns ConnLimits
	// Drain bounds how long Serve waits for requests under way when it ends;
	// default 2 s. Requests that take longer are cut, and get half a second to notice.
	Drain time.Duration
	// Observe is called for every request that ended: its route's pattern, the status it was
	// answered with, and how long it took, streams included. nil: not called.
	Observe func(route string, status int, took time.Duration)
}

// Edge serves doors. Mount them all, then call Serve once, or use Handler.
type Edge struct {
	auth       Authenticator
	opts       Options
	log        *slog.Logger
	doors      []*Door
	address    atomic.Pointer[url.URL] // of the first TCP listener
	cross      *http.CrossOriginProtection
	logins     *loginLimiter
	conns      *connections
	memory     *memory
	drainTime  time.Duration // for the rest of a body that is answered already
	lingerTime time.Duration // for what comes of it after the answer

	closing context.Context // ends when Serve is asked to end
	close   context.CancelCauseFunc
	work    sync.WaitGroup // requests, and what Go started
	open    atomic.Int64   // requests under way
}

var errClosing = sandboxer.E(sandboxer.Unavailable, nil, "the server is shutting down")

// New returns an edge without doors.
func New(auth Authenticator, opts Options) *Edge {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Drain == 0 {
		opts.Drain = 2 * time.Second
	}
	if opts.Observe == nil {
		opts.Observe = func(string, int, time.Duration) {}
	}
	e := &Edge{
		auth: auth, opts: opts, log: opts.Log, cross: http.NewCrossOriginProtection(), logins: newLoginLimiter(),
		conns: newConnections(opts.Conns), memory: newMemory(), drainTime: 10 * time.Second, lingerTime: lingerTime,
	}
	e.closing, e.close = context.WithCancelCause(context.Background())
	return e
}

// Mount adds a door. It panics if d is not complete, has a route that does not declare who
// may use it, or a path that another door has: these are faults of the program, and show before
// anything is served.
func (e *Edge) Mount(d Door) {
	d.check()
	if slices.ContainsFunc(e.doors, func(o *Door) bool { return d.Path != "" && o.Path == d.Path }) {
		panic("edge: two doors have the path " + d.Path)
	}
	if d.Key == nil {
		d.Key = BearerKey
	}
	if d.Fail == nil {
		d.Fail = writeProblem
	}
	e.doors = append(e.doors, &d)
	// If several paths match, the longest counts.
	slices.SortStableFunc(e.doors, func(a, b *Door) int { return len(b.Path) - len(a.Path) })
}

// Doors returns the doors that are mounted.
func (e *Edge) Doors() []Door {
	var out []Door
	for _, d := range e.doors {
		out = append(out, *d)
	}
	return out
}

// doorOf returns the door of request r, and whether a name of the door's own led to it.
func (e *Edge) doorOf(r *http.Request) (d *Door, named bool) {
	for _, d := range e.doors {
		if d.Host != nil && d.Host(r.Host) {
			return d, true
		}
	}
	for _, d := range e.doors {
		if d.has(r.URL.Path) {
			return d, false
		}
	}
	return &Door{Name: "none", Routes: &Mux{}, Key: BearerKey, Fail: writeProblem}, false
}

// Handler returns all doors as one handler. Without Serve, no peer is recognized by its
// user ID and every request needs a key.
func (e *Edge) Handler() http.Handler { return http.HandlerFunc(e.serve) }

// Serve answers on every listener until ctx ends or one fails. Then it accepts
// nothing more, ends the open streams, waits for the requests under way, and
// returns nil if the reason was ctx. An Edge serves once.
func (e *Edge) Serve(ctx context.Context, listeners ...net.Listener) error {
	hs := &http.Server{
		Handler:           e.Handler(),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    32 << 10,
		ConnContext:       withConn,
		ConnState:         e.conns.state,
		ErrorLog:          slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		if a, ok := l.Addr().(*net.TCPAddr); ok && e.address.Load() == nil {
			_, plain := l.(*net.TCPListener)
			e.address.Store(reachableURL(a, plain))
		}
		if t, ok := l.(*tlsListener); ok {
			l = &tlsListener{e.conns.listen(t.Listener), t.config}
		} else {
			l = e.conns.listen(l)
		}
		go func() { failed <- hs.Serve(l) }()
	}
	var err error
	running := len(listeners)
	select {
	case <-ctx.Done():
	case err = <-failed:
		running--
	}
	e.close(errClosing)
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.opts.Drain)
	defer cancel()
	if hs.Shutdown(grace) != nil {
		hs.Close()
	}
	for ; running > 0; running-- {
		<-failed
	}
	if !e.waitIdle(cutGrace) {
		e.log.Warn("requests that do not end are abandoned", "requests", e.open.Load())
	}
	if err != nil && !errors.Is(err, http.ErrServerClosed) {
		return sandboxer.E(sandboxer.Unavailable, err, "the server cannot go on listening")
	}
	return nil
}

// cutGrace is how long requests whose connection was cut have to notice.
const cutGrace = time.Second / 2

// waitIdle waits for d, at most, until no request is under way.
func (e *Edge) waitIdle(d time.Duration) bool {
	done := make(chan struct{})
	go func() { e.work.Wait(); close(done) }()
	select {
	case <-done:
		return true
	case <-time.After(d):
		return false
	}
}

// reachableURL is the address under which this machine's programs reach a listener.
func reachableURL(a *net.TCPAddr, plain bool) *url.URL {
	u := &url.URL{Scheme: "https", Host: a.String()}
	if plain {
		u.Scheme = "http"
	}
	if a.IP.IsUnspecified() {
		u.Host = (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: a.Port}).String()
	}
	return u
}
