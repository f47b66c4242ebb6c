// Package fake is a backend that really works and isolates nothing: its sandboxes
// are directories, its commands ordinary processes of this machine. Tests and demos
// use it, and newcomers copy it: fake.go is an adapter as all adapters are, World
// plays the part of the engine, cluster or account behind it.
//
// It has every capability and passes the whole conformance suite. Its configuration, or a
// call while it runs, can make it fail, hang, give wrong answers, lose answers, be late and
// delay its listings (Fault). It can also run in a process of its own, which outlives a
// broker that is killed and keeps a durable log (Serve).
//
// It refuses what it cannot enforce: limits, egress rules, and mounts if it is not root.
// Commands reach whatever the machine reaches, also the sources of mounts, so never give it
// to people you do not trust.
package fake

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"net"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// Config is the extension's `config:` block. The zero Config works.
type Config struct {
	// Server is the socket of a world in another process (Serve); empty means a world
	// of this process, which ends with it.
	Server string `yaml:"server" json:"server,omitempty"`
	// Hosts are the places a sandbox can be put; empty means localhost alone.
	Hosts []string `yaml:"hosts" json:"hosts,omitempty"`
	// Images are the ones that exist; a request for another fails. Empty accepts any.
	Images []string `yaml:"images" json:"images,omitempty"`
	// Capacity bounds the live sandboxes of the world; 0 means no bound.
	Capacity int `yaml:"capacity" json:"capacity,omitempty"`
	// Setup and PerHour are the price, in millionths of a credit. Both 0: no charge
	// known.
	Setup   sandboxer.Credits `yaml:"setup" json:"setup,omitempty"`
	PerHour sandboxer.Credits `yaml:"per_hour" json:"per_hour,omitempty"`
	// MeterPerHour is what the meter counts for an hour, where that is not PerHour.
	MeterPerHour sandboxer.Credits `yaml:"meter_per_hour" json:"meter_per_hour,omitempty"`
	// BillsAfter is how long after the end of a sandbox its final cost is known; 0: never.
	BillsAfter time.Duration `yaml:"bills_after" json:"bills_after,omitempty"`
	// ListDelay is how long listings lag behind the truth.
	ListDelay time.Duration `yaml:"list_delay" json:"list_delay,omitempty"`
	// Revision is what sandboxes are made of; with another value they are made of
	// something else, as with an image that was built again.
	Revision string `yaml:"revision" json:"revision,omitempty"`
	// Agent is the agent's program, which runs inside from the first call that needs it.
	// Empty: agent, processes and watch are gone without.
	Agent string `yaml:"agent" json:"agent,omitempty"`
	// Mounts say what of this machine anybody may mount.
	Mounts mounts.Settings `yaml:"mounts" json:"mounts,omitzero"`
	// Drop lists capabilities to go without.
	Drop []sandboxer.Capability `yaml:"drop" json:"drop,omitempty"`
	// Faults are what goes wrong, from the start. World.Inject adds to them later.
	Faults []Fault `yaml:"faults" json:"faults,omitempty"`

	// Owner is the installation whose sandboxes the extension sees; empty sees all.
	// The adapter takes it from sandboxer.Env.
	Owner string `yaml:"-" json:"-"`
	// Own are the broker's own directories, of which no sandbox has anything mounted. The
	// adapter takes them from sandboxer.Env.
	Own []string `yaml:"-" json:"-"`
}

// Validate reports the first unusable value.
func (c *Config) Validate() error {
	for _, d := range c.Drop {
		if !slices.Contains(sandboxer.Capabilities(), d) {
			return sandboxer.E(sandboxer.Invalid, nil, "drop: there is no capability %q", d)
		}
	}
	if c.Capacity < 0 || c.Setup < 0 || c.PerHour < 0 || c.MeterPerHour < 0 || c.BillsAfter < 0 || c.ListDelay < 0 {
		return sandboxer.E(sandboxer.Invalid, nil, "capacity, setup, per_hour, meter_per_hour, bills_after and list_delay cannot be negative")
	}
	for _, f := range c.Faults {
		if err := f.validate(); err != nil {
			return err
		}
	}
	return c.Mounts.Validate()
}

