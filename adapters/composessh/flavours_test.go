package composessh

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/internal/engine"
)

// web is a project as people write them: a check, a job that others wait for, a volume,
// a variable, a port, and names that would collide.
const web = `services:
  web:
    image: ` + image + `
    container_name: web
    command: [sh, -c, 'echo "$$GREETING" >/www/hello; exec httpd -f -p 80 -h /www']
    environment: {GREETING: "hello ${WHO:?who is greeted}"}
    working_dir: /src
    volumes: [".:/src", "www:/www"]
    ports: ["8080:80"]
    depends_on: {seed: {condition: service_completed_successfully}}
    healthcheck: {test: ["CMD", "test", "-e", "/www/hello"], interval: 500ms, retries: 60}
  seed:
    image: ` + image + `
    command: [sh, -c, "echo seeded >/www/seed"]
    volumes: ["www:/www"]
  db:
    image: ` + image + `
    command: [httpd, -f, -p, "5432"]
    ports: ["15432:5432", "99"]
volumes: {www: {}}
`

func order(id, repo string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "test", Inputs: map[string]string{"repo": repo}, Env: map[string]string{"WHO": "world"}}
}

// teardown has the sandbox go when the test ends, whatever became of it.
func teardown(t testing.TB, e *extension, id string) {
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
		defer cancel()
		if _, err := e.Teardown(c, sandboxer.Handle{SandboxID: id}); err != nil {
			t.Errorf("Teardown(%s): %v", id, err)
		}
	})
}

// put places a sandbox and provisions it, as the broker does.
func (e *extension) put(ctx context.Context, s sandboxer.Spec) (h sandboxer.Handle, err error) {
	if s.Place, err = e.Place(ctx, s, nil); err != nil {
		return h, err
	}
	return e.Provision(ctx, s)
}

// putFrom is put for what a checkpoint holds.
func (e *extension) putFrom(ctx context.Context, s sandboxer.Spec, c sandboxer.Contents, r io.Reader) (h sandboxer.Handle, err error) {
	if s.Place, err = e.Place(ctx, s, nil); err != nil {
		return h, err
	}
	return e.ProvisionFrom(ctx, s, c, r)
}

func provision(t testing.TB, e *extension, s sandboxer.Spec) (sandboxer.Handle, sandboxer.Reachability) {
	t.Helper()
	teardown(t, e, s.ID)
	h, err := e.put(t.Context(), s)
	if err != nil {
		t.Fatalf("Provision(%s): %v (%s)", s.ID, err, sandboxer.HintOf(err))
	}
	r, err := e.WaitReady(t.Context(), h)
	if err != nil {
		t.Fatalf("WaitReady(%s): %v", s.ID, err)
	}
	return h, r
}

func (r *rig) opened(t testing.TB, owner string) *extension {
	t.Helper()
	e := r.open(t, owner)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func run(t testing.TB, e *extension, h sandboxer.Handle, script string) string {
	t.Helper()
	var out, errs bytes.Buffer
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: &out, Stderr: &errs})
	if err != nil || x.Code != 0 {
		t.Fatalf("%s: %+v, %v, %s", script, x, err, &errs)
	}
	return strings.TrimSpace(out.String())
}

