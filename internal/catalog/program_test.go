package catalog

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// described is an extension that says what it is.
type described struct {
	sandboxer.Extension
	says sandboxer.Description
}

func (d described) Describe() sandboxer.Description { return d.says }

// processStandIn stands for the adapter of extensions that are programs. says is what they say of themselves; nil if
// that is known only after opening.
func processStandIn(says *sandboxer.Description) sandboxer.Adapter {
	a := sandboxer.Adapter{Kind: "process", Isolation: sandboxer.Isolations(), Pricing: sandboxer.PricingModels(),
		Inputs: []sandboxer.Input{{Name: sandboxer.AnyInput, Restricted: true}}}
	a.Known = func(sandboxer.Env) (d sandboxer.Description, known bool) {
		if says == nil {
			return d, false
		}
		return *says, true
	}
	return a
}

const programHead = "id: ext.p\ncapabilities: {isolation_levels: [container], pricing_model: self-hosted}\n"

// What a file says of a program reaches the adapter, with paths that do not depend on where the server runs.
func TestProgram(t *testing.T) {
	dir := t.TempDir()
	ext := filepath.Join(dir, "extensions")
	if err := os.MkdirAll(ext, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		text string
		want sandboxer.Program
	}{
		{"command: [./run, -v, 1]\nrun_as: nobody\nenv: [A_B]\nlimits: {memory: 64MiB, pids: 9}\n",
			sandboxer.Program{Command: []string{ext + "/run", "-v", "1"}, RunAs: "nobody", Env: []string{"A_B"}, MemoryBytes: 64 << 20, PIDs: 9, Dir: ext, Path: []string{ext}}},
		{"handler: process\ncommand: [run]\n", sandboxer.Program{Command: []string{"run"}, Dir: ext, Path: []string{ext}}},
		{"handler: my.mod:Class\npath: [lib, /abs]\npython: ./venv/python\nsdk: sdk\nconcurrency: 2\n",
			sandboxer.Program{Handler: "my.mod:Class", Path: []string{ext + "/lib", "/abs", ext}, Python: ext + "/venv/python", SDK: ext + "/sdk", Concurrency: 2, Dir: ext}},
		{"connect: unix:/run/x.sock\n", sandboxer.Program{Connect: "unix:/run/x.sock", Dir: ext, Path: []string{ext}}},
		{"connect: tls:a.example:7443\ntls: {ca: ca.pem, cert: c.pem, key: /k.pem, name: b}\n",
			sandboxer.Program{Connect: "tls:a.example:7443", Dir: ext, Path: []string{ext}, TLS: sandboxer.ProgramTLS{CA: ext + "/ca.pem", Cert: ext + "/c.pem", Key: "/k.pem", Name: "b"}}},
	} {
		file := filepath.Join(ext, "ext.p.yaml")
		if err := os.WriteFile(file, []byte(programHead+c.text), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, layer := range []Layer{Dir("user", dir), {Name: "command line", Files: []string{file}}} {
			cat, err := Load([]Layer{layer}, append(adapters(), processStandIn(nil)))
			if err != nil {
				t.Errorf("%s: %v", c.text, err)
				continue
			}
			e, err := cat.Extension("p")
			if err != nil {
				t.Fatal(err)
			}
			if got := e.Env("", "", nil).Program; !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s:\n got %+v\nwant %+v", c.text, got, c.want)
			}
		}
	}
}

