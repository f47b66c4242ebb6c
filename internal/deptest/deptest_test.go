// Package deptest holds the tree to its import rules: which package may know which,
// who may bring in a dependency, and what each program links. The rules are in
// docs/design/design.md; the tables here are what is enforced.
package deptest

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

var update = flag.Bool("update", false, "rewrite docs/linked")

const module = "github.com/sand-boxer/sandboxer"

// modules are the directories of the modules that these rules hold for. scripts/sbom and scripts/compose have dependencies
// of their own and import nothing of sandboxer.
var modules = []string{".", "bench"}

// arrows says which packages of this module each package may import, as paths below
// the module ("." is the root package, "x/..." is x and what is below it). Arrows
// point inwards: cmd → cli → the front doors (server, portproxy, provisioner) → edge and manager;
// manager → backend → root. edge and manager do not know each other, a door knows no other door, and
// only cli puts the parts together.
var arrows = map[string][]string{
	".":                    {},
	"api":                  {".", "internal/upload"},
	"agent":                {".", "agent/proto/...", "internal/capture", "internal/halfclose", "internal/procs", "internal/safetar", "internal/upload", "internal/users"},
	"agent/proto":          {},
	"extension":            {".", "internal/catalog", "internal/halfclose", "internal/notes", "internal/protocol"},
	"extensiontest":        {".", "internal/backend"},
	"adapters":             {".", "adapters/..."},
	"internal/backend":     {".", "internal/capture", "internal/execfiles", "internal/procnet"},
	"internal/execfiles":   {".", "internal/capture"},
	"internal/access":      {".", "internal/events", "internal/suggest"}, // who may, and how much: knows no sandbox
	"internal/events":      {"."},                                        // who is told: reads the store, knows no rule about who may
	"internal/marked":      {},
	"internal/lifecycle":   {"."}, // what the sweep does next and when: pure, so every combination is tried
	"internal/manager":     {".", "internal/access", "internal/backend", "internal/capture", "internal/events", "internal/halfclose", "internal/lifecycle", "internal/nofile", "internal/sinks", "internal/spec", "internal/strictjson", "internal/suggest"},
	"internal/sinks":       {".", "internal/capture", "internal/strictjson"},                    // who gets usage rows: reads the store, knows no sandbox
	"internal/spec":        {".", "internal/backend", "internal/lifecycle", "internal/suggest"}, // what a request comes to: pure, no store, no caller of extensions; backend for its words
	"internal/catalog":     {".", "internal/hosted", "internal/prices", "internal/suggest"},
	"internal/edge":        {".", "api", "internal/halfclose", "internal/nofile"},
	"internal/protocol":    {".", "internal/strictjson"},
	"internal/aioserver":   {".", "internal/strictjson"},
	"internal/portproxy":   {".", "internal/access", "internal/edge", "internal/halfclose", "internal/manager"},
	"internal/provisioner": {".", "api", "internal/aioserver", "internal/edge", "internal/manager", "internal/strictjson"},
	"internal/server":      {".", "api", "internal/access", "internal/edge", "internal/halfclose", "internal/manager", "internal/strictjson", "internal/suggest"},
	"internal/cli": {".", "api", "agent", "adapters", "adapters/process", "extensiontest", "internal/access", "internal/backend", "internal/capture", "internal/catalog", "internal/checkpoint/...", "internal/confine", "internal/edge", "internal/halfclose", "internal/manager",
		"internal/latency", "internal/measure", "internal/notes", "internal/portproxy", "internal/provisioner", "internal/server", "internal/sqlstore", "internal/sshrun", "internal/subprocess", "internal/suggest", "internal/wholefile"},
	"internal/sqlstore":          {".", "internal/filelock", "internal/strictjson", "internal/wholefile"},
	"internal/storetest":         {"."},
	"internal/compattest":        {"internal/strictjson"},
	"internal/fieldtest":         {},
	"internal/buildtest":         {"internal/filelock"},
	"internal/edgetest":          {".", "adapters/fake", "api", "internal/backend", "internal/manager", "internal/sqlstore"},
	"internal/checkpoint":        {".", "internal/safetar", "internal/strictjson", "internal/wholefile"},
	"internal/capture":           {},
	"internal/filelock":          {},
	"internal/halfclose":         {"."},
	"internal/mounts":            {".", "internal/namespaces"},
	"internal/namespaces":        {},
	"internal/nofile":            {},
	"internal/notes":             {".", "internal/filelock", "internal/strictjson", "internal/wholefile"},
	"internal/notices":           {"."},
	"internal/checkpoint/s3":     {".", "internal/checkpoint"},
	"internal/mustrun":           {},
	"internal/confine":           {},
	"internal/egress":            {".", "internal/strictjson"},
	"internal/egress/gateway":    {"internal/egress", "internal/strictjson", "internal/usernet", "internal/usernet/tap"},
	"internal/upload":            {"internal/halfclose"},
	"internal/usernet":           {".", "internal/halfclose"},
	"internal/usernet/tap":       {"internal/namespaces", "internal/usernet"},
	"internal/procs":             {},
	"internal/procs/procstest":   {"internal/procs"},
	"internal/procnet":           {},
	"internal/safetar":           {"."},
	"internal/strictjson":        {},
	"internal/subprocess":        {},
	"internal/prices":            {"."},
	"internal/suggest":           {},
	"internal/wholefile":         {},
	"internal/users":             {"."},
	"internal/inside":            {".", "agent", "internal/capture", "internal/program"},
	"internal/latency":           {".", "api", "internal/measure", "internal/strictjson", "internal/wholefile"},
	"internal/measure":           {},
	"internal/sshrun/...":        {".", "internal/capture", "internal/filelock", "internal/halfclose", "internal/marked", "internal/sshrun", "internal/strictjson", "internal/subprocess", "internal/wholefile"},
	"bench":                      {".", "adapters/local", "api", "internal/checkpoint", "internal/measure", "internal/namespaces", "internal/sshrun/...", "internal/strictjson"},
	"internal/deptest":           {},
	"docs":                       {},
	"registry":                   {},
	"sdk/python":                 {},
	"cmd/sandboxer":              {"adapters/local/runner", "adapters/saasstub/service", "agent", "internal/cli"},
	"cmd/sandboxer-agent":        {"agent"},
	"cmd/sandboxer-egress":       {"internal/egress/gateway"},
	"cmd/sandboxer-runner":       {"adapters/local/runner"},
	"internal/engine":            {".", "agent", "internal/capture", "internal/halfclose", "internal/marked", "internal/namespaces", "internal/procnet", "internal/procs", "internal/sshrun"},
	"internal/engine/enginetest": {"internal/halfclose", "internal/procs/procstest"},
	"internal/program":           {"."},
	"internal/hosts":             {"."},
	"internal/hosted":            {".", "internal/capture", "internal/hosts", "internal/strictjson"},
	"internal/hosted/hostedtest": {"."},
	"internal/images/...":        {".", "internal/filelock", "internal/images", "internal/strictjson", "internal/wholefile"},

	"agent/proto/...": {"agent/proto/..."},
}

