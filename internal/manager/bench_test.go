package manager

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func quiet(s *setup) { s.opts.Log = slog.New(slog.DiscardHandler) }

// BenchmarkCreateDestroy is a whole life on the fake with every commit durable.
func BenchmarkCreateDestroy(b *testing.B) {
	for _, clients := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			r := newRig(b, func(s *setup) { quiet(s); s.opts.SweepEvery = 5 * time.Second })
			jobs := make(chan struct{})
			var wg sync.WaitGroup
			for range clients {
				wg.Go(func() {
					for range jobs {
						sb, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
						if err == nil {
							_, err = r.Destroy(acme, sb.ID)
						}
						if err != nil {
							b.Error(err)
						}
					}
				})
			}
			b.ResetTimer()
			for range b.N {
				jobs <- struct{}{}
			}
			close(jobs)
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lives/s")
		})
	}
}

// BenchmarkSweep is one whole sweep over records of running sandboxes.
func BenchmarkSweep(b *testing.B) {
	records := 10_000
	if testing.Short() {
		records = 100
	}
	r := newRig(b, func(s *setup) { quiet(s); s.idle = true; s.opts.SweepEvery = 5 * time.Second })
	fill(b, r, records)
	debug.FreeOSMemory() // what the filling left behind
	b.ResetTimer()
	b.ReportAllocs()
	peak := heapPeak()
	for range b.N {
		report, err := r.Sweep(admin)
		if err != nil || report.Seen != records || report.Failed != 0 {
			b.Fatalf("%+v, %v", report, err)
		}
	}
	b.ReportMetric(float64(peak())/(1<<20), "peak-MiB")
}

// fill makes n running sandboxes.
func fill(tb testing.TB, r *rig, n int) {
	tb.Helper()
	work := make(chan struct{})
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for range work {
				if _, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Labels: map[string]string{"team": "x"}}); err != nil {
					tb.Error(err)
				}
			}
		})
	}
	for range n {
		work <- struct{}{}
	}
	close(work)
	wg.Wait()
}

// heapPeak samples memory in use until the function it returns is called.
func heapPeak() func() uint64 {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan uint64)
	go func() {
		var peak uint64
		for {
			var s runtime.MemStats
			runtime.ReadMemStats(&s)
			peak = max(peak, s.HeapInuse+s.StackInuse)
			select {
			case <-ctx.Done():
				done <- peak
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return func() uint64 { cancel(); return <-done }
}

// BenchmarkUse is what the manager adds to a command: everything but the backend.
func BenchmarkUse(b *testing.B) {
	r := newRig(b, quiet)
	sb := r.create(sandboxer.CreateRequest{})
	b.ReportAllocs()
	for b.Loop() {
		_, _, end, err := r.Manager.beginStream(acme, sandboxer.ScopeWrite, sb.ID)
		if err != nil {
			b.Fatal(err)
		}
		end()
	}
}
