//go:build linux

package local

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/procs/procstest"
)

// halt stops the kernel of h's sandbox, until the test ends or goOn is called.
func halt(t *testing.T, b *liveSandbox) (goOn func()) {
	t.Helper()
	return procstest.Stop(t, b.pid)
}

// hasty makes the sandbox of h count as unresponsive soon.
func hasty(t *testing.T, e *extension, h sandboxer.Handle) *liveSandbox {
	t.Helper()
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	b.pulse.mu.Lock()
	defer b.pulse.mu.Unlock()
	b.pulse.every, b.pulse.patience = 500*time.Millisecond, time.Second
	return b
}

// patient reverts that: answers may take their time on a busy machine.
func patient(b *liveSandbox) {
	b.pulse.mu.Lock()
	defer b.pulse.mu.Unlock()
	b.pulse.every, b.pulse.patience = pulseEvery, commandPatience
}

// allEnd makes calls at once. Each must end soon, as unavailable or with an accepted error.
func allEnd(t *testing.T, calls map[string]func(context.Context) error, may func(error) bool) {
	t.Helper()
	ended := make(chan struct{}, len(calls))
	for name, call := range calls {
		go func() {
			if err := call(t.Context()); !may(err) && !errors.Is(err, sandboxer.Unavailable) {
				t.Errorf("%s: %v", name, err)
			}
			ended <- struct{}{}
		}()
	}
	open := len(calls)
	for late := time.After(2 * time.Minute); open > 0; open-- {
		select {
		case <-ended:
		case <-late:
			t.Fatalf("%d calls have no end", open)
		}
	}
}

// A command ends when its caller says so, even if the sandbox's file server does not answer, and if the program that
// ends commands does not end itself.
func TestTimeCountsWithoutFiles(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	defer procstest.Stop(t, int(b.c.GoferPid.Load()))()
	b.killers <- struct{}{} // as if a program that ends commands waited for its file
	b.killers <- struct{}{}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	begun := time.Now()
	_, err = e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "ls -R /usr; exec sleep 1000"}})
	if took := time.Since(begun); err == nil || took > 4*pulseEvery {
		t.Errorf("%v after %s", err, took)
	}
	<-b.killers
	<-b.killers
}