// overSSH are the adapters for what is reached over SSH.
var overSSH = []string{"composessh", "docker", "vmpacker"}

// adapterMay is what every adapter may import besides packages below its own.
var adapterMay = []string{".", "agent", "internal/capture", "internal/egress", "internal/engine", "internal/execfiles", "internal/filelock", "internal/hosted", "internal/hosts", "internal/images", "internal/inside", "internal/marked", "internal/mounts", "internal/namespaces", "internal/notes", "internal/notices", "internal/prices", "internal/procnet", "internal/procs", "internal/program", "internal/protocol", "internal/safetar", "internal/strictjson", "internal/subprocess", "internal/usernet", "internal/usernet/tap", "internal/users", "internal/wholefile", "sdk/python"}

// owners says who alone may import a dependency directly. Tests may import more.
var owners = map[string][]string{
	"gvisor.dev/gvisor":                        {"adapters/local/...", "internal/usernet"},
	"github.com/erofs/go-erofs":                {"adapters/local/...", "internal/images"},
	"github.com/google/go-containerregistry":   {"adapters/local/...", "internal/images/..."},
	"github.com/opencontainers/runtime-spec":   {"adapters/local/..."},
	"github.com/modal-labs/modal-client/go":    {"adapters/modal"},
	"google.golang.org/grpc":                   {"adapters/modal"},
	"connectrpc.com/connect":                   {"agent/..."},
	"google.golang.org/protobuf":               {"agent/..."},
	"github.com/coder/websocket":               {"api", "internal/server"},
	"github.com/danielgtaylor/huma/v2":         {"internal/server"},
	"github.com/prometheus/client_golang":      {"internal/server"},
	"golang.org/x/time":                        {"internal/edge"},
	"modernc.org/sqlite":                       {"internal/sqlstore"},
	"github.com/pressly/goose/v3":              {"internal/sqlstore"},
	"golang.org/x/sync":                        {"internal/sqlstore"},
	"github.com/spf13/cobra":                   {"internal/cli"},
	"github.com/spf13/pflag":                   {"internal/cli"},
	"golang.org/x/term":                        {"internal/cli", "internal/sshrun"},
	"go.yaml.in/yaml/v4":                       {"internal/catalog", "internal/cli", "adapters/composessh/..."},
	"github.com/compose-spec/compose-go/v2":    {"adapters/composessh/..."},
	"github.com/creack/pty":                    {"adapters/fake/...", "internal/sshrun"},
	"golang.org/x/crypto":                      {"internal/sshrun/..."},
	"github.com/klauspost/compress":            {"internal/images", "internal/checkpoint", "internal/sshrun"},
	"github.com/zeebo/blake3":                  {"internal/checkpoint"},
	"github.com/minio/minio-go/v7":             {"internal/checkpoint/s3"},
	"github.com/johannesboyne/gofakes3":        {},
	"pgregory.net/rapid":                       {"internal/storetest"},
	"golang.org/x/net":                         {"adapters/local/...", "internal/usernet"},
	"github.com/vishvananda/netlink":           {"internal/usernet/tap"},
	"golang.org/x/sys":                         {"adapters/...", "agent/...", "internal/..."},
	"github.com/rogpeppe/go-internal":          {},
	"go.uber.org/goleak":                       {},
	"github.com/invopop/jsonschema":            {},
	"github.com/santhosh-tekuri/jsonschema/v6": {},
}