// get asks a port of the sandbox for a page.
func get(t testing.TB, e *extension, h sandboxer.Handle, port int, page string) string {
	t.Helper()
	c, err := e.Dial(t.Context(), h, port)
	if err != nil {
		t.Fatalf("Dial(%d): %v", port, err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	fmt.Fprintf(c, "GET /%s HTTP/1.0\r\n\r\n", page)
	out, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(out), "\r\n\r\n")
	return strings.TrimSpace(body)
}

// TestComposeProgram: the setting names the compose program of the hosts, or else the environment, or else it is the first
// that a host has.
func TestComposeProgram(t *testing.T) {
	for name, c := range map[string]struct{ setting, environment, want string }{
		"setting":     {"docker compose", "docker-compose", "docker compose"},
		"environment": {"", "docker-compose", "docker-compose"},
		"first":       {"", "", "docker compose"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("SANDBOXER_COMPOSE_CMD", c.environment)
			if _, err := exec.LookPath("docker-compose"); err != nil {
				t.Skip("there is no docker-compose (scripts/setup.sh installs it)")
			}
			r := newRig(t, "docker compose", 1) // it has both
			r.cfg.ComposeCmd = c.setting
			e := r.opened(t, "program"+name)
			h, err := e.host("host-1")
			if err == nil {
				err = e.look(t.Context(), h)
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(h.known.compose, " "); got != c.want {
				t.Errorf("the host's compose program is %q, want %q", got, c.want)
			}
		})
	}
}

// TestFlavours is one life of a project with each of the compose programs.
func TestFlavours(t *testing.T) {
	for name, compose := range map[string]string{"current": "docker compose", "v1": "docker-compose", "podman": "podman-compose"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // health checks take their time
			r := newRig(t, compose, 1)
			e := r.opened(t, name)
			h, reach := provision(t, e, order("life", repo(t, web, map[string]string{"src/main.txt": "source\n"})))
			if reach.ComposeProject != h.Ref || len(reach.Ports) != 3 || reach.Ports[0].Port != 8080 || reach.Extra["service"] != "web" || reach.Extra["compose"] != compose {
				t.Errorf("reachable as %+v", reach)
			}
			if ports, err := e.ListPorts(t.Context(), h); err != nil || !slices.Equal(slices.Sorted(slices.Values(ports)), []int{80, 5432, 8080, 15432}) {
				t.Errorf("ports that listen are %v, %v", ports, err)
			}
			if !strings.Contains(reach.Extra["changed"], "container_name") {
				t.Errorf("what was changed: %q", reach.Extra["changed"])
			}
			if got := run(t, e, h, "cat src/main.txt; cat /www/seed; echo more >>src/main.txt; echo $WHO"); got != "source\nseeded\nworld" {
				t.Errorf("inside: %q", got)
			}
			if got := run(t, e, h, "cat /proc/1/status /proc/self/status"); strings.Count(got, "NoNewPrivs:\t1") != 2 {
				t.Errorf("a service may gain rights: %s", got)
			}
			if got := get(t, e, h, 8080, "hello"); got != "hello world" {
				t.Errorf("the published port says %q", got)
			}
			var db strings.Builder
			if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo $WHO; ls /www"}, Service: "db", Stdout: &db}); err != nil || x.Code == 0 || db.String() != "world\n" {
				t.Errorf("in another service: %+v, %v, %q", x, err, db.String())
			}
			_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}, Service: "nosuch"})
			kind(t, err, sandboxer.Invalid, "nosuch", "web, seed, db")
			// Another process, without any cache, with the same sandbox; and a second sandbox of
			// the same file at the same time.
			e2 := r.opened(t, name)
			if got, err := e2.Discover(t.Context(), "life"); err != nil || got.Handle.Ref != h.Ref {
				t.Errorf("Discover: %+v, %v", got, err)
			}
			s := order("beside", repo(t, web, nil))
			s.Env["WHO"] = "neighbour"
			h2, _ := provision(t, e2, s)
			if one, two := get(t, e, h, 8080, "hello"), get(t, e, h2, 8080, "hello"); one != "hello world" || two != "hello neighbour" {
				t.Errorf("side by side: %q, %q", one, two)
			}
			if err := e.Pause(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			_, err = e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
			kind(t, err, sandboxer.Conflict, "paused")
			if err := e2.Resume(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			if _, err := e2.WaitReady(t.Context(), h); err != nil {
				t.Errorf("resumed: %v", err)
			}
			var archive bytes.Buffer
			if err := e.Archive(t.Context(), h, "", &archive); err != nil {
				t.Fatal(err)
			}
			if got := member(t, &archive, "src/main.txt"); got != "source\nmore" {
				t.Errorf("the archive has %q", got)
			}
			if st, err := e.Stats(t.Context(), h); err != nil || st.MemoryBytes <= 0 || st.DiskBytes <= 0 {
				t.Errorf("Stats = %+v, %v", st, err)
			}
			if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "life"}); err != nil {
				t.Fatal(err)
			}
			if l, err := e2.IsAlive(t.Context(), h); l != sandboxer.Gone || err != nil {
				t.Errorf("IsAlive = %s, %v", l, err)
			}
			if got := get(t, e2, h2, 8080, "hello"); got != "hello neighbour" {
				t.Errorf("once its neighbour is gone it says %q", got)
			}
			if _, err := e.Teardown(t.Context(), h2); err != nil {
				t.Fatal(err)
			}
			if left := r.remains(t, name); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// member is the content of a file in an archive.
func member(t testing.TB, archive io.Reader, name string) string {
	t.Helper()
	in := tar.NewReader(archive)
	for {
		hdr, err := in.Next()
		if err != nil {
			t.Fatalf("%s is not in the archive: %v", name, err)
		}
		if filepath.Clean(hdr.Name) == name {
			b, err := io.ReadAll(in)
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(string(b))
		}
	}
}

