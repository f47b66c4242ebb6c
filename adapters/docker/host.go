package docker

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/protocol"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// A host is one engine.
type host struct {
	name     string
	api      *engine.API
	capacity int
	socket   string // Unix socket of this machine, or empty

	looking chan struct{} // held by the call that uses the next two
	known   *engine.Info
	looked  time.Time

	mu sync.Mutex
	// startables are checked images, by ID (startable).
	startables map[string]bool
}

// maxStartables is how many of them are kept.
const maxStartables = 1000

// dialTime bounds the opening of one connection.
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
		conf, err := protocol.TLS(en.CA, en.Cert, en.Key)
		if err != nil {
			return nil, sandboxer.E(sandboxer.KindOf(err), err, "engines: %s: %s", name, sandboxer.Message(err))
		}
		conf.MinVersion = tls.VersionTLS12 // for older engines
		dial = func(ctx context.Context) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTime) // including the handshake
			defer cancel()
			return (&tls.Dialer{NetDialer: d, Config: conf}).DialContext(ctx, "tcp", a.host)
		}
	case "ssh":
		if e.pool == nil {
			if e.pool, err = sshrun.New(sshrun.Options{Config: e.cfg.SSHConfig, Log: e.log}); err != nil {
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

// knownTime is how long an engine's description of itself is used.
const knownTime = time.Minute

// look returns the engine's description.
func (h *host) look(ctx context.Context) (engine.Info, error) {
	select { // one call that asks is enough
	case h.looking <- struct{}{}:
		defer func() { <-h.looking }()
	case <-ctx.Done():
		return engine.Info{}, ctx.Err()
	}
	if h.known != nil && time.Since(h.looked) < knownTime {
		return *h.known, nil
	}
	info, err := h.api.Info(ctx)
	if err != nil {
		return info, err
	}
	if info.OSType != "" && info.OSType != "linux" {
		return info, sandboxer.E(sandboxer.Unsupported, nil, "the engine %s runs containers of %s, and sandboxes are of Linux", h.name, info.OSType)
	}
	h.known, h.looked = &info, time.Now()
	return info, nil
}

// host returns the host of that name.
func (e *extension) host(name string) (*host, error) {
	if h := e.hosts[name]; h != nil {
		return h, nil
	}
	return nil, sandboxer.E(sandboxer.Unavailable, nil, "%s has no engine %q", e.env.Extension, name).
		WithHint("an operator adds it to engines in the config of %s", e.env.Extension)
}

// where returns the host of that name, or all without a name.
func (e *extension) where(name string) (hosts.Set[*host], error) {
	if name == "" {
		return e.hosts, nil
	}
	h, err := e.host(name)
	return hosts.Set[*host]{name: h}, err
}

// here returns the first process of a container if it runs on this machine.
func (h *host) here(c engine.ContainerDetail) (engine.Process, error) {
	if h.socket == "" {
		return engine.Process{}, engine.ErrElsewhere
	}
	return engine.First(c)
}
