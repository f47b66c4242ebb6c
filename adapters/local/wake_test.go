//go:build linux

package local

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// TestFuseOfTheAgent: the agent, which starts when it is needed, starts with the sandbox's
// current fuse, not with that of its create.
func TestFuseOfTheAgent(t *testing.T) {
	t.Parallel()
	e := openTest(t)
	wake := func(t *testing.T, h sandboxer.Handle, want int64) {
		t.Helper()
		if _, err := e.StatFile(t.Context(), h, "/"); err != nil {
			t.Fatal(err)
		}
		args := strings.Split(sh(t, e, h, `tr '\0' '\n' </proc/1/cmdline`), "\n")
		i := slices.Index(args, "--fuse")
		if args[0] != agentPath || i < 0 || i+1 == len(args) {
			t.Fatalf("the first process is %q", args)
		}
		if got, err := strconv.ParseInt(args[i+1], 10, 64); err != nil || got != want {
			t.Errorf("the agent began with the fuse %q, want %d", args[i+1], want)
		}
	}
	soon, later := time.Now().Add(time.Hour), time.Now().Add(24*time.Hour)
	t.Run("as created", func(t *testing.T) {
		wake(t, up(t, e, sandboxer.Spec{Fuse: later}), later.Unix())
		wake(t, up(t, e, sandboxer.Spec{}), 0)
	})
	t.Run("extended", func(t *testing.T) {
		h := up(t, e, sandboxer.Spec{Fuse: soon})
		if err := e.Renew(t.Context(), h, later); err != nil {
			t.Fatal(err)
		}
		wake(t, h, later.Unix())
	})
	t.Run("paused and resumed", func(t *testing.T) {
		h := up(t, e, sandboxer.Spec{Fuse: soon})
		if err := e.Pause(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		if err := e.Renew(t.Context(), h, later); err != nil {
			t.Fatal(err)
		}
		if err := e.Resume(t.Context(), h); err != nil {
			t.Fatal(err)
		}
		wake(t, h, later.Unix())
	})
	t.Run("restored", func(t *testing.T) {
		s := snapshot(t, e, up(t, e, sandboxer.Spec{Fuse: soon}))
		wake(t, restored(t, e, sandboxer.Spec{Fuse: later}, s), later.Unix())
	})
	// The agent of an older build's snapshot has the fuse of its create among its arguments:
	// it gets the current one.
	t.Run("of an older build", func(t *testing.T) {
		h := up(t, e, sandboxer.Spec{Fuse: later})
		b, err := e.of(h)
		if err != nil {
			t.Fatal(err)
		}
		args := &b.c.Spec.Process.Args
		*args = slices.DeleteFunc(slices.Clone(*args), func(a string) bool { return a == handedOn })
		b.mu.Lock()
		b.fuse = time.Now().Add(-time.Hour) // shows that it was sent
		b.mu.Unlock()
		_, _ = e.StatFile(t.Context(), h, "/")
		for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
			if l, _ := e.IsAlive(t.Context(), h); l == sandboxer.Gone {
				break
			}
			if time.Now().After(end) {
				t.Fatal("its agent was not told its fuse")
			}
		}
	})
}

// TestStarved: if the machine is paused while the agent starts, the wait continues as if no
// time had passed.
func TestStarved(t *testing.T) {
	t.Parallel()
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	b.pulse.mu.Lock()
	b.pulse.every = time.Minute // the pause is not to count as a missing answer
	b.pulse.mu.Unlock()
	sh(t, e, h, "kill -STOP 1")
	found := make(chan error, 1)
	go func() {
		_, err := e.StatFile(t.Context(), h, "/")
		found <- err
	}()
	waiting := func() bool {
		return sh(t, e, h, `pgrep -f "^`+agentPath+` donate" || true`) != ""
	}
	for end := time.Now().Add(time.Minute); !waiting(); {
		if time.Now().After(end) {
			t.Fatal("nobody waits for the agent")
		}
	}
	goOn := halt(t, b)
	time.Sleep(12 * time.Second) // longer than any deadline
	goOn()                       // the kernel inside passes this on to its first process
	if err := <-found; err != nil {
		t.Errorf("StatFile: %v", err)
	}
}

// TestManySignals: the signal that starts the agent may arrive again and again while it
// starts.
func TestManySignals(t *testing.T) {
	e := openTest(t)
	for range 3 {
		h := up(t, e, sandboxer.Spec{})
		b, err := e.of(h)
		if err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); sh(t, e, h, "cut -d' ' -f3 /proc/1/stat") != "S"; { // the first one is the test's, and may arrive too early
			if time.Now().After(end) {
				t.Fatal("its first process does not wait")
			}
		}
		ended, found := make(chan struct{}), make(chan error, 1)
		for _, sig := range []unix.Signal{unix.SIGUSR1, unix.SIGUSR2} {
			go func() {
				for {
					select {
					case <-ended:
						return
					default:
						_ = b.signal(t.Context(), 1, sig)
					}
				}
			}()
		}
		go func() {
			_, err := e.StatFile(t.Context(), h, "/")
			found <- err
		}()
		if err := <-found; err != nil {
			t.Errorf("StatFile: %v", err)
		}
		close(ended)
		if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Alive {
			t.Errorf("it is %s, %v", l, err)
		}
	}
}
