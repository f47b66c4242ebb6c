package composefile

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
	"go.yaml.in/yaml/v4"

	"github.com/sand-boxer/sandboxer"
)

// write makes files below dir, which need not exist.
func write(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// workspace is a directory with what the files of the corpus name.
func workspace(t testing.TB, compose string) string {
	t.Helper()
	top := t.TempDir()
	dir := filepath.Join(top, "a", "repo")
	write(t, dir, map[string]string{"compose.yaml": compose, "Dockerfile": "FROM scratch", "sub/file": "x", "app.env": "FROM_FILE=1\nMODE=two\n", "../outside.env": "SECRET=1"})
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
		Agent: &Agent{Service: "db", Source: "/srv/.agent/1"},
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
		"map[read_only:true source:/srv/.agent/1 target:/.sandboxer type:bind]": at("services", "db", "volumes").([]any)[len(at("services", "db", "volumes").([]any))-1],
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
	if all := strings.Join(p.Notes, "\n"); !strings.Contains(all, "container_name") || !strings.Contains(all, "restart: always") || !strings.Contains(all, "as a copy from the start") {
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
	f.Add("services: {web: {image: x, extends: {file: sub/b.yaml, service: web}, volumes: [\"./y:/y\"]}}\n")
	f.Add("include: [sub/b.yaml]\nservices: {web: {image: x}}\n")
	f.Fuzz(func(t *testing.T, text string) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		dir := workspace(t, text)
		write(t, dir, map[string]string{"sub/b.yaml": text}) // to be included and extended
		p, err := Load(ctx, dir, Options{})
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
	if n := strings.Join(p.Notes, "\n"); !strings.Contains(n, "services.web: labels that programs of the host may obey are left out") || !strings.Contains(n, `"mine", "traefik.enable"`) {
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

// unpack makes the files of an archive, and what its comment says of them: lines of
// "note: text", which the notes must have, and of "leave: host-gateway".
func unpack(t *testing.T, name string) (dir string, o Options, notes []string) {
	t.Helper()
	a, err := txtar.ParseFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(a.Comment)) {
		what, text, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch what {
		case "note":
			notes = append(notes, text)
		case "leave":
			o.HostGateway = text == "host-gateway"
		default:
			t.Fatalf("%s: %q is no line of a comment", name, line)
		}
	}
	dir = filepath.Join(t.TempDir(), "repo")
	files := map[string]string{}
	for _, f := range a.Files {
		files[f.Name] = string(f.Data)
	}
	write(t, dir, files)
	return dir, o, notes
}

// The file for a host is what docker compose reads of the file, except for documented
// differences.
func TestAsComposeReadsIt(t *testing.T) {
	compose, err := filepath.Abs("../../../bin/docker-compose")
	if err == nil {
		_, err = os.Stat(compose)
	}
	if err != nil {
		t.Skip("there is no compose plugin in bin (scripts/setup.sh builds it)")
	}
	files, err := filepath.Glob("testdata/accepted/*.txtar")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d accepted projects, %v", len(files), err)
	}
	config := func(t *testing.T, dir string, args ...string) map[string]any {
		t.Helper()
		cmd := exec.Command(compose, append(args, "config", "--format", "json")...)
		cmd.Dir = dir
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "PWD=" + dir}
		var errs strings.Builder
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("compose config: %v\n%s", err, &errs)
		}
		var m map[string]any
		if err := json.Unmarshal(out, &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txtar"), func(t *testing.T) {
			t.Parallel()
			dir, o, notes := unpack(t, name)
			p, err := Load(t.Context(), dir, o)
			if err != nil {
				t.Fatal(err)
			}
			all := strings.Join(p.Notes, "\n")
			for _, n := range notes {
				if !strings.Contains(all, n) {
					t.Errorf("no note says %q:\n%s", n, all)
				}
			}
			top := t.TempDir()
			if err := os.Symlink(dir, filepath.Join(top, "repo")); err != nil {
				t.Fatal(err)
			}
			text, err := p.Render(Rendering{Dir: top, NewPrivileges: true, StopAfter: time.Hour, Restarts: 10, ImageOf: func(s string) string { return "built-" + s }})
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(top, "ours.yaml")
			if err := os.WriteFile(file, text, 0o644); err != nil {
				t.Fatal(err)
			}
			theirs, ours := config(t, dir), config(t, top, "-f", file)
			for key, v := range theirs {
				one, _ := v.(map[string]any)
				two, _ := ours[key].(map[string]any)
				switch key {
				case "name": // it is the sandbox's
				case "secrets", "configs": // files beside the workspace
				case "networks", "volumes", "services":
					if a, b := slices.Sorted(maps.Keys(one)), slices.Sorted(maps.Keys(two)); !slices.Equal(a, b) {
						t.Errorf("%s are %v; want %v", key, b, a)
					}
				default:
					if !strings.HasPrefix(key, "x-") {
						t.Errorf("%s are not compared", key)
					}
				}
				for k := range one {
					if a, ok := two[k].(map[string]any); key == "services" && ok {
						sameService(t, k, p, a, one[k].(map[string]any), dir, top, o)
					}
				}
			}
		})
	}
}

