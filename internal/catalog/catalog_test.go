package catalog

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

var update = flag.Bool("update", false, "rewrite golden files")

// richConfig has a field of every kind that an adapter's configuration may have.
type richConfig struct {
	Host     string                        `yaml:"host" help:"where it runs"`
	Token    sandboxer.Secret              `yaml:"token" help:"credential"`
	Other    sandboxer.Secret              `yaml:"other"`
	Retries  int                           `yaml:"retries" min:"0" max:"10"`
	Port     uint16                        `yaml:"port"`
	Small    int8                          `yaml:"small"`
	Unsigned uint                          `yaml:"unsigned"`
	Timeout  time.Duration                 `yaml:"timeout"`
	Cache    int64                         `yaml:"cache" unit:"bytes"`
	CPUs     int64                         `yaml:"cpus" unit:"cpus"`
	Ratio    float64                       `yaml:"ratio"`
	Strict   bool                          `yaml:"strict"`
	Colour   string                        `yaml:"colour" enum:"red,green"`
	Hosts    []string                      `yaml:"hosts"`
	Levels   []sandboxer.Isolation         `yaml:"levels"`
	Env      map[string]string             `yaml:"env"`
	Nested   struct{ Depth int }           `yaml:"nested"`
	Groups   map[string]struct{ Size int } `yaml:"groups"`
	Pointer  *struct{ X, Y int }           `yaml:"pointer"`
	When     time.Time                     `yaml:"when"`
	Free     map[string]any                `yaml:"free"`
	Hidden   string                        `yaml:"-"`
	//lint:ignore U1000 unexported fields are not settings
	inner string
}

func (c *richConfig) Validate() error {
	if c.Host == "localhost" {
		return sandboxer.E(sandboxer.Invalid, nil, "host: a fake cannot run on localhost").WithHint("name another machine")
	}
	return nil
}

type strictConfig struct {
	Endpoint string           `yaml:"endpoint" required:"true"`
	Key      sandboxer.Secret `yaml:"key" required:"true"`
}

// adapters is a table as a build would have it.
func adapters() []sandboxer.Adapter {
	self := []sandboxer.PricingModel{sandboxer.PricingSelfHosted}
	container := []sandboxer.Isolation{sandboxer.IsolationContainer, sandboxer.IsolationProcess}
	caps := []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles}
	return []sandboxer.Adapter{
		{Kind: "fake", Title: "In memory", Help: "For tests.", Isolation: container, Pricing: self, Capabilities: caps,
			Inputs: []sandboxer.Input{{Name: "repo", Help: "a repository"}, {Name: "branch", Help: "a branch", Default: "main"}},
			Config: &richConfig{Host: "build-1", Retries: 3, Timeout: time.Minute, Cache: 1 << 30, CPUs: 1500,
				Env: map[string]string{"A": "default"}, Hosts: []string{"h1"}}},
		{Kind: "strict", Isolation: container, Pricing: self, Config: &strictConfig{}},
		{Kind: "plain", Isolation: container, Pricing: self},
		{Kind: "local", Title: "gVisor on this machine", Isolation: []sandboxer.Isolation{sandboxer.IsolationGVisor}, Pricing: self,
			Capabilities: sandboxer.Capabilities(), Inputs: []sandboxer.Input{{Name: "repo"}}},
		{Kind: "compose-ssh", Handlers: []string{"sandboxer.extensions.compose_ssh:*"}, Isolation: container, Pricing: self,
			Inputs: []sandboxer.Input{{Name: "volumes"}}},
		{Kind: "docker", Isolation: container, Pricing: self, Capabilities: caps},
		{Kind: "vm-packer", Isolation: []sandboxer.Isolation{sandboxer.IsolationProcess, sandboxer.IsolationVM}, Pricing: self,
			Capabilities: sandboxer.Capabilities(), Inputs: []sandboxer.Input{{Name: "vm"}}},
		{Kind: "remote", Isolation: container, Pricing: self, Config: &struct {
			Kind string `yaml:"kind"`
		}{}},
		{Kind: "daytona", Isolation: sandboxer.Isolations(), Pricing: sandboxer.PricingModels()},
		{Kind: "e2b", Handlers: []string{"sandboxer.extensions.e2b"}, Isolation: sandboxer.Isolations(), Pricing: sandboxer.PricingModels()},
		{Kind: "modal", Handlers: []string{"sandboxer.extensions.modal"}, Isolation: sandboxer.Isolations(), Pricing: sandboxer.PricingModels()},
		{Kind: "saas-stub", Handlers: []string{"sandboxer.extensions.saas_stub"}, Isolation: sandboxer.Isolations(), Pricing: sandboxer.PricingModels()},
	}
}

