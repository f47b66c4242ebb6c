package composessh

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// afar puts a relay between the installation and its only host.
func (r *rig) afar(t *testing.T) *sshtest.Relay { return r.behind(t, "host-1") }

// behind puts one between the installation and a host.
func (r *rig) behind(t *testing.T, host string) *sshtest.Relay {
	t.Helper()
	reg := sshrun.NewRegistry(r.hosts)
	rec, err := reg.Host(host)
	if err != nil {
		t.Fatal(err)
	}
	relay := sshtest.NewRelay(t, rec.Port, 0)
	rec.Port = relay.Port
	if err := reg.Put(rec); err != nil {
		t.Fatal(err)
	}
	return relay
}

// full is a project in whose life every point comes.
const full = `services:
  main:
    build: .
    command: [sleep, "86400"]
    volumes: [".:/src", "data:/data"]
    configs: [c]
volumes: {data: {}}
configs: {c: {content: configured}}
`

// A connection that is cut, at whatever step of making or removing a sandbox, leaves
// what the same order finishes, and what a teardown by ID alone removes: when the step
// never came to the host, when it was cut off, and when only its answer was lost.
func TestConnectionCut(t *testing.T) {
	docker(t)
	dir := repo(t, full, map[string]string{"Dockerfile": "FROM " + image + "\nCOPY f /f\n", "f": strings.Repeat("f", 1<<20)})
	var archive bytes.Buffer // what it is made of
	w := tar.NewWriter(&archive)
	for _, h := range []tar.Header{
		{Name: sandboxer.VolumesDir + "/data/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: sandboxer.VolumesDir + "/data/d", Mode: 0o644, Size: 5},
		{Name: "f", Mode: 0o644, Size: 5},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		w.Write([]byte("saved")[:h.Size])
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for i, p := range points {
		for _, how := range []string{"lost", "cut off", "unanswered"} {
			switch {
			case how == "cut off" && !slices.Contains([]point{pCopy, pBuild, pFill, pLink, pUp, pObjects}, p):
				continue // it is over in a moment
			case how == "lost" && p != points[0] && p != pProcesses:
				continue // the answer of the step before it is what is lost then
			}
			t.Run(string(p)+" "+how, func(t *testing.T) {
				t.Parallel()
				owner := fmt.Sprintf("cut%d%c", i, how[0])
				r := newRig(t, current(t), 1)
				relay := r.afar(t)
				s := order("box", dir)
				if p == pCarry || p == pLink {
					r.withProgram(t)
					s.Network.Mode = sandboxer.NetworkPublic
				}
				e := r.opened(t, owner)
				e.settle = -time.Second
				s.Inputs["volumes"] = "all"
				teardown(t, e, s.ID)
				met := 0
				e.fail = func(at point, after bool) error {
					if at != p || after != (how == "unanswered") || met > 0 {
						return nil
					}
					met++
					switch how {
					case "lost":
						relay.Freeze()
						time.AfterFunc(50*time.Millisecond, func() { relay.Cut(); relay.Thaw() })
					case "cut off":
						time.AfterFunc(120*time.Millisecond, relay.Cut)
					default:
						relay.Cut()
						return sandboxer.E(sandboxer.Unavailable, nil, "the answer was lost")
					}
					return nil
				}
				life := []func() error{
					func() (err error) {
						_, err = e.putFrom(t.Context(), s, sandboxer.Contents{Volumes: []string{"data"}}, bytes.NewReader(archive.Bytes()))
						return err
					},
					func() error {
						_, err := e.WaitReady(t.Context(), sandboxer.Handle{SandboxID: s.ID, Generation: 1})
						return err
					},
					func() error {
						h := sandboxer.Handle{SandboxID: s.ID, Generation: 1}
						if got := run(t, e, h, "cat /src/f /data/d; wc -c </f"); got != "savedsaved1048576" {
							t.Errorf("it holds %q", got)
						}
						return nil
					},
					func() error { _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); return err },
				}
				for _, step := range life {
					begun := time.Now()
					err := step()
					if took := time.Since(begun); took > 3*time.Minute { // a connection that is gone would be waited for without end
						t.Errorf("it hung for %s", took)
					}
					if err == nil {
						continue
					}
					if k := sandboxer.KindOf(err); k != sandboxer.Unavailable || met == 0 {
						t.Fatalf("the kind of %v is %q", err, k)
					}
					if how != "lost" && i%2 == 1 {
						break // nobody asks for it again
					}
					if err = again(step); err != nil {
						t.Fatalf("once more: %v (%s)", err, sandboxer.HintOf(err))
					}
				}
				if met == 0 {
					t.Errorf("it never came to %s", p)
				}
				// Whatever is left is found by another process that knows the ID.
				if _, err := r.opened(t, owner).Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); err != nil {
					t.Errorf("Teardown: %v", err)
				}
				// The first one finds nothing left, even if it has not used its connection since.
				if err := again(func() error { _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); return err }); err != nil {
					t.Errorf("Teardown by the first: %v", err)
				}
				if left := r.remains(t, owner); len(left) > 0 {
					t.Errorf("left behind: %q", left)
				}
			})
		}
	}
}

