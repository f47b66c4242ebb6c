package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/catalog"
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

// suiteFlag makes the command the suite itself: the process that runs it prints what package testing does.
const suiteFlag = "as-suite"

func newCmdExtensionTest(f *factory, runF func(context.Context, *extensionTestOptions) error) *cobra.Command {
	o := &extensionTestOptions{f: f}
	c := &cobra.Command{
		Use: "test FILE", Short: "Run the conformance suite against an extension", Args: wants(1, 1, "the file of one extension"),
		Long: "Open the extension of FILE as a server would, with a directory of its own for what it keeps, make sandboxes with it and see whether it does what the contract\n" +
			"of extensions says. What it makes is removed again. Only what it says that it can do is tested; the rest is skipped.",
		Example: "  sandboxer extension test ext.my-backend.yaml\n  sandboxer extension test ext.my-backend.yaml --run 'core/teardown|exec' -o json",
		RunE: func(cmd *cobra.Command, args []string) error {
			o.file = args[0]
			if runF != nil {
				return runF(cmd.Context(), o)
			}
			if o.suite != "" {
				return suiteRun(o)
			}
			return extensionTestRun(cmd.Context(), o)
		},
	}
	fl := c.Flags()
	fl.StringVar(&o.run, "run", "", "only tests whose group/behaviour this `pattern` matches, as go test -run takes one")
	fl.StringVar(&o.profile, "profile", "", "make sandboxes as this `profile` says")
	fl.StringVar(&o.image, "image", "", "make them of this `image`")
	fl.StringArrayVar(&o.inputs, "input", nil, "give them this input, `key=value`; may be repeated")
	fl.StringVar(&o.listen, "listen", "", "shell `command` that echoes connections to port $1 inside, where the extension can dial")
	fl.DurationVar(&o.timeout, "timeout", 30*time.Minute, "stop after this `duration`")
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
		return sandboxer.E(sandboxer.Invalid, nil, "--run %q is no pattern: %s", o.run, err)
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
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	args := []string{"extension", "test", o.file, "--" + suiteFlag, dir, "--run", o.run, "--profile", o.profile, "--image", o.image, "--listen", o.listen}
	for _, in := range o.inputs {
		args = append(args, "--input", in)
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Args[0] = os.Args[0]
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p := o.f.progress()
	defer p.stop()
	results := readResults(out, func(name string) {
		if p.mode == "live" {
			p.draw(name)
		}
	})
	ended := cmd.Wait()
	p.stop()
	if ctx.Err() != nil {
		return sandboxer.E(sandboxer.Timeout, nil, "the suite did not end within %s", o.timeout).WithHint("run a part of it (--run), or give it more time (--timeout)")
	}
	if len(results) == 0 {
		text := strings.TrimPrefix(strings.TrimSpace(said.String()), "error: ")
		if text == "" && ended == nil {
			return sandboxer.E(sandboxer.NotFound, nil, "no test of the suite matches %q", o.run)
		}
		return sandboxer.E(sandboxer.Failed, ended, "the suite could not begin: %s", cleanLines(text))
	}
	if err := printList(o.f, &api.List[testResult]{SchemaVersion: api.SchemaVersion, Items: results}, testView()); err != nil {
		return err
	}
	var failed, passed int
	for _, r := range results {
		switch r.Result {
		case "fail":
			failed++
		case "pass":
			passed++
		}
	}
	if failed > 0 || ended != nil {
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

// maxOutput bounds what is kept of what one test says.
const maxOutput = 8 << 10

// readResults reads what package testing prints for programs (-test.v=test2json). Groups are results only where
// they have no tests in them.
func readResults(r io.Reader, begun func(name string)) []testResult {
	said := map[string]string{}
	var results []testResult
	var current string
	br := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := br.ReadString('\n')
		if text, mark := strings.CutPrefix(strings.TrimRight(line, "\n"), "\x16"); mark {
			if m := resultLine.FindStringSubmatch(text); m != nil {
				var seconds float64
				_, _ = fmt.Sscan(m[3], &seconds)
				results = append(results, testResult{Test: m[2], Result: strings.ToLower(m[1]), Seconds: seconds})
			} else if rest, ok := strings.CutPrefix(text, "=== "); ok {
				verb, name, _ := strings.Cut(rest, " ")
				name = strings.TrimPrefix(strings.TrimSpace(name), suiteName+"/")
				if current = name; verb == "RUN" && strings.Contains(name, "/") {
					begun(name)
				}
			}
		} else if text := strings.TrimSpace(strings.TrimRight(line, "\n")); text != "" && len(said[current]) < maxOutput {
			said[current] += text + "\n"
		}
		if err != nil {
			break
		}
	}
	groups := map[string]bool{}
	for _, r := range results {
		for at := strings.LastIndexByte(r.Test, '/'); at > 0; at = strings.LastIndexByte(r.Test[:at], '/') {
			groups[r.Test[:at]] = true
		}
	}
	results = slices.DeleteFunc(results, func(r testResult) bool { return groups[r.Test] })
	for i := range results {
		if results[i].Result != "pass" {
			results[i].Output = said[results[i].Test]
		}
	}
	return results
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
		if p.Extension != e.ID {
			return spec, sandboxer.E(sandboxer.Invalid, nil, "%s is on %s, and not on %s", p.ID, p.Extension, e.ID)
		}
		prof := p.Profile
		spec = sandboxer.Spec{Owner: spec.Owner, Profile: prof, Image: cmp.Or(o.image, prof.Image), Command: prof.Command, Env: prof.Env, Labels: prof.Labels, Limits: prof.Limits,
			Network: prof.Network, Ports: prof.Ports, Workspace: prof.Workspace, User: prof.User, Inputs: maps.Clone(prof.Inputs)}
		if spec.Inputs == nil {
			spec.Inputs = map[string]string{}
		}
	}
	for _, in := range o.inputs {
		k, v, ok := strings.Cut(in, "=")
		if !ok || k == "" {
			return spec, sandboxer.E(sandboxer.Invalid, nil, "--input %q is no key=value", in)
		}
		spec.Inputs[k] = v
	}
	return spec, nil
}

// alternativesOf splits a pattern at each | that is in no brackets.
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

// suiteRun runs the suite in this process, and prints as a test's program does.
func suiteRun(o *extensionTestOptions) error {
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
	h := extensiontest.Harness{Open: opening(spec.Owner), Stranger: opening("stranger"), Spec: spec, Inputs: inputs, Want: can}
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
	match := func(pattern, name string) (bool, error) { return regexp.MatchString(pattern, name) }
	testing.Main(match, []testing.InternalTest{{Name: suiteName, F: func(t *testing.T) { extensiontest.Run(t, h) }}}, nil, nil)
	return nil // it has ended the process
}
