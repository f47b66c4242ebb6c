// Package extensiontest is the conformance suite: the contract of package sandboxer
// in executable form. An extension is right if it passes.
//
// The suite drives the extension through internal/backend, as the rest of the
// program does, and looks at a sandbox only from the inside, with the sandbox's own
// sh and the tools busybox has. It wants a real backend: what it proves about a mock
// it proves about the mock.
//
// An adapter's test is fifteen lines:
//
//	func TestConformance(t *testing.T) {
//		extensiontest.Run(t, extensiontest.Harness{
//			Open: func(t *testing.T) sandboxer.Extension { return openForTest(t) },
//			Spec: sandboxer.Spec{Owner: "conformance", Image: "busybox"},
//			Want: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanList},
//		})
//	}
//
// Subtests are named group/behaviour, so that -run 'TestConformance/exec' runs one
// group. New behaviour is specified by writing its subtest here first.
package extensiontest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// Harness tells the suite how to reach one backend and what it promises. Only Open
// is required.
type Harness struct {
	// Open opens the extension as the owner Spec.Owner. It is called once per test
	// and more: each call stands for another process of the broker, so every
	// extension it returns must reach the same backend and find the same sandboxes.
	// The suite closes what is an io.Closer.
	Open func(t *testing.T) sandboxer.Extension
	// Stranger opens the same backend for another owner; nil where that is
	// impossible.
	Stranger func(t *testing.T) sandboxer.Extension

	// Spec is the template of every sandbox: image, command, network, user. The suite
	// fills in ID, Generation and, where empty, Owner.
	Spec sandboxer.Spec
	// Inputs are those that the adapter declares.
	Inputs []sandboxer.Input
	// Want lists the capabilities the extension must have: one that is missing fails,
	// and so does one that it has in addition. Archive comes with exec and need not be
	// listed then.
	Want []sandboxer.Capability
	// Enforces lists what the extension really enforces. A limit that is not in it, and
	// mounts, must be refused with Unsupported before anything exists.
	Enforces []Feature

	// Hosts are those of a sandboxer.Placer that the group place uses, two at least; it is
	// skipped where there are none. Each can be asked for in Spec.Host.
	Hosts []string
	// Away takes one of Hosts out of reach, until back is called.
	Away func(t *testing.T, host string) (back func())
	// Bare opens the extension as Open does, as a process that finds nothing in its private
	// directory; nil if it has none.
	Bare func(t *testing.T) sandboxer.Extension

	// ExistsAlready says that sandboxes are there before they are provisioned, and can be given no
	// environment, which must be refused with Unsupported.
	ExistsAlready bool

	// Settle is how long a listing may lag behind the truth.
	Settle time.Duration
	// Patience is how long the suite waits for what has to come, where nothing else bounds
	// it; default a minute, for a machine with other work.
	Patience time.Duration
	// Kill removes the sandbox behind the extension's back, as an operator or a crash
	// would; nil where that is impossible.
	Kill func(t *testing.T, h sandboxer.Handle)
	// Hang has what is behind the sandbox stop answering, without any of it being lost,
	// until resume is called; nil where that is impossible.
	Hang func(t *testing.T, h sandboxer.Handle) (resume func())
	// OutOfMemory has a memory limit kill the sandbox; needed only where Enforces does
	// not list Memory.
	OutOfMemory func(t *testing.T, h sandboxer.Handle)
	// Listen returns a command that runs inside, listens on 127.0.0.1:port, and
	// answers every connection by echoing it, closing when its peer has closed (Echo
	// does that). Without it an extension that can dial fails.
	Listen func(port int) []string

	// Outside starts a TCP server that greets every connection and returns its address,
	// which the mode public reaches; Connect is a command that runs inside and succeeds if
	// the address greets it. Without them what a policy does is not tested here.
	Outside func(t *testing.T) netip.AddrPort
	Connect func(to netip.AddrPort) []string

	// MountRoot and ReadOnlyRoot are directories of this machine in which the extension's
	// configuration lets anybody mount, and mount read-only, what lies there. They are needed
	// where Enforces lists Mounts.
	MountRoot, ReadOnlyRoot string

	// Volume is the directory inside, absolute or relative to the workspace, of the one
	// volume that checkpoints of Spec hold; empty where Spec has none.
	Volume string

	Shell        []string // runs the script that follows; default sh -c
	User         string   // a user inside besides the default one; default "nobody"
	MissingImage string   // default is a name no backend can have
}

// Feature is something a sandbox must be held to, from inside.
type Feature string