// free are programs that are not installed; they may import any dependency that exists.
var free = []string{"bench"}

// unwanted are never imported, by any package or test, each for a reason.
var unwanted = map[string]string{
	"github.com/spf13/viper":         "configuration is read strictly, by internal/catalog and internal/cli",
	"github.com/docker/docker":       "the engine's API is small, its module is not",
	"gocloud.dev":                    "one interface of our own does it",
	"github.com/ncruces/go-sqlite3":  "modernc.org/sqlite is the one SQLite",
	"github.com/mattn/go-sqlite3":    "needs a C compiler",
	"gopkg.in/yaml.v2":               "go.yaml.in/yaml/v4 is the one YAML",
	"gopkg.in/yaml.v3":               "go.yaml.in/yaml/v4 is the one YAML",
	"go.yaml.in/yaml/v2":             "go.yaml.in/yaml/v4 is the one YAML",
	"go.yaml.in/yaml/v3":             "go.yaml.in/yaml/v4 is the one YAML",
	"sigs.k8s.io/yaml":               "go.yaml.in/yaml/v4 is the one YAML",
	"github.com/stretchr/testify":    "package testing suffices",
	"github.com/pkg/errors":          "package errors suffices",
	"github.com/sirupsen/logrus":     "log/slog is the one logger",
	"go.uber.org/zap":                "log/slog is the one logger",
	"github.com/hashicorp/go-plugin": "extensions of others are processes with a protocol of ours",
}

