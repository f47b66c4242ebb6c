package cli

import (
	"context"
	"crypto/x509"
	"errors"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/server"
)

// session is a connection to a server, on this machine, elsewhere, or in this very
// process.
type session struct {
	*api.Client
	local     bool // the server sees this machine's files
	inProcess bool
	end       func() error
	addr      string // with opts, what another client of the same server is made of
	opts      api.Options
}

// elsewhere reports whether the server is on another machine, as far as its address shows: one at a
// loopback address is on this machine.
func (s *session) elsewhere() bool {
	u, err := url.Parse(s.addr)
	return !s.local && (err != nil || !isLoopback(u.Hostname()))
}

func (s *session) close() error {
	s.Client.Close()
	if s.end == nil {
		return nil
	}
	return s.end()
}

// connect returns a client for the configured server, or for the one of this
// machine. It fails at once when nothing listens on a Unix socket.
func (f *factory) connect(ctx context.Context) (*session, error) {
	s, err := f.settings()
	if err != nil {
		return nil, err
	}
	addr := s.get("url")
	if addr == "" {
		addr = "unix://" + s.get("socket")
	}
	return f.dial(ctx, addr)
}

func (f *factory) dial(ctx context.Context, addr string) (*session, error) {
	token, err := f.apiKey()
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(addr)
	if err != nil {
		return nil, checkURL(addr)
	}
	local := u.Scheme == "unix"
	if local {
		// Over HTTP a failed connection is tried again; that a server is missing is certain at once.
		switch err := reach(ctx, u.Path); {
		case errors.Is(err, fs.ErrPermission):
			return nil, sandboxer.E(sandboxer.Denied, nil, "the server at %s is another user's", addr).
				WithHint("become that user, or ask for an API key and the server's TCP address")
		case err != nil:
			e := sandboxer.E(sandboxer.Unavailable, nil, "no server answers at %s", addr).WithHint("start one with: sandboxer up")
			if f.resolved.get("url") != "" {
				e.WithHint("start it there with: sandboxer serve --socket %s", u.Path)
			}
			return nil, e
		}
	}
	roots, err := f.roots()
	if err != nil {
		return nil, err
	}
	opts := api.Options{Token: token, UserAgent: "sandboxer/" + version(), RootCAs: roots}
	c, err := api.New(addr, opts)
	if err != nil {
		return nil, err
	}
	return &session{Client: c, local: local, addr: addr, opts: opts}, nil
}

// roots are the authorities trusted for an https URL; nil means the system's.
func (f *factory) roots() (*x509.CertPool, error) {
	s, err := f.settings()
	if err != nil || s.get("tls_ca") == "" {
		return nil, err
	}
	pem, err := readOwnFile(s.get("tls_ca"))
	if err != nil {
		return nil, unreadable(err, "the file of authorities %s cannot be read", s.get("tls_ca"))
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, invalid("%s has no certificate in PEM form", s.get("tls_ca"))
	}
	return pool, nil
}

// reach checks whether a server listens on the socket.
func reach(ctx context.Context, socket string) error {
	c, err := (&net.Dialer{Timeout: 2 * time.Second}).DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	return c.Close()
}

func answers(ctx context.Context, socket string) bool { return reach(ctx, socket) == nil }

// running reports whether there is a server to talk to: one that was named
// explicitly, or the one of this machine.
func (f *factory) running(ctx context.Context) (bool, error) {
	s, err := f.settings()
	if err != nil {
		return false, err
	}
	return s.get("url") != "" || answers(ctx, s.get("socket")), nil
}

// connectOrStart is connect, after starting a server in the background if this
// machine has none. A server must run when a sandbox expires.
func (f *factory) connectOrStart(ctx context.Context, p *progress) (*session, error) {
	ok, err := f.running(ctx)
	if err != nil {
		return nil, err
	}
	if !ok {
		if err := f.startServer(ctx, p); err != nil {
			return nil, err
		}
	}
	return f.connect(ctx)
}

// connectOrEmbed is connect, or a broker in this process when no server runs. The
// data directory then belongs to this process until the session is closed.
func (f *factory) connectOrEmbed(ctx context.Context, p *progress) (*session, error) {
	ok, err := f.running(ctx)
	if err != nil {
		return nil, err
	}
	if ok {
		return f.connect(ctx)
	}
	p.note("no server runs; using this machine for the time of this command")
	return f.embed(ctx)
}

func (f *factory) embed(ctx context.Context) (_ *session, err error) {
	log, err := f.logger(true)
	if err != nil {
		return nil, err
	}
	cfg, err := f.brokerConfig()
	if err != nil {
		return nil, err
	}
	cfg.Log = log
	f.confineProcess(log)
	metrics := server.NewMetrics()
	cfg.Observe = metrics.Observe
	b, err := newBroker(ctx, cfg)
	if err != nil {
		var e *sandboxer.Error
		if errors.As(err, &e) && e.Kind == sandboxer.Conflict {
			return nil, sandboxer.E(e.Kind, e, "%s", e.Msg).
				WithHint("to run several commands at a time, let them share a server: sandboxer up")
		}
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = b.Close()
		}
	}()
	sweepSockets(os.TempDir())
	dir, err := os.MkdirTemp("", "sandboxer-")
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "a temporary directory cannot be made")
	}
	socket := filepath.Join(dir, "api.sock")
	l, err := edge.ListenUnix(socket)
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	sctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	front, closeDoors := newEdge(b, edge.Options{Log: log}, server.Options{Data: cfg.Dir, Metrics: metrics}, nil, nil)
	go func() { done <- front.Serve(sctx, l) }()
	end := func() error {
		stop()
		err := <-done
		closeDoors()
		return errors.Join(err, b.Close(), os.RemoveAll(dir))
	}
	c, err := api.New("unix://"+socket, api.Options{UserAgent: "sandboxer/" + version()})
	if err != nil {
		return nil, errors.Join(err, end())
	}
	return &session{Client: c, local: true, inProcess: true, end: end}, nil
}

// sweepSockets removes the directories of sockets that killed commands have left in tmp: this user's, with a
// socket without a listener, and not so new that a server is about to listen on it.
func sweepSockets(tmp string) {
	dirs, _ := filepath.Glob(filepath.Join(tmp, "sandboxer-*"))
	for _, dir := range dirs {
		fi, err := os.Lstat(dir)
		if err != nil || !fi.IsDir() || time.Since(fi.ModTime()) < time.Minute {
			continue
		}
		if st, ok := fi.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
			continue
		}
		socket := filepath.Join(dir, "api.sock")
		if _, err := os.Lstat(socket); err != nil {
			continue
		}
		c, err := net.DialTimeout("unix", socket, time.Second)
		if err == nil {
			c.Close()
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			_ = os.Remove(socket)
			_ = os.Remove(dir) // only if nothing else is in it
		}
	}
}

func (f *factory) brokerConfig() (brokerConfig, error) {
	s, err := f.settings()
	if err != nil {
		return brokerConfig{}, err
	}
	layers, err := f.layers()
	if err != nil {
		return brokerConfig{}, err
	}
	bucket, err := f.snapshotStore()
	if err != nil {
		return brokerConfig{}, err
	}
	own := []string{s.get("log_dir"), s.get("socket")}
	for _, d := range s.configDirs {
		own = append(own, d.Path)
	}
	return brokerConfig{Dir: s.get("data_dir"), Own: own, Bucket: bucket, History: s.span("keep_history"), MaxExecs: s.number("max_execs"), MaxStreams: s.number("max_streams"), Layers: layers, Adapters: f.adapters}, nil
}