// again takes a step a few times if the host is away: that a connection is gone may be
// noticed by using it.
func again(step func() error) (err error) {
	for range 3 {
		if err = step(); sandboxer.KindOf(err) != sandboxer.Unavailable {
			break
		}
	}
	return err
}

// TestVanished has what Docker 20.10 said in one of a hundred builds, while images of the
// same repository were built and removed by four at a time, and what a build says that will
// fail again.
func TestVanished(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]bool{
		"Step 4/7 : LABEL dev.sandboxer.id=b4\nNo such image: sha256:ce1ea320ae5247ed3efbe2e659c00da7df8661c1b07f35d23c7211bb0d5b7e71":                                                               true,
		"Removing intermediate container 187a7650a347\nfailed to get digest sha256:dc45bbeb1d0a: open /var/lib/docker/image/overlay2/imagedb/content/sha256/dc45bbeb1d0a: no such file or directory": true,
		"Step 1/2 : FROM nothing:1\npull access denied for nothing, repository does not exist or may require 'docker login'":                                                                         false,
		"COPY failed: file not found in build context or excluded by .dockerignore: stat f: file does not exist":                                                                                     false,
	} {
		if got := isVanished(errors.New(engine.OneLine(said))); got != want {
			t.Errorf("%q: %t, want %t", said, got, want)
		}
	}
}

// Podman gives up making a network when an interface of anybody's comes or goes while it
// looks which addresses are in use. Services are started again then, but not for ever.
// Podman may do so by itself here, too: only what the script refuses is counted.
func TestStumble(t *testing.T) {
	t.Parallel()
	env := podman(t)
	for name, stumbles := range map[string]int{"twice": 2, "always": 1000} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			real, err := exec.LookPath("podman")
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			script := fmt.Sprintf(`#!/bin/sh
[ "$1 $2" != "network create" ] || [ "$(cat %[1]s/refused | wc -l)" -ge %[2]d ] || {
	echo >>%[1]s/refused
	echo "Error: route ip+net: no such network interface" >&2
	exit 125
}
exec %[3]s "$@"
`, dir, stumbles, real)
			if err := errors.Join(os.WriteFile(dir+"/podman", []byte(script), 0o755), os.WriteFile(dir+"/refused", nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			r := newRig(t, "podman-compose", 0)
			r.program = "podman"
			r.addHost(t, "host-1", append(slices.Clone(env), "PATH="+dir+":"+os.Getenv("PATH"))...)
			e := r.opened(t, "stumbles"+name)
			s := order("box", repo(t, single, nil))
			teardown(t, e, s.ID)
			_, err = e.put(t.Context(), s)
			want := min(stumbles, starts)
			if stumbles > starts {
				kind(t, err, sandboxer.Failed, "no such network interface")
			} else if err != nil {
				t.Fatal(err)
			}
			if refused, err := os.ReadFile(dir + "/refused"); err != nil || len(refused) != want {
				t.Errorf("a network was refused %d times; want %d (%v)", len(refused), want, err)
			}
		})
	}
}

// An operator who changes where the name of a host leads, or with which key, wants nothing
// to go on over the former connections.
func TestHostChanges(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	e := r.opened(t, "changes")
	before, err := e.host("host-1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := before.Output(t.Context(), "true"); err != nil {
		t.Fatal(err)
	}
	if again, err := e.host("host-1"); err != nil || again.Host != before.Host {
		t.Errorf("asked for again it is another: %v", err)
	}
	r.host(t, "host-1", sshtest.Options{Silent: true, Env: []string{"SERVER=second"}})
	after, err := e.host("host-1")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := after.Output(t.Context(), "echo $SERVER"); err != nil || string(out) != "second\n" {
		t.Errorf("afterwards: %q, %v", out, err)
	}
	if _, err := before.Output(t.Context(), "true"); !errors.Is(err, sshrun.ErrUnreachable) {
		t.Errorf("over the former connections: %v; want them closed", err)
	}
}

