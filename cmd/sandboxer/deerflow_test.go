//go:build linux

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
)

// TestDeerFlow has a client that was written from what deer-flow's sends and reads, in Python, drive
// the server as it is installed: with sandboxes of this machine's gVisor, where the files of
// users are in the sandboxes alone, and where they are in directories of this machine; and with
// containers of an engine, which have those directories, too.
func TestDeerFlow(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and boots everything")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: what an ordinary user may do depends on the kernel's settings")
	}
	python := ""
	for _, p := range []string{"/usr/bin/python3", "python3"} { // Debian's has Debian's packages
		if exec.Command(p, "-c", "import requests").Run() == nil {
			python = p
			break
		}
	}
	if python == "" {
		t.Skip("no python3 has requests")
	}
	bin := programs(t)
	program := filepath.Join(bin, "sandboxer")
	for name, shared := range map[string]bool{"files of the sandbox": false, "directories of users": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			deerflow(t, python, program, shared, "")
		})
	}
	t.Run("containers", func(t *testing.T) {
		t.Parallel()
		docker := &enginetest.Docker{}
		defer docker.Stop()
		deerflow(t, python, program, true, strings.TrimPrefix(docker.Start(t), "DOCKER_HOST="))
	})
}

// deerflow is TestDeerFlow with one server; engine is the address of what runs its sandboxes, "" for
// ext.local.
func deerflow(t *testing.T, python, program string, shared bool, engine string) {
	dir, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	home, data := filepath.Join(dir, "home"), ""
	for _, d := range []string{"", "profiles", "extensions"} {
		if err := os.Mkdir(filepath.Join(home, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// As profile.deer-flow, but for how long sandboxes are left alone.
	profile, err := os.ReadFile("../../profiles/profile.deer-flow.yaml")
	if err != nil {
		t.Fatal(err)
	}
	quick := regexp.MustCompile(`(?m)^idle: .*$`).ReplaceAll(profile, []byte("idle: 5s"))
	if shared {
		quick = profile
	}
	if engine != "" {
		quick = regexp.MustCompile(`(?ms)^extension: .*?^requires: `).ReplaceAll(quick, []byte("extension: ext.docker\nisolation: container\nimage: engine:"+enginetest.Image+"\nrequires: "))
		quick = regexp.MustCompile(`(?m)^limits:\n  disk: .*\n`).ReplaceAll(quick, nil)
		ext := "id: ext.docker\nhandler: docker\ncapabilities:\n  isolation_levels: [container]\n  pricing_model: self-hosted\nconfig:\n  engines:\n    here: {address: \"" + engine + "\"}\n"
		if err := os.WriteFile(filepath.Join(home, "extensions/ext.docker.yaml"), []byte(ext), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(home, "profiles/profile.deer-flow.yaml"), quick, 0o644); err != nil {
		t.Fatal(err)
	}
	env := append(os.Environ(), "SANDBOXER_HOME="+home, "SANDBOXER_PROGRESS=none")
	if shared {
		users := filepath.Join(dir, "users")
		if err := os.Mkdir(users, 0o755); err != nil {
			t.Fatal(err)
		}
		env, data = append(env, "SANDBOXER_DEERFLOW_USER_DATA="+users), filepath.Join(users, "acme")
	}
	run := func(args ...string) (string, error) {
		cmd := exec.Command(program, args...)
		cmd.Env = env
		out, err := cmd.Output()
		return strings.TrimSpace(string(out)), err
	}
	log := &lockedBuffer{}
	server := exec.Command(program, "serve", "--deerflow", "--listen", "127.0.0.1:0")
	server.Env, server.Stderr = env, log
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
	listening := regexp.MustCompile(`listening network=tcp addr=(\S+)`)
	var address []string
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		_, err := run("status")
		if address = listening.FindStringSubmatch(log.String()); err == nil && address != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the server does not answer:\n%s", log)
		}
	}
	key, err := run("key", "create", "deer-flow", "--tenant", "acme", "--scope", "read,write")
	if err != nil {
		t.Fatalf("key create: %v\n%s", err, key)
	}

	client := exec.Command(python, "testdata/deerflow.py", "http://"+address[1], program, data)
	client.Env = append(env, "PROVISIONER_API_KEY="+key)
	client.WaitDelay = time.Second
	watchdog := time.AfterFunc(4*time.Minute, func() { _ = client.Process.Kill() })
	out, err := client.CombinedOutput()
	watchdog.Stop()
	if err != nil || !strings.HasSuffix(strings.TrimSpace(string(out)), "done") {
		t.Fatalf("the client: %v\n%s\nthe server:\n%s", err, out, log)
	}

	if ids, err := run("ls", "-q"); err != nil || ids != "" {
		t.Errorf("left: %s, %v", ids, err)
	}
	if out, err := run("audit"); err != nil || !strings.Contains(out, " 0 violations") {
		t.Errorf("audit: %v\n%s", err, out)
	}
	if strings.Contains(log.String(), "sbx_box_") || strings.Contains(log.String(), key) {
		t.Error("the log has a token or a key")
	}
	if out, err := run("down"); err != nil {
		t.Errorf("down: %v\n%s", err, out)
	}
	_ = server.Wait()
	for _, left := range remains(t, home) {
		t.Errorf("left behind: %s", left)
	}
}
