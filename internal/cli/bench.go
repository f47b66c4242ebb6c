package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
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
	noHistory bool
	cfg       latency.Config
}

func newCmdBench(f *factory, runF func(context.Context, *benchOptions) error) *cobra.Command {
	o := &benchOptions{f: f}
	c := &cobra.Command{
		Use:   "bench [PROFILE|EXTENSION…] [flags] [-- CMD…]",
		Short: "Measure how long sandboxes take until a command in them has answered",
		Long: "Measure the time to interactive: from just before a create until a probe and CMD (true) have ended well in the sandbox.\n" +
			"Sandboxes are made one after the other (--sequential), at a steady pace (--staggered) and all at once (--burst); without\n" +
			"any count, 100 of each. --pause measures from a resume, --restore from the restore of a snapshot. Several profiles are\n" +
			"measured in turns. Nothing is tried twice: a failure counts.\n\n" +
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
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return benchRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.IntVar(&o.cfg.Sequential, "sequential", 0, "so `many` of each, one after the other")
	fl.IntVar(&o.cfg.Staggered, "staggered", 0, "so `many` of each, launched at a steady pace")
	fl.IntSliceVar(&o.cfg.Burst, "burst", nil, "so `many` of each, all at once; several bursts with commas: 10,25,50")
	fl.IntVar(&o.cfg.Pause, "pause", 0, "so `many` of each, paused and resumed")
	fl.StringVar((*string)(&o.cfg.Depth), "depth", "", "`depth` of --pause: freeze, disk or files (default: as pause would)")
	fl.IntVar(&o.cfg.Restore, "restore", 0, "so `many` of each, restored from one snapshot")
	fl.DurationVar(&o.cfg.Every, "every", 0, "`time` between two launches of --staggered (default 200ms)")
	fl.BoolVar(&o.cfg.WarmOnly, "warm", false, "only sandboxes that are claimed from the warm pool count; others fail their iteration")
	fl.BoolVar(&o.cfg.NoProbe, "no-probe", false, "leave out the probe, which needs a shell in the sandbox and finds used ones")
	fl.StringVar(&o.image, "image", "", "`image` in the backend's terms")
	fl.StringArrayVar(&o.inputs, "input", nil, "the profile's argument `key=value`; a local directory is made absolute")
	fl.StringVar(&o.ttl, "ttl", "", "`lifetime` of each sandbox if nobody destroys it (default 5m)")
	fl.StringVar(&o.maxCost, "max-cost", "", "refuse if the whole run could cost more `credits` (SANDBOXER_MAX_COST)")
	fl.BoolVar(&o.noHistory, "no-history", false, "do not keep the result")
	complete(c, "depth", "freeze", "disk", "files")
	c.AddCommand(newCmdBenchLs(f, nil), newCmdBenchShow(f, nil), newCmdBenchCompare(f, nil))
	return c
}

// check finds what is wrong with the flags before anything is started for them.
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
	if _, err := o.most(); err != nil {
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

// most is what the run may cost; 0 means anything.
func (o *benchOptions) most() (sandboxer.Credits, error) {
	set, err := o.f.settings()
	if err != nil {
		return 0, err
	}
	text := cmp.Or(o.maxCost, set.get("max_cost"))
	if text == "" {
		return 0, nil
	}
	c, err := sandboxer.ParseCredits(text)
	if err != nil {
		return 0, invalid("--max-cost: %s", sandboxer.Message(err))
	}
	if c <= 0 {
		return 0, invalid("--max-cost: %q is not a positive amount", text)
	}
	return c, nil
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
			return invalid("%s is to be measured twice", prof.ID)
		}
		seen[prof.ID] = true
		inputs, err := keyValues("--input", o.inputs)
		if err == nil {
			var elsewhere error
			if elsewhere, err = localInputs(inputs); !s.local {
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
		return "", sandboxer.E(sandboxer.NotFound, nil, "no profile offers %s", extension).WithHint("see what there is: sandboxer profile ls")
	case slices.Contains(ids, own):
		return own, nil
	case len(ids) > 1:
		return "", invalid("%s has several profiles", extension).WithHint("name those to be measured: %s", strings.Join(ids, ", "))
	}
	return ids[0], nil
}

// afford refuses what cannot be made or would cost too much, before anything is made.
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
	most, err := o.most()
	if err != nil {
		return err
	}
	if most > 0 && sum > most {
		return sandboxer.E(sandboxer.NoCredit, nil, "%d sandboxes could cost up to $%s, more than the $%s you allow", o.cfg.Sandboxes(), sum, most).
			WithHint("make fewer, give them a shorter --ttl, or allow more: --max-cost %s", sum)
	}
	if sum > 0 {
		p.note("%d sandboxes; they could cost up to $%s", o.cfg.Sandboxes(), sum)
	}
	return nil
}

func (f *factory) benchHistory() (*latency.History, error) {
	s, err := f.settings()
	if err != nil {
		return nil, err
	}
	return latency.NewHistory(filepath.Join(s.get("data_dir"), benchDir)), nil
}

func newCmdBenchLs(f *factory, runF func(context.Context, *plainOptions) error) *cobra.Command {
	o := &plainOptions{f}
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the runs that are kept, newest first", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return benchLsRun(cmd.Context(), o)
		},
	}
}

