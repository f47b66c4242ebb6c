//go:build linux

package local

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// A sandbox without limits in its profile has those in docs/reference/local.md, which are also the
// maximum for callers that are no administrators: they are really enforced.
func TestDefaultLimits(t *testing.T) {
	e := openTest(t)
	if !e.cgroups.usable() {
		t.Skip(e.cgroups.why)
	}
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		t.Fatal(err)
	}
	half := int64(si.Totalram) * int64(si.Unit) / 2
	const tasks = 2048
	if l := e.DefaultLimits(sandboxer.Spec{}); l != (sandboxer.Limits{PIDs: tasks, MemoryBytes: half}) {
		t.Errorf("by default it is %+v; want %d tasks and %d bytes", l, tasks, half)
	}
	h := up(t, e, sandboxer.Spec{})
	st, err := e.Stats(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	if page := int64(os.Getpagesize()); st.MemoryLimit > half || st.MemoryLimit < half-page {
		t.Errorf("its memory is bounded to %d; want %d", st.MemoryLimit, half)
	}
	// Start one program of 400 threads after the other, until one can make no more and ends.
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	refused := make(chan struct{}, 8)
	for i := range int64(8) {
		all.Go(func() {
			_, _ = e.Exec(ctx, h, sandboxer.Cmd{Args: []string{filepath.Join(helpers, "tool"), "threads", "400"}})
			refused <- struct{}{}
		})
		for end := time.Now().Add(time.Minute); len(refused) == 0; time.Sleep(20 * time.Millisecond) {
			if st, err = e.Stats(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			if st.PIDs >= 400*(i+1) {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%d tasks live", st.PIDs)
			}
		}
		if len(refused) > 0 {
			if i*400 < tasks-448 {
				t.Errorf("after %d threads no more start; want %d tasks", i*400, tasks)
			}
			return
		}
	}
	t.Errorf("%d tasks live; the limit is %d", st.PIDs, tasks)
}

// docs/reference/local.md describes a sandbox that hangs as the code treats it.
func TestTimesOfAHungSandbox(t *testing.T) {
	if d := (pulseMisses + 1) * pulseEvery; d > 20*time.Second {
		t.Errorf("a call into a sandbox that hangs ends within %s", d)
	}
	if pulseRecheck > 2*time.Second {
		t.Errorf("one into a sandbox that is known to ends within %s", pulseRecheck)
	}
	page, err := os.ReadFile("../../docs/reference/local.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"end as `unavailable` within 20 seconds, or within two once that", "at most 2048 processes and half of the machine's"} {
		if !strings.Contains(string(page), want) {
			t.Errorf("docs/reference/local.md does not say %q: this test holds other numbers", want)
		}
	}
}
