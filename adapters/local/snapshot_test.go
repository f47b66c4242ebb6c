//go:build linux

package local

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/version"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/images/registrytest"
)

func snapshot(t *testing.T, e *extension, h sandboxer.Handle) sandboxer.Snapshot {
	t.Helper()
	id := "s" + sandboxer.NewID()
	t.Cleanup(func() {
		if err := e.DropSnapshot(context.Background(), sandboxer.Snapshot{SnapshotID: id}); err != nil {
			t.Error(err)
		}
	})
	s, err := e.Snapshot(t.Context(), h, id)
	if err != nil {
		t.Fatalf("Snapshot: %v", err)
	}
	return s
}

// restored makes a sandbox from s that is torn down when the test ends.
func restored(t *testing.T, e *extension, spec sandboxer.Spec, s sandboxer.Snapshot) sandboxer.Handle {
	t.Helper()
	spec.ID, spec.Generation, spec.Owner = sandboxer.NewID(), 1, e.env.Owner
	t.Cleanup(func() {
		if _, err := e.Teardown(context.Background(), sandboxer.Handle{SandboxID: spec.ID, Generation: 1}); err != nil {
			t.Error(err)
		}
	})
	h, err := e.RestoreFromSnapshot(t.Context(), spec, s)
	if err != nil {
		t.Fatalf("RestoreFromSnapshot: %v", err)
	}
	if _, err := e.WaitReady(t.Context(), h); err != nil {
		t.Fatalf("WaitReady: %v", err)
	}
	return h
}

// A busy source: its agent awake, a terminal and a transfer open, a main command. The
// source keeps them all; the copy has the processes, a new connection to its agent, and
// neither the source's streams nor its fuse.
func TestSnapshotOfABusySandbox(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{
		Fuse:    time.Now().Add(10 * time.Minute),
		Command: []string{"sh", "-c", "i=0; while :; do i=$((i+1)); echo $i >/tmp/main.new; mv /tmp/main.new /tmp/main; sleep 0.02; done"},
	})
	in, typed := io.Pipe()
	var screen lockedBuffer
	ended := make(chan error, 1)
	go func() {
		_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdin: in, Stdout: &screen})
		ended <- err
	}()
	shows := func(what string) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !strings.Contains(screen.String(), what); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("the terminal does not show %q: %q", what, screen.String())
			}
		}
	}
	_, _ = io.WriteString(typed, "echo be''fore\n")
	shows("before")
	s := snapshot(t, e, h)
	_, _ = io.WriteString(typed, "echo af''ter\n")
	shows("after")

	count := func(h sandboxer.Handle) int {
		n, _ := strconv.Atoi(sh(t, e, h, "cat /tmp/main"))
		return n
	}
	copied := restored(t, e, sandboxer.Spec{Fuse: time.Now().Add(time.Hour)}, s)
	first := count(copied)
	if first == 0 {
		t.Error("the main command's file is empty")
	}
	for deadline := time.Now().Add(time.Minute); count(copied) <= first; {
		if time.Now().After(deadline) {
			t.Fatal("the main command does not go on in the copy")
		}
	}
	for range 3 {
		if _, err := e.StatFile(t.Context(), copied, "/etc/passwd"); err != nil {
			t.Errorf("the copy's agent: %v", err)
		}
	}
	_, _ = io.WriteString(typed, "exit\n")
	if err := <-ended; err != nil {
		t.Errorf("the source's terminal: %v", err)
	}
	if first := count(h); count(h) < first {
		t.Error("the main command does not go on in the source")
	}
}