// The features an extension may enforce.
const (
	CPU      Feature = "cpu"      // Limits.MilliCPU
	Memory   Feature = "memory"   // Limits.MemoryBytes
	Disk     Feature = "disk"     // Limits.DiskBytes
	PIDs     Feature = "pids"     // Limits.PIDs
	GPUs     Feature = "gpus"     // Limits.GPUs; its presence is only provisioned, not used
	Network  Feature = "network"  // network mode none leaves nothing but loopback
	Hostname Feature = "hostname" // the sandbox's host name is its ID
	Mounts   Feature = "mounts"   // Spec.Mounts shows directories and files of this machine
	Owned    Feature = "owned"    // Spec.User owns the workspace and what is brought into it
)

// Run runs the whole suite against the backend that h describes.
func Run(t *testing.T, h Harness) {
	s := newSuite(t, h)
	for _, g := range s.groups() {
		t.Run(g.name, g.run)
	}
}

// RunGroups runs the groups of these names alone: core, mounts, place, hang, and one for each capability. It is for an
// adapter that runs the others elsewhere, with another harness.
func RunGroups(t *testing.T, h Harness, names ...string) {
	s := newSuite(t, h)
	if slices.Contains(names, placeGroup) && len(h.Hosts) == 0 {
		t.Fatal("the harness names no hosts")
	}
	all := s.groups()
	for _, name := range names {
		i := slices.IndexFunc(all, func(g group) bool { return g.name == name })
		if i < 0 {
			t.Fatalf("the suite has no group %q", name)
		}
		t.Run(name, all[i].run)
	}
}

const placeGroup = "place"

// A group is the tests of one subject.
type group struct {
	name string
	run  func(*testing.T)
}

// groups are all, in the order in which they run.
func (s *suite) groups() []group {
	return []group{
		{"core", s.core},
		s.group(sandboxer.CanExec, s.exec),
		s.group(sandboxer.CanFiles, s.files),
		s.group(sandboxer.CanArchive, s.archive),
		s.group(sandboxer.CanDial, s.dial),
		s.group(sandboxer.CanExpose, s.expose),
		s.group(sandboxer.CanProbe, s.probe),
		s.group(sandboxer.CanDiscover, s.discover),
		s.group(sandboxer.CanList, s.list),
		s.group(sandboxer.CanSnapshot, s.snapshot),
		s.group(sandboxer.CanQuote, s.quote),
		s.group(sandboxer.CanMeter, s.meter),
		s.group(sandboxer.CanPause, s.pause),
		s.group(sandboxer.CanRenew, s.renew),
		s.group(sandboxer.CanCapacity, s.capacity),
		s.group(sandboxer.CanStats, s.stats),
		s.group(sandboxer.CanNetwork, s.network),
		s.group(sandboxer.CanPool, s.pool),
		s.group(sandboxer.CanCheckpoint, s.checkpoint),
		s.group(sandboxer.CanAgent, s.agent),
		s.group(sandboxer.CanProcesses, s.processes),
		s.group(sandboxer.CanWatch, s.watching),
		s.group(sandboxer.CanNotify, s.notify),
		{"mounts", s.mounts},
		{placeGroup, s.places},
		{"hang", s.hang},
	}
}

func newSuite(t *testing.T, h Harness) *suite {
	t.Helper()
	if h.Spec.Owner == "" {
		h.Spec.Owner = "conformance"
	}
	if h.Shell == nil {
		h.Shell = []string{"sh", "-c"}
	}
	if h.User == "" {
		h.User = "nobody"
	}
	if h.Patience == 0 {
		h.Patience = time.Minute
	}
	if h.MissingImage == "" {
		h.MissingImage = "sandboxer.invalid/no-such-image:0"
	}
	if slices.Contains(h.Want, sandboxer.CanExec) && !slices.Contains(h.Want, sandboxer.CanArchive) {
		h.Want = append(slices.Clip(h.Want), sandboxer.CanArchive) // comes with exec
	}
	s := &suite{Harness: h}
	// Closed at once: what a test finds open at its end is its own.
	b := backend.New("ext.conformance", s.Open(t), backend.Options{Inputs: s.Inputs, Close: closeTime})
	host, err := b.Place(ctx(t), s.spec(), nil)
	if cerr := b.Close(); cerr != nil {
		t.Errorf("Close: %v", cerr)
	}
	if err != nil {
		t.Fatalf("Place: %s", describe(err))
	}
	s.place = host
	return s
}

type suite struct {
	Harness
	place string // where the sandboxes go, if the extension is a Placer
}

