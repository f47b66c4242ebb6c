//go:build linux

package local

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// counting counts the bytes written to it.
type counting struct{ n atomic.Int64 }

func (c *counting) Write(p []byte) (int, error) { c.n.Add(int64(len(p))); return len(p), nil }

// TestHostileNeighbour lets one sandbox do its worst and measures the effect on the machine,
// on this process and on another sandbox's commands. Each neighbour has limits, but none on
// the processor, as is the default.
func TestHostileNeighbour(t *testing.T) {
	e := openTest(t)
	if !e.cgroups.usable() {
		t.Skip(e.cgroups.why)
	}
	victim := up(t, e, sandboxer.Spec{})
	latency := func() time.Duration {
		t.Helper()
		var all []time.Duration
		for range 15 {
			begin := time.Now()
			if x, err := e.Exec(t.Context(), victim, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
				t.Fatalf("the neighbour's command: %+v %v", x, err)
			}
			all = append(all, time.Since(begin))
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	latency() // warm
	const (
		memoryLimit = 256 << 20
		diskLimit   = 64 << 20
		pidLimit    = 128
	)
	for _, c := range []struct {
		name, script string
		output       int64 // wanted, before it counts as done
	}{
		{"fork bomb", `f() { f & f & sleep 1; }; while true; do f; done 2>/dev/null`, 0},
		{"memory bomb", `while true; do head -c 10000000000 /dev/zero | tail; done`, 0},
		{"disk bomb", `while true; do dd if=/dev/zero of=/var/tmp/$((i=i+1)) bs=1M; done 2>/dev/null`, 0},
		{"10 GB of output", `dd if=/dev/zero bs=1000000 count=10000 2>/dev/null`, 10_000_000_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			limits := sandboxer.Limits{MemoryBytes: memoryLimit, DiskBytes: diskLimit, PIDs: pidLimit}
			var mostMemory, mostPIDs, mostMine, mostDisk int64
			var out counting
			var h sandboxer.Handle
			var ended chan struct{}
			// begin starts a neighbour that does its worst, and watches it until stop, which
			// ends the watching and the command but not the sandbox.
			begin := func() (stop func()) {
				h = up(t, e, sandboxer.Spec{Limits: limits})
				h := h // of this one
				mineBefore, diskBefore := resident(t), taken(e, h)
				ctx, cancel := context.WithCancel(t.Context())
				over, done := make(chan struct{}), make(chan struct{})
				ended = make(chan struct{})
				go func(ended chan struct{}) {
					defer close(ended)
					_, _ = e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", c.script}, Stdout: &out})
				}(ended)
				go func() {
					defer close(done)
					for {
						_, m, _ := e.cgroups.usage(h.Ref)
						p := e.cgroups.number(e.cgroups.path("pids", h.Ref), "pids.current", "")
						mostMemory, mostPIDs = max(mostMemory, m), max(mostPIDs, p)
						mostMine, mostDisk = max(mostMine, resident(t)-mineBefore), max(mostDisk, taken(e, h)-diskBefore)
						select {
						case <-over:
							return
						case <-time.After(5 * time.Millisecond):
						}
					}
				}()
				return sync.OnceFunc(func() {
					close(over)
					<-done
					cancel()
				})
			}
			stop := begin()
			defer func() { stop() }()
			// gone reports whether a bomb ended its own sandbox, as a fast one may before
			// its memory is checked, and starts the next one then.
			deaths := 0
			gone := func() bool {
				if l, err := e.IsAlive(t.Context(), h); c.name != "memory bomb" || err != nil || l != sandboxer.OOMKilled {
					return false
				}
				if deaths++; deaths > 20 {
					t.Fatal("its sandbox dies each time")
				}
				stop()
				<-ended
				if _, err := e.Teardown(t.Context(), h); err != nil {
					t.Fatal(err)
				}
				stop = begin()
				return true
			}
			time.Sleep(500 * time.Millisecond) // until it is at its worst
			// The machine is not ours alone, so quiet is measured at the same time, while
			// the neighbour is frozen, and the median of a few rounds counts. Other
			// processes may still begin or end just then.
			var ratio float64
			var quiet time.Duration
			for range 6 {
				var ratios []float64
				for len(ratios) < 5 {
					noisy := latency()
					if err := e.Pause(t.Context(), h); err != nil && gone() {
						continue
					} else if err != nil {
						t.Fatal(err)
					}
					quiet = latency()
					if err := e.Resume(t.Context(), h); err != nil && !gone() {
						t.Fatal(err)
					}
					ratios = append(ratios, float64(noisy)/float64(quiet))
					time.Sleep(50 * time.Millisecond)
				}
				slices.Sort(ratios)
				if ratio = ratios[len(ratios)/2]; ratio < 2 {
					break
				}
				t.Logf("the neighbour's exec true, at first: %.2f times as long", ratios)
			}
			if c.name == "memory bomb" {
				for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
					if _, m, _ := e.cgroups.usage(h.Ref); m > memoryLimit*9/10 {
						break
					}
					gone()
				}
			}
			if c.output > 0 {
				<-ended
				if out.n.Load() != c.output {
					t.Errorf("%d bytes of output came, of %d", out.n.Load(), c.output)
				}
			}
			// During the attack.
			began := time.Now()
			if _, err := e.Teardown(t.Context(), h); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > time.Minute {
				t.Errorf("destroying it took %s", took)
			}
			stop()
			<-ended
			t.Logf("the neighbour's exec true: %.2f times as long (%s in quiet); at most %d MiB and %d processes of the sandbox, %d MiB here, %d MiB of disk",
				ratio, quiet, mostMemory>>20, mostPIDs, mostMine>>20, mostDisk>>20)
			if ratio >= 2 {
				t.Errorf("the neighbour's commands take %.2f times as long", ratio)
			}
			if c.name == "memory bomb" && mostMemory < memoryLimit/2 {
				t.Errorf("it had only %d bytes of memory: no bomb", mostMemory)
			}
			// The kernel counts in batches of pages per processor.
			if mostMemory > memoryLimit+1<<20 {
				t.Errorf("it had %d bytes of memory", mostMemory)
			}
			if mostPIDs > 2*pidLimit+512 {
				t.Errorf("it had %d processes", mostPIDs)
			}
			if mostMine > 128<<20 {
				t.Errorf("this process grew by %d MiB", mostMine>>20)
			}
			if mostDisk > diskLimit+8<<20 || c.name == "disk bomb" && mostDisk < diskLimit/2 {
				t.Errorf("%d MiB of disk went", mostDisk>>20)
			}
			for _, root := range e.cgroups.roots {
				if _, err := os.Stat(root + "/" + h.Ref); err == nil {
					t.Errorf("%s/%s is left", root, h.Ref)
				}
			}
			if entries, _ := os.ReadDir(e.dir("box")); len(entries) != 1 {
				t.Errorf("left: %v", entries)
			}
			if left := processesOf(h.Ref); len(left) > 0 {
				t.Errorf("processes %v are left", left)
			}
		})
	}
}

