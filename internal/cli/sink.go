package cli

import (
	"context"
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func newCmdSink(f *factory) *cobra.Command {
	return newGroup("sink", "Receivers of usage rows: how far they are, and what they refused", nil,
		newCmdSinkLs(f), newCmdSinkShow(f), newCmdSinkReplay(f), newCmdSinkDrop(f))
}

func sinkView() view[*api.Sink] {
	state := func(s *api.Sink) string {
		switch {
		case !s.Declared:
			return "not in sinks.yaml"
		case s.Stopped:
			return "stopped"
		case s.Problem != "":
			return "failing"
		}
		return "ok"
	}
	return view[*api.Sink]{
		cols: []string{"NAME", "STATE", "BEHIND", "DEAD LETTERS", "RECEIVER"},
		wide: []string{"ROW", "PROBLEM"},
		row: func(s *api.Sink) []string {
			return []string{s.Name, state(s), fmt.Sprint(s.Behind), fmt.Sprint(s.DeadLetters), s.URL + s.File, fmt.Sprint(s.Seq), s.Problem}
		},
		name: func(s *api.Sink) string { return s.Name },
		detail: func(s *api.Sink) [][2]string {
			rows := [][2]string{{"name", s.Name}, {"receiver", s.URL + s.File}, {"keys", join(s.Keys, ", ")}, {"state", state(s)}}
			if s.Problem != "" {
				rows = append(rows, [2]string{"problem", s.Problem}, [2]string{"since", s.Since.Local().Format(time.DateTime)})
			}
			rows = append(rows, [2]string{"row", fmt.Sprint(s.Seq)}, [2]string{"behind", fmt.Sprint(s.Behind)}, [2]string{"dead letters", fmt.Sprint(s.DeadLetters)})
			for _, d := range s.Dead {
				rows = append(rows, [2]string{"  row " + fmt.Sprint(d.Seq), d.Reason})
			}
			return rows
		},
	}
}

func newCmdSinkLs(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the receivers of usage rows", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return listed(cmd.Context(), f, sinkView(), func(ctx context.Context, s *session) (*api.List[api.Sink], error) { return s.Sinks(ctx) })
		},
	}
}

func newCmdSinkShow(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show a receiver and its dead letters", Args: wants(1, 1, "the name of one sink"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return shown(cmd.Context(), f, sinkView(), func(ctx context.Context, s *session) (*api.Sink, error) { return s.Sink(ctx, args[0]) })
		},
	}
}

func newCmdSinkReplay(f *factory) *cobra.Command {
	var since string
	c := &cobra.Command{
		Use: "replay NAME", Short: "Deliver dead letters, or old rows, once more", Args: wants(1, 1, "the name of one sink"),
		Long: "Deliver the dead letters of a sink once more, or with --since all usage rows that were written since then. A sink that\n" +
			"answered 410 gets rows again.",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			at, err := parseMoment("--since", since)
			if err != nil {
				return err
			}
			return shown(cmd.Context(), f, sinkView(), func(ctx context.Context, s *session) (*api.Sink, error) {
				return s.ReplaySink(ctx, args[0], api.Replay{Since: at})
			})
		},
	}
	c.Flags().StringVar(&since, "since", "", "a `DAY` such as 2026-11-01 in UTC, or a time in RFC 3339")
	return c
}

func newCmdSinkDrop(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "drop NAME [ROW...]", Short: "Give up dead letters (default: all)", Args: wants(1, 1000, "the name of one sink, and numbers of rows"),
		Long:              "Give up dead letters of a sink: those of the rows, or all. A sink that is not in sinks.yaml any more is forgotten.",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			var d api.Drop
			for _, text := range args[1:] {
				n, err := strconv.ParseInt(text, 10, 64)
				if err != nil || n < 1 {
					return invalid("%q is not the number of a row", text).WithHint("see them with: sandboxer credits sink show %s", args[0])
				}
				d.Rows = append(d.Rows, n)
			}
			return shown(cmd.Context(), f, sinkView(), func(ctx context.Context, s *session) (*api.Sink, error) { return s.DropSink(ctx, args[0], d) })
		},
	}
}

