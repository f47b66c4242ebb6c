//go:build linux

package local

import (
	"bytes"
	"context"
	"io"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// commands starts n commands with a script, and returns when all of them run. wait returns
// when they have ended, as all do after cancel.
func commands(t *testing.T, e *extension, h sandboxer.Handle, n int, script string) (cancel, wait func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	said, in := io.Pipe()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			_, _ = e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; " + script}, Stdout: in})
		})
	}
	if _, err := io.ReadFull(said, make([]byte, 3*n)); err != nil {
		t.Fatal(err)
	}
	in.Close()
	return cancel, wg.Wait
}

// A hundred commands whose callers leave at once end, and harm nothing else: the sandbox
// answers afterwards, and no process inside is stopped.
func TestManyCancelledAtOnce(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	cancel, wait := commands(t, e, h, 100, "exec sleep 1000")
	begun := time.Now()
	cancel()
	wait()
	t.Logf("cancelled in %s", time.Since(begun))
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		var out bytes.Buffer
		x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "grep -l sleep /proc/[0-9]*/comm | wc -l"}, Stdout: &out})
		if err == nil && x.Code == 0 && out.String() == "0\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("afterwards: %q commands, %+v, %v", out.String(), x, err)
		}
	}
	if _, err := os.Stat(e.dir("box", boxName(h.SandboxID, 1), "stopped")); err == nil {
		t.Error("the sandbox is noted as standing still")
	}
}

// Many commands that must end at once are ended by one program, and not by one for each,
// which would take turns for a minute.
func TestManyAreKilledByOne(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	b, err := e.of(h)
	if err != nil {
		t.Fatal(err)
	}
	const n = 50
	cancel, wait := commands(t, e, h, n, "(setsid sleep 1000 &); exec sleep 1000")
	next := func() int { // the number of the next process
		t.Helper()
		n, err := strconv.Atoi(sh(t, e, h, "echo $$"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	b.killers <- struct{}{} // no kill has its turn yet
	b.killers <- struct{}{}
	before := next()
	cancel()
	waiting := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.toKill)
	}
	for end := time.Now().Add(time.Minute); waiting() < n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d wait for their end", waiting(), n)
		}
	}
	<-b.killers
	<-b.killers
	wait()
	// Each program takes some numbers for its threads.
	if after := next(); after-before > 2*n {
		t.Errorf("ending %d commands took %d processes and threads", n, after-before)
	}
	if got := sh(t, e, h, "grep -l sleep /proc/[0-9]*/comm | wc -l"); got != "0" {
		t.Errorf("%s of them live on", got)
	}
}
