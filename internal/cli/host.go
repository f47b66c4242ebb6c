package cli

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// hostDir is where the hosts are written down, in the data directory.
const hostDir = "hosts"

func newCmdHost(f *factory) *cobra.Command {
	return newGroup("host", "Hosts that are reached over SSH: add, probe, drain and remove them", []string{"hosts"},
		newCmdHostLs(f, nil), newCmdHostAdd(f, nil), newCmdHostProbe(f, nil), newCmdHostDrain(f, nil), newCmdHostRm(f, nil))
}

// hosts returns the registry of this machine's broker.
func (f *factory) hosts() (*sshrun.Registry, error) {
	s, err := f.settings()
	if err != nil {
		return nil, err
	}
	return sshrun.NewRegistry(filepath.Join(s.get("data_dir"), hostDir)), nil
}

func hostView() view[*sshrun.Record] {
	facts := func(h *sshrun.Record) sshrun.Facts {
		if h.LastProbe == nil {
			return sshrun.Facts{}
		}
		return *h.LastProbe
	}
	engine := func(h *sshrun.Record) string {
		f := facts(h)
		switch {
		case f.Engine != "":
			return f.Engine + " " + f.EngineVersion
		case f.EngineProblem != "":
			return "none: " + f.EngineProblem
		}
		return ""
	}
	compose := func(h *sshrun.Record) string {
		if f := facts(h); f.Compose != "" {
			return f.Compose + " " + f.ComposeVersion
		}
		return ""
	}
	free := func(h *sshrun.Record) string {
		if f := facts(h); f.DiskFree > 0 {
			return size(f.DiskFree)
		}
		return ""
	}
	where := func(h *sshrun.Record) string {
		if h.Port != 0 {
			return h.Addr + ":" + strconv.Itoa(h.Port)
		}
		return h.Addr
	}
	return view[*sshrun.Record]{
		cols: []string{"NAME", "SSH", "STATE", "ENGINE", "COMPOSE", "DISK FREE"},
		wide: []string{"LABELS", "PROBED"},
		row: func(h *sshrun.Record) []string {
			return []string{h.Name, where(h), string(h.State), engine(h), compose(h), free(h), pairs(h.Labels), moment(facts(h).At, ago)}
		},
		name: func(h *sshrun.Record) string { return h.Name },
		detail: func(h *sshrun.Record) [][2]string {
			f := facts(h)
			rows := [][2]string{{"name", h.Name}, {"ssh", where(h)}, {"state", string(h.State)}}
			for _, k := range h.HostKeys {
				if print, err := sshrun.Fingerprint(k); err == nil {
					rows = append(rows, [2]string{"key", print})
				}
			}
			if h.Capacity > 0 {
				rows = append(rows, [2]string{"capacity", strconv.Itoa(h.Capacity)})
			}
			if h.Only != "" {
				rows = append(rows, [2]string{"only", h.Only})
			}
			rows = append(rows, [2]string{"labels", pairs(h.Labels)}, [2]string{"system", f.System}, [2]string{"engine", engine(h)},
				[2]string{"compose", compose(h)})
			for _, tool := range []string{"tar", "zstd", "rsync", "git"} {
				at := f.Tools[tool]
				if at == "" {
					at = "missing"
				}
				rows = append(rows, [2]string{tool, at})
			}
			return append(rows, [2]string{"processors", strconv.Itoa(f.Processors)}, [2]string{"disk free", free(h)},
				[2]string{"clock", fmt.Sprintf("%+.3f s", f.ClockAhead)},
				[2]string{"latency", time.Duration(f.Latency * float64(time.Second)).Round(10 * time.Microsecond).String()})
		},
	}
}

func newCmdHostLs(f *factory, runF func(context.Context, *plainOptions) error) *cobra.Command {
	o := &plainOptions{f}
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the hosts, with what their last probe told", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return hostLsRun(cmd.Context(), o)
		},
	}
}

func hostLsRun(_ context.Context, o *plainOptions) error {
	reg, err := o.f.hosts()
	if err != nil {
		return err
	}
	all, damaged := reg.Hosts()
	l := &api.List[*sshrun.Record]{SchemaVersion: api.SchemaVersion, Items: []*sshrun.Record{}}
	for i := range all {
		l.Items = append(l.Items, &all[i])
	}
	if err := printList(o.f, l, hostView()); err != nil {
		return err
	}
	return damaged
}

type hostAddOptions struct {
	f           *factory
	rec         sshrun.Record
	fingerprint string
	yes         bool
	transport   string
}