var base = fstest.MapFS{
	"extensions/ext.fake.yaml": {Data: []byte("id: ext.fake\nhandler: fake\ncapabilities:\n  isolation_levels: [container]\n  pricing_model: self-hosted\n")},
}

func load(t testing.TB, files map[string]string, as ...sandboxer.Adapter) (*Catalog, error) {
	t.Helper()
	return loadOver(t, base, files, as...)
}

func loadOver(t testing.TB, below fs.FS, files map[string]string, as ...sandboxer.Adapter) (*Catalog, error) {
	t.Helper()
	m := fstest.MapFS{}
	for name, text := range files {
		m[name] = &fstest.MapFile{Data: []byte(text)}
	}
	if as == nil {
		as = adapters()
	}
	return Load([]Layer{{Name: "built-in", FS: below}, {Name: "user", FS: m}}, as)
}

// TestBadFiles loads every archive in testdata/bad. The first line of its comment
// says who finds the fault: "form" faults are refused by the schema as well,
// "meaning" faults pass it, "syntax" faults leave nothing for a
// schema to look at.
func TestBadFiles(t *testing.T) {
	names, err := filepath.Glob("testdata/bad/*.txtar")
	if err != nil || len(names) < 40 {
		t.Fatalf("testdata/bad has %d archives (%v); want 40 or more", len(names), err)
	}
	schemas := map[string]*jsonschema.Schema{KindProfile: compiled(t, KindProfile), KindExtension: compiled(t, KindExtension)}
	for _, name := range names {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txtar"), func(t *testing.T) {
			a, err := txtar.ParseFile(name)
			if err != nil {
				t.Fatal(err)
			}
			class, _, _ := strings.Cut(string(a.Comment), "\n")
			files := make(map[string]string)
			want := -1
			refused, accepted := 0, 0
			for i, f := range a.Files {
				if f.Name == "want" {
					want = i
					continue
				}
				files[f.Name] = string(f.Data)
				if class == "syntax" {
					continue
				}
				kind := KindProfile
				if path.Dir(f.Name) == "extensions" {
					kind = KindExtension
				}
				if schemas[kind].Validate(plain(t, f.Data)) != nil {
					refused++
				} else {
					accepted++
				}
			}
			if class == "form" && refused == 0 || class == "meaning" && accepted == 0 {
				t.Errorf("class %q, but the schema refused %d files and accepted %d", class, refused, accepted)
			}
			_, err = load(t, files)
			if err == nil {
				t.Fatal("no fault found")
			}
			if k := sandboxer.KindOf(err); k != sandboxer.Invalid {
				t.Errorf("kind %q; want invalid", k)
			}
			if sandboxer.Message(err) != err.Error() {
				t.Error("the message for clients is not the rendering")
			}
			if strings.Contains(err.Error(), "sk-live") || strings.Contains(err.Error(), "s3cret") {
				t.Errorf("a secret is shown:\n%s", err)
			}
			checkPositions(t, err, files)
			out := err.Error() + "\n"
			if *update {
				a.Files[want].Data = []byte(out)
				if err := os.WriteFile(name, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got := string(a.Files[want].Data); got != out {
				t.Errorf("rendering differs (go test -update rewrites it)\n got:\n%s\nwant:\n%s", out, got)
			}
		})
	}
}

// checkPositions holds that every fault points into its file.
func checkPositions(t testing.TB, err error, files map[string]string) {
	t.Helper()
	var faults Faults
	if !errors.As(err, &faults) || len(faults) == 0 {
		t.Fatalf("%T is not a list of faults", err)
	}
	for _, f := range faults {
		text, ok := files[f.File]
		if !ok {
			t.Errorf("%q is none of the files", f.File)
			continue
		}
		lines := newSource("", []byte(text)).lines
		if f.Line < 1 || f.Line > len(lines) {
			t.Errorf("%s: line %d of %d: %s", f.File, f.Line, len(lines), f.Message)
			continue
		}
		if n := utf8.RuneCountInString(lines[f.Line-1]); f.Column < 1 || f.Column > n+1 {
			t.Errorf("%s:%d: column %d of %d: %s", f.File, f.Line, f.Column, n, f.Message)
		}
		if f.Message == "" {
			t.Errorf("%s:%d:%d: no message", f.File, f.Line, f.Column)
		}
	}
}

