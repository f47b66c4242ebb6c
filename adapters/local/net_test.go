//go:build linux

package local

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// outside makes a network namespace that stands for the internet: a host with a
// public address (of a range reserved for documentation) behind a pair of virtual
// interfaces. It returns a function that runs f in it, and this machine's address
// towards it.
func outside(t *testing.T) (run func(f func()), host, own string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making a network namespace needs root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("no ip command (install iproute2)")
	}
	ns := fmt.Sprintf("sbxtest%d", os.Getpid())
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	ip("netns", "add", ns)
	t.Cleanup(func() {
		if out, err := exec.Command("ip", "netns", "del", ns).CombinedOutput(); err != nil {
			t.Errorf("ip netns del: %v\n%s", err, out)
		}
	})
	dev := fmt.Sprintf("sbxt%d", os.Getpid()%100000)
	ip("link", "add", dev, "type", "veth", "peer", "name", "eth0", "netns", ns)
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", dev).Run() }) // goes with its peer, but not at once
	ip("addr", "add", "203.0.113.1/24", "dev", dev)
	ip("link", "set", dev, "up")
	ip("-n", ns, "addr", "add", "203.0.113.2/24", "dev", "eth0")
	ip("-n", ns, "addr", "add", "192.168.77.2/24", "dev", "eth0")
	ip("-n", ns, "link", "set", "eth0", "up")
	ip("-n", ns, "link", "set", "lo", "up")
	ip("addr", "add", "192.168.77.1/24", "dev", dev)
	return func(f func()) {
		t.Helper()
		if err := inNamespace("/run/netns/"+ns, f); err != nil {
			t.Fatal(err)
		}
	}, "203.0.113.2", "203.0.113.1"
}

// inNamespace runs f on a thread of its own that is in the network namespace.
func inNamespace(path string, f func()) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread does not end with its goroutine, and stands for the whole
			// process in /proc/self: it is held while another one does this.
			done <- inNamespace(path, f)
			runtime.UnlockOSThread()
			return
		}
		h, err := os.Open(path) // the thread is not unlocked: it ends with the goroutine
		if err == nil {
			err = unix.Setns(int(h.Fd()), unix.CLONE_NEWNET)
			h.Close()
		}
		if err == nil {
			f()
		}
		done <- err
	}()
	return <-done
}

func listenIn(t *testing.T, run func(func()), addr string) net.Listener {
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
	run, host, own := outside(t)
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(w, "hello from outside\n")
	})
	for _, l := range []net.Listener{
		listenIn(t, run, host+":80"), listenIn(t, run, "192.168.77.2:80"),
		listenIn(t, func(f func()) { f() }, own+":8080"), listenIn(t, func(f func()) { f() }, "127.0.0.1:8099"),
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
		"this machine's public address": "http://" + own + ":8080/", "this machine's loopback": "http://127.0.0.1:8099/",
		"a private address": "http://192.168.77.2/", "the metadata service": "http://169.254.169.254/",
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
		again := openIn(t, e.env.Dir, "test")
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
		go http.Serve(listenIn(t, run, host+":8000"), http.FileServer(http.Dir(filepath.Join(src, ".git"))))
		spec := sandboxer.Spec{Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}, Inputs: map[string]string{"repo": "http://" + host + ":8000/"}}
		if got := sh(t, e, up(t, e, spec), "cat file"); got != "two" {
			t.Errorf("the clone has %q", got)
		}
		spec.Inputs["ref"] = "one"
		if got := sh(t, e, up(t, e, spec), "cat file"); got != "one" {
			t.Errorf("the clone at ref one has %q", got)
		}
		spec.Inputs = map[string]string{"repo": "http://" + host + ":8000/nothing-here"}
		spec.ID, spec.Generation, spec.Owner = "failing", 1, "test"
		_, err := e.Provision(t.Context(), spec)
		if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), "cloning the repository failed") {
			t.Errorf("a missing repository: %v", err)
		}
	})
}
