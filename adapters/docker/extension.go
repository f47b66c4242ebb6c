package docker

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/usernet"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// extension is the sandboxer.Extension.
type extension struct {
	agent.Capabilities // files, archive, ports, processes and watches; commands and figures are our own

	cfg      Config
	env      sandboxer.Env
	log      *slog.Logger
	names    []string // of hosts, sorted
	hosts    map[string]*host
	pool     *sshrun.Pool // nil without an engine over SSH
	images   *imageStore
	programs program.Finder

	mayFilter bool            // networks of containers on this machine
	resolvers func() []string // for sandboxes, host:port

	connectTime time.Duration // how long a connection to an agent may take to come; tests want less

	mu     sync.Mutex
	agents map[string]*agentClient // by external name
	links  map[string]*link        // by key
	sweeps map[string]*time.Timer  // by host: what is going to be removed there
	work   sync.WaitGroup
	ctx    context.Context // ends with Close
	end    context.CancelFunc
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Placer
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Limiter
	sandboxer.Narrower
	sandboxer.Cacher
	sandboxer.Execer
	sandboxer.Filer
	sandboxer.Archiver
	sandboxer.Dialer
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Pauser
	sandboxer.Renewer
	sandboxer.Networker
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	sandboxer.Pooler
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
	sandboxer.Notifier
	io.Closer
} = (*extension)(nil)

// open asks no engine anything: one that is away is so for its own sandboxes alone. Where none is named, and
// this machine has none, there is nothing to open.
func open(ctx context.Context, env sandboxer.Env, cfg Config) (_ sandboxer.Extension, err error) {
	e := &extension{cfg: cfg, env: env, log: env.Log, hosts: map[string]*host{}, agents: map[string]*agentClient{}, connectTime: connectTime, sweeps: map[string]*time.Timer{},
		links: map[string]*link{}, mayFilter: mayFilter(cfg), resolvers: usernet.HostResolvers()}
	if len(cfg.DNS) > 0 {
		e.resolvers = func() []string { return cfg.DNS }
	}
	e.Open = e.openAgent
	e.ctx, e.end = context.WithCancel(context.WithoutCancel(ctx))
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	defer func() {
		if err != nil {
			e.hideAll()   // with the hosts that there are: mostly it needs none
			_ = e.Close() // there is an error already
		}
	}()
	if !e.programs.Any(agentFile, cfg.Agent) {
		_, err := e.programs.Find(agentFile, "amd64", cfg.Agent)
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	for _, d := range []string{"box", "lock", "agent", "image", "mount"} {
		if err := os.MkdirAll(e.dir(d), 0o700); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the directory of %s cannot be made", env.Extension)
		}
	}
	for _, d := range []string{"box", "agent"} {
		if err := wholefile.Sweep(e.dir(d)); err != nil {
			e.log.Warn("what a former server was writing stays", "extension", env.Extension, "err", err)
		}
	}
	engines := cfg.Engines
	if len(engines) == 0 {
		if err := unix.Access(defaultSocket, unix.W_OK); errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) { // it is tried again
			return nil, sandboxer.E(sandboxer.NotFound, err, "there is no Docker engine on this machine that this account may use (%s)", defaultSocket).
				WithHint("install one, have the account use it, or name others in engines in the config of %s", env.Extension)
		}
		engines = map[string]Engine{"localhost": {Address: "unix://" + defaultSocket}}
	}
	for name, en := range engines {
		h, err := e.newHost(name, en)
		if err != nil {
			return nil, err
		}
		e.hosts[name] = h
		e.names = append(e.names, name)
	}
	slices.Sort(e.names)
	e.hideAll()
	if e.images, err = e.newImageStore(); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the image store cannot be prepared")
	}
	for _, h := range e.hosts { // what a former server had there, which may have died before it removed it
		if _, err := os.Lstat(e.agentNote(h)); err == nil {
			e.sweepSoon(h)
		}
	}
	if err = e.reconnect(); err != nil {
		return nil, err
	}
	return e, nil
}

// Close ends connections and removes what no sandbox needs; sandboxes go on.
func (e *extension) Close() error {
	e.mu.Lock()
	for _, c := range e.agents {
		c.Close()
	}
	var due []*host
	for name, t := range e.sweeps {
		if t.Stop() {
			due = append(due, e.hosts[name])
		}
	}
	clear(e.sweeps)
	e.mu.Unlock()
	for _, h := range due {
		ctx, cancel := context.WithTimeout(e.ctx, closeTime)
		e.sweep(ctx, h)
		cancel()
	}
	e.end()
	e.work.Wait()
	e.mu.Lock()
	links := e.links
	e.links = map[string]*link{}
	e.mu.Unlock()
	for _, l := range links {
		if l.net != nil {
			l.net.Close()
		}
	}
	for _, h := range e.hosts {
		h.api.Close()
	}
	if e.images != nil {
		e.images.store.Close()
	}
	if e.pool != nil {
		return e.pool.Close()
	}
	return nil
}

const (
	// sweepTime is how long what sandboxes share stays on an engine after the last one, for the
	// next.
	sweepTime = time.Minute
	// closeTime is how long removing it may take where the server ends.
	closeTime = 1500 * time.Millisecond
	// undoTime is how long a create that failed may take to remove what it made.
	undoTime = 30 * time.Second
)

func (e *extension) dir(parts ...string) string {
	return filepath.Join(append([]string{e.env.Dir}, parts...)...)
}

// lock excludes everybody else, also other processes of this installation, from changing what
// key names. Locks of what many use, and few remove, are shared.
func (e *extension) lock(ctx context.Context, key string, k filelock.Kind) (*filelock.Lock, error) {
	l, err := filelock.Take(ctx, e.dir("lock", key), k)
	switch {
	case err == nil:
		return l, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	return nil, sandboxer.E(sandboxer.Unavailable, err, "the lock of %s cannot be taken", key)
}

// each asks several engines at once, in turn where there is but one.
func each(hosts []*host, f func(*host) error) error {
	errs := make([]error, len(hosts))
	var wg sync.WaitGroup
	for i, h := range hosts {
		wg.Go(func() { errs[i] = f(h) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
