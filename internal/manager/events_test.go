package manager

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/internal/events"
)

// slowly reports progress while it provisions.
type slowly struct {
	*fake.Extension
	gate chan struct{}
}

func (s slowly) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	for i := range int64(50) {
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "pulling", Done: i, Total: 100})
	}
	<-s.gate
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "pulling", Done: 100, Total: 100})
	<-s.gate
	return s.Extension.Provision(ctx, spec)
}

// TestFollowersHearOfProgress: while a create lasts, from whenever on they follow, and
// nothing of it is stored.
func TestFollowersHearOfProgress(t *testing.T) {
	gate := make(chan struct{})
	r := newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return slowly{e, gate} }
	})
	ctx, cancel := context.WithTimeout(as("alice", sandboxer.ScopeWrite, sandboxer.ScopeRead), 20*time.Second)
	defer cancel()
	sb, err := r.Create(ctx, sandboxer.CreateRequest{Profile: "profile.test", NoWaiting: true})
	if err != nil {
		t.Fatal(err)
	}
	var heard []sandboxer.Event
	steps := 0
	for ev, err := range r.Follow(ctx, sandboxer.EventQuery{SandboxID: sb.ID}) {
		if err != nil {
			t.Fatal(err)
		}
		if ev.Type == sandboxer.EventProgress {
			heard = append(heard, ev)
			if ev.Seq != 0 || ev.SandboxID != sb.ID || ev.Progress.Step != "pulling" {
				t.Errorf("heard %+v", ev)
			}
			if steps++; steps == 1 || ev.Progress.Done == 100 {
				gate <- struct{}{}
			}
		}
		if ev.To == sandboxer.Running {
			break
		}
	}
	if len(heard) == 0 || len(heard) > 4 || heard[len(heard)-1].Progress.Done != 100 {
		t.Errorf("heard %d times of progress: %+v", len(heard), heard)
	}
	stored, err := r.Events(ctx, sandboxer.EventQuery{SandboxID: sb.ID, Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	for _, ev := range stored {
		if ev.Type == sandboxer.EventProgress || strings.Contains(ev.Message, "pulling") {
			t.Errorf("stored: %+v", ev)
		}
	}
	if ev := r.events.LatestProgress(sb.ID); ev != nil {
		t.Errorf("kept: %v", ev)
	}
}

// slowBooks take a while for every page of events, and count how many are read at once.
type slowDatabase struct {
	sandboxer.Store
	mu        sync.Mutex
	now, most int
}

func (b *slowDatabase) Events(ctx context.Context, q sandboxer.EventQuery) ([]sandboxer.Event, error) {
	b.mu.Lock()
	b.now++
	b.most = max(b.most, b.now)
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.now--
		b.mu.Unlock()
	}()
	time.Sleep(time.Second)
	return b.Store.Events(ctx, q)
}

// However many read long histories, two of the database's readers are enough for them; a reader that
// leaves does not wait for its turn.
func TestLongHistoriesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := new(slowDatabase)
		r := newRig(t, func(s *setup) {
			s.database = func(b sandboxer.Store) sandboxer.Store { db.Store = b; return db }
		})
		w := sandboxer.Writes{}
		const events = events.Recent + 200
		for i := range events {
			w.Events = append(w.Events, sandboxer.Event{At: now(), Tenant: sandboxer.DefaultTenant, Type: sandboxer.EventStep, Message: fmt.Sprint(i)})
		}
		if err := r.store.Write(acme, w); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Head(acme); err != nil {
			t.Fatal(err)
		}
		db.most = 0
		ctx, cancel := context.WithTimeout(acme, time.Hour)
		defer cancel()
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				got := 0
				for _, err := range r.Follow(ctx, sandboxer.EventQuery{}) {
					if err != nil {
						t.Error(err)
						return
					}
					if got++; got == events {
						return
					}
				}
			})
		}
		time.Sleep(time.Millisecond)
		left, leave := context.WithTimeout(acme, time.Millisecond)
		defer leave()
		began := time.Now()
		for range r.Follow(left, sandboxer.EventQuery{}) {
		}
		if took := time.Since(began); took >= time.Second {
			t.Errorf("who left waited %s", took)
		}
		all.Wait()
		if db.most != 2 {
			t.Errorf("%d read the history at once; want 2", db.most)
		}
	})
}

// counted counts the readings of events.
type counted struct {
	sandboxer.Store
	reads chan sandboxer.EventQuery
}

func (c *counted) Events(ctx context.Context, q sandboxer.EventQuery) ([]sandboxer.Event, error) {
	c.reads <- q
	return c.Store.Events(ctx, q)
}

