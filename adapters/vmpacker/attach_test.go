package vmpacker_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/vmpacker"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// The inputs of the seeds describe the machine in every possible way.
func TestWaysToAMachine(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	base := filepath.Join(s.Dir, "build")
	repo := t.TempDir()
	if err := os.WriteFile(filepath.Join(repo, "Setup.hs"), []byte("main"), 0o644); err != nil {
		t.Fatal(err)
	}
	o := attachTo(t, s, nil)
	e := o.opened(t)
	rec := sshrun.Record{Name: "added", Addr: s.User + "@127.0.0.1", Port: s.Port, IdentityFile: s.Identity, HostKeys: []string{s.HostKey}, State: sshrun.Active}
	if err := sshrun.NewRegistry(o.Hosts).Put(rec); err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(s.Port)
	for name, in := range map[string]map[string]string{
		"alias":       {"vm": "vm"},
		"host add":    {"vm": "added"},
		"target":      {"vm": "vm", "ssh_target": s.User + "@127.0.0.1"},
		"tunnel port": {"vm": "vm", "tunnel_port": port},
		"directory":   {"vm": "vm", "workspace_dir": base + "/other"},
	} {
		t.Run(name, func(t *testing.T) {
			in["repo"] = repo
			h := provision(t, e, order("way-"+sandboxer.NewID(), in))
			r, err := e.WaitReady(t.Context(), h)
			want := base
			if in["workspace_dir"] != "" {
				want = in["workspace_dir"]
			}
			if err != nil || r.RemoteDir != want+"/sbx-"+h.SandboxID || !strings.HasSuffix(r.SSH, "@127.0.0.1:"+port) || r.Host != in["vm"] {
				t.Errorf("reachable as %+v, %v", r, err)
			}
			if got := run(t, e, h, "pwd -P; cat Setup.hs"); got != r.RemoteDir+"\nmain" {
				t.Errorf("in the workspace: %q", got)
			}
		})
	}
}

// Without an ssh program the extension is not opened, and the error says what to install.
func TestNoSSH(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	e, err := options{Owner: "conformance", Dir: t.TempDir(), Hosts: t.TempDir()}.open(t.Context())
	if e != nil || sandboxer.KindOf(err) != sandboxer.NotFound || !strings.Contains(sandboxer.HintOf(err), "openssh-client") {
		t.Errorf("%v, %v, hint %q", e, err, sandboxer.HintOf(err))
	}
}