// sameService compares what compose reads of a service in what was written and in what it
// was written from.
func sameService(t *testing.T, name string, p *Project, ours, theirs map[string]any, dir, top string, o Options) {
	t.Helper()
	differ := func(key string, got, want any) {
		if g, w := fmt.Sprint(got), fmt.Sprint(want); g != w {
			t.Errorf("%s.%s is %s; want %s", name, key, g, w)
		}
	}
	words := func(v any, f func(map[string]any) string) (out []string) {
		list, _ := v.([]any)
		for _, e := range list {
			if m, ok := e.(map[string]any); !ok {
				out = append(out, fmt.Sprint(e))
			} else if s := f(m); s != "" {
				out = append(out, s)
			}
		}
		slices.Sort(out)
		return out
	}
	keys := slices.AppendSeq(slices.Collect(maps.Keys(theirs)), maps.Keys(ours))
	slices.Sort(keys)
	for _, key := range slices.Compact(keys) {
		got, want := ours[key], theirs[key]
		switch key {
		case "restart":
			want = restartOf(want, theirs["deploy"])
		case "container_name", "labels", "logging", "deploy", "profiles", "extends", "develop", "attach", "stop_grace_period":
			continue // said to be left out, or to be ours
		case "build":
			i := slices.IndexFunc(p.Builds, func(b Build) bool { return b.Service == name })
			if i < 0 {
				t.Errorf("%s is not built", name)
				continue
			}
			got, want = filepath.Join(dir, p.Builds[i].Context), want.(map[string]any)["context"]
		case "image":
			if theirs["build"] != nil {
				want = "built-" + name
			}
		case "mem_reservation", "mem_swappiness":
			continue // left out
		case "scale", "cpus", "mem_limit", "memswap_limit", "pids_limit":
			continue // of deploy, too: see TestRender
		case "secrets", "configs":
			continue // files beside the workspace
		case "extra_hosts":
			got, want = words(got, nil), slices.DeleteFunc(words(want, nil), func(s string) bool { return !o.HostGateway && strings.HasSuffix(s, "host-gateway") })
		case "ports":
			f := func(m map[string]any) string { return fmt.Sprint(m["target"], "/", m["protocol"]) }
			got, want = words(got, f), words(want, f)
		case "depends_on":
			for _, deps := range []any{got, want} {
				m, _ := deps.(map[string]any)
				for _, d := range m {
					delete(d.(map[string]any), "restart") // of no use to who is started once
					delete(d.(map[string]any), "required")
				}
			}
		case "networks":
			for _, nets := range []any{got, want} {
				m, _ := nets.(map[string]any)
				for n, v := range m {
					if v == nil {
						m[n] = map[string]any{}
					}
				}
			}
		case "healthcheck":
			if m, ok := want.(map[string]any); ok {
				delete(m, "start_interval")
			}
		case "security_opt":
			got, want = strings.ReplaceAll(fmt.Sprint(got), ":true", ""), strings.ReplaceAll(fmt.Sprint(want), ":true", "")
		case "volumes":
			f := func(m map[string]any) string {
				source := fmt.Sprint(m["source"])
				if ofEveryHost[source] != "" || strings.HasPrefix(source, filepath.Join(top, "files")) {
					return ""
				}
				source = strings.Replace(source, dir, "REPO", 1)
				source = strings.Replace(source, filepath.Join(top, "repo"), "REPO", 1)
				for _, c := range p.Copies {
					if source == filepath.Join(top, "copies", c.Copy) {
						source = "REPO/" + c.Source
					}
				}
				volume, _ := m["volume"].(map[string]any)
				tmpfs, _ := m["tmpfs"].(map[string]any)
				return fmt.Sprint(m["type"], " ", source, " ", m["target"], " ", m["read_only"], " ", volume["nocopy"], " ", tmpfs["size"])
			}
			got, want = words(unpinned(got), f), words(unpinned(want), f)
		}
		differ(key, got, want)
	}
}

