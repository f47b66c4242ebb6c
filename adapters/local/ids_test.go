//go:build linux

package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// ownIDs skips a test if sandboxes cannot have user IDs of their own.
func ownIDs(t *testing.T, e *extension) {
	t.Helper()
	if !e.asRoot {
		t.Skip("an ordinary user has no other user IDs")
	}
	if e.ids.why != nil {
		t.Skip(e.ids.why)
	}
}

// idsOf returns the user and group IDs of a sandbox's processes and their open files on
// this machine, except root's.
func idsOf(t *testing.T, e *extension, h sandboxer.Handle) map[uint32]string {
	t.Helper()
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	pids, err := processTree(b.pid, int(b.c.GoferPid.Load()))
	if err != nil || len(pids) < 2 {
		t.Errorf("processes %v only, %v", pids, err)
	}
	out := map[uint32]string{}
	for _, pid := range pids {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue // it has just ended
		}
		for line := range strings.Lines(string(data)) {
			name, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
			if name != "Uid" && name != "Gid" {
				continue
			}
			for _, f := range strings.Fields(rest) {
				var id uint32
				if _, err := fmt.Sscan(f, &id); err != nil {
					t.Fatal(err)
				}
				if id == 0 {
					t.Errorf("process %d runs as root: %s", pid, line)
				}
				out[id] = fmt.Sprintf("process %d", pid)
			}
		}
		fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, p := range fds {
			to, _ := os.Readlink(p)
			var st unix.Stat_t
			if unix.Stat(p, &st) != nil || !strings.HasPrefix(to, "/") || strings.HasSuffix(to, "/null") {
				continue
			}
			for _, id := range []uint32{st.Uid, st.Gid} {
				if id != 0 {
					out[id] = fmt.Sprintf("%s of process %d", to, pid)
				}
			}
		}
	}
	return out
}

func within(t *testing.T, e *extension, h sandboxer.Handle) uint32 {
	t.Helper()
	rec, err := e.record(h.Ref)
	if err != nil {
		t.Fatal(err)
	}
	if rec.IDBase == 0 {
		t.Fatal("the sandbox has no user IDs of its own")
	}
	ids := idsOf(t, e, h)
	for id, what := range ids {
		if id < rec.IDBase || id-rec.IDBase >= idCount {
			t.Errorf("%s has ID %d; the sandbox's are %d and up", what, id, rec.IDBase)
		}
	}
	if _, ok := ids[rec.IDBase]; !ok {
		t.Errorf("nothing has the sandbox's first ID: %v", ids)
	}
	if to, err := os.Readlink(e.ids.link(rec.IDBase)); err != nil || to != e.dir("box", h.Ref) {
		t.Errorf("the claim of its IDs: %q, %v", to, err)
	}
	// No sandbox can change the files that all share: not even through a file server that
	// its guest controls.
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", b.c.GoferPid.Load()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 5 && strings.Contains(f[3], "/skel/") && !strings.HasPrefix(f[5]+",", "ro,") {
			t.Errorf("its file server can write to %s: %s", f[4], line)
		}
	}
	if !strings.Contains(string(mounts), "/skel/") {
		t.Errorf("the mounts of its file server:\n%s", mounts)
	}
	return rec.IDBase
}

// owners returns the owners of a sandbox's files as seen inside.
const owners = "stat -c '%n %u %g %a' / /etc /etc/passwd /home/user /tmp /workspace /.sandboxer/sandboxer-agent /workspace/mine 2>/dev/null || true"