// Adapter is what package adapters lists.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:  "fake",
	Title: "Processes of this machine, for tests and demos",
	Help: "Sandboxes are directories and ordinary processes: nothing is isolated, everything works. " +
		"Faults can be configured, to test how the broker handles a backend that fails, hangs, gives wrong answers or loses answers.",
	Isolation:    []sandboxer.Isolation{sandboxer.IsolationProcess},
	Pricing:      sandboxer.PricingModels(),
	Capabilities: sandboxer.Capabilities(),
	Inputs: []sandboxer.Input{
		{Name: "repo", Restricted: true, Help: "directory of this machine, absolute, that is copied into the workspace"},
		{Name: "volume", Help: "name of a directory next to the workspace, below volumes, that portable snapshots also keep"},
	},
}, Config{}, open)

func open(ctx context.Context, env sandboxer.Env, cfg Config) (sandboxer.Extension, error) {
	cfg.Owner, cfg.Own = env.Owner, append(slices.Clip(env.Own), env.Dir)
	if cfg.Server == "" {
		e := New(NewWorld(), cfg)
		e.owns = true
		return e, nil
	}
	r := Connect(cfg.Server)
	if _, err := r.Live(ctx); err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "no fake world answers on %s", cfg.Server).
			WithHint("start one: fakeworld -socket %s", cfg.Server)
	}
	return newExtension(r, cfg), nil
}

// Extension is the fake's sandboxer.Extension.
type Extension struct {
	agent.Capabilities // processes, watch and the agent itself; the rest is our own

	cfg    Config
	world  world
	faults *faults
	owns   bool // the world ends with the extension

	agents agent.Clients // by Object.Ref
}

// The compiler checks what the adapter claims.
var _ interface {
	sandboxer.Extension
	sandboxer.Placer
	sandboxer.Admitter
	sandboxer.Execer
	sandboxer.Filer
	sandboxer.Archiver
	sandboxer.Dialer
	sandboxer.Exposer
	sandboxer.Prober
	sandboxer.Discoverer
	sandboxer.Lister
	sandboxer.Snapshotter
	sandboxer.Quoter
	sandboxer.Meter
	sandboxer.Pauser
	sandboxer.Renewer
	sandboxer.CapacityReporter
	sandboxer.StatsReader
	sandboxer.Networker
	sandboxer.Pooler
	sandboxer.Checkpointer
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
	sandboxer.Notifier
	sandboxer.Narrower
} = (*Extension)(nil)

// New returns an extension of w. Several extensions of one world see the same
// sandboxes, as several processes of the broker would.
func New(w *World, cfg Config) *Extension { return newExtension(w, cfg) }

func newExtension(w world, cfg Config) *Extension {
	if len(cfg.Hosts) == 0 {
		cfg.Hosts = []string{"localhost"}
	}
	e := &Extension{cfg: cfg, world: w, faults: newFaults(cfg.Faults)}
	e.Open = e.openAgent
	return e
}

// Close ends a world that the adapter made for this extension alone; any other
// world lives on.
func (e *Extension) Close() error {
	_ = e.agents.Close() // the agents live on
	switch w := e.world.(type) {
	case *World:
		if e.owns {
			return w.Close()
		}
	case *Remote:
		w.Close()
	}
	return nil
}

// Inject makes things go wrong from now on, for this extension alone: others of the same world go on.
func (e *Extension) Inject(faults ...Fault) { e.faults.add(faults...) }

// Without implements sandboxer.Narrower.
func (e *Extension) Without() []sandboxer.Capability {
	if e.cfg.Agent == "" {
		return append(slices.Clip(e.cfg.Drop), sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch)
	}
	return e.cfg.Drop
}

// Place implements sandboxer.Placer: the host that is asked for, or else the first one that
// can be reached.
func (e *Extension) Place(ctx context.Context, spec sandboxer.Spec, avoid []string) (host string, err error) {
	if err := e.checkHost(spec.Host); err != nil {
		return "", err
	}
	err = e.call(ctx, VerbPlace, spec.ID, func(Fault) error {
		hosts := e.cfg.Hosts
		if spec.Host != "" {
			hosts = []string{spec.Host}
		}
		var away []string
		if len(hosts) > 1 { // of one alone Provision says the same
			var err error
			if away, err = e.world.unreachable(ctx, hosts); err != nil {
				return err
			}
		}
		i := slices.IndexFunc(hosts, func(h string) bool { return !slices.Contains(avoid, h) && !slices.Contains(away, h) })
		if i < 0 {
			return sandboxer.E(sandboxer.Unavailable, nil, "none of the fake's hosts can take another sandbox (%s)", strings.Join(hosts, ", ")).
				WithHint("make a host available again")
		}
		host = hosts[i]
		return nil
	})
	return host, err
}