// A copy made long after the fuse of its source lives until its own fuse.
func TestRestoreAfterTheFuse(t *testing.T) {
	t.Parallel()
	e := openTest(t)
	for _, awake := range []bool{false, true} {
		t.Run(fmt.Sprintf("awake=%t", awake), func(t *testing.T) {
			t.Parallel()
			h := up(t, e, sandboxer.Spec{Fuse: time.Now().Add(15 * time.Second)}) // it must be saved before, even on a busy machine
			if awake {
				if _, err := e.StatFile(t.Context(), h, "/"); err != nil {
					t.Fatal(err)
				}
			}
			s := snapshot(t, e, h)
			gone := func(what string, h sandboxer.Handle) {
				for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
					if l, _ := e.IsAlive(t.Context(), h); l == sandboxer.Gone {
						return
					}
					if time.Now().After(end) {
						t.Fatalf("%s outlives its fuse", what)
					}
				}
			}
			gone("the source", h)
			copied := restored(t, e, sandboxer.Spec{Fuse: time.Now().Add(time.Hour)}, s)
			// Its grace period begins later than that of the first.
			gone("another copy", restored(t, e, sandboxer.Spec{Fuse: time.Now().Add(time.Second)}, s))
			if l, err := e.IsAlive(t.Context(), copied); l != sandboxer.Alive {
				t.Errorf("the copy is %s, %v", l, err)
			}
		})
	}
}

// An image's sandbox, with a network, restored twice by another process.
func TestSnapshotOfAnImage(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	reg := registrytest.New(t)
	ref := reg.Push(t, "x:1", appImage(t, v1.Config{Env: []string{"PATH=/bin", "FROM_IMAGE=yes"}}))
	e := openImages(t, dir, nil)
	public := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}
	h := up(t, e, sandboxer.Spec{Image: ref, Network: public, Limits: sandboxer.Limits{DiskBytes: 64 << 20}})
	sh(t, e, h, "echo kept >/kept; (sleep 1000 >/dev/null 2>&1 &)")
	s := snapshot(t, e, h)
	other := openImages(t, dir, nil)
	for range 2 {
		copied := restored(t, other, sandboxer.Spec{Network: public, Limits: sandboxer.Limits{DiskBytes: 64 << 20}, Env: map[string]string{"NEW": "1"}}, s)
		if got := sh(t, other, copied, "cat /kept; echo $FROM_IMAGE $NEW; ip -4 addr show 2>/dev/null | grep -c 10.0.2 || true; pgrep sleep | wc -l"); !strings.HasPrefix(got, "kept\nyes 1") {
			t.Errorf("the copy says %q", got)
		}
	}
	if used, err := other.imagesInUse(); err != nil || len(used) != 1 {
		t.Errorf("images in use: %v, %v", used, err)
	}
}