// TestNeverReached: a create that comes to no host says so, and nothing is written down for it
// here; what an earlier version noted of one is believed, and that there is no note proves nothing.
func TestNeverReached(t *testing.T) {
	r := newRig(t, "docker-compose", 0)
	r.cfg.Hosts = []string{"nobody.invalid", "nor-he.invalid"}
	e := r.opened(t, "never")
	s := order("typo", repo(t, single, nil))
	_, err := e.Place(t.Context(), s, nil)
	kind(t, err, sandboxer.Unavailable)
	s.Place = "nobody.invalid"
	if _, err := e.Provision(t.Context(), s); sandboxer.KindOf(err) != sandboxer.Unavailable || !sandboxer.IsUntouched(err) {
		t.Fatalf("Provision: %v, untouched %t", err, sandboxer.IsUntouched(err))
	}
	if left := r.noted("never"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	h := sandboxer.Handle{SandboxID: s.ID, Generation: 1}
	e = r.opened(t, "never") // another process
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Unknown || err == nil {
		t.Errorf("IsAlive = %s, %v; want unknown", l, err)
	}
	_, err = e.Teardown(t.Context(), h)
	kind(t, err, sandboxer.Unavailable, "nobody.invalid", "nor-he.invalid")
	h.Host = "nor-he.invalid"
	_, err = e.Teardown(t.Context(), h)
	kind(t, err, sandboxer.Unavailable, "nor-he.invalid")

	formerNote(t, e, e.name(s.ID, 1), "-\n")
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Gone || err != nil {
		t.Errorf("IsAlive of what an earlier version noted as untouched = %s, %v", l, err)
	}
	if _, err := e.Provision(t.Context(), s); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("Provision: %v", err)
	}
	if at, err := e.former(t.Context(), e.name(s.ID, 1)); at != "" || err != nil {
		t.Error("the note still says that no host was asked")
	}
	formerNote(t, e, e.name(s.ID, 1), "-\n")
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Errorf("Teardown of what an earlier version noted as untouched: %v", err)
	}
	if at, err := e.former(t.Context(), e.name(s.ID, 1)); at != "" || err != nil {
		t.Errorf("the note is left: %q, %v", at, err)
	}
}

// formerNote notes where a sandbox is as earlier versions did, and has it read as at the next start.
func formerNote(t *testing.T, e *extension, name, text string) {
	t.Helper()
	dir := filepath.Join(e.env.Dir, formerDir)
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := notes.Move(t.Context(), e.env.Notes, dir, ""); err != nil {
		t.Fatal(err)
	}
	if at, err := e.former(t.Context(), name); at != strings.TrimSpace(text) || err != nil {
		t.Fatalf("noted is %q, %v", at, err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the former directory: %v", err)
	}
}

// What earlier versions noted of where a sandbox is counts where neither its record nor its
// handle says it, also for where it is made; none of it is written any more.
func TestFormerNotes(t *testing.T) {
	r := newRig(t, "docker-compose", 0)
	r.cfg.Hosts = []string{"nobody.invalid", "nor-he.invalid"}
	e := r.opened(t, "former")
	s := order("old", repo(t, single, nil))
	formerNote(t, e, e.name(s.ID, 1), "nor-he.invalid\n")
	e = r.opened(t, "former") // another process
	if host, err := e.Place(t.Context(), s, nil); err != nil || host != "nor-he.invalid" {
		t.Errorf("Place = %q, %v", host, err)
	}
	s.Place = "nobody.invalid"
	_, err := e.Provision(t.Context(), s)
	kind(t, err, sandboxer.Conflict, "nor-he.invalid")
	for _, g := range []int{0, 1} {
		_, err = e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID, Generation: g})
		kind(t, err, sandboxer.Unavailable, "nor-he.invalid")
	}
	remains, err := e.Forget(t.Context(), sandboxer.Handle{SandboxID: s.ID, Generation: 1})
	if err != nil || len(remains) != 1 || !strings.Contains(remains[0], "host nor-he.invalid") {
		t.Errorf("Forget = %q, %v", remains, err)
	}
	if at, err := e.former(t.Context(), e.name(s.ID, 1)); at != "" || err != nil {
		t.Errorf("the note is left: %q, %v", at, err)
	}
}

// An extension without a host has no sandbox, and does not leave in doubt whether it has: an unknown ID is not found. Whether there are
// hosts must be certain for that.
func TestNoHosts(t *testing.T) {
	t.Parallel()
	r := newRig(t, "docker compose", 0)
	e := r.opened(t, "nowhere")
	_, err := e.Discover(t.Context(), "unknown")
	kind(t, err, sandboxer.NotFound, "unknown")
	_, err = e.names()
	kind(t, err, sandboxer.Unavailable, "no host")
	if err := os.WriteFile(filepath.Join(r.hosts, "broken.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = e.Discover(t.Context(), "unknown")
	kind(t, err, sandboxer.Invalid, "broken") // it may be there
}

// Hosts that cannot be read are an error of whatever looks on all of them: what was not found may be there. They stop
// nothing on the others.
func TestHostsUnread(t *testing.T) {
	t.Parallel()
	looks := func(t *testing.T, e *extension, want sandboxer.Kind, words ...string) {
		t.Helper()
		var listed error
		for h, err := range e.ListRunning(t.Context(), e.env.Owner) {
			if err == nil {
				t.Errorf("%+v is listed", h)
			}
			listed = err
		}
		kind(t, listed, want, words...)
		_, err := e.Caches(t.Context(), "")
		kind(t, err, want, words...)
		_, err = e.Discover(t.Context(), "unknown")
		kind(t, err, sandboxer.Unavailable, words...)
		l, err := e.IsAlive(t.Context(), sandboxer.Handle{SandboxID: "unknown"})
		kind(t, err, sandboxer.Unavailable, words...)
		if l != sandboxer.Unknown {
			t.Errorf("IsAlive = %s", l)
		}
		_, err = e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "unknown"})
		kind(t, err, sandboxer.Unavailable, words...)
	}
	t.Run("directory", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "docker-compose", 0)
		r.hosts = filepath.Join(t.TempDir(), "hosts")
		if err := os.WriteFile(r.hosts, nil, 0o600); err != nil { // root reads every directory
			t.Fatal(err)
		}
		e := r.opened(t, "unread-directory")
		looks(t, e, sandboxer.Unavailable, "cannot read the hosts of this installation", "check that "+r.hosts)
		_, err := e.Caches(t.Context(), "one")
		kind(t, err, sandboxer.Unavailable, "record of host one cannot be read")
	})
	t.Run("record", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "docker-compose", 1)
		if err := os.WriteFile(filepath.Join(r.hosts, "broken.json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		e := r.opened(t, "unread-record")
		looks(t, e, sandboxer.Invalid, "record of host broken is damaged", "host rm --force broken")
		if names, err := e.names(); err != nil || !slices.Equal(names, []string{"host-1"}) {
			t.Errorf("sandboxes may go to %q, %v", names, err)
		}
		for _, name := range []string{"host-1", "stranger"} {
			if got, err := e.Caches(t.Context(), name); err != nil || len(got) > 0 {
				t.Errorf("Caches(%s) = %+v, %v", name, got, err)
			}
		}
		_, err := e.Caches(t.Context(), "broken")
		kind(t, err, sandboxer.Invalid, "damaged")
	})
}

