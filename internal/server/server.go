// Package server is the REST interface, a door of package edge: it decodes, calls the
// manager and translates the results. It has no rule of its own about sandboxes. Package
// api has the types it speaks, and their description.
package server

import (
	"context"
	"net/url"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// Options tune a Server; the zero value works.
type Options struct {
	Version string // of the program
	Owner   string // name of the installation
	Data    string // data directory, shown to administrators
	// PortURL returns the address of a port of a sandbox: by a name of its own, or below
	// base, the server's own address, which is nil if it does not listen over TCP; ""
	// if there is none. nil: there never is.
	PortURL func(base *url.URL, id string, port int, token sandboxer.Secret) string
	// Reload reads the profiles again, for administrators; nil if the server cannot do that.
	Reload func(context.Context) (api.Reload, error)
	// Metrics is shared with the composition root, which gives its methods to the
	// backends, the manager and the edge. nil makes one.
	Metrics *Metrics
}

// Server serves the REST interface.
type Server struct {
	m                    *manager.Manager
	opts                 Options
	mux                  edge.Mux
	api                  huma.API
	doc                  []byte
	types                map[string]opTypes
	metrics              *Metrics
	buffers              buffers
	decoding             chan struct{} // slots of bodies being decoded, which takes many times their size
	started              time.Time
	eventsKeepaliveEvery time.Duration // between keep-alives of event streams
	keepaliveEvery       time.Duration // between pings of WebSockets
}

// New returns a server in front of m.
func New(m *manager.Manager, opts Options) *Server {
	if opts.Metrics == nil {
		opts.Metrics = NewMetrics()
	}
	if opts.PortURL == nil {
		opts.PortURL = func(*url.URL, string, int, sandboxer.Secret) string { return "" }
	}
	s := &Server{
		m: m, opts: opts, types: map[string]opTypes{}, metrics: opts.Metrics, decoding: make(chan struct{}, 4),
		started: time.Now(), eventsKeepaliveEvery: 15 * time.Second, keepaliveEvery: 30 * time.Second,
	}
	s.mux.Hint = "the routes are listed at /openapi.yaml"
	s.routes()
	return s
}

// Door is the server as a door of an edge: it gets everything that no other door takes.
func (s *Server) Door() edge.Door { return edge.Door{Name: "REST", Path: "/", Routes: &s.mux} }