func kind(t testing.TB, err error, want sandboxer.Kind, words ...string) {
	t.Helper()
	if sandboxer.KindOf(err) != want {
		t.Errorf("error %v is %q; want %q", err, sandboxer.KindOf(err), want)
		return
	}
	for _, w := range words {
		if !strings.Contains(sandboxer.Message(err)+" "+sandboxer.HintOf(err), w) {
			t.Errorf("%q, %q does not say %q", sandboxer.Message(err), sandboxer.HintOf(err), w)
		}
	}
}

// What does not become ready is said with what it said last, and why.
func TestNotReady(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	e := r.opened(t, "notready")
	for name, c := range map[string]struct {
		file, say string
	}{
		"ends":        {"services: {main: {image: " + image + `, command: [sh, -c, "echo the reason >&2; exit 3"]}}`, "exit status 3; its last output: the reason"},
		"unhealthy":   {"services: {main: {image: " + image + `, command: [sleep, "86400"], healthcheck: {test: [CMD, "false"], interval: 100ms, retries: 1}}}`, "health check"},
		"no image":    {"services: {main: {image: sandboxer.invalid/none:1}}", "sandboxer.invalid"},
		"no registry": {"services: {main: {image: sandboxer.invalid/none:1}}", "the engine of host host-1 pulls images"},
		"no network":  {"services: {main: {image: " + image + `, command: [sh, -c, "echo \"npm error getaddrinfo EAI_AGAIN registry.invalid\" >&2; exit 1"]}}`, "services have no network unless the profile says network: public, or network: allow with the destinations"},
	} {
		t.Run(name, func(t *testing.T) {
			s := order(strings.ReplaceAll(name, " ", "-"), repo(t, c.file, nil))
			teardown(t, e, s.ID)
			h, err := e.put(t.Context(), s)
			if err == nil {
				_, err = e.WaitReady(t.Context(), h)
			}
			kind(t, err, sandboxer.Failed, c.say)
		})
	}
	built := func(id, dockerfile string) error {
		s := order(id, repo(t, `services: {main: {build: ., command: [sh, -c, "cat /limit; grep NoNewPrivs: /proc/self/status; exit 3"]}}`, map[string]string{"Dockerfile": "FROM " + image + "\n" + dockerfile}))
		s.Inputs["new_privileges"] = "yes"
		teardown(t, e, s.ID)
		h, err := e.put(t.Context(), s)
		if err == nil {
			_, err = e.WaitReady(t.Context(), h)
		}
		return err
	}
	t.Run("build is bounded", func(t *testing.T) {
		e.cfg.BuildMemory = 192 << 20
		err := built("memory", "RUN cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes >/limit 2>/dev/null || :\n")
		kind(t, err, sandboxer.Failed, "its last output: 201326592; NoNewPrivs:0")
		e.cfg.BuildTimeout = time.Second
		kind(t, built("time", "RUN sleep 86400\n"), sandboxer.Failed, "took longer than 1s", "build_timeout")
		e.cfg.BuildTimeout = defaults.BuildTimeout
		kind(t, built("network", "RUN wget -qO- http://nowhere.invalid\n"), sandboxer.Failed, "bad address", "network: public", "build_network: true")
	})
	t.Run("refused", func(t *testing.T) {
		s := order("refused", repo(t, "services:\n  main:\n    image: "+image+"\n    privileged: true\n", nil))
		_, err := e.put(t.Context(), s)
		kind(t, err, sandboxer.Invalid, "compose.yaml:4", "privileged")
		if left := r.remains(t, "notready"); slices.ContainsFunc(left, func(s string) bool { return strings.Contains(s, "refused") }) {
			t.Errorf("something was made: %q", left)
		}
	})
}