// resident is this process's memory.
func resident(t *testing.T) int64 {
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Error(err)
		return 0
	}
	n, _ := strconv.ParseInt(strings.Fields(string(data))[1], 10, 64)
	return n * int64(os.Getpagesize())
}

// taken is the disk space of the engine's directory and of a sandbox's open files there,
// which hold its writes and have no name.
func taken(e *extension, h sandboxer.Handle) (sum int64) {
	b, err := e.of(h)
	if err != nil {
		return 0
	}
	seen := map[uint64]bool{}
	add := func(p string, stat func(string, *unix.Stat_t) error) {
		var st unix.Stat_t
		if stat(p, &st) == nil && !seen[st.Ino] {
			seen[st.Ino] = true
			sum += st.Blocks * 512
		}
	}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", b.pid))
	for _, p := range fds {
		if to, _ := os.Readlink(p); strings.HasPrefix(to, e.dir()) {
			add(p, unix.Stat)
		}
	}
	_ = filepath.WalkDir(e.dir(), func(p string, _ fs.DirEntry, err error) error {
		if err == nil {
			add(p, unix.Lstat)
		}
		return nil // it vanished during the check
	})
	return sum
}

// processesOf finds processes of a sandbox's name.
func processesOf(name string) (out []string) {
	entries, _ := os.ReadDir("/proc")
	for _, d := range entries {
		if data, err := os.ReadFile(fmt.Sprintf("/proc/%s/cmdline", d.Name())); err == nil && strings.HasPrefix(string(data), "runsc-") && strings.Contains(string(data), name) {
			out = append(out, d.Name())
		}
	}
	return out
}

// TestProcessLimitIsOneForAllUsers lets root inside spread its processes and threads over
// many users: each has the whole limit by the kernel's own count.
func TestProcessLimitIsOneForAllUsers(t *testing.T) {
	e := openTest(t)
	if !e.cgroups.usable() {
		t.Skip(e.cgroups.why)
	}
	const limit = 64
	spec := sandboxer.Spec{Limits: sandboxer.Limits{PIDs: limit}}
	// A shell that cannot fork ends; its child processes stay.
	const attack = `exec 2>/dev/null
prlimit --pid 1 --nproc=unlimited; prlimit --pid $$ --nproc=unlimited
u=2000
while [ $((u+=1)) -lt 2005 ]; do
	chroot --userspec=$u:$u / sh -c 'i=0; while [ $((i+=1)) -lt 80 ]; do sleep 1000 & done'
	chroot --userspec=$u:$u / %s threads 80 &
done`
	try := func(t *testing.T, h sandboxer.Handle) {
		t.Helper()
		for _, tty := range []*sandboxer.WinSize{nil, {Cols: 80, Rows: 24}} {
			cmd := sandboxer.Cmd{Args: []string{"sh", "-c", fmt.Sprintf(attack, filepath.Join(helpers, "tool"))}, TTY: tty}
			if _, err := e.Exec(t.Context(), h, cmd); err != nil && sandboxer.KindOf(err) != sandboxer.Exhausted {
				t.Fatal(err)
			}
			// A refused task exists until it has ended, without having run.
			var n int64
			for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
				st, err := e.Stats(t.Context(), h)
				if err != nil {
					t.Fatal(err)
				}
				if n = st.PIDs; n <= limit || time.Now().After(deadline) {
					break
				}
			}
			if n > limit || n < limit-16 {
				t.Errorf("%d tasks live; the limit is %d", n, limit)
			}
		}
		// They do not block the broker's own.
		if err := e.WriteFile(t.Context(), h, "/tmp/said", 0o644, strings.NewReader("still here")); err != nil {
			t.Errorf("writing a file: %v", err)
		}
		if got := sh(t, e, h, "read a </tmp/said; echo $a"); got != "still here" {
			t.Errorf("a command of root's: %q", got)
		}
	}
	h := up(t, e, spec)
	if _, err := e.StatFile(t.Context(), h, "/"); err != nil { // wakes the agent
		t.Fatal(err)
	}
	t.Run("new", func(t *testing.T) { try(t, h) })
	t.Run("restored", func(t *testing.T) { try(t, restored(t, e, spec, snapshot(t, e, h))) })
}