// group is the tests of one capability, which run if the harness wants it. That an extension
// has a capability nobody wants is reported by core/capabilities.
func (s *suite) group(c sandboxer.Capability, f func(*testing.T)) group {
	return group{string(c), func(t *testing.T) {
		if !slices.Contains(s.Want, c) {
			t.Skipf("the harness does not say that the extension has %s", c)
		}
		if !s.open(t).Can(c) {
			t.Fatalf("the extension lacks %s", c)
		}
		f(t)
	}}
}

func (s *suite) enforces(f Feature) bool { return slices.Contains(s.Enforces, f) }

// open opens the extension once more.
func (s *suite) open(t *testing.T) *backend.Backend {
	t.Helper()
	return s.wrap(t, s.Open(t))
}

func (s *suite) wrap(t *testing.T, ext sandboxer.Extension) *backend.Backend {
	t.Helper()
	b := backend.New("ext.conformance", ext, backend.Options{Inputs: s.Inputs, Close: closeTime})
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return b
}

// spec returns the template with a fresh ID.
func (s *suite) spec() sandboxer.Spec {
	sp := s.Spec
	sp.ID = "ct-" + sandboxer.NewID()
	sp.Generation = 1
	sp.Place = s.place
	sp.Env = maps.Clone(sp.Env)
	if sp.Env == nil {
		sp.Env = map[string]string{}
	}
	sp.Vouched = []string{sandboxer.RestrictedImage, sandboxer.RestrictedHost, sandboxer.RestrictedMounts} // it is an operator who asks
	for _, in := range s.Inputs {
		sp.Vouched = append(sp.Vouched, in.Name)
	}
	sp.Fuse = time.Now().Add(time.Hour) // what an aborted run leaves behind is not for ever
	return sp
}

// long is how long the suite waits for what ends, or comes, within moments on a machine that has nothing else to do.
func (s *suite) long() time.Duration { return max(20*time.Second, s.Patience) }

// sandbox is one ready sandbox under test.
type sandbox struct {
	s     *suite
	b     *backend.Backend
	h     sandboxer.Handle
	reach sandboxer.Reachability
	spec  sandboxer.Spec
}

// up makes a ready sandbox that is torn down when the test ends.
func (s *suite) up(t *testing.T, change ...func(*sandboxer.Spec)) *sandbox {
	t.Helper()
	sp := s.spec()
	for _, f := range change {
		f(&sp)
	}
	return s.upSpec(t, s.open(t), sp)
}

func (s *suite) upSpec(t *testing.T, b *backend.Backend, sp sandboxer.Spec) *sandbox {
	t.Helper()
	s.owe(t, b, sp)
	h, err := b.Provision(ctx(t), sp)
	if err != nil {
		t.Fatalf("Provision(%s): %s", sp.ID, describe(err))
	}
	r, err := b.WaitReady(ctx(t), h)
	if err != nil {
		t.Fatalf("WaitReady(%s): %s", sp.ID, describe(err))
	}
	return &sandbox{s: s, b: b, h: h, reach: r, spec: sp}
}

// owe arranges the teardown of sp before it is provisioned: a Provision that fails
// may leave something too.
func (s *suite) owe(t *testing.T, b *backend.Backend, sp sandboxer.Spec) {
	t.Helper()
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
		defer cancel()
		if _, err := b.Teardown(c, sandboxer.Handle{SandboxID: sp.ID, Generation: sp.Generation}); err != nil {
			t.Errorf("Teardown(%s) at the end: %s", sp.ID, describe(err))
		}
	})
}

// run runs cmd in the sandbox and returns how it ended and what it wrote.
func (sb *sandbox) run(t *testing.T, cmd sandboxer.Cmd) (x sandboxer.Exit, stdout, stderr string) {
	t.Helper()
	var o, e bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &o
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &e
	}
	x, err := sb.b.Exec(ctx(t), sb.h, cmd)
	if err != nil {
		t.Fatalf("Exec(%q): %s", cmd.Args, describe(err))
	}
	return x, o.String(), e.String()
}

// script makes the command that runs a shell script; args are its $1, $2, …
func (s *suite) script(text string, args ...string) []string {
	return append(append(slices.Clone(s.Shell), text, "sh"), args...)
}

// sh runs a script that must succeed and returns its output without the last newline.
func (sb *sandbox) sh(t *testing.T, text string, args ...string) string {
	t.Helper()
	x, o, e := sb.run(t, sandboxer.Cmd{Args: sb.s.script(text, args...)})
	if x.Code != 0 {
		t.Fatalf("script %q %q ended with %+v\nstdout: %q\nstderr: %q", text, args, x, o, e)
	}
	return strings.TrimSuffix(o, "\n")
}