// A setting that makes no sense is reported at its place.
func TestProgramFaults(t *testing.T) {
	for text, want := range map[string]string{
		"command: [a]\nconnect: unix:/x\n":                  "4:1   connect: the extension is started by command already",
		"handler: a:B\ncommand: [a]\n":                      "4:1   command: the handler is a class",
		"handler: a:B\nconnect: unix:/x\n":                  "4:1   connect: the handler is a class",
		"handler: process\n":                                `3:10  handler: the adapter process needs a command or connect`,
		"handler: fake\nrun_as: nobody\n":                   `4:1   run_as: the adapter "fake" is part of this program`,
		"handler: fake\nlimits: {memory: 64MiB}\n":          `4:1   limits: the adapter "fake" is part of this program`,
		"command: [a]\nmode: call\n":                        "4:1   mode: modes no longer exist: remove this line. A script of mode call needs a new first line: #!/usr/bin/env -S sandboxer extension serve-script /bin/sh",
		"command: [a]\npath: [x]\n":                         "4:1   path: this has an effect only with a class",
		"command: [a]\nconcurrency: 2\n":                    "4:1   concurrency: this has an effect only with a class as handler",
		"connect: tcp:localhost:1\n":                        "3:10  connect: expected unix:/absolute/path, or tls:host:port",
		"connect: tls:h:1\n":                                "3:1   connect: a service by TLS needs tls.ca",
		"connect: tls:h:1\ntls: {ca: a, cert: b}\n":         "4:1   tls: a service by TLS needs tls.key",
		"connect: unix:/x\ntls: {ca: a}\n":                  "4:1   tls: this has an effect only with connect: tls:",
		"connect: unix:/x\nrun_as: nobody\n":                "4:1   run_as: this has an effect only with command or a class",
		"command: [\"\"]\n":                                 "the name of a program cannot be empty",
		"command: [a]\nconfig: [1]\n":                       "config: expected a mapping",
		"command: [a]\nconcurrency: 1000\n":                 "4:14  concurrency: expected",
		"command: [a]\nconfig: {a: .nan}\n":                 "4:13  config.a: expected a number, got .nan",
		"command: [a]\nconfig: {a: -.inf}\n":                "4:13  config.a: expected a number, got -.inf",
		"command: [a]\nconfig: {a: 99999999999999999999}\n": "4:13  config.a: expected a whole number, got 99999999999999999999",
		"command: [a]\nconfig: {[a]: b}\n":                  "a key must be text, not a list",
		"command: [a]\nconfig: {a: &x {b: *x}}\n":           "1 problem",
		"command: [a]\nconfig: {a: 1, a: 2}\n":              "config.a: duplicate key",
		// Little that becomes much.
		"command: [a]\nconfig:\n  a: &x \"" + strings.Repeat("x", 60<<10) + "\"\n  b: [*x, *x, *x, *x, *x, *x, *x, *x, *x]\n": "4:1   config: it takes more than 524288 bytes as JSON",
		"command: [a]\nconfig: {a: \"" + strings.Repeat("<", 100<<10) + "\"}\n":                                               "4:1   config: it takes more than 524288 bytes as JSON",
	} {
		_, err := load(t, map[string]string{"extensions/ext.p.yaml": programHead + text}, append(adapters(), processStandIn(nil))...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v\nwant %s", text, err, want)
		}
	}
}

// A configuration goes to the program as it is; secrets are in it only where they are asked for.
func TestProgramConfig(t *testing.T) {
	t.Setenv("CATALOG_TEST_SECRET", "hush")
	cat, err := load(t, map[string]string{"extensions/ext.p.yaml": programHead +
		"command: [a]\nconfig: {n: 12, f: 1.5, t: true, z: null, s: x, d: 2020-01-01, l: [1, {k: v}], key: \"${env:CATALOG_TEST_SECRET}\", not: \"a ${env:CATALOG_TEST_SECRET}\"}\n"},
		append(adapters(), processStandIn(nil))...)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := cat.Extension("p")
	env := e.Env("", "", nil)
	without, err := env.Config(false)
	if want := `{"d":"2020-01-01","f":1.5,"key":"${env:CATALOG_TEST_SECRET}","l":[1,{"k":"v"}],"n":12,"not":"a ${env:CATALOG_TEST_SECRET}","s":"x","t":true,"z":null}`; err != nil || string(without) != want {
		t.Errorf("Config(false) = %s, %v\nwant %s", without, err, want)
	}
	with, err := env.Config(true)
	if err != nil || !strings.Contains(string(with), `"key":"hush"`) || strings.Count(string(with), "hush") != 1 {
		t.Errorf("Config(true) = %s, %v", with, err)
	}
	os.Unsetenv("CATALOG_TEST_SECRET")
	if _, err := env.Config(true); sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), "CATALOG_TEST_SECRET is not set") {
		t.Errorf("without the secret: %v", err)
	}
}

const describedProfile = `id: profile.p
extension: ext.p
requires: [exec, snapshot]
inputs: {repo: x, other: y}
`

