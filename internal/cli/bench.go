package cli

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/latency"
	"github.com/sand-boxer/sandboxer/internal/measure"
)

// benchDir is where results are kept, in the data directory.
const benchDir = "bench"

type benchOptions struct {
	f         *factory
	offers    []string // profiles and extensions
	inputs    []string
	image     string
	ttl       string
	maxCost   string
	most      sandboxer.Credits // what the run may cost; 0 means anything
	noHistory bool
	cfg       latency.Config
}

func newCmdBench(f *factory) *cobra.Command {
	o := &benchOptions{f: f}
	c := &cobra.Command{
		Use:   "bench [PROFILE|EXTENSION…] [flags] [-- CMD…]",
		Short: "Measure the time until a command in a new sandbox has run",
		Long: "Measure the time to interactive: from just before a create until a probe and CMD (true) have succeeded in the sandbox.\n" +
			"Sandboxes are made one after the other (--sequential), at a steady pace (--staggered) and all at the same time (--burst); without\n" +
			"any count, 100 of each. --pause measures from a resume, --restore from the restore of a snapshot. Several profiles are\n" +
			"measured in turns. Nothing is retried: a failure counts.\n\n" +
			"Every sandbox is destroyed, also after an interrupt; if this program is killed, they expire after --ttl.\n" +
			"The result is kept: see bench ls, bench show and bench compare.",
		Example: "  sandboxer bench --sequential 10 --burst 2,5\n  sandboxer bench local ext.cloud --sequential 10 -- node -v\n" +
			"  sandboxer bench compare 20261121-150405123-x7k2 latest",
		ValidArgsFunction: f.completeProfiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			if dash := cmd.ArgsLenAtDash(); dash >= 0 {
				args, o.cfg.Command = args[:dash], args[dash:]
			}
			o.offers = args
			modes := []string{"sequential", "staggered", "burst", "pause", "restore"}
			if slices.ContainsFunc(modes, cmd.Flags().Changed) && o.cfg.Nothing() {
				return invalid("nothing is to be measured").WithHint("give --sequential, --staggered, --burst, --pause or --restore a count")
			}
			if err := o.check(); err != nil {
				return err
			}
			return benchRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.IntVar(&o.cfg.Sequential, "sequential", 0, "`NUMBER` of each, one after the other")
	fl.IntVar(&o.cfg.Staggered, "staggered", 0, "`NUMBER` of each, launched at a steady pace")
	fl.IntSliceVar(&o.cfg.Burst, "burst", nil, "`NUMBER` of each, all at the same time; several bursts with commas: 10,25,50")
	fl.IntVar(&o.cfg.Pause, "pause", 0, "`NUMBER` of each, paused and resumed")
	fl.StringVar((*string)(&o.cfg.Depth), "depth", "", "`DEPTH` of --pause: freeze, disk or files (default: that of pause)")
	fl.IntVar(&o.cfg.Restore, "restore", 0, "`NUMBER` of each, restored from one snapshot")
	fl.Var((*durationFlag)(&o.cfg.Every), "every", "`DURATION` between two launches of --staggered (default 200ms)")
	fl.BoolVar(&o.cfg.WarmOnly, "warm", false, "only sandboxes that are claimed from the warm pool count; others fail their iteration")
	fl.BoolVar(&o.cfg.NoProbe, "no-probe", false, "leave out the probe, which needs a shell in the sandbox and finds used ones")
	fl.StringVar(&o.image, "image", "", "`IMAGE` in the notation of the backend")
	fl.StringArrayVar(&o.inputs, "input", nil, "the profile's argument `KEY=VALUE`; a local directory is made absolute")
	fl.StringVar(&o.ttl, "ttl", "", "`LIFETIME` of each sandbox if it is not destroyed earlier (default 5m)")
	fl.StringVar(&o.maxCost, "max-cost", "", "refuse if the whole run could cost more than `CREDITS` (SANDBOXER_MAX_COST)")
	fl.BoolVar(&o.noHistory, "no-history", false, "do not keep the result")
	complete(c, "depth", "freeze", "disk", "files")
	c.AddCommand(newCmdBenchLs(f), newCmdBenchShow(f), newCmdBenchCompare(f))
	return c
}

// check finds faults in the flags before anything is started for them.
func (o *benchOptions) check() (err error) {
	if len(o.offers) == 0 {
		set, err := o.f.settings()
		if err != nil {
			return err
		}
		o.offers = []string{set.get("profile")}
	}
	if o.ttl != "" {
		if o.cfg.TTL, err = parseDuration("--ttl", o.ttl); err != nil {
			return err
		}
	}
	if o.most, err = o.f.maxCost(o.maxCost); err != nil {
		return err
	}
	if _, err := keyValues("--input", o.inputs); err != nil {
		return err
	}
	if o.cfg.Depth != "" {
		if err := oneOf("depth of a pause", []string{"freeze", "disk", "files"})(string(o.cfg.Depth)); err != nil {
			return err
		}
	}
	o.cfg.Targets = make([]latency.Target, len(o.offers))
	return o.cfg.Check()
}

func benchRun(ctx context.Context, o *benchOptions) error {
	p := o.f.progress()
	defer p.stop()
	s, err := o.f.connectOrStart(ctx, p)
	if err != nil {
		return err
	}
	defer s.close()
	if err := o.resolve(ctx, s); err != nil {
		return err
	}
	if err := o.afford(ctx, s, p); err != nil {
		return err
	}
	status, err := s.Status(ctx)
	if err != nil {
		return err
	}
	opts := s.opts
	opts.NoRetry = true
	once, err := api.New(s.addr, opts)
	if err != nil {
		return err
	}
	defer once.Close()
	res, err := latency.Run(ctx, once, latency.NewID(time.Now()), o.cfg, latency.Options{
		Cores: runtime.NumCPU(), Clean: s.Client, CPU: measure.CPU, Progress: p.bench,
	})
	p.stop()
	if ctx.Err() != nil {
		return err
	}
	res.Client.Version, res.Client.OS, res.Client.Arch = version(), runtime.GOOS, runtime.GOARCH
	res.Server, res.Local = status.Version, s.local
	if !o.noHistory {
		h, herr := o.f.benchHistory()
		if herr == nil {
			herr = h.Save(res)
		}
		if herr != nil {
			fmt.Fprintln(o.f.io.err, o.f.io.paint("33", "warning:")+" "+clean(sentence(herr)))
		}
	}
	if perr := printBench(o.f, res); perr != nil {
		return perr
	}
	if err != nil {
		return err
	}
	if slices.ContainsFunc(res.Series, func(s latency.Series) bool { return s.Succeeded < s.Count }) {
		return &exitError{exitFindings, nil}
	}
	return nil
}

// bench shows how far a measurement has come.
func (p *progress) bench(x latency.Progress) {
	text := fmt.Sprintf("%s %s %d/%d", strings.TrimPrefix(x.Profile, "profile."), x.Mode, x.Done, x.Count)
	if x.Failed > 0 {
		text += fmt.Sprintf(", %d failed", x.Failed)
	}
	switch p.mode {
	case "json":
		p.json(map[string]any{"bench": map[string]any{"profile": x.Profile, "mode": x.Mode, "done": x.Done, "failed": x.Failed, "count": x.Count}})
	case "live":
		p.draw(clean(text))
	case "plain":
		if x.Done == x.Count {
			p.plain("%s", clean(text))
		}
	}
}

// resolve finds the profiles that are meant.
func (o *benchOptions) resolve(ctx context.Context, s *session) error {
	exts, err := s.Extensions(ctx)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for i, offer := range o.offers {
		id := offer
		if strings.HasPrefix(offer, "ext.") {
			if id, err = profileOf(ctx, s, offer); err != nil {
				return err
			}
		}
		prof, err := s.Profile(ctx, id)
		if err != nil {
			return err
		}
		if seen[prof.ID] {
			return invalid("%s is given twice", prof.ID)
		}
		seen[prof.ID] = true
		inputs, err := keyValues("--input", o.inputs)
		if err == nil {
			var elsewhere error
			if elsewhere, err = localInputs(inputs); s.elsewhere() {
				err = cmp.Or(err, elsewhere)
			}
		}
		if err != nil {
			return err
		}
		levels := []sandboxer.Isolation{prof.Isolation}
		if prof.Isolation == "" {
			if j := slices.IndexFunc(exts.Items, func(e api.Extension) bool { return e.ID == prof.Extension }); j >= 0 {
				levels = exts.Items[j].Isolation
			}
		}
		o.cfg.Targets[i] = latency.Target{
			Order:  api.CreateSandbox{Profile: prof.ID, Image: o.image, Inputs: inputs},
			Shared: slices.Contains(levels, sandboxer.IsolationProcess),
		}
	}
	return nil
}

// profileOf finds the one profile of an extension.
func profileOf(ctx context.Context, s *session, extension string) (string, error) {
	l, err := s.Profiles(ctx)
	if err != nil {
		return "", err
	}
	var ids []string
	for _, p := range l.Items {
		if p.Extension == extension {
			ids = append(ids, p.ID)
		}
	}
	own := "profile." + strings.TrimPrefix(extension, "ext.")
	switch {
	case len(ids) == 0:
		return "", sandboxer.E(sandboxer.NotFound, nil, "no profile offers %s", extension).WithHint("list profiles: sandboxer profile ls")
	case slices.Contains(ids, own):
		return own, nil
	case len(ids) > 1:
		return "", invalid("%s has several profiles", extension).WithHint("name those to be measured: %s", strings.Join(ids, ", "))
	}
	return ids[0], nil
}

// afford refuses targets that cannot be made or would cost too much, before anything is made.
func (o *benchOptions) afford(ctx context.Context, s *session, p *progress) error {
	each := o.cfg.Sandboxes() / len(o.cfg.Targets)
	var sum sandboxer.Credits
	for _, t := range o.cfg.Targets {
		order := t.Order
		order.TTL = o.cfg.TTL
		plan, err := s.Plan(ctx, order)
		if err != nil {
			return err
		}
		sum += plan.Quote.Amount.Std() * sandboxer.Credits(each)
	}
	if o.most > 0 && sum > o.most {
		return sandboxer.E(sandboxer.NoCredit, nil, "%d sandboxes could cost up to $%s, more than the $%s you allow", o.cfg.Sandboxes(), sum, o.most).
			WithHint("make fewer, give them a shorter --ttl, or allow more: --max-cost %s", sum)
	}
	if sum > 0 {
		p.note("%d sandboxes; they could cost up to $%s", o.cfg.Sandboxes(), sum)
	}
	return nil
}