// brought are unwanted modules that something wanted links all the same, and why that
// is accepted. No package here imports them either.
var brought = map[string]string{
	"github.com/sirupsen/logrus": "registries' credentials are read by Docker's own code, which says one warning with it",
	"go.yaml.in/yaml/v3":         "the client for S3 links it for something that is not used here",
}

// links bounds what a package may link, directly or not, besides the standard library
// and this module.
var links = map[string][]string{
	".":                {},
	"api":              {"github.com/coder/websocket"},
	"extensiontest":    {},
	"internal/manager": {},
	"agent":            {"connectrpc.com/connect", "google.golang.org/protobuf", "golang.org/x/sys"},
}

// badNames say nothing about what is inside.
var badNames = []string{"util", "utils", "common", "types", "models", "pkg", "helpers", "misc", "base", "lib"}

// A pkg is what go list tells about a package.
type pkg struct {
	ImportPath   string
	Dir          string
	Standard     bool
	Module       *struct{ Path, Version string }
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

// rel is the package's path below the module.
func (p *pkg) rel() string {
	if p.ImportPath == module {
		return "."
	}
	return strings.TrimPrefix(p.ImportPath, module+"/")
}

func (p *pkg) ours() bool { return isOurs(p.ImportPath) }

func isOurs(importPath string) bool {
	return importPath == module || strings.HasPrefix(importPath, module+"/")
}

var root = sync.OnceValue(func() string {
	dir, err := filepath.Abs("../..")
	if err != nil {
		panic(err)
	}
	return dir
})

// all returns the packages of modules.
func all(t *testing.T) (pkgs []*pkg) {
	t.Helper()
	for _, dir := range modules {
		pkgs = append(pkgs, listIn(t, dir, "./...")...)
	}
	return pkgs
}

// list lists packages of the root module.
func list(t *testing.T, args ...string) []*pkg {
	t.Helper()
	return listIn(t, ".", args...)
}

// listIn runs go list for Linux on amd64 without C, wherever the test runs, so that
// the answer is the same everywhere.
func listIn(t *testing.T, dir string, args ...string) []*pkg {
	t.Helper()
	if err := errors.Join(buildtest.Reads(module+"/..."), buildtest.ReadsFiles(filepath.Join(root(), "bench"))); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Dir,Standard,Module,Imports,TestImports,XTestImports,Deps"}, args...)...)
	cmd.Dir = filepath.Join(root(), dir)
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=0", "GOFLAGS=-mod=readonly", "GOWORK=off")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, &stderr)
	}
	var pkgs []*pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, &p)
	}
}

// matches reports whether rel is one of the patterns.
func matches(rel string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		dir, below := strings.CutSuffix(p, "/...")
		return rel == dir || below && strings.HasPrefix(rel, dir+"/")
	})
}

// mayImport returns the patterns that hold for a package.
func mayImport(rel string) ([]string, bool) {
	if may, ok := arrows[rel]; ok {
		return may, true
	}
	if name, ok := strings.CutPrefix(rel, "adapters/"); ok {
		name, _, _ = strings.Cut(name, "/")
		may := append(slices.Clone(adapterMay), "adapters/"+name+"/...")
		if slices.Contains(overSSH, name) {
			may = append(may, "internal/sshrun/...")
		}
		if name == "remote" { // it is a client of another installation
			may = append(may, "api")
		}
		return may, true
	}
	for p, may := range arrows {
		if strings.HasSuffix(p, "/...") && matches(rel, []string{p}) {
			return may, true
		}
	}
	return nil, false
}