// parseMoment reads a day in UTC or a time; the zero time for no text.
func parseMoment(flag, text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	for _, form := range []string{time.DateOnly, time.RFC3339} {
		if at, err := time.Parse(form, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, invalid("%s: %q is neither a day nor a time", flag, text).WithHint("write it as 2026-11-01 or 2026-11-01T12:00:00Z")
}

type exportOptions struct {
	f                    *factory
	q                    api.UsageQuery
	format, since, until string
}

func newCmdCreditsExport(f *factory) *cobra.Command {
	o := &exportOptions{f: f}
	c := &cobra.Command{
		Use: "export", Short: "Write usage rows to stdout", Args: wants(0, 0, "no arguments"),
		Long: "Write usage rows to stdout, oldest first: what sandboxes used and cost. The format focus has the columns of FOCUS 1.2\n" +
			"(FinOps Open Cost and Usage Specification).",
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.q.Since, err = parseMoment("--since", o.since); err != nil {
				return err
			}
			if o.q.Until, err = parseMoment("--until", o.until); err != nil {
				return err
			}
			return exportRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.format, "format", "csv", "`FORMAT`: csv, jsonl or focus")
	c.Flags().StringVar(&o.q.Tenant, "tenant", "", "only of this `TENANT`")
	c.Flags().StringVar(&o.since, "since", "", "only rows since a `DAY` such as 2026-11-01 in UTC, or a time in RFC 3339")
	c.Flags().StringVar(&o.until, "until", "", "only rows before a `DAY` or time")
	return c
}

// exportRun writes page after page.
func exportRun(ctx context.Context, o *exportOptions) error {
	if err := oneOf("format", []string{"csv", "jsonl", "focus"})(o.format); err != nil {
		return err
	}
	s, err := o.f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	write := exporter(o.f.io.out, o.format)
	o.q.Limit = sandboxer.MaxPage
	if err := write(nil); err != nil {
		return err
	}
	for {
		l, err := s.UsageRows(ctx, o.q)
		if err != nil {
			return err
		}
		if err := write(l.Items); err != nil {
			return err
		}
		if o.q.Cursor = l.NextCursor; o.q.Cursor == "" {
			return nil
		}
	}
}

// A column is one column of an export.
type column struct {
	name string
	of   func(api.UsageRow) string
}

// exporter returns a function that writes rows to out, the heading first.
func exporter(out io.Writer, format string) func([]api.UsageRow) error {
	if format == "jsonl" {
		return func(rows []api.UsageRow) error {
			for _, r := range rows {
				if err := printJSONLine(out, r); err != nil {
					return err
				}
			}
			return nil
		}
	}
	columns := csvColumns()
	if format == "focus" {
		columns = focusColumns()
	}
	w := csv.NewWriter(out)
	headed := false
	return func(rows []api.UsageRow) error {
		line := make([]string, len(columns))
		if !headed {
			headed = true
			for i, c := range columns {
				line[i] = c.name
			}
			_ = w.Write(line) // Error says it
		}
		for _, r := range rows {
			for i, c := range columns {
				line[i] = c.of(r)
			}
			_ = w.Write(line)
		}
		w.Flush()
		return w.Error()
	}
}

// cell keeps text of users from being taken for a formula by programs for tables.
func cell(text string) string {
	if text != "" && (text[0] == '=' || text[0] == '+' || text[0] == '-' || text[0] == '@' || text[0] == '\t' || text[0] == '\r') {
		return "'" + text
	}
	return text
}

func at(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }

// metered is an amount of the meter; empty if there was no reading.
func metered(of func(*api.Usage) int64) func(api.UsageRow) string {
	return func(r api.UsageRow) string {
		if r.Meter == nil {
			return ""
		}
		return strconv.FormatInt(of(r.Meter), 10)
	}
}

func csvColumns() []column {
	return []column{
		{"seq", func(r api.UsageRow) string { return fmt.Sprint(r.Seq) }},
		{"id", func(r api.UsageRow) string { return r.ID }},
		{"type", func(r api.UsageRow) string { return string(r.Type) }},
		{"corrects", func(r api.UsageRow) string { return r.Corrects }},
		{"at", func(r api.UsageRow) string { return at(r.At) }},
		{"tenant", func(r api.UsageRow) string { return cell(r.Tenant) }},
		{"consumer", func(r api.UsageRow) string { return cell(r.Consumer.ID) }},
		{"sandbox", func(r api.UsageRow) string { return r.Sandbox }},
		{"generation", func(r api.UsageRow) string { return fmt.Sprint(r.Generation) }},
		{"profile", func(r api.UsageRow) string { return r.Profile }},
		{"extension", func(r api.UsageRow) string { return r.Extension }},
		{"from", func(r api.UsageRow) string { return at(r.From) }},
		{"until", func(r api.UsageRow) string { return at(r.Until) }},
		{"ran_ns", func(r api.UsageRow) string { return strconv.FormatInt(r.Ran, 10) }},
		{"charged", func(r api.UsageRow) string { return r.Charged.String() }},
		{"cost", func(r api.UsageRow) string { return r.Cost.String() }},
		{"overrun", func(r api.UsageRow) string { return r.Overrun.String() }},
		{"final", func(r api.UsageRow) string { return strconv.FormatBool(r.Final) }},
		{"cpu_ns", metered(func(u *api.Usage) int64 { return u.CPU })},
		{"mib_ms", metered(func(u *api.Usage) int64 { return u.MiBMillis })},
		{"rx_bytes", metered(func(u *api.Usage) int64 { return u.RxBytes })},
		{"tx_bytes", metered(func(u *api.Usage) int64 { return u.TxBytes })},
	}
}