// compiled is the published schema in the hands of an independent validator.
func compiled(t testing.TB, kind string) *jsonschema.Schema {
	t.Helper()
	text, err := Schema(kind)
	if err != nil {
		t.Fatal(err)
	}
	return compile(t, text)
}

func compile(t testing.TB, text []byte) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("mem:///schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("mem:///schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// plain is a document as an editor hands it to a validator.
func plain(t testing.TB, data []byte) any {
	t.Helper()
	var v any
	if err := yaml.Unmarshal(data, &v); err != nil {
		return nil
	}
	j, err := json.Marshal(textKeys(v))
	if err != nil {
		return nil
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(j))
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func textKeys(v any) any {
	switch x := v.(type) {
	case map[any]any:
		m := make(map[string]any)
		for k, e := range x {
			m[fmt.Sprint(k)] = textKeys(e)
		}
		return m
	case map[string]any:
		for k, e := range x {
			x[k] = textKeys(e)
		}
	case []any:
		for i, e := range x {
			x[i] = textKeys(e)
		}
	}
	return v
}

const everyField = `# yaml-language-server: $schema=../docs/schemas/profile.schema.json
id: profile.everything
title: "All fields"
description: |
  Two
  lines.
extension: ext.fake
isolation: container
requires: [exec, files]
image: docker.io/library/python:3.13
command: [sleep, 3600]
env: {PORT: 8080, DEBUG: true, DATE: 2026-11-21, EMPTY: "", VERSION: 1.10}
labels: {team/owner: a.b, n: 1}
secrets: [registry-token, DEPLOY_KEY]
limits: {cpus: 1.5, memory: 512MiB, disk: 2GB, pids: 256, gpus: 1}
max_limits: {cpus: 4, memory: 8GiB}
network: {mode: allow, allow: [example.org, "*.example.org:443", 192.0.2.0/24, "192.0.2.1:80", "2001:db8::1", "[2001:db8::1]:443"]}
mounts:
- {source: /srv/data, target: /data, read_only: true}
- source: /srv/more
  target: /more
ports: [80, 443]
workspace: /workspace
user: 1000:1000
inputs: {repo: ., branch: 1.10}
ttl: 45m
max_ttl: 1d12h
idle: 1h30m
on_idle: pause
on_ttl: pause
on_cost: extend
pause_depth: disk
max_paused: 3d
auto_resume: true
max: 40
wait: 2m
pool: {size: 3, max_age: 20m}
ready: {http: {port: 8080, path: "/v1/sandbox?x=1", status: 204}, timeout: 1m}
price: {setup: "0.01", per_hour: 0.12}
`

func TestProfileEveryField(t *testing.T) {
	c, err := load(t, map[string]string{"profiles/all.yml": everyField})
	if err != nil {
		t.Fatal(err)
	}
	got, err := c.Profile("everything")
	if err != nil {
		t.Fatal(err)
	}
	want := sandboxer.Profile{
		ID: "profile.everything", Title: "All fields", Description: "Two\nlines.\n", Extension: "ext.fake",
		Isolation: sandboxer.IsolationContainer, Requires: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles},
		Image: "docker.io/library/python:3.13", Command: []string{"sleep", "3600"},
		Env:       map[string]string{"PORT": "8080", "DEBUG": "true", "DATE": "2026-11-21", "EMPTY": "", "VERSION": "1.10"},
		Labels:    map[string]string{"team/owner": "a.b", "n": "1"},
		Secrets:   []string{"registry-token", "DEPLOY_KEY"},
		Limits:    sandboxer.Limits{MilliCPU: 1500, MemoryBytes: 512 << 20, DiskBytes: 2_000_000_000, PIDs: 256, GPUs: 1},
		MaxLimits: sandboxer.Limits{MilliCPU: 4000, MemoryBytes: 8 << 30},
		Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"example.org", "*.example.org:443",
			"192.0.2.0/24", "192.0.2.1:80", "2001:db8::1", "[2001:db8::1]:443"}},
		Mounts: []sandboxer.Mount{{Source: "/srv/data", Target: "/data", ReadOnly: true}, {Source: "/srv/more", Target: "/more"}},
		Ports:  []int{80, 443}, Workspace: "/workspace", User: "1000:1000",
		Inputs: map[string]string{"repo": ".", "branch": "1.10"},
		TTL:    45 * time.Minute, MaxTTL: 36 * time.Hour, Idle: 90 * time.Minute, OnIdle: sandboxer.ExpiryPause,
		OnTTL: sandboxer.ExpiryPause, OnCost: sandboxer.CostExtend, PauseDepth: sandboxer.PauseDisk, MaxPaused: 72 * time.Hour, AutoResume: true,
		Max: 40, Wait: 2 * time.Minute,
		Ready: sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Port: 8080, Path: "/v1/sandbox?x=1", Status: 204}, Timeout: time.Minute},
		Price: sandboxer.Price{Setup: 10_000, PerHour: 120_000},
		Pool:  sandboxer.Pool{Size: 3, MaxAge: 20 * time.Minute},
	}
	if !reflect.DeepEqual(got.Profile, want) {
		t.Errorf("profile = %+v\nwant %+v", got.Profile, want)
	}
	// Every field of the domain type can be written, and every one was.
	v := reflect.ValueOf(got.Profile)
	for i := range v.NumField() {
		if v.Field(i).IsZero() && !slices.Contains([]string{"Builtin", "Route"}, v.Type().Field(i).Name) { // the layer says it; instead of Extension
			t.Errorf("no key of a profile file sets %s", v.Type().Field(i).Name)
		}
	}
	if err := compiled(t, KindProfile).Validate(plain(t, []byte(everyField))); err != nil {
		t.Errorf("the schema refuses what the loader accepts: %v", err)
	}
}

