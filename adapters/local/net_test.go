//go:build linux

package local

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/namespaces"
)

// world is a network namespace that stands for the internet: a host with a public and a
// private address of either kind behind a pair of virtual interfaces. The ranges are those
// reserved for documentation; the addresses in them depend on the process, so that several
// processes can run tests at a time.
type world struct {
	run              func(f func()) // f in the namespace
	host, host6      string         // public addresses
	private, unique  string         // private ones
	own, own6, extra string         // this machine's towards it; no interface has extra
}

func outside(t testing.TB) world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making a network namespace needs root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("no ip command (install iproute2)")
	}
	id := os.Getpid() % 100_000
	ns, dev := fmt.Sprintf("sbxtest%d", id), fmt.Sprintf("sbxt%d", id)
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	k := 4 * (id % 63)
	w := world{
		own: fmt.Sprintf("203.0.113.%d", k+1), host: fmt.Sprintf("203.0.113.%d", k+2), extra: fmt.Sprintf("198.51.100.%d", k+1),
		private: fmt.Sprintf("192.168.%d.2", id%200+20),
		own6:    fmt.Sprintf("2001:db8:%x::1", id&0xffff), host6: fmt.Sprintf("2001:db8:%x::2", id&0xffff), unique: fmt.Sprintf("fd99:%x::2", id&0xffff),
	}
	ip("netns", "add", ns)
	t.Cleanup(func() {
		if out, err := exec.Command("ip", "netns", "del", ns).CombinedOutput(); err != nil {
			t.Errorf("ip netns del: %v\n%s", err, out)
		}
	})
	ip("link", "add", dev, "type", "veth", "peer", "name", "eth0", "netns", ns)
	t.Cleanup(func() {
		_ = exec.Command("ip", "route", "del", "local", w.extra, "dev", "lo").Run()
		_ = exec.Command("ip", "link", "del", dev).Run() // its peer goes with it, but not at once
	})
	six := []string{w.own6 + "/64", strings.TrimSuffix(w.unique, "2") + "1/64"}
	ip("addr", "add", w.own+"/30", "dev", dev)
	ip("addr", "add", strings.TrimSuffix(w.private, "2")+"1/24", "dev", dev)
	ip("link", "set", dev, "up")
	ip("route", "add", "local", w.extra, "dev", "lo")
	ip("-n", ns, "addr", "add", w.host+"/30", "dev", "eth0")
	ip("-n", ns, "addr", "add", w.private+"/24", "dev", "eth0")
	for i, a := range []string{w.host6 + "/64", w.unique + "/64"} {
		if exec.Command("ip", "addr", "add", six[i], "dev", dev, "nodad").Run() != nil {
			w.host6, w.own6, w.unique = "", "", "" // this machine has no IPv6
			break
		}
		ip("-n", ns, "addr", "add", a, "dev", "eth0", "nodad")
	}
	ip("-n", ns, "link", "set", "eth0", "up")
	ip("-n", ns, "link", "set", "lo", "up")
	w.run = func(f func()) {
		t.Helper()
		if err := namespaces.InNetworkAt("/run/netns/"+ns, func() error { f(); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// here is world.run for this machine itself.
func here(f func()) { f() }

// TestThreadsComeBack starts many programs at once in the network namespace that gVisor
// uses for its own: afterwards every thread of this process is back in its namespace.
func TestThreadsComeBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only gVisor started by root enters the network namespace of others")
	}
	e := openTest(t)
	up(t, e, sandboxer.Spec{}) // makes the namespace
	elsewhere := []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: e.dir("run", specutils.NullNetNSFilename)}}
	var starts sync.WaitGroup
	for range 8 {
		starts.Go(func() {
			for range 100 {
				cmd := exec.Command("true")
				if err := specutils.StartInNS(cmd, elsewhere); err != nil {
					t.Error(err)
					return
				}
				if err := cmd.Wait(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	starts.Wait()
	home, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	// A start returns when the program runs, a moment before its thread is back.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		away := 0
		threads, err := filepath.Glob("/proc/self/task/*/ns/net")
		if err != nil || len(threads) == 0 {
			t.Fatalf("threads: %v, %v", threads, err)
		}
		for _, ns := range threads {
			if at, err := os.Readlink(ns); err == nil && at != home {
				away++
			}
		}
		if away == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d threads are in another network namespace", away, len(threads))
		}
	}
}

func listenIn(t testing.TB, run func(func()), addr string) net.Listener {
	t.Helper()
	var l net.Listener
	var err error
	run(func() { l, err = net.Listen("tcp", addr) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestPublicNetwork(t *testing.T) {
	e := openTest(t)
	w := outside(t)
	host, own := w.host, w.own
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(w, "hello from outside\n")
	})
	for _, l := range []net.Listener{
		listenIn(t, w.run, host+":80"), listenIn(t, w.run, w.private+":80"),
		listenIn(t, here, own+":8080"), listenIn(t, here, "127.0.0.1:0"),
	} {
		go http.Serve(l, answer)
	}
	fetch := func(h sandboxer.Handle, url string) string {
		return sh(t, e, h, helpers+"/tool get "+url+" || true")
	}
	h := up(t, e, sandboxer.Spec{Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}})
	if got := fetch(h, "http://"+host+"/"); got != "hello from outside" {
		t.Errorf("a public address answers %q", got)
	}
	for what, url := range map[string]string{
		"this machine's public address": "http://" + own + ":8080/", "loopback": "http://127.0.0.1:8099/",
		"a private address": "http://" + w.private + "/", "the metadata service": "http://169.254.169.254/",
		"the gateway": "http://10.0.2.2:8099/",
	} {
		if got := fetch(h, url); !strings.Contains(got, "refused") && !strings.Contains(got, "reset") {
			t.Errorf("%s answers %q", what, got)
		}
	}
	none := up(t, e, sandboxer.Spec{})
	if got := fetch(none, "http://"+host+"/"); !strings.Contains(got, "unreachable") {
		t.Errorf("without a network a public address answers %q", got)
	}

	t.Run("after a restart", func(t *testing.T) {
		again := openIn(t, e.env.Dir, ours("test"))
		defer again.Close()
		if got := sh(t, again, h, helpers+"/tool get http://"+host+"/ || true"); got != "hello from outside" {
			t.Errorf("reconnected by another broker: %q", got)
		}
	})

	t.Run("clone", func(t *testing.T) {
		if _, err := exec.LookPath("git"); err != nil {
			t.Skip("no git")
		}
		src := t.TempDir()
		git := func(args ...string) {
			t.Helper()
			cmd := exec.Command("git", append([]string{"-C", src, "-c", "user.name=t", "-c", "user.email=t@example.org"}, args...)...)
			cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("git %v: %v\n%s", args, err, out)
			}
		}
		git("init", "-q", "-b", "main")
		for _, v := range []string{"one", "two"} {
			if err := os.WriteFile(filepath.Join(src, "file"), []byte(v), 0o644); err != nil {
				t.Fatal(err)
			}
			git("add", "file")
			git("commit", "-q", "-m", v)
			git("tag", v)
		}
		git("update-server-info")
		go http.Serve(listenIn(t, w.run, host+":8000"), http.FileServer(http.Dir(filepath.Join(src, ".git"))))
		spec := sandboxer.Spec{Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}, Inputs: map[string]string{"repo": "http://" + host + ":8000/"}}
		if got := sh(t, e, up(t, e, spec), "cat file"); got != "two" {
			t.Errorf("the clone has %q", got)
		}
		spec.Inputs["ref"] = "one"
		if got := sh(t, e, up(t, e, spec), "cat file"); got != "one" {
			t.Errorf("the clone at ref one has %q", got)
		}
		spec.User = "nobody"
		if got := sh(t, e, up(t, e, spec), "stat -c %U . file .git .git/HEAD | sort -u; id -un; cat file; echo more >>file && git commit -q --help >/dev/null 2>&1; git -c user.name=t -c user.email=t@example.org commit -qam mine && git status --porcelain"); got != "nobody\nnobody\none" {
			t.Errorf("a clone for nobody: %q", got)
		}
		spec.User = ""
		spec.Inputs = map[string]string{"repo": "http://" + host + ":8000/nothing-here"}
		spec.ID, spec.Generation, spec.Owner = "failing", 1, ours("test")
		_, err := e.Provision(t.Context(), spec)
		if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), "cloning the repository failed") {
			t.Errorf("a missing repository: %v", err)
		}
	})
}