// Provision implements sandboxer.Extension.
func (e *Extension) Provision(ctx context.Context, spec sandboxer.Spec) (h sandboxer.Handle, err error) {
	if err := e.check(spec); err != nil {
		return h, err
	}
	return e.provision(ctx, VerbProvision, createRequest{Spec: spec})
}

// provision makes the sandbox, from a snapshot or a checkpoint if or names one.
func (e *Extension) provision(ctx context.Context, verb Verb, or createRequest) (h sandboxer.Handle, err error) {
	or.Env, or.Mounts, or.Own = or.Spec.Env, e.cfg.Mounts, e.cfg.Own
	or.Host, or.Capacity = cmp.Or(or.Spec.Place, or.Spec.Host, e.cfg.Hosts[0]), e.cfg.Capacity
	err = e.call(ctx, verb, or.Spec.ID, func(f Fault) error {
		or.Late, or.Twice = f.Late, f.Twice
		o, err := e.world.create(ctx, or)
		if err != nil {
			return err
		}
		h = o.handle()
		if f.Lie {
			h.SandboxID += "x"
		}
		return nil
	})
	return h, err
}

// WaitReady implements sandboxer.Extension.
func (e *Extension) WaitReady(ctx context.Context, h sandboxer.Handle) (r sandboxer.Reachability, err error) {
	err = e.call(ctx, VerbWaitReady, h.SandboxID, func(f Fault) error {
		if f.Lie {
			return nil
		}
		o, err := e.find(ctx, h)
		if err != nil {
			return err
		}
		if o.OOMKilled {
			return sandboxer.E(sandboxer.Failed, nil, "sandbox %s used more memory than its limit and was killed", h.SandboxID)
		}
		if o.Exited != "" {
			return sandboxer.E(sandboxer.Failed, nil, "the main process of %s ended: %s", h.SandboxID, o.Exited)
		}
		r.Host, r.RemoteDir = o.Host, o.workspace()
		for _, p := range o.Spec.Ports {
			r.Ports = append(r.Ports, sandboxer.Port{Port: p, Addr: loopback(p)})
		}
		return nil
	})
	return r, err
}

// Teardown implements sandboxer.Extension.
func (e *Extension) Teardown(ctx context.Context, h sandboxer.Handle) (r sandboxer.CleanupReport, err error) {
	err = e.call(ctx, VerbTeardown, h.SandboxID, func(f Fault) error {
		if f.Lie {
			return nil
		}
		removed, err := e.world.remove(ctx, e.query(h))
		for _, o := range removed {
			r.Removed = append(r.Removed, o.Ref)
			for _, m := range o.Spec.Mounts {
				r.Kept = append(r.Kept, m.Source+", which was mounted")
			}
		}
		return err
	})
	return r, err
}

// Exec implements sandboxer.Execer.
func (e *Extension) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (x sandboxer.Exit, err error) {
	if cmd.Service != "" {
		return x, sandboxer.E(sandboxer.Invalid, nil, "sandbox %s has no service %q", h.SandboxID, cmd.Service)
	}
	err = e.call(ctx, VerbExec, h.SandboxID, func(f Fault) error {
		if f.Lie {
			return nil
		}
		o, err := e.use(ctx, h)
		if err == nil {
			err = running(o)
		}
		if err != nil {
			return err
		}
		c, err := newCommand(o, cmd)
		if se := (*sandboxer.StartError)(nil); errors.As(err, &se) {
			x = se.Exit(cmd)
			return nil
		}
		if err != nil {
			return err
		}
		// A teardown or a pause that began meanwhile may have overlooked the new process.
		oom := false
		x, err = c.run(ctx, func() error {
			if f.OOM {
				oom = true
				_, err := e.world.oomKill(ctx, h.SandboxID)
				return err
			}
			o, err := e.find(ctx, h)
			if err != nil {
				return err
			}
			return running(o)
		})
		if x.Signal == "KILL" && err == nil {
			o, err := e.find(context.WithoutCancel(ctx), h)
			if sandboxer.KindOf(err) == sandboxer.NotFound { // the broker has removed it already
				o, err = e.world.ended(context.WithoutCancel(ctx), e.query(h))
			}
			x.OOMKilled = oom || err == nil && o.OOMKilled
		}
		if spent := c.cpu(); spent > 0 {
			e.world.spend(context.WithoutCancel(ctx), spending{e.query(h), spent})
		}
		return err
	})
	return x, err
}