// TestGoodForms are documents that the loader and the schema must both accept.
func TestGoodForms(t *testing.T) {
	const head = "id: profile.x\nextension: ext.fake\n"
	for _, body := range []string{
		"", "network: none\n", "network: public\n", "network: {allow: [a.b]}\n", "network: {mode: none}\n", "network:\n", "network: {}\n",
		"limits:\n", "limits: {cpus: \"0.5\"}\n", "limits: {memory: 1.5GiB}\n", "limits: {memory: 1 GiB}\n", "limits: {pids: 0x10}\n",
		"env:\n", "ports: []\n", "requires: []\n", "ttl: 90s\n", "ttl: 1d\n", "ttl: 1h30m10s\n", "user: app\n", "user: 1000\n", "price: {per_hour: 1}\n",
		"title: &t same\ndescription: *t\n", "env: &e {A: b}\nlabels: *e\n", "title: ünïcode ✓\n", "title: ''\n", "idle: 15m # comment\n",
		"title: !!str 12\n", "mounts: []\n", "max_ttl: 30m\n", "ttl: 5m\nmax_ttl: 5m\n", "workspace: /w\r\nuser: app\r\n",
		"ttl: idle\nidle: 5m\n", "ttl: idle\nidle: 30h\nmax_ttl: 10m\n", "ready: {http: {port: 80}}\n", "ready: {http: {}}\n", "ready: {command: [test, -e, 1]}\n", "ready:\n",
	} {
		if _, err := load(t, map[string]string{"profiles/p.yaml": head + body}); err != nil {
			t.Errorf("%q: %v", body, err)
		}
		if err := compiled(t, KindProfile).Validate(plain(t, []byte(head+body))); err != nil {
			t.Errorf("%q: schema: %v", body, err)
		}
	}
}

