package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"text/template"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// formats are the values of -o.
var formats = []string{"table", "wide", "json", "jsonl", "yaml", "name", "go-template=…"}

func checkOutput(s string) error {
	if t, ok := strings.CutPrefix(s, "go-template="); ok {
		if _, err := parseTemplate(t); err != nil {
			return invalid("the template cannot be used: %s", strings.TrimPrefix(err.Error(), "template: "))
		}
		return nil
	}
	if slices.Contains(formats[:len(formats)-1], s) {
		return nil
	}
	return invalid("%q is not an output format", s).WithHint("want one of: %s", strings.Join(formats, ", "))
}

func parseTemplate(t string) (*template.Template, error) {
	return template.New("-o").Funcs(template.FuncMap{
		"json": func(v any) (string, error) {
			b, err := encode(v, "")
			return strings.TrimSuffix(string(b), "\n"), err
		},
		"join": func(sep string, v []any) string {
			s := make([]string, len(v))
			for i, x := range v {
				s[i] = fmt.Sprint(x)
			}
			return strings.Join(s, sep)
		},
	}).Parse(t)
}

// A view says how values of one type are shown to people. Machines get the value
// itself, as the API documents it.
type view[T any] struct {
	cols   []string            // headings of the table
	wide   []string            // further ones of -o wide
	row    func(T) []string    // cells of cols, then of wide
	name   func(T) string      // of -o name and -q
	detail func(T) [][2]string // nil shows the name alone
}

// format is the wanted output format.
func (f *factory) format() string {
	if f.flags.quiet {
		return "name"
	}
	if s, err := f.settings(); err == nil {
		return s.get("output")
	}
	return "table"
}

// printList writes a list to stdout.
func printList[T any](f *factory, l *api.List[T], v view[T]) error {
	switch format := f.format(); format {
	case "table", "wide":
		cols := v.cols
		if format == "wide" {
			cols = slices.Concat(v.cols, v.wide)
		}
		rows := [][]string{cols}
		for _, it := range l.Items {
			rows = append(rows, v.row(it)[:len(cols)])
		}
		if err := table(f.io.out, rows); err != nil {
			return err
		}
		if l.NextCursor != "" {
			fmt.Fprintf(f.io.err, "%s there are more: add --cursor %s, or a larger --limit\n", f.io.paint("36", "hint:"), l.NextCursor)
		}
		return nil
	case "name":
		for _, it := range l.Items {
			if _, err := fmt.Fprintln(f.io.out, clean(v.name(it))); err != nil {
				return err
			}
		}
		return nil
	case "jsonl":
		for _, it := range l.Items {
			if err := printJSONLine(f.io.out, it); err != nil {
				return err
			}
		}
		return nil
	default:
		return printData(f.io.out, format, l)
	}
}

// listed asks the server for a list and writes it to stdout.
func listed[T any](ctx context.Context, f *factory, v view[*T], get func(context.Context, *session) (*api.List[T], error)) error {
	s, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	l, err := get(ctx, s)
	if err != nil {
		return err
	}
	return printList(f, pointers(l), v)
}

// shown asks the server for one value and writes it to stdout.
func shown[T any](ctx context.Context, f *factory, v view[T], get func(context.Context, *session) (T, error)) error {
	s, err := f.connect(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	x, err := get(ctx, s)
	if err != nil {
		return err
	}
	return printOne(f, x, v)
}

// printOne writes one value to stdout.
func printOne[T any](f *factory, x T, v view[T]) error {
	format := f.format()
	if v.detail == nil && (format == "table" || format == "wide") {
		format = "name"
	}
	switch format {
	case "table", "wide":
		w := tabwriter.NewWriter(f.io.out, 0, 8, 2, ' ', 0)
		for _, kv := range v.detail(x) {
			if kv[1] == "" {
				continue
			}
			for i, line := range strings.Split(kv[1], "\n") {
				key := kv[0] + ":"
				if i > 0 {
					key = ""
				}
				fmt.Fprintf(w, "%s\t%s\n", key, clean(line))
			}
		}
		return w.Flush()
	case "name":
		_, err := fmt.Fprintln(f.io.out, clean(v.name(x)))
		return err
	default:
		return printData(f.io.out, format, x)
	}
}

// printData writes x in one of the formats for machines.
func printData(w io.Writer, format string, x any) error {
	switch format {
	case "jsonl":
		return printJSONLine(w, x)
	case "json":
		b, err := encode(x, "  ")
		if err == nil {
			_, err = w.Write(b)
		}
		return err
	case "yaml":
		b, err := encode(x, "")
		if err != nil {
			return err
		}
		var doc yaml.Node
		if err := yaml.Unmarshal(b, &doc); err != nil { // JSON is YAML, and keeps its order
			return err
		}
		block(&doc)
		out, err := yaml.Dump(doc.Content[0])
		if err == nil {
			_, err = w.Write(escaped(out, true))
		}
		return err
	}
	t, err := parseTemplate(strings.TrimPrefix(format, "go-template="))
	if err != nil {
		return invalid("the template cannot be used: %s", err)
	}
	b, err := encode(x, "")
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	var doc any
	if err := dec.Decode(&doc); err != nil {
		return err
	}
	var out bytes.Buffer
	if err := t.Execute(&out, doc); err != nil {
		return invalid("the template does not fit the result: %s", strings.TrimPrefix(err.Error(), "template: ")).
			WithHint("fields are named as in -o json")
	}
	if !bytes.HasSuffix(out.Bytes(), []byte("\n")) {
		out.WriteByte('\n')
	}
	_, err = w.Write(out.Bytes())
	return err
}

// block drops JSON's braces and quotes where YAML needs none.
func block(n *yaml.Node) {
	if n.Kind != yaml.ScalarNode || n.Tag != "!!str" {
		n.Style = 0
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!str" {
		switch {
		case strings.ContainsFunc(n.Value, func(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) && r != '\n' }):
			n.Style = yaml.DoubleQuotedStyle
		case plainYAML(n.Value):
			n.Style = 0
		}
	}
	for _, c := range n.Content {
		block(c)
	}
}