func benchLsRun(_ context.Context, o *plainOptions) error {
	h, err := o.f.benchHistory()
	if err != nil {
		return err
	}
	all, damaged := h.Results()
	if all == nil && damaged != nil {
		return damaged
	}
	l := &api.List[*latency.Result]{SchemaVersion: api.SchemaVersion, Items: []*latency.Result{}}
	for _, r := range all {
		for i := range r.Series {
			r.Series[i].Iterations = nil // show has them
		}
		l.Items = append(l.Items, r)
	}
	err = printList(o.f, l, view[*latency.Result]{
		cols: []string{"ID", "WHEN", "COMMAND", "MEASURED", "MEDIAN MS"},
		wide: []string{"SERVER", "CORES"},
		row: func(r *latency.Result) []string {
			var what, medians []string
			for _, s := range r.Series {
				what = append(what, fmt.Sprintf("%s %s %d", strings.TrimPrefix(s.Profile, "profile."), s.Mode, s.Count))
				medians = append(medians, millisText(s.TTI.Trimmed.Median))
			}
			return []string{r.ID, ago(r.At), strings.Join(r.Command, " "), strings.Join(what, ", "), strings.Join(medians, ", "), r.Server, strconv.Itoa(r.Client.Cores)}
		},
		name: func(r *latency.Result) string { return r.ID },
	})
	if err != nil {
		return err
	}
	return damaged
}

func (f *factory) completeRuns(most int) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		h, err := f.benchHistory()
		if err != nil || len(args) >= most {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		all, _ := h.Results()
		ids := []string{"latest"}
		for _, r := range all {
			ids = append(ids, r.ID)
		}
		return ids, cobra.ShellCompDirectiveNoFileComp
	}
}

const runHelp = "a run: its ID, the beginning of it, or latest"