// TestRestartsKeepTheNetwork: a sandbox that outlives forty brokers has the interfaces and
// descriptors that it had under the first, and a network through each broker. (A second
// interface each time would take resources that its kernel never releases.)
func TestRestartsKeepTheNetwork(t *testing.T) {
	needsGVisor(t)
	w := outside(t)
	host := w.host + ":8080"
	go http.Serve(listenIn(t, w.run, host), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "hello") }))
	dir := shortDir(t)
	e := openIn(t, dir, ours("test"))
	t.Cleanup(func() { e.Close() })
	sandboxes := map[string]sandboxer.Handle{}
	for what, policy := range map[string]sandboxer.NetworkPolicy{"from the beginning": allow(w.host), "later": {}} {
		spec := sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: e.env.Owner, Network: policy}
		t.Cleanup(func() {
			if _, err := e.Teardown(context.Background(), sandboxer.Handle{SandboxID: spec.ID, Generation: 1}); err != nil {
				t.Error(err)
			}
		})
		h, err := e.Provision(t.Context(), spec)
		if err == nil {
			_, err = e.WaitReady(t.Context(), h)
		}
		if err == nil && !networked(policy) {
			err = e.SetNetwork(t.Context(), h, allow(w.host))
		}
		if err != nil {
			t.Fatal(err)
		}
		sandboxes[what] = h
	}
	fetch := func(h sandboxer.Handle) string { return sh(t, e, h, helpers+"/tool get http://"+host+"/ || true") }
	type has struct {
		interfaces  string
		descriptors int
	}
	look := func(h sandboxer.Handle) has {
		t.Helper()
		got := strings.Fields(sh(t, e, h, helpers+"/tool get http://"+host+"/ || true; echo; tail -n +3 /proc/net/dev | cut -d: -f1"))
		if got[0] != "hello" {
			t.Fatalf("the world answers %q", got)
		}
		b, err := e.of(h)
		if err != nil {
			t.Fatal(err)
		}
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.pid))
		if err != nil {
			t.Fatal(err)
		}
		return has{strings.Join(got[1:], " "), len(fds)}
	}
	first, most := map[string]has{}, map[string]int{}
	for what, h := range sandboxes {
		first[what] = look(h)
	}
	const restarts = 40
	for i := 1; i <= restarts; i++ {
		without := i == restarts/2 // without a network when the broker ends, and with one again later
		set := func(p sandboxer.NetworkPolicy) {
			t.Helper()
			for what, h := range sandboxes {
				if err := e.SetNetwork(t.Context(), h, p); err != nil {
					t.Fatalf("network %s: %v", what, err)
				}
			}
		}
		if without {
			set(sandboxer.NetworkPolicy{})
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		e = openIn(t, dir, ours("test"))
		if without {
			for what, h := range sandboxes {
				if got := fetch(h); !strings.Contains(got, "refused") {
					t.Errorf("network %s: to a sandbox without a policy the world answers %q", what, got)
				}
			}
			set(allow(w.host))
		}
		for what, h := range sandboxes {
			got := look(h)
			most[what] = max(most[what], got.descriptors)
			// Some vary with the processes inside; an interface takes forty, for good.
			if got.interfaces != first[what].interfaces || got.descriptors >= first[what].descriptors+100 {
				t.Fatalf("network %s, after %d restarts: %+v; at first %+v", what, i, got, first[what])
			}
		}
	}
	t.Logf("at first: %+v; descriptors at most, after restarts: %v", first, most)
}