// TestRestarts: services that wait for others by failing are started again, a number of
// times; jobs that no service waits for end.
func TestRestarts(t *testing.T) {
	for name, compose := range map[string]string{"docker": current(t), "podman": "podman-compose"} {
		t.Run(name, func(t *testing.T) {
			onlyLong(t, compose)
			t.Parallel()
			r := newRig(t, compose, 1)
			e := r.opened(t, "restarts-"+name)
			s := order("life", repo(t, `services:
  migrate: {image: `+image+`, command: [sh, -c, "sleep 1; echo done"], restart: on-failure}
  job: {image: `+image+`, command: ["true"]}
  main:
    image: `+image+`
    restart: unless-stopped
    command: [sh, -c, "echo x >>/tries; [ $$(wc -l </tries) -gt 3 ] || exit 7; exec sleep 86400"]
  done: {image: `+image+`, command: ["true"]}
  last: {image: `+image+`, command: [sleep, "86400"], depends_on: {done: {condition: service_completed_successfully}}}
`, nil))
			s.Inputs["service"] = "main"
			h, reach := provision(t, e, s)
			if got := run(t, e, h, "wc -l </tries"); got != "4" || reach.Extra["service"] != "main" {
				t.Errorf("it was started %s times; %+v", got, reach)
			}
			// One that another waits for may fail first, too.
			provision(t, e, order("awaited", repo(t, `services:
  main: {image: `+image+`, command: [sleep, "86400"], depends_on: {flaky: {condition: service_healthy}, job: {condition: service_completed_successfully}}}
  flaky:
    image: `+image+`
    restart: always
    command: [sh, -c, "echo x >>/tries; sleep 0.3; [ $$(wc -l </tries) -gt 5 ] || exit 7; touch /up; exec sleep 86400"]
    healthcheck: {test: [CMD, test, -e, /up], interval: 300ms, retries: 100}
  job:
    image: `+image+`
    restart: on-failure
    command: [sh, -c, "echo x >>/tries; sleep 0.2; [ $$(wc -l </tries) -gt 4 ]"]
`, nil)))
			for name, c := range map[string]struct{ file, say string }{
				"gives-up": {`services: {main: {image: ` + image + `, restart: "on-failure:2", command: [sh, -c, "echo the reason >&2; exit 3"]}}`,
					"the service main ended with exit status 3, after 2 restarts; its last output: the reason"},
				"commands": {`services: {main: {image: ` + image + `, command: ["true"]}}`, "choose another service: --input service=NAME"},
				"awaited-in-vain": {`services: {main: {image: ` + image + `, command: [sleep, "86400"], depends_on: {dep: {condition: service_healthy}}}, dep: {image: ` + image + `, restart: "on-failure:2", healthcheck: {test: [CMD, "false"], interval: 1s}, command: [sh, -c, "sleep 0.2; echo the cause >&2; exit 4"]}}`,
					"the service dep ended with exit status 4, after 2 restarts; its last output: the cause"},
				"once-only": {`services: {main: {image: ` + image + `, command: [sh, -c, "exit 3"]}}`, "the service main ended with exit status 3"},
				"always":    {`services: {main: {image: ` + image + `, command: [sleep, "86400"]}, other: {image: ` + image + `, restart: always, command: ["true"]}}`, "the service other ended with exit status 0"},
			} {
				s := order(name, repo(t, c.file, nil))
				teardown(t, e, s.ID)
				h, err := e.put(t.Context(), s)
				if err == nil {
					_, err = e.WaitReady(t.Context(), h)
				}
				kind(t, err, sandboxer.Failed, c.say)
			}
		})
	}
}

