//go:build linux

package local

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/images/registrytest"
	"github.com/sand-boxer/sandboxer/internal/mounts"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// up makes a sandbox that is torn down when the test ends.
func up(t *testing.T, e *extension, spec sandboxer.Spec) sandboxer.Handle {
	t.Helper()
	if spec.ID == "" {
		spec.ID = sandboxer.NewID()
	}
	spec.Generation, spec.Owner = 1, e.env.Owner
	spec.Vouched = []string{sandboxer.RestrictedImage, sandboxer.RestrictedMounts} // as an operator
	t.Cleanup(func() {
		if _, err := e.Teardown(context.Background(), sandboxer.Handle{SandboxID: spec.ID, Generation: 1}); err != nil {
			t.Error(err)
		}
	})
	h, err := e.Provision(t.Context(), spec)
	if err != nil {
		t.Fatalf("Provision: %v", err)
	}
	if _, err := e.WaitReady(t.Context(), h); err != nil {
		t.Fatalf("WaitReady: %v", err)
	}
	return h
}

// sh runs a script in the sandbox and returns its output.
func sh(t *testing.T, e *extension, h sandboxer.Handle, script string) string {
	t.Helper()
	var out, errs bytes.Buffer
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: &out, Stderr: &errs})
	if err != nil || x.Code != 0 {
		t.Fatalf("%s: %+v %v\n%s%s", script, x, err, out.String(), errs.String())
	}
	return strings.TrimSpace(out.String())
}

func openTest(t *testing.T) *extension {
	t.Helper()
	needsGVisor(t)
	e := openIn(t, shortDir(t), ours("test"))
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// TestDamagedState damages the records of sandboxes while no broker runs: the next broker
// reports each damaged one, does not end the others, and can destroy it.
func TestDamagedState(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	e := openIn(t, dir, ours("test"))
	t.Cleanup(func() { e.Close() })
	names := map[string]func(name string) string{
		"record":  func(name string) string { return e.dir("box", name, recordFile) },
		"state":   func(name string) string { return e.dir("run", name+"_sandbox:"+name+".state") },
		"neither": nil,
	}
	boxes := map[string]sandboxer.Handle{}
	for which := range names {
		boxes[which] = up(t, e, sandboxer.Spec{})
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	for which, file := range names {
		if file == nil {
			continue
		}
		name := file(boxes[which].Ref)
		fi, err := os.Stat(name)
		if err == nil {
			err = os.Truncate(name, fi.Size()/2)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	e = openIn(t, dir, ours("test"))
	for which, h := range boxes {
		_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
		l, lerr := e.IsAlive(t.Context(), h)
		if which == "neither" {
			if err != nil || l != sandboxer.Alive || lerr != nil {
				t.Errorf("a whole one: %v; %q, %v", err, l, lerr)
			}
			continue
		}
		if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), "damaged") || sandboxer.HintOf(err) == "" {
			t.Errorf("a torn %s: a command says %v (%s)", which, err, sandboxer.HintOf(err))
		}
		if l != sandboxer.Unresponsive || lerr != nil {
			t.Errorf("a torn %s: a probe says %q, %v", which, l, lerr)
		}
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Errorf("a torn %s: %v", which, err)
		}
		if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Gone || err != nil || len(processes(t, e)[h.Ref]) > 0 {
			t.Errorf("a torn %s, destroyed: a probe says %q, %v; processes %v", which, l, err, processes(t, e)[h.Ref])
		}
	}
}

// Nothing needs a directory for temporary files.
func TestNoTemporaryDirectory(t *testing.T) {
	e := openTest(t)
	t.Setenv("TMPDIR", "/nowhere")
	h := up(t, e, sandboxer.Spec{})
	if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"id"}, User: "user"}); err != nil || x.Code != 0 {
		t.Errorf("a command of a user: %+v, %v", x, err)
	}
	if err := e.Renew(t.Context(), h, time.Now().Add(time.Hour)); err != nil {
		t.Errorf("extending: %v", err)
	}
	if err := errors.Join(e.Pause(t.Context(), h), e.Resume(t.Context(), h)); err != nil {
		t.Errorf("pausing: %v", err)
	}
	restored(t, e, sandboxer.Spec{}, snapshot(t, e, h))
}

// A user whose process may open too few files gets the needed number in the error.
func TestTooFewDescriptors(t *testing.T) {
	var may unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &may); err != nil {
		t.Fatal(err)
	}
	few := may
	few.Cur = 500
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	_, err := openHigh("/proc/self/exe")
	if err2 := unix.Setrlimit(unix.RLIMIT_NOFILE, &may); err2 != nil {
		t.Fatal(err2)
	}
	if sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(sandboxer.Message(err), "limit of open files is 500, and it needs more than 640") || !strings.Contains(sandboxer.HintOf(err), "ulimit -n 1024") {
		t.Errorf("%v (%s)", err, sandboxer.HintOf(err))
	}
}

