//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestServerKilledOnGVisor kills the server amid creating and destroying real
// sandboxes. The next server finishes what was begun: the same request gets its
// sandbox, the same destroy removes it, and nothing else is left of either.
func TestServerKilledOnGVisor(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: what an ordinary user may do depends on the kernel's settings")
	}
	rounds := 15
	if testing.Short() {
		rounds = 3
	}
	dir, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	bin := programs(t)
	home := filepath.Join(dir, "home")
	repo := filepath.Join(dir, "repo")
	if err := errors.Join(os.Mkdir(home, 0o755), os.Mkdir(repo, 0o755), os.WriteFile(filepath.Join(repo, "file"), []byte("content"), 0o644)); err != nil {
		t.Fatal(err)
	}
	sandboxer := func(args ...string) *exec.Cmd {
		cmd := exec.Command(filepath.Join(bin, "sandboxer"), args...)
		cmd.Env = append(os.Environ(), "SANDBOXER_HOME="+home, "SANDBOXER_PROGRESS=none")
		return cmd
	}
	must := func(args ...string) string {
		t.Helper()
		var out, errs bytes.Buffer
		cmd := sandboxer(args...)
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil {
			t.Fatalf("sandboxer %s: %v\n%s%s", strings.Join(args, " "), err, out.String(), errs.String())
		}
		return strings.TrimSpace(out.String())
	}
	var server *exec.Cmd
	start := func() {
		t.Helper()
		var log bytes.Buffer
		server = sandboxer("serve")
		server.Stderr = &log
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(time.Minute); sandboxer("status").Run() != nil; {
			if time.Now().After(deadline) {
				_ = server.Process.Kill()
				_ = server.Wait()
				t.Fatalf("the server does not answer:\n%s", log.String())
			}
		}
	}
	kill := func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}
	// amid runs a command and kills the server at a random moment of it.
	amid := func(most time.Duration, args ...string) {
		cmd := sandboxer(args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.Int64N(int64(most)))) // the moment is what is tested
		kill()
		_ = cmd.Wait() // whatever it says
	}

	start()
	t.Cleanup(func() { kill() })
	began := time.Now()
	must("create", "--input", "repo="+repo, "--name", "first")
	took := time.Since(began)
	must("destroy", "first")
	for i := range rounds {
		name := fmt.Sprintf("box%d", i)
		create := []string{"create", "--input", "repo=" + repo, "--name", name, "--idempotency-key", "key-" + name}
		amid(took, create...)
		start()
		id := must(create...)
		if got := must("exec", id, "--", "cat", "file"); got != "content" {
			t.Fatalf("round %d: the workspace says %q", i, got)
		}
		if again := must(create...); again != id {
			t.Fatalf("round %d: the same request gave %s, then %s", i, id, again)
		}
		if ids := strings.Fields(must("ls", "-q")); len(ids) != 1 || ids[0] != id {
			t.Fatalf("round %d: there are %v; want only %s", i, ids, id)
		}
		amid(took/2, "destroy", id)
		start()
		must("destroy", id)
		if out := must("audit"); !strings.Contains(out, " 0 violations") {
			t.Fatalf("round %d: audit says %s", i, out)
		}
		if ids := must("ls", "-q"); ids != "" {
			t.Fatalf("round %d: left: %s", i, ids)
		}
	}
	must("down")
	_ = server.Wait()
	for _, left := range remains(t, home) {
		t.Errorf("left behind: %s", left)
	}
}