// TestPlaces: what a service mounts of the workspace keeps its type, whatever process tries to put
// something else there: the engine would follow a link when it starts the service again.
// Addresses that a file fixes are the services' in the sandbox's own network.
func TestPlaces(t *testing.T) {
	for name, compose := range map[string]string{"docker": current(t), "podman": "podman-compose"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, compose, 1)
			e := r.opened(t, "places-"+name)
			fixed := strings.NewReplacer()
			if name == "podman" { // podman-compose passes no addresses on
				fixed = strings.NewReplacer(": {ipv4_address: 172.28.1.200}", ": ", ": {ipv4_address: 172.28.1.9}", ": ")
			}
			h, _ := provision(t, e, order("life", repo(t, fixed.Replace(`services:
  main:
    image: `+image+`
    volumes: [".:/app"]
    command: [sleep, "86400"]
    environment: {OTHER: "http://172.28.1.9:80/"}
    networks: {inner: {ipv4_address: 172.28.1.200}}
  other:
    image: `+image+`
    restart: always
    volumes: ["./data/deep:/data"]
    command: [sh, -c, "echo started >>/data/starts; echo hello >/hello; httpd -p 80 -h /; until [ -e /data/die ]; do sleep 0.1; done; rm /data/die; exit 1"]
    networks: {inner: {ipv4_address: 172.28.1.9}}
networks:
  inner: {ipam: {config: [{subnet: 172.28.1.0/24}]}}
`), map[string]string{"data/deep/seed": "seeded", "free/x": "x"})))
			if name == "docker" {
				if got := run(t, e, h, "wget -qO- ${OTHER}hello"); got != "hello" {
					t.Errorf("at its fixed address the other service says %q", got)
				}
			}
			swap := func() {
				t.Helper()
				for _, dir := range []string{"/app/data", "/app/data/deep"} {
					var said strings.Builder
					x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "mv " + dir + " /app/away 2>&1 || { rm -rf " + dir + " 2>&1; [ -d " + dir + " ]; }"}, Stdout: &said})
					if err != nil || x.Code != 0 || !strings.Contains(said.String(), "busy") {
						t.Errorf("%s was moved or removed: %+v, %v, %s", dir, x, err, &said)
					}
				}
			}
			swap()
			put := func(links map[string]string, names ...string) error {
				var b bytes.Buffer
				w := tar.NewWriter(&b)
				for _, name := range names {
					hdr := &tar.Header{Name: name, Mode: 0o755, Typeflag: tar.TypeReg}
					if to, ok := links[name]; ok {
						hdr.Typeflag, hdr.Linkname = tar.TypeSymlink, to
					} else if strings.HasSuffix(name, "/") {
						hdr.Typeflag = tar.TypeDir
					}
					if err := w.WriteHeader(hdr); err != nil {
						t.Fatal(err)
					}
				}
				w.Close()
				return e.Unarchive(t.Context(), h, "/app", &b)
			}
			kind(t, put(map[string]string{"data": "/"}, "data"), sandboxer.Invalid, "is mounted in a service")
			kind(t, put(map[string]string{"data/deep": "/"}, "data/", "data/deep"), sandboxer.Invalid, "is mounted in a service")
			kind(t, put(nil, "data/deep"), sandboxer.Invalid, "is mounted in a service")
			if err := put(nil, "data/", "data/deep/", "data/deep/fresh", "new"); err != nil {
				t.Fatal(err)
			}
			if got := run(t, e, h, "find . -type f | sort"); got != "./data/deep/fresh\n./new" {
				t.Errorf("the workspace has %q", got)
			}
			swap()
			run(t, e, h, "touch data/deep/die")
			for end := time.Now().Add(time.Minute); run(t, e, h, "cat data/deep/starts 2>/dev/null || :") == ""; time.Sleep(100 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("the other service was not started again, or elsewhere")
				}
			}
		})
	}
}

// TestFirst: commands run in the first service that is not done once it ended.
func TestFirst(t *testing.T) {
	job, web := composefile.Service{Name: "job", OneShot: true}, composefile.Service{Name: "web"}
	for want, services := range map[string][]composefile.Service{"web": {job, web}, "job": {job}} {
		if got := first(services); got != want {
			t.Errorf("%v: %s; want %s", services, got, want)
		}
	}
}