// Every call into a sandbox whose kernel hangs ends, leaves nothing behind, and says why. Pending
// kills happen when it continues.
func TestHungSandbox(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	if err := e.WriteFile(t.Context(), h, "/tmp/x", 0o600, strings.NewReader("x")); err != nil { // wakes the agent
		t.Fatal(err)
	}
	// Three commands run: one whose caller leaves meanwhile, one whose caller waits longer
	// than is useful, one as a control.
	start := func(ctx context.Context, name string) <-chan error {
		out, in := io.Pipe()
		done := make(chan error, 1)
		go func() {
			_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1000." + name}, Stdout: in})
			in.CloseWithError(io.EOF)
			done <- err
		}()
		if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
			t.Fatal(err)
		}
		go io.Copy(io.Discard, out)
		return done
	}
	sh(t, e, h, "(while :; do echo >>/tmp/ticks; sleep 0.05; done) >/dev/null 2>&1 &")
	before := look(t, e)
	leaving, leave := context.WithCancel(t.Context())
	left, waiting := start(leaving, "1"), start(t.Context(), "2")
	b := hasty(t, e, h)
	goOn := halt(t, b)

	leave()
	calls := map[string]func(context.Context) error{
		"exec": func(ctx context.Context) error {
			_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}})
			return err
		},
		"shell": func(ctx context.Context) error {
			_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdin: strings.NewReader(""), Stdout: io.Discard})
			return err
		},
		"stats": func(ctx context.Context) error { _, err := e.Stats(ctx, h); return err },
		"stat":  func(ctx context.Context) error { _, err := e.StatFile(ctx, h, "/tmp"); return err },
		"write": func(ctx context.Context) error {
			return e.WriteFile(ctx, h, "/tmp/y", 0o600, bytes.NewReader(make([]byte, 8<<20)))
		},
		"read": func(ctx context.Context) error {
			r, err := e.ReadFile(ctx, h, "/tmp/x")
			if err != nil {
				return err
			}
			defer r.Close()
			_, err = io.ReadAll(r)
			return err
		},
		"list": func(ctx context.Context) error {
			for _, err := range e.ListFiles(ctx, h, "/tmp", "") {
				if err != nil {
					return err
				}
			}
			return nil
		},
		"dial":     func(ctx context.Context) error { _, err := e.Dial(ctx, h, 80); return err },
		"renew":    func(ctx context.Context) error { return e.Renew(ctx, h, time.Now().Add(time.Hour)) },
		"freeze":   func(ctx context.Context) error { return e.Pause(ctx, h) },
		"snapshot": func(ctx context.Context) error { _, err := e.Snapshot(ctx, h, "s"); return err },
		"network":  func(ctx context.Context) error { return e.SetNetwork(ctx, h, allow("192.0.2.1")) },
	}
	// Twice: before and after this is known.
	for range 2 {
		allEnd(t, calls, func(error) bool { return false })
	}
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Unresponsive || err != nil {
		t.Errorf("a probe says %q, %v", l, err)
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := e.Exec(short, h, sandboxer.Cmd{Args: []string{"true"}}); !errors.Is(err, sandboxer.Timeout) && !errors.Is(err, sandboxer.Unavailable) {
		t.Errorf("a command whose time is up: %v", err)
	}
	if err := <-left; !errors.Is(err, sandboxer.Canceled) {
		t.Errorf("a command whose caller left: %v", err)
	}
	if err := <-waiting; !errors.Is(err, sandboxer.Unavailable) {
		t.Errorf("a command in it: %v", err)
	}
	// Nothing is left of them, while it still hangs.
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if after := look(t, e); after.fds <= before.fds && after.goroutines <= before.goroutines+2 {
			break
		} else if time.Now().After(end) {
			t.Fatalf("left over: %+v; before: %+v", after, before)
		}
	}

	patient(b)
	goOn()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		l, err := e.IsAlive(t.Context(), h)
		if l == sandboxer.Alive {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it goes on, and a probe says %q, %v", l, err)
		}
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if ps := sh(t, e, h, "cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' '"); !strings.Contains(ps, "sleep 1000.") {
			break
		} else if time.Now().After(end) {
			t.Fatalf("a command without a caller still runs: %s", ps)
		}
	}
	// No other process is stopped for that.
	ticks := sh(t, e, h, "wc -c </tmp/ticks")
	for end := time.Now().Add(time.Minute); sh(t, e, h, "wc -c </tmp/ticks") == ticks; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("a process of the sandbox stands still: %s", sh(t, e, h, "cat /proc/*/stat; true"))
		}
	}
	if _, err := os.Stat(b.stopped); err == nil {
		t.Error("its processes count as standing still")
	}
}

// keptWires is how many descriptors the unused connections to an agent take.
const keptWires = 4 * 32

// keptConns is how many goroutines the connections take that are kept for a while after use.
const keptConns = 12