func TestArrows(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range all(t) {
		rel := p.rel()
		seen[rel] = true
		may, ok := mayImport(rel)
		if !ok {
			t.Errorf("%s has no place in the tree: give it one in docs/design/design.md and in the table of this test", rel)
			continue
		}
		for _, imp := range p.Imports {
			if isOurs(imp) && !matches((&pkg{ImportPath: imp}).rel(), may) {
				t.Errorf("%s imports %s; it may import %q", rel, imp, may)
			}
		}
	}
	for rel := range arrows {
		if !strings.HasSuffix(rel, "/...") && !seen[rel] {
			t.Errorf("the table has a rule for %s, which does not exist", rel)
		}
	}
}

// within reports whether importPath is mod or in it.
func within(importPath, mod string) bool {
	return importPath == mod || strings.HasPrefix(importPath, mod+"/")
}

func TestDependenciesHaveOwners(t *testing.T) {
	for _, p := range all(t) {
		for _, imp := range p.Imports {
			first, _, _ := strings.Cut(imp, "/")
			if isOurs(imp) || !strings.Contains(first, ".") || matches(p.rel(), free) {
				continue
			}
			found := false
			for mod, who := range owners {
				if within(imp, mod) {
					found = true
					if !matches(p.rel(), who) {
						t.Errorf("%s imports %s, which is for %q", p.rel(), imp, who)
					}
				}
			}
			if !found {
				t.Errorf("%s imports %s: a new dependency needs an owner in the table of this test", p.rel(), imp)
			}
		}
		for _, imp := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
			for mod, why := range unwanted {
				if within(imp, mod) {
					t.Errorf("%s imports %s: %s", p.rel(), imp, why)
				}
			}
		}
	}
}

