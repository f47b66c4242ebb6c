// Package server is the REST edge: it decodes, authenticates, calls the manager and
// translates what comes back. It has no rule of its own about sandboxes. The types
// it speaks, and their description, are package api's.
package server

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/portproxy"
)

// Manager is what the server needs of *manager.Manager; the principal is in ctx.
type Manager interface {
	Create(ctx context.Context, req sandboxer.CreateRequest) (*sandboxer.Sandbox, error)
	Plan(ctx context.Context, req sandboxer.CreateRequest) (manager.Plan, error)
	Get(ctx context.Context, ref string) (*sandboxer.Sandbox, error)
	List(ctx context.Context, q sandboxer.Query) ([]*sandboxer.Sandbox, string, error)
	Wait(ctx context.Context, ref string, states ...sandboxer.State) (*sandboxer.Sandbox, error)
	Extend(ctx context.Context, ref string, e manager.Extend) (*sandboxer.Sandbox, error)
	SetNetwork(ctx context.Context, ref string, p sandboxer.NetworkPolicy) (*sandboxer.Sandbox, error)
	Destroy(ctx context.Context, ref string) (*sandboxer.Sandbox, error)
	Pause(ctx context.Context, ref string, req manager.PauseRequest) (*sandboxer.Sandbox, error)
	Resume(ctx context.Context, ref string, req manager.ResumeRequest) (*sandboxer.Sandbox, error)
	Fork(ctx context.Context, ref string, req manager.ForkRequest) ([]*sandboxer.Sandbox, error)

	Snapshot(ctx context.Context, ref string, req manager.SnapshotRequest) (*sandboxer.SnapshotRecord, error)
	GetSnapshot(ctx context.Context, ref string) (*sandboxer.SnapshotRecord, error)
	Snapshots(ctx context.Context, q sandboxer.SnapshotQuery) ([]*sandboxer.SnapshotRecord, string, error)
	DropSnapshot(ctx context.Context, ref string) (*sandboxer.SnapshotRecord, error)
	AdoptSnapshot(ctx context.Context, id string, a manager.SnapshotAdoption) (*sandboxer.SnapshotRecord, error)
	Restore(ctx context.Context, ref string, req manager.RestoreRequest) (*sandboxer.Sandbox, error)
	Diff(ctx context.Context, before, after string) ([]manager.Change, error)
	ExportSnapshot(ctx context.Context, ref string, w io.Writer) error
	ImportSnapshot(ctx context.Context, req manager.ImportRequest, r io.Reader) (*sandboxer.SnapshotRecord, error)

	Exec(ctx context.Context, ref string, cmd sandboxer.Cmd) (sandboxer.Exit, error)
	ReadFile(ctx context.Context, ref, name string) (io.ReadCloser, error)
	WriteFile(ctx context.Context, ref, name string, mode fs.FileMode, r io.Reader) error
	StatFile(ctx context.Context, ref, name string) (sandboxer.FileInfo, error)
	ListFiles(ctx context.Context, ref, dir, after string) iter.Seq2[sandboxer.FileInfo, error]
	MakeDir(ctx context.Context, ref, dir string) error
	MoveFile(ctx context.Context, ref, from, to string) error
	RemoveFile(ctx context.Context, ref, name string) error
	Dial(ctx context.Context, ref string, port int) (net.Conn, error)
	OpenPort(ctx context.Context, ref string, port int) (*sandboxer.Sandbox, error)
	ClosePort(ctx context.Context, ref string, port int) (*sandboxer.Sandbox, error)
	RevokePort(ctx context.Context, ref string, port int) (*sandboxer.Sandbox, error)
	Ports(ctx context.Context, ref string) (*sandboxer.Sandbox, []manager.PortInfo, error)
	SignPort(ctx context.Context, ref string, port int, ttl time.Duration) (sandboxer.Secret, *sandboxer.Sandbox, time.Time, error)
	Visit(ctx context.Context, a manager.PortAccess) (*manager.Visit, error)
	Stats(ctx context.Context, ref string) (sandboxer.Stats, error)

	Events(ctx context.Context, q sandboxer.EventQuery) ([]sandboxer.Event, error)
	Head(ctx context.Context) (int64, error)
	Subscribe(ctx context.Context, q sandboxer.EventQuery) (iter.Seq2[sandboxer.Event, error], error)
	Profiles(ctx context.Context) []sandboxer.Profile
	Extensions(ctx context.Context) []sandboxer.ExtensionInfo
	Probe(ctx context.Context, extension string) (sandboxer.Offer, error)
	Caches(ctx context.Context, host string) ([]manager.Cache, error)
	PruneCaches(ctx context.Context, host string) ([]manager.Cache, error)
	Pools(ctx context.Context) ([]manager.PoolStatus, error)
	DrainPool(ctx context.Context, profile string) (id string, removed int, _ error)

	Balance(ctx context.Context, tenant string) (sandboxer.Credits, error)
	Quotas(ctx context.Context, q manager.QuotaQuery) ([]manager.QuotaStatus, string, error)
	AdmitRequest(p sandboxer.Principal) error
	Grant(ctx context.Context, tenant string, amount sandboxer.Credits, key, note string) error
	Entries(ctx context.Context, q sandboxer.EntryQuery) ([]sandboxer.Entry, string, error)
	CreateKey(ctx context.Context, k manager.NewKey) (sandboxer.Secret, sandboxer.APIKey, error)
	Keys(ctx context.Context) ([]sandboxer.APIKey, error)
	RevokeKey(ctx context.Context, id string) error
	Authenticate(ctx context.Context, token sandboxer.Secret) (sandboxer.Principal, error)
	Bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc)
	Audit(ctx context.Context) (manager.Audit, error)
	DeepAudit(ctx context.Context) (manager.Audit, error)
	Quarantine(context.Context) ([]manager.Quarantined, error)
	Adopt(ctx context.Context, id string, a manager.Adoption) (*sandboxer.Sandbox, error)
	Forget(ctx context.Context, id string) (*sandboxer.Sandbox, error)
	Sweep(ctx context.Context) (manager.SweepReport, error)
}

