//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// shop is a project as it comes out of a clone: a service with a check, what it keeps,
// and a service that tests run in.
const shop = `services:
  web:
    image: ` + enginetest.Image + `
    command: [sh, -c, 'cp -n /src/hello /data/hello; exec httpd -f -p 80 -h /data']
    volumes: [".:/src", "data:/data"]
    ports: ["8080:80"]
    healthcheck: {test: ["CMD", "wget", "-qO", "/dev/null", "http://127.0.0.1/hello"], interval: 500ms, retries: 60}
  tests:
    image: ` + enginetest.Image + `
    command: [sleep, "86400"]
    working_dir: /src
    volumes: [".:/src"]
    depends_on: {web: {condition: service_healthy}}
volumes: {data: {}}
`

// A project is an installation with a server that listens, and with one host that has Docker and compose.
type project struct {
	dir    string
	env    []string
	host   *sshtest.Server
	engine string // of the host, as the environment has it
}

func newProject(t *testing.T) *project {
	t.Helper()
	engine := containersEngine.Start(t)
	host := sshtest.Start(t, sshtest.Options{Silent: true, Env: []string{engine}})
	enginetest.InstallCompose(t, host.Dir)
	dir, err := os.MkdirTemp("", "sbx") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Symlink(programs(t), dir+"/bin"); err != nil {
		t.Fatal(err)
	}
	p := &project{dir: dir, host: host, engine: engine, env: append(os.Environ(), "PATH="+dir+"/bin:"+os.Getenv("PATH"), "SANDBOXER_HOME="+dir, "SANDBOXER_PROGRESS=none")}
	serve := exec.Command(dir+"/bin/sandboxer", "serve", "--listen", "127.0.0.1:0")
	var said bytes.Buffer
	serve.Env, serve.Stdout, serve.Stderr = p.env, &said, &said
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		serve.Process.Signal(syscall.SIGTERM)
		if err := serve.Wait(); err != nil {
			t.Errorf("serve: %v\n%s", err, &said)
		}
	})
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(dir + "/api.sock"); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the server does not come: %s", &said)
		}
	}
	p.addHost(t, "build-1")
	return p
}

// addHost adds the host under a name.
func (p *project) addHost(t *testing.T, name string) {
	t.Helper()
	key, err := sshrun.Fingerprint(p.host.HostKey)
	if err != nil {
		t.Fatal(err)
	}
	p.must(t, "sandboxer", "host", "add", name, p.host.User+"@127.0.0.1", "--port", fmt.Sprint(p.host.Port), "--identity", p.host.Identity, "--fingerprint", key)
}

// repo makes a directory with a compose file and more files.
func repo(t *testing.T, compose string, more map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range more {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "compose.yaml"), []byte(compose), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// run runs a command as a user does, in the program's directory.
func (p *project) run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	if cmd.Err != nil { // it is in the PATH of the product
		cmd = exec.CommandContext(ctx, filepath.Join(p.dir, "bin", args[0]), args[1:]...)
	}
	var out, errs bytes.Buffer
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = p.dir, p.env, &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%q: %v", args, err)
	}
	return cmd.ProcessState.ExitCode(), strings.TrimSpace(out.String()), strings.TrimSpace(errs.String())
}

func (p *project) must(t *testing.T, args ...string) string {
	t.Helper()
	code, out, errs := p.run(t, args...)
	if code != 0 {
		t.Fatalf("%q ended with %d: %s", args, code, errs)
	}
	return out
}