// restartOf is what is to become of restart, and of restart_policy in deploy.
func restartOf(restart, deploy any) string {
	d, _ := deploy.(map[string]any)
	policy, _ := d["restart_policy"].(map[string]any)
	switch {
	case restart != nil:
	case policy["condition"] == "on-failure":
		restart = fmt.Sprint("on-failure:", policy["max_attempts"])
	case policy["condition"] == "any":
		restart = "always"
	}
	switch restart {
	case nil, "no":
		return "no"
	case "on-failure:3", "on-failure:4":
		return restart.(string)
	}
	return "on-failure:10"
}

// unpinned are mounts without those that show what is there anyway: of a directory of
// another mount, at its place there.
func unpinned(mounts any) any {
	list, _ := mounts.([]any)
	text := func(m any, key string) string { return fmt.Sprint(m.(map[string]any)[key]) }
	var out []any
	for _, m := range list {
		if !slices.ContainsFunc(list, func(w any) bool {
			rest, in := strings.CutPrefix(text(m, "source"), text(w, "source")+"/")
			return in && text(w, "read_only") == text(m, "read_only") && text(m, "target") == text(w, "target")+"/"+rest
		}) {
			out = append(out, m)
		}
	}
	return out
}

// A directory that is mounted writable is mounted where others could remove it, too, with all
// its parents; and a mount that shows something else there is left alone.
func TestPins(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"data/db/x": "x", "compose.yaml": `services:
  app: {image: x, volumes: [".:/app", "cache:/app/.cache"]}
  db: {image: x, volumes: ["./data/db:/var/lib/db"]}
  covered: {image: x, volumes: [".:/app", "cache:/app/data"]}
  scratch: {image: x, volumes: [".:/app"], tmpfs: ["/app/data/db"]}
  reads: {image: x, volumes: [".:/app:ro"]}
  file: {image: x, volumes: ["${PWD}/data/db/x:/x"], user: "${NOBODY}:${NOGROUP}", memswap_limit: 1g}
volumes: {cache: }
`})
	p, err := Load(t.Context(), dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for service, want := range map[string]string{
		"app": "[. /app cache /app/.cache data /app/data data/db /app/data/db]", "db": "[data/db /var/lib/db]",
		"covered": "[. /app cache /app/data]", "scratch": "[. /app data /app/data]", "reads": "[. /app]", "file": "[data/db/x /x]",
	} {
		var got []string
		for _, v := range p.model.Services[service].Volumes {
			got = append(got, v.Source+" "+v.Target)
		}
		if s := fmt.Sprint(got); s != want {
			t.Errorf("%s mounts %s; want %s", service, s, want)
		}
	}
	if got := p.Places(); !maps.Equal(got, map[string]bool{"data": false, "data/db": false, "data/db/x": true}) {
		t.Errorf("%v must stay", got)
	}
	// A file is a copy, in which a service may write.
	text, err := p.Render(Rendering{Dir: "/d", ImageOf: func(s string) string { return s }})
	if err != nil || !strings.Contains(string(text), "source: /d/copies/copy-0") {
		t.Errorf("%v, %s", err, text)
	}
	if all := strings.Join(p.Notes, "\n"); !strings.Contains(all, "file: data/db/x is mounted as a copy from the start of the sandbox, and changes to it are not in the workspace") || !strings.Contains(all, "file: memswap_limit") {
		t.Errorf("it notes %s", all)
	}
}