// Every call also ends in a sandbox without a working file server, done or unavailable. The sandbox
// is reported as such, everything continues when the server does, and it can be torn down meanwhile.
func TestHungGofer(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	if err := e.WriteFile(t.Context(), h, "/tmp/x", 0o600, strings.NewReader("x")); err != nil { // wakes the agent
		t.Fatal(err)
	}
	before := look(t, e)
	b := hasty(t, e, h)
	goOn := procstest.Stop(t, int(b.c.GoferPid.Load()))
	calls := map[string]func(context.Context) error{
		"exec": func(ctx context.Context) error {
			_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"find", "/usr/share", "/usr/lib"}, Stdout: io.Discard})
			return err
		},
		"shell": func(ctx context.Context) error {
			_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"git", "version"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdin: strings.NewReader(""), Stdout: io.Discard})
			return err
		},
		"write": func(ctx context.Context) error {
			return e.WriteFile(ctx, h, "/tmp/y", 0o600, bytes.NewReader(make([]byte, 8<<20)))
		},
		"list": func(ctx context.Context) error {
			for _, err := range e.ListFiles(ctx, h, "/usr/bin", "") {
				if err != nil {
					return err
				}
			}
			return nil
		},
		"read": func(ctx context.Context) error {
			r, err := e.ReadFile(ctx, h, "/usr/bin/git")
			if err != nil {
				return err
			}
			defer r.Close()
			_, err = io.Copy(io.Discard, r)
			return err
		},
		"stats": func(ctx context.Context) error { _, err := e.Stats(ctx, h); return err },
	}
	alone := map[string]func(context.Context) error{ // calls that need a sandbox that is not frozen
		"snapshot": func(ctx context.Context) error { _, err := e.Snapshot(ctx, h, "s"); return err },
		"freeze":   func(ctx context.Context) error { return e.Pause(ctx, h) },
	}
	is := func(want sandboxer.Liveness) {
		t.Helper()
		for late := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
			l, err := e.IsAlive(t.Context(), h)
			if l == want && err == nil {
				return
			}
			if time.Now().After(late) {
				t.Fatalf("a probe says %q, %v; want %q", l, err, want)
			}
		}
	}
	allEnd(t, calls, func(err error) bool { return err == nil }) // cached files are still served
	is(sandboxer.Unresponsive)
	for _, which := range []map[string]func(context.Context) error{calls, alone} {
		allEnd(t, which, func(error) bool { return false })
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if after := look(t, e); after.fds <= before.fds+keptWires && after.goroutines <= before.goroutines+keptConns {
			break
		} else if time.Now().After(end) {
			t.Fatalf("left over: %+v; before: %+v", after, before)
		}
	}
	patient(b)
	goOn()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		var out bytes.Buffer
		if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"echo", "on"}, Stdout: &out}); err == nil && out.String() == "on\n" {
			break
		} else if time.Now().After(end) {
			t.Fatalf("it goes on, and a command says %q, %v", out.String(), err)
		}
	}
	is(sandboxer.Alive)

	procstest.Stop(t, int(b.c.GoferPid.Load()))
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Error(err)
	}
	is(sandboxer.Gone)
}

// TestCommandsOfASandboxThatDies: commands whose sandbox loses its kernel or its files are lost. None
// of them was killed individually, as 137 would say.
func TestCommandsOfASandboxThatDies(t *testing.T) {
	for name, victim := range map[string]func(*liveSandbox) int{
		"kernel": func(b *liveSandbox) int { return b.pid },
		"files":  func(b *liveSandbox) int { return int(b.c.GoferPid.Load()) },
	} {
		t.Run(name, func(t *testing.T) {
			e := openTest(t)
			h := up(t, e, sandboxer.Spec{})
			b, err := e.of(h)
			if err != nil {
				t.Fatal(err)
			}
			const n = 30
			said, in := io.Pipe()
			var wg sync.WaitGroup
			for range n {
				wg.Go(func() {
					x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1000"}, Stdout: in})
					if !errors.Is(err, sandboxer.NotFound) {
						t.Errorf("a command ended with %+v, %v", x, err)
					}
				})
			}
			if _, err := io.ReadFull(said, make([]byte, 3*n)); err != nil {
				t.Fatal(err)
			}
			// Others begin and end meanwhile: none of them was killed, whatever they see.
			for range 4 {
				wg.Go(func() {
					for {
						x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
						if errors.Is(err, sandboxer.NotFound) {
							return
						}
						// The connection to a kernel that is ending may break before it is gone.
						if err != nil && !errors.Is(err, sandboxer.Unavailable) || err == nil && x.Code != 0 {
							t.Errorf("a command that began then ended with %+v, %v", x, err)
							return
						}
					}
				})
			}
			if err := unix.Kill(victim(b), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			wg.Wait()
			if l, err := e.IsAlive(t.Context(), h); l == sandboxer.OOMKilled || l == sandboxer.Unresponsive || err != nil {
				t.Errorf("a probe says %q, %v", l, err)
			}
		})
	}
}

// TestEndsWithItsFiles: a sandbox whose file server process has ended is gone, even if its kernel does not
// notice; whether a broker runs then, or only later.
func TestEndsWithItsFiles(t *testing.T) {
	needsGVisor(t)
	dir := shortDir(t)
	e := openIn(t, dir, ours("test"))
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	gone := func(h sandboxer.Handle) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			l, err := e.IsAlive(t.Context(), h)
			if l == sandboxer.Gone && err == nil {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("a probe says %q, %v", l, err)
			}
		}
	}
	held := func(h sandboxer.Handle) *liveSandbox {
		t.Helper()
		b, err := e.of(h)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	end := func(b *liveSandbox) {
		t.Helper()
		halt(t, b)
		if err := unix.Kill(int(b.c.GoferPid.Load()), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	h := up(t, e, sandboxer.Spec{})
	b := held(h)
	end(b)
	for by := time.Now().Add(time.Minute); !procs.Ended(b.pid); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(by) {
			t.Fatal("its kernel stays")
		}
	}
	gone(h)

	h = up(t, e, sandboxer.Spec{ID: sandboxer.NewID()})
	b = held(h)
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	end(b)
	e = openIn(t, dir, ours("test"))
	gone(h)
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Error(err)
	}
}