// The methods of sandboxer.Filer are in files.go, those of sandboxer.Archiver in
// archive.go.

// Dial implements sandboxer.Dialer. Sandboxes share the machine's ports: a port is
// the sandbox's if one of its processes listens on it.
func (e *Extension) Dial(ctx context.Context, h sandboxer.Handle, port int) (c net.Conn, err error) {
	err = e.call(ctx, VerbDial, h.SandboxID, func(Fault) error {
		o, err := e.use(ctx, h)
		if err != nil {
			return err
		}
		c, err = dial(ctx, o, port)
		return err
	})
	return c, err
}

// Expose implements sandboxer.Exposer.
func (e *Extension) Expose(ctx context.Context, h sandboxer.Handle, port int) (p sandboxer.Endpoint, err error) {
	err = e.call(ctx, VerbExpose, h.SandboxID, func(Fault) error {
		_, err := e.find(ctx, h)
		p.URL = "http://" + loopback(port)
		return err
	})
	return p, err
}

// IsAlive implements sandboxer.Prober.
func (e *Extension) IsAlive(ctx context.Context, h sandboxer.Handle) (l sandboxer.Liveness, err error) {
	l = sandboxer.Unknown
	err = e.call(ctx, VerbProbe, h.SandboxID, func(f Fault) error {
		o, err := e.find(ctx, h)
		switch gone := sandboxer.KindOf(err) == sandboxer.NotFound; {
		case o.OOMKilled && !f.Lie:
			l = sandboxer.OOMKilled
		case err != nil && !gone:
			return err
		case gone != f.Lie:
			l = sandboxer.Gone
		case f.Silent && !gone:
			l = sandboxer.Unresponsive
		default:
			l = sandboxer.Alive
		}
		return nil
	})
	if err != nil {
		return sandboxer.Unknown, err
	}
	return l, nil
}

// Discover implements sandboxer.Discoverer.
func (e *Extension) Discover(ctx context.Context, id string) (found sandboxer.Found, err error) {
	err = e.call(ctx, VerbDiscover, id, func(f Fault) error {
		o, err := e.find(ctx, sandboxer.Handle{SandboxID: id})
		if err == nil && f.Lie {
			err = sandboxer.E(sandboxer.NotFound, nil, "there is no sandbox %s", id)
		}
		found = sandboxer.Found{Handle: o.handle(), Fuse: o.Fuse}
		return err
	})
	if err != nil {
		return sandboxer.Found{}, err
	}
	return found, nil
}

// ListRunning implements sandboxer.Lister.
func (e *Extension) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		var found []Object
		err := e.call(ctx, VerbList, "", func(f Fault) (err error) {
			found, err = e.world.list(ctx, listing{Owner: owner, Lag: e.cfg.ListDelay})
			switch {
			case f.Lie:
				found = nil
			case f.Twice:
				found = append(found, found...)
			}
			return err
		})
		if err != nil {
			yield(sandboxer.Handle{}, err)
			return
		}
		for _, o := range found {
			if !yield(o.handle(), nil) {
				return
			}
		}
		if len(e.cfg.Hosts) == 1 {
			return
		}
		away, err := e.world.unreachable(ctx, e.cfg.Hosts)
		if err == nil && len(away) > 0 {
			err = hostAway(away)
		}
		if err != nil {
			yield(sandboxer.Handle{}, err)
		}
	}
}

// Notify implements sandboxer.Notifier.
func (e *Extension) Notify(ctx context.Context, owner string) (seq iter.Seq2[string, error], err error) {
	err = e.call(ctx, VerbNotify, "", func(Fault) error {
		n, err := e.world.news(ctx, newsQuery{Owner: owner, After: -1})
		if err != nil {
			return err
		}
		seq = func(yield func(string, error) bool) {
			for last := n.Last; ; {
				n, err := e.world.news(ctx, newsQuery{Owner: owner, After: last})
				if err != nil {
					yield("", err)
					return
				}
				for _, id := range n.IDs {
					if !yield(id, nil) {
						return
					}
				}
				last = n.Last
			}
		}
		return nil
	})
	return seq, err
}