func newCmdHostAdd(f *factory, runF func(context.Context, *hostAddOptions) error) *cobra.Command {
	o := &hostAddOptions{f: f}
	var labels []string
	c := &cobra.Command{
		Use:   "add NAME [SSH-TARGET]",
		Short: "Add a host after its key was looked at, or trust its new key",
		Long: "Add a host under NAME. SSH-TARGET is what one would type after ssh: an alias of ~/.ssh/config, host or user@host;\n" +
			"without it NAME is the target. The key that the host shows is printed and must be trusted: by an answer on the\n" +
			"terminal, by --fingerprint, or unseen by --yes. From then on no other key is accepted. Adding a host again with\n" +
			"another target or key replaces it. It is logged in to before it is written down.",
		Args: wants(1, 2, "a name and a target for ssh"), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.rec.Name, o.rec.Addr = args[0], args[len(args)-1]
			var err error
			if o.rec.Labels, err = keyValues("--label", labels); err != nil {
				return err
			}
			if o.rec.Only != "" {
				if err := oneOf("use of a host", []string{sshrun.OnlyCompose, sshrun.OnlyMachines})(o.rec.Only); err != nil {
					return err
				}
			}
			if o.rec.IdentityFile != "" {
				if o.rec.IdentityFile, err = filepath.Abs(o.rec.IdentityFile); err != nil {
					return invalid("--identity: %q cannot be made absolute", o.rec.IdentityFile)
				}
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return hostAddRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.IntVar(&o.rec.Port, "port", 0, "`port` of its SSH server (default: as ssh would)")
	fl.StringVar(&o.rec.IdentityFile, "identity", "", "`file` with the private key; its name is kept, never its content")
	fl.StringVar(&o.rec.ProxyJump, "jump", "", "`targets` to go through, as ssh -J takes them")
	fl.IntVar(&o.rec.Capacity, "capacity", 0, "`number` of sandboxes at once, at most (default: as the extension says)")
	fl.StringVar(&o.rec.Only, "only", "", "what it is for alone: `compose` projects, or machines, the workspaces of ext.vm-packer (default: both)")
	fl.StringArrayVar(&labels, "label", nil, "label `key=value`")
	fl.StringVar(&o.fingerprint, "fingerprint", "", "trust the key with this `SHA256:…` and no other")
	fl.BoolVar(&o.yes, "yes", false, "trust whatever key it shows now")
	fl.StringVar(&o.transport, "transport", "", "`way` to speak SSH: openssh or native (default: openssh where it is)")
	complete(c, "transport", "openssh", "native")
	complete(c, "only", sshrun.OnlyCompose, sshrun.OnlyMachines)
	return c
}

func hostAddRun(ctx context.Context, o *hostAddOptions) error {
	reg, err := o.f.hosts()
	if err != nil {
		return err
	}
	if o.fingerprint == "" && !o.yes && !o.f.io.inTTY {
		return invalid("nobody can be asked whether the key of host %s is right", o.rec.Name).
			WithHint("add --fingerprint SHA256:… as the host's owner tells it, or --yes to trust it unseen")
	}
	pool, err := sshrun.New(sshrun.Options{Transport: o.transport})
	if err != nil {
		return err
	}
	defer pool.Close()
	p := o.f.progress()
	defer p.stop()
	target := o.rec.Target()
	keys, err := pool.Scan(ctx, target)
	if err != nil {
		return err
	}
	prints := make([]string, len(keys))
	for i, k := range keys {
		if prints[i], err = sshrun.Fingerprint(k); err != nil {
			return err
		}
	}
	switch i := slices.Index(prints, o.fingerprint); {
	case o.fingerprint != "" && i < 0:
		return sandboxer.E(sandboxer.Denied, nil, "host %s shows another key: %s", o.rec.Name, join(prints, ", ")).
			WithHint("ask the host's owner which is right; somebody may be in between")
	case o.fingerprint != "":
		keys = keys[i : i+1]
	case !o.yes:
		p.stop()
		ok, err := ask(o.f.io, "Host %s (%s) shows the key %s. Is it right?", o.rec.Name, o.rec.Addr, join(prints, ", "))
		if err != nil {
			return err
		}
		if !ok {
			return sandboxer.E(sandboxer.Denied, nil, "the key of host %s was not trusted; nothing was written down", o.rec.Name)
		}
	}
	o.rec.HostKeys, o.rec.State, o.rec.AddedAt = keys, sshrun.Active, time.Now().UTC().Truncate(time.Second)
	if before, err := reg.Host(o.rec.Name); err == nil {
		o.rec.State, o.rec.AddedAt = before.State, before.AddedAt
	}
	if err := probeHost(ctx, pool, reg, &o.rec); err != nil {
		return err
	}
	p.done("host %s is trusted with the key %s", o.rec.Name, join(prints, ", "))
	return printOne(o.f, &o.rec, hostView())
}

// probeHost looks at the host and writes down what it told.
func probeHost(ctx context.Context, pool *sshrun.Pool, reg *sshrun.Registry, rec *sshrun.Record) error {
	h, err := pool.Host(rec.Target())
	if err != nil {
		return err
	}
	facts, err := h.Probe(ctx)
	if err != nil {
		return err
	}
	rec.LastProbe = &facts
	return reg.Put(*rec)
}

type hostOptions struct {
	f         *factory
	name      string
	undo      bool
	force     bool
	transport string
}

func newCmdHostProbe(f *factory, runF func(context.Context, *hostOptions) error) *cobra.Command {
	o := &hostOptions{f: f}
	c := &cobra.Command{
		Use: "probe NAME", Short: "Log in to a host and tell what it offers", Args: wants(1, 1, "the name of one host"),
		Long: "Log in to a host and tell what it offers: its key, engine, compose, tools, disk, clock and latency. Nothing is changed there.",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return hostProbeRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.transport, "transport", "", "`way` to speak SSH: openssh or native (default: openssh where it is)")
	complete(c, "transport", "openssh", "native")
	return c
}

func hostProbeRun(ctx context.Context, o *hostOptions) error {
	reg, err := o.f.hosts()
	if err != nil {
		return err
	}
	rec, err := reg.Host(o.name)
	if err != nil {
		return err
	}
	pool, err := sshrun.New(sshrun.Options{Transport: o.transport})
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := probeHost(ctx, pool, reg, &rec); err != nil {
		return err
	}
	return printOne(o.f, &rec, hostView())
}

func newCmdHostDrain(f *factory, runF func(context.Context, *hostOptions) error) *cobra.Command {
	o := &hostOptions{f: f}
	c := &cobra.Command{
		Use: "drain NAME", Short: "Have a host take no new sandbox; those that it has go on", Args: wants(1, 1, "the name of one host"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return hostDrainRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&o.undo, "undo", false, "have it take sandboxes again")
	return c
}

func hostDrainRun(_ context.Context, o *hostOptions) error {
	reg, err := o.f.hosts()
	if err != nil {
		return err
	}
	rec, err := reg.Host(o.name)
	if err != nil {
		return err
	}
	rec.State = sshrun.Draining
	if o.undo {
		rec.State = sshrun.Active
	}
	if err := reg.Put(rec); err != nil {
		return err
	}
	o.f.progress().done("host %s is %s", rec.Name, rec.State)
	return nil
}

func newCmdHostRm(f *factory, runF func(context.Context, *hostOptions) error) *cobra.Command {
	o := &hostOptions{f: f}
	c := &cobra.Command{
		Use: "rm NAME", Aliases: []string{"remove"}, Short: "Forget a drained host", Args: wants(1, 1, "the name of one host"),
		Long: "Forget a host, with the key that it was trusted with. Sandboxes there could no longer be ended, so it must be drained\n" +
			"and its sandboxes destroyed first, of which the database is asked. What is kept there between sandboxes is removed (sandboxer\n" +
			"cache ls). --force forgets the host as it is, and changes nothing there.",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return hostRmRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&o.force, "force", false, "also if it is in use or its record is damaged")
	return c
}

func hostRmRun(ctx context.Context, o *hostOptions) error {
	reg, err := o.f.hosts()
	if err != nil {
		return err
	}
	if !o.force {
		rec, err := reg.Host(o.name)
		if err != nil {
			return err
		}
		if rec.State != sshrun.Draining {
			return sandboxer.E(sandboxer.Conflict, nil, "host %s is in use", o.name).
				WithHint("destroy its sandboxes after: sandboxer host drain %s", o.name)
		}
		if err := o.clear(ctx); err != nil {
			return err
		}
	}
	if err := reg.Remove(o.name); err != nil {
		return err
	}
	o.f.progress().done("forgot host %s", o.name)
	return nil
}

// clear sees to it that nothing of this installation is on the host: sandboxes are told, what
// is kept between them is removed.
func (o *hostOptions) clear(ctx context.Context) error {
	p := o.f.progress()
	defer p.stop()
	s, err := o.f.connectOrEmbed(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	there, err := o.sandboxes(ctx, s)
	if err != nil {
		return err
	}
	if len(there) > 0 {
		return sandboxer.E(sandboxer.Conflict, nil, "host %s has %d sandboxes: %s", o.name, len(there), join(there[:min(len(there), 10)], ", ")).
			WithHint("destroy them first: sandboxer destroy %s", there[0])
	}
	removed, err := s.PruneCaches(ctx, o.name)
	if err == nil && removed.Problem != "" {
		err = sandboxer.E(sandboxer.Unavailable, nil, "%s", removed.Problem)
	}
	if err != nil {
		return sandboxer.E(sandboxer.KindOf(err), err, "what host %s keeps between sandboxes cannot be removed: %s", o.name, sandboxer.Message(err)).
			WithHint("is the host gone for good? then: sandboxer host rm --force %s", o.name)
	}
	if n := len(removed.Items); n > 0 {
		p.note("removed the layers of %d built images that were kept on host %s", n, o.name)
	}
	return nil
}

// sandboxes lists the sandboxes of every tenant that are, or once were and are not proven
// gone, on the host.
func (o *hostOptions) sandboxes(ctx context.Context, s *session) ([]string, error) {
	var there []string
	q := api.SandboxQuery{Limit: sandboxer.MaxPage}
	for sb, err := range everySandbox(ctx, s, q) {
		if err != nil {
			return nil, err
		}
		if sb.Host == o.name || sb.Reachability.Host == o.name {
			there = append(there, sb.ID)
		}
	}
	return there, nil
}