// TestProject is the life of a compose project: what
// docs/how-to/migrate-from-make-e2e.md promises to callers of make e2e, ports for people, snapshots.
func TestProject(t *testing.T) {
	t.Parallel()
	p := newProject(t)
	dir := repo(t, shop, map[string]string{"hello": "hello from the shop\n"})

	t.Run("make e2e", func(t *testing.T) {
		page, err := os.ReadFile("../../docs/how-to/migrate-from-make-e2e.md")
		if err != nil {
			t.Fatal(err)
		}
		rule := regexp.MustCompile("(?s)```make\n(.*?)```").FindSubmatch(page)
		script, err := os.ReadFile("../../scripts/make-e2e.sh")
		if err != nil || rule == nil {
			t.Fatalf("the page has no rule for make, or there is no script: %v", err)
		}
		if err := errors.Join(os.Mkdir(p.dir+"/scripts", 0o755), os.WriteFile(p.dir+"/scripts/make-e2e.sh", script, 0o755), os.WriteFile(p.dir+"/Makefile", rule[1], 0o644)); err != nil {
			t.Fatal(err)
		}
		if code, out, errs := p.run(t, "make", "-s", "e2e", "REPO="+dir, "SERVICE=tests", "TEST_COMMAND=wget -qO- http://web/hello"); code != 0 || out != "hello from the shop" {
			t.Errorf("tests that pass: %d, %q, %s", code, out, errs)
		}
		// In the service that is the first, with the test's own exit code.
		if code, out, errs := p.run(t, "scripts/make-e2e.sh", dir, "sh", "-c", "cat hello; exit 42"); code != 42 || out != "hello from the shop" {
			t.Errorf("tests that fail: %d, %q, %s", code, out, errs)
		}
		if out := p.must(t, "sandboxer", "ls", "-o", "name"); out != "" {
			t.Errorf("there is still %q", out)
		}
	})

	t.Run("what a host says reaches who asked", func(t *testing.T) {
		dir := repo(t, "services: {main: {build: .}}\n", map[string]string{"Dockerfile": "FROM " + enginetest.Image + "\nRUN wget -qO- http://nowhere.invalid\n"})
		for _, format := range []string{"", "json"} {
			args := []string{"sandboxer", "create", "--profile", "profile.compose-e2e", "--input", "repo=" + dir}
			if format != "" {
				args = append(args, "-o", format)
			}
			code, out, errs := p.run(t, args...)
			if code == 0 || !strings.Contains(errs+out, "bad address") || !strings.Contains(errs+out, "the profile says network: public, or network: allow") {
				t.Errorf("-o %q: it ends with %d: %s%s; want the reason, and what to do", format, code, out, errs)
			}
		}
		// The reason is reported at once; what was begun is destroyed after that.
		for end := time.Now().Add(time.Minute); p.must(t, "sandboxer", "ls", "-o", "name") != ""; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("what failed is still there: %s", p.must(t, "sandboxer", "ls"))
			}
		}
	})

	t.Run("make e2e is interrupted", func(t *testing.T) {
		slow := repo(t, strings.Replace(shop, "services:\n", "services:\n  late: {image: "+enginetest.Image+", command: [sleep, \"86400\"], healthcheck: {test: [CMD, \"false\"], interval: 1h}}\n", 1), map[string]string{"hello": ""})
		cmd := exec.Command(p.dir+"/scripts/make-e2e.sh", slow, "true")
		cmd.Dir, cmd.Env, cmd.SysProcAttr = p.dir, p.env, &syscall.SysProcAttr{Setpgid: true}
		var errs bytes.Buffer
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); p.must(t, "sandboxer", "ls", "-o", "name") == ""; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
				t.Fatalf("no sandbox is being created: %s", &errs)
			}
		}
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGINT); err != nil { // as a terminal does
			t.Fatal(err)
		}
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 130 {
			t.Errorf("it ended with %v: %s", err, &errs)
		}
		if out := p.must(t, "sandboxer", "ls", "-o", "name"); out != "" {
			t.Errorf("there is still %q: %s", out, &errs)
		}
	})

	id := p.must(t, "sandboxer", "create", "--quiet", "--profile", "profile.compose-checkpoint", "--input", "repo="+dir)
	t.Run("snapshot", func(t *testing.T) {
		p.must(t, "sandboxer", "exec", id, "--", "sh", "-c", "echo changed >/data/hello; echo more >/src/more")
		snap := p.must(t, "sandboxer", "snapshot", "create", id, "--quiet")
		var got struct {
			Quiesced bool
			Volumes  []string
			Kind     string
		}
		out := p.must(t, "sandboxer", "snapshot", "get", snap, "-o", "json")
		if err := json.Unmarshal([]byte(out), &got); err != nil || !got.Quiesced || got.Kind != "portable" || !slices.Equal(got.Volumes, []string{"data"}) {
			t.Errorf("the snapshot is %s, %v", out, err)
		}
		p.must(t, "sandboxer", "exec", id, "--", "sh", "-c", "echo later >/data/hello")
		copied := p.must(t, "sandboxer", "restore", snap, "--quiet")
		if out := p.must(t, "sandboxer", "exec", copied, "--service", "tests", "--", "sh", "-c", "wget -qO- http://web/hello; cat more"); out != "changed\nmore" {
			t.Errorf("the copy has %q", out)
		}
		p.must(t, "sandboxer", "destroy", copied, "--yes")
	})

	t.Run("port", func(t *testing.T) {
		p.must(t, "sandboxer", "port", "open", id, "8080")
		url := p.must(t, "sandboxer", "port", "url", id, "8080", "-o", "name")
		ask := func(url string) (int, string) {
			resp, err := http.Get(url + "hello")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			return resp.StatusCode, strings.TrimSpace(string(body))
		}
		if code, body := ask(url); code != http.StatusOK || body != "later" {
			t.Errorf("%s says %d, %q", url, code, body)
		}
		if code, _ := ask(url[:len(url)-8] + "AAAAAAA/"); code != http.StatusUnauthorized {
			t.Errorf("a forged URL says %d", code)
		}
		// An answer that is still coming when the sandbox ends is cut, and the URL is void.
		p.must(t, "sandboxer", "exec", id, "--", "sh", "-c", `mkdir /data/cgi-bin && cd /data/cgi-bin && printf '#!/bin/sh\necho "Content-Type: text/plain"; echo; while echo x; do sleep 1; done' >slow && chmod +x slow`)
		resp, err := http.Get(url + "cgi-bin/slow")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.ReadFull(resp.Body, make([]byte, 2)); resp.StatusCode != http.StatusOK || err != nil {
			t.Fatalf("the answer that takes its time: %s, %v", resp.Status, err)
		}
		p.must(t, "sandboxer", "destroy", id, "--yes")
		cut := make(chan error, 1)
		go func() { _, err := io.Copy(io.Discard, resp.Body); cut <- err }()
		select {
		case <-cut:
		case <-time.After(time.Minute):
			t.Error("an answer of a sandbox that is gone is still open")
		}
		if code, body := ask(url); code != http.StatusUnauthorized || strings.Contains(body, "later") {
			t.Errorf("once the sandbox is gone its URL says %d, %q", code, body)
		}
	})
	t.Run("layers", func(t *testing.T) {
		dir := repo(t, "services: {main: {build: ., command: [sleep, \"86400\"]}}\n", map[string]string{"Dockerfile": "FROM " + enginetest.Image + "\nRUN echo >/built\n"})
		id := p.must(t, "sandboxer", "create", "--quiet", "--profile", "profile.compose-e2e", "--input", "repo="+dir)
		p.must(t, "sandboxer", "destroy", id, "--yes")
		name := filepath.Base(dir) + "/main"
		if out := p.must(t, "sandboxer", "cache", "ls", "-o", "name"); !slices.Contains(strings.Fields(out), name) {
			t.Errorf("kept are %q; want %s among them", out, name)
		}
		if said := p.must(t, "sandboxer", "audit"); !strings.Contains(said, " 0 violations") {
			t.Errorf("audit: %s", said)
		}
		if out := p.must(t, "sandboxer", "cache", "prune", "--host", "build-1", "-o", "name"); !slices.Contains(strings.Fields(out), name) {
			t.Errorf("removed are %q", out)
		}
		// They go with the host.
		id = p.must(t, "sandboxer", "create", "--quiet", "--profile", "profile.compose-e2e", "--input", "repo="+dir)
		owner := docker(t, p.engine, "ps", "--filter", "label=dev.sandboxer.id="+id, "--format", `{{.Label "dev.sandboxer.owner"}}`)[0]
		p.must(t, "sandboxer", "destroy", id, "--yes")
		p.must(t, "sandboxer", "host", "drain", "build-1")
		kept := func() []string {
			t.Helper()
			return docker(t, p.engine, "images", "-q", "--filter", "label=dev.sandboxer.cache", "--filter", "label=dev.sandboxer.owner="+owner)
		}
		if len(kept()) == 0 {
			t.Error("nothing is kept")
		}
		p.must(t, "sandboxer", "host", "rm", "build-1")
		if left := kept(); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})
	t.Run("gone for good", func(t *testing.T) {
		p.addHost(t, "build-2")
		id := p.must(t, "sandboxer", "create", "--quiet", "--profile", "profile.compose-e2e", "--input", "repo="+dir)
		p.host.Stop()
		p.must(t, "sandboxer", "host", "rm", "--force", "build-2")
		if code, _, errs := p.run(t, "sandboxer", "destroy", id, "--yes"); code == 0 || !strings.Contains(errs, "host build-2 no longer belongs to ext.compose-ssh") || !strings.Contains(errs, "sandboxer forget") {
			t.Errorf("destroy: %d, %s", code, errs)
		}
		if code, _, errs := p.run(t, "sandboxer", "forget", id, "--yes"); code != 0 || !strings.Contains(errs, "these may remain: on host build-2: containers, networks, volumes and images with the label dev.sandboxer.name=sbx-") {
			t.Errorf("forget: %d, %s", code, errs)
		}
		if out := p.must(t, "sandboxer", "ls", "-o", "name"); out != "" {
			t.Errorf("there is still %q", out)
		}
		if code, out, _ := p.run(t, "sandboxer", "audit"); code == 0 || !strings.Contains(out, "these may remain: on host build-2") {
			t.Errorf("audit: %d, %s", code, out)
		}
		// What a lost host keeps.
		label := "label=dev.sandboxer.id=" + id
		for _, kind := range [][]string{{"ps", "-aq"}, {"network", "ls", "-q"}, {"volume", "ls", "-q"}} {
			for _, o := range docker(t, p.engine, append(kind, "--filter", label)...) {
				remove := map[string][]string{"ps": {"rm", "-f", "-v", o}, "network": {"network", "rm", o}, "volume": {"volume", "rm", o}}
				docker(t, p.engine, remove[kind[0]]...)
			}
		}
		left, _ := filepath.Glob(filepath.Join(p.host.Dir, ".sandboxer/compose/sbx-*"))
		for _, d := range left {
			os.RemoveAll(d)
		}
	})
	// The owner is the installation's, so look for everything.
	if left := append(docker(t, p.engine, "ps", "-aq", "--filter", "label=dev.sandboxer.id="+id), docker(t, p.engine, "volume", "ls", "-q", "--filter", "label=dev.sandboxer.id="+id)...); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	if left, _ := filepath.Glob(filepath.Join(p.host.Dir, ".sandboxer/compose/sbx-*")); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestMoves takes what is in a workspace from a compose project to the embedded default, on