// Addresses that a file fixes are others of the sandbox's network, wherever it names them.
func TestFixedAddresses(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"compose.yaml": `services:
  web:
    image: x
    command: [sh, -c, "ping 172.28.1.9 172.28.1.90"]
    environment: {DB: "tcp://172.28.1.9:5432", LONG: "172.28.1.91", WIDE: "1172.28.1.9", FIVE: "1.172.28.1.9", SIX: "172.28.1.9.1", END: "at 172.28.1.9.", ALLOW: "172.28.1.0/24"}
    extra_hosts: ["db.local:172.28.1.9"]
    dns: [172.28.1.9]
    networks: {inner: {ipv4_address: 172.28.1.200}}
    healthcheck: {test: [CMD, ping, "172.28.1.9"]}
  db:
    image: y
    networks: {inner: {ipv4_address: 172.28.1.9}}
networks:
  inner: {ipam: {driver: default, config: [{subnet: 172.28.1.0/24, gateway: 172.28.1.1}]}}
`})
	p, err := Load(t.Context(), dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(p.Notes, "; "); !strings.Contains(all, "db: the address 172.28.1.9 is replaced by") || !strings.Contains(all, "networks.inner: subnet and gateway are the sandbox's own") {
		t.Errorf("it notes %q", all)
	}
	for range 2 { // what is written first changes nothing of the model
		text, err := p.Render(Rendering{Dir: "/x", Subnets: map[string]string{"inner": "10.213.0.64/26"}, ImageOf: func(s string) string { return s }})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{
			"subnet: 10.213.0.64/26", "ip_range: 10.213.0.96/27", "ipv4_address: 10.213.0.67", "ipv4_address: 10.213.0.66", "ping 10.213.0.66 172.28.1.90",
			"DB: tcp://10.213.0.66:5432", "LONG: 172.28.1.91", "WIDE: 1172.28.1.9", "FIVE: 1.172.28.1.9", "SIX: 172.28.1.9.1", "END: at 10.213.0.66.",
			"ALLOW: 10.213.0.64/26", "db.local:10.213.0.66", "- 10.213.0.66",
		} {
			if !strings.Contains(string(text), want) {
				t.Errorf("what is written does not say %q:\n%s", want, text)
			}
		}
	}
}

// A panic of compose is an error.
func TestSafely(t *testing.T) {
	if _, err := safely(func() (v any, err error) { return v.(string), nil }); err == nil {
		t.Error("no error came of a panic")
	}
}

// However files are named, variables are those that compose has: of the request, of
// the directory where no file is named, and of the one next to the first file.
func TestVariables(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "repo")
	const text = "services:\n  web: {image: \"x:${TAG}\", profiles: [one]}\n  db: {image: \"y:${TAG}\", profiles: [two]}\n"
	for name, tt := range map[string]struct {
		top, beside string
		o           Options
		want        string
	}{
		"beside the file":       {"TAG=top\nCOMPOSE_PROFILES=one\n", "TAG=beside\nCOMPOSE_PROFILES=two\n", Options{File: "sub/a.yaml"}, "y:beside"},
		"not of the directory":  {"TAG=top\nCOMPOSE_PROFILES=one\n", "COMPOSE_PROFILES=two\n", Options{File: "sub/a.yaml"}, "y:"},
		"of both":               {"COMPOSE_FILE=sub/a.yaml\nTAG=top\n", "TAG=beside\nCOMPOSE_PROFILES=two\n", Options{}, "y:top"},
		"of the request":        {"COMPOSE_FILE=sub/a.yaml\nTAG=top\n", "COMPOSE_PROFILES=two\n", Options{Env: map[string]string{"TAG": "asked", "COMPOSE_PROFILES": "one"}}, "x:asked"},
		"asked for":             {"COMPOSE_FILE=sub/a.yaml\nTAG=top\n", "COMPOSE_PROFILES=two\n", Options{Profiles: []string{"one"}}, "x:top"},
		"damaged, and not read": {"\x00=", "TAG=beside\nCOMPOSE_PROFILES=two\n", Options{File: "sub/a.yaml"}, "y:beside"},
	} {
		write(t, dir, map[string]string{"sub/a.yaml": text, ".env": tt.top, "sub/.env": tt.beside})
		p, err := Load(t.Context(), dir, tt.o)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if got := p.ImageOf(p.Services[0].Name); got != tt.want || len(p.Services) != 1 {
			t.Errorf("%s: %d services, the first is %s; want %s alone", name, len(p.Services), got, tt.want)
		}
	}
}