// TestBenchVersions holds bench/go.mod to go.mod: both name the same version of Go and of every module, and bench measures
// the sandboxer of this tree.
func TestBenchVersions(t *testing.T) {
	type version struct{ Path, Version string }
	type mod struct {
		Go      string
		Require []version
		Replace []struct{ Old, New version }
	}
	read := func(dir string) (m mod) {
		file := filepath.Join(root(), dir, "go.mod")
		if _, err := os.Stat(file); err != nil { // go test sees that this test depends on it
			t.Fatal(err)
		}
		out, err := exec.Command("go", "mod", "edit", "-json", file).Output()
		if err == nil {
			err = json.Unmarshal(out, &m)
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		return m
	}
	ours, bench := read("."), read("bench")
	if ours.Go != bench.Go {
		t.Errorf("go.mod is for Go %s, bench/go.mod for %s", ours.Go, bench.Go)
	}
	for _, b := range bench.Require {
		for _, o := range ours.Require {
			if o.Path == b.Path && o.Version != b.Version {
				t.Errorf("go.mod requires %s %s, bench/go.mod %s: change bench/go.mod, and run go mod tidy in bench", o.Path, o.Version, b.Version)
			}
		}
	}
	if r := bench.Replace; len(ours.Replace) > 0 || len(r) != 1 || r[0].Old != (version{module, ""}) || r[0].New != (version{"../", ""}) {
		t.Errorf("go.mod replaces %v and bench/go.mod %v; only bench replaces, and only %s by ../", ours.Replace, r, module)
	}
}

// linked returns the other modules' packages that name links, as "module ./below".
func linked(t *testing.T, name string) []string {
	var out []string
	for _, p := range list(t, "-deps", "./"+name) {
		if p.Standard || p.ours() || p.Module == nil {
			continue
		}
		below := "." + strings.TrimPrefix(p.ImportPath, p.Module.Path)
		out = append(out, p.Module.Path+" "+below)
	}
	slices.Sort(out)
	return out
}

func TestLinks(t *testing.T) {
	for name, may := range links {
		for _, l := range linked(t, name) {
			mod, _, _ := strings.Cut(l, " ")
			if !slices.Contains(may, mod) {
				t.Errorf("%s links %s; it may link %q", name, l, may)
			}
		}
	}
}

// TestLinkedLists holds the checked-in lists to the truth: what a program links
// changes in a diff, where it is reviewed like code.
func TestLinkedLists(t *testing.T) {
	for _, program := range []string{"sandboxer", "sandboxer-agent", "sandboxer-egress", "sandboxer-runner"} {
		got := linked(t, "cmd/"+program)
		for _, l := range got {
			mod, _, _ := strings.Cut(l, " ")
			if why, ok := unwanted[mod]; ok && brought[mod] == "" {
				t.Errorf("%s links %s: %s", program, l, why)
			}
		}
		name := filepath.Join(root(), "docs", "linked", program+".txt")
		text := fmt.Sprintf("# What %s links besides this module and the standard library (linux/amd64):\n"+
			"# module, package in it. Written by: go test ./internal/deptest -update\n%s\n", program, strings.Join(got, "\n"))
		if *update {
			if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if string(data) == text {
			continue
		}
		had := strings.Split(string(data), "\n")
		for _, l := range got {
			if !slices.Contains(had, l) {
				t.Errorf("docs/linked/%s.txt lacks %s", program, l)
			}
		}
		for _, l := range had {
			if l != "" && !strings.HasPrefix(l, "#") && !slices.Contains(got, l) {
				t.Errorf("docs/linked/%s.txt has %s, which is not linked any more", program, l)
			}
		}
		t.Errorf("docs/linked/%s.txt is stale; if the change is wanted: go test ./internal/deptest -update", program)
	}
}

// TestNotices holds the licence texts that are passed on with the programs to what the
// programs link.
func TestNotices(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(root(), "THIRD_PARTY_NOTICES"))
	if err != nil {
		t.Fatal(err)
	}
	head, _, _ := strings.Cut(string(data), "\n---")
	var want []string
	for _, p := range list(t, "-deps", "./cmd/...") {
		if !p.Standard && !p.ours() && p.Module != nil {
			want = append(want, p.Module.Path+" "+p.Module.Version)
		}
	}
	slices.Sort(want)
	want = append(slices.Compact(want), "std")
	if _, list, _ := strings.Cut(head, "licences below.\n\n"); strings.TrimSpace(list) != strings.Join(want, "\n") {
		t.Errorf("THIRD_PARTY_NOTICES does not list the modules that are linked; renew it: make notices\nit has:\n%s\nlinked:\n%s", list, strings.Join(want, "\n"))
	}
}

// files returns what git has, or will have, of the repository, as paths below its
// root.
func files(t *testing.T, pattern ...string) []string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate", "--"}, pattern...)...)
	cmd.Dir = root()
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("the files are known to git only: %v: %v", cmd.Args, err)
	}
	return strings.FieldsFunc(string(out), func(r rune) bool { return r == 0 })
}

// initialized are the files that may have an init function, and why.
var initialized = map[string]string{
	"adapters/local/extension.go":             "docs/design/adr/0013-first-thread.md",
	"internal/subprocess/subprocess_linux.go": "every program that links it is what its children begin as, tests too",
}

// starters are the files that may start processes without internal/subprocess, and why.
var starters = map[string]string{
	"internal/subprocess/subprocess.go":         "the rule itself",
	"internal/subprocess/subprocess_linux.go":   "what its children become",
	"internal/mounts/mounts_linux.go":           "a process that ends before it has run; it has no environment",
	"adapters/fake/exec.go":                     "for tests: its sandboxes are processes of this machine",
	"agent/attach_linux.go":                     "inside a sandbox, itself, with the sandbox's environment",
	"agent/hold_linux.go":                       "inside a sandbox, itself, with the sandbox's environment",
	"agent/reserve_linux.go":                    "inside a sandbox, with an environment that the caller has made",
	"adapters/local/runner/internal/genseccomp": "a generator that developers run",
	"internal/buildtest":                        "for tests",
	"internal/engine/enginetest":                "for tests",
	"internal/sshrun/sshtest":                   "for tests",
	"bench":                                     "a program that nobody installs",
	"scripts":                                   "programs that nobody installs",
}

