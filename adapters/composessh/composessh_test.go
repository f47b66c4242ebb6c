package composessh

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/buildtest"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

const image = enginetest.Image

// engines are what TestMain ends: private engines, each started when it is asked for.
var engines = []*enginetest.Docker{{}, {}}

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "broker" {
		if err := broker(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 4 && os.Args[1] == "outside" {
		if err := serveOutside(os.Args[2], os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// They wait for engines and hosts more than they compute, also on two processors.
	flag.Parse()
	if p := flag.Lookup("test.parallel"); p.Value.String() == p.DefValue {
		p.Value.Set("3")
	}
	code := m.Run()
	buildtest.Remove()
	for _, e := range engines {
		e.Stop()
	}
	enginetest.StopPodman()
	os.Exit(code)
}

// docker returns the address of a Docker engine that has the test image.
func docker(t testing.TB) string { return engines[0].Start(t) }

// another is a second engine.
func another(t testing.TB) string { return engines[1].Start(t) }

// podman returns the environment that gives Podman a store of the tests' own, with the
// test image in it.
func podman(t testing.TB) []string {
	t.Helper()
	if _, err := exec.LookPath("podman-compose"); err != nil {
		t.Skip("there is no podman-compose (scripts/setup.sh installs it)")
	}
	return enginetest.Podman(t)
}

// onlyLong skips what takes minutes on Podman, and is run on Docker with every change.
func onlyLong(t *testing.T, compose string) {
	t.Helper()
	if compose == "podman-compose" && os.Getenv("SANDBOXER_TEST_WHOLE") == "" {
		t.Skip("takes a minute or two on Podman: SANDBOXER_TEST_WHOLE=1 runs it, as make test-long does")
	}
}

// A rig is one or more hosts with engines, and an installation that has them.
type rig struct {
	dir     string // of the extension
	hosts   string // records
	servers []*sshtest.Server
	program string     // docker or podman
	engines [][]string // environments in which the program reaches them
	compose string
	cfg     Config
}

// owners are the rigs in use, by the owners that have sandboxes there.
var owners sync.Map

// newRig starts hosts that share an engine.
func newRig(t testing.TB, compose string, hosts int) *rig {
	t.Helper()
	r := &rig{dir: t.TempDir(), hosts: t.TempDir(), compose: compose, program: "docker", cfg: defaults}
	var env []string
	if compose == "podman-compose" {
		r.program, env = "podman", podman(t)
	} else if hosts > 0 {
		env = []string{docker(t)}
	}
	for i := range hosts {
		r.addHost(t, fmt.Sprintf("host-%d", i+1), env...)
	}
	r.cfg.ComposeCmd, r.cfg.SSHConfig, r.cfg.Capacity = compose, "none", 60
	r.cfg.Agent = buildtest.Program(t, "cmd/sandboxer-agent")
	if err := r.cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	return r
}

// addHost starts a host whose commands have that environment.
func (r *rig) addHost(t testing.TB, name string, env ...string) *sshtest.Server {
	t.Helper()
	return r.host(t, name, sshtest.Options{Silent: true, Env: env})
}

// host starts a host whose server is as the options say.
func (r *rig) host(t testing.TB, name string, o sshtest.Options) *sshtest.Server {
	t.Helper()
	env := o.Env
	if !slices.ContainsFunc(r.engines, func(e []string) bool { return slices.Equal(e, env) }) {
		r.engines = append(r.engines, env)
	}
	s := sshtest.Start(t, o)
	if r.compose == "docker compose" {
		enginetest.InstallCompose(t, s.Dir)
	} else if _, err := exec.LookPath(strings.Fields(r.compose)[0]); err != nil {
		t.Skipf("there is no %s (scripts/setup.sh installs it)", r.compose)
	}
	r.servers = append(r.servers, s)
	target := s.Target()
	rec := sshrun.Record{Name: name, Addr: target.Addr, Port: target.Port, IdentityFile: target.IdentityFile, HostKeys: target.HostKeys, State: sshrun.Active, AddedAt: time.Now()}
	if err := sshrun.NewRegistry(r.hosts).Put(rec); err != nil {
		t.Fatal(err)
	}
	return s
}

func (r *rig) open(t testing.TB, owner string) *extension {
	t.Helper()
	if other, taken := owners.LoadOrStore(owner, r); taken && other != r {
		// All hosts are this machine, on which the processes of a sandbox are found by its name alone.
		t.Fatalf("another test that runs now has the owner %s", owner)
	}
	t.Cleanup(func() { owners.Delete(owner) })
	dir := filepath.Join(r.dir, owner)
	ext, err := open(t.Context(), sandboxer.Env{Extension: "ext.test", Owner: owner, Dir: dir, Hosts: r.hosts, Notes: notes.New(dir, "ext.test", []byte(owner))}, r.cfg)
	if err != nil {
		t.Fatal(err)
	}
	return ext.(*extension)
}

// engine runs an engine's program on this machine, which is every host of the rig.
func (r *rig) engine(t testing.TB, env []string, args ...string) string {
	t.Helper()
	cmd := exec.Command(r.program, args...)
	cmd.Env = append(os.Environ(), env...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v: %s", r.program, args, err, &errs)
	}
	return strings.TrimSpace(string(out))
}

// remains is everything that is there of the owner.
func (r *rig) remains(t testing.TB, owner string) (out []string) {
	t.Helper()
	f := "label=dev.sandboxer.owner=" + owner
	for _, env := range r.engines {
		for what, args := range map[string][]string{
			"container": {"ps", "-aq", "--filter", f}, "network": {"network", "ls", "-q", "--filter", f},
			"volume": {"volume", "ls", "-q", "--filter", f}, "image": {"images", "-q", "--filter", f, "--filter", "dangling=false"}, // layers may stay: TestLayers
		} {
			for id := range strings.FieldsSeq(r.engine(t, env, args...)) {
				out = append(out, what+" "+id)
			}
		}
		// And what compose made without our labels.
		for id := range strings.FieldsSeq(r.engine(t, env, "network", "ls", "--format", "{{.Name}}")) {
			if strings.HasPrefix(id, "sbx-"+owner+"-") {
				out = append(out, "network "+id)
			}
		}
	}
	for _, s := range r.servers {
		for _, pattern := range []string{"sbx-" + owner + "-*", ".net/*"} {
			found, _ := filepath.Glob(filepath.Join(s.Dir, ".sandboxer/compose", pattern))
			out = append(out, slices.DeleteFunc(found, func(name string) bool {
				to, _ := os.Readlink(name)
				return to == "../.taken" // a network of another test, on the same engine, has this subnet
			})...)
		}
	}
	return append(out, r.noted(owner)...)
}

// noted are the notes and locks of an owner.
func (r *rig) noted(owner string) []string {
	notes, _ := filepath.Glob(filepath.Join(r.dir, owner, "notes", "*.note"))
	locks, _ := filepath.Glob(filepath.Join(r.dir, owner, "notes", "lock", "*.lock"))
	return append(notes, locks...)
}

// repo makes a directory with a compose file and more.
func repo(t testing.TB, compose string, more map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range more {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "compose.yaml"), []byte(compose), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

const single = `services:
  main:
    image: ` + image + `
    command: [sleep, "86400"]
    working_dir: /work
    volumes: [".:/work"]
`

// current is the compose program that the tests run with: today's, if it was built.
func current(t testing.TB) string {
	t.Helper()
	if c := os.Getenv("SANDBOXER_TEST_COMPOSE"); c != "" {
		return c
	}
	if _, err := os.Stat("../../bin/docker-compose"); err == nil {
		return "docker compose"
	}
	return "docker-compose"
}

// The suite runs with one compose program, which the environment may choose;
// TestFlavours is about what differs.
func TestConformance(t *testing.T) {
	r := newRig(t, current(t), 1)
	open := func(owner string) func(t *testing.T) sandboxer.Extension {
		return func(t *testing.T) sandboxer.Extension {
			e := r.open(t, owner)
			e.settle = -time.Second // how long services must have run is TestFlavours' business
			return e
		}
	}
	extensiontest.Run(t, extensiontest.Harness{
		Inputs:   Adapter.Inputs,
		Open:     open("conf"),
		Stranger: open("stranger"),
		Spec: sandboxer.Spec{Owner: "conf", Inputs: map[string]string{"volumes": "all",
			"repo": repo(t, strings.Replace(single, `".:/work"`, `".:/work", "data:/data"`, 1)+"volumes: {data: {}}\n", map[string]string{".sandboxerignore": "/compose.yaml\n/.sandboxerignore\n"})}},
		Volume: "/data",
		Want: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanProbe,
			sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanPause, sandboxer.CanCapacity, sandboxer.CanStats, sandboxer.CanCheckpoint,
			sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch},
		Enforces: []extensiontest.Feature{extensiontest.CPU, extensiontest.Memory, extensiontest.PIDs, extensiontest.Owned},
		Parallel: 3,
		Settle:   2 * time.Second,
		Kill: func(t *testing.T, h sandboxer.Handle) {
			env := r.engines[0]
			r.engine(t, env, append([]string{"rm", "-f"}, strings.Fields(r.engine(t, env, "ps", "-aq", "--filter", "label="+engine.LabelName+"="+h.Ref))...)...)
		},
		Hang: func(t *testing.T, _ sandboxer.Handle) func() { return engines[0].Hang(t) },
		Listen: func(port int) []string {
			return []string{"/bin/echoer", fmt.Sprintf("127.0.0.1:%d", port)}
		},
	})
	if left := r.remains(t, "conf"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestPlace runs the suite's group on two hosts with an engine each. The extension's directory
// is another one, and empty, wherever the suite asks for that.
func TestPlace(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 0)
	r.addHost(t, "left", docker(t))
	r.addHost(t, "right", another(t))
	relays := map[string]*sshtest.Relay{"left": r.behind(t, "left"), "right": r.behind(t, "right")}
	open := func(t *testing.T) sandboxer.Extension {
		e := r.open(t, "place")
		e.settle = -time.Second
		return e
	}
	extensiontest.RunGroups(t, extensiontest.Harness{
		Inputs: Adapter.Inputs,
		Open:   open,
		Bare: func(t *testing.T) sandboxer.Extension {
			e := open(t).(*extension)
			e.env.Dir = t.TempDir()
			return e
		},
		Spec: sandboxer.Spec{Owner: "place", Inputs: map[string]string{"repo": repo(t, single, nil)}},
		Want: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanProbe,
			sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanPause, sandboxer.CanCapacity, sandboxer.CanStats, sandboxer.CanCheckpoint,
			sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch},
		Settle: 2 * time.Second,
		Hosts:  []string{"left", "right"},
		Away:   func(t *testing.T, host string) func() { return relays[host].Away(t) },
	}, "place")
	if left := r.remains(t, "place"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestDirectoryDeleted: what the extension keeps for itself is not needed to end a sandbox.
func TestDirectoryDeleted(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 0)
	r.addHost(t, "left", docker(t))
	r.addHost(t, "right", another(t))
	e := r.opened(t, "deleted")
	dir := repo(t, single, nil)
	for i, host := range []string{"left", "right"} {
		s := order(fmt.Sprint("box-", i), dir)
		s.Host = host
		h, _ := provision(t, e, s)
		if h.Host != host {
			t.Fatalf("it is on %s", h.Host)
		}
	}
	if err := os.RemoveAll(filepath.Join(r.dir, "deleted")); err != nil {
		t.Fatal(err)
	}
	for i, e := range []*extension{e, r.opened(t, "deleted")} { // the process that has it open, and the next one
		if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: fmt.Sprint("box-", i), Generation: 1}); err != nil {
			t.Errorf("Teardown: %v", err)
		}
	}
	if left := r.remains(t, "deleted"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}
