package docker

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// extension is the sandboxer.Extension.
type extension struct {
	agent.Capabilities // files, archive, ports, processes and watches; commands and figures are our own

	cfg      Config
	env      sandboxer.Env
	log      *slog.Logger
	hosts    hosts.Set[*host]
	pool     *sshrun.Pool // nil without an engine over SSH
	images   *images.Store
	programs program.Finder

	mayFilter bool            // networks of containers on this machine
	resolvers func() []string // for sandboxes, host:port

	agents      agent.Clients // by external name
	connectTime time.Duration // how long opening a connection to an agent may take; tests use less

	mu     sync.Mutex
	links  map[string]*link       // by key
	sweeps map[string]*time.Timer // by host: pending removals there
	work   sync.WaitGroup
	ctx    context.Context // ends with Close
	end    context.CancelFunc
}

// The compiler checks what the adapter claims, in addition to the methods that only agent.Capabilities has.
var _ interface {
	sandboxer.Extension
	sandboxer.Placer
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Limiter
	sandboxer.Narrower
	sandboxer.Cacher
	sandboxer.Execer
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
	sandboxer.Notifier
	io.Closer
} = (*extension)(nil)

// open calls no engine: one that is away affects only its own sandboxes. If none is configured, and this machine
// has none, open fails.
func open(ctx context.Context, env sandboxer.Env, cfg Config) (_ sandboxer.Extension, err error) {
	if err := cmp.Or(notes.Move(ctx, env.Notes, filepath.Join(env.Dir, "box"), ".json"), notes.Move(ctx, env.Notes, filepath.Join(env.Dir, "agent"), "")); err != nil {
		return nil, err
	}
	e := &extension{cfg: cfg, env: env, log: env.Log, hosts: hosts.Set[*host]{}, connectTime: connectTime, sweeps: map[string]*time.Timer{},
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
			e.hideAll()   // with the present hosts: usually it needs none
			_ = e.Close() // there is an error already
		}
	}()
	if !e.programs.Any(agentFile, cfg.Agent) {
		_, err := e.programs.Find(agentFile, "amd64", cfg.Agent)
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	for _, d := range []string{"image", "mount"} {
		if err := os.MkdirAll(e.dir(d), 0o700); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the directory of %s cannot be made", env.Extension)
		}
	}
	engines := cfg.Engines
	if len(engines) == 0 {
		if err := unix.Access(defaultSocket, unix.W_OK); errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) { // retried later
			return nil, sandboxer.E(sandboxer.NotFound, err, "there is no Docker engine on this machine that this account may use (%s)", defaultSocket).
				WithHint("install one, give this account access to it, or name other engines in the config of %s", env.Extension)
		}
		engines = map[string]Engine{"localhost": {Address: "unix://" + defaultSocket}}
	}
	for name, en := range engines {
		h, err := e.newHost(name, en)
		if err != nil {
			return nil, err
		}
		e.hosts[name] = h
	}
	e.hideAll()
	if err = e.openImages(); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the image store cannot be prepared")
	}
	keys, err := env.Notes.List(ctx)
	if err != nil {
		return nil, err
	}
	for _, k := range keys {
		if h := e.hosts[k]; h != nil { // an earlier server may have died before it removed its objects there
			e.sweepSoon(h)
		}
	}
	e.reconnect(keys)
	return e, nil
}

// Close ends connections and removes what no sandbox needs; sandboxes continue.
func (e *extension) Close() error {
	_ = e.agents.Close()
	e.mu.Lock()
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
		e.images.Close()
	}
	if e.pool != nil {
		return e.pool.Close()
	}
	return nil
}

const (
	// sweepTime is how long the shared objects of sandboxes stay on an engine after the last one, for
	// the next.
	sweepTime = time.Minute
	// closeTime is how long that removal may take when the server ends.
	closeTime = 1500 * time.Millisecond
	// undoTime is how long a failed create may take to remove what it made.
	undoTime = 30 * time.Second
)

func (e *extension) dir(parts ...string) string {
	return filepath.Join(append([]string{e.env.Dir}, parts...)...)
}

// tryLock takes a lock only if it is free.
func (e *extension) tryLock(key string) (unlock func(), err error) {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	return e.env.Notes.Lock(done, key)
}

// Without implements sandboxer.Narrower: an image that the engine makes of a container contains what its own runtime wrote.
// gVisor keeps writes in a layer of its own, unless it is configured otherwise. And networks can be changed only if they are
// filtered.
func (e *extension) Without() (without []sandboxer.Capability) {
	if e.cfg.Runtime != "" {
		without = append(without, sandboxer.CanSnapshot)
	}
	if !e.filtersAny() {
		without = append(without, sandboxer.CanNetwork)
	}
	return without
}