var _ Manager = (*manager.Manager)(nil)

// Options tune a Server; the zero value works.
type Options struct {
	Log     *slog.Logger // nil discards
	Version string       // of the program
	Owner   string       // name of the installation
	Data    string       // data directory, shown to administrators
	// WentBack is when the database was last found to be older than it had been; zero if it
	// never was.
	WentBack time.Time
	// Hosts are further names by which clients may address a TCP listener. A loopback
	// listener otherwise accepts only localhost and loopback addresses in the Host
	// header, so that a web page cannot reach it under a name of its own; any other
	// listener accepts every name when Hosts is empty.
	Hosts []string
	// PortURL is the address below whose host every open port of a sandbox has a name of
	// its own, <port>-<id>.<host>; nil puts ports below /p/ of the server's own address.
	PortURL *url.URL
	// Reload reads the profiles anew, for administrators; nil where that cannot be done.
	Reload func(context.Context) (api.Reload, error)
	// Metrics is shared with the composition root, which gives its Observe to the
	// backends. nil makes one.
	Metrics *Metrics
	// Conns bound the connections.
	Conns ConnLimits
	// Drain bounds how long Serve waits for requests under way when it ends;
	// default 3 s. Those that go on then are cut, and get a second to notice.
	Drain time.Duration
}

// Server serves the REST interface.
type Server struct {
	m       Manager
	opts    Options
	log     *slog.Logger
	mux     *http.ServeMux
	api     huma.API
	doc     []byte
	types   map[string]opTypes
	metrics *Metrics
	ports   *portproxy.Proxy
	address atomic.Pointer[url.URL] // of the first TCP listener
	cross   *http.CrossOriginProtection
	guard   *guard
	conns   *connections
	memory  *memory
	buffers buffers
	decodes chan struct{} // slots of bodies being decoded, which takes many times their size
	started time.Time
	beat    time.Duration // between keep-alives of event streams
	pulse   time.Duration // between pings of WebSockets
	settle  time.Duration // for the rest of a body that is answered already

	closing context.Context // ends when the server is asked to end
	close   context.CancelCauseFunc
	work    sync.WaitGroup // requests and detached destroys
	open    atomic.Int64   // requests under way
}

