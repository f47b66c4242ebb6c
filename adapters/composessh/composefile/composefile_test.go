package composefile

import (
	"context"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// workspace is a directory with what the files of the corpus name.
func workspace(t testing.TB, compose string) string {
	t.Helper()
	top := t.TempDir()
	dir := filepath.Join(top, "a", "repo")
	for name, text := range map[string]string{"compose.yaml": compose, "Dockerfile": "FROM scratch", "sub/file": "x", "app.env": "FROM_FILE=1\nMODE=two\n", "../outside.env": "SECRET=1"} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, to := range map[string]string{"link": "/etc", "linkfile": "/etc/passwd"} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestHostile holds every file of the corpus to be refused where its first line says,
// and for that reason.
func TestHostile(t *testing.T) {
	files, err := filepath.Glob("testdata/hostile/*.yaml")
	if err != nil || len(files) < 40 {
		t.Fatalf("%d hostile files, %v", len(files), err)
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".yaml"), func(t *testing.T) {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			head, _, _ := strings.Cut(string(text), "\n")
			where, why, ok := strings.Cut(strings.TrimPrefix(head, "# "), ": ")
			if !ok {
				where, why = strings.TrimSuffix(where, ":"), ""
			}
			line, err := strconv.Atoi(where)
			if err != nil {
				t.Fatal(err)
			}
			p, err := Load(t.Context(), workspace(t, string(text)), Options{})
			if sandboxer.KindOf(err) != sandboxer.Invalid {
				t.Fatalf("Load = %+v, %v; want it refused", p, err)
			}
			said := sandboxer.Message(err)
			want := "compose.yaml:"
			if line > 0 {
				want += strconv.Itoa(line) + ": "
			}
			if !slices.ContainsFunc(strings.Split(said, "\n"), func(l string) bool { return strings.HasPrefix(l, want) && strings.Contains(l, why) }) {
				t.Errorf("it is refused with %q; want a line that begins with %q and says %q", said, want, why)
			}
			if strings.Contains(said, os.TempDir()+"/") {
				t.Errorf("the message names a place of this machine: %q", said)
			}
		})
	}
}

const full = `version: "3.8"
name: mine
x-common: &common
  restart: always
  environment: &env
    SHARED: "yes"
services:
  web:
    <<: *common
    build: {context: ., args: {A: "1"}}
    container_name: web
    command: ["sh", "-c", "echo $$HOME ${WHO:-nobody}"]
    environment:
      <<: *env
      PRICE: "5$$"
      TOKEN:
    env_file: [app.env, {path: missing.env, required: false}]
    ports: ["8080:80", "127.0.0.1:9000-9001:9000-9001/udp"]
    volumes: [".:/src", "./sub/file:/etc/file:ro", "data:/data", "/cache"]
    depends_on:
      db: {condition: service_healthy}
      migrate: {condition: service_completed_successfully}
    secrets: [key]
    deploy: {replicas: 2, resources: {limits: {cpus: "0.5", memory: 64M}}}
  migrate:
    image: busybox:1
  db:
    image: postgres:16
    healthcheck: {test: "pg_isready", interval: 1s}
    networks: [back]
  off:
    image: busybox:1
    profiles: [debug]
secrets:
  key: {environment: TOKEN}
volumes:
  data: {name: shared-data}
networks:
  back: {internal: true}
`