// Snapshot implements sandboxer.Snapshotter: it saves the sandbox's files while its
// processes are stopped.
func (e *Extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (s sandboxer.Snapshot, err error) {
	err = e.call(ctx, VerbSnapshot, h.SandboxID, func(f Fault) error {
		s, err = e.world.save(ctx, saving{e.query(h), id})
		return err
	})
	return s, err
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (e *Extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (h sandboxer.Handle, err error) {
	if err := e.check(spec); err != nil {
		return h, err
	}
	return e.provision(ctx, VerbRestore, createRequest{Spec: spec, Snapshot: s.SnapshotID})
}

// DropSnapshot implements sandboxer.Snapshotter.
func (e *Extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	return e.call(ctx, VerbDropSnapshot, "", func(f Fault) error {
		if f.Lie {
			return nil
		}
		_, err := e.world.drop(ctx, dropping{e.cfg.Owner, s.SnapshotID})
		return err
	})
}

// ListSnapshots implements sandboxer.Snapshotter.
func (e *Extension) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		var found []sandboxer.FoundSnapshot
		err := e.call(ctx, VerbListSnapshots, "", func(f Fault) (err error) {
			found, err = e.world.saves(ctx, owner)
			if f.Lie {
				found = nil
			}
			return err
		})
		if err != nil {
			yield(sandboxer.FoundSnapshot{}, err)
			return
		}
		for _, s := range found {
			if !yield(s, nil) {
				return
			}
		}
	}
}

// EstimateCost implements sandboxer.Quoter.
func (e *Extension) EstimateCost(ctx context.Context, spec sandboxer.Spec, d time.Duration) (q *sandboxer.MeterQuote, err error) {
	err = e.call(ctx, VerbQuote, spec.ID, func(Fault) error {
		q = e.quote(d)
		return nil
	})
	return q, err
}

// MeterActual implements sandboxer.Meter.
func (e *Extension) MeterActual(ctx context.Context, h sandboxer.Handle, d time.Duration) (u sandboxer.Usage, err error) {
	err = e.call(ctx, VerbMeter, h.SandboxID, func(Fault) error {
		o, err := e.find(ctx, h)
		if sandboxer.KindOf(err) == sandboxer.NotFound && e.cfg.BillsAfter > 0 {
			o, err = e.world.ended(ctx, e.query(h))
		}
		if err != nil {
			return err
		}
		u.At, u.CPU = time.Now(), o.CPU
		until := u.At
		if !o.RemovedAt.IsZero() {
			until, u.Final = o.RemovedAt, u.At.Sub(o.RemovedAt)+1 >= e.cfg.BillsAfter // 1ns is at once
		}
		q := sandboxer.MeterQuote{Setup: e.cfg.Setup, PerHour: cmp.Or(e.cfg.MeterPerHour, e.cfg.PerHour)}
		u.Cost = q.For(until.Sub(o.CreatedAt))
		return nil
	})
	return u, err
}

// Pause implements sandboxer.Pauser.
func (e *Extension) Pause(ctx context.Context, h sandboxer.Handle) error {
	return e.pause(ctx, VerbPause, h, true)
}

// Resume implements sandboxer.Pauser.
func (e *Extension) Resume(ctx context.Context, h sandboxer.Handle) error {
	return e.pause(ctx, VerbResume, h, false)
}

func (e *Extension) pause(ctx context.Context, verb Verb, h sandboxer.Handle, on bool) error {
	return e.call(ctx, verb, h.SandboxID, func(f Fault) error {
		if f.Lie {
			return nil
		}
		_, err := e.world.pause(ctx, pausing{e.query(h), on})
		return err
	})
}

// SetNetwork implements sandboxer.Networker, as far as the fake has networks at all:
// it remembers the policy, and commands reach what the machine reaches.
func (e *Extension) SetNetwork(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
	return e.call(ctx, VerbNetwork, h.SandboxID, func(f Fault) error {
		if f.Lie {
			return nil
		}
		if err := checkNetwork(p); err != nil {
			return err
		}
		_, err := e.world.network(ctx, rewiring{e.query(h), p})
		return err
	})
}

// Basis implements sandboxer.Pooler.
func (e *Extension) Basis(ctx context.Context, spec sandboxer.Spec) (basis string, err error) {
	if err := e.check(spec); err != nil {
		return "", err
	}
	err = e.call(ctx, VerbBasis, spec.ID, func(f Fault) error {
		basis = "revision " + e.cfg.Revision
		sources, err := e.opener().Open(spec)
		if err != nil {
			return err
		}
		defer mounts.Close(sources)
		for _, s := range sources {
			id, err := s.ID()
			if err != nil {
				return sandboxer.E(sandboxer.Unavailable, err, "cannot inspect mount %s", s.Mount.Source)
			}
			basis += " mount " + id
		}
		return nil
	})
	return basis, err
}

// Claim implements sandboxer.Pooler.
func (e *Extension) Claim(ctx context.Context, h sandboxer.Handle, spec sandboxer.Spec) (out sandboxer.Handle, err error) {
	if err := e.check(spec); err != nil {
		return out, err
	}
	err = e.call(ctx, VerbClaim, h.SandboxID, func(f Fault) error {
		o, err := e.world.claim(ctx, claim{e.query(h), spec, spec.Env})
		if err != nil {
			return err
		}
		out = o.handle()
		return nil
	})
	return out, err
}

// Renew implements sandboxer.Renewer.
func (e *Extension) Renew(ctx context.Context, h sandboxer.Handle, until time.Time) error {
	return e.call(ctx, VerbRenew, h.SandboxID, func(f Fault) error {
		if f.Lie {
			return nil
		}
		_, err := e.world.renew(ctx, renewal{e.query(h), until})
		return err
	})
}

// Capacity implements sandboxer.CapacityReporter.
func (e *Extension) Capacity(ctx context.Context, host string) (o sandboxer.HostCapacity, err error) {
	err = e.call(ctx, VerbCapacity, "", func(Fault) error {
		if err := e.checkHost(host); err != nil {
			return err
		}
		o = sandboxer.HostCapacity{Free: -1, Hosts: e.cfg.Hosts, Attrs: map[string]string{"isolation": "none"}}
		if e.cfg.Capacity > 0 {
			all, err := e.world.list(ctx, listing{})
			o.Free = max(0, e.cfg.Capacity-len(all))
			return err
		}
		return nil
	})
	return o, err
}

// Stats implements sandboxer.StatsReader.
func (e *Extension) Stats(ctx context.Context, h sandboxer.Handle) (s sandboxer.Stats, err error) {
	err = e.call(ctx, VerbStats, h.SandboxID, func(Fault) error {
		o, err := e.find(ctx, h)
		if err != nil {
			return err
		}
		s, err = measure(o)
		return err
	})
	return s, err
}

// call is the one way to the world: it lets happen what the faults say.
func (e *Extension) call(ctx context.Context, verb Verb, id string, do func(Fault) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	f, ok := e.faults.take(verb, id)
	if !ok {
		var err error
		if f, err = e.world.fault(ctx, faultQuery{verb, id}); err != nil {
			return err
		}
	}
	return f.around(ctx, verb, do)
}

func (e *Extension) query(h sandboxer.Handle) query {
	return query{Owner: e.cfg.Owner, ID: h.SandboxID, Generation: h.Generation, Host: h.Host, Hosts: e.cfg.Hosts}
}

// find returns the sandbox of h, or NotFound.
func (e *Extension) find(ctx context.Context, h sandboxer.Handle) (Object, error) {
	return e.world.find(ctx, e.query(h))
}

// use is find for those who need its directory to exist.
func (e *Extension) use(ctx context.Context, h sandboxer.Handle) (Object, error) {
	q := e.query(h)
	q.Use = true
	return e.world.find(ctx, q)
}

// running refuses a paused sandbox.
func running(o Object) error {
	if o.Paused {
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused", o.Spec.ID).WithHint("resume it first")
	}
	return nil
}

func (e *Extension) quote(d time.Duration) *sandboxer.MeterQuote {
	if e.cfg.Setup == 0 && e.cfg.PerHour == 0 {
		return nil
	}
	q := sandboxer.MeterQuote{Setup: e.cfg.Setup, PerHour: e.cfg.PerHour, Duration: d}
	q.Amount = q.For(d)
	q.Detail = q.PerHour.String() + " per hour, " + q.Setup.String() + " once"
	return &q
}

func checkNetwork(p sandboxer.NetworkPolicy) error {
	if p.Mode == sandboxer.NetworkAllow {
		return sandboxer.E(sandboxer.Unsupported, nil, "the fake cannot enforce a list of allowed destinations").
			WithHint("choose an extension that isolates, such as ext.local")
	}
	return p.Check()
}

// check refuses what the fake cannot keep, before anything exists.
func (e *Extension) check(spec sandboxer.Spec) error {
	refuse := func(format string, args ...any) error {
		return sandboxer.E(sandboxer.Unsupported, nil, "the fake "+format, args...).
			WithHint("choose an extension that isolates, such as ext.local")
	}
	switch {
	case spec.Limits != sandboxer.Limits{}:
		return refuse("cannot enforce limits")
	case checkNetwork(spec.Network) != nil:
		return checkNetwork(spec.Network)
	case spec.Workspace != "" && (!path.IsAbs(spec.Workspace) || path.Clean(spec.Workspace) != spec.Workspace):
		return sandboxer.E(sandboxer.Invalid, nil, "workspace %q is not a clean absolute path", spec.Workspace)
	case spec.Image != "" && len(e.cfg.Images) > 0 && !slices.Contains(e.cfg.Images, spec.Image):
		return sandboxer.E(sandboxer.Failed, nil, "there is no image %q (there are %s)", spec.Image, strings.Join(e.cfg.Images, ", "))
	}
	if err := inside.CheckRepo(spec); err != nil {
		return err
	}
	if v := spec.Inputs["volume"]; v != "" && (path.Base(v) != v || v == "." || v == "..") {
		return sandboxer.E(sandboxer.Invalid, nil, "input volume: %q is not a plain name", v)
	}
	if spec.User != "" {
		if _, err := credential(spec.User); err != nil {
			return err
		}
	}
	if err := e.checkMounts(spec); err != nil {
		return err
	}
	return e.checkHost(spec.Host)
}

// opener opens what sandboxes mount.
func (e *Extension) opener() *mounts.Opener {
	return &mounts.Opener{Settings: e.cfg.Mounts, Extension: "the fake", Own: e.cfg.Own}
}

// CanMount says, as Unsupported, why no sandbox of the fake can have mounts here; nil if they can. dir is any
// directory.
func CanMount(dir string) error {
	e := &Extension{}
	return e.checkMounts(sandboxer.Spec{Vouched: []string{sandboxer.RestrictedMounts}, Mounts: []sandboxer.Mount{{Source: dir, Target: "/x"}}})
}

// checkMounts refuses what cannot be mounted, as far as that can be told before there is a sandbox.
func (e *Extension) checkMounts(spec sandboxer.Spec) error {
	if len(spec.Mounts) == 0 {
		return nil
	}
	if err := sandboxer.CheckMounts(spec.Mounts, Object{Spec: spec}.inner()); err != nil {
		return err
	}
	sources, err := e.opener().OpenToShow(spec)
	mounts.Close(sources)
	return err
}

// Admit implements sandboxer.Admitter.
func (e *Extension) Admit(spec sandboxer.Spec, name string) error {
	switch {
	case name == "repo" && !strings.Contains(spec.Inputs[name], "://"):
	case name == sandboxer.RestrictedImage && strings.Contains(spec.Image, ":/"):
	case name == sandboxer.RestrictedMounts:
		return e.opener().Admit(spec)
	case name == sandboxer.RestrictedHost:
		return e.checkHost(spec.Host)
	default:
		return nil
	}
	return sandboxer.E(sandboxer.Denied, nil, "%q is a path on the broker's machine, which only an administrator may use", name).
		WithHint("ask for a profile that names it")
}

func (e *Extension) checkHost(host string) error {
	if host != "" && !slices.Contains(e.cfg.Hosts, host) {
		return sandboxer.E(sandboxer.Invalid, nil, "there is no host %q (there are %s)", host, strings.Join(e.cfg.Hosts, ", "))
	}
	return nil
}

func loopback(port int) string { return "127.0.0.1:" + strconv.Itoa(port) }
