package vmpacker

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// extension is the sandboxer.Extension.
type extension struct {
	// The methods of the agent in a sandbox: agent.Capabilities.
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher

	cfg   Config
	env   sandboxer.Env
	log   *slog.Logger
	pool  *sshrun.Pool
	hosts *sshrun.Registry
	accel accel
	packs builds

	agents agent.Clients // by key of the place

	programs program.Finder
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Placer
	sandboxer.Forgetter
	sandboxer.Checker
	sandboxer.Admitter
	sandboxer.Limiter
	sandboxer.Execer
	sandboxer.Dialer
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Pauser
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
	sandboxer.Narrower
} = (*extension)(nil)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	if err := notes.Move(ctx, env.Notes, filepath.Join(env.Dir, "box"), ".json"); err != nil {
		return nil, err
	}
	e := &extension{cfg: cfg, env: env, log: env.Log, hosts: sshrun.NewRegistry(env.Hosts)}
	inside := agent.Capabilities{Open: e.openAgent}
	e.AgentDialer, e.ProcessManager, e.Watcher = inside, inside, inside
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	for _, d := range []string{"vm", "image", "snap"} {
		if err := os.MkdirAll(e.dir(d), 0o700); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the directory of %s cannot be made", env.Extension)
		}
		if err := wholefile.Sweep(e.dir(d)); err != nil {
			e.log.Warn("unfinished files of a former server could not be removed", "extension", env.Extension, "err", err)
		}
	}
	var err error
	o := sshrun.Options{Config: cfg.SSHConfig, Log: e.log}
	if len(cfg.Images) > 0 {
		o.ConnectTimeout = time.Minute // an emulated machine takes long to agree on keys
	}
	if e.pool, err = sshrun.New(o); err != nil {
		return nil, err
	}
	if len(cfg.Images) > 0 {
		if !managedWorks {
			e.pool.Close()
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "machines are started from images on Linux only").WithHint("take images out of the extension's config")
		}
		e.thawLeftovers(ctx)
	}
	e.collect(ctx)
	return e, nil
}

// Close ends connections; sandboxes continue.
func (e *extension) Close() error {
	_ = e.agents.Close()
	return e.pool.Close()
}

// Without implements sandboxer.Narrower: a machine that is only attached is neither
// saved nor paused, and without its program there is no agent.
func (e *extension) Without() (without []sandboxer.Capability) {
	if len(e.cfg.Images) == 0 {
		without = append(without, sandboxer.CanSnapshot, sandboxer.CanPause)
	}
	if !e.programs.Any(agentFile, e.cfg.Agent) {
		without = append(without, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch)
	}
	return without
}

func (e *extension) dir(parts ...string) string {
	return filepath.Join(append([]string{e.env.Dir}, parts...)...)
}