var errClosing = sandboxer.E(sandboxer.Unavailable, nil, "the server is shutting down")

// New returns a server in front of m.
func New(m Manager, opts Options) *Server {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Drain == 0 {
		opts.Drain = 2 * time.Second
	}
	if opts.Metrics == nil {
		opts.Metrics = NewMetrics()
	}
	s := &Server{
		m: m, opts: opts, log: opts.Log, mux: http.NewServeMux(), types: map[string]opTypes{}, metrics: opts.Metrics,
		cross: http.NewCrossOriginProtection(), guard: newGuard(), conns: newConnections(opts.Conns), memory: newMemory(), decodes: make(chan struct{}, 4), started: time.Now(), beat: 15 * time.Second, pulse: 30 * time.Second,
		settle: 10 * time.Second,
	}
	s.closing, s.close = context.WithCancelCause(context.Background())
	s.ports = portproxy.New(m, portproxy.Options{Base: opts.PortURL, Admit: s.visitor, Enter: s.visits, Fail: s.fail})
	s.routes()
	return s
}

// Handler returns the whole interface as one handler. Without Serve, no peer is
// recognized by its user ID and every request needs a key.
func (s *Server) Handler() http.Handler { return http.HandlerFunc(s.serve) }

// Serve answers on every listener until ctx ends or one fails. Then it accepts
// nothing more, ends the open streams, waits for the requests under way, and
// returns nil if it was ctx that ended. A Server serves once.
func (s *Server) Serve(ctx context.Context, listeners ...net.Listener) error {
	hs := &http.Server{
		Handler:           s.Handler(),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    32 << 10,
		ConnContext:       withConn,
		ConnState:         s.conns.state,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		if a, ok := l.Addr().(*net.TCPAddr); ok && s.address.Load() == nil {
			_, plain := l.(*net.TCPListener)
			s.address.Store(reachable(a, plain))
		}
		if t, ok := l.(*tlsListener); ok {
			l = &tlsListener{s.conns.listen(t.Listener), t.config}
		} else {
			l = s.conns.listen(l)
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
	s.close(errClosing)
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.opts.Drain)
	defer cancel()
	if hs.Shutdown(grace) != nil {
		hs.Close()
	}
	for ; running > 0; running-- {
		<-failed
	}
	if !s.ended(lastNotice) {
		s.log.Warn("requests that do not end are left behind", "requests", s.open.Load())
	}
	s.ports.Close()
	if err != nil && !errors.Is(err, http.ErrServerClosed) {
		return sandboxer.E(sandboxer.Unavailable, err, "the server cannot go on listening")
	}
	return nil
}

// lastNotice is for requests whose connection was cut.
const lastNotice = time.Second / 2

// ended waits for d, at most, until no request is under way.
func (s *Server) ended(d time.Duration) bool {
	done := make(chan struct{})
	go func() { s.work.Wait(); close(done) }()
	select {
	case <-done:
		return true
	case <-time.After(d):
		return false
	}
}

// stream returns a ctx for something that may last: it ends, with the reason as its
// cause, when the caller's key is revoked or expires and when the server ends.
func (s *Server) stream(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	bound, unbind := s.m.Bind(ctx, sandboxer.PrincipalFrom(ctx))
	ctx, cancel := context.WithCancelCause(bound)
	stop := context.AfterFunc(s.closing, func() { cancel(errClosing) })
	return ctx, func(cause error) {
		cancel(cause)
		stop()
		unbind()
	}
}

// endOf returns why a stream ended: the cause of ctx's end if that was not merely
// the caller leaving, else err.
func endOf(ctx context.Context, err error) error {
	var e *sandboxer.Error
	if cause := context.Cause(ctx); cause != nil && errors.As(cause, &e) {
		return cause
	}
	return err
}

func processID() int { return os.Getpid() }