// dir returns the absolute path of the sandbox's workspace, as it is called inside.
func (sb *sandbox) dir(t *testing.T) string {
	t.Helper()
	switch {
	case sb.b.Can(sandboxer.CanExec):
		return sb.sh(t, "pwd -P")
	case sb.spec.Workspace != "":
		return sb.spec.Workspace
	case sb.reach.RemoteDir != "":
		return sb.reach.RemoteDir
	}
	return "/tmp"
}

// alive reports an error unless the sandbox still does its work.
func (sb *sandbox) alive(t *testing.T) {
	t.Helper()
	if sb.b.Can(sandboxer.CanExec) {
		if got := sb.sh(t, "echo alive"); got != "alive" {
			t.Errorf("echo in %s answered %q", sb.spec.ID, got)
		}
	}
	if sb.b.Can(sandboxer.CanProbe) {
		if l, err := sb.b.IsAlive(ctx(t), sb.h); err != nil || l != sandboxer.Alive {
			t.Errorf("IsAlive(%s) = %s, %v; want alive", sb.spec.ID, l, err)
		}
	}
	if _, err := sb.b.WaitReady(ctx(t), sb.h); err != nil {
		t.Errorf("WaitReady(%s): %s", sb.spec.ID, describe(err))
	}
}

// gone reports an error if anything is still there of sandbox sp, by every means the
// extension has.
func (s *suite) gone(t *testing.T, b *backend.Backend, sp sandboxer.Spec) {
	t.Helper()
	h := sandboxer.Handle{SandboxID: sp.ID, Generation: sp.Generation}
	if b.Can(sandboxer.CanProbe) {
		if l, err := b.IsAlive(ctx(t), h); err != nil || l != sandboxer.Gone {
			t.Errorf("IsAlive(%s) = %s, %v; want gone", sp.ID, l, err)
		}
	}
	if b.Can(sandboxer.CanDiscover) {
		if h, err := b.Discover(ctx(t), sp.ID); sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Errorf("Discover(%s) = %+v, %v; want not_found", sp.ID, h, err)
		}
	}
	if b.Can(sandboxer.CanList) {
		s.eventually(t, "a listing without "+sp.ID, func() bool { return len(listed(t, b, sp)) == 0 })
	}
	if b.Can(sandboxer.CanExec) {
		_, err := b.Exec(ctx(t), h, sandboxer.Cmd{Args: s.script("true")})
		wantKind(t, err, "Exec in a sandbox that is gone", sandboxer.NotFound)
	}
}

// listed returns the listed handles of sandbox sp.
func listed(t *testing.T, b *backend.Backend, sp sandboxer.Spec) (found []sandboxer.Handle) {
	t.Helper()
	for h, err := range b.ListRunning(ctx(t), sp.Owner) {
		if err != nil {
			t.Fatalf("ListRunning(%s): %s", sp.Owner, describe(err))
		}
		if h.SandboxID == sp.ID {
			found = append(found, h)
		}
	}
	return found
}

// eventually polls until ok, for as long as the harness says a listing may lag.
func (s *suite) eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	poll(t, what, s.Settle, ok)
}

func poll(t *testing.T, what string, limit time.Duration, ok func() bool) {
	t.Helper()
	end := time.Now().Add(limit)
	for !ok() {
		if time.Now().After(end) {
			t.Errorf("waited %s for %s in vain", limit, what)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// closeTime is how long an extension may take to close on a machine with other work.
const closeTime = time.Minute

// ctx bounds one call, so that an extension that hangs fails instead of stopping the
// suite.
func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	return c
}

// wantKind reports an error unless err has one of the kinds.
func wantKind(t *testing.T, err error, what string, kinds ...sandboxer.Kind) {
	t.Helper()
	if !slices.Contains(kinds, sandboxer.KindOf(err)) {
		t.Errorf("%s: got %s; want kind %q", what, describe(err), kinds)
	}
	if err != nil && sandboxer.Message(err) == "" {
		t.Errorf("%s: the %s error has no message", what, sandboxer.KindOf(err))
	}
}

func describe(err error) string {
	if err == nil {
		return "no error"
	}
	return fmt.Sprintf("%s error %q", sandboxer.KindOf(err), err)
}

// viaJSON returns h as the store gives it back.
func viaJSON(t *testing.T, h sandboxer.Handle) (out sandboxer.Handle) {
	t.Helper()
	j, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(j, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// Echo listens on addr and echoes every connection, closing it once its peer has
// closed its side. It returns only on failure. A test binary can offer it to
// Harness.Listen by calling it from TestMain.
func Echo(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go echo(c)
	}
}