func render(t *testing.T, p *Project, r Rendering) map[string]any {
	t.Helper()
	text, err := p.Render(r)
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]any
	if err := yaml.Unmarshal(text, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestRender(t *testing.T) {
	p, err := Load(t.Context(), workspace(t, full), Options{Env: map[string]string{"TOKEN": "s3cret$x"}})
	if err != nil {
		t.Fatal(err)
	}
	out := render(t, p, Rendering{
		Dir: "/srv/sbx-1", Labels: map[string]string{"dev.sandboxer.name": "sbx-1"}, Env: map[string]string{"MODE": "request"},
		Subnets: map[string]string{"back": "10.1.0.0/28", "default": "10.1.0.16/28"}, Sealed: true, StopAfter: time.Second,
		Limits: sandboxer.Limits{MilliCPU: 2000, MemoryBytes: 256 << 20, PIDs: 40}, ImageOf: func(s string) string { return "sbx-1-" + s },
	})
	at := func(keys ...string) any {
		var v any = out
		for _, k := range keys {
			m, _ := v.(map[string]any)
			v = m[k]
		}
		return v
	}
	for want, got := range map[string]any{
		"sbx-1-web": at("services", "web", "image"), "no": at("services", "web", "restart"), "<nil>": at("services", "web", "container_name"),
		"[sh -c echo $$HOME nobody]": at("services", "web", "command"), // still $HOME for who reads it next
		"5$$":                        at("services", "web", "environment", "PRICE"),
		"s3cret$$x":                  at("services", "web", "environment", "TOKEN"),
		"request":                    at("services", "web", "environment", "MODE"), "1": at("services", "web", "environment", "FROM_FILE"),
		"yes": at("services", "web", "environment", "SHARED"),
		"[127.0.0.1::80/tcp 127.0.0.1::9000/udp 127.0.0.1::9001/udp]": at("services", "web", "ports"),
		"0.5": at("services", "web", "cpus"), "67108864": at("services", "web", "mem_limit"), "67108864 ": fmt.Sprint(at("services", "db", "mem_limit"), " "),
		"10": at("services", "db", "pids_limit"), "sbx-1": at("services", "db", "labels", "dev.sandboxer.name"),
		"10.1.0.0/28": at("networks", "back", "ipam", "config").([]any)[0].(map[string]any)["subnet"], "true": at("networks", "default", "internal"),
		"map[labels:map[dev.sandboxer.name:sbx-1]]": at("volumes", "data"), "2": at("services", "web", "scale"),
	} {
		if strings.TrimSpace(fmt.Sprint(got)) != strings.TrimSpace(want) {
			t.Errorf("got %v; want %s", got, want)
		}
	}
	var mounts []string
	for _, m := range at("services", "web", "volumes").([]any) {
		m := m.(map[string]any)
		mounts = append(mounts, fmt.Sprint(m["source"], ">", m["target"], " ", m["read_only"]))
	}
	if got, want := strings.Join(mounts, "; "), "/srv/sbx-1/repo>/src <nil>; /srv/sbx-1/copies/copy-0>/etc/file true; data>/data <nil>; <nil>>/cache <nil>; /srv/sbx-1/files/file-0>/run/secrets/key true"; got != want {
		t.Errorf("mounts are %s\nwant %s", got, want)
	}
	if len(p.Files) != 1 || string(p.Files[0].Content) != "s3cret$x" || len(p.Copies) != 1 || p.Copies[0] != (Bind{Source: "sub/file", File: true, Copy: "copy-0"}) {
		t.Errorf("files %v, copies %v", p.Files, p.Copies)
	}
	if len(p.Services) != 3 || p.Services[0].Name != "web" || p.Services[0].Workspace != "/src" || !p.Services[1].OneShot || !p.Services[2].Healthy || p.Services[0].Ports[0] != (Port{80, 8080, "tcp"}) {
		t.Errorf("services are %+v", p.Services)
	}
	if all := strings.Join(p.Notes, "\n"); !strings.Contains(all, "container_name") || !strings.Contains(all, "restart: always") || !strings.Contains(all, "as it was at the start") {
		t.Errorf("notes are %q", p.Notes)
	}
	if _, err := p.Render(Rendering{Limits: sandboxer.Limits{MemoryBytes: 100 << 20}, ImageOf: func(string) string { return "x" }}); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("services that ask for more than there is: %v", err)
	}
}

// TestSecretsStayOut holds messages to be free of what variables say.
func TestSecretsStayOut(t *testing.T) {
	for _, text := range []string{"services: {web: {image: x, ports: [\"${TOKEN}\"]}}", "services: {web: {image: x, mem_limit: \"${TOKEN}\"}}", "services: {\"${TOKEN}\": 1}"} {
		_, err := Load(t.Context(), workspace(t, text), Options{Env: map[string]string{"TOKEN": "s3cretvalue"}})
		if err == nil || strings.Contains(err.Error()+sandboxer.HintOf(err), "s3cretvalue") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// allowed are the keys that may be in what Render writes, by level.
var allowed = map[string][]string{
	"":         {"services", "networks", "volumes"},
	"networks": {"driver", "labels", "internal", "ipam"},
	"volumes":  {"labels"},
	"services": {"image", "labels", "restart", "init", "logging", "command", "entrypoint", "working_dir", "user", "hostname", "domainname",
		"stop_signal", "platform", "ipc", "network_mode", "pull_policy", "cap_drop", "dns", "dns_opt", "dns_search", "group_add", "links",
		"tmpfs", "expose", "security_opt", "tty", "stdin_open", "read_only", "shm_size", "cpu_shares", "cpus", "mem_limit", "memswap_limit",
		"pids_limit", "scale", "extra_hosts", "stop_grace_period", "environment", "ulimits", "depends_on", "healthcheck", "networks",
		"ports", "volumes"},
}

// FuzzLoad: whatever the bytes are, what is rendered has allowed keys only, mounts
// nothing but places of the sandbox's directory and publishes on loopback only.
func FuzzLoad(f *testing.F) {
	f.Add(full)
	files, _ := filepath.Glob("testdata/hostile/*.yaml")
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		p, err := Load(ctx, workspace(t, text), Options{})
		if err != nil {
			return
		}
		out := render(t, p, Rendering{Dir: "/srv/sbx-1", ImageOf: func(string) string { return "x" }})
		only := func(m map[string]any, keys []string) {
			for k := range m {
				if !slices.Contains(keys, k) {
					t.Fatalf("the key %q is rendered from %q", k, text)
				}
			}
		}
		only(out, allowed[""])
		for _, level := range []string{"networks", "volumes", "services"} {
			objects, _ := out[level].(map[string]any)
			for _, o := range objects {
				only(o.(map[string]any), allowed[level])
			}
		}
		for _, s := range out["services"].(map[string]any) {
			s := s.(map[string]any)
			ports, _ := s["ports"].([]any)
			for _, port := range ports {
				if !strings.HasPrefix(port.(string), "127.0.0.1::") {
					t.Fatalf("port %v from %q", port, text)
				}
			}
			mounts, _ := s["volumes"].([]any)
			for _, m := range mounts {
				m := m.(map[string]any)
				src, _ := m["source"].(string)
				if m["type"] == "bind" && (filepath.Clean(src) != src || !strings.HasPrefix(src, "/srv/sbx-1/")) {
					t.Fatalf("mount of %q from %q", src, text)
				}
			}
		}
	})
}