func TestDamagedSnapshot(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	s := snapshot(t, e, h)
	files, err := filepath.Glob(e.dir("snapshot", s.SnapshotID, "image", "*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	receipt := e.dir("snapshot", s.SnapshotID, receiptFile)
	for _, name := range append(files, e.dir("snapshot", s.SnapshotID, savedFile), receipt) {
		was, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if len(was) == 0 {
			continue
		}
		spoilt := bytes.Clone(was)
		at := len(spoilt) / 2
		if name == receipt { // a digest in it, which is still valid JSON
			at = bytes.Index(spoilt, []byte(`"sha256":"`)) + len(`"sha256":"`)
			if spoilt[at]++; spoilt[at] > 'f' || spoilt[at] == '9'+1 {
				spoilt[at] = '0'
			}
		} else {
			spoilt[at] ^= 1
		}
		if err := os.WriteFile(name, spoilt, 0o600); err != nil {
			t.Fatal(err)
		}
		spec := sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: e.env.Owner}
		_, err = e.RestoreFromSnapshot(t.Context(), spec, s)
		if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), "damaged") {
			t.Errorf("%s spoilt: %v", filepath.Base(name), err)
		}
		if _, err := e.Discover(t.Context(), spec.ID); sandboxer.KindOf(err) != sandboxer.NotFound {
			t.Errorf("%s spoilt: something is left: %v", filepath.Base(name), err)
		}
		if err := os.WriteFile(name, was, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	restored(t, e, sandboxer.Spec{}, s)
	for _, l := range []sandboxer.Limits{{DiskBytes: 1 << 30}, {PIDs: 100}} {
		_, err := e.RestoreFromSnapshot(t.Context(), sandboxer.Spec{ID: "x", Generation: 1, Owner: e.env.Owner, Limits: l}, s)
		if e.cgroups.usable() && sandboxer.KindOf(err) != sandboxer.Unsupported {
			t.Errorf("with other limits (%+v): %v", l, err)
		}
	}
}

// A hundred times frozen and thawed, half of them with the broker's steps interrupted: no
// write is lost, and none happens meanwhile.
func TestFreezeAndThaw(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{Fuse: time.Now().Add(time.Hour)})
	sh(t, e, h, `(i=0; while :; do i=$((i+1)); echo $i >>/tmp/log; done) >/dev/null 2>&1 &`)
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if err := e.Pause(t.Context(), h); err != nil {
			t.Fatalf("round %d: Pause: %v", i, err)
		}
		if i%40 == 1 { // as if the broker had died before it recorded the end of the step
			if err := e.setFrozen(b.name, []string{stepFreezing, stepThawing}[i/40%2]); err != nil {
				t.Fatal(err)
			}
			if err := e.Pause(t.Context(), h); err != nil {
				t.Fatal(err)
			}
		}
		if i%10 == 0 {
			if err := e.Renew(t.Context(), h, time.Now().Add(2*time.Hour)); err != nil {
				t.Fatal(err)
			}
			if _, err := e.ReadFile(t.Context(), h, "/tmp/log"); sandboxer.KindOf(err) != sandboxer.Conflict {
				t.Errorf("a file of a frozen sandbox: %v", err)
			}
			if _, err := e.Stats(t.Context(), h); err != nil {
				t.Error(err)
			}
		}
		if err := e.Resume(t.Context(), h); err != nil {
			t.Fatalf("round %d: Resume: %v", i, err)
		}
		if i%10 == 2 {
			if err := e.setFrozen(b.name, stepThawing); err != nil {
				t.Fatal(err)
			}
			if err := e.Resume(t.Context(), h); err != nil {
				t.Fatal(err)
			}
		}
	}
	got := sh(t, e, h, `i=0; while [ $((i += 1)) -le 1000 ] && [ $(wc -l </tmp/log) -lt 100 ]; do sleep 0.01; done; kill $(pgrep -f 'while [:]' | grep -v $$); sleep 0.2; awk '{ if ($1 != NR) { print "line " NR " is " $1; exit } } END { print NR }' /tmp/log`)
	if n, err := strconv.Atoi(got); err != nil || n < 100 {
		t.Errorf("the log says %q", got)
	}
}