func newCmdBenchShow(f *factory, runF func(context.Context, *refOptions) error) *cobra.Command {
	o := &refOptions{f: f}
	return &cobra.Command{
		Use: "show [RUN]", Aliases: []string{"get"}, Short: "Show a run, the latest if none is named", Args: wants(0, 1, runHelp),
		ValidArgsFunction: f.completeRuns(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = "latest"
			if len(args) > 0 {
				o.ref = args[0]
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return benchShowRun(cmd.Context(), o)
		},
	}
}

func benchShowRun(_ context.Context, o *refOptions) error {
	h, err := o.f.benchHistory()
	if err != nil {
		return err
	}
	r, err := h.Result(o.ref)
	if err != nil {
		return err
	}
	return printBench(o.f, r)
}

type benchCompareOptions struct {
	f         *factory
	a, b      string
	failAbove float64
}

func newCmdBenchCompare(f *factory, runF func(context.Context, *benchCompareOptions) error) *cobra.Command {
	o := &benchCompareOptions{f: f}
	c := &cobra.Command{
		Use: "compare A B", Short: "Compare two runs: how many times slower B is than A", Args: wants(2, 2, "two runs, each "+runHelp[2:]),
		ValidArgsFunction: f.completeRuns(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.a, o.b = args[0], args[1]
			if cmd.Flags().Changed("fail-above") && !(o.failAbove > 0) {
				return invalid("--fail-above: %v is not a ratio", o.failAbove).WithHint("write for example 1.25, for a quarter slower")
			}
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			return benchCompareRun(cmd.Context(), o)
		},
	}
	c.Flags().Float64Var(&o.failAbove, "fail-above", 0, "exit with 10 if a median or p95 became more than `ratio` times what it was, or fewer succeeded")
	return c
}

func benchCompareRun(_ context.Context, o *benchCompareOptions) error {
	h, err := o.f.benchHistory()
	if err != nil {
		return err
	}
	a, err := h.Result(o.a)
	if err != nil {
		return err
	}
	b, err := h.Result(o.b)
	if err != nil {
		return err
	}
	c := latency.Compare(a, b)
	switch format := o.f.format(); format {
	case "table", "wide", "name":
		rows := [][]string{{"PROFILE", "MODE", "N", "MEDIAN MS", "RATIO", "P95 MS", "RATIO", "P99 RATIO", "RAW P99 RATIO", "OK", "SCORE"}}
		for _, r := range c.Rows {
			n := strconv.Itoa(r.CountA)
			if r.CountB != r.CountA {
				n += "→" + strconv.Itoa(r.CountB)
			}
			rows = append(rows, []string{strings.TrimPrefix(r.Profile, "profile."), string(r.Mode), n,
				millisText(r.Median.A) + "→" + millisText(r.Median.B), medianRatio(r), millisText(r.P95.A) + "→" + millisText(r.P95.B), ratio(r.P95.Ratio),
				ratio(r.P99.Ratio), ratio(r.RawP99.Ratio), percent(r.Success[0]) + "→" + percent(r.Success[1]), fmt.Sprintf("%.1f→%.1f", r.Score[0], r.Score[1])})
		}
		if err := table(o.f.io.out, rows); err != nil {
			return err
		}
	default:
		if err := printData(o.f.io.out, format, c); err != nil {
			return err
		}
	}
	for _, w := range c.Warnings {
		fmt.Fprintln(o.f.io.err, o.f.io.paint("33", "not alike:")+" "+clean(w))
	}
	if o.failAbove > 0 {
		if len(c.Rows) == 0 {
			return sandboxer.E(sandboxer.Conflict, nil, "%s and %s have nothing in common to compare", c.A, c.B)
		}
		if slices.ContainsFunc(c.Rows, func(r latency.Row) bool { return r.Regressed(o.failAbove) }) {
			return &exitError{exitFindings, nil}
		}
	}
	return nil
}

// printBench writes a run to stdout, and what failed to stderr.
func printBench(f *factory, r *latency.Result) error {
	switch format := f.format(); format {
	case "table", "wide":
		if err := benchTables(f.io.out, r); err != nil {
			return err
		}
	case "name":
		if _, err := fmt.Fprintln(f.io.out, r.ID); err != nil {
			return err
		}
	default:
		if err := printData(f.io.out, format, r); err != nil {
			return err
		}
	}
	for _, s := range r.Series {
		for _, x := range s.Failures {
			fmt.Fprintf(f.io.err, "%s %s %s: %d of %d failed in %s (%s): %s\n", f.io.paint("31", "failed:"), clean(strings.TrimPrefix(s.Profile, "profile.")), s.Mode,
				x.Count, s.Count, x.Step, x.Kind, clean(x.Message))
		}
	}
	if len(r.Left) > 0 {
		fmt.Fprintf(f.io.err, "%s %s\n", f.io.paint("31", "left:"), clean(strings.Join(r.Left, " ")))
	}
	return nil
}

func benchTables(w io.Writer, r *latency.Result) error {
	probe := "after a probe"
	if !r.Probe {
		probe = "without a probe"
	}
	place := "another machine"
	if r.Local {
		place = "the same machine"
	}
	fmt.Fprintf(w, "run %s, %s: %s, %s; client with %d processors, server %s on %s\n\n", r.ID, r.At.Local().Format("2006-01-02 15:04:05 MST"),
		clean(strings.Join(r.Command, " ")), probe, r.Client.Cores, clean(r.Server), place)
	key := func(s latency.Series) []string {
		return []string{strings.TrimPrefix(s.Profile, "profile."), string(s.Mode), strconv.Itoa(s.Count)}
	}
	first := map[string]latency.Millis{} // the median of the profile that others are compared with
	base := ""
	if len(r.Series) > 0 {
		base = r.Series[0].Profile
	}
	group := func(s latency.Series) string { return fmt.Sprint(s.Mode, s.Count) }
	for _, s := range r.Series {
		if s.Profile == base {
			first[group(s)] = s.TTI.Trimmed.Median
		}
	}
	times := [][]string{{"PROFILE", "MODE", "N", "OK", "MEDIAN", "P95", "P99", "RAW P95", "RAW P99", "MAX", "WARM", "SCORE", "RATIO"}}
	spans := [][]string{{"MEDIAN OF", "", "", "CREATE", "ACCEPT", "PROVISION", "READY", "PROBE", "EXEC", "DESTROY", "SNAPSHOT", "PAUSE", "RESUME"}}
	walls := [][]string{{"OVERLAPPING", "", "", "FIRST READY", "LAST READY", "LAST DESTROYED", "READY PER S", "PER S AND CORE", "CLIENT CPU"}}
	some := false // has a series the last three spans
	median := func(x *latency.Summary) string {
		if x == nil {
			return ""
		}
		return millisText(x.Raw.Median)
	}
	for _, s := range r.Series {
		line := func(name string, x latency.Summary, rest ...string) {
			k := key(s)
			k[1] += name
			t, raw := x.Trimmed, x.Raw
			times = append(times, slices.Concat(k, []string{fmt.Sprintf("%d (%s)", s.Succeeded, percent(s.Success)),
				measured(t, t.Median), measured(t, t.P95), measured(t, t.P99), measured(raw, raw.P95), measured(raw, raw.P99), measured(raw, raw.Max)}, rest))
		}
		line("", s.TTI, strconv.Itoa(s.Warm), fmt.Sprintf("%.2f", s.Score), ratio(measure.Times(float64(first[group(s)]), float64(s.TTI.Trimmed.Median))))
		if s.TTIWarm != nil && s.TTICold != nil {
			line(", warm", *s.TTIWarm, strconv.Itoa(s.TTIWarm.Raw.N), "", "")
			line(", cold", *s.TTICold, "0", "", "")
		}
		x := s.Spans
		saved := ""
		if s.Snapshot != nil {
			saved = millisText(s.Snapshot.Took)
			some = true
		}
		some = some || x.Pause != nil
		spans = append(spans, append(key(s), median(x.Create), median(x.Accept), median(x.Provision), median(x.Ready), median(x.Probe), median(x.Exec), median(x.Destroy), saved, median(x.Pause), median(x.Resume)))
		if s.Mode == latency.Staggered || s.Mode == latency.Burst {
			cpu := ""
			if s.ClientCPU != nil {
				cpu = millisText(*s.ClientCPU)
			}
			walls = append(walls, append(key(s), millisText(s.FirstReady), millisText(s.LastReady), millisText(s.LastDestroyed), fmt.Sprintf("%.1f", s.PerSecond), fmt.Sprintf("%.1f", s.PerCore), cpu))
		}
	}
	if err := table(w, times); err != nil {
		return err
	}
	if !some {
		for i := range spans {
			spans[i] = spans[i][:len(spans[i])-3]
		}
	}
	fmt.Fprintln(w)
	if err := table(w, spans); err != nil {
		return err
	}
	if len(walls) > 1 {
		fmt.Fprintln(w)
		if err := table(w, walls); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintln(w, "\nTimes in milliseconds. MEDIAN, P95 and P99 are of what is left when a twentieth is cut off at each end: of 100, P95 is the raw p91.")
	return err
}

// measured is v, or nothing where nothing was measured.
func measured(p latency.Percentiles, v latency.Millis) string {
	if p.N == 0 {
		return ""
	}
	return millisText(v)
}

func millisText(v latency.Millis) string { return measure.Figure(float64(v)) }

func ratio(r float64) string {
	if r == 0 {
		return ""
	}
	return strconv.FormatFloat(r, 'f', 2, 64)
}

// medianRatio is the ratio of the medians, with its bounds where they are known.
func medianRatio(r latency.Row) string {
	if r.MedianHigh == 0 {
		return ratio(r.Median.Ratio)
	}
	return fmt.Sprintf("%s (%s–%s)", ratio(r.Median.Ratio), ratio(r.MedianLow), ratio(r.MedianHigh))
}

func percent(share float64) string {
	return strings.TrimSuffix(strconv.FormatFloat(100*share, 'f', 1, 64), ".0") + "%"
}
