//go:build linux

package local

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// crowded makes this process hold many more descriptors, most of which an execve does not close, in the range of
// numbers that gVisor's children need themselves.
func crowded(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		flags := 0
		if i%4 == 0 {
			flags = unix.EFD_CLOEXEC
		}
		fd, err := unix.Eventfd(0, flags)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
	}
}

// A server with a thousand descriptors makes, uses and ends sandboxes, whatever numbers the next files get. A child
// wants some of these numbers for its own files, and one of them is its program.
func TestManyDescriptors(t *testing.T) {
	e := openTest(t)
	live := func(n int) {
		t.Helper()
		h := up(t, e, sandboxer.Spec{})
		if got := sh(t, e, h, "echo $((6*7))"); got != "42" {
			t.Errorf("with %d descriptors more a command says %q", n, got)
		}
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Error(err)
		}
	}
	live(0)
	crowded(t, 220)
	next := func() int {
		fd, err := unix.Dup(0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		return fd
	}
	for next() < 478 {
		crowded(t, 10)
	}
	for next() < 520 { // around the program's number
		live(next())
		crowded(t, 1)
	}
	crowded(t, 600)
	live(1000)
}

// held is this process's sockets and event counters, which could belong to another sandbox.
func held(t *testing.T, pid int) (what []string) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d", pid)
	entries, err := os.ReadDir(dir + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range entries {
		link, err := os.Readlink(filepath.Join(dir, "fd", d.Name()))
		switch {
		case err != nil:
		case strings.HasPrefix(link, "socket:"), strings.HasPrefix(link, "pipe:"):
			what = append(what, link)
		case link == "anon_inode:[eventfd]":
			info, _ := os.ReadFile(filepath.Join(dir, "fdinfo", d.Name()))
			_, id, _ := strings.Cut(string(info), "eventfd-id:")
			id, _, _ = strings.Cut(id, "\n")
			what = append(what, "eventfd "+strings.TrimSpace(id))
		}
	}
	return what
}

// Sixteen sandboxes that are made at once have no files of each other, and nothing of this process's environment or
// other files.
func TestChildrenHaveNothingOfOthers(t *testing.T) {
	t.Setenv("AWS_SECRET_ACCESS_KEY", "the-key")
	e := openTest(t)
	crowded(t, 100)
	const n = 16
	handles := make([]sandboxer.Handle, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			h, err := e.Provision(t.Context(), sandboxer.Spec{ID: fmt.Sprintf("many%d", i), Generation: 1, Owner: e.env.Owner})
			if err == nil {
				_, err = e.WaitReady(t.Context(), h)
			}
			if err != nil {
				t.Error(err)
			}
			handles[i] = h
		})
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, h := range handles {
			if _, err := e.Teardown(context.WithoutCancel(t.Context()), h); err != nil {
				t.Error(err)
			}
		}
	})
	whose := map[string]string{}
	for _, what := range held(t, os.Getpid()) {
		whose[what] = "this process"
	}
	for _, h := range handles {
		pids, err := e.processes(h.Ref)
		if err != nil || len(pids) < 2 {
			t.Fatalf("%s has the processes %v, %v", h.Ref, pids, err)
		}
		for _, pid := range pids {
			for _, what := range held(t, pid) {
				if other := whose[what]; other != "" && other != h.Ref {
					t.Errorf("process %d of %s has %s of %s", pid, h.Ref, what, other)
				}
				whose[what] = h.Ref
			}
			env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
			if err != nil {
				t.Error(err)
			}
			if left := bytes.Trim(env, "\x00"); len(left) > 0 {
				t.Errorf("process %d of %s has an environment of %d bytes, with the key: %t", pid, h.Ref, len(left), bytes.Contains(left, []byte("the-key")))
			}
		}
	}
}

// One process makes many sandboxes, one after the other and alive together.
func TestManySandboxesOfOneProcess(t *testing.T) {
	if os.Getenv("SANDBOXER_TEST_WHOLE") == "" {
		t.Skip("takes a minute: SANDBOXER_TEST_WHOLE=1")
	}
	e := openTest(t)
	for range 90 {
		up(t, e, sandboxer.Spec{})
	}
	for range 500 {
		h := up(t, e, sandboxer.Spec{})
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Fatal(err)
		}
	}
}

// A failed start reports how the sandbox's kernel ended: in known words, and without those that a signal killed it. The
// kernel's own message goes only to the log, bounded and without control characters.
func TestKernelEndsWhileItStarts(t *testing.T) {
	needsGVisor(t)
	for _, c := range []struct{ name, words, says, hint string }{
		{"killed", "", "its kernel ended without a message, perhaps killed by a signal", "dmesg"},
		{"said", "FATAL ERROR: the-guests-data \x1b[31m\r\n", "its kernel ended on its own, with a message", "the server's log"},
		{"threads", "runtime: failed to create new OS thread (have 5 already; errno=11)\n", "its kernel ended, because it got no thread", "TasksMax"},
	} {
		t.Run(c.name, func(t *testing.T) {
			runner := filepath.Join(helpers, "dying-"+c.name)
			build := exec.Command("go", "build", "-trimpath", "-ldflags", "-X 'main.real="+helpers+"/sandboxer-runner' -X 'main.words="+c.words+"'", "-o", runner, "./testdata/dying")
			build.Env = append(os.Environ(), "CGO_ENABLED=0")
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			t.Cleanup(func() { os.Remove(runner) })
			var log bytes.Buffer
			e := openIn(t, shortDir(t), ours("dying"), func(c *Config) { c.Runner = runner })
			e.env.Log = slog.New(slog.NewTextHandler(&log, nil))
			t.Cleanup(func() { e.Close() })
			_, err := e.Provision(t.Context(), sandboxer.Spec{ID: "dying", Generation: 1, Owner: e.env.Owner})
			if sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), c.says) || !strings.Contains(sandboxer.HintOf(err), c.hint) {
				t.Errorf("%v; hint %q", err, sandboxer.HintOf(err))
			}
			if s := sandboxer.Message(err) + sandboxer.HintOf(err); strings.Contains(s, "the-guests-data") {
				t.Errorf("the answer has what the kernel said: %q", s)
			}
			if s := log.String(); !strings.Contains(s, "the kernel of a sandbox ended while it started") || strings.Contains(s, "\x1b") || strings.Contains(s, `\x1b`) || len(s) > 8<<10 ||
				!strings.Contains(s, strings.TrimSpace(strings.SplitN(c.words, " \x1b", 2)[0])) {
				t.Errorf("the log: %.3000q", s)
			}
		})
	}
}