// TestSeeds loads the extension file of the seeds' guide, unchanged.
func TestSeeds(t *testing.T) {
	seeds := Layer{Name: "project", FS: os.DirFS("testdata/seeds"), Root: "testdata/seeds"}
	process := processStandIn(nil)
	var opened map[string]any
	process.Open = func(_ context.Context, env sandboxer.Env) (sandboxer.Extension, error) {
		data, err := env.Config(true)
		if err == nil {
			err = json.Unmarshal(data, &opened)
		}
		return nil, err
	}
	c, err := Load([]Layer{seeds}, append(adapters(), process))
	if err != nil {
		t.Fatal(err)
	}
	e, err := c.Extension("my-backend")
	if err != nil {
		t.Fatal(err)
	}
	if e.Adapter.Kind != "process" || e.Title != "My Backend" || e.Handler != "sandboxer.extensions.my_backend:MyExtension" {
		t.Errorf("extension = %+v", e.Info())
	}
	if _, err := c.Open(t.Context(), "test", t.TempDir(), nil); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(opened, map[string]any{"key": "value"}) {
		t.Errorf("config = %v", opened)
	}

	_, err = Load([]Layer{seeds}, adapters())
	if err == nil || !strings.Contains(err.Error(), "cannot run extension classes in a process of their own") {
		t.Errorf("without the process adapter: %v", err)
	}
}

// TestHandlers: a module that an adapter claims is that adapter's, whatever the
// class is called.
func TestHandlers(t *testing.T) {
	for handler, want := range map[string]string{
		"compose-ssh": "compose-ssh",
		"sandboxer.extensions.compose_ssh:ComposeSSHExtension": "compose-ssh",
		"sandboxer.extensions.compose_ssh:Renamed":             "compose-ssh",
		"sandboxer.extensions.saas_stub:SaaSStubExtension":     "saas-stub",
		"fake": "fake",
	} {
		text := "id: ext.a\nhandler: " + handler + "\ncapabilities: {isolation_levels: [container], pricing_model: self-hosted}\n"
		c, err := load(t, map[string]string{"extensions/ext.a.yaml": text})
		if err != nil {
			t.Errorf("%s: %v", handler, err)
			continue
		}
		if e, _ := c.Extension("a"); e.Adapter.Kind != want {
			t.Errorf("%s opens %q; want %q", handler, e.Adapter.Kind, want)
		}
	}
}

func TestLayers(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return name
	}
	write("user/profiles/profile.a.yaml", "id: profile.a\ntitle: mine\nextension: ext.fake\n")
	write("user/profiles/.hidden.yaml", "nonsense: [")
	write("user/profiles/README.md", "no profile")
	write("user/profiles/nested/profile.b.yaml", "nonsense: [")
	single := write("somewhere/my.yaml", "id: profile.a\ntitle: explicit\nextension: ext.fake\n")
	ext := write("somewhere/ext.two.yaml", string(base["extensions/ext.fake.yaml"].Data[:4])+"ext.two\n"+
		strings.SplitN(string(base["extensions/ext.fake.yaml"].Data), "\n", 2)[1])
	named := write("somewhere/cloud.yaml", strings.Replace(string(base["extensions/ext.fake.yaml"].Data), "ext.fake", "ext.three", 1)) // of any name
	builtin := fstest.MapFS{"profiles/profile.a.yaml": {Data: []byte("id: profile.a\nextension: ext.fake\n")},
		"extensions/ext.fake.yaml": base["extensions/ext.fake.yaml"]}
	c, err := Load([]Layer{
		{Name: "built-in", FS: builtin},
		Dir("system", filepath.Join(dir, "absent")),
		Dir("user", filepath.Join(dir, "user")),
		{Name: "command line", Files: []string{single, ext, named}},
	}, adapters())
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Profile("profile.a")
	if err != nil {
		t.Fatal(err)
	}
	wantFrom := []Origin{{"user", filepath.Join(dir, "user/profiles/profile.a.yaml")}, {"built-in", "profiles/profile.a.yaml"}}
	if p.Title != "explicit" || p.Origin != (Origin{"command line", single}) || !slices.Equal(p.Replaces, wantFrom) {
		t.Errorf("profile = %q from %v replacing %v", p.Title, p.Origin, p.Replaces)
	}
	if len(c.Profiles) != 1 || len(c.Extensions) != 3 {
		t.Errorf("%d profiles, %d extensions; want 1 and 3", len(c.Profiles), len(c.Extensions))
	}

	// A faulty replacement does not let the replaced one shine through.
	write("user/extensions/ext.fake.yaml", "id: ext.fake\nhandler: fake\n")
	c, err = Load([]Layer{{Name: "built-in", FS: builtin}, Dir("user", filepath.Join(dir, "user"))}, adapters())
	var faults Faults
	if !errors.As(err, &faults) || len(faults) != 1 {
		t.Errorf("faults = %v; want the missing capabilities only", err)
	}
	if len(c.Extensions) != 0 || len(c.Profiles) != 0 {
		t.Errorf("catalogue = %+v; want nothing", c)
	}
}