// Files are held to what an extension says of itself: before it is opened, where that is known, and when it is.
func TestDescriptions(t *testing.T) {
	says := sandboxer.Description{Title: "Said", Isolation: []sandboxer.Isolation{sandboxer.IsolationVM}, Pricing: []sandboxer.PricingModel{sandboxer.PricingMetered},
		Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanCheck}, Inputs: []sandboxer.Input{{Name: "repo"}}}
	files := map[string]string{"extensions/ext.p.yaml": programHead + "command: [a]\n", "profiles/profile.p.yaml": describedProfile, "profiles/profile.q.yaml": "id: profile.q\nextension: ext.fake\n"}
	wants := []string{
		`2:35  capabilities.isolation_levels[0]: the extension cannot give isolation level "container": it gives vm`,
		`2:62  capabilities.pricing_model: the extension cannot have pricing model "self-hosted": it has metered`,
		`3:18  requires[1]: ext.p (adapter "process") does not have "snapshot": it has exec`,
		`4:19  inputs.other: ext.p (adapter "process") takes no such input: it takes repo`,
	}
	held := func(what string, err error) {
		t.Helper()
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v\nwant %s", what, err, want)
			}
		}
		if n := len(FaultsOf(err)); n != len(wants) {
			t.Errorf("%s: %d faults; want %d", what, n, len(wants))
		}
	}

	unknown := processStandIn(nil)
	unknown.Open = func(context.Context, sandboxer.Env) (sandboxer.Extension, error) { return described{says: says}, nil }
	cat, err := load(t, files, append(adapters(), unknown)...)
	if err != nil {
		t.Fatalf("before anything is known: %v", err)
	}
	if err := cat.Describe(t.TempDir()); err != nil {
		t.Errorf("Describe where nothing is known: %v", err)
	}
	only := &Catalog{Extensions: cat.Extensions[:0:0], Profiles: cat.Profiles}
	e, _ := cat.Extension("p")
	only.Extensions = append(only.Extensions, e)
	_, err = only.Open(t.Context(), "test", t.TempDir(), nil)
	held("Open", err)

	cat, err = load(t, files, append(adapters(), processStandIn(&says))...)
	if err != nil {
		t.Fatal(err)
	}
	e, _ = cat.Extension("p")
	open := &Catalog{Extensions: []ExtensionFile{e}}
	held("Describe", cat.Describe(t.TempDir()))
	for _, p := range cat.Profiles { // what is sound is left
		if p.Extension == "ext.p" {
			t.Errorf("%s is still there", p.ID)
		}
	}
	if _, err := cat.Extension("p"); err == nil || len(cat.Extensions) == 0 || len(cat.Profiles) == 0 {
		t.Errorf("%d extensions and %d profiles are left, ext.p: %v", len(cat.Extensions), len(cat.Profiles), err)
	}
	info := e.Info()
	if info.Title != "Said" || !reflect.DeepEqual(info.Capabilities, []sandboxer.Capability{sandboxer.CanExec}) || !reflect.DeepEqual(info.Inputs, says.Inputs) {
		t.Errorf("Info = %+v", info)
	}
	again, err := load(t, files, append(adapters(), unknown)...)
	if err != nil {
		t.Fatal(err)
	}
	held("DescribeAs", again.DescribeAs(open))
}

// Any input may be given where the extension says so.
func TestAnyInput(t *testing.T) {
	says := sandboxer.Description{Isolation: sandboxer.Isolations(), Pricing: sandboxer.PricingModels(), Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanSnapshot},
		Inputs: []sandboxer.Input{{Name: sandboxer.AnyInput}}}
	cat, err := load(t, map[string]string{"extensions/ext.p.yaml": programHead + "command: [a]\n", "profiles/profile.p.yaml": describedProfile}, append(adapters(), processStandIn(&says))...)
	if err != nil {
		t.Fatal(err)
	}
	if err := cat.Describe(t.TempDir()); err != nil {
		t.Error(err)
	}
}

