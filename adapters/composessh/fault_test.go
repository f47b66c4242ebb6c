package composessh

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// afar puts a relay between the installation and its only host.
func (r *rig) afar(t *testing.T) *sshtest.Relay {
	t.Helper()
	relay := sshtest.NewRelay(t, r.servers[0].Port, 0)
	reg := sshrun.NewRegistry(r.hosts)
	rec, err := reg.Host("host-1")
	if err != nil {
		t.Fatal(err)
	}
	rec.Port = relay.Port
	if err := reg.Put(rec); err != nil {
		t.Fatal(err)
	}
	return relay
}

// A connection that is cut, at whatever step, leaves what the same order finishes, and
// what a teardown by ID alone removes.
func TestConnectionCut(t *testing.T) {
	r := newRig(t, current(t), 1)
	relay := r.afar(t)
	e := r.opened(t, "test")
	files := map[string]string{}
	for i := range 200 {
		files[fmt.Sprintf("src/%d", i)] = strings.Repeat("x", i)
	}
	dir := repo(t, web, files)
	begun := time.Now()
	h, _ := provision(t, e, order("whole", dir))
	took := time.Since(begun)
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	const cuts = 6
	failed := 0
	for i := range cuts {
		s := order(fmt.Sprintf("cut-%d", i), dir)
		teardown(t, e, s.ID)
		done := make(chan error, 1)
		go func() {
			_, err := e.Provision(t.Context(), s)
			done <- err
		}()
		var err error
		select {
		case <-time.After(took * time.Duration(2*i+1) / (2 * cuts)):
			relay.Cut()
			select {
			case err = <-done:
			case <-time.After(time.Minute):
				t.Fatalf("cut %d: Provision hangs", i)
			}
		case err = <-done:
		}
		if err != nil {
			failed++
			t.Logf("cut %d: %v", i, err)
			if k := sandboxer.KindOf(err); k != sandboxer.Unavailable {
				t.Errorf("cut %d: the kind of %v is %q", i, err, k)
			}
		}
		if i%2 == 0 {
			h, err := e.Provision(t.Context(), s)
			if err == nil {
				_, err = e.WaitReady(t.Context(), h)
			}
			if err != nil {
				t.Errorf("cut %d: once more: %v", i, err)
			} else if got := get(t, e, h, 8080, "hello"); got != "hello world" {
				t.Errorf("cut %d: %q", i, got)
			}
		}
		if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); err != nil {
			t.Errorf("cut %d: Teardown: %v", i, err)
		}
		if left := r.remains(t, "test"); len(left) > 0 {
			t.Fatalf("cut %d: left behind: %q", i, left)
		}
	}
	if failed == 0 {
		t.Error("no cut was noticed")
	}
}

// A host that does not answer is not one whose sandboxes are gone. What was begun there
// is owed, also by a process that was not there, until the host is back.
func TestHostAway(t *testing.T) {
	r := newRig(t, current(t), 1)
	relay := r.afar(t)
	e := r.opened(t, "test")
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
	if _, err := e.Provision(c, begun); err == nil {
		t.Fatal("Provision succeeded on a host that fell silent")
	}
	relay.Cut()

	// Days later, another process.
	e2 := r.opened(t, "test")
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
	for _, err := range e2.ListRunning(short(), "test") {
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
	for h, err := range e2.ListRunning(t.Context(), "test") {
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
	if left := r.remains(t, "test"); len(left) > 0 {
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
	ext, err := open(ctx, sandboxer.Env{Extension: "ext.test", Owner: a.Owner, Dir: a.Dir, Hosts: a.Hosts}, a.Config)
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		s := order(sandboxer.NewID(), a.Repo)
		s.Owner = a.Owner
		h, err := ext.Provision(ctx, s)
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
	left = slices.DeleteFunc(left, func(s string) bool { return strings.HasSuffix(s, ".lock") || strings.HasSuffix(s, ".new") })
	// What was written down for a host that never heard of it goes with its record.
	for _, f := range slices.Clone(left) {
		if id, g, ok := e.split(filepath.Base(f)); ok && filepath.Dir(f) == filepath.Join(r.dir, "killed", "placed") {
			if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: id, Generation: g}); err != nil {
				t.Error(err)
			}
		}
	}
	if left = slices.DeleteFunc(left, func(f string) bool { _, err := os.Lstat(f); return filepath.IsAbs(f) && err != nil }); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// Sandboxes go where most room is, and nowhere else than asked.
func TestSeveralHosts(t *testing.T) {
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
	e := r.opened(t, "test")
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
	_, err := e.Provision(t.Context(), more)
	kind(t, err, sandboxer.Exhausted)
	more.Host = "small"
	_, err = e.Provision(t.Context(), more)
	kind(t, err, sandboxer.Exhausted)
	more.Host = "unknown"
	_, err = e.Provision(t.Context(), more)
	kind(t, err, sandboxer.Invalid, "unknown", "large, small")

	// Found by its ID alone, on whichever it is, by another process in another place.
	e2 := r.opened(t, "test")
	e2.env.Dir = t.TempDir()
	if err := os.Mkdir(filepath.Join(e2.env.Dir, "placed"), 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if _, err := e2.Teardown(t.Context(), sandboxer.Handle{SandboxID: fmt.Sprintf("spread-%d", i)}); err != nil {
			t.Fatal(err)
		}
		if l, err := e2.IsAlive(t.Context(), sandboxer.Handle{SandboxID: fmt.Sprintf("spread-%d", i)}); l != sandboxer.Gone || err != nil {
			t.Errorf("IsAlive = %s, %v", l, err)
		}
	}
	change("large", func(rec *sshrun.Record) { rec.State = sshrun.Draining })
	for h := range e.ListRunning(t.Context(), "test") {
		if h.SandboxID != "spread-2" {
			t.Errorf("%s is listed", h.SandboxID)
		}
	}
	more.Host = "large"
	_, err = e.Provision(t.Context(), more)
	kind(t, err, sandboxer.Exhausted)
}

// Many sandboxes of one repository run side by side on one host.
func TestSideBySide(t *testing.T) {
	r := newRig(t, current(t), 1)
	e := r.opened(t, "test")
	dir := repo(t, web, nil)
	const n = 4
	handles := make([]sandboxer.Handle, n)
	var wg sync.WaitGroup
	for i := range n {
		s := order(fmt.Sprintf("side-%d", i), dir)
		s.Env["WHO"] = s.ID
		teardown(t, e, s.ID)
		wg.Go(func() {
			h, err := e.Provision(t.Context(), s)
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
	if left := r.remains(t, "test"); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// A host without room on its disk is said to be that, and keeps nothing of the try.
func TestDiskFull(t *testing.T) {
	r := newRig(t, current(t), 1)
	small := t.TempDir()
	if err := syscall.Mount("tmpfs", small, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("a small file system cannot be mounted: %v", err)
	}
	t.Cleanup(func() { syscall.Unmount(small, syscall.MNT_DETACH) })
	r.cfg.Root = filepath.Join(small, "root")
	e := r.opened(t, "test")
	s := order("full", repo(t, single, map[string]string{"large": strings.Repeat("large", 1<<20)}))
	_, err := e.Provision(t.Context(), s)
	kind(t, err, sandboxer.Exhausted, "disk", "host-1")
	if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: s.ID}); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(r.cfg.Root + "/sbx-*"); len(left) > 0 || len(r.remains(t, "test")) > 0 {
		t.Errorf("left behind: %q, %q", left, r.remains(t, "test"))
	}
}