// gVisor's library knows one program for all engines of a process. A second engine does not change it under the first.
func TestOneRunner(t *testing.T) {
	e := openTest(t)
	release, err := prepareProcess("/proc/self/exe", e.dir("null"))
	if sandboxer.KindOf(err) != sandboxer.Invalid || release != nil {
		t.Errorf("another runner: %v", err)
	}
	if n := process.users; n != 1 {
		t.Errorf("%d engines are counted", n)
	}
}

// Without a free descriptor to check processes, a running sandbox does not count as gone: it
// would be destroyed.
func TestNoDescriptorLeft(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	next := openIn(t, e.env.Dir, e.env.Owner) // it has not looked at the sandbox yet
	defer next.Close()
	var may unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &may); err != nil {
		t.Fatal(err)
	}
	few := may
	few.Cur = min(may.Cur, 2048)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	var full []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		full = append(full, f)
	}
	live, aerr := e.IsAlive(t.Context(), h)
	_, xerr := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
	first, ferr := next.IsAlive(t.Context(), h)
	var listed []error
	for _, err := range e.ListRunning(t.Context(), e.env.Owner) {
		listed = append(listed, err)
	}
	for _, f := range full {
		f.Close()
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &may); err != nil {
		t.Fatal(err)
	}
	if live == sandboxer.Gone || errors.Is(aerr, sandboxer.NotFound) {
		t.Errorf("without descriptors a probe says %q, %v", live, aerr)
	}
	if first != sandboxer.Unknown || ferr == nil || errors.Is(ferr, sandboxer.NotFound) || strings.Contains(ferr.Error(), "damaged") {
		t.Errorf("without descriptors the first probe says %q, %v", first, ferr)
	}
	if xerr == nil || errors.Is(xerr, sandboxer.NotFound) {
		t.Errorf("without descriptors a command says %v", xerr)
	}
	if len(listed) != 1 || listed[0] == nil {
		t.Errorf("without descriptors the list has %v; want an error", listed)
	}
	if live, err := e.IsAlive(t.Context(), h); live != sandboxer.Alive || err != nil {
		t.Errorf("a probe says %q, %v", live, err)
	}
	if got := sh(t, e, h, "echo well"); got != "well" {
		t.Errorf("a command says %q", got)
	}
}

// TestRootIsAnAllowList checks from inside that nothing forbidden is visible.
func TestRootIsAnAllowList(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	if got := sh(t, e, h, "ls -A /root /home/user /mnt /srv /opt /media /var/lib /run | grep -v : || true"); got != "" {
		t.Errorf("directories that must be empty contain:\n%s", got)
	}
	for _, p := range []string{"/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/etc/machine-id", "/etc/ssl/private", "/var/run/docker.sock", e.env.Dir, "/proc/1/root/etc/shadow"} {
		if got := sh(t, e, h, "test -e "+p+" && echo there || echo missing"); got != "missing" {
			t.Errorf("%s is %s", p, got)
		}
	}
	if got := sh(t, e, h, "find / -xdev -type s 2>/dev/null | grep -v ^/.sandboxer/ || true"); got != "" {
		t.Errorf("sockets are visible: %s", got)
	}
	if out, err := os.ReadFile("/etc/passwd"); err == nil {
		guest := sh(t, e, h, "cat /etc/passwd")
		for line := range strings.Lines(string(out)) {
			if f := strings.Split(line, ":"); len(f) > 2 && len(f[2]) == 4 && strings.Contains(guest, "\n"+f[0]+":") && f[0] != "user" {
				t.Errorf("the account of a person, %s, is visible", f[0])
			}
		}
	}
	// A sandbox may write anywhere, but only in its own layer.
	sh(t, e, h, "echo x >/usr/bin/sandboxer-was-here && rm /usr/bin/env && mkdir /etc/new && touch /var/lib/x /tmp/y")
	if _, err := os.Stat("/usr/bin/sandboxer-was-here"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal("a write inside reached this machine")
	}
	if _, err := os.Stat("/usr/bin/env"); err != nil {
		t.Fatal("a removal inside reached this machine")
	}
	other := up(t, e, sandboxer.Spec{})
	if got := sh(t, e, other, "ls /usr/bin/sandboxer-was-here /etc/new 2>/dev/null; test -e /usr/bin/env && echo fine"); got != "fine" {
		t.Errorf("a neighbour sees: %q", got)
	}
	if os.Geteuid() == 0 {
		uid := ""
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", e.boxes[h.Ref].pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if f := strings.Fields(line); f[0] == "Uid:" {
				uid = f[1]
			}
		}
		want := uint32(idShift)
		if e.ids.why == nil {
			want = e.boxes[h.Ref].rec.IDBase
		}
		if uid != fmt.Sprint(want) {
			t.Errorf("the sandbox's kernel runs as user %s here; want %d", uid, want)
		}
	}
}

