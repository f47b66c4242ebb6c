//go:build linux

package cli

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer/internal/buildtest"
)

// formerBuilds are commits whose programs saved sandboxes in another way than those after
// them, and with the gVisor that is linked now. One is added with each change of what is
// saved; those from before another gVisor go.
var formerBuilds = map[string]string{
	"069dcec": "the last without CAP_SYS_RESOURCE for the agent",
	"8c597fc": "the last that did not write down what a sandbox ran with",
}

// What a former build saved, today's restores: database, native snapshot, a sandbox that is
// paused to disk and one that runs; and what runs goes on with the former build again. Memory is bound to the processor, so that it is
// saved here, by that build's own program.
func TestUpgrade(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root: what it covers is the same, with other mounts")
	}
	top, err := exec.CommandContext(t.Context(), "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		t.Skipf("no git history here: %v", err)
	}
	root := strings.TrimSpace(string(top))
	if err := buildtest.Reads(buildtest.Products); err != nil {
		t.Fatal(err)
	}
	build := func(src, dst string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", dst+"/", "./cmd/...")
		cmd.Dir, cmd.Env = src, append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go build in %s: %v\n%s", src, err, out)
		}
	}
	today := t.TempDir()
	built := false
	for commit, what := range formerBuilds {
		t.Run(commit, func(t *testing.T) {
			t.Log(what)
			archive, err := exec.CommandContext(t.Context(), "git", "-C", root, "archive", commit).Output()
			if err != nil {
				t.Skipf("the commit is not in the history here: %v", err)
			}
			src, former := t.TempDir(), t.TempDir()
			tar := exec.CommandContext(t.Context(), "tar", "-x", "-C", src)
			tar.Stdin = bytes.NewReader(archive)
			if out, err := tar.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			build(src, former)
			if !built {
				build(root, today)
				built = true
			}
			upgrade(t, former, today)
		})
	}
}

// What a clone without history would skip is on the list of what must not skip.
func TestFormerBuildsMustRun(t *testing.T) {
	list, err := os.ReadFile("../../scripts/must-run.txt")
	if err != nil {
		t.Fatal(err)
	}
	for commit := range formerBuilds {
		if !strings.Contains(string(list), "/internal/cli TestUpgrade/"+commit) {
			t.Errorf("scripts/must-run.txt does not have TestUpgrade/%s", commit)
		}
	}
}

func upgrade(t *testing.T, former, today string) {
	dir, err := os.MkdirTemp("", "sbx") // gVisor's sockets need a short name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	env := append(os.Environ(), "HOME="+dir, "SANDBOXER_DATA_DIR="+dir+"/d", "SANDBOXER_SOCKET="+dir+"/s")
	serve := func(bin string) (stop func(os.Signal)) {
		t.Helper()
		cmd := exec.Command(filepath.Join(bin, "sandboxer"), "serve")
		var log bytes.Buffer
		cmd.Env, cmd.Stdout, cmd.Stderr = env, &log, &log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
			if _, err := os.Stat(dir + "/s"); err == nil {
				break
			}
			select {
			case err := <-ended:
				t.Fatalf("the server ended: %v\n%s", err, log.String())
			default:
			}
			if time.Now().After(deadline) {
				_ = cmd.Process.Kill()
				t.Fatalf("the server does not come up\n%s", log.String())
			}
		}
		done := false
		stop = func(sig os.Signal) {
			if done {
				return
			}
			done = true
			_ = cmd.Process.Signal(sig)
			<-ended
			_ = os.Remove(dir + "/s")
			if t.Failed() {
				t.Logf("the log of %s\n%s", bin, log.String())
			}
		}
		t.Cleanup(func() { stop(unix.SIGKILL) })
		return stop
	}
	run := func(bin string, args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, filepath.Join(bin, "sandboxer"), args...)
		cmd.Env = env
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("sandboxer %s: %v\n%s%s", strings.Join(args, " "), err, out, errs.String())
		}
		return strings.TrimSpace(string(out))
	}
	stop := serve(former)
	create := func(name string) {
		run(former, "create", "--profile", "local", "--ttl", "1h", "-q", "--name", name)
		run(former, "exec", name, "--", "sh", "-c", "echo kept >/workspace/f")
		run(former, "files", "ls", name, "/workspace") // the agent is awake, in what is saved, too
	}
	create("runs")
	create("sleeps")
	run(former, "snapshot", "create", "sleeps", "--name", "base")
	run(former, "pause", "sleeps", "--depth", "disk")
	stop(unix.SIGTERM)

	stop = serve(today)
	kept := func(name string) {
		t.Helper()
		if got := run(today, "exec", name, "--", "cat", "/workspace/f"); got != "kept" {
			t.Errorf("%s has %q", name, got)
		}
		for range 2 { // the second connection is handed over in another way
			if got := run(today, "files", "ls", name, "/workspace"); !strings.Contains(got, " f") {
				t.Errorf("%s lists %q", name, got)
			}
		}
	}
	kept("runs")
	run(today, "restore", "base", "--name", "copy")
	kept("copy")
	run(today, "resume", "sleeps")
	kept("sleeps")
	// And what came of it is saved and restored like any other.
	run(today, "snapshot", "create", "copy", "--name", "again")
	run(today, "restore", "again", "--name", "second")
	kept("second")
	run(today, "pause", "sleeps", "--depth", "disk")
	run(today, "resume", "sleeps")
	kept("sleeps")
	run(today, "destroy", "copy", "second", "sleeps")
	stop(unix.SIGTERM)

	// And back: a program that does not know the database says so and leaves it alone, and
	// the copy that the upgrade made is one that it knows.
	before, err := filepath.Glob(dir + "/d/sandboxer-before-*.db")
	if err != nil {
		t.Fatal(err)
	}
	if len(before) > 0 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		cmd := exec.CommandContext(ctx, filepath.Join(former, "sandboxer"), "serve")
		cmd.Env = env
		out, err := cmd.CombinedOutput()
		cancel()
		if err == nil || !strings.Contains(string(out), "newer sandboxer") {
			t.Errorf("the former server on today's database: %v\n%s", err, out)
		}
		run(former, "backup", "restore", before[0])
	}
	stop = serve(former)
	if got := run(former, "exec", "runs", "--", "cat", "/workspace/f"); got != "kept" {
		t.Errorf("with the former program again, runs has %q", got)
	}
	if got := run(former, "files", "ls", "runs", "/workspace"); !strings.Contains(got, " f") {
		t.Errorf("with the former program again, runs lists %q", got)
	}
	run(former, "destroy", "--all", "--yes")
	stop(unix.SIGTERM)
}
