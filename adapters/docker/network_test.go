package docker

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/namespaces"
)

// A world is a network namespace that stands for the internet: it has a public and a private address, each
// with a greeting on port 7.
type world struct{ public, private, own string } // own is this machine's towards it

// claimWorld finds addresses that no other process on this machine has, or can get while the test runs. They are from a range
// that the tests of other adapters, which run at the same time, avoid: those of ext.local use only one address in four of it.
func claimWorld(t *testing.T) world {
	t.Helper()
	for i := range 62 {
		k := 4 * ((os.Getpid()+i)%62 + 1) // the first four are never reached
		w := world{own: fmt.Sprintf("198.51.100.%d", k+2), public: fmt.Sprintf("198.51.100.%d", k+3), private: fmt.Sprintf("10.77.%d.2", k)}
		claim, err := net.Listen("unix", "@sandboxer-test-"+w.own) // held by one process in this network at a time
		if err != nil {
			continue
		}
		if l, err := net.Listen("tcp", w.own+":0"); err == nil { // a killed process has left it
			l.Close()
			claim.Close()
			continue
		}
		t.Cleanup(func() { claim.Close() })
		return w
	}
	t.Fatal("all addresses are taken")
	return world{}
}

// TestClaimWorld: no two tests have the same addresses, and existing ones are not touched.
func TestClaimWorld(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil || os.Geteuid() != 0 {
		t.Skip("needs root and ip (install iproute2)")
	}
	var free world
	t.Run("one", func(t *testing.T) {
		free = claimWorld(t)
		if other := claimWorld(t); other == free {
			t.Errorf("two have %+v", other)
		}
	})
	if out, err := exec.Command("ip", "addr", "add", free.own+"/32", "dev", "lo").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	defer exec.Command("ip", "addr", "del", free.own+"/32", "dev", "lo").Run()
	if other := claimWorld(t); other == free {
		t.Errorf("%+v was there", other)
	}
}

func outside(t *testing.T) world {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil || os.Geteuid() != 0 {
		t.Skip("making a network namespace needs root and ip (install iproute2)")
	}
	id := os.Getpid() % 100_000
	ns, dev, w := fmt.Sprintf("sbxdocker%d", id), fmt.Sprintf("sbxd%d", id), claimWorld(t)
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
	ip("link", "add", dev, "type", "veth", "peer", "name", "eth0", "netns", ns)
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", dev).Run() }) // its peer goes with it, but not at once
	ip("addr", "add", w.own+"/31", "dev", dev)
	ip("addr", "add", strings.TrimSuffix(w.private, "2")+"1/24", "dev", dev)
	ip("link", "set", dev, "up")
	ip("-n", ns, "addr", "add", w.public+"/31", "dev", "eth0")
	ip("-n", ns, "addr", "add", w.private+"/24", "dev", "eth0")
	ip("-n", ns, "link", "set", "eth0", "up")
	greet(t, w.own+":7", "")
	greet(t, w.public+":7", "/run/netns/"+ns)
	greet(t, w.private+":7", "/run/netns/"+ns)
	return w
}

// greet says hello to connections to an address, in a network namespace.
func greet(t *testing.T, addr, ns string) {
	t.Helper()
	var l net.Listener
	listen := func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	}
	err := error(nil)
	if ns == "" {
		err = listen()
	} else {
		err = namespaces.InNetworkAt(ns, listen)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, "hello\n")
			c.Close()
		}
	}()
}

// connect is a command that reaches an address, or fails.
func connect(to string) []string {
	a := netip.MustParseAddrPort(to)
	return []string{"sh", "-c", fmt.Sprintf("[ \"$(nc -w 20 %s %d </dev/null 2>/dev/null)\" = hello ]", a.Addr(), a.Port())}
}