func TestUnreadable(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "profiles"), 0o755); err != nil {
		t.Fatal(err)
	}
	big := filepath.Join(dir, "profiles", "big.yaml")
	if err := os.WriteFile(big, bytes.Repeat([]byte("# padding\n"), maxFile/10+1), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/nowhere/at/all", filepath.Join(dir, "profiles", "dangling.yaml")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(os.DevNull, filepath.Join(dir, "profiles", "device.yaml")); err != nil {
		t.Fatal(err)
	}
	everybodys := filepath.Join(dir, "profiles", "everybodys.yaml")
	if err := os.WriteFile(everybodys, []byte("id: profile.x\nextension: ext.fake\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(everybodys, 0o646); err != nil {
		t.Fatal(err)
	}
	notDir := filepath.Join(dir, "just-a-file")
	if err := os.WriteFile(notDir, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Load([]Layer{Dir("user", dir), Dir("other", notDir), {Name: "command line", Files: []string{filepath.Join(dir, "absent.yaml")}}}, adapters())
	want := fmt.Sprintf(`%[1]s/absent.yaml: 1 problem
  cannot be read: no such file or directory
%[1]s/just-a-file/extensions: 1 problem
  cannot be read: not a directory
%[1]s/just-a-file/profiles: 1 problem
  cannot be read: not a directory
%[1]s/profiles/big.yaml: 1 problem
  1:1   the file is larger than 1 MiB
%[1]s/profiles/dangling.yaml: 1 problem
  cannot be read: no such file or directory
%[1]s/profiles/device.yaml: 1 problem
  cannot be read: not a regular file
%[1]s/profiles/everybodys.yaml: 1 problem
  cannot be read: everybody can write it; chmod o-w`, dir)
	if err == nil || err.Error() != want {
		t.Errorf("got:\n%v\nwant:\n%s", err, want)
	}
}

func TestFaultsJSON(t *testing.T) {
	_, err := load(t, map[string]string{"profiles/p.yaml": "id: profile.p\nextension: ext.fake\nlimits:\n  cpuz: 2\n"})
	got, jerr := json.Marshal(err)
	if jerr != nil {
		t.Fatal(jerr)
	}
	want := `[{"file":"profiles/p.yaml","line":4,"column":3,"path":"limits.cpuz","message":"unknown field","suggestion":"cpus","excerpt":"  cpuz: 2","width":4}]`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestFind(t *testing.T) {
	c, err := Load([]Layer{{Name: "built-in", FS: sandboxer.Builtin}}, adapters())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"local", "profile.local"} {
		if p, err := c.Profile(name); err != nil || p.ID != "profile.local" {
			t.Errorf("Profile(%q) = %q, %v", name, p.ID, err)
		}
	}
	_, err = c.Profile("locla")
	if !errors.Is(err, sandboxer.NotFound) || !strings.Contains(sandboxer.HintOf(err), `did you mean "profile.local"?`) {
		t.Errorf("Profile(locla): %v, hint %q", err, sandboxer.HintOf(err))
	}
	_, err = c.Extension("kubernetes")
	if !errors.Is(err, sandboxer.NotFound) || strings.Contains(sandboxer.HintOf(err), "did you mean") {
		t.Errorf("Extension(kubernetes): %v, hint %q", err, sandboxer.HintOf(err))
	}
}

// TestBuiltin holds the shipped files to both judges and to the schema comment.
func TestBuiltin(t *testing.T) {
	for dir, kind := range map[string]string{"extensions": KindExtension, "profiles": KindProfile} {
		names, err := fs.Glob(sandboxer.Builtin, dir+"/*.yaml")
		if err != nil || len(names) == 0 {
			t.Fatalf("no built-in %s: %v", dir, err)
		}
		for _, name := range names {
			data, err := fs.ReadFile(sandboxer.Builtin, name)
			if err != nil {
				t.Fatal(err)
			}
			if want := "# yaml-language-server: $schema=../docs/schemas/" + kind + ".schema.json\n"; !strings.HasPrefix(string(data), want) {
				t.Errorf("%s does not begin with %q", name, want)
			}
			if err := compiled(t, kind).Validate(plain(t, data)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// TestSchemas holds the published schemas to the types.
func TestSchemas(t *testing.T) {
	for _, kind := range []string{KindProfile, KindExtension, KindQuotas, KindPrices, KindSinks} {
		text, err := Schema(kind)
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "../../docs/schemas/"+kind+".schema.json", text)
	}
	if _, err := Schema("sandbox"); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("Schema(sandbox): %v", err)
	}
}

func golden(t *testing.T, name string, text []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, text, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, text) {
		t.Errorf("%s is stale; go test ./internal/catalog -update rewrites it", name)
	}
}

func TestConfigSchema(t *testing.T) {
	c, err := load(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := c.Extension("fake")
	text, err := ConfigSchema(e.Adapter)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/fake.config.schema.json", text)
	s := compile(t, text)
	if err := s.Validate(plain(t, []byte(goodConfig))); err != nil {
		t.Error(err)
	}
	if err := s.Validate(plain(t, []byte("retries: many\n"))); err == nil {
		t.Error("the schema accepts a wrong type")
	}
	plainAdapter, err := ConfigSchema(sandboxer.Adapter{Kind: "plain"})
	if err != nil || plainAdapter != nil {
		t.Errorf("ConfigSchema without config = %s, %v", plainAdapter, err)
	}
}

func TestInit(t *testing.T) {
	c, err := load(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := c.Extension("fake")
	var b bytes.Buffer
	if err := Init(&b, "my-team", e); err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/starter.yaml", b.Bytes())
	check := func(text string) {
		t.Helper()
		c, err := load(t, map[string]string{"profiles/p.yaml": text})
		if err != nil {
			t.Fatal(err)
		}
		if p, err := c.Profile("my-team"); err != nil || p.Extension != "ext.fake" {
			t.Errorf("profile = %+v, %v", p, err)
		}
	}
	check(b.String())
	// What it shows in comments is right as well.
	var all strings.Builder
	for line := range strings.Lines(b.String()) {
		if l, ok := strings.CutPrefix(line, "# "); ok && !strings.HasSuffix(strings.TrimSpace(l), ".") &&
			strings.Contains(l, ":") && !strings.HasPrefix(l, "Save") {
			line = l
		}
		if l, ok := strings.CutPrefix(line, "#   "); ok {
			line = "  " + l
		}
		all.WriteString(line)
	}
	if n := strings.Count("\n"+all.String(), "\n#"); n > 5 {
		t.Fatalf("too little was uncommented:\n%s", all.String())
	}
	check(all.String())

	if err := Init(&b, "My Team", e); !errors.Is(err, sandboxer.Invalid) {
		t.Errorf("Init(My Team): %v", err)
	}
}

// FuzzLoad: no text makes the loader panic, every fault points into the file, and
// the schema refuses nothing that the loader accepts.
func FuzzLoad(f *testing.F) {
	names, _ := filepath.Glob("testdata/bad/*.txtar")
	for _, name := range names {
		a, err := txtar.ParseFile(name)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range a.Files {
			if file.Name != "want" {
				f.Add(path.Dir(file.Name) == "extensions", string(file.Data))
			}
		}
	}
	f.Add(false, everyField)
	f.Add(true, "id: ext.x\nhandler: fake\ncapabilities: {isolation_levels: [container], pricing_model: self-hosted}\nconfig:\n  token: ${env:X}\n")
	schemas := map[bool]*jsonschema.Schema{false: compiled(f, KindProfile), true: compiled(f, KindExtension)}
	f.Fuzz(func(t *testing.T, isExt bool, text string) {
		name := "profiles/p.yaml"
		if isExt {
			name = "extensions/e.yaml"
		}
		files := map[string]string{name: text}
		_, err := load(t, files)
		if err != nil {
			checkPositions(t, err, files)
			if !utf8.ValidString(err.Error()) {
				t.Errorf("the rendering is not UTF-8: %q", err)
			}
			return
		}
		if doc := plain(t, []byte(text)); doc != nil {
			if err := schemas[isExt].Validate(doc); err != nil {
				t.Errorf("the schema refuses what the loader accepts: %v", err)
			}
		}
	})
}
