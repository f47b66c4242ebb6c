package docker

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// A host is one engine.
type host struct {
	name     string
	api      *engine.API
	capacity int
	socket   string // Unix socket of this machine, or empty

	looking chan struct{} // held by who looks at the engine

	mu     sync.Mutex
	known  *engine.Info
	looked time.Time
	// startables are images, by ID, that were looked at (startable).
	startables map[string]bool
}

// maxStartables is how many of them are remembered.
const maxStartables = 1000

// dialTime bounds the making of one connection.
const dialTime = 15 * time.Second

func (e *extension) newHost(name string, en Engine) (*host, error) {
	a, err := parseAddress(en.Address)
	if err != nil {
		return nil, err
	}
	h := &host{name: name, capacity: cmp.Or(en.Capacity, e.cfg.Capacity), looking: make(chan struct{}, 1)}
	if a.scheme == "unix" {
		h.socket = a.socket
	}
	d := &net.Dialer{Timeout: dialTime}
	dial := func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "unix", a.socket) }
	switch a.scheme {
	case "tcp":
		conf, err := en.tls()
		if err != nil {
			return nil, sandboxer.E(sandboxer.KindOf(err), err, "engines: %s: %s", name, sandboxer.Message(err))
		}
		dial = func(ctx context.Context) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTime) // the handshake, too
			defer cancel()
			return (&tls.Dialer{NetDialer: d, Config: conf}).DialContext(ctx, "tcp", a.host)
		}
	case "ssh":
		if e.pool == nil {
			transport := e.cfg.Transport
			if transport == "auto" {
				transport = ""
			}
			if e.pool, err = sshrun.New(sshrun.Options{Transport: transport, Config: e.cfg.SSHConfig, Log: e.log}); err != nil {
				return nil, err
			}
		}
		dial = func(ctx context.Context) (net.Conn, error) {
			to, err := e.pool.Host(sshrun.Target{Name: name, Addr: a.host})
			if err != nil {
				return nil, err
			}
			return to.Dial(ctx, "unix", a.socket)
		}
	}
	h.api = engine.NewAPI(engine.APIOptions{Name: name, Dial: dial})
	return h, nil
}

// tls is what an engine over TCP is spoken to with.
func (en Engine) tls() (*tls.Config, error) {
	cannot := func(err error, file string) error {
		return sandboxer.E(sandboxer.Unavailable, err, "the certificates in %s cannot be read", file)
	}
	pem, err := os.ReadFile(en.CA)
	if err != nil {
		return nil, cannot(err, en.CA)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, cannot(nil, en.CA)
	}
	cert, err := tls.LoadX509KeyPair(en.Cert, en.Key)
	if err != nil {
		return nil, cannot(err, en.Cert)
	}
	return &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}, nil
}

// knownTime is how long what an engine said of itself counts.
const knownTime = time.Minute

// look returns what the engine is.
func (h *host) look(ctx context.Context) (engine.Info, error) {
	select { // one that asks is enough
	case h.looking <- struct{}{}:
		defer func() { <-h.looking }()
	case <-ctx.Done():
		return engine.Info{}, ctx.Err()
	}
	h.mu.Lock()
	known, looked := h.known, h.looked
	h.mu.Unlock()
	if known != nil && time.Since(looked) < knownTime {
		return *known, nil
	}
	info, err := h.api.Info(ctx)
	if err != nil {
		return info, err
	}
	if info.OSType != "" && info.OSType != "linux" {
		return info, sandboxer.E(sandboxer.Unsupported, nil, "the engine %s runs containers of %s, and sandboxes are of Linux", h.name, info.OSType)
	}
	h.mu.Lock()
	h.known, h.looked = &info, time.Now()
	h.mu.Unlock()
	return info, nil
}

// podman reports whether the engine is Podman's, which stays so: it is asked once.
func (h *host) podman(ctx context.Context) (bool, error) {
	h.mu.Lock()
	known := h.known
	h.mu.Unlock()
	if known != nil {
		return known.Podman, nil
	}
	info, err := h.look(ctx)
	return info.Podman, err
}

// host is the one of that name.
func (e *extension) host(name string) (*host, error) {
	if h := e.hosts[name]; h != nil {
		return h, nil
	}
	return nil, sandboxer.E(sandboxer.Unavailable, nil, "%s has no engine %q", e.env.Extension, name).
		WithHint("an operator adds it to engines in the config of %s", e.env.Extension)
}

// where are the hosts that a handle may mean.
func (e *extension) where(h sandboxer.Handle) ([]*host, error) {
	if h.Host != "" {
		ho, err := e.host(h.Host)
		return []*host{ho}, err
	}
	var all []*host
	for _, n := range e.names {
		all = append(all, e.hosts[n])
	}
	return all, nil
}