// plainYAML reports whether a string needs no quotes.
func plainYAML(s string) bool {
	var n yaml.Node
	if s == "" || yaml.Unmarshal([]byte(s), &n) != nil || len(n.Content) != 1 {
		return false
	}
	return n.Content[0].Kind == yaml.ScalarNode && n.Content[0].Tag == "!!str" && n.Content[0].Value == s
}

func printJSONLine(w io.Writer, x any) error {
	b, err := encode(x, "")
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}

func encode(x any, indent string) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	err := e.Encode(x)
	return escaped(b.Bytes(), false), err
}

func table(w io.Writer, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, r := range rows {
		cells := make([]string, len(r))
		for i, c := range r {
			if cells[i] = clean(c); c == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(tw, strings.Join(cells, "\t"))
	}
	return tw.Flush()
}

func join[S ~string](words []S, sep string) string {
	s := make([]string, len(words))
	for i, w := range words {
		s[i] = string(w)
	}
	return strings.Join(s, sep)
}

func pairs(m map[string]string) string {
	var out []string
	for k, v := range m {
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return strings.Join(out, ",")
}

// ago and until show a time relative to now.
func ago(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return rough(max(0, time.Since(t))) + " ago" // clocks differ
}

func until(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	d := time.Until(t)
	if d < 0 {
		return rough(-d) + " ago"
	}
	return "in " + rough(d)
}

func rough(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// moment shows a time in full with its distance.
func moment(t time.Time, distance func(time.Time) string) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format("2006-01-02 15:04:05 MST") + " (" + distance(t) + ")"
}

// unknown stands for a figure that could not be measured: a negative one.
const unknown = "unknown"

// size shows bytes.
func size(n int64) string {
	if n < 0 {
		return unknown
	}
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, u := float64(n), 0
	for f >= 1024 && u < len(units)-1 {
		f, u = f/1024, u+1
	}
	if f == float64(int64(f)) {
		return fmt.Sprintf("%d%s", int64(f), units[u])
	}
	return fmt.Sprintf("%.1f%s", f, units[u])
}

func limitsText(l sandboxer.Limits) string {
	var out []string
	if l.MilliCPU > 0 {
		out = append(out, fmt.Sprintf("%g CPUs", float64(l.MilliCPU)/1000))
	}
	if l.MemoryBytes > 0 {
		out = append(out, size(l.MemoryBytes)+" memory")
	}
	if l.DiskBytes > 0 {
		out = append(out, size(l.DiskBytes)+" disk")
	}
	if l.PIDs > 0 {
		out = append(out, fmt.Sprintf("%d processes", l.PIDs))
	}
	if l.GPUs > 0 {
		out = append(out, fmt.Sprintf("%d GPUs", l.GPUs))
	}
	return strings.Join(out, ", ")
}

func networkText(n sandboxer.NetworkPolicy) string {
	switch {
	case n.Mode == "":
		return string(sandboxer.NetworkNone)
	case len(n.Allow) > 0:
		return string(n.Mode) + ": " + strings.Join(n.Allow, ", ")
	}
	return string(n.Mode)
}

func mountsText(mounts []sandboxer.Mount) string {
	var out []string
	for _, m := range mounts {
		line := m.Source + " on " + m.Target
		if m.ReadOnly {
			line += ", read-only"
		}
		out = append(out, line)
	}
	return strings.Join(out, "\n")
}

func portsText(ports []int) string {
	var out []string
	for _, n := range ports {
		out = append(out, strconv.Itoa(n))
	}
	return strings.Join(out, " ")
}

// ifSo is yes, or nothing.
func ifSo(b bool) string {
	if b {
		return "yes"
	}
	return ""
}

func consumerText(c sandboxer.Consumer) string {
	s := strings.TrimSpace(c.Kind + " " + c.ID)
	if len(c.Meta) > 0 {
		s += " (" + pairs(c.Meta) + ")"
	}
	return s
}