// A hundred times to disk and back, as the broker pauses: frozen, saved, torn down, and
// restored as the next generation. A process that never stops writing loses nothing.
func TestToDiskAndBack(t *testing.T) {
	e := openTest(t)
	id := sandboxer.NewID()
	h := up(t, e, sandboxer.Spec{ID: id, Fuse: time.Now().Add(time.Hour)})
	sh(t, e, h, `(i=0; while :; do i=$((i+1)); echo $i >>/tmp/log; sleep 0.002; done) >/dev/null 2>&1 &`)
	rounds := 100
	if testing.Short() {
		rounds = 10
	}
	for i := range rounds {
		if err := e.Pause(t.Context(), h); err != nil {
			t.Fatalf("round %d: Pause: %v", i, err)
		}
		s, err := e.Snapshot(t.Context(), h, "s"+sandboxer.NewID())
		if err != nil {
			t.Fatalf("round %d: Snapshot: %v", i, err)
		}
		if _, err := e.Teardown(t.Context(), h); err != nil {
			t.Fatalf("round %d: Teardown: %v", i, err)
		}
		h, err = e.RestoreFromSnapshot(t.Context(), sandboxer.Spec{ID: id, Generation: i + 2, Owner: e.env.Owner, Fuse: time.Now().Add(time.Hour)}, s)
		if err != nil {
			t.Fatalf("round %d: RestoreFromSnapshot: %v", i, err)
		}
		defer func() {
			if _, err := e.Teardown(context.Background(), sandboxer.Handle{SandboxID: id, Generation: i + 2}); err != nil {
				t.Error(err)
			}
		}()
		if _, err := e.WaitReady(t.Context(), h); err != nil {
			t.Fatalf("round %d: WaitReady: %v", i, err)
		}
		if err := e.DropSnapshot(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	// It may not have written a line in every round, but continues.
	got := sh(t, e, h, fmt.Sprintf(`i=0; while [ $((i += 1)) -le 1000 ] && [ $(wc -l </tmp/log) -lt %d ]; do sleep 0.01; done
awk '{ if ($1 != NR) { print "line " NR " is " $1; exit } } END { print NR }' /tmp/log`, rounds))
	if n, err := strconv.Atoi(got); err != nil || n < rounds {
		t.Errorf("the log says %q", got)
	}
	if snapshots, _ := os.ReadDir(e.dir("snapshot")); len(snapshots) > 0 {
		t.Errorf("left: %v", snapshots)
	}
}

// A frozen sandbox stays frozen after its snapshot.
func TestSnapshotOfAFrozenSandbox(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	sh(t, e, h, "echo kept >kept")
	if err := e.Pause(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	s := snapshot(t, e, h)
	if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}}); sandboxer.KindOf(err) != sandboxer.Conflict {
		t.Errorf("exec in the frozen source: %v", err)
	}
	if got := sh(t, e, restored(t, e, sandboxer.Spec{}, s), "cat kept"); got != "kept" {
		t.Errorf("the copy says %q", got)
	}
	if err := e.Resume(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, e, h, "cat kept"); got != "kept" {
		t.Errorf("the source says %q", got)
	}
}

// lockedBuffer can be written during a read.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A snapshot has its root after the last sandbox is gone, its server has stopped, and
// another build with another agent has started.
func TestSavedRootStays(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	e := openIn(t, dir, ours("test"))
	h := up(t, e, sandboxer.Spec{})
	sh(t, e, h, "echo kept >/workspace/f")
	s, err := e.Snapshot(t.Context(), h, "saved")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(filepath.Join(helpers, "sandboxer-agent"))
	if err != nil {
		t.Fatal(err)
	}
	newer := filepath.Join(t.TempDir(), "sandboxer-agent")
	if err := os.WriteFile(newer, append(program, "another build"...), 0o755); err != nil {
		t.Fatal(err)
	}
	e = openIn(t, dir, ours("test"), func(c *Config) { c.Agent = newer })
	defer e.Close()
	spec := sandboxer.Spec{ID: sandboxer.NewID(), Generation: 1, Owner: e.env.Owner}
	copied, err := e.RestoreFromSnapshot(t.Context(), spec, s)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := e.Teardown(context.Background(), copied); err != nil {
			t.Error(err)
		}
	}()
	if got := sh(t, e, copied, "cat /workspace/f"); got != "kept" {
		t.Errorf("the copy has %q", got)
	}
	if err := e.DropSnapshot(t.Context(), s); err != nil {
		t.Error(err)
	}
}

