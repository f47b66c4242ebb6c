package extensiontest

import (
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// memoryLimit is small compared with what a command takes that exceeds it.
const memoryLimit = 128 << 20

// hog is a script that keeps 400 MB in memory: without line ends, the last line
// is all of the input.
const hog = `head -c 400000000 /dev/zero | tail -n 1 | wc -c`

// upLimited makes a sandbox for tests of memory limits.
func (s *suite) upLimited(t *testing.T) *sandbox {
	t.Helper()
	switch {
	case s.enforces(Memory):
		return s.up(t, func(sp *sandboxer.Spec) { sp.Limits.MemoryBytes = memoryLimit })
	case s.OutOfMemory == nil:
		t.Skip("the harness does not list memory in Enforces")
	}
	return s.up(t)
}

// exhaust has a command in sb killed for memory and returns the result of Exec.
func (sb *sandbox) exhaust(t *testing.T) (sandboxer.Exit, error) {
	t.Helper()
	if sb.s.enforces(Memory) {
		// A pipe ends as its last command does; here that is the one that is killed, if
		// the sandbox is not.
		r := sb.start(t, sandboxer.Cmd{Args: sb.s.script(`head -c 400000000 /dev/zero | tail -n 1`)})
		return r.wait(t)
	}
	started, w := io.Pipe()
	defer started.Close()
	r := sb.start(t, sandboxer.Cmd{Stdout: w, Args: sb.s.script("echo started; exec sleep 60")})
	if _, err := started.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	sb.s.OutOfMemory(t, sb.h)
	return r.wait(t)
}

// execMemory is about commands that the memory limit kills.
func (s *suite) execMemory(t *testing.T) {
	s.alone(t, "out of memory", func(t *testing.T) {
		sb := s.upLimited(t)
		x, err := sb.exhaust(t)
		if err != nil {
			t.Fatalf("Exec: %s; want an exit that tells", describe(err))
		}
		if x.Code != 137 || !x.OOMKilled || x.Signal != "" && x.Signal != "KILL" {
			t.Errorf("got %+v; want code 137 and oom_killed", x)
		}
	})
	s.alone(t, "killed within its memory", func(t *testing.T) {
		sb := s.upLimited(t)
		x, _, _ := sb.run(t, sandboxer.Cmd{Args: s.script("kill -KILL $$; sleep 5")})
		if x != (sandboxer.Exit{Code: 137, Signal: "KILL"}) {
			t.Errorf("got %+v", x)
		}
	})
}

// probeMemory tests the remains of a sandbox that used too much memory.
func (s *suite) probeMemory(t *testing.T) {
	sb := s.upLimited(t)
	if !sb.b.Can(sandboxer.CanExec) {
		t.Skip("without exec nothing can be made to use memory")
	}
	if _, err := sb.exhaust(t); err != nil {
		t.Fatal(describe(err))
	}
	// The limit may have killed the command alone.
	want := []sandboxer.Liveness{sandboxer.OOMKilled}
	if s.enforces(Memory) {
		want = append(want, sandboxer.Alive)
	}
	for _, b := range []*sandbox{sb, {b: s.open(t)}} {
		l, err := b.b.IsAlive(ctx(t), sb.h)
		if err != nil || !slices.Contains(want, l) {
			t.Fatalf("IsAlive = %s, %v; want one of %q", l, err, want)
		}
		if l == sandboxer.Alive {
			sb.alive(t)
			continue
		}
		_, err = b.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: s.script("true")})
		wantKind(t, err, "Exec", sandboxer.NotFound)
		if !strings.Contains(sandboxer.Message(err), "memory") {
			t.Errorf("the sandbox died of its memory limit, but the error is %q", sandboxer.Message(err))
		}
	}
	if _, err := sb.b.Teardown(ctx(t), sb.h); err != nil {
		t.Fatal(describe(err))
	}
	if l, err := sb.b.IsAlive(ctx(t), sb.h); err != nil || l != sandboxer.Gone {
		t.Errorf("IsAlive after Teardown = %s, %v; want gone", l, err)
	}
}
