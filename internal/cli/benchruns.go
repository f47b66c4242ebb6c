package cli

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/latency"
	"github.com/sand-boxer/sandboxer/internal/measure"
)

func (f *factory) benchHistory() (*latency.History, error) {
	s, err := f.settings()
	if err != nil {
		return nil, err
	}
	return latency.NewHistory(filepath.Join(s.get("data_dir"), benchDir)), nil
}

func newCmdBenchLs(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the stored runs, newest first", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return benchLsRun(f)
		},
	}
}

func benchLsRun(f *factory) error {
	h, err := f.benchHistory()
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
	err = printList(f, l, view[*latency.Result]{
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

func newCmdBenchShow(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "show [RUN]", Aliases: []string{"get"}, Short: "Show a run (default: the latest)", Args: wants(0, 1, runHelp),
		ValidArgsFunction: f.completeRuns(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			run := "latest"
			if len(args) > 0 {
				run = args[0]
			}
			h, err := f.benchHistory()
			if err != nil {
				return err
			}
			r, err := h.Result(run)
			if err != nil {
				return err
			}
			return printBench(f, r)
		},
	}
}

type benchCompareOptions struct {
	f         *factory
	a, b      string
	failAbove float64
}

func newCmdBenchCompare(f *factory) *cobra.Command {
	o := &benchCompareOptions{f: f}
	c := &cobra.Command{
		Use: "compare A B", Short: "Compare two runs: how many times slower B is than A", Args: wants(2, 2, "two runs, each "+runHelp[2:]),
		ValidArgsFunction: f.completeRuns(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.a, o.b = args[0], args[1]
			if cmd.Flags().Changed("fail-above") && !(o.failAbove > 0) {
				return invalid("--fail-above: %v is not a ratio", o.failAbove).WithHint("write for example 1.25, for a quarter slower")
			}
			return benchCompareRun(cmd.Context(), o)
		},
	}
	c.Flags().Float64Var(&o.failAbove, "fail-above", 0, "exit with 10 if a median or p95 grew to more than `RATIO` times the former one, or fewer succeeded")
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

// printBench writes a run to stdout, and failures to stderr.
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

// measured is v, or "" if nothing was measured.
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