// TestUserIDsOfItsOwn checks sandboxes from this machine's side: processes and files of one
// have no ID of another's.
func TestUserIDsOfItsOwn(t *testing.T) {
	e := openTest(t)
	ownIDs(t, e)
	const mine = "touch /workspace/mine && chown 1234:4321 /workspace/mine && "
	first, second := up(t, e, sandboxer.Spec{}), up(t, e, sandboxer.Spec{})
	had := map[uint32]string{}
	alone := func(t *testing.T, e *extension, name string, h sandboxer.Handle) uint32 {
		t.Helper()
		base := within(t, e, h)
		if other, ok := had[base]; ok {
			t.Errorf("%s has the IDs of %s, from %d on", name, other, base)
		}
		had[base] = name
		return base
	}
	look := sh(t, e, first, mine+owners)
	for _, want := range []string{"/ 0 0 755", "/home/user 1000 1000 755", "/workspace/mine 1234 4321 644", "/.sandboxer/sandboxer-agent 0 0 755"} {
		if !strings.Contains(look+"\n", want+"\n") {
			t.Errorf("inside, %q is missing in:\n%s", want, look)
		}
	}
	if got := sh(t, e, second, mine+owners); got != look {
		t.Errorf("the second sandbox looks different inside:\n%s", got)
	}
	from := alone(t, e, "the first", first)
	alone(t, e, "the second", second)
	// On this machine a process of one cannot signal the other.
	other, err := e.of(second)
	if err != nil {
		t.Fatal(err)
	}
	kill := exec.Command("/bin/sh", "-c", fmt.Sprintf("kill -0 %d", other.pid))
	kill.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: from, Gid: from}}
	if out, err := kill.CombinedOutput(); err == nil {
		t.Errorf("the first's user can signal the second: %s", out)
	}
	copied := restored(t, e, sandboxer.Spec{}, snapshot(t, e, first))
	alone(t, e, "a copy", copied)
	if got := sh(t, e, copied, owners); got != look {
		t.Errorf("a copy looks different inside:\n%s", got)
	}
	sh(t, e, copied, "chown 77 /workspace/mine && [ $(stat -c %u /workspace/mine) = 77 ] && touch /home/user/new && chown user /home/user/new")
	root := filepath.Join(t.TempDir(), "root")
	data, err := os.ReadFile(busybox(t))
	if err == nil {
		err = os.MkdirAll(filepath.Join(root, "bin"), 0o755)
	}
	for _, n := range []string{"sh", "stat"} {
		if err == nil {
			err = os.WriteFile(filepath.Join(root, "bin", n), data, 0o755)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	image := up(t, e, sandboxer.Spec{Image: "dir:" + root})
	alone(t, e, "one on an image", image)
	if got := sh(t, e, image, "stat -c %u:%g /.sandboxer/pause"); got != "0:0" {
		t.Errorf("on an image the agent's programs belong to %s inside", got)
	}

	// Another broker knows them, even if the list was lost.
	if err := os.Remove(e.ids.link(from)); err != nil {
		t.Fatal(err)
	}
	next := openIn(t, e.env.Dir, e.env.Owner)
	defer next.Close()
	for _, h := range []sandboxer.Handle{first, second, copied, image} {
		within(t, next, h)
	}
	alone(t, next, "one of another broker", up(t, next, sandboxer.Spec{}))

	// Nothing of it remains.
	if _, err := next.Teardown(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(e.ids.link(from)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its IDs are still taken: %v", err)
	}
}

// TestSharedUserIDs: sandboxes of builds with the same IDs for all continue, and are
// restored with IDs of their own; and the other way round.
func TestSharedUserIDs(t *testing.T) {
	e := openTest(t)
	ownIDs(t, e)
	before := openIn(t, e.env.Dir, e.env.Owner)
	before.ids.why = errors.New("as it was")
	defer before.Close()
	h := up(t, before, sandboxer.Spec{})
	const mine = "touch /workspace/mine && chown 1234:4321 /workspace/mine && "
	look := sh(t, before, h, mine+owners)
	if rec, err := e.record(h.Ref); err != nil || rec.IDBase != 0 {
		t.Fatalf("%+v, %v", rec, err)
	}
	if _, ok := idsOf(t, e, h)[idShift]; !ok {
		t.Errorf("its IDs: %v", idsOf(t, e, h))
	}
	if err := e.Pause(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if err := e.Resume(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	own := restored(t, e, sandboxer.Spec{}, snapshot(t, e, h))
	within(t, e, own)
	shared := restored(t, before, sandboxer.Spec{}, snapshot(t, e, own))
	if _, ok := idsOf(t, e, shared)[idShift]; !ok {
		t.Errorf("its IDs: %v", idsOf(t, e, shared))
	}
	for _, h := range []sandboxer.Handle{h, own, shared} {
		if got := sh(t, e, h, owners); got != look {
			t.Errorf("inside:\n%s\nbefore:\n%s", got, look)
		}
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Error(err)
		}
	}
}

// TestUserIDsRunOut: there can be as many sandboxes as ranges; then the error says so.
func TestUserIDsRunOut(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	few := func(c *Config) { c.UIDBase, c.UIDRanges = testUIDBase(), 2 }
	e := openIn(t, dir, ours("test"), few)
	defer e.Close()
	ownIDs(t, e)
	first, _ := up(t, e, sandboxer.Spec{}), up(t, e, sandboxer.Spec{})
	third := sandboxer.Spec{ID: "third", Generation: 1, Owner: e.env.Owner}
	if _, err := e.Provision(t.Context(), third); sandboxer.KindOf(err) != sandboxer.Exhausted || !strings.Contains(sandboxer.HintOf(err), "uid_ranges") {
		t.Errorf("one too many: %v (%s)", err, sandboxer.HintOf(err))
	}
	if _, err := os.Stat(e.dir("box", "third-g1")); err == nil {
		t.Error("something is left of it")
	}
	if _, err := e.Teardown(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	h := up(t, e, sandboxer.Spec{ID: "third"})
	if base := within(t, e, h); base != uint32(testUIDBase()) {
		t.Errorf("its IDs are from %d on", base)
	}
}

// testUIDBase is a range of IDs that most likely only this process tests with.
func testUIDBase() int { return 0x3000_0000 + os.Getpid()%4000*4*idCount }

// TestUserIDRanges: a claimed range has only one owner, whatever has become of others.
func TestUserIDRanges(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("other users' processes need root")
	}
	dir, boxes := t.TempDir(), t.TempDir()
	open := func(count int) *idRanges {
		return &idRanges{dir: filepath.Join(dir, "ids"), base: uint32(testUIDBase()), count: count, mounts: filepath.Join(dir, "box")}
	}
	take := func(r *idRanges, name string) (uint32, error) {
		var got uint32
		box := filepath.Join(boxes, name)
		if err := os.MkdirAll(box, 0o700); err != nil {
			return 0, err
		}
		err := r.take(t.Context(), box, func(base uint32) error { got = base; return nil })
		return got, err
	}
	t.Run("at once", func(t *testing.T) {
		const n = 32
		sized := open
		open := func() *idRanges {
			r := sized(n) // a separate installation
			r.base = 0x2000_0000
			return r
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		seen := map[uint32]string{}
		for i := range n {
			wg.Go(func() {
				name := fmt.Sprint("at-once-", i)
				r := open()
				var base uint32
				box := filepath.Join(boxes, name)
				if err := os.MkdirAll(box, 0o700); err != nil {
					t.Error(err)
				}
				if err := r.take(t.Context(), box, func(b uint32) error { base = b; return nil }); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				if other, ok := seen[base]; ok {
					t.Errorf("%s and %s both have %d", name, other, base)
				}
				seen[base] = name
			})
		}
		wg.Wait()
		if _, err := take(open(), "more"); sandboxer.KindOf(err) != sandboxer.Exhausted {
			t.Errorf("one more: %v", err)
		}
		for base, name := range seen {
			r := open()
			if err := errors.Join(r.giveBack(filepath.Join(boxes, "another"), base), r.giveBackAll(filepath.Join(boxes, "another"))); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(r.link(base)); err != nil {
				t.Errorf("a claim was given back by somebody else: %v", err)
			}
			if err := r.giveBackAll(filepath.Join(boxes, name)); err != nil {
				t.Error(err)
			}
		}
		r := open()
		if got, err := r.claims(); err != nil || len(got) > 0 {
			t.Errorf("left: %v, %v", got, err)
		}
		if r.close(); !errors.Is(unix.Access(r.dir, 0), unix.ENOENT) {
			t.Error("the empty list is left")
		}
	})
	t.Run("not noted", func(t *testing.T) {
		r := open(1)
		cause := errors.New("disk full")
		if err := r.take(t.Context(), boxes, func(uint32) error { return cause }); !errors.Is(err, cause) {
			t.Error(err)
		}
		if got, err := r.claims(); err != nil || len(got) > 0 {
			t.Errorf("claimed: %v, %v", got, err)
		}
	})
	t.Run("of processes that nobody knows", func(t *testing.T) {
		stray := exec.Command("/bin/sleep", "1000")
		stray.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(testUIDBase()), Gid: 7}}
		if err := stray.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			_ = stray.Process.Kill()
			_ = stray.Wait()
		}()
		if base, err := take(open(2), "beside"); err != nil || base != uint32(testUIDBase())+idCount {
			t.Errorf("%d, %v", base, err)
		}
		if _, err := take(open(1), "instead"); sandboxer.KindOf(err) != sandboxer.Exhausted {
			t.Errorf("its user was given away: %v", err)
		}
		if err := open(2).giveBackAll(filepath.Join(boxes, "beside")); err != nil {
			t.Error(err)
		}
	})
	t.Run("of a directory that was removed by hand", func(t *testing.T) {
		if _, err := take(open(1), "old"); err != nil {
			t.Fatal(err)
		}
		if _, err := take(open(1), "new"); sandboxer.KindOf(err) != sandboxer.Exhausted {
			t.Errorf("while it is there: %v", err)
		}
		if err := os.RemoveAll(filepath.Join(boxes, "old")); err != nil {
			t.Fatal(err)
		}
		if _, err := take(open(1), "new"); err != nil {
			t.Error(err)
		}
	})
	t.Run("called off", func(t *testing.T) {
		unlock, err := open(1).lock(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer unlock()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := open(1).take(ctx, boxes, nil); sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Error(err)
		}
	})
}

// TestUserIDsMapped: in a container a server may not have the IDs.
func TestUserIDsMapped(t *testing.T) {
	file := filepath.Join(t.TempDir(), "map")
	for _, tt := range []struct {
		text string
		ok   bool
	}{
		{"         0          0 4294967295\n", true},
		{"0 100000 65536\n", false},
		{"0 5 10\n1000 70000 200000\n", false},
		{"0 5 10\n131072 70000 131072\n", true},
		{"0 5 10\n131072 70000 131071\n", false},
		{"", false},
	} {
		if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := mapped(file, 131072, 2); (err == nil) != tt.ok {
			t.Errorf("%q: %v", tt.text, err)
		}
	}
}

func TestUserIDSettings(t *testing.T) {
	for _, tt := range []struct {
		base, ranges int
		ok           bool
	}{
		{defaultUIDBase, defaultUIDRanges, true},
		{165_536, 10, true},
		{65_536, 1, false},    // those of older sandboxes
		{100_000, 1, false},   // the same
		{165_535, 1, false},   // the last one of these
		{65_536, 2000, false}, // beyond it
		{1 << 31, 32_767, true},
		{1 << 31, 32_768, false}, // the last ID is not valid
	} {
		err := (&Config{UIDBase: tt.base, UIDRanges: tt.ranges}).Validate()
		if (err == nil) != tt.ok || err != nil && sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%d, %d: %v", tt.base, tt.ranges, err)
		}
	}
}
