package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func quiet(s *setup) { s.opts.Log = slog.New(slog.DiscardHandler) }

// fast is a setup for whole lives, one after the other.
func fast(s *setup) { quiet(s); s.opts.SweepEvery = 5 * time.Second }

// BenchmarkCreateDestroy is a whole life on the fake with every commit durable.
func BenchmarkCreateDestroy(b *testing.B) {
	for _, clients := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) { live(b, newRig(b, fast), clients) })
	}
}

// BenchmarkUsageRows is the same with the usage rows of all lives, without a sink and with one. Its receiver decodes the
// events in this process and keeps each once.
func BenchmarkUsageRows(b *testing.B) {
	const clients = 64
	b.Run("kept", func(b *testing.B) { live(b, newRig(b, fast), clients) })
	b.Run("delivered", func(b *testing.B) {
		all := make(chan struct{})
		v := &receiverOfRows{events: map[string]bool{}, sandboxes: map[string]bool{}, want: b.N, done: sync.OnceFunc(func() { close(all) })}
		hub := httptest.NewServer(v)
		defer hub.Close()
		r := newRig(b, func(s *setup) {
			fast(s)
			s.opts.UsageData = func(u sandboxer.UsageRow) any { return api.NewUsageRow(u) }
			s.opts.Sinks = []sandboxer.Sink{{Name: "hub", URL: hub.URL, Keys: []string{"hub-key"}}}
		})
		if _, err := r.SetSecret(admin, "hub-key", true, "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="); err != nil {
			b.Fatal(err)
		}
		begin := live(b, r, clients)
		select {
		case <-all:
		case <-time.After(2 * time.Minute):
		}
		took := time.Since(begin)
		v.mu.Lock()
		defer v.mu.Unlock()
		b.ReportMetric(float64(len(v.events))/took.Seconds(), "rows/s")
		b.ReportMetric(math.Abs(float64(b.N-len(v.events)))+float64(len(v.events)-len(v.sandboxes)), "wrong-rows")
	})
}

// live lives b.N lives, and returns when it began.
func live(b *testing.B, r *rig, clients int) (begin time.Time) {
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
	begin = time.Now()
	b.ResetTimer()
	for range b.N {
		jobs <- struct{}{}
	}
	close(jobs)
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lives/s")
	return begin
}

// receiverOfRows counts usage rows.
type receiverOfRows struct {
	mu        sync.Mutex
	events    map[string]bool // by their IDs
	sandboxes map[string]bool
	want      int
	done      func() // called when as many are there
}

func (v *receiverOfRows) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var batch []struct {
		ID   string
		Data api.UsageRow
	}
	if err := json.NewDecoder(req.Body).Decode(&batch); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range batch {
		v.events[e.ID], v.sandboxes[e.Data.Sandbox] = true, true
	}
	if len(v.events) >= v.want {
		v.done()
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