// TestBuildKit: where BuildKit builds, it is said that only time bounds it, and bounds that an
// operator set are refused.
func TestBuildKit(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 0)
	for name, setting := range map[string]string{"host-1": "1", "host-2": "0"} {
		r.addHost(t, name, docker(t), "DOCKER_BUILDKIT="+setting)
	}
	e := r.opened(t, "buildkit")
	dir := repo(t, "services: {main: {build: ., command: [sleep, '86400']}}", map[string]string{"Dockerfile": "FROM " + image + "\nRUN echo built >/made\n"})
	on := func(id, host, dir string) sandboxer.Spec {
		s := order(id, dir)
		s.Host = host
		teardown(t, e, id)
		return s
	}
	noted := func(id, host string) string {
		t.Helper()
		h, err := e.host(host)
		if err == nil {
			err = e.look(t.Context(), h)
		}
		if err != nil {
			t.Fatal(err)
		}
		m, err := e.meta(t.Context(), h, e.name(id, 1))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(m.Notes, "; ")
	}
	for host, want := range map[string]bool{"host-1": true, "host-2": false} {
		id := "on-" + host
		h, err := e.put(t.Context(), on(id, host, dir))
		switch {
		case err == nil:
			if got := run(t, e, h, "cat /made"); got != "built" {
				t.Errorf("on %s the image has %q", host, got)
			}
		case !want || !strings.Contains(err.Error(), "buildx component is missing"): // BuildKit's client is a program of its own
			t.Errorf("on %s: %v", host, err)
		}
		if got := noted(id, host); strings.Contains(got, "BuildKit") != want {
			t.Errorf("on %s what was changed is %q", host, got)
		}
	}
	e.cfg.BuildMemory = 192 << 20
	_, err := e.put(t.Context(), on("bounded", "host-1", dir))
	kind(t, err, sandboxer.Unsupported, "build_memory", "host-1", "DOCKER_BUILDKIT=0")
	// That no host heard of it is noted where it was to be made, until it is released.
	if left := r.remains(t, "buildkit"); slices.ContainsFunc(left, func(s string) bool { return strings.Contains(s, "bounded") }) {
		t.Errorf("something was made: %q", left)
	}
	if _, err := e.put(t.Context(), on("unbuilt", "host-1", repo(t, single, nil))); err != nil { // nothing is built
		t.Error(err)
	}
	if _, err := e.put(t.Context(), on("classic", "host-2", dir)); err != nil {
		t.Error(err)
	}

	// BuildKit shares its layers between all who use the engine, but none of a RUN between
	// tenants.
	t.Run("tenants", func(t *testing.T) {
		e.cfg.BuildMemory = 4 << 30
		dir := repo(t, "services: {main: {build: ., command: [sleep, '86400']}}", map[string]string{"Dockerfile": "FROM " + image + "\nRUN cat /proc/sys/kernel/random/uuid >/made\n"})
		made := func(id, tenant string) string {
			s := on(id, "host-1", dir)
			s.Tenant = tenant
			h, err := e.put(t.Context(), s)
			switch {
			case err == nil:
				return run(t, e, h, "cat /made")
			case strings.Contains(err.Error(), "buildx component is missing"):
				t.Skip("there is no buildx: ", err)
			}
			t.Fatal(err)
			return ""
		}
		first, again, other := made("first", "one"), made("again", "one"), made("other", "another")
		if first == "" || first != again {
			t.Errorf("a tenant's second build made %q; want the %q of its first", again, first)
		}
		if first == other {
			t.Errorf("another tenant got %q, which the first one's build made", other)
		}
	})
}

// TestPodmanSwap: a limit of memory is one also where podman-compose says nothing of swap.
func TestPodmanSwap(t *testing.T) {
	t.Parallel()
	r := newRig(t, "podman-compose", 1)
	e := r.opened(t, "swap")
	s := order("swap", repo(t, single, nil))
	s.Limits.MemoryBytes = 64 << 20
	h, _ := provision(t, e, s)
	id := r.engine(t, r.engines[0], "ps", "-q", "--filter", "label="+engine.LabelName+"="+h.Ref)
	pid := r.engine(t, r.engines[0], "inspect", "--format", "{{.State.Pid}}", id)
	groups, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for line := range strings.Lines(string(groups)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for file, want := range map[string]string{
			"/sys/fs/cgroup/memory" + f[2] + "/memory.memsw.limit_in_bytes": "67108864", "/sys/fs/cgroup" + f[2] + "/memory.swap.max": "0",
		} {
			if strings.Contains(file, "/memory/") != strings.Contains(f[1], "memory") {
				continue
			}
			if got, err := os.ReadFile(file); err == nil {
				found = true
				if strings.TrimSpace(string(got)) != want {
					t.Errorf("%s is %q; want %s", file, got, want)
				}
			}
		}
	}
	// Where nothing can bound it the limit is refused.
	ho, err := e.host("host-1")
	if err == nil {
		err = e.look(t.Context(), ho)
	}
	if err != nil {
		t.Fatal(err)
	}
	p, err := e.plan(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.fits(ho); err != nil {
		t.Errorf("fits: %v", err)
	}
	k := *ho.known
	k.swap = "yes"
	ho.known = &k
	kind(t, p.fits(ho), sandboxer.Unsupported, "host-1", "swap")
	if !found {
		t.Skip("this kernel does not account for swap")
	}
}

// A network is filtered unless the operator says that it need not be.
func TestOnline(t *testing.T) {
	r := newRig(t, "docker-compose", 0)
	s := order("online", repo(t, single, nil))
	s.Network.Mode = sandboxer.NetworkPublic
	p, err := r.opened(t, "online").plan(t.Context(), s)
	if err != nil || !p.filtered || p.buildNetwork {
		t.Errorf("plan %+v, %v", p, err)
	}
	r.cfg.UnfilteredEgress = true
	if p, err = r.opened(t, "admitted").plan(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if p.filtered || !p.buildNetwork || p.rendering("/x", nil, false).Sealed {
		t.Error("its networks lead nowhere, or through a gateway")
	}
}