// Those who follow share one reading of what is new.
func TestFollowersShareTheirReading(t *testing.T) {
	c := &counted{reads: make(chan sandboxer.EventQuery, 10_000)}
	r := newRig(t, func(s *setup) { s.database = func(b sandboxer.Store) sandboxer.Store { c.Store = b; return c } })
	const followers, events = 50, 20
	head, err := r.Head(acme)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(acme, time.Minute)
	defer cancel()
	seen := make(chan []string, followers)
	for range followers {
		go func() {
			var got []string
			for ev, err := range r.Follow(ctx, sandboxer.EventQuery{After: head}) {
				if err != nil {
					got = append(got, err.Error())
					break
				}
				if got = append(got, ev.Message); len(got) == events {
					break
				}
			}
			seen <- got
		}()
	}
	for len(c.reads) > 0 {
		<-c.reads
	}
	var want []string
	for i := range events {
		want = append(want, fmt.Sprint(i))
		w := sandboxer.Writes{Events: []sandboxer.Event{
			{At: now(), Tenant: sandboxer.DefaultTenant, Type: sandboxer.EventStep, Message: fmt.Sprint(i)}, {At: now(), Tenant: "rival", Type: sandboxer.EventStep, Message: "rival"}}}
		if err := r.store.Write(ctx, w); err != nil {
			t.Fatal(err)
		}
		r.events.Notify("")
	}
	for range followers {
		if got := <-seen; !slices.Equal(got, want) {
			t.Errorf("a follower saw %q", got)
		}
	}
	if n := len(c.reads); n > 3*events {
		t.Errorf("%d readings for %d events and %d followers", n, events, followers)
	}
}

// What is older than what memory has comes from the store, without gaps.
func TestFollowHistory(t *testing.T) {
	r := newRig(t, func(*setup) {})
	if _, err := r.Head(acme); err != nil {
		t.Fatal(err)
	}
	const n = events.Recent + 200
	w := sandboxer.Writes{}
	for i := range n {
		w.Events = append(w.Events, sandboxer.Event{At: now(), Tenant: []string{sandboxer.DefaultTenant, "rival"}[i%2], Type: sandboxer.EventStep, Message: fmt.Sprint(i)})
	}
	if err := r.store.Write(acme, w); err != nil {
		t.Fatal(err)
	}
	r.events.Notify("")
	next := 0
	for ev, err := range r.Follow(acme, sandboxer.EventQuery{}) {
		if err != nil || ev.Message != fmt.Sprint(next) {
			t.Fatalf("%+v, %v; want %d", ev, err, next)
		}
		if next += 2; next == n {
			w := sandboxer.Writes{Events: []sandboxer.Event{{At: now(), Tenant: sandboxer.DefaultTenant, Type: sandboxer.EventStep, Message: fmt.Sprint(n)}}}
			if err := r.store.Write(acme, w); err != nil {
				t.Fatal(err)
			}
			r.events.Notify("")
		} else if next > n {
			break
		}
	}
}

// TestFollow replays, then follows, and misses nothing.
func TestFollow(t *testing.T) {
	r := newRig(t, quiet)
	first := r.create(sandboxer.CreateRequest{})
	ctx, cancel := context.WithCancel(acme)
	got := make(chan sandboxer.Event, 1000)
	ended := make(chan error, 1)
	go func() {
		var last error
		for ev, err := range r.Follow(ctx, sandboxer.EventQuery{}) {
			if last = err; err == nil {
				got <- ev
			}
		}
		ended <- last
	}()
	var last int64
	next := func() sandboxer.Event {
		t.Helper()
		select {
		case ev := <-got:
			if ev.Seq <= last || ev.Tenant != sandboxer.DefaultTenant {
				t.Errorf("event %+v after %d", ev, last)
			}
			last = ev.Seq
			return ev
		case <-time.After(time.Minute):
			t.Fatal("no event")
			panic("unreachable")
		}
	}
	for range 3 {
		if ev := next(); ev.SandboxID != first.ID {
			t.Errorf("replayed %+v", ev)
		}
	}
	if _, err := r.Create(rival, sandboxer.CreateRequest{Profile: "test"}); err != nil {
		t.Fatal(err)
	}
	const n = 20
	many(n, func(int) (*sandboxer.Sandbox, error) { return r.Create(acme, sandboxer.CreateRequest{Profile: "test"}) })
	for range 3 * n {
		next()
	}
	cancel()
	if err := <-ended; sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("it ended with %v", err)
	}
	if n := r.events.Subscribers(); n != 0 {
		t.Errorf("%d listeners left", n)
	}
}