// TestCopyBelongsToUser: a sandbox's user can work in the copy of a directory, at any place,
// and in an empty workspace.
func TestCopyBelongsToUser(t *testing.T) {
	e := openTest(t)
	repo := t.TempDir()
	if err := os.Mkdir(filepath.Join(repo, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(repo, "sub", "file"), []byte("original"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, spec := range []sandboxer.Spec{
		{User: "1234:4321", Inputs: map[string]string{"repo": repo}},
		{User: "nobody", Inputs: map[string]string{"repo": repo}, Workspace: "/home/user/src"},
	} {
		h := up(t, e, spec)
		if got := sh(t, e, h, `cat sub/file && echo more >>sub/file && : >sub/new && : >new && [ "$(stat -c %u:%g . sub sub/file | sort -u)" = "$(id -u):$(id -g)" ]`); got != "original" {
			t.Errorf("%+v: %q", spec, got)
		}
	}
	sh(t, e, up(t, e, sandboxer.Spec{User: "1234"}), `: >new && [ "$(stat -c %u .)" = 1234 ]`)
	sh(t, e, up(t, e, sandboxer.Spec{User: "1234", Workspace: "/srv/work"}), `: >new && [ "$(pwd)" = /srv/work ]`)
}

func TestRepoIsACopy(t *testing.T) {
	e := openTest(t)
	repo := t.TempDir()
	for name, content := range map[string]string{"a.txt": "original", "sub/b c.txt": "deep", ".git/config": "[core]"} {
		p := filepath.Join(repo, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(repo, "a.txt"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/shadow", filepath.Join(repo, "link")); err != nil {
		t.Fatal(err)
	}
	h := up(t, e, sandboxer.Spec{Inputs: map[string]string{"repo": repo}})
	if got := sh(t, e, h, "pwd; cat a.txt 'sub/b c.txt' .git/config; stat -c '%a %u' a.txt; readlink link"); got != "/workspace\noriginaldeep[core]750 0\n/etc/shadow" {
		t.Errorf("inside: %q", got)
	}
	sh(t, e, h, "echo changed >a.txt; rm -r sub")
	if got, err := os.ReadFile(filepath.Join(repo, "a.txt")); err != nil || string(got) != "original" {
		t.Errorf("the original is now %q (%v)", got, err)
	}
	at := up(t, e, sandboxer.Spec{Inputs: map[string]string{"repo": repo}, Workspace: "/home/user/src"})
	if got := sh(t, e, at, "pwd; cat a.txt"); got != "/home/user/src\noriginal" {
		t.Errorf("with a workspace of its own: %q", got)
	}
}

// TestRefusals checks the message for each impossible request, and that nothing is left of
// it.
func TestRefusals(t *testing.T) {
	e := openTest(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		spec sandboxer.Spec
		kind sandboxer.Kind
		want string
	}{
		{"relative repo", sandboxer.Spec{Inputs: map[string]string{"repo": "src"}}, sandboxer.Invalid, `input repo: "src" is not an absolute directory`},
		{"missing repo", sandboxer.Spec{Inputs: map[string]string{"repo": "/no/such"}}, sandboxer.Invalid, "input repo: /no/such is not a directory that can be read on the server's machine"},
		{"file as repo", sandboxer.Spec{Inputs: map[string]string{"repo": file}}, sandboxer.Invalid, "is not a directory"},
		{"git without network", sandboxer.Spec{Inputs: map[string]string{"repo": "https://example.org/x.git"}}, sandboxer.Invalid, "needs a network, and the sandbox has none"},
		{"git transport", sandboxer.Spec{Inputs: map[string]string{"repo": "ext::sh -c true://x"}}, sandboxer.Invalid, "is not an https, http or git URL"},
		{"credentials in the URL", sandboxer.Spec{Inputs: map[string]string{"repo": "https://me:hunter2@example.org/x.git"}}, sandboxer.Invalid, "contains credentials"},
		{"ref without URL", sandboxer.Spec{Inputs: map[string]string{"repo": "/tmp", "ref": "main"}}, sandboxer.Invalid, "input ref needs a git URL"},
		{"option as ref", sandboxer.Spec{Inputs: map[string]string{"repo": "https://example.org/x", "ref": "--upload-pack=x"}}, sandboxer.Invalid, "is not a branch, tag or commit"},
		{"mount over the server's own", sandboxer.Spec{Mounts: []sandboxer.Mount{{Source: "/tmp", Target: "/x"}}}, sandboxer.Denied, "no sandbox sees anything of the server's own directory"},
		{"mount over the workspace", sandboxer.Spec{Mounts: []sandboxer.Mount{{Source: file, Target: "/workspace"}}}, sandboxer.Invalid, "/workspace"},
		{"allow list", sandboxer.Spec{Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow}}, sandboxer.Invalid, "names nothing to reach"},
		{"network mode", sandboxer.Spec{Network: sandboxer.NetworkPolicy{Mode: "pubic"}}, sandboxer.Invalid, `"pubic" is not a network mode`},
		{"host", sandboxer.Spec{Host: "elsewhere"}, sandboxer.Invalid, "on localhost only"},
		{"GPU", sandboxer.Spec{Limits: sandboxer.Limits{GPUs: 1}}, sandboxer.Unsupported, "does not support GPUs"},
		{"tiny memory", sandboxer.Spec{Limits: sandboxer.Limits{MemoryBytes: 1 << 20}}, "", ""},
		{"workspace", sandboxer.Spec{Workspace: "/proc/x"}, sandboxer.Invalid, "cannot be the workspace"},
		{"no image at all", sandboxer.Spec{Image: "Python 3.13"}, sandboxer.Invalid, "is not a reference to an image"},
		{"impossible registry", sandboxer.Spec{Image: "registry.invalid/x:1"}, sandboxer.Invalid, "can never exist"},
		{"missing image", sandboxer.Spec{Image: "tar:/no/such.tar"}, sandboxer.Invalid, "does not exist"},
		{"image of the wrong kind", sandboxer.Spec{Image: "oci:" + file}, sandboxer.Invalid, "is not the kind of file that oci: needs"},
		{"broken image", sandboxer.Spec{Image: "tar:" + file}, sandboxer.Failed, "not a saved image"},
		{"missing command", sandboxer.Spec{Command: []string{"no-such-command"}}, sandboxer.Failed, `"no-such-command" could not be started`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.want == "" {
				tt.kind, tt.want = sandboxer.Invalid, "too small"
				if !e.cgroups.usable() {
					tt.kind, tt.want = sandboxer.Unsupported, "cannot be enforced here"
				}
			}
			tt.spec.ID, tt.spec.Generation, tt.spec.Owner = "refused", 1, ours("test")
			tt.spec.Vouched = []string{sandboxer.RestrictedImage, sandboxer.RestrictedMounts} // as an operator
			err := tt.spec.Check()                                                            // as the broker does
			if err == nil {
				_, err = e.Provision(t.Context(), tt.spec)
			}
			if sandboxer.KindOf(err) != tt.kind || !strings.Contains(sandboxer.Message(err), tt.want) {
				t.Errorf("got %s %q; want %s with %q", sandboxer.KindOf(err), sandboxer.Message(err), tt.kind, tt.want)
			}
			if strings.Contains(fmt.Sprint(err), "hunter2") {
				t.Error("the error shows a password")
			}
			if names, err := e.names(); err != nil || len(names) > 0 {
				t.Errorf("left: %v %v", names, err)
			}
		})
	}
}

// churn is a broker that makes and destroys sandboxes until it is killed.
func churn(dir string) {
	helpers = os.Getenv("SANDBOXER_TEST_HELPERS")
	ext, err := Adapter.Open(context.Background(), sandboxer.Env{Extension: "ext.local", Owner: ours("churn"), Dir: dir, Decode: func(v any) error {
		c := v.(*Config)
		c.Runner, c.Agent = filepath.Join(helpers, "sandboxer-runner"), filepath.Join(helpers, "sandboxer-agent")
		return nil
	}})
	if err != nil {
		fmt.Println("open:", err)
		os.Exit(1)
	}
	out := os.NewFile(1, "stdout")
	for i := 1; ; i++ {
		spec := sandboxer.Spec{ID: "churn", Generation: i, Owner: ours("churn"), Limits: sandboxer.Limits{DiskBytes: 1 << 30}}
		h, err := ext.Provision(context.Background(), spec)
		fmt.Fprintln(out, "up", i, err)
		if os.Getenv("SANDBOXER_TEST_STAY") != "" {
			x, err := ext.(*extension).Exec(context.Background(), h, sandboxer.Cmd{Args: []string{"sh", "-c",
				"(i=0; while :; do i=$((i+1)); echo $i >>/workspace/count; sleep 0.05; done) >/dev/null 2>&1 & echo started"}})
			fmt.Fprintln(out, "running", x, err)
			select {}
		}
		_, err = ext.Teardown(context.Background(), h)
		fmt.Fprintln(out, "down", i, err)
	}
}

// startChurn starts churn in a process of its own.
func startChurn(t *testing.T, dir string, env ...string) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(append(os.Environ(), "SANDBOXER_TEST_CHURN="+dir, "SANDBOXER_TEST_HELPERS="+helpers), env...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd, bufio.NewReader(out)
}

// TestSurvivesTheBroker kills a broker and lets the next one continue with its sandbox.
func TestSurvivesTheBroker(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	cmd, out := startChurn(t, dir, "SANDBOXER_TEST_STAY=1")
	for {
		line, err := out.ReadString('\n')
		if err != nil {
			t.Fatalf("the broker ended: %v", err)
		}
		if strings.HasPrefix(line, "running") {
			break
		}
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()

	e := openIn(t, dir, ours("churn"))
	defer e.Close()
	f, err := e.Discover(t.Context(), "churn")
	if err != nil {
		t.Fatal(err)
	}
	h := f.Handle
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Alive {
		t.Fatalf("IsAlive = %s, %v", l, err)
	}
	if _, err := e.WaitReady(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if again, err := e.Provision(t.Context(), sandboxer.Spec{ID: "churn", Generation: 1, Owner: ours("churn")}); err != nil || again.Ref != h.Ref {
		t.Fatalf("Provision again = %+v, %v", again, err)
	}
	count := sh(t, e, h, "cat count")
	deadline := time.Now().Add(time.Minute)
	for sh(t, e, h, "cat count") == count {
		if time.Now().After(deadline) {
			t.Fatal("what the former broker started does not run on")
		}
	}
	// The new broker also reaches the agent.
	if fi, err := e.StatFile(t.Context(), h, "/workspace/count"); err != nil || fi.Size == 0 {
		t.Fatalf("StatFile = %+v, %v", fi, err)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Gone { // a check must leave nothing either
		t.Errorf("after the teardown: %s, %v", l, err)
	}
	leftovers(t, e)
}

// TestFuse: a sandbox whose broker never comes back ends on its own.
func TestFuse(t *testing.T) {
	t.Parallel()
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{Fuse: time.Now().Add(10 * time.Second)}) // it must be up before, even on a busy machine
	other := up(t, e, sandboxer.Spec{Fuse: time.Now().Add(time.Hour)})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		l, err := e.IsAlive(t.Context(), h)
		if err != nil {
			t.Fatal(err)
		}
		if l == sandboxer.Gone {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("its fuse did not blow")
		}
	}
	if l, err := e.IsAlive(t.Context(), other); l != sandboxer.Alive {
		t.Errorf("its neighbour: %s, %v", l, err)
	}
}

// TestAgentStartsWhenNeeded: until then the first process is a few hundred bytes that reap
// orphans and keep the fuse as the agent does.
func TestAgentStartsWhenNeeded(t *testing.T) {
	t.Parallel()
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{Fuse: time.Now().Add(time.Hour)})
	first := func() string { return sh(t, e, h, `tr '\0' ' ' </proc/1/cmdline`) }
	if got := first(); !strings.HasPrefix(got, pausePath) {
		t.Errorf("the first process of an idle sandbox is %q", got)
	}
	sh(t, e, h, "(sleep 0.05 &) ; (true &)")
	zombies := `for p in /proc/[0-9]*; do grep -q '^State:.Z' $p/status && echo "$p"; done; true`
	for deadline := time.Now().Add(time.Minute); sh(t, e, h, "pgrep sleep || true") != ""; {
		if time.Now().After(deadline) {
			t.Fatal("the orphan does not end")
		}
	}
	if got := sh(t, e, h, zombies); got != "" {
		t.Errorf("orphans stay as zombies: %s", got)
	}
	if _, err := e.StatFile(t.Context(), h, "/etc/passwd"); err != nil {
		t.Fatal(err)
	}
	if got := first(); !strings.HasPrefix(got, agentPath) {
		t.Errorf("after a look at a file the first process is %q", got)
	}
	if err := e.Renew(t.Context(), h, time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if l, _ := e.IsAlive(t.Context(), h); l == sandboxer.Gone {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the agent does not keep the fuse")
		}
	}
}

// TestDynamicHelpers: such a build fails at once, with the remedy, not with every create.
func TestDynamicHelpers(t *testing.T) {
	needsGVisor(t)
	dynamic, err := exec.LookPath("ls")
	if err != nil {
		t.Skip(err)
	}
	_, err = Adapter.Open(t.Context(), sandboxer.Env{Extension: "ext.local", Owner: ours("test"), Dir: shortDir(t), Decode: func(v any) error {
		v.(*Config).Runner, v.(*Config).Agent = dynamic, dynamic
		return nil
	}})
	if !errors.Is(err, sandboxer.Unavailable) || !strings.Contains(sandboxer.HintOf(err), "CGO_ENABLED=0") {
		t.Errorf("open = %v (hint %q)", err, sandboxer.HintOf(err))
	}
}

// TestKilledAtAnyMoment kills brokers while they create and destroy; the next one
// finds and removes all remains.
func TestKilledAtAnyMoment(t *testing.T) {
	needsGVisor(t)
	rounds := 25
	if testing.Short() {
		rounds = 5
	}
	dir := shortDir(t)
	for range rounds {
		cmd, out := startChurn(t, dir)
		if _, err := out.ReadString('\n'); err != nil { // it works
			t.Fatal(err)
		}
		go io.Copy(io.Discard, out)
		time.Sleep(time.Duration(rand.IntN(200)) * time.Millisecond) // the test is about this moment
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	e := openIn(t, dir, ours("churn"))
	defer e.Close()
	var found int
	for h, err := range e.ListRunning(t.Context(), ours("churn")) {
		if err != nil {
			t.Fatal(err)
		}
		found++
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d of %d killed brokers left something", found, rounds)
	leftovers(t, e)
}

// leftovers fails if anything of a sandbox still exists.
func leftovers(t *testing.T, e *extension) {
	t.Helper()
	names, err := e.names()
	if err != nil || len(names) > 0 {
		t.Errorf("left: sandboxes %v (%v)", names, err)
	}
	if p := processes(t, e); len(p) > 0 {
		t.Errorf("left: processes %v", p)
	}
	if e.ids != nil {
		e.ids.leaving.Wait()
		claimed, err := e.ids.claims()
		if err != nil {
			t.Error(err)
		}
		for base, owner := range claimed {
			if strings.HasPrefix(owner, e.dir()+"/") {
				t.Errorf("left: the user IDs from %d on, of %s", base, owner)
			}
		}
		if entries, _ := os.ReadDir(e.ids.mounts); len(entries) > 0 {
			t.Errorf("left: mounts %v", entries)
		}
	}
	for _, d := range []string{"run", "box"} {
		entries, err := os.ReadDir(e.dir(d))
		if err != nil {
			t.Error(err)
		}
		for _, f := range entries {
			if f.Name() != "null-netns" {
				t.Errorf("left: %s/%s", d, f.Name())
			}
		}
	}
}

// TestStrayFilesOfState: files of brokers that died are gone when the next one is open, and
// those of sandboxes stay.
func TestStrayFilesOfState(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	e := openIn(t, dir, ours("test"))
	t.Cleanup(func() { e.Close() })
	h := up(t, e, sandboxer.Spec{})
	state := func() (out []string) {
		for _, d := range []string{"run", "skel", "image/refs", "box"} {
			entries, err := os.ReadDir(e.dir(d))
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range entries {
				out = append(out, d+"/"+f.Name())
			}
		}
		return out
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	before := state()
	old := time.Now().Add(-time.Hour)
	for _, f := range []string{"run/gone-g1_sandbox:gone-g1.lock", "run/runsc-gone-g1.sock", "image/refs/.new-123"} {
		if err := errors.Join(os.WriteFile(e.dir(f), nil, 0o600), os.Chtimes(e.dir(f), old, old)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(e.dir("skel/.new-123"), 0o700); err != nil {
		t.Fatal(err)
	}
	e = openIn(t, dir, ours("test"))
	if after := state(); !slices.Equal(after, before) {
		t.Errorf("before: %v; after a start: %v", before, after)
	}
	if got := sh(t, e, h, "echo on"); got != "on" {
		t.Errorf("its sandbox says %q", got)
	}
}

// A warm sandbox has run a command before it is claimed, and nothing is left of that.
func TestWarmHasRun(t *testing.T) {
	e := openTest(t)
	spec := sandboxer.Spec{Warm: true}
	h := up(t, e, spec)
	spec.ID, spec.Generation, spec.Owner, spec.Warm = h.SandboxID, h.Generation, e.env.Owner, false
	if _, err := e.Claim(t.Context(), h, spec); err != nil {
		t.Fatal(err)
	}
	const script = "set -- /proc/[0-9]*; echo $$ $#" // no other process runs
	var cold, warm struct{ pid, count int }
	if _, err := fmt.Sscan(sh(t, e, up(t, e, sandboxer.Spec{}), script), &cold.pid, &cold.count); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(sh(t, e, h, script), &warm.pid, &warm.count); err != nil {
		t.Fatal(err)
	}
	if warm.pid <= cold.pid || warm.count != cold.count {
		t.Errorf("its command is process %d among %d, that of another sandbox %d among %d", warm.pid, warm.count, cold.pid, cold.count)
	}
}

// A claim that brings nothing is done once it is recorded, and remains of an earlier claim
// that died do not count.
func TestClaimOfNothing(t *testing.T) {
	e := openTest(t)
	spec := sandboxer.Spec{Warm: true}
	h := up(t, e, spec)
	spec.ID, spec.Generation, spec.Owner, spec.Warm = h.SandboxID, h.Generation, e.env.Owner, false
	name := boxName(h.SandboxID, h.Generation)
	if err := e.writeClaim(name, map[string]string{"LEFT": "behind"}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := e.Claim(t.Context(), h, spec); err != nil {
			t.Fatal(err)
		}
	}
	other := spec
	other.Env = map[string]string{"A": "b"}
	if _, err := e.Claim(t.Context(), h, other); sandboxer.KindOf(err) != sandboxer.Conflict {
		t.Errorf("another claim of it: %v", err)
	}
	again := openIn(t, e.env.Dir, e.env.Owner)
	defer again.Close()
	for _, e := range []*extension{e, again} {
		if got := sh(t, e, h, "echo ${LEFT-nothing}"); got != "nothing" {
			t.Errorf("commands have LEFT=%q of another claim", got)
		}
	}
}

// A sandbox's kernel starts a few instructions in place of the runner: see package umount.
// They are in memory, and stay open.
func TestSmallUmounter(t *testing.T) {
	e := openTest(t)
	if !e.asRoot {
		t.Skip("without root, the kernel takes /proc away by itself")
	}
	b, err := e.of(up(t, e, sandboxer.Spec{}))
	if err != nil {
		t.Fatal(err)
	}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", b.pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); strings.HasPrefix(to, "/memfd:umount") {
			return
		}
	}
	t.Errorf("none among %d files", len(fds))
}

// TestCyclesLeaveNothing makes and destroys many sandboxes.
func TestCyclesLeaveNothing(t *testing.T) {
	cycles := 50
	switch {
	case testing.Short():
		cycles = 20
	case os.Getenv("SANDBOXER_TEST_WHOLE") != "":
		cycles = 200
	}
	e := openTest(t)
	one := func(i int) error {
		h, err := e.Provision(t.Context(), sandboxer.Spec{ID: fmt.Sprintf("c%d", i), Generation: 1, Owner: ours("test"),
			Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}})
		if err != nil {
			return err
		}
		if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
			return fmt.Errorf("%+v %w", x, err)
		}
		if i%4 == 0 {
			if _, err := e.StatFile(t.Context(), h, "/workspace"); err != nil {
				return err
			}
		}
		_, err = e.Teardown(t.Context(), h)
		return err
	}
	if err := one(0); err != nil { // for one-time resources
		t.Fatal(err)
	}
	before := look(t, e)
	var wg sync.WaitGroup
	jobs := make(chan int)
	for range 4 {
		wg.Go(func() {
			for i := range jobs {
				if err := one(i); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range cycles {
		jobs <- i + 1
	}
	close(jobs)
	wg.Wait()
	leftovers(t, e)
	deadline := time.Now().Add(time.Minute)
	for {
		after := look(t, e)
		if after.within(before) { // there may be fewer: earlier tests left some to the collector
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("after %d cycles: %+v; before: %+v", cycles, after, before)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// resources are those that a leak would increase.
type resources struct{ fds, goroutines, mounts, zombies, cgroups int }

// within reports whether r nowhere exceeds before.
func (r resources) within(before resources) bool {
	return r.fds <= before.fds && r.goroutines <= before.goroutines && r.mounts <= before.mounts &&
		r.zombies <= before.zombies && r.cgroups <= before.cgroups
}

// processes is engine.running for tests.
func processes(t *testing.T, e *extension) map[string][]int {
	t.Helper()
	all, err := e.running()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func look(t *testing.T, e *extension) resources {
	t.Helper()
	runtime.GC()
	runtime.GC() // the second one closes what the first found unreachable
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	r := resources{fds: len(fds), goroutines: runtime.NumGoroutine()}
	if e.ids != nil {
		e.ids.mu.Lock()
		r.fds -= len(e.ids.spaces) // kept on purpose, and bounded
		e.ids.mu.Unlock()
	}
	for _, d := range []string{e.env.Dir, e.mounts()} {
		m, err := mounts.Below(d)
		if err != nil {
			t.Fatal(err)
		}
		r.mounts += len(m)
	}
	pids, err := procs.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		if f, _ := procs.Stat(pid); len(f) > 1 && f[1] == strconv.Itoa(os.Getpid()) && f[0] == "Z" {
			r.zombies++
		}
	}
	for _, root := range findCgroups(ours("test")).roots {
		entries, _ := os.ReadDir(root)
		for _, d := range entries {
			if d.IsDir() {
				r.cgroups++
			}
		}
	}
	return r
}

// TestDescriptorsAreCloseOnExec: any other descriptor leaks into every sandbox started
// after it was opened.
func TestDescriptorsAreCloseOnExec(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}})
	if _, err := e.StatFile(t.Context(), h, "/"); err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range fds {
		var fd int
		if _, err := fmt.Sscan(d.Name(), &fd); err != nil || fd < 3 {
			continue
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if errors.Is(err, unix.EBADF) {
			continue // that of the listing
		}
		if err != nil || flags&unix.FD_CLOEXEC == 0 {
			to, _ := os.Readlink("/proc/self/fd/" + d.Name())
			t.Errorf("descriptor %d (%s) is passed to children (%v)", fd, to, err)
		}
	}
}

// TestRunnerIsLean checks costs of every sandbox: the packages linked into gVisor's children,
// and those that initialise something. make bench measures the time.
func TestRunnerIsLean(t *testing.T) {
	needsGVisor(t)
	out, err := exec.Command("go", "list", "-deps", "github.com/sand-boxer/sandboxer/cmd/sandboxer-runner").Output()
	if err != nil {
		t.Fatal(err)
	}
	pkgs := strings.Fields(string(out))
	for _, bad := range []string{"net/http", "database/sql", "github.com/spf13/cobra", "google.golang.org/grpc"} {
		if slices.Contains(pkgs, bad) {
			t.Errorf("sandboxer-runner links %s", bad)
		}
	}
	cmd := exec.Command(filepath.Join(helpers, "sandboxer-runner"))
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	trace, _ := cmd.CombinedOutput() // it refuses to run by hand, after its initialisation
	inits := 0
	for line := range strings.Lines(string(trace)) {
		if strings.HasPrefix(line, "init ") && strings.Contains(line, " ms clock") {
			inits++
		}
	}
	t.Logf("%d packages linked, %d initialised", len(pkgs), inits)
	if inits == 0 || inits > 330 {
		t.Errorf("%d packages are initialised; the budget is 330", inits)
	}
}

func TestSeccompProgramsAreCurrent(t *testing.T) {
	tmp := filepath.Join(t.TempDir(), "gen.go")
	gen := exec.Command("go", "run", "-trimpath", "./runner/internal/genseccomp", tmp)
	gen.Env = append(os.Environ(), "CGO_ENABLED=0") // like the runner's build: this determines the programs
	out, err := gen.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want, err := os.ReadFile(tmp)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("runner/seccomp_gen.go")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("runner/seccomp_gen.go is stale: run go generate ./adapters/local/runner")
	}
}

// TestOrdinaryUser runs the basics again without root.
func TestOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		needsGVisor(t)
		e := openTest(t)
		spec := sandboxer.Spec{Limits: sandboxer.Limits{DiskBytes: 64 << 20}, Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}}
		h := up(t, e, spec)
		if got := sh(t, e, h, "id -u; echo hi >f; cat f; ls /root; uname -n"); !strings.HasPrefix(got, "0\nhi\n") {
			t.Errorf("inside: %q", got)
		}
		if got := sh(t, e, h, "head -c 200000000 /dev/zero >big 2>/dev/null; wc -c <big"); len(got) > 8 {
			t.Errorf("%s bytes were written; the limit is 64 MiB", got)
		}
		if _, err := e.StatFile(t.Context(), h, "/workspace/f"); err != nil {
			t.Error(err)
		}
		b, err := e.of(h)
		if err == nil {
			err = e.takeLink(b, b.rec)
		}
		if err != nil {
			t.Errorf("the network of a sandbox that runs already: %v", err)
		}
		if got := sh(t, e, h, helpers+"/tool reach tcp:10.0.2.2:9"); got != "refused" {
			t.Errorf("over it the gateway answers %q", got)
		}
		_, err = e.Provision(t.Context(), sandboxer.Spec{ID: "x", Generation: 1, Owner: ours("test"), Limits: sandboxer.Limits{MemoryBytes: 1 << 30}})
		if !errors.Is(err, sandboxer.Unsupported) || !strings.Contains(sandboxer.HintOf(err), "root") {
			t.Errorf("a memory limit: %v (hint %q)", err, sandboxer.HintOf(err))
		}
		ref := registrytest.New(t).Push(t, "x:1", appImage(t, v1.Config{Env: []string{"PATH=/bin"}, User: "app"}))
		h = up(t, e, sandboxer.Spec{Image: ref, Limits: sandboxer.Limits{DiskBytes: 16 << 20}})
		if got := sh(t, e, h, "id -u; dd if=/dev/zero of=/tmp/big bs=1M count=32 2>/dev/null; stat -c %s /tmp/big"); !strings.HasPrefix(got, "70\n") || len(got) > len("70\n16777216") {
			t.Errorf("on an image: %q", got)
		}
		return
	}
	const uid = 12345
	if err := os.Chmod(helpers, 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "sbxuser")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	bin := filepath.Join(dir, "test")
	if err := errors.Join(os.WriteFile(bin, self, 0o755), os.Chown(dir, uid, uid), os.Chmod(bin, 0o755)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "-test.run=^TestOrdinaryUser$", "-test.v")
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir, "SANDBOXER_TEST_HELPERS=" + helpers}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("as an ordinary user: %v\n%s", err, out)
	}
	if bytes.Contains(out, []byte("--- SKIP")) {
		t.Skipf("as an ordinary user:\n%s", out)
	}
}

// TestChildrenMayDoLittle checks gVisor's kernel and file server once a sandbox is up: no
// thread may do more than either needs for files, or gain anything by running a program.
func TestChildrenMayDoLittle(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("an ordinary user's are those of a namespace of their own")
	}
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	c, err := e.load(boxName(h.SandboxID, 1))
	if err != nil {
		t.Fatal(err)
	}
	const forFiles = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH | 1<<unix.CAP_FOWNER |
		1<<unix.CAP_FSETID | 1<<unix.CAP_MKNOD | 1<<unix.CAP_SYS_CHROOT
	for who, pid := range map[string]int{"kernel": c.SandboxPid(), "file server": int(c.GoferPid.Load())} {
		may := uint64(forFiles)
		if who == "kernel" {
			may |= 1 << unix.CAP_SYS_PTRACE // the sandbox's processes run under it
		}
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if err != nil || len(threads) < 2 {
			t.Fatalf("threads of the %s: %v, %v", who, threads, err)
		}
		for _, thread := range threads {
			data, err := os.ReadFile(thread)
			if err != nil {
				continue // it ended
			}
			status := map[string]string{}
			for line := range strings.Lines(string(data)) {
				k, v, _ := strings.Cut(line, ":")
				status[k] = strings.TrimSpace(v)
			}
			if status["NoNewPrivs"] != "1" || status["Seccomp"] != "2" {
				t.Errorf("a thread of the %s: NoNewPrivs %s, Seccomp %s; want 1 and 2", who, status["NoNewPrivs"], status["Seccomp"])
			}
			for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
				if caps, err := strconv.ParseUint(status[set], 16, 64); err != nil || caps&^may != 0 {
					t.Errorf("a thread of the %s: %s is %s, %v", who, set, status[set], err)
				}
			}
		}
	}
}

// TestLockOfOtherBrokers: a broker does not touch what another one is changing, and
// continues with the rest.
func TestLockOfOtherBrokers(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	one, two := openIn(t, dir, ours("test")), openIn(t, dir, ours("test"))
	defer one.Close()
	defer two.Close()
	unlock, err := one.lock(t.Context(), "a-g1")
	if err != nil {
		t.Fatal(err)
	}
	other, err := two.lock(t.Context(), "b-g1")
	if err != nil {
		t.Fatal(err)
	}
	other()
	got := make(chan error, 1)
	go func() {
		unlock, err := two.lock(t.Context(), "a-g1")
		if err == nil {
			unlock()
		}
		got <- err
	}()
	select {
	case err := <-got:
		t.Errorf("the lock was had twice: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	unlock()
	select {
	case err := <-got:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("the lock was given back, and the one who waits for it has not got it")
	}
}
