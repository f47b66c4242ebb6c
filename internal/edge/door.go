package edge

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// A Door is one entrance to the broker: an interface with its own paths or host names.
type Door struct {
	Name string // in messages of faults of the program
	// Host reports whether all requests to a host, as in the Host header, belong to the
	// door. Such a host need not be among the names of the server. nil: none does.
	Host func(host string) bool
	// Path begins the paths of the door on the names of the server, such as
	// "/p/"; without a slash at its end it is the one path. Of two doors the one with the longer path gets a request;
	// "/" is for all paths of no other door. "": the door has names alone.
	Path   string
	Routes Router
	// AnyOrigin admits requests that pages of other origins make. It is for doors that
	// check the origin themselves, or whose requests carry no credential that a browser adds.
	AnyOrigin bool
	// Key reads the API key of a request. NoKey: there is none, which is enough for a caller that
	// a Unix socket identifies. Any other error that is Unauthenticated counts as a failed
	// login. nil: BearerKey.
	Key func(*http.Request) (sandboxer.Secret, error)
	// Fail writes an error in the form of the door's clients. nil: as an RFC 9457 problem.
	Fail func(http.ResponseWriter, *api.Problem)
}

func (d *Door) check() {
	switch {
	case d.Name == "" || d.Routes == nil || d.Path == "" && d.Host == nil:
		panic(fmt.Sprintf("edge: the door %q lacks a name, routes, or a path and names of its own", d.Name))
	case d.Path != "" && d.Path[0] != '/':
		panic(fmt.Sprintf("edge: the path %q of the door %q does not begin with a slash", d.Path, d.Name))
	}
	for _, r := range d.Routes.Routes() {
		r.check()
	}
}

// A Router knows the routes of a door.
type Router interface {
	// Route returns the route of a request. A Router also has routes that refuse requests
	// that it does not serve.
	Route(*http.Request) Route
	// Routes returns every route that serves something.
	Routes() []Route
}

// A Route is what is served under one pattern.
type Route struct {
	Pattern string // in log and metrics
	Access  Access // who may use it
	Handler http.Handler
	Quiet   bool // is asked for all the time, and logged for debugging only
}

func (r Route) check() {
	if !r.Access.declared() {
		panic(fmt.Sprintf("edge: the route %q does not declare who may use it", r.Pattern))
	}
}

// Access says who may use a route. The zero value says nothing: such a route is not
// served.
type Access struct {
	scope    sandboxer.Scope
	anyone   bool
	admitter Admit
}

// Needs is for callers with a key that has the scope, or with all rights of the owner
// of the Unix socket.
func Needs(s sandboxer.Scope) Access { return Access{scope: s} }

// Anyone is for every caller: no caller is identified, and nothing is read of the body.
func Anyone() Access { return Access{anyone: true} }

// AdmittedBy is for callers with another credential than a key, which admit checks. They get
// its errors as the answer.
func AdmittedBy(admit Admit) Access { return Access{admitter: admit} }

// Admit lets a caller in: it returns the principal to account connections and
// memory to, the ctx for the handler, and a function to call at the end of the request.
type Admit func(ctx context.Context) (_ context.Context, p sandboxer.Principal, end func(), _ error)

func (a Access) declared() bool { return a.scope != "" || a.anyone || a.admitter != nil }

// Scope is the scope that a caller's key needs, "" if the route needs no key.
func (a Access) Scope() sandboxer.Scope { return a.scope }

// Identified reports whether the handler sees only requests of known callers.
func (a Access) Identified() bool { return a.scope != "" || a.admitter != nil }

// Mux is a Router with the patterns of http.ServeMux. The zero value has no routes.
type Mux struct {
	Hint   string // where routes are listed, for requests of unknown ones
	mux    http.ServeMux
	routes []Route
}

// entry is a Route in an http.ServeMux, whose own handlers are never one.
type entry struct{ Route }

func (e *entry) ServeHTTP(w http.ResponseWriter, r *http.Request) { e.Handler.ServeHTTP(w, r) }

// Handle adds a route, whose Handler finds the parts of the path by PathValue. Like
// http.ServeMux it panics for a pattern that is invalid or is another route's, and also
// for a route that does not declare who may use it.
func (m *Mux) Handle(r Route) {
	r.check()
	m.mux.Handle(r.Pattern, &entry{r})
	m.routes = append(m.routes, r)
}

// Routes returns the routes that were added.
func (m *Mux) Routes() []Route { return m.routes }

// Route implements Router.
func (m *Mux) Route(r *http.Request) Route {
	h, pattern := m.mux.Handler(r)
	if e, ok := h.(*entry); ok {
		route := e.Route
		route.Handler = &m.mux // which also tells the parts of the path
		return route
	}
	if pattern != "" { // a path that is not clean is sent to the one that is
		return Route{Pattern: pattern, Access: Anyone(), Handler: h}
	}
	return Route{Pattern: "none", Access: Anyone(), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.noRoute(w, r, h) })}
}

// noRoute answers for requests without a route, in the door's form. The mux's own answer
// distinguishes a wrong method from a wrong path.
func (m *Mux) noRoute(w http.ResponseWriter, r *http.Request, mux http.Handler) {
	probe := &discardWriter{header: http.Header{}}
	mux.ServeHTTP(probe, r)
	if probe.status == http.StatusMethodNotAllowed {
		allow := probe.header.Get("Allow")
		w.Header().Set("Allow", allow)
		Fail(w, r, WithStatus(http.StatusMethodNotAllowed,
			sandboxer.E(sandboxer.Invalid, nil, "%s has no method %s", Redact(r.URL.Path), r.Method).WithHint("it has: %s", allow)))
		return
	}
	err := sandboxer.E(sandboxer.NotFound, nil, "there is nothing at %s", Redact(r.URL.Path))
	err.Hint = m.Hint
	Fail(w, r, err)
}

// discardWriter takes an answer and discards it.
type discardWriter struct {
	header http.Header
	status int
}

func (d *discardWriter) Header() http.Header         { return d.header }
func (d *discardWriter) WriteHeader(status int)      { d.status = status }
func (d *discardWriter) Write(p []byte) (int, error) { return len(p), nil }

// has reports whether a path on the names of the server is d's.
func (d *Door) has(path string) bool {
	if strings.HasSuffix(d.Path, "/") {
		return strings.HasPrefix(path, d.Path)
	}
	return d.Path != "" && path == d.Path
}