// TestNetwork: the policy of a sandbox is enforced outside of it, from its start, and by the next server.
func TestNetwork(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			w := outside(t)
			o := en.options(t, "network")
			o.config["never"] = []string{"198.51.100.0/30"}
			e := o.must(t)
			closed := false
			defer func() {
				if !closed {
					e.Close()
				}
			}()
			if !e.mayFilter {
				t.Skip("this machine has no /dev/net/tun")
			}
			reaches := func(e *extension, h sandboxer.Handle, to string) bool {
				t.Helper()
				x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: connect(to)})
				if err != nil {
					t.Fatal(err)
				}
				return x.Code == 0
			}
			public := order("public", o, func(s *sandboxer.Spec) { s.Network = sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic} })
			h, err := e.Provision(t.Context(), public)
			if err != nil {
				t.Fatalf("%v (%s)", err, sandboxer.HintOf(err))
			}
			defer func() {
				last := o.must(t)
				defer last.Close()
				if _, err := last.Teardown(t.Context(), h); err != nil {
					t.Error(err)
				}
			}()
			for to, want := range map[string]bool{w.public + ":7": true, w.private + ":7": false, w.own + ":7": false, "127.0.0.1:7": false, "169.254.169.254:80": false, "198.51.100.2:7": false} {
				if got := reaches(e, h, to); got != want {
					t.Errorf("public: %s is reached: %t", to, got)
				}
			}
			if got := run(t, e, h, "grep nameserver /etc/resolv.conf"); got != "nameserver 10.0.2.2" {
				t.Errorf("the resolver is %q", got)
			}
			if got := run(t, e, h, "! ip link set eth0 down 2>/dev/null || echo down; ! ip link del eth0 2>/dev/null || echo gone; ls /sys/class/net | tr '\\n' ' '"); got != "eth0 lo" {
				t.Errorf("inside: %q", got)
			}

			// Without a server there is no network, and the next server enforces the last policy.
			if err := e.SetNetwork(t.Context(), h, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{w.private}}); err != nil {
				t.Fatal(err)
			}
			if reaches(e, h, w.public+":7") || !reaches(e, h, w.private+":7") {
				t.Error("what is allowed is not what is reached")
			}
			err = e.Close()
			closed = true
			if err != nil {
				t.Fatal(err)
			}
			without := o
			without.dir = t.TempDir() // it does not know any sandbox's network
			blind := without.must(t)
			if reaches(blind, h, w.private+":7") {
				t.Error("without the server that it had its network from a sandbox reaches something")
			}
			blind.Close()
			next := o.must(t)
			defer next.Close()
			if reaches(next, h, w.public+":7") || !reaches(next, h, w.private+":7") {
				t.Error("the next server does not enforce what was said last")
			}
			if name != "docker" {
				return
			}

			// Also one that is paused while servers change.
			if err := next.Pause(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			third := o.opened(t)
			if err := third.Resume(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			if !reaches(third, h, w.private+":7") {
				t.Error("after a pause the network is not taken up")
			}

			// A warm one gets the policy of its claim.
			warm := order("warm", o, func(s *sandboxer.Spec) { s.Warm = true })
			wh := up(t, third, warm)
			warm.Warm, warm.Network = false, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}
			if wh, err = third.Claim(t.Context(), wh, warm); err != nil {
				t.Fatal(err)
			}
			if !reaches(third, wh, w.public+":7") || reaches(third, wh, w.private+":7") {
				t.Error("claimed, a sandbox does not reach what its policy says")
			}

			// A policy that cannot be enforced is refused before the sandbox exists, and its container's network is not
			// touched.
			away := &host{name: "away"}
			wantKind(t, third.checkNetwork(away, public.Network), sandboxer.Unsupported, "another machine", "unfiltered_egress")
			allow := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"example.org"}}
			wantKind(t, third.checkNetwork(away, allow), sandboxer.Unsupported, "another machine", "ext.local")
		})
	}
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	home, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, ns := range threads { // threads in other namespaces end, a moment after their use
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			at, err := os.Readlink(ns)
			if err != nil || at == home {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("a thread is in another network: %s", at)
			}
		}
	}
}

// TestReconnectUnread: without readable notes it is not guessed whether networks must be reconnected.
func TestReconnectUnread(t *testing.T) {
	o := testEngine{image: "engine:x"}.options(t, "unread")
	o.config["engines"] = map[string]any{"one": map[string]any{"address": nothing(t)}}
	o.opened(t) // without sandboxes
	o.dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(o.dir, "notes"), nil, 0o600); err != nil { // root reads every directory
		t.Fatal(err)
	}
	_, err := o.open(t.Context(), nil)
	wantKind(t, err, sandboxer.Unavailable, "the notes of ext.docker cannot be listed")
}
