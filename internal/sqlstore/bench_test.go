package sqlstore

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// benchSandbox is a record of ordinary size.
func benchSandbox(id string) *sandboxer.Sandbox {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	return &sandboxer.Sandbox{
		ID: id, Generation: 1, Tenant: "acme", Profile: "profile.local", Extension: "ext.local", Host: "localhost",
		Consumer: sandboxer.Consumer{ID: "agent-7", Kind: "agent"}, State: sandboxer.Creating,
		Spec: sandboxer.Spec{
			ID: id, Generation: 1, Owner: "laptop", Inputs: map[string]string{"repo": "."}, Labels: map[string]string{"env": "ci"},
			Profile: sandboxer.Profile{ID: "profile.local", Title: "Local", Extension: "ext.local", Isolation: sandboxer.IsolationGVisor,
				TTL: time.Hour, Limits: sandboxer.Limits{MilliCPU: 1000, MemoryBytes: 1 << 30}},
			Limits: sandboxer.Limits{MilliCPU: 1000, MemoryBytes: 1 << 30, PIDs: 512}, Fuse: at.Add(2 * time.Hour),
		},
		Handle:    sandboxer.Handle{SandboxID: id, Generation: 1, Host: "localhost", Ref: "sbx-laptop-" + id + "-g1", Data: []byte(`{"v":1,"pid":4711}`)},
		Quote:     sandboxer.MeterQuote{Amount: 120000, PerHour: 120000, Duration: time.Hour},
		CreatedAt: at, ReadyAt: at, UsedAt: at, ExpiresAt: at.Add(time.Hour),
	}
}

// openBench puts the database on a real disk, where commits cost what they cost.
func openBench(b *testing.B) *Store {
	s, err := OpenSQLite(b.Context(), b.TempDir(), Options{Reserve: -1})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	if err := s.Write(b.Context(), sandboxer.Writes{Entries: []sandboxer.Entry{{Key: "g", Tenant: "acme", Type: sandboxer.EntryGrant, Amount: 1 << 60}}}); err != nil {
		b.Fatal(err)
	}
	return s
}

// BenchmarkLife takes sandboxes through the six transactions of a life, as the
// manager does, from many goroutines at once.
func BenchmarkLife(b *testing.B) {
	for _, writers := range []int{1, 16, 64} {
		b.Run(strconv.Itoa(writers), func(b *testing.B) {
			s := openBench(b)
			var next atomic.Int64
			var wg sync.WaitGroup
			b.ResetTimer()
			for range writers {
				wg.Go(func() {
					for {
						n := next.Add(1)
						if n > int64(b.N) {
							return
						}
						if err := life(s, b, fmt.Sprint("s", n)); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)*6/b.Elapsed().Seconds(), "tx/s")
		})
	}
}

func life(s *Store, tb testing.TB, id string) error {
	ctx := tb.Context()
	sb := benchSandbox(id)
	event := func(to sandboxer.State) []sandboxer.Event {
		return []sandboxer.Event{{At: sb.CreatedAt, Tenant: "acme", SandboxID: id, Generation: 1, Type: sandboxer.EventState, From: sb.State, To: to, Actor: "unix:0"}}
	}
	entry := func(typ sandboxer.EntryType, amount sandboxer.Credits) sandboxer.Entry {
		return sandboxer.Entry{Key: id + "/1/" + string(typ), Tenant: "acme", SandboxID: id, Generation: 1, Type: typ, Amount: amount, At: sb.CreatedAt}
	}
	err := s.CreateSandbox(ctx, sb, sandboxer.Writes{
		Events: event(sandboxer.Creating), Entries: []sandboxer.Entry{entry(sandboxer.EntryHold, -100)}, Cover: true,
		Key: &sandboxer.IdempotencyKey{Tenant: "acme", Key: id, SandboxID: id, Generation: 1, At: sb.CreatedAt},
	})
	for _, to := range []sandboxer.State{sandboxer.Creating, sandboxer.Running, sandboxer.Terminating, sandboxer.Terminating} {
		if err != nil {
			return err
		}
		w := sandboxer.Writes{Events: event(to)}
		sb.State = to
		err = s.UpdateSandbox(ctx, sb, w)
	}
	if err != nil {
		return err
	}
	sb.State = sandboxer.Terminated
	return s.UpdateSandbox(ctx, sb, sandboxer.Writes{
		Events: event(sandboxer.Terminated), Entries: []sandboxer.Entry{entry(sandboxer.EntryPost, 60), entry(sandboxer.EntryVoid, 40)},
	})
}

// BenchmarkDue lists 10,000 due records, page by page, in a store that also keeps
// the history of 20,000 others.
func BenchmarkDue(b *testing.B) {
	s := openBench(b)
	var wg sync.WaitGroup
	for i := range 30 {
		wg.Go(func() {
			for j := range 1000 {
				sb := benchSandbox(fmt.Sprintf("s%d-%d", i, j))
				if i%3 != 0 {
					sb.State = sandboxer.Terminated
				} else {
					sb.State = sandboxer.Running
				}
				if err := s.CreateSandbox(b.Context(), sb, sandboxer.Writes{}); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	q := sandboxer.Query{
		States:    []sandboxer.State{sandboxer.Creating, sandboxer.Running, sandboxer.Terminating},
		DueBefore: time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC), Limit: sandboxer.MaxPage,
	}
	b.ReportAllocs()
	for b.Loop() {
		n := 0
		q.After = ""
		for {
			items, next, err := s.Sandboxes(b.Context(), q)
			if err != nil {
				b.Fatal(err)
			}
			n += len(items)
			if q.After = next; next == "" {
				break
			}
		}
		if n != 10_000 {
			b.Fatalf("%d due; want 10000", n)
		}
	}
}
