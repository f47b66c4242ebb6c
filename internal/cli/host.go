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

// hostDir is where the records of hosts are, in the data directory.
const hostDir = "hosts"

func newCmdHost(f *factory) *cobra.Command {
	return newGroup("host", "Hosts that are reached over SSH: add, probe, drain and remove them", []string{"hosts"},
		newCmdHostLs(f), newCmdHostAdd(f), newCmdHostProbe(f), newCmdHostDrain(f), newCmdHostRm(f))
}

// hosts returns the registry of this machine's broker.
func (f *factory) hosts() (*sshrun.Registry, error) {
	s, err := f.settings()
	if err != nil {
		return nil, err
	}
	return sshrun.NewRegistry(filepath.Join(s.get("data_dir"), hostDir)), nil
}

// host returns a host, and the registry that has it.
func (f *factory) host(name string) (*sshrun.Registry, sshrun.Record, error) {
	reg, err := f.hosts()
	if err != nil {
		return nil, sshrun.Record{}, err
	}
	rec, err := reg.Host(name)
	return reg, rec, err
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
			for _, tool := range []string{"tar", "zstd", "git"} {
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

func newCmdHostLs(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the hosts, with the results of their last probe", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return hostLsRun(f)
		},
	}
}

func hostLsRun(f *factory) error {
	reg, err := f.hosts()
	if err != nil {
		return err
	}
	all, damaged := reg.Hosts()
	l := pointers(&api.List[sshrun.Record]{SchemaVersion: api.SchemaVersion, Items: all})
	if err := printList(f, l, hostView()); err != nil {
		return err
	}
	return damaged
}

type hostAddOptions struct {
	f           *factory
	rec         sshrun.Record
	fingerprint string
	yes         bool
}

func newCmdHostAdd(f *factory) *cobra.Command {
	o := &hostAddOptions{f: f}
	var labels []string
	c := &cobra.Command{
		Use:   "add NAME [SSH-TARGET]",
		Short: "Add a host and trust its key, or trust its new key",
		Long: "Add a host under NAME. SSH-TARGET is the destination of ssh: an alias of ~/.ssh/config, host or user@host;\n" +
			"without it NAME is the target. The key that the host shows is printed and must be trusted: by an answer on the\n" +
			"terminal, by --fingerprint, or without a check by --yes. From then on no other key is accepted. Adding a host again with\n" +
			"another target or key replaces it. The host is stored only after a login succeeded.",
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
			return hostAddRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.IntVar(&o.rec.Port, "port", 0, "`PORT` of its SSH server (default: that of ssh)")
	fl.StringVar(&o.rec.IdentityFile, "identity", "", "`FILE` with the private key; only its name is stored")
	fl.StringVar(&o.rec.ProxyJump, "jump", "", "`TARGETS` to go through, as ssh -J takes them")
	fl.IntVar(&o.rec.Capacity, "capacity", 0, "maximum `NUMBER` of sandboxes at the same time (default: that of the extension)")
	fl.StringVar(&o.rec.Only, "only", "", "its only `USE`: compose for projects, or machines for workspaces of ext.vm-packer (default: both)")
	fl.StringArrayVar(&labels, "label", nil, "label `KEY=VALUE`")
	fl.StringVar(&o.fingerprint, "fingerprint", "", "trust the key with this `FINGERPRINT` (SHA256:…) and no other")
	fl.BoolVar(&o.yes, "yes", false, "trust the key that it shows now")
	complete(c, "only", sshrun.OnlyCompose, sshrun.OnlyMachines)
	return c
}

func hostAddRun(ctx context.Context, o *hostAddOptions) error {
	reg, err := o.f.hosts()
	if err != nil {
		return err
	}
	if o.fingerprint == "" && !o.yes && !o.f.io.inTTY {
		return invalid("confirmation is needed that the key of host %s is right, and stdin is not a terminal", o.rec.Name).
			WithHint("add --fingerprint SHA256:… from the host's owner, or --yes to trust the key unseen")
	}
	pool, err := sshrun.New(sshrun.Options{})
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
			return sandboxer.E(sandboxer.Denied, nil, "the key of host %s was not trusted; nothing was stored", o.rec.Name)
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

// probeHost probes the host and records the results.
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

func newCmdHostProbe(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "probe NAME", Short: "Log in to a host and show what it offers", Args: wants(1, 1, "the name of one host"),
		Long: "Log in to a host and show its key, engine, compose, tools, disk, clock and latency. This changes nothing there.",
		RunE: func(cmd *cobra.Command, args []string) error {
			return hostProbeRun(cmd.Context(), f, args[0])
		},
	}
}

func hostProbeRun(ctx context.Context, f *factory, name string) error {
	reg, rec, err := f.host(name)
	if err != nil {
		return err
	}
	pool, err := sshrun.New(sshrun.Options{})
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := probeHost(ctx, pool, reg, &rec); err != nil {
		return err
	}
	return printOne(f, &rec, hostView())
}

func newCmdHostDrain(f *factory) *cobra.Command {
	var undo bool
	c := &cobra.Command{
		Use: "drain NAME", Short: "Stop a host from taking new sandboxes; its sandboxes keep running", Args: wants(1, 1, "the name of one host"),
		RunE: func(cmd *cobra.Command, args []string) error {
			reg, rec, err := f.host(args[0])
			if err != nil {
				return err
			}
			rec.State = sshrun.Draining
			if undo {
				rec.State = sshrun.Active
			}
			if err := reg.Put(rec); err != nil {
				return err
			}
			f.progress().done("host %s is %s", rec.Name, rec.State)
			return nil
		},
	}
	c.Flags().BoolVar(&undo, "undo", false, "let it take sandboxes again")
	return c
}

type hostRmOptions struct {
	f     *factory
	name  string
	force bool
}

func newCmdHostRm(f *factory) *cobra.Command {
	o := &hostRmOptions{f: f}
	c := &cobra.Command{
		Use: "rm NAME", Aliases: []string{"remove"}, Short: "Forget a drained host", Args: wants(1, 1, "the name of one host"),
		Long: "Forget a host and its trusted key. Its sandboxes could no longer be ended, so drain the host and destroy its sandboxes\n" +
			"first; the command refuses while any are left. The caches there (sandboxer cache ls) are removed. --force forgets the\n" +
			"host without these checks and changes nothing there.",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			return hostRmRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&o.force, "force", false, "also if it is in use or its record is damaged")
	return c
}

func hostRmRun(ctx context.Context, o *hostRmOptions) error {
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

// clear checks that no sandbox of this installation is on the host (an error names them), and
// removes the caches there.
func (o *hostRmOptions) clear(ctx context.Context) error {
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
		return sandboxer.E(sandboxer.KindOf(err), err, "the caches on host %s cannot be removed: %s", o.name, sandboxer.Message(err)).
			WithHint("is the host gone for good? then: sandboxer host rm --force %s", o.name)
	}
	if n := len(removed.Items); n > 0 {
		p.note("removed the layers of %d built images that were kept on host %s", n, o.name)
	}
	return nil
}

// sandboxes lists the sandboxes of every tenant that are, or once were and are not proven
// gone, on the host.
func (o *hostRmOptions) sandboxes(ctx context.Context, s *session) ([]string, error) {
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
