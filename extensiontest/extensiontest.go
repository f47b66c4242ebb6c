// Package extensiontest is the conformance suite: the contract of package sandboxer
// in executable form. An extension is right if it passes.
//
// The suite drives the extension through internal/backend, as the rest of the
// program does, and looks at a sandbox only from the inside, with the sandbox's own
// sh and the tools busybox has. It needs a real backend: with a mock it proves
// something about the mock only.
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
// group. To specify new behaviour, write its subtest here first.
package extensiontest

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// Run runs the whole suite against the backend that h describes.
func Run(t *testing.T, h Harness) {
	s := newSuite(t, h)
	for _, g := range s.groups() {
		s.run(t, g)
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
		s.run(t, all[i])
	}
}

const placeGroup = "place"

// A group is the behaviours of one subject.
type group struct {
	name  string
	needs sandboxer.Capability // "" if it is for every extension
	f     func(*testing.T)
}

// groups are all groups, in the order in which they run.
func (s *suite) groups() []group {
	of := func(c sandboxer.Capability, f func(*testing.T)) group { return group{string(c), c, f} }
	return []group{
		{"core", "", s.core},
		of(sandboxer.CanExec, s.exec),
		of(sandboxer.CanFiles, s.files),
		of(sandboxer.CanArchive, s.archive),
		of(sandboxer.CanDial, s.dial),
		of(sandboxer.CanExpose, s.expose),
		of(sandboxer.CanProbe, s.probe),
		of(sandboxer.CanDiscover, s.discover),
		of(sandboxer.CanList, s.list),
		of(sandboxer.CanSnapshot, s.snapshot),
		of(sandboxer.CanQuote, s.quote),
		of(sandboxer.CanMeter, s.meter),
		of(sandboxer.CanPause, s.pause),
		of(sandboxer.CanRenew, s.renew),
		of(sandboxer.CanCapacity, s.capacity),
		of(sandboxer.CanStats, s.stats),
		of(sandboxer.CanNetwork, s.network),
		of(sandboxer.CanPool, s.pool),
		of(sandboxer.CanCheckpoint, s.checkpoint),
		of(sandboxer.CanAgent, s.agent),
		of(sandboxer.CanProcesses, s.processes),
		of(sandboxer.CanWatch, s.watching),
		of(sandboxer.CanNotify, s.notify),
		{"mounts", "", s.mounts},
		{placeGroup, "", s.places},
		{"hang", "", s.hang},
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
	s := &suite{Harness: h, slots: make(chan struct{}, max(1, h.Parallel))}
	// Closed at once: files that a test finds open at its end are its own.
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
	wire  bool   // only the behaviours of wire run

	// Of the group that runs.
	name    string
	opened  *backend.Backend // for all that does not want another process of the broker
	closed  func()           // closes it
	slots   chan struct{}
	running sync.WaitGroup
}

// run runs a group, if the harness wants its capability. core/capabilities reports a capability of the extension that
// the harness does not want.
func (s *suite) run(t *testing.T, g group) {
	t.Run(g.name, unlessStopped(func(t *testing.T) {
		if g.needs != "" && !slices.Contains(s.Want, g.needs) {
			t.Skipf("the harness does not say that the extension has %s", g.needs)
		}
		s.name = g.name
		s.opened, s.closed = s.closable(t, s.Open(t))
		t.Cleanup(s.closed)
		if g.needs != "" && !s.opened.Can(g.needs) {
			t.Fatalf("the extension lacks %s", g.needs)
		}
		defer s.running.Wait()
		g.f(t)
	}))
}

// test runs a behaviour of the group, concurrently with as many as the harness allows.
func (s *suite) test(t *testing.T, name string, f func(*testing.T)) {
	t.Helper()
	if !s.picked(name) {
		return
	}
	if cap(s.slots) == 1 {
		t.Run(name, unlessStopped(f))
		return
	}
	s.slots <- struct{}{}
	s.running.Go(func() {
		defer func() { <-s.slots }()
		t.Run(name, unlessStopped(f))
	})
}

// alone runs a behaviour of the group while no other runs.
func (s *suite) alone(t *testing.T, name string, f func(*testing.T)) {
	t.Helper()
	s.running.Wait()
	if s.picked(name) {
		t.Run(name, unlessStopped(f))
	}
}

// picked reports whether a behaviour of the group is to run.
func (s *suite) picked(name string) bool {
	return !s.wire || slices.Contains(wire[s.name], name)
}

func (s *suite) enforces(f Feature) bool { return slices.Contains(s.Enforces, f) }

// AtTheEnd is in the suite's message about a sandbox or snapshot that it could not remove.
const AtTheEnd = " at the end: "

// stopped is done once Stop was called.
var stopped, stop = context.WithCancel(context.Background())

// Stop ends the suites of this process early: it cancels the calls under way and skips the tests that have not begun.
// The tests under way remove what they made, as each test does at its end.
func Stop() { stop() }

// unlessStopped is f, which is skipped after Stop.
func unlessStopped(f func(*testing.T)) func(*testing.T) {
	return func(t *testing.T) {
		if stopped.Err() != nil {
			t.Skip("the suite was stopped")
		}
		f(t)
	}
}

// open opens the extension once more, as another process of the broker.
func (s *suite) open(t *testing.T) *backend.Backend {
	t.Helper()
	return s.wrap(t, s.Open(t))
}

func (s *suite) wrap(t *testing.T, ext sandboxer.Extension) *backend.Backend {
	t.Helper()
	b, closed := s.closable(t, ext)
	t.Cleanup(closed)
	return b
}

// closable is wrap for a backend that is closed once closed is called.
func (s *suite) closable(t *testing.T, ext sandboxer.Extension) (b *backend.Backend, closed func()) {
	b = backend.New("ext.conformance", ext, backend.Options{Inputs: s.Inputs, Close: closeTime})
	return b, sync.OnceFunc(func() {
		if err := b.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
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
	sp.Vouched = []string{sandboxer.RestrictedImage, sandboxer.RestrictedHost, sandboxer.RestrictedMounts} // the caller is an operator
	for _, in := range s.Inputs {
		sp.Vouched = append(sp.Vouched, in.Name)
	}
	sp.Fuse = time.Now().Add(time.Hour) // what an aborted run leaves behind is not for ever
	return sp
}

// long is how long the suite waits for events that take moments on an idle machine.
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
	return s.upSpec(t, s.opened, sp)
}

func (s *suite) upSpec(t *testing.T, b *backend.Backend, sp sandboxer.Spec) *sandbox {
	t.Helper()
	s.owe(t, b, sp)
	h, err := b.Provision(ctx(t), sp)
	if s.refusesEnv(t, b, sp, err) {
		t.Skipf("the extension refuses variables: %s", sandboxer.Message(err))
	}
	if err != nil {
		t.Fatalf("Provision(%s): %s", sp.ID, describe(err))
	}
	r, err := b.WaitReady(ctx(t), h)
	if err != nil {
		t.Fatalf("WaitReady(%s): %s", sp.ID, describe(err))
	}
	return &sandbox{s: s, b: b, h: h, reach: r, spec: sp}
}

// refusesEnv reports whether err, of the Provision of sp, refuses the variables of sp: the same request without them succeeds.
func (s *suite) refusesEnv(t *testing.T, b *backend.Backend, sp sandboxer.Spec, err error) bool {
	if !s.MayRefuseEnv || sandboxer.KindOf(err) != sandboxer.Unsupported || maps.Equal(sp.Env, s.Spec.Env) {
		return false
	}
	sp.Env = maps.Clone(s.Spec.Env)
	_, err = b.Provision(ctx(t), sp)
	return err == nil
}

// owe arranges the teardown of sp before it is provisioned: a Provision that fails
// may leave something too.
func (s *suite) owe(t *testing.T, b *backend.Backend, sp sandboxer.Spec) {
	t.Helper()
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
		defer cancel()
		if _, err := b.Teardown(c, sandboxer.Handle{SandboxID: sp.ID, Generation: sp.Generation}); err != nil {
			t.Errorf("Teardown(%s)"+AtTheEnd+"%s", sp.ID, describe(err))
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

// dir returns the absolute path of the sandbox's workspace inside.
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

// alive reports an error unless the sandbox still works.
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

// gone reports an error if anything of sandbox sp is left, by every means the
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