// A configuration that the extension refuses is reported at its place.
func TestRefusedConfig(t *testing.T) {
	a := processStandIn(nil)
	a.Open = func(context.Context, sandboxer.Env) (sandboxer.Extension, error) {
		return nil, joined{sandboxer.E(sandboxer.Invalid, nil, "config.rate: want a number"), sandboxer.E(sandboxer.Invalid, nil, "handler: there is no class B"), sandboxer.E(sandboxer.Invalid, nil, "something else")}
	}
	cat, err := load(t, map[string]string{"extensions/ext.p.yaml": programHead + "handler: a:B\nconfig:\n  rate: x\n"}, append(adapters(), a)...)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := cat.Extension("p")
	_, err = (&Catalog{Extensions: []ExtensionFile{e}}).Open(t.Context(), "test", t.TempDir(), nil)
	for _, want := range []string{"5:9   config.rate: want a number", "3:10  handler: there is no class B", "4:1   config: something else"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nwant %s", err, want)
		}
	}
}

// So is one of an element of a list, and one of a program without a handler.
func TestRefusedElement(t *testing.T) {
	a := processStandIn(nil)
	a.Open = func(context.Context, sandboxer.Env) (sandboxer.Extension, error) {
		return nil, errors.Join(sandboxer.E(sandboxer.Invalid, nil, "command[1]: there is no such flag"), sandboxer.E(sandboxer.Invalid, nil, "config.hosts[1]: it is not there"),
			sandboxer.E(sandboxer.Invalid, nil, "run_as: there is no such user"), sandboxer.E(sandboxer.Invalid, nil, "handler: it says no hello"))
	}
	cat, err := load(t, map[string]string{"extensions/ext.p.yaml": programHead + "run_as: me\ncommand: [a, -x]\nconfig: {hosts: [a, b]}\n"}, append(adapters(), a)...)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := cat.Extension("p")
	_, err = (&Catalog{Extensions: []ExtensionFile{e}}).Open(t.Context(), "test", t.TempDir(), nil)
	for _, want := range []string{"4:14  command[1]: there is no such flag", "5:21  config.hosts[1]: it is not there", "3:9   run_as: there is no such user", "4:1   handler: it says no hello"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nwant %s", err, want)
		}
	}
}

// An extension that can be opened only later is checked against its file then, and later readers of the files
// know its description.
func TestDescribedLater(t *testing.T) {
	says := sandboxer.Description{Title: "Said", Isolation: []sandboxer.Isolation{sandboxer.IsolationVM}, Pricing: sandboxer.PricingModels()}
	away := true
	var closed int
	a := processStandIn(nil)
	a.Open = func(context.Context, sandboxer.Env) (sandboxer.Extension, error) {
		if away {
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "it is away")
		}
		return closing{described{says: says}, &closed}, nil
	}
	files := map[string]string{"extensions/ext.p.yaml": programHead + "command: [a]\n", "profiles/profile.p.yaml": describedProfile}
	cat, err := load(t, files, append(adapters(), a)...)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := cat.Extension("p")
	open := &Catalog{Extensions: []ExtensionFile{e}}
	opened, err := open.Open(t.Context(), "test", t.TempDir(), nil)
	if err != nil || opened[0].Info.Problem != "it is away" {
		t.Fatalf("Open = %+v, %v", opened, err)
	}
	away = false
	o := opened[0]
	for range 2 { // and as often as it is tried
		o = o.Again(t.Context())
		if want := `the extension cannot give isolation level "container"`; o.Ext != nil || !strings.Contains(o.Info.Problem, want) || len(o.Info.Capabilities) > 0 {
			t.Fatalf("one that its file says too much of: %+v; want the problem %s", o, want)
		}
	}
	if closed != 2 {
		t.Errorf("it was closed %d times; want 2", closed)
	}
	says.Isolation, says.Capabilities = []sandboxer.Isolation{sandboxer.IsolationContainer}, []sandboxer.Capability{sandboxer.CanExec}
	if o = o.Again(t.Context()); o.Ext == nil || o.Info.Title != "Said" || !reflect.DeepEqual(o.Info.Capabilities, says.Capabilities) {
		t.Fatalf("once it is right: %+v", o)
	}
	anew, err := load(t, files, append(adapters(), a)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := anew.DescribeAs(open); err == nil || !strings.Contains(err.Error(), `requires[1]: ext.p (adapter "process") does not have "snapshot"`) {
		t.Errorf("read anew: %v", err)
	}
}

type closing struct {
	described
	n *int
}

func (c closing) Close() error { *c.n++; return nil }

type joined []error

func (j joined) Error() string   { return j[0].Error() }
func (j joined) Unwrap() []error { return j }