// A compose program that does not say its version in time, as on a busy host, is not a missing one, and no other program
// takes its place.
func TestSlowProgram(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/timeout", []byte("#!/bin/sh\ncase \"$*\" in *'compose version'*) exit 124;; esac\nshift; exec \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, compose := range map[string]string{"fixed": "docker-compose", "any": ""} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, "docker-compose", 0)
			r.cfg.ComposeCmd = compose
			r.addHost(t, "host-1", docker(t), "PATH="+dir+":"+os.Getenv("PATH"))
			_, err := r.opened(t, "slow"+name).Discover(t.Context(), "unknown")
			kind(t, err, sandboxer.Unavailable, "host-1", "does not answer")
		})
	}
}

// The error for a request that cannot get a host says why: for the requested host, or for each. A
// host that was not asked for is not waited for.
func TestNoRoom(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 2)
	e := r.opened(t, "room")
	reg := sshrun.NewRegistry(r.hosts)
	set := func(name string, change func(*sshrun.Record)) {
		t.Helper()
		rec, err := reg.Host(name)
		if err == nil {
			change(&rec)
			err = reg.Put(rec)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	wants := func(host string) *plan {
		t.Helper()
		s := order("box", repo(t, single, nil))
		s.Host = host
		p, err := e.plan(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	choose := func(host string) error { _, err := e.choose(t.Context(), wants(host), nil); return err }
	dir := filepath.Join(r.servers[0].Dir, ".sandboxer/compose/sbx-room-there-g1")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	set("host-1", func(r *sshrun.Record) { r.Capacity = 1 })
	set("host-2", func(r *sshrun.Record) { r.State = sshrun.Draining })
	kind(t, choose(""), sandboxer.Exhausted, "host-1 has 1 of 1", "host-2 is being drained")
	kind(t, choose("host-1"), sandboxer.Exhausted, "host-1 has 1 of 1")
	kind(t, choose("host-2"), sandboxer.Exhausted, "host host-2 is being drained")
	if err := reg.Remove("host-2"); err != nil {
		t.Fatal(err)
	}
	kind(t, choose("host-2"), sandboxer.Invalid, "host-2")

	s := sshtest.Start(t, sshtest.Options{Silent: true})
	relay := sshtest.NewRelay(t, s.Port, 0)
	relay.Freeze()
	target := s.Target()
	if err := reg.Put(sshrun.Record{Name: "away", Addr: target.Addr, Port: relay.Port, IdentityFile: target.IdentityFile, HostKeys: target.HostKeys, State: sshrun.Active, AddedAt: time.Now()}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	asked := make(chan error, 1)
	one, any := wants("host-1"), wants("")
	go func() { _, err := e.choose(ctx, one, nil); asked <- err }()
	go func() { _, err := e.choose(ctx, any, nil); asked <- err }() // who has to wait for it
	if err := <-asked; sandboxer.KindOf(err) != sandboxer.Exhausted || ctx.Err() != nil {
		t.Errorf("the first to be answered: %v; want who asked for host-1", err)
	}
	cancel()
	<-asked

	set("host-1", func(r *sshrun.Record) { r.Only = sshrun.OnlyMachines })
	if names, err := e.names(); err != nil || !slices.Equal(names, []string{"away"}) {
		t.Errorf("compose projects may go to %q, %v; host-1 is for machines", names, err)
	}
	set("host-1", func(r *sshrun.Record) { r.Only = sshrun.OnlyCompose })
	// One that does not answer costs little once another has room, and then nothing.
	set("host-1", func(r *sshrun.Record) { r.Capacity = 5 })
	if _, err := e.choose(t.Context(), any, nil); err != nil {
		t.Fatal(err)
	}
	if !e.allSlow(map[string]bool{"away": true}) {
		t.Error("it is waited for again")
	}
}

// TestBetter: a host with room is taken that is not busy and has disk left.
func TestBetter(t *testing.T) {
	at := func(name string, free int, load float64, disk int64) *capacity {
		h, err := newHost(name)
		if err != nil {
			t.Fatal(err)
		}
		return &capacity{h: h, free: free, load: load, diskFree: disk}
	}
	all := []*capacity{at("busy", 9, 2.5, 1<<40), at("b", 3, 1.5, 1<<40), at("a", 3, 0, -1), at("less", 1, 0, 1<<40), at("busier", 3, 9, 1<<40)}
	slices.SortFunc(all, better)
	var got []string
	for _, o := range all {
		got = append(got, o.h.Name())
	}
	if want := "[a b less busy busier]"; fmt.Sprint(got) != want {
		t.Errorf("in order: %s; want %s", got, want)
	}
	for want, o := range map[string]*capacity{"": at("x", 1, 0, 1<<30), "x has 1023 MiB of disk left": at("x", 1, 0, 1<<30-1), "x has 0 of 0": at("x", 0, 0, 1<<40)} {
		if got := o.full(1 << 30); got != want {
			t.Errorf("full = %q; want %q", got, want)
		}
	}
}

func newHost(name string) (*host, error) {
	pool, err := sshrun.New(sshrun.Options{})
	if err != nil {
		return nil, err
	}
	h, err := pool.Host(sshrun.Target{Name: name, Addr: name})
	return &host{Host: h}, err
}

// What podman says is the reason, and not where podman-compose was at that time.
func TestReason(t *testing.T) {
	const where = "Traceback (most recent call last):\n  File \"/usr/bin/podman-compose\", line 33, in <module>\n    sys.exit(main())\nsubprocess.CalledProcessError: Command '['podman', "
	for said, want := range map[string]string{
		"Step 3\n\x1b[91mE: Unable to locate package x\n\x1b[0mexit code 100\n":                                                                                   "Step 3; E: Unable to locate package x; exit code 100",
		"Error: network exists\nusing podman\n['podman', 'network', 'create', 'x']\n" + where + "'network', 'create', 'x']' returned non-zero exit status 125.\n": "network exists",
		where + "'ps']' died with <Signals.SIGKILL: 9>.\n":                                                                                                        "podman gave no reason: it died with <Signals.SIGKILL: 9>",
		"Step 3\nTraceback (most recent call last):\n  File \"setup.py\"\nModuleNotFoundError: six\n":                                                             "",
	} {
		if want == "" {
			want = engine.OneLine(said)
		}
		if got := engine.OneLine(reason(said)); got != want {
			t.Errorf("of %q the reason is %q; want %q", said, got, want)
		}
	}
}

// An engine may still be making a network for somebody who was cut off when the same
// sandbox is asked for again. Its subnet is not a stranger's, then; one that is in the way for
// good is.
func TestNetworkInTheWay(t *testing.T) {
	t.Parallel()
	for name, stays := range map[string]bool{"goes": false, "stays": true} {
		t.Run(name, func(t *testing.T) {
			owner := "way" + name
			r := newRig(t, current(t), 1)
			r.cfg.Subnets = map[bool]string{false: "10.224.0.0/16", true: "10.225.0.0/16"}[stays] // in nobody else's way
			e := r.opened(t, owner)
			s := order("box", repo(t, single, nil))
			teardown(t, e, s.ID)
			ghost, first := "ghost-"+owner, ""
			gone := sync.OnceFunc(func() { r.engine(t, r.engines[0], "network", "rm", ghost) })
			tries := 0
			e.fail = func(at point, after bool) error {
				if at != pUp || after {
					return nil
				}
				files, _ := filepath.Glob(filepath.Join(r.servers[0].Dir, ".sandboxer/compose/sbx-"+owner+"-*/compose.yaml"))
				if len(files) != 1 {
					t.Fatalf("compose files %q", files)
				}
				data, err := os.ReadFile(files[0])
				if err != nil {
					t.Fatal(err)
				}
				subnet := regexp.MustCompile(`subnet: "?([0-9./]+)`).FindSubmatch(data)
				if subnet == nil {
					t.Fatalf("no subnet in %s", data)
				}
				switch tries++; {
				case tries == 1:
					first = string(subnet[1])
					r.engine(t, r.engines[0], "network", "create", "--subnet", first, ghost)
				case !stays:
					gone()
				}
				if same := string(subnet[1]) == first; same != (tries < 3) {
					t.Errorf("try %d has subnet %s, the first one %s", tries, subnet[1], first)
				}
				return nil
			}
			_, err := e.put(t.Context(), s)
			gone()
			if err != nil {
				t.Fatalf("Provision: %v (%s)", err, sandboxer.HintOf(err))
			}
			if want := map[bool]int{false: 2, true: 3}[stays]; tries != want {
				t.Errorf("%d tries, want %d", tries, want)
			}
			if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); err != nil {
				t.Fatal(err)
			}
			if left := r.remains(t, owner); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
			if taken, _ := filepath.Glob(filepath.Join(r.servers[0].Dir, ".sandboxer/compose/.net/*")); stays != (len(taken) == 1) {
				t.Errorf("remembered: %q; want the subnet that a stranger has, and no other", taken)
			}
		})
	}
}

// A host that does not answer is not one whose sandboxes are gone. What was begun there
// is owed, also by a process that was not there, until the host is back.
func TestHostAway(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	relay := r.afar(t)
	e := r.opened(t, "hostaway")
	h, _ := provision(t, e, order("away", repo(t, single, nil)))

	// It falls silent in the middle of another.
	begun := order("begun", repo(t, single, nil))
	teardown(t, e, begun.ID)
	c, cancel := context.WithCancel(t.Context())
	once := sync.OnceFunc(func() { relay.Freeze(); cancel() })
	c = sandboxer.WithProgress(c, func(p sandboxer.Progress) {
		if strings.HasPrefix(p.Step, "starting") {
			once()
		}
	})
	if _, err := e.put(c, begun); err == nil {
		t.Fatal("Provision succeeded on a host that fell silent")
	}
	relay.Cut()

	// Days later, another process.
	e2 := r.opened(t, "hostaway")
	short := func() context.Context {
		c, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		t.Cleanup(cancel)
		return c
	}
	if l, err := e2.IsAlive(short(), h); l != sandboxer.Unknown || err == nil {
		t.Errorf("IsAlive = %s, %v; want unknown", l, err)
	}
	for _, id := range []string{"away", "begun", "never-was"} {
		if _, err := e2.Teardown(short(), sandboxer.Handle{SandboxID: id}); err == nil {
			t.Errorf("Teardown(%s) succeeded although nothing could be asked", id)
		}
	}
	errs := 0
	for _, err := range e2.ListRunning(short(), "hostaway") {
		if err != nil {
			errs++
		}
	}
	if errs == 0 {
		t.Error("the listing does not say that it is not whole")
	}
	relay.Thaw()
	if l, err := e2.IsAlive(t.Context(), h); l != sandboxer.Alive || err != nil {
		t.Errorf("IsAlive = %s, %v once it is back", l, err)
	}
	found := map[string]bool{}
	for h, err := range e2.ListRunning(t.Context(), "hostaway") {
		if err != nil {
			t.Fatal(err)
		}
		found[h.SandboxID] = true
		if _, err := e2.Teardown(t.Context(), h); err != nil {
			t.Error(err)
		}
	}
	if !found["away"] || !found["begun"] {
		t.Errorf("found %v once it is back", found)
	}
	if left := r.remains(t, "hostaway"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// brokerArgs are what a broker that will be killed is started with.
type brokerArgs struct {
	Owner, Dir, Hosts, Repo string
	Config                  Config
}

// broker makes and removes sandboxes until it is killed.
func broker() error {
	var a brokerArgs
	if err := json.NewDecoder(os.Stdin).Decode(&a); err != nil {
		return err
	}
	ctx := context.Background()
	ext, err := open(ctx, sandboxer.Env{Extension: "ext.test", Owner: a.Owner, Dir: a.Dir, Hosts: a.Hosts, Notes: notes.New(a.Dir, "ext.test", []byte(a.Owner))}, a.Config)
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		s := order(sandboxer.NewID(), a.Repo)
		s.Owner = a.Owner
		h, err := ext.(*extension).put(ctx, s)
		if err != nil {
			return err
		}
		if i%2 == 1 {
			continue
		}
		if _, err := ext.Teardown(ctx, h); err != nil {
			return err
		}
	}
}

// A broker that is killed at any moment leaves nothing that the next one does not find.
func TestKilledAtAnyMoment(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	in, err := json.Marshal(brokerArgs{Owner: "killed", Dir: filepath.Join(r.dir, "killed"), Hosts: r.hosts, Repo: repo(t, web, nil), Config: r.cfg})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		cmd := exec.Command(self, "broker")
		cmd.Stdin, cmd.Stderr = bytes.NewReader(in), os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case err := <-ended:
			t.Fatalf("the broker ended by itself: %v", err)
		case <-time.After(time.Duration(500+1200*i+rand.IntN(1200)) * time.Millisecond):
			cmd.Process.Kill()
			<-ended
		}
	}
	e := r.opened(t, "killed")
	n := 0
	for h, err := range e.ListRunning(t.Context(), "killed") {
		if err != nil {
			t.Fatal(err)
		}
		n++
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Errorf("Teardown(%s): %v", h.SandboxID, err)
		}
	}
	t.Logf("%d sandboxes were left", n)
	if n == 0 {
		t.Error("the brokers were killed before they did anything")
	}
	left := r.remains(t, "killed")
	left = slices.DeleteFunc(left, func(s string) bool { return strings.HasSuffix(s, ".lock") })
	if left = slices.DeleteFunc(left, func(f string) bool { _, err := os.Lstat(f); return filepath.IsAbs(f) && err != nil }); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// Sandboxes go where most room is, and nowhere else than asked.
func TestSeveralHosts(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 0)
	r.addHost(t, "small", docker(t))
	r.addHost(t, "large", another(t))
	reg := sshrun.NewRegistry(r.hosts)
	change := func(name string, f func(*sshrun.Record)) {
		t.Helper()
		rec, err := reg.Host(name)
		if err == nil {
			f(&rec)
			err = reg.Put(rec)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	change("small", func(rec *sshrun.Record) { rec.Capacity = 1 })
	change("large", func(rec *sshrun.Record) { rec.Capacity = 2 })
	e := r.opened(t, "several")
	dir := repo(t, single, nil)
	on := map[string]int{}
	for i := range 3 {
		h, _ := provision(t, e, order(fmt.Sprintf("spread-%d", i), dir))
		on[h.Host]++
	}
	if on["small"] != 1 || on["large"] != 2 {
		t.Errorf("the sandboxes are on %v", on)
	}
	if o, err := e.Capacity(t.Context(), ""); err != nil || o.Free != 0 || !slices.Equal(o.Hosts, []string{"large", "small"}) {
		t.Errorf("Capacity = %+v, %v", o, err)
	}
	more := order("more", dir)
	teardown(t, e, more.ID)
	_, err := e.put(t.Context(), more)
	kind(t, err, sandboxer.Exhausted)
	more.Host = "small"
	_, err = e.put(t.Context(), more)
	kind(t, err, sandboxer.Exhausted)
	more.Host = "unknown"
	_, err = e.put(t.Context(), more)
	kind(t, err, sandboxer.Invalid, "unknown", "large, small")

	// Where a sandbox is cannot be read: it is neither put somewhere else nor said to be gone.
	unread := order("unread", dir)
	damaged := filepath.Join(e.env.Dir, "notes", e.name(unread.ID, unread.Generation)+".note")
	if err := errors.Join(os.MkdirAll(filepath.Dir(damaged), 0o700), os.WriteFile(damaged, []byte("-\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	_, err = e.put(t.Context(), unread)
	kind(t, err, sandboxer.Unavailable, "cannot be read", damaged)
	_, err = e.Teardown(t.Context(), sandboxer.Handle{SandboxID: unread.ID})
	kind(t, err, sandboxer.Unavailable, "cannot be read", damaged)
	if err := os.Remove(damaged); err != nil {
		t.Fatal(err)
	}

	// Found by its ID alone, on whichever it is, by another process in another place.
	e2 := r.opened(t, "several")
	e2.env.Dir = t.TempDir()
	e2.env.Notes = notes.New(e2.env.Dir, "ext.test", []byte("several"))
	for i := range 2 {
		if _, err := e2.Teardown(t.Context(), sandboxer.Handle{SandboxID: fmt.Sprintf("spread-%d", i)}); err != nil {
			t.Fatal(err)
		}
		if l, err := e2.IsAlive(t.Context(), sandboxer.Handle{SandboxID: fmt.Sprintf("spread-%d", i)}); l != sandboxer.Gone || err != nil {
			t.Errorf("IsAlive = %s, %v", l, err)
		}
	}
	change("large", func(rec *sshrun.Record) { rec.State = sshrun.Draining })
	for h := range e.ListRunning(t.Context(), "several") {
		if h.SandboxID != "spread-2" {
			t.Errorf("%s is listed", h.SandboxID)
		}
	}
	more.Host = "large"
	_, err = e.put(t.Context(), more)
	kind(t, err, sandboxer.Exhausted)
}

// Many sandboxes of one repository run side by side on one host.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	e := r.opened(t, "side")
	dir := repo(t, web, nil)
	const n = 4
	handles := make([]sandboxer.Handle, n)
	var wg sync.WaitGroup
	for i := range n {
		s := order(fmt.Sprintf("side-%d", i), dir)
		s.Env["WHO"] = s.ID
		teardown(t, e, s.ID)
		wg.Go(func() {
			h, err := e.put(t.Context(), s)
			if err == nil {
				_, err = e.WaitReady(t.Context(), h)
			}
			if err != nil {
				t.Errorf("%s: %v", s.ID, err)
			}
			handles[i] = h
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for _, h := range handles {
		if got := get(t, e, h, 8080, "hello"); got != "hello "+h.SandboxID {
			t.Errorf("%s says %q", h.SandboxID, got)
		}
	}
	for _, h := range handles {
		wg.Go(func() {
			if _, err := e.Teardown(t.Context(), h); err != nil {
				t.Errorf("%s: %v", h.SandboxID, err)
			}
		})
	}
	wg.Wait()
	if left := r.remains(t, "side"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// A host without room on its disk is said to be that, and keeps nothing of the try.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	r := newRig(t, current(t), 1)
	small := t.TempDir()
	if err := syscall.Mount("tmpfs", small, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("a small file system cannot be mounted: %v", err)
	}
	t.Cleanup(func() { syscall.Unmount(small, syscall.MNT_DETACH) })
	r.cfg.Root = filepath.Join(small, "root")
	e := r.opened(t, "full")
	s := order("full", repo(t, single, map[string]string{"large": strings.Repeat("large", 1<<20)}))
	_, err := e.put(t.Context(), s)
	kind(t, err, sandboxer.Exhausted, "disk", "host-1")
	if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(r.cfg.Root + "/sbx-*"); len(left) > 0 || len(r.remains(t, "full")) > 0 {
		t.Errorf("left behind: %q, %q", left, r.remains(t, "full"))
	}
}

// A door is a socket through which an engine is reached, as long as it is open.
type door struct {
	path, to string
	mu       sync.Mutex
	l        net.Listener
	conns    map[net.Conn]bool
}

func (d *door) open(t *testing.T) {
	t.Helper()
	l, err := net.Listen("unix", d.path)
	if err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.l, d.conns = l, map[net.Conn]bool{}
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go d.pass(in)
		}
	}()
}

func (d *door) pass(in net.Conn) {
	out, err := net.Dial("unix", d.to)
	if err != nil {
		in.Close()
		return
	}
	d.mu.Lock()
	d.conns[in], d.conns[out] = true, true
	d.mu.Unlock()
	go func() {
		io.Copy(out, in)
		out.(*net.UnixConn).CloseWrite()
	}()
	io.Copy(in, out)
	in.Close()
	out.Close()
}

func (d *door) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.l != nil {
		d.l.Close()
		d.l = nil
	}
	for c := range d.conns {
		c.Close()
	}
}

// An engine that is away, on a host that is not, is no reason to believe anything gone,
// and what was begun without it goes once it is back.
func TestEngineAway(t *testing.T) {
	t.Parallel()
	d := &door{path: filepath.Join(t.TempDir(), "engine"), to: strings.TrimPrefix(docker(t), "DOCKER_HOST=unix://")}
	d.open(t)
	t.Cleanup(d.close)
	r := newRig(t, current(t), 0)
	r.addHost(t, "host-1", "DOCKER_HOST=unix://"+d.path)
	e := r.opened(t, "away")
	h, _ := provision(t, e, order("there", repo(t, single, nil)))
	warm := r.opened(t, "away") // which knows all that it can
	run(t, warm, h, "true")
	begun := order("begun", repo(t, single, nil))
	teardown(t, e, begun.ID)
	e.fail = func(p point, after bool) error { // it goes while another is being made
		if p == pUp && !after {
			d.close()
		}
		return nil
	}
	_, err := e.put(t.Context(), begun)
	kind(t, err, sandboxer.Unavailable, "engine does not answer", "host-1")
	e.fail = nil

	says := func(what string, err error) {
		t.Helper()
		if k := sandboxer.KindOf(err); k != sandboxer.Unavailable || !strings.Contains(sandboxer.Message(err), "engine does not answer") {
			t.Errorf("%s: %q error %v", what, k, err)
		}
	}
	for name, e := range map[string]*extension{"the same process": e, "another": r.opened(t, "away"), "one that knows it": warm} {
		_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
		says(name+": Exec", err)
		_, err = e.WaitReady(t.Context(), h)
		says(name+": WaitReady", err)
		l, err := e.IsAlive(t.Context(), h)
		says(name+": IsAlive", err)
		if l != sandboxer.Unknown {
			t.Errorf("%s: IsAlive = %s", name, l)
		}
		_, err = e.Dial(t.Context(), h, 80)
		says(name+": Dial", err)
		says(name+": Pause", e.Pause(t.Context(), h))
		_, err = e.Stats(t.Context(), h)
		says(name+": Stats", err)
		_, err = e.Teardown(t.Context(), h)
		says(name+": Teardown", err)
		_, err = e.Teardown(t.Context(), sandboxer.Handle{SandboxID: "begun"})
		says(name+": Teardown by ID", err)
		_, err = e.Capacity(t.Context(), "")
		says(name+": Capacity", err)
		_, err = e.put(t.Context(), order("more", repo(t, single, nil)))
		says(name+": Provision", err)
		listed := 0
		for _, err := range e.ListRunning(t.Context(), "away") {
			if err != nil {
				says(name+": ListRunning", err)
				listed++
			}
		}
		if listed == 0 {
			t.Errorf("%s: the listing does not say that it is not whole", name)
		}
	}
	d.open(t)
	if got := run(t, e, h, "echo here"); got != "here" {
		t.Errorf("once it is back: %q", got)
	}
	// A command that speaks of an engine of its own is not the host's engine.
	var said strings.Builder
	const own = "Cannot connect to the Docker daemon at tcp://inside:2375"
	if x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo " + own + " >&2; exit 1"}, Stderr: &said}); err != nil || x.Code != 1 || said.String() != own+"\n" {
		t.Errorf("a command that misses an engine: %+v, %v, %q", x, err, said.String())
	}
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Alive || err != nil {
		t.Errorf("IsAlive = %s, %v once it is back", l, err)
	}
	for _, id := range []string{"there", "begun", "more"} {
		if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: id}); err != nil {
			t.Errorf("Teardown(%s): %v", id, err)
		}
	}
	if left := r.remains(t, "away"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}
