package composessh

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

const image = "sandboxer-test-busybox:1"

// engines are what TestMain ends: a private Docker engine, started when it is asked for.
var engines struct {
	once sync.Once
	dir  string
	host string
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if engines.dir != "" {
		exec.Command("sh", "../../scripts/dockerd.sh", "stop", engines.dir).Run()
		os.RemoveAll(engines.dir)
	}
	os.Exit(code)
}

// docker returns the address of an engine that has the test image.
func docker(t testing.TB) string {
	t.Helper()
	engines.once.Do(func() {
		if _, err := exec.LookPath("dockerd"); err != nil || os.Getuid() != 0 {
			engines.err = fmt.Errorf("a Docker engine needs root and dockerd (scripts/setup.sh installs it)")
			return
		}
		dir, err := os.MkdirTemp("/tmp", "sbd")
		if err != nil {
			engines.err = err
			return
		}
		engines.dir = dir
		out, err := exec.Command("sh", "../../scripts/dockerd.sh", "start", dir).Output()
		if engines.host = strings.TrimSpace(string(out)); err != nil {
			engines.err = fmt.Errorf("dockerd: %w", err)
			return
		}
		imp := exec.Command("docker", "import", "-", image)
		imp.Env = append(os.Environ(), "DOCKER_HOST="+engines.host)
		imp.Stdin = bytes.NewReader(busyboxTar(t))
		if out, err := imp.CombinedOutput(); err != nil {
			engines.err = fmt.Errorf("docker import: %w: %s", err, out)
		}
	})
	if engines.err != nil {
		t.Skip(engines.err)
	}
	return engines.host
}

// busyboxTar is the root of an image made of this machine's busybox.
func busyboxTar(t testing.TB) []byte {
	t.Helper()
	data, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		t.Skip("there is no busybox")
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(h tar.Header, text []byte) {
		h.Size = int64(len(text))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		w.Write(text)
	}
	for _, d := range []string{"bin/", "etc/", "root/", "work/", "proc/", "sys/", "dev/"} {
		put(tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	put(tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, nil)
	put(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, data)
	echoer := filepath.Join(t.TempDir(), "echoer")
	build := exec.Command("go", "build", "-o", echoer, "./testdata/echo")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	program, err := os.ReadFile(echoer)
	if err != nil {
		t.Fatal(err)
	}
	put(tar.Header{Name: "bin/echoer", Typeflag: tar.TypeReg, Mode: 0o755}, program)
	list, err := exec.Command("/usr/bin/busybox", "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(list)) {
		if name != "busybox" {
			put(tar.Header{Name: "bin/" + name, Typeflag: tar.TypeSymlink, Linkname: "busybox"}, nil)
		}
	}
	put(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"))
	put(tar.Header{Name: "etc/group", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:\nnogroup:x:65534:\n"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// A rig is one or more hosts with an engine, and an installation that has them.
type rig struct {
	dir     string // of the extension
	hosts   string // records
	servers []*sshtest.Server
	engine  string
	compose string
	cfg     Config
}

func newRig(t testing.TB, compose string, hosts int) *rig {
	t.Helper()
	r := &rig{dir: t.TempDir(), hosts: t.TempDir(), compose: compose, engine: docker(t)}
	for i := range hosts {
		r.addHost(t, fmt.Sprintf("host-%d", i+1), nil)
	}
	r.cfg = defaults
	r.cfg.ComposeCmd, r.cfg.Engine, r.cfg.SSHConfig, r.cfg.Capacity = compose, r.engine, "none", 60
	if err := r.cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) addHost(t testing.TB, name string, relay *sshtest.Relay) *sshtest.Server {
	t.Helper()
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	if r.compose == "docker compose" {
		plugin, err := filepath.Abs("../../bin/docker-compose")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(plugin); err != nil {
			t.Skip("there is no compose plugin in bin (scripts/setup.sh builds it)")
		}
		dir := filepath.Join(s.Dir, ".docker", "cli-plugins")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(plugin, filepath.Join(dir, "docker-compose")); err != nil {
			t.Fatal(err)
		}
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

func (r *rig) open(t testing.TB, owner string) *engine {
	t.Helper()
	dir := filepath.Join(r.dir, owner)
	ext, err := open(t.Context(), sandboxer.Env{Extension: "ext.test", Owner: owner, Dir: dir, Hosts: r.hosts}, r.cfg)
	if err != nil {
		t.Fatal(err)
	}
	return ext.(*engine)
}

// docker runs the engine's program on this machine, which is every host of the rig.
func (r *rig) docker(t testing.TB, args ...string) string {
	t.Helper()
	cmd := exec.Command("docker", args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+r.engine)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("docker %q: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// remains is everything that is there of the owner.
func (r *rig) remains(t testing.TB, owner string) (out []string) {
	t.Helper()
	f := "label=dev.sandboxer.owner=" + owner
	for what, args := range map[string][]string{
		"container": {"ps", "-aq", "--filter", f}, "network": {"network", "ls", "-q", "--filter", f},
		"volume": {"volume", "ls", "-q", "--filter", f}, "image": {"images", "-q", "--filter", f},
	} {
		for id := range strings.FieldsSeq(r.docker(t, args...)) {
			out = append(out, what+" "+id)
		}
	}
	for _, s := range r.servers {
		for _, pattern := range []string{"sbx-" + owner + "-*", ".net/*"} {
			found, _ := filepath.Glob(filepath.Join(s.Dir, ".sandboxer/compose", pattern))
			out = append(out, found...)
		}
	}
	placed, _ := filepath.Glob(filepath.Join(r.dir, owner, "placed", "*"))
	return append(out, placed...)
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
    healthcheck: {test: ["CMD", "true"], interval: 200ms}
    working_dir: /work
    volumes: [".:/work"]
`

func TestConformance(t *testing.T) {
	if os.Getenv("SANDBOXER_TEST_COMPOSE") == "" {
		t.Skip("the adapter is not finished; SANDBOXER_TEST_COMPOSE=1 runs what there is")
	}
	for _, compose := range []string{"docker compose", "docker-compose"} {
		t.Run(strings.ReplaceAll(compose, " ", "-"), func(t *testing.T) {
			r := newRig(t, compose, 1)
			extensiontest.Run(t, extensiontest.Harness{
				Open:     func(t *testing.T) sandboxer.Extension { return r.open(t, "conf") },
				Stranger: func(t *testing.T) sandboxer.Extension { return r.open(t, "stranger") },
				Spec:     sandboxer.Spec{Owner: "conf", Inputs: map[string]string{"repo": repo(t, single, map[string]string{".sandboxerignore": "/compose.yaml\n/.sandboxerignore\n"})}},
				Want: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanDial, sandboxer.CanProbe,
					sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanPause, sandboxer.CanCapacity, sandboxer.CanStats},
				Enforces: []extensiontest.Feature{extensiontest.CPU, extensiontest.Memory, extensiontest.PIDs},
				Settle:   2 * time.Second,
				Kill: func(t *testing.T, h sandboxer.Handle) {
					for id := range strings.FieldsSeq(r.docker(t, "ps", "-aq", "--filter", "label="+labelName+"="+h.Ref)) {
						r.docker(t, "rm", "-f", id)
					}
				},
				Listen: func(port int) []string {
					return []string{"/bin/echoer", fmt.Sprintf("127.0.0.1:%d", port)}
				},
			})
			if left := r.remains(t, "conf"); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}
