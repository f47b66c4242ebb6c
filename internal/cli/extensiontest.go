package cli

import (
	"bufio"
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/catalog"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
)

type extensionTestOptions struct {
	f       *factory
	file    string
	run     string
	profile string
	image   string
	inputs  []string
	listen  string
	timeout time.Duration
	suite   string // directory of the run: this process is the suite
}

// suiteFlag makes the command the suite itself: its process prints the output of package testing.
const suiteFlag = "as-suite"

func newCmdExtensionTest(f *factory) *cobra.Command {
	o := &extensionTestOptions{f: f}
	c := &cobra.Command{
		Use: "test FILE", Short: "Run the conformance suite against an extension", Args: wants(1, 1, "the file of one extension"),
		Long: "Open the extension in FILE like a server, with a separate state directory, make sandboxes with it, and check it against\n" +
			"the contract of extensions. All sandboxes are removed at the end, also after an interrupt. The suite tests the\n" +
			"capabilities that the extension declares and skips the others.",
		Example: "  sandboxer extension test ext.my-backend.yaml\n  sandboxer extension test ext.my-backend.yaml --run 'core/teardown|exec' -o json",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.file = args[0]
			if o.suite != "" {
				return suiteRun(cmd.Context(), o)
			}
			return extensionTestRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.StringVar(&o.run, "run", "", "only tests whose group/behaviour this `PATTERN` matches, as go test -run takes one")
	fl.StringVar(&o.profile, "profile", "", "make sandboxes from this `PROFILE`")
	fl.StringVar(&o.image, "image", "", "make them from this `IMAGE`")
	fl.StringArrayVar(&o.inputs, "input", nil, "give them this input, `KEY=VALUE`; may be repeated")
	fl.StringVar(&o.listen, "listen", "", "shell `COMMAND` that echoes connections to port $1 inside, where the extension can dial")
	o.timeout = 30 * time.Minute
	fl.Var((*durationFlag)(&o.timeout), "timeout", "stop after this `DURATION`")
	fl.StringVar(&o.suite, suiteFlag, "", "")
	_ = fl.MarkHidden(suiteFlag)
	return c
}

// suiteName is the root of the suite's tests.
const suiteName = "Extension"

// A testResult is how one test of the suite ended.
type testResult struct {
	Test    string  `json:"test"`   // group/behaviour
	Result  string  `json:"result"` // pass, fail or skip
	Seconds float64 `json:"seconds"`
	Output  string  `json:"output,omitempty"` // of what failed or was skipped
}

func extensionTestRun(ctx context.Context, o *extensionTestOptions) error {
	if _, err := regexp.Compile(o.run); err != nil {
		return sandboxer.E(sandboxer.Invalid, nil, "--run %q is not a pattern: %s", o.run, err)
	}
	c, e, err := o.extension()
	if err != nil {
		return err
	}
	if _, err := o.spec(c, e); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "sandboxer-test-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	args := []string{"extension", "test", o.file, "--" + suiteFlag, dir, "--run", o.run, "--profile", o.profile, "--image", o.image, "--listen", o.listen}
	for _, in := range o.inputs {
		args = append(args, "--input", in)
	}
	cmd := subprocess.Command(limited, subprocess.Self, self, args...)
	cmd.Dir = "" // the file's name may be relative
	cmd.Args[0] = os.Args[0]
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is for this process alone
	hold, err := cmd.StdinPipe()                          // its end stops the suite, also where this process is killed
	if err != nil {
		return err
	}
	p := o.f.progress()
	defer p.stop()
	cmd.Cancel = func() error {
		p.note("removing the sandboxes of the suite; a second interrupt does not wait for that")
		return hold.Close()
	}
	cmd.WaitDelay = cleanupTime + 10*time.Second
	said := &capture.Last{Max: 64 << 10}
	cmd.Stderr = said
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	result := &testResults{f: o.f, p: p}
	broken := result.read(out)
	ended := cmd.Wait()
	p.stop()
	if limited.Err() != nil {
		if err := result.end(); err != nil {
			return err
		}
		for _, line := range result.left {
			o.f.warn("%s", line)
		}
		if code := cmd.ProcessState.ExitCode(); code < 0 || code == suiteLeft {
			o.f.warn("the suite was stopped and did not end within %s: its sandboxes may be left", cleanupTime)
		}
		if ctx.Err() != nil {
			return sandboxer.E(sandboxer.Canceled, ctx.Err(), "interrupted after %s", result.count())
		}
		return sandboxer.E(sandboxer.Timeout, nil, "the suite did not end within %s: it was stopped after %s", o.timeout, result.count()).WithHint("run a part of it (--run), or give it more time (--timeout)")
	}
	why := strings.TrimPrefix(strings.TrimSpace(said.String()), "error: ")
	if len(result.all) == 0 {
		why = cmp.Or(why, broken)
		if why == "" && ended == nil {
			return sandboxer.E(sandboxer.NotFound, nil, "no test of the suite matches %q", o.run)
		}
		return sandboxer.E(sandboxer.Failed, ended, "the suite could not begin: %s", cleanLines(why))
	}
	if err := result.end(); err != nil {
		return err
	}
	failed, passed := result.of("fail"), result.of("pass")
	if failed == 0 && ended != nil {
		return sandboxer.E(sandboxer.Failed, ended, "the suite broke after %s: %s", result.count(), cleanLines(cmp.Or(why, broken)))
	}
	if failed > 0 {
		return &exitError{1, fmt.Errorf("%d of %d tests failed", failed, failed+passed)}
	}
	return nil
}

func testView() view[testResult] {
	return view[testResult]{
		cols: []string{"TEST", "RESULT", "SECONDS", "WHY"},
		row: func(r testResult) []string {
			return []string{r.Test, r.Result, fmt.Sprintf("%.2f", r.Seconds), strings.Join(strings.Fields(r.Output), " ")}
		},
		name: func(r testResult) string { return r.Test },
	}
}

var resultLine = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): ` + suiteName + `/(\S+) \(([0-9.]+)s\)$`)

// stopLine is what a suite prints when it is stopped. A test that fails afterwards may do so for that reason.
const stopLine = "=== STOP"

// cleanupTime is how long a stopped suite may take to remove what it made, and suiteLeft its code if that was too short.
const (
	cleanupTime = 2 * time.Minute
	suiteLeft   = 3
)

// maxOutput bounds how much of one test's output is kept.
const maxOutput = 8 << 10

// testResults are the results so far. Line formats print each result as it comes, the others print one document at the end.
type testResults struct {
	f    *factory
	p    *progress
	all  []testResult
	left []string // what a stopped suite could not remove
	err  error    // of what was printed
}

// read reads the output of package testing for programs (-test.v=test2json), until the end, and returns the suite's output
// outside of its tests. A group that has tests is a result only if it fails itself.
func (l *testResults) read(r io.Reader) string {
	said := map[string]string{}
	groups := map[string]bool{}
	var current string
	var stopped bool
	br := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := br.ReadString('\n')
		if text, mark := strings.CutPrefix(strings.TrimRight(line, "\n"), "\x16"); mark {
			if m := resultLine.FindStringSubmatch(text); m != nil {
				var seconds float64
				_, _ = fmt.Sscan(m[3], &seconds)
				l.add(testResult{Test: m[2], Result: strings.ToLower(m[1]), Seconds: seconds, Output: said[m[2]]}, groups[m[2]], stopped)
				delete(said, m[2])
			} else if text == stopLine {
				stopped = true
			} else if rest, ok := strings.CutPrefix(text, "=== "); ok {
				verb, name, _ := strings.Cut(rest, " ")
				name = strings.TrimPrefix(strings.TrimSpace(name), suiteName+"/")
				if current = name; verb == "RUN" && strings.Contains(name, "/") {
					for at := strings.LastIndexByte(name, '/'); at > 0; at = strings.LastIndexByte(name[:at], '/') {
						groups[name[:at]] = true
					}
					if l.p.mode == "live" {
						l.p.draw(name)
					}
				}
			}
		} else if text := strings.TrimSpace(strings.TrimRight(line, "\n")); text != "" && len(said[current]) < maxOutput {
			said[current] += text + "\n"
		}
		if err != nil {
			return strings.TrimSpace(said[suiteName])
		}
	}
}

// add takes a result, unless it is a group's, or the test has failed or was skipped because the suite was stopped.
func (l *testResults) add(r testResult, group, stopped bool) {
	switch {
	case r.Result == "pass":
		if r.Output = ""; group {
			return
		}
	case stopped:
		for line := range strings.Lines(r.Output) {
			if strings.Contains(line, extensiontest.AtTheEnd) {
				l.left = append(l.left, strings.TrimSpace(line))
			}
		}
		return
	case group && (r.Result != "fail" || r.Output == ""):
		return
	}
	l.all = append(l.all, r)
	var print func() error
	switch l.f.format() {
	case "table", "wide":
		print = func() error {
			if len(l.all) == 1 {
				if err := printRow(l.f.io.out, testView().cols); err != nil {
					return err
				}
			}
			return printRow(l.f.io.out, testView().row(r))
		}
	case "name", "jsonl":
		print = func() error {
			return printList(l.f, &api.List[testResult]{SchemaVersion: api.SchemaVersion, Items: []testResult{r}}, testView())
		}
	default:
		return
	}
	if err := l.p.above(print); l.err == nil {
		l.err = err
	}
}

// printRow writes a line of the table. Its widths do not depend on later rows.
func printRow(w io.Writer, cells []string) error {
	text := fmt.Sprintf("%-56s  %-6s  %7s  %s", clean(cells[0]), cells[1], cells[2], clean(cells[3]))
	_, err := fmt.Fprintln(w, strings.TrimRight(text, " "))
	return err
}

// end prints the forms that are one document.
func (l *testResults) end() error {
	switch l.f.format() {
	case "table", "wide", "name", "jsonl":
		return l.err
	}
	return printList(l.f, &api.List[testResult]{SchemaVersion: api.SchemaVersion, Items: append([]testResult{}, l.all...)}, testView())
}

// of counts the results of a kind.
func (l *testResults) of(result string) (n int) {
	for _, r := range l.all {
		if r.Result == result {
			n++
		}
	}
	return n
}

// count says how many tests there were, and how many of them failed.
func (l *testResults) count() string {
	text := fmt.Sprintf("%d tests", len(l.all))
	if len(l.all) == 1 {
		text = "1 test"
	}
	if n := l.of("fail"); n > 0 {
		text += fmt.Sprintf(" (%d failed)", n)
	}
	return text
}

// extension reads the catalogue with the file, and returns that and its extension.
func (o *extensionTestOptions) extension() (*catalog.Catalog, catalog.ExtensionFile, error) {
	c, err := o.f.catalog(catalog.Layer{Name: "command line", Files: []string{o.file}})
	if err != nil {
		return nil, catalog.ExtensionFile{}, err
	}
	for _, e := range c.Extensions {
		if e.Origin.File == o.file {
			return c, e, nil
		}
	}
	return nil, catalog.ExtensionFile{}, sandboxer.E(sandboxer.Invalid, nil, "%s declares no extension", o.file).
		WithHint("its name begins with ext., or that of its directory is extensions")
}

// spec is the template of the suite's sandboxes.
func (o *extensionTestOptions) spec(c *catalog.Catalog, e catalog.ExtensionFile) (sandboxer.Spec, error) {
	spec := sandboxer.Spec{Owner: "conformance", Image: o.image, Inputs: map[string]string{}}
	if o.profile != "" {
		p, err := c.Profile(o.profile)
		if err != nil {
			return spec, err
		}
		prof, ok := p.On(e.ID)
		if !ok {
			return spec, sandboxer.E(sandboxer.Invalid, nil, "%s is on %s, and not on %s", p.ID, strings.Join(p.Extensions(), ", "), e.ID)
		}
		spec = sandboxer.Spec{Owner: spec.Owner, Profile: prof, Image: cmp.Or(o.image, prof.Image), Command: prof.Command, Env: prof.Env, Labels: prof.Labels, Limits: prof.Limits,
			Network: prof.Network, Ports: prof.Ports, Workspace: prof.Workspace, User: prof.User, Inputs: maps.Clone(prof.Inputs)}
		if spec.Inputs == nil {
			spec.Inputs = map[string]string{}
		}
	}
	for _, in := range o.inputs {
		k, v, ok := strings.Cut(in, "=")
		if !ok || k == "" {
			return spec, sandboxer.E(sandboxer.Invalid, nil, "--input %q is not key=value", in)
		}
		spec.Inputs[k] = v
	}
	return spec, nil
}

// alternativesOf splits a pattern at each | that is not in brackets.
func alternativesOf(pattern string) (out []string) {
	depth, begin := 0, 0
	for i := 0; i < len(pattern); i++ {
		switch pattern[i] {
		case '\\':
			i++
		case '(', '[':
			depth++
		case ')', ']':
			depth--
		case '|':
			if depth <= 0 {
				out = append(out, pattern[begin:i])
				begin = i + 1
			}
		}
	}
	return append(out, pattern[begin:])
}

// suiteRun runs the suite in this process, and prints as a test's program does. The end of its input stops it.
func suiteRun(ctx context.Context, o *extensionTestOptions) error {
	c, e, err := o.extension()
	if err != nil {
		return err
	}
	spec, err := o.spec(c, e)
	if err != nil {
		return err
	}
	open := func(owner string) (sandboxer.Extension, error) {
		env := e.Env(owner, filepath.Join(o.suite, owner), nil)
		env.Notes = notes.New(env.Dir, e.ID, []byte(owner)) // they go with the directory
		env.Recorded = func(context.Context) ([]sandboxer.Handle, error) { return nil, nil }
		if err := os.MkdirAll(env.Dir, 0o700); err != nil {
			return nil, err
		}
		return e.Adapter.Open(context.Background(), env)
	}
	first, err := open(spec.Owner)
	if err != nil {
		return err
	}
	inputs := e.Adapter.Inputs
	if d, ok := first.(sandboxer.Describer); ok {
		inputs = d.Describe().Inputs
	}
	b := backend.New(e.ID, first, backend.Options{Inputs: inputs})
	can := b.Capabilities()
	if err := b.Close(); err != nil {
		return err
	}
	opening := func(owner string) func(t *testing.T) sandboxer.Extension {
		return func(t *testing.T) sandboxer.Extension {
			ext, err := open(owner)
			if err != nil {
				t.Fatalf("the extension cannot be opened: %v", err)
			}
			return ext
		}
	}
	h := extensiontest.Harness{Open: opening(spec.Owner), Stranger: opening("stranger"), Spec: spec, Inputs: inputs, Want: can, MayRefuseEnv: true}
	if o.listen != "" {
		h.Listen = func(port int) []string { return []string{"sh", "-c", o.listen, "sh", fmt.Sprint(port)} }
	}
	testing.Init()
	run := "^" + suiteName + "$"
	if o.run != "" {
		var each []string // package testing takes alternatives apart first
		for _, alternative := range alternativesOf(o.run) {
			each = append(each, run+"/"+alternative)
		}
		run = strings.Join(each, "|")
	}
	for name, value := range map[string]string{"test.v": "test2json", "test.run": run} {
		if err := flag.Set(name, value); err != nil {
			return err
		}
	}
	if err := flag.CommandLine.Parse(nil); err != nil {
		return err
	}
	signal.Ignore(syscall.SIGPIPE) // its sandboxes are removed even if its output has no reader
	ctx, stop := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, o.f.io.in)
		stop()
	}()
	context.AfterFunc(ctx, func() {
		fmt.Println("\x16" + stopLine)
		time.AfterFunc(cleanupTime, func() { os.Exit(suiteLeft) })
		extensiontest.Stop()
	})
	match := func(pattern, name string) (bool, error) { return regexp.MatchString(pattern, name) }
	testing.Main(match, []testing.InternalTest{{Name: suiteName, F: func(t *testing.T) { extensiontest.Run(t, h) }}}, nil, nil)
	return nil // it has ended the process
}