// TestChildrenAreNamed: whatever goes to a process that is started is named, because package subprocess starts it.
// os/exec, os and syscall would give it this process's environment, secrets included, and what is open.
func TestChildrenAreNamed(t *testing.T) {
	starts := map[string][]string{
		"os/exec": {"Command", "CommandContext", "Cmd"}, "os": {"StartProcess"},
		"syscall": {"ForkExec", "StartProcess", "Exec", "RawSyscall6"}, "golang.org/x/sys/unix": {"Exec"},
	}
	left := maps.Clone(starters)
	for _, name := range files(t, "*.go") {
		if strings.HasSuffix(name, "_test.go") || strings.Contains(name, "testdata/") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root(), name), nil, parser.SkipObjectResolution)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			t.Error(err)
			continue
		}
		called := map[string][]string{}
		for _, i := range f.Imports {
			p := strings.Trim(i.Path.Value, `"`)
			as := path.Base(p)
			if i.Name != nil {
				as = i.Name.Name
			}
			called[as] = starts[p]
		}
		ast.Inspect(f, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, ok := s.X.(*ast.Ident)
			if !ok || !slices.Contains(called[x.Name], s.Sel.Name) {
				return true
			}
			for allowed := range starters {
				if name == allowed || strings.HasPrefix(name, allowed+"/") {
					delete(left, allowed)
					return true
				}
			}
			t.Errorf("%s uses %s.%s: start processes with internal/subprocess, which gives them what is named and nothing else", name, x.Name, s.Sel.Name)
			return true
		})
	}
	for name := range left {
		t.Errorf("%s starts no process any more; take it off the list", name)
	}
}

// TestSource checks what go vet does not: a comment on every package, no init
// functions, no names that say nothing.
func TestSource(t *testing.T) {
	commented := map[string]bool{}
	for _, name := range files(t, "*.go") {
		dir := path.Dir(name)
		if strings.Contains(name, "testdata/") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root(), name), nil, parser.ParseComments|parser.SkipObjectResolution)
		if errors.Is(err, fs.ErrNotExist) { // deleted, and git not told yet
			continue
		} else if err != nil {
			t.Error(err)
			continue
		}
		if !ast.IsGenerated(f) {
			commented[dir] = commented[dir] || f.Doc != nil && strings.TrimSpace(f.Doc.Text()) != ""
		}
		for _, part := range append(strings.Split(dir, "/"), f.Name.Name) {
			if slices.Contains(badNames, part) {
				t.Errorf("%s: %q is no name for a package; name it after what it does", name, part)
			}
		}
		if ast.IsGenerated(f) {
			continue
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if ok && fn.Recv == nil && fn.Name.Name == "init" && initialized[name] == "" {
				t.Errorf("%s has an init function; do it where it is needed", name)
			}
		}
	}
	for dir, ok := range commented {
		if !ok {
			t.Errorf("package %s has no package comment", dir)
		}
	}
}