// Every service has no-new-privileges, unless the profile says otherwise and the file does
// not ask for it; what programs of the host would obey is left out, and told.
func TestHeldTight(t *testing.T) {
	p, err := Load(t.Context(), workspace(t, `services:
  web:
    image: x
    labels: {traefik.enable: "true", com.centurylinklabs.watchtower.enable: "true", mine: "yes", org.opencontainers.image.title: t}
    ulimits: {nofile: 65536, memlock: -1}
    mem_limit: 64m
  own:
    image: x
    security_opt: ["no-new-privileges:true"]
`), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, allow := range []bool{false, true} {
		services := render(t, p, Rendering{Dir: "/srv/sbx-1", NewPrivileges: allow})["services"].(map[string]any)
		for name, s := range services {
			s := s.(map[string]any)
			opts, _ := s["security_opt"].([]any)
			if want := !allow || name == "own"; want != slices.Contains(opts, any("no-new-privileges")) || len(opts) > 1 {
				t.Errorf("new privileges %t: %s has security_opt %v", allow, name, opts)
			}
			if l, _ := s["labels"].(map[string]any); name == "web" && (len(l) != 1 || l["org.opencontainers.image.title"] != "t") {
				t.Errorf("%s has the labels %v", name, l)
			}
		}
	}
	if n := strings.Join(p.Notes, "\n"); !strings.Contains(n, "services.web: labels are left out") || !strings.Contains(n, `"mine", "traefik.enable"`) {
		t.Errorf("the notes are %s", n)
	}
}

// FuzzShare: what all containers get together stays within the sandbox's limits, whatever
// the file asks for, and the sum is that of arithmetic without bounds.
func FuzzShare(f *testing.F) {
	f.Add(int64(1<<62), int64(0), int64(1<<40), uint64(4), uint64(1), int64(4<<30), int64(100), 1.0)
	f.Add(int64(64<<20), int64(64<<20), int64(10), uint64(2), uint64(60), int64(1<<30), int64(1000), 1e30)
	f.Add(int64(1<<50), int64(1<<50), int64(1<<22), uint64(60), uint64(1<<62), int64(1<<50), int64(1<<22), 0.001)
	f.Fuzz(func(t *testing.T, mem1, mem2, pids1 int64, scale1, scale2 uint64, memory, pids int64, cpus float64) {
		text := fmt.Sprintf("services:\n  a: {image: x, mem_limit: %d, pids_limit: %d, scale: %d, cpus: %g}\n  b: {image: x, mem_limit: %d, scale: %d}\n  c: {image: x}\n",
			mem1, pids1, scale1, cpus, mem2, scale2)
		all := sandboxer.Limits{MemoryBytes: memory, PIDs: pids, MilliCPU: 4000}
		p, err := Load(t.Context(), workspace(t, text), Options{})
		if err != nil || all.Check() != nil {
			return
		}
		shares, err := p.share(all)
		if err != nil {
			return
		}
		var sum [3]big.Int
		for _, s := range p.Services {
			q := shares[s.Name]
			for i, n := range []int64{q.memory, q.pids, q.milliCPU} {
				if n < 0 {
					t.Fatalf("%s: a share of %s is %d", text, s.Name, n)
				}
				sum[i].Add(&sum[i], new(big.Int).Mul(big.NewInt(n), big.NewInt(int64(s.Replicas))))
			}
		}
		for i, most := range []int64{memory, pids, 4000} {
			if most > 0 && sum[i].Cmp(big.NewInt(most)) > 0 {
				t.Fatalf("%s: %s of %d are given away (%d)", text, &sum[i], most, i)
			}
		}
	})
}