// A start reports what this program's gVisor cannot restore.
func TestOtherVersionsAreTold(t *testing.T) {
	e := &extension{env: sandboxer.Env{Dir: t.TempDir()}}
	for id, v := range map[string]string{"old1": "v0-old", "old2": "v0-old", "same": version.Version()} {
		if err := os.MkdirAll(e.dir("snapshot", id), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := writeDurably(e.dir("snapshot", id, receiptFile), receipt{Snapshot: sandboxer.Snapshot{SnapshotID: id, Meta: map[string]string{"gvisor": v}}}); err != nil {
			t.Fatal(err)
		}
	}
	for name, r := range map[string]record{
		"a-g1": {SandboxID: "a", Generation: 1, GVisor: "v0-old"}, "b-g1": {SandboxID: "b", Generation: 1, GVisor: version.Version()},
		"c-g1": {SandboxID: "c", Generation: 1}, // of an earlier build, which had today's version
	} {
		if err := os.MkdirAll(e.dir("box", name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := e.writeRecord(name, r); err != nil {
			t.Fatal(err)
		}
	}
	got := e.otherVersions()
	if len(got) != 2 || !strings.Contains(got[0], ": 2; to keep them") || !strings.Contains(got[0], "gVisor v0-old") || !strings.Contains(got[0], "start the program that saved them") ||
		!strings.Contains(got[1], "sandboxes that gVisor v0-old runs") || !strings.Contains(got[1], ": 1; they continue to run") || !strings.Contains(got[1], "--portable") {
		t.Errorf("it says %q", got)
	}
	if again := e.Notices(t.Context()); !slices.Equal(again, got) {
		t.Errorf("its notices are %q", again)
	}
}

// A snapshot of a build that did not record the spec gets what such builds had.
func TestSavedByFormerBuilds(t *testing.T) {
	for text, want := range map[string]int{
		// As commits 069dcec and 8c597fc wrote it.
		`{"record":{"owner":"o","sandbox_id":"x","generation":1,"skeleton":"0123456789abcdef","network":{},"limits":{},"workspace":"/workspace","ready":true},"args":["/.sandboxer/pause","0","/.sandboxer/sandboxer-agent","init","--listen","donate:/.sandboxer/agent.sock"],"shown":["/usr"]}`:                  12,
		`{"record":{"owner":"o","sandbox_id":"x","generation":1,"skeleton":"0123456789abcdef","network":{},"limits":{},"workspace":"/workspace","ready":true},"args":["/.sandboxer/pause","0","/.sandboxer/sandboxer-agent","init","--above-limits","--listen","donate:/.sandboxer/agent.sock"],"shown":["/usr"]}`: 13,
	} {
		name := filepath.Join(t.TempDir(), savedFile)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var s saved
		if err := readJSON(name, &s); err != nil {
			t.Fatal(err)
		}
		spec := &specs.Spec{Process: &specs.Process{Env: []string{"A=b"}}, Mounts: []specs.Mount{{Destination: "/proc"},
			{Destination: "/dev/shm", Type: "tmpfs", Options: []string{"mode=1777", "size=1"}}, {Destination: "/sys/fs/cgroup", Type: "cgroup"}}}
		if err := s.dress(spec, &skeleton{root: "/r"}); err != nil {
			t.Fatal(err)
		}
		if got := spec.Process.Capabilities.Bounding; len(got) != want || len(spec.Process.Args) != len(s.Args) || len(spec.Mounts) != 2 || spec.Mounts[1].Options[1] != "size=67108864" {
			t.Errorf("%q, %+v; want %d", got, spec.Process, want)
		}
	}
	// Since then the spec is recorded: mounts at their present places, and nothing that does not
	// exist.
	s := saved{Args: []string{"a"}}
	s.keep(&specs.Spec{
		Process: &specs.Process{Env: []string{"SECRET=x"}, Cwd: "/was", Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}}},
		Mounts:  []specs.Mount{{Destination: "/usr", Type: "bind", Source: "/old/usr", Options: []string{"ro"}}, {Destination: "/dev/shm", Type: "tmpfs", Options: []string{"size=1"}}},
	})
	if data, err := json.Marshal(s); err != nil || bytes.Contains(data, []byte("SECRET")) {
		t.Errorf("%s, %v", data, err)
	}
	spec := &specs.Spec{Process: &specs.Process{Env: []string{"A=b"}, Capabilities: &specs.LinuxCapabilities{}}, Mounts: []specs.Mount{{Destination: "/dev/shm", Type: "tmpfs"}}}
	if err := s.dress(spec, &skeleton{root: "/r", shown: []string{"/usr"}}); err != nil {
		t.Fatal(err)
	}
	if p := spec.Process; p.Cwd != "/was" || p.Env[0] != "A=b" || p.Capabilities.Bounding[0] != "CAP_KILL" || spec.Mounts[0].Source != "/usr" || spec.Mounts[1].Options[0] != "size=1" {
		t.Errorf("%+v %+v", spec.Process, spec.Mounts)
	}
	s.Mounts[0].Destination = "/strange"
	if err := s.dress(spec, &skeleton{root: "/r"}); sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Errorf("a mount that is not given: %v", err)
	}
}