// Of several files the one is named that says what is refused; and what comes of a variable
// that has no value, after that.
func TestWhereItStands(t *testing.T) {
	for name, tt := range map[string]struct {
		files map[string]string
		want  []string
	}{
		"in the second file": {map[string]string{
			"compose.yaml":          "services:\n  web:\n    image: x\n    tty: true\n",
			"compose.override.yaml": "services:\n  web:\n\n    privileged: true\n",
		}, []string{"compose.override.yaml:4: services.web.privileged: "}},
		"in the first file": {map[string]string{
			"compose.yaml":          "services:\n  web:\n    image: x\n    pid: host\n",
			"compose.override.yaml": "\n\n\n\nservices:\n  web:\n    tty: true\n",
		}, []string{"compose.yaml:4: services.web.pid: "}},
		"in a list of both": {map[string]string{
			"compose.yaml":          "services:\n  web:\n    image: x\n    volumes:\n      - .:/a\n      - /:/b\n",
			"compose.override.yaml": "services:\n  web:\n    volumes:\n      - .:/c\n",
		}, []string{"compose.override.yaml:3: services.web.volumes."}},
		"a missing file included": {map[string]string{
			"compose.yaml":          "services:\n  web: {image: x}\n",
			"compose.override.yaml": "include: [other.yaml]\n",
		}, []string{"compose.override.yaml:1: include: \"other.yaml\" cannot be included: no such file"}},
		"a file that includes itself": {map[string]string{
			"compose.yaml": "include: [sub/a.yaml]\n", "sub/a.yaml": "include: [../compose.yaml]\nservices: {web: {image: x}}\n",
		}, []string{"sub/a.yaml:1: include: \"../compose.yaml\" cannot be included: it includes itself"}},
		"the second of two included": {map[string]string{
			"compose.yaml": "services: {db: {image: x}}\ninclude:\n  - a.yaml\n  - missing.yaml\n", "a.yaml": "include: [b.yaml]\n", "b.yaml": "services: {web: {image: x}}\n",
		}, []string{"compose.yaml:2: include: \"missing.yaml\" cannot be included"}},
		"include with a directory of the host": {map[string]string{
			"compose.yaml": "include:\n  - {path: a.yaml, project_directory: /}\n", "a.yaml": "services: {web: {image: x}}\n",
		}, []string{"compose.yaml:1: include: the project_directory \"/\" cannot be used: it is a path of the host"}},
		"include with variables of the host": {map[string]string{
			"compose.yaml": "include:\n  - {path: a.yaml, env_file: ../../.env}\n", "a.yaml": "services: {web: {image: x}}\n",
		}, []string{"compose.yaml:1: include: the env_file \"../../.env\" cannot be read: it leads out"}},
		"include of another kind": {map[string]string{
			"compose.yaml": "include:\n  - {path: a.yaml, ssh: x}\n", "a.yaml": "services: {web: {image: x}}\n",
		}, []string{"compose.yaml:1: include: ssh is not supported"}},
		"the empty variable of an included file": {map[string]string{
			"compose.yaml": "include: [sub/a.yaml]\n", "sub/a.yaml": "services: {web: {image: x, user: \"${NOT_SET}\", pid: host}}\n",
		}, []string{"compose.yaml: the variable NOT_SET is not set", "sub/a.yaml:1: services.web.pid: "}},
		"a secret variable of an included file": {map[string]string{
			"compose.yaml": "include: [sub/a.yaml]\n", "sub/a.yaml": "services: {web: {image: x, ports: [\"${PORT}\"]}}\n", "sub/.env": "PORT=sesame\n",
		}, []string{"sub/a.yaml:1: invalid containerPort: …"}},
		"an included service made worse": {map[string]string{
			"compose.yaml": "include: [a.yaml]\nservices:\n  web: {privileged: true}\n", "a.yaml": "services:\n  web: {image: x}\n",
		}, []string{"compose.yaml:3: services.web.privileged: "}},
		"a tag in an extended file": {map[string]string{
			"compose.yaml": "services:\n  web:\n    extends: {file: a.yaml, service: base}\n", "a.yaml": "services:\n  base:\n    image: x\n    command: !reset []\n",
		}, []string{"a.yaml:4: a.yaml.services.base.command: the tags !reset and !override are not supported in a file whose services are extended"}},
		"a tag within a list": {map[string]string{
			"compose.yaml": "services:\n  web:\n    image: x\n    ports:\n      - target: !override 80\n",
		}, []string{"compose.yaml:5: services.web.ports.0.target: the tags !reset and !override are not supported within lists"}},
		"what is there after a tag": {map[string]string{
			"compose.yaml":          "services:\n  web:\n    image: x\n    volumes: [\"/a:/a\"]\n",
			"compose.override.yaml": "services:\n  web:\n    volumes: !override [\"/b:/b\"]\n",
		}, []string{"compose.override.yaml:3: services.web.volumes.0: \"/b\" cannot be mounted"}},
		"what an included file may not": {map[string]string{
			"compose.yaml": "include: [sub/a.yaml]\n", "sub/a.yaml": "services:\n  web:\n    image: x\n    volumes:\n      - ../../outside:/x\n      - ${HERE:-/etc}/y:/y\n      - ~/x:/z\n",
		}, []string{
			"sub/a.yaml:5: services.web.volumes.0: \"./../outside\" cannot be mounted: it leads out", "sub/a.yaml:6: services.web.volumes.1: \"/etc/y\" cannot be mounted: it is a path of the host",
			"sub/a.yaml:7: services.web.volumes.2: \"~/x\" cannot be mounted: it leads to a home directory",
		}},
		"what an extended file may not": {map[string]string{
			"compose.yaml": "services:\n  web:\n    extends: {file: sub/a.yaml, service: base}\n", "sub/a.yaml": "services:\n  base:\n    image: x\n    env_file: ${HERE:-../..}/outside.env\n    build: ~/x\n",
		}, []string{
			"compose.yaml:2: services.web.build.context: \"~/x\" cannot be built from: it leads to a home directory", "compose.yaml:2: services.web.env_file.0: \"./../outside.env\" cannot be read: it leads out",
		}},
		"what cannot be merged with an included file": {map[string]string{
			"compose.yaml": "include: [a.yaml]\nservices:\n  web:\n    volumes: 1\n", "a.yaml": "services:\n  web: {image: x, volumes: [\"v:/v\"], logging: {driver: x}}\n",
		}, []string{"compose.yaml:1: include: a.yaml cannot be merged: cannot override services.web.volumes"}},
		"a name that is not for services": {map[string]string{
			"compose.yaml": "services:\n  _extended.1.base: {image: x}\n",
		}, []string{"compose.yaml:2: services._extended.1.base: \"_extended.1.base\" is not a valid name of a service"}},
		"a damaged service in an extended file": {map[string]string{
			"compose.yaml": "services:\n  web:\n    extends: {file: a.yaml, service: base}\n", "a.yaml": "services:\n  other: {image: x}\n  base:\n    image: x\n    volumes: [{type: bind, source: 1, target: /x}]\n",
		}, []string{"a.yaml:5: "}},
		"outside of an included file": {map[string]string{
			"compose.yaml": "include: [sub/a.yaml]\n", "sub/a.yaml": "services:\n  web:\n    image: x\n    volumes:\n      - ../../outside:/x\n",
		}, []string{"sub/a.yaml:5: services.web.volumes.0: \"./../outside\" cannot be mounted: it leads out of the workspace"}},
		"privileges by extends": {map[string]string{
			"compose.yaml": "services:\n  web:\n    extends: {file: sub/a.yaml, service: base}\n", "sub/a.yaml": "services:\n  base:\n    image: x\n    privileged: true\n",
		}, []string{"compose.yaml:2: services.web.privileged: "}},
		"no such service": {map[string]string{
			"compose.yaml": "services:\n  web:\n    extends: {file: sub/a.yaml, service: other}\n", "sub/a.yaml": "services:\n  base: {image: x}\n",
		}, []string{"compose.yaml:3: services.web.extends: sub/a.yaml has no service \"other\""}},
		"extends in a circle": {map[string]string{
			"compose.yaml": "services:\n  web:\n    extends: {file: a.yaml, service: one}\n",
			"a.yaml":       "services:\n  one: {extends: {file: b.yaml, service: two}}\n", "b.yaml": "services:\n  two: {extends: {file: a.yaml, service: one}}\n",
		}, []string{"compose.yaml:"}},
		"many files included": {map[string]string{
			"compose.yaml": "include: [" + strings.Repeat("a.yaml, ", 49) + "b.yaml]\n", "a.yaml": "name: x\n", "b.yaml": "name: x\n",
		}, []string{"compose.yaml includes or extends too many files: the maximum is 50"}},
		"an empty variable first": {map[string]string{
			"compose.yaml": "services:\n  web:\n    image: ${IMAGE}\n    ports: [\"${PORT}:x\"]\n    pid: host\n",
		}, []string{"compose.yaml: the variables IMAGE, PORT are not set", "compose.yaml:3: invalid containerPort"}},
		"an empty image": {map[string]string{
			"compose.yaml": "services:\n  web:\n    image: ${IMAGE}\n",
		}, []string{"compose.yaml: the variable IMAGE is not set", "compose.yaml:2: services.web: the service has neither image nor build"}},
		"profiles": {map[string]string{
			"compose.yaml": "services:\n  web: {image: x, profiles: [b, a]}\n  db: {image: x, profiles: [b]}\n",
		}, []string{"compose.yaml:1: services: every service belongs to a profile", "names some of a, b"}},
		"a file of COMPOSE_FILE outside": {map[string]string{
			"compose.yaml": "services: {web: {image: x}}\n", ".env": "COMPOSE_FILE=compose.yaml:../other.yaml\n",
		}, []string{"the compose file \"../other.yaml\" is not below the repository"}},
		"a file of COMPOSE_FILE that is not there": {map[string]string{
			"compose.yaml": "services: {web: {image: x}}\n", ".env": "COMPOSE_FILE=compose.yaml:other.yaml\n",
		}, []string{"the compose file other.yaml cannot be read"}},
		"many files": {map[string]string{
			"compose.yaml": "services: {web: {image: x}}\n", ".env": "COMPOSE_FILE=" + strings.Repeat("compose.yaml:", 50) + "compose.yaml\n",
		}, []string{"COMPOSE_FILE names 51 files: the maximum is 50"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "repo")
			write(t, dir, tt.files)
			_, err := Load(t.Context(), dir, Options{})
			if sandboxer.KindOf(err) != sandboxer.Invalid {
				t.Fatalf("Load: %v", err)
			}
			said := sandboxer.Message(err)
			for _, want := range tt.want {
				if !strings.Contains(said, want) {
					t.Errorf("it says %q; want %q", said, want)
				}
			}
			if !strings.HasPrefix(said, tt.want[0]) {
				t.Errorf("it says %q; want %q first", said, tt.want[0])
			}
		})
	}
}