// Teardown does not need the sandbox.
func TestHungSandboxIsTornDown(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	b := hasty(t, e, h)
	halt(t, b)
	done := make(chan error, 1)
	go func() { done <- e.Pause(t.Context(), h) }() // holds the sandbox's lock
	if err := <-done; !errors.Is(err, sandboxer.Unavailable) {
		t.Errorf("freezing it: %v", err)
	}
	if _, err := e.Teardown(t.Context(), h); err != nil {
		t.Error(err)
	}
	if l, err := e.IsAlive(t.Context(), h); l != sandboxer.Gone || err != nil {
		t.Errorf("a probe says %q, %v", l, err)
	}
}

// untilEnded repeats the kill until the process has ended: one kill may come too early.
func TestUntilEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	kills := make(chan int)
	n := 0
	stop := untilEnded(ctx, func() { n++; kills <- n })
	cancel()
	for want := 1; want <= 3; want++ {
		if got := <-kills; got != want {
			t.Fatalf("kill %d; want %d", got, want)
		}
	}
	go func() {
		for range kills {
		}
	}()
	stop()
	close(kills) // from here on there are no kills
	untilEnded(t.Context(), func() { t.Error("killed though nobody called it off") })()
}

// Running commands take no threads of this process.
func TestCommandsTakeNoThreads(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{Limits: sandboxer.Limits{PIDs: 2048}})
	threads := func() int {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(tasks)
	}
	sh(t, e, h, "true")
	before := threads()
	const n = 60
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	said, in := io.Pipe()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			_, err := e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; exec sleep 1000"}, Stdout: in})
			if !errors.Is(err, sandboxer.Canceled) {
				t.Error(err)
				in.CloseWithError(err)
			}
		})
	}
	if _, err := io.ReadFull(said, make([]byte, 3*n)); err != nil {
		t.Fatal(err)
	}
	if took := threads() - before; took > n/3 {
		t.Errorf("%d commands take %d threads", n, took)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	cancel()
	wg.Wait()
}

// Errors that no answer of the kernel inside proves are distinguished from those that one does.
func TestAnswersOfTheKernel(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	b := hasty(t, e, h)
	err := b.ask(t.Context(), func(ctx context.Context) error { return b.ctl.call(ctx, "no.Such", nil, nil) })
	if _, said := errors.AsType[remoteError](err); !said {
		t.Errorf("a call that it does not know: %v", err)
	}
	if _, err := b.readSmall(t.Context(), "/nowhere"); !errors.Is(err, sandboxer.Invalid) {
		t.Errorf("a file that there is not: %v", err)
	}
	if got, err := b.readSmall(t.Context(), "/etc/passwd"); err != nil || !strings.HasPrefix(got, "root:") {
		t.Errorf("a file that there is: %q, %v", got, err)
	}
}

// Commands that start at once take as few descriptors as running ones, however long their sandbox
// takes to start them, and all of them run in the end.
func TestStartsInTurn(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	sh(t, e, h, "true")
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	before := look(t, e).fds
	goOn := halt(t, b)
	const n, of = 80, 8 // descriptors of a starting one: three pipes, two ends each, /dev/null, a connection
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("x"), Stdout: io.Discard, Stderr: io.Discard})
			if err != nil || x.Code != 0 {
				t.Errorf("a command that was to wait: %+v, %v", x, err)
			}
		})
	}
	for end := time.Now().Add(time.Minute); len(b.starts) < cap(b.starts) || attending(b) < n; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d commands are being started", len(b.starts))
		}
	}
	if more := look(t, e).fds - before; more > startsAtOnce*of+10 {
		t.Errorf("%d commands that wait to be started take %d descriptors", n, more)
	}
	goOn()
	wg.Wait()
}

// attending is how many calls wait for an answer of b's kernel.
func attending(b *liveSandbox) int {
	b.pulse.mu.Lock()
	defer b.pulse.mu.Unlock()
	return len(b.pulse.calls)
}