// A machine that only a configuration of ssh knows, which need not be the account's.
func TestConfigurationOfSSH(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	dir := t.TempDir()
	for name, text := range map[string]string{
		"known": fmt.Sprintf("[127.0.0.1]:%d %s\n", s.Port, s.HostKey),
		"config": fmt.Sprintf("Host far-away 127.0.0.1\n\tHostName 127.0.0.1\n\tPort %d\n\tUser %s\n\tIdentityFile %s\n\tIdentitiesOnly yes\n\tUserKnownHostsFile %s/known\n\tGlobalKnownHostsFile none\n",
			s.Port, s.User, s.Identity, dir),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	base := filepath.Join(s.Dir, "base")
	o := options{Owner: "conformance", Dir: t.TempDir(), Hosts: t.TempDir(), Config: map[string]any{
		"vms": map[string]any{"far-away": map[string]any{"workspace_dir": base}}, "ssh_config": filepath.Join(dir, "config"),
	}}
	e := o.opened(t)
	h := provision(t, e, order("far", map[string]string{"vm": "far-away"}))
	if got := run(t, e, h, "pwd -P"); got != base+"/sbx-far" {
		t.Errorf("in %q", got)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	// A port of this machine that reaches it is enough.
	h = provision(t, e, order("near", map[string]string{"tunnel_port": strconv.Itoa(s.Port), "workspace_dir": base}))
	if got := run(t, e, h, "pwd -P"); got != base+"/sbx-near" {
		t.Errorf("by the tunnel alone: in %q", got)
	}
}

// TestNeverReached: a create that reaches no machine, because of a typo, a wrong port or key,
// says so, and leaves nothing here. What a machine has is unknown if it cannot be asked, except
// what an earlier version noted as untouched.
func TestNeverReached(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	o := attachTo(t, s, nil)
	for name, in := range map[string]map[string]string{
		"typo": {"ssh_target": "nobody@nowhere.invalid"},
		"port": {"vm": "vm", "ssh_port": "1"},
		"user": {"ssh_target": "nobody@127.0.0.1", "ssh_port": strconv.Itoa(s.Port)},
	} {
		t.Run(name, func(t *testing.T) {
			e := o.opened(t)
			spec := order("never-"+name, in)
			var err error
			if spec.Place, err = e.Place(t.Context(), spec, nil); err != nil {
				t.Fatal(err)
			}
			if _, err := e.Provision(t.Context(), spec); err == nil || !sandboxer.IsUntouched(err) {
				t.Fatalf("Provision: %v, untouched %t", err, sandboxer.IsUntouched(err))
			}
			if left, _ := filepath.Glob(o.Dir + "/notes/*.note"); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
			e, h := o.opened(t), sandboxer.Handle{SandboxID: spec.ID, Generation: 1, Host: spec.Place} // another process
			if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Unknown || err == nil {
				t.Errorf("IsAlive = %s, %v; want unknown", l, err)
			}
			if _, err := e.Teardown(t.Context(), h); err == nil {
				t.Error("Teardown succeeded although nobody could be asked")
			}
			for h, err := range e.ListRunning(t.Context(), o.Owner) {
				t.Errorf("listed are %+v, %v", h, err)
			}

			note := fmt.Sprintf(`{"v":1,"id":%q,"generation":1,"owner":%q,"kind":"attached","host":"vm","target":{"Name":"x","Addr":"nobody@nowhere.invalid"},"base":"/build","untouched":true}`, spec.ID, o.Owner)
			formerNote(t, o, spec.ID+".g1", []byte(note))
			e = o.opened(t)
			if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Gone || err != nil {
				t.Errorf("IsAlive of what an earlier version noted as untouched = %s, %v", l, err)
			}
			if r, err := e.Teardown(t.Context(), h); err != nil || len(r.Removed) > 0 {
				t.Errorf("Teardown of what an earlier version noted as untouched = %+v, %v", r, err)
			}
			if left, _ := filepath.Glob(o.Dir + "/notes/*.note"); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// formerNote notes where a sandbox is, like earlier versions.
func formerNote(t *testing.T, o options, key string, data []byte) {
	t.Helper()
	dir := filepath.Join(o.Dir, "box")
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, key+".json"), data, 0o600)); err != nil {
		t.Fatal(err)
	}
}

// Notes of earlier versions about the place of a sandbox are used as long as they exist.
func TestFormerNotes(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	o := attachTo(t, s, nil)
	made := o
	made.Config = attachTo(t, s, map[string]any{"workspace_dir": s.Dir + "/formerly"}).Config
	e := made.opened(t)
	h := provision(t, e, order("former", map[string]string{"vm": "vm"}))
	formerNote(t, o, "former.g1", h.Data)
	e = o.opened(t)
	bones := sandboxer.Handle{SandboxID: "former", Generation: 1}
	if l, err := e.IsAlive(t.Context(), bones); l != sandboxer.Alive || err != nil {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if got := run(t, e, bones, "pwd"); got != s.Dir+"/formerly/sbx-former" {
		t.Errorf("it is in %q", got)
	}
	listed := 0
	for h, err := range e.ListRunning(t.Context(), o.Owner) {
		if err != nil || h.SandboxID != "former" {
			t.Errorf("listed: %+v, %v", h, err)
		}
		listed++
	}
	if listed != 1 {
		t.Errorf("%d are listed", listed)
	}
	if r, err := e.Teardown(t.Context(), bones); err != nil || len(r.Removed) != 1 {
		t.Errorf("Teardown = %+v, %v", r, err)
	}
	if left, _ := filepath.Glob(o.Dir + "/notes/*.note"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestPlace runs the suite's group on two machines. The extension's directory is another one,
// and empty, when the suite asks for that.
func TestPlace(t *testing.T) {
	t.Parallel()
	vms := map[string]any{}
	relays := map[string]*sshtest.Relay{}
	for _, name := range []string{"left", "right"} {
		s := sshtest.Start(t, sshtest.Options{Silent: true})
		relays[name] = sshtest.NewRelay(t, s.Port, 0)
		vms[name] = map[string]any{"ssh_target": s.User + "@127.0.0.1", "ssh_port": relays[name].Port, "identity_file": s.Identity, "host_keys": []string{s.HostKey},
			"workspace_dir": s.Dir + "/build", "capacity": 100}
	}
	o := options{Owner: "conformance", Dir: t.TempDir(), Hosts: t.TempDir(), Config: map[string]any{"vms": vms}}
	extensiontest.RunGroups(t, extensiontest.Harness{
		Inputs: vmpacker.Adapter.Inputs,
		Open:   o.must,
		Bare: func(t *testing.T) sandboxer.Extension {
			bare := o
			bare.Dir = t.TempDir()
			return bare.must(t)
		},
		Spec:  sandboxer.Spec{Owner: "conformance", Host: "left"},
		Hosts: []string{"left", "right"},
		Away:  func(t *testing.T, host string) func() { return relays[host].Away(t) },
	}, "place")
}

// TestDirectoryDeleted: the extension's own data is not needed to end a sandbox, on any kind of
// machine, as long as its machine can still be identified.
func TestDirectoryDeleted(t *testing.T) {
	t.Parallel()
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	o := attachTo(t, s, nil)
	base := filepath.Join(s.Dir, "build")
	rec := sshrun.Record{Name: "added", Addr: s.User + "@127.0.0.1", Port: s.Port, IdentityFile: s.Identity, HostKeys: []string{s.HostKey}, State: sshrun.Active}
	if err := sshrun.NewRegistry(o.Hosts).Put(rec); err != nil {
		t.Fatal(err)
	}
	o.Config["workspace_dir"] = base + "/default"
	for name, c := range map[string]struct {
		in    map[string]string
		known bool // by configuration, or because it was added
	}{
		"alias":     {map[string]string{"vm": "vm"}, true},
		"host add":  {map[string]string{"vm": "added"}, true},
		"tunnel":    {map[string]string{"vm": "vm", "tunnel_port": strconv.Itoa(s.Port)}, true}, // the same machine and directory
		"directory": {map[string]string{"vm": "vm", "workspace_dir": base + "/other"}, false},
	} {
		for _, by := range []string{"ID", "record", "place", "handle"} {
			t.Run(name+" by "+by, func(t *testing.T) {
				o := o
				o.Dir = t.TempDir()
				e := o.opened(t)
				spec := order("gone-"+sandboxer.NewID(), c.in)
				place, err := e.Place(t.Context(), spec, nil)
				if err != nil {
					t.Fatal(err)
				}
				spec.Place = place
				h, err := e.Provision(t.Context(), spec)
				if err != nil || h.Host != place {
					t.Fatalf("Provision = %+v, %v; want it at %s", h, err, place)
				}
				r, err := e.WaitReady(t.Context(), h)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.RemoveAll(o.Dir); err != nil {
					t.Fatal(err)
				}
				bones := sandboxer.Handle{SandboxID: spec.ID, Generation: 1}
				with := bones
				switch by {
				case "record": // another sandbox's names the machine
					other := h
					o.recorded = []sandboxer.Handle{other}
				case "place":
					with.Host = place
				case "handle":
					with = h
				}
				report, err := o.opened(t).Teardown(t.Context(), with)
				_, serr := os.Stat(r.RemoteDir)
				switch gone := os.IsNotExist(serr); {
				case err != nil:
					t.Errorf("Teardown: %v", err)
				case by == "ID" && !c.known:
					if gone || len(report.Warnings) != 1 {
						t.Errorf("gone %t; it says %+v; want it to say what it cannot know", gone, report)
					}
					if _, err := o.opened(t).Teardown(t.Context(), h); err != nil {
						t.Error(err)
					}
				case !gone || len(report.Removed) != 1:
					t.Errorf("it is there: %t, %+v", !gone, report)
				}
			})
		}
	}
}

// The names of places lead to the same machines as the inputs that they were made from.
func TestNamesOfPlaces(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	o := attachTo(t, s, nil)
	e := o.opened(t)
	for _, c := range []struct {
		in   map[string]string
		host string
		want string
	}{
		{in: map[string]string{"vm": "vm"}, want: "vm"},
		{host: "vm", want: "vm"},
		{in: map[string]string{"vm": "elsewhere"}, want: "elsewhere"},
		{in: map[string]string{"ssh_target": "ci@10.0.0.1"}, want: "ci@10.0.0.1"},
		{in: map[string]string{"ssh_target": "ci@10.0.0.1", "ssh_port": "2222", "workspace_dir": "/srv/b"}, want: "ci@10.0.0.1?ssh_port=2222&workspace_dir=/srv/b"},
		{in: map[string]string{"ssh_target": "build"}, want: "build?ssh_target=build&workspace_dir=" + s.Dir + "/build"},
		{in: map[string]string{"vm": "vm", "tunnel_port": "2200"}, want: "vm?tunnel_port=2200"},
		{in: map[string]string{"vm": "vm", "ssh_target": "ci@10.0.0.1"}, want: "vm?ssh_target=ci%4010.0.0.1"},
		{in: map[string]string{"vm": "vm"}, host: "localhost", want: "vm"}, // the machine is reached from there
		{in: map[string]string{"tunnel_port": "2200"}, want: "127.0.0.1?ssh_target=127.0.0.1&tunnel_port=2200&workspace_dir=" + s.Dir + "/build"},
		{in: map[string]string{"tunnel_port": "2200"}, host: "localhost", want: "127.0.0.1?ssh_target=127.0.0.1&tunnel_port=2200&workspace_dir=" + s.Dir + "/build"},
	} {
		spec := order("named", c.in)
		spec.Host = c.host
		if got, err := e.Place(t.Context(), spec, nil); err != nil || got != c.want {
			t.Errorf("%v: %q, %v; want %q", c.in, got, err, c.want)
		}
		if _, err := e.Place(t.Context(), spec, []string{c.want}); sandboxer.KindOf(err) != sandboxer.Unavailable {
			t.Errorf("%v where it failed: %v", c.in, err)
		}
	}
}

// Mistakes in a spec are refused before a machine is asked.
func TestRefused(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	o := attachTo(t, s, nil)
	o.Config["targets"] = []string{"ci@*.example.org"}
	o.Config["capacity"] = 3
	e := o.opened(t)
	spec := func(change func(*sandboxer.Spec)) sandboxer.Spec {
		s := order("refused", map[string]string{"vm": "vm"})
		change(&s)
		return s
	}
	in := func(kv ...string) sandboxer.Spec {
		return spec(func(s *sandboxer.Spec) {
			for i := 0; i < len(kv); i += 2 {
				s.Inputs[kv[i]] = kv[i+1]
			}
		})
	}
	for _, c := range []struct {
		what string
		s    sandboxer.Spec
		kind sandboxer.Kind
		say  string
	}{
		{"no machine", in("vm", ""), sandboxer.Invalid, "--input vm="},
		{"an option for a target", in("vm", "", "ssh_target", "-oProxyCommand=x@ci.example.org"), sandboxer.Invalid, ""},
		{"no port", in("ssh_port", "99999"), sandboxer.Invalid, "99999"},
		{"two ports", in("ssh_port", "22", "tunnel_port", "23"), sandboxer.Invalid, "exclude"},
		{"a path with a space", in("workspace_dir", "/build it"), sandboxer.Invalid, "workspace_dir"},
		{"a path that climbs", in("workspace_dir", "/build/../etc"), sandboxer.Invalid, "workspace_dir"},
		{"a repo that is not there", in("repo", "/no/such"), sandboxer.Invalid, "repo"},
		{"a network policy", spec(func(s *sandboxer.Spec) { s.Network.Mode = sandboxer.NetworkNone }), sandboxer.Unsupported, "network"},
		{"a main command", spec(func(s *sandboxer.Spec) { s.Command = []string{"true"} }), sandboxer.Unsupported, "exec"},
		{"an odd variable", spec(func(s *sandboxer.Spec) { s.Env = map[string]string{"A.B": "1"} }), sandboxer.Invalid, "A.B"},
		{"our own variable", spec(func(s *sandboxer.Spec) { s.Env = map[string]string{"SANDBOXER_SANDBOX": "1"} }), sandboxer.Invalid, "own"},
		{"a machine of one's own that is shared", spec(func(s *sandboxer.Spec) { s.Profile.Isolation = sandboxer.IsolationVM }), sandboxer.Unsupported, "capacity"},
	} {
		t.Run(c.what, func(t *testing.T) {
			kind(t, e.Check(t.Context(), c.s), c.kind, c.say)
			_, err := e.Provision(t.Context(), c.s)
			kind(t, err, c.kind, c.say)
		})
	}
	if left, _ := filepath.Glob(o.Dir + "/notes/*.note"); len(left) > 0 || strings.Contains(s.Log(), "Accepted") {
		t.Errorf("something was made: %q", left)
	}
}

func TestMachineIsChecked(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	t.Run("capacity", func(t *testing.T) {
		e := attachTo(t, s, map[string]any{"capacity": 1, "workspace_dir": s.Dir + "/one"}).opened(t)
		h := provision(t, e, order("first", map[string]string{"vm": "vm"}))
		if o, err := e.Capacity(t.Context(), "vm"); err != nil || o.Free != 0 {
			t.Errorf("Capacity of a full machine: %+v, %v", o, err)
		}
		second := order("second", map[string]string{"vm": "vm"})
		_, err := e.Provision(t.Context(), second)
		kind(t, err, sandboxer.Exhausted, "capacity")
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		provision(t, e, second)
	})
	t.Run("tools", func(t *testing.T) {
		e := attachTo(t, s, map[string]any{"tools": []string{"sh", "ghc-that-is-not-there"}}).opened(t)
		_, err := e.Provision(t.Context(), order("tools", map[string]string{"vm": "vm"}))
		kind(t, err, sandboxer.Unavailable, "ghc-that-is-not-there")
	})
	t.Run("room", func(t *testing.T) {
		o := attachTo(t, s, nil)
		o.Config["min_free"] = int64(1) << 60
		_, err := o.opened(t).Provision(t.Context(), order("room", map[string]string{"vm": "vm"}))
		kind(t, err, sandboxer.Exhausted, "kB")
	})
	t.Run("a directory that cannot be made", func(t *testing.T) {
		e := attachTo(t, s, map[string]any{"workspace_dir": "/proc/build"}).opened(t)
		_, err := e.Provision(t.Context(), order("base", map[string]string{"vm": "vm"}))
		kind(t, err, sandboxer.Unavailable, "mkdir -p /proc/build")
	})
	t.Run("somebody else's directory", func(t *testing.T) {
		o := attachTo(t, s, nil)
		e := o.opened(t)
		theirs := filepath.Join(s.Dir, "build", "sbx-theirs")
		if err := os.MkdirAll(theirs, 0o755); err != nil {
			t.Fatal(err)
		}
		_, err := e.Provision(t.Context(), order("theirs", map[string]string{"vm": "vm"}))
		kind(t, err, sandboxer.Conflict, "somebody else")
		if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "theirs"}); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(theirs); err != nil {
			t.Errorf("it was touched: %v", err)
		}
		os.Remove(theirs)
	})
}

// Teardown ends all processes of the sandbox, wherever they went, and no others.
func TestTeardownEndsProcesses(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	o := attachTo(t, s, nil)
	e := o.opened(t)
	other := provision(t, e, order("other", map[string]string{"vm": "vm"}))
	h := provision(t, e, order("mine", map[string]string{"vm": "vm"}))
	sleeps := func(n string) string {
		out, _ := exec.Command("pgrep", "-xf", "sleep "+n).Output()
		return strings.TrimSpace(string(out))
	}
	// One has left the session; one the tree and the directory; one has dropped its
	// environment but is in the workspace.
	mine, others := strconv.Itoa(1_000_000+rand.IntN(1e9)), strconv.Itoa(1_000_000+rand.IntN(1e9))
	run(t, e, h, `exec </dev/null >/dev/null 2>&1; setsid sleep `+mine+` & (cd / && (sleep `+mine+` &)); env -i sleep `+mine+` &`)
	run(t, e, other, `exec </dev/null >/dev/null 2>&1; setsid sleep `+others+` &`)
	for end := time.Now().Add(busy); len(strings.Fields(sleeps(mine))) != 3 || len(strings.Fields(sleeps(others))) != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("before the teardown run %q and %q", sleeps(mine), sleeps(others))
		}
	}
	if os.Getuid() == 0 {
		run(t, e, h, `mkdir m && mount -t tmpfs none m && echo kept >m/f`)
	}
	r, err := e.Teardown(t.Context(), h)
	if err != nil || len(r.Removed) != 1 || len(r.Kept) != 1 {
		t.Errorf("Teardown: %+v, %v", r, err)
	}
	if left := sleeps(mine); left != "" {
		t.Errorf("left over: %s", left)
	}
	if sleeps(others) == "" {
		t.Error("the other sandbox's process was ended too")
	}
	if got := run(t, e, other, "echo on"); got != "on" {
		t.Errorf("the other sandbox says %q", got)
	}
}

// A machine that cannot be reached does not mean that its sandboxes are gone, and all of
// them are found again when it is back.
func TestMachineAway(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	relay := sshtest.NewRelay(t, s.Port, 0)
	o := attachTo(t, s, map[string]any{"ssh_port": relay.Port})
	e := o.opened(t)
	h := provision(t, e, order("away", map[string]string{"vm": "vm"}))
	relay.Freeze()
	relay.Cut()
	e2 := o.opened(t)
	c, cancel := contextFor(t, 2*time.Second)
	defer cancel()
	if l, err := e2.IsAlive(c, h); l != sandboxer.Unknown || err == nil {
		t.Errorf("IsAlive = %s, %v; want unknown", l, err)
	}
	if _, err := e2.Teardown(c, h); err == nil {
		t.Error("Teardown succeeded although nothing could be asked")
	}
	if _, err := e2.Teardown(c, sandboxer.Handle{SandboxID: "never-was"}); err != nil && c.Err() == nil {
		t.Errorf("Teardown of what never was: %v", err)
	}
	relay.Thaw()
	if l, err := e2.IsAlive(t.Context(), h); l != sandboxer.Alive || err != nil {
		t.Errorf("IsAlive = %s, %v once it is back", l, err)
	}
}

// A broker that is killed at any moment leaves nothing that the next one does not find.
func TestKilledAtAnyMoment(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	o := attachTo(t, s, nil)
	o.Owner = "killed"
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	in, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	made := func() bool { dirs, _ := filepath.Glob(filepath.Join(s.Dir, "build", "sbx-*")); return len(dirs) > 0 }
	for i := 0; i < 6 || !made() && i < 30; i++ {
		cmd := exec.Command(self, "broker")
		cmd.Stdin, cmd.Stderr = strings.NewReader(string(in)), os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(300+rand.IntN(1500)+400*max(0, i-5)) * time.Millisecond) // longer if nothing was made yet
		cmd.Process.Kill()
		cmd.Wait()
	}
	n := endAll(t, o)
	t.Logf("%d sandboxes were left", n)
	base := filepath.Join(s.Dir, "build")
	left, _ := filepath.Glob(base + "/sbx-*")
	locks, _ := filepath.Glob(base + "/.sandboxer/*")
	if left = append(left, locks...); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
	if n := marked("sbx-killed-"); n != "" {
		t.Errorf("processes left over: %s", n)
	}
	if n == 0 {
		t.Error("the brokers were killed before they did anything")
	}
}

// Only the machine's account can read the environment of a sandbox, and no list of processes
// shows it.
func TestSecretsOnTheMachine(t *testing.T) {
	s := sshtest.Start(t, sshtest.Options{Silent: true})
	e := attachTo(t, s, nil).opened(t)
	spec := order("secrets", map[string]string{"vm": "vm"})
	spec.Env = map[string]string{"TOKEN": "canary-" + sandboxer.NewID()}
	h := provision(t, e, spec)
	fi, err := os.Stat(filepath.Join(s.Dir, "build", ".sandboxer", "sbx-secrets", "env"))
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("env is %v, %v", fi, err)
	}
	var cmd = sandboxer.Cmd{Args: []string{"sh", "-c", `cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | grep -c "[c]anary-"; :`}, Env: map[string]string{"TOKEN2": spec.Env["TOKEN"]}}
	var out strings.Builder
	cmd.Stdout = &out
	if _, err := e.Exec(t.Context(), h, cmd); err != nil || strings.TrimSpace(out.String()) != "0" {
		t.Errorf("command lines with the secret: %q, %v", out.String(), err)
	}
}

// endAll ends the sandboxes that another broker finds, and returns their number.
func endAll(t *testing.T, o options) (n int) {
	t.Helper()
	e := o.opened(t)
	for h, err := range e.ListRunning(t.Context(), o.Owner) {
		if err != nil {
			t.Fatal(err)
		}
		n++
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Errorf("Teardown(%s): %v", h.SandboxID, err)
		}
	}
	return n
}