// TestStoredFilesAreUnambiguous: a record is read as it was meant or not at all; additions
// of a newer version are ignored.
func TestStoredFilesAreUnambiguous(t *testing.T) {
	var log bytes.Buffer
	e := &extension{env: sandboxer.Env{Dir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil))}}
	name := boxName("x", 1)
	if err := os.MkdirAll(e.dir("box", name), 0o700); err != nil {
		t.Fatal(err)
	}
	readers := map[string]func() (owner string, err error){
		e.dir("box", name, recordFile): func() (string, error) {
			r, err := e.record(name)
			return r.Owner, err
		},
		e.dir("box", name, savedFile): func() (string, error) {
			var s struct {
				Owner string `json:"owner"`
			}
			err := readJSON(e.dir("box", name, savedFile), &s)
			return s.Owner, err
		},
	}
	for file, read := range readers {
		for text, ok := range map[string]bool{
			`{"owner":"a","network":{}}`:                       true,
			`{"owner":"a","since":{"then":1},"network":{}}`:    true,
			`{"owner":"a","owner":"b","network":{}}`:           false,
			`{"owner":"a","Owner":"b","network":{}}`:           false,
			`{"owner":"a","since":{"then":1,"then":2}}`:        false,
			`{"owner":"a","network":{}}{"owner":"b"}`:          false,
			`{"owner":"a","network":{}`:                        false,
			`{"owner":"a","limits":{"memory_bytes":1e400}}`:    file != e.dir("box", name, recordFile),
			`{"OWNER":"a","network":{},"limits":{"pids":"x"}}`: false,
		} {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if owner, err := read(); (err == nil) != ok || ok && owner != "a" {
				t.Errorf("%s with %s: %q, %v", filepath.Base(file), text, owner, err)
			}
		}
	}
	if got := log.String(); strings.Count(got, "WARN") != 1 || !strings.Contains(got, "since") {
		t.Errorf("of what a newer version wrote it says %s", got)
	}
}

// Unfinished and damaged snapshots are listed as such.
func TestListUnfinishedSnapshots(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	for _, id := range []string{"begun", "torn", "whole"} {
		if _, err := e.Snapshot(t.Context(), h, id); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(e.dir("snapshot", "begun", receiptFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(e.dir("snapshot", "torn", savedFile), 10); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(e.dir("snapshot", "Not one of ours"), 0o700); err != nil {
		t.Fatal(err)
	}
	got := map[string]sandboxer.FoundSnapshot{}
	for f, err := range e.ListSnapshots(t.Context(), e.env.Owner) {
		if err != nil {
			t.Fatal(err)
		}
		got[f.Snapshot.SnapshotID] = f
	}
	if len(got) != 3 {
		t.Errorf("listed are %v", got)
	}
	if f := got["whole"]; !f.Whole || f.SandboxID != h.SandboxID || f.Snapshot.Bytes == 0 {
		t.Errorf("the whole one is %+v", f)
	}
	if f := got["begun"]; f.Whole || f.SandboxID != h.SandboxID || f.Snapshot.Bytes != 0 {
		t.Errorf("the begun one is %+v", f)
	}
	if f := got["torn"]; f.Whole || f.SandboxID != "" {
		t.Errorf("the torn one is %+v", f)
	}
}