// to a machine of vm-packer's, and back, changed on each, with the program as it is delivered.
func TestMoves(t *testing.T) {
	t.Parallel()
	p := newProject(t)
	const tree = `cat f l; readlink l; stat -c '%a %Y' d/e/g; stat -c %a d f; ls empty; sha256sum <big`
	dir := repo(t, shop, map[string]string{"hello": "hello\n"})
	first := p.must(t, "sandboxer", "create", "--quiet", "--profile", "profile.compose-e2e", "--input", "repo="+dir)
	said := p.must(t, "sandboxer", "exec", first, "--service", "tests", "--", "sh", "-c",
		`mkdir -p d/e empty; echo one >f; echo two >d/e/g; ln -s d/e/g l; chmod 751 d; chmod 640 f; touch -d @1700000000 d/e/g; head -c 3000000 /dev/urandom >big; `+tree)
	if want := "one\ntwo\nd/e/g\n644 1700000000\n751\n640\n"; !strings.HasPrefix(said, want) {
		t.Fatalf("the project has %q", said)
	}
	ids := []string{first}
	for _, step := range []struct {
		to     []string
		holds  string // what is there
		says   string
		change string
	}{
		{[]string{"--profile", "profile.local"}, tree, said, "echo three >f; rm -r d; ln -s f m"},
		{[]string{"--profile", "profile.vm-haskell-build", "--input", "vm=build-1", "--input", "workspace_dir=" + t.TempDir()}, "cat f m; ls", "three\nthree\nbig\ncompose.yaml\nempty\nf\nhello\nl\nm", "echo four >>f"},
		{[]string{"--profile", "profile.compose-e2e", "--input", "repo=" + dir, "--host", "build-1"}, "cat f; readlink m; ls d 2>&1 | wc -l; stat -c %a f", "three\nfour\nf\n1\n640", "true"},
	} {
		snap := p.must(t, "sandboxer", "snapshot", "create", ids[len(ids)-1], "--portable", "--quiet")
		id := p.must(t, append([]string{"sandboxer", "restore", snap, "--quiet"}, step.to...)...)
		ids = append(ids, id)
		run := []string{"sandboxer", "exec", id, "--", "sh", "-c"}
		if strings.Contains(step.to[1], "compose") {
			run = slices.Insert(run, 3, "--service", "tests")
		}
		if said := p.must(t, append(run, step.holds)...); said != step.says {
			t.Errorf("restored on %s it has %q, want %q", step.to[1], said, step.says)
		}
		p.must(t, append(run, step.change)...)
	}
	p.must(t, append([]string{"sandboxer", "destroy", "--yes"}, ids...)...)
	if said := p.must(t, "sandboxer", "audit"); !strings.Contains(said, " 0 violations") {
		t.Errorf("audit: %s", said)
	}
	if left, _ := filepath.Glob(filepath.Join(p.host.Dir, ".sandboxer/compose/sbx-*")); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}