// lax are the files that may read JSON with encoding/json itself, which takes a name in
// another case for a field's and the last of two for the one that was meant, and why.
var lax = map[string]string{
	"adapters/fake/fakeworld/main.go":   "the arguments of a program for tests",
	"adapters/fake/remote.go":           "between two halves of a test",
	"adapters/local/live.go":            "gVisor's state",
	"adapters/local/control.go":         "what gVisor's kernel says",
	"internal/images/registry.go":       "what a registry says",
	"adapters/local/runner/spec.go":     "a bundle, which gVisor reads beside us",
	"adapters/process/process.go":       "its own configuration, as the catalogue has written it",
	"adapters/process/script.go":        "the broker's requests, after internal/protocol has checked their lines",
	"adapters/vmpacker/packer.go":       "what qemu-img says",
	"adapters/vmpacker/qmp.go":          "what QEMU says",
	"internal/protocol/values.go":       "parts of a line that has been checked as a whole",
	"agent/client.go":                   "what an agent says, which may be another's",
	"agent/server_linux.go":             "what clients of another's wire say",
	"api/client.go":                     "what a server says, which may be newer",
	"api/call.go":                       "what a server says, which may be newer",
	"api/events.go":                     "what a server says, which may be newer",
	"api/exec.go":                       "what a server says, which may be newer",
	"extensiontest/check.go":            "what it has just written",
	"extensiontest/lifecycle.go":        "what it has just written",
	"internal/checkpoint/read.go":       "the format alone; the rest is then read strictly",
	"internal/checkpoint/store.go":      "the format alone; the rest is then read strictly",
	"internal/compattest/compattest.go": "the fixtures of tests",
	"internal/cli/output.go":            "what it has just written",
	"internal/engine/api.go":            "what an engine says",
	"internal/engine/apicontainer.go":   "what an engine says",
	"internal/engine/apiimage.go":       "what an engine says",
	"internal/engine/container.go":      "what an engine says",
	"internal/engine/image.go":          "what an engine says",
	"internal/mustrun/main.go":          "what go test says",
	"internal/server/route.go":          "a body that was checked before",
	"request.go":                        "as a part of what reads it, which checks it before",
	"internal/strictjson/strictjson.go": "the rule itself",
}

// TestStrictJSON: what is stored, and what callers say, is read by package strictjson.
func TestStrictJSON(t *testing.T) {
	left := maps.Clone(lax)
	for _, name := range files(t, "*.go") {
		if strings.HasSuffix(name, "_test.go") || strings.Contains(name, "testdata/") {
			continue
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, filepath.Join(root(), name), nil, parser.SkipObjectResolution)
		if errors.Is(err, fs.ErrNotExist) { // deleted, and git not told yet
			continue
		} else if err != nil {
			t.Error(err)
			continue
		}
		as := ""
		for _, i := range f.Imports {
			if i.Path.Value == `"encoding/json"` {
				if as = "json"; i.Name != nil {
					as = i.Name.Name
				}
			}
		}
		if as == "" {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok || s.Sel.Name != "Unmarshal" && s.Sel.Name != "NewDecoder" && s.Sel.Name != "Decoder" {
				return true
			}
			if x, ok := s.X.(*ast.Ident); ok && x.Name == as {
				delete(left, name)
				if lax[name] == "" {
					t.Errorf("%s: json.%s: use strictjson.DecodeStored for what is stored and strictjson.Decode for what callers say, or add the file to lax with a reason", fset.Position(s.Pos()), s.Sel.Name)
				}
			}
			return true
		})
	}
	for name := range left {
		t.Errorf("%s does not use encoding/json's decoder any more: take it from lax", name)
	}
}

// TestNoPathsOfThisMachine: nothing in the repository names where it was written.
func TestNoPathsOfThisMachine(t *testing.T) {
	out, err := exec.Command("go", "env", "-json", "GOMODCACHE", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	var env map[string]string
	if err := json.Unmarshal(out, &env); err != nil {
		t.Fatal(err)
	}
	places := []string{root(), env["GOMODCACHE"], env["GOCACHE"]}
	for _, name := range files(t) {
		data, err := os.ReadFile(filepath.Join(root(), name))
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			t.Error(err)
			continue
		}
		for _, p := range places {
			if strings.Count(p, "/") < 2 {
				continue // "/src" may stand for anything
			}
			for line, text := range bytes.Split(data, []byte("\n")) {
				i := bytes.Index(text, []byte(p))
				if i < 0 {
					continue
				}
				if rest := text[i+len(p):]; len(rest) == 0 || !isNameByte(rest[0]) {
					t.Errorf("%s:%s names a place of this machine: %s", name, strconv.Itoa(line+1), p)
				}
			}
		}
	}
}

func isNameByte(b byte) bool {
	return b == '_' || b == '-' || '0' <= b && b <= '9' || 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z'
}
