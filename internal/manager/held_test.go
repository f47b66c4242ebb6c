package manager

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

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

// However many read long histories, two of the database's readers are enough for them; one who
// leaves does not wait for his turn.
func TestLongHistoriesTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := new(slowDatabase)
		r := newRig(t, func(s *setup) {
			s.database = func(b sandboxer.Store) sandboxer.Store { db.Store = b; return db }
		})
		w := sandboxer.Writes{}
		const events = keepRecent + 200
		for i := range events {
			w.Events = append(w.Events, sandboxer.Event{At: now(), Tenant: "acme", Type: sandboxer.EventStep, Message: fmt.Sprint(i)})
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

// What docs/api.md says of how much may go on at once is what the code has.
func TestDocumentedBounds(t *testing.T) {
	page, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("with 1,024 descriptors to %d and %d, with 8,192 or more to %d each", defaultExecs(1024).Total, defaultStreams(1024).Total, defaultExecs(8192).Total)
	if !strings.Contains(string(page), want) || defaultExecs(8192) != defaultStreams(8192) || defaultExecs(1<<20) != defaultExecs(8192) {
		t.Errorf("docs/api.md does not say %q", want)
	}
}

// What is kept of a request under an idempotency key cannot be guessed at by who reads the
// database: its environment is in it.
func TestIdempotencyDigestIsKeyed(t *testing.T) {
	kept := func(key byte) string {
		r := newRig(t, func(s *setup) { s.opts.Key = bytes.Repeat([]byte{key}, 32) })
		r.create(sandboxer.CreateRequest{Key: "once", Env: map[string]string{"PASSWORD": "secret"}})
		k, err := r.store.IdempotencyKey(t.Context(), "acme", "once")
		if err != nil || !strings.HasPrefix(k.Digest, macPrefix) {
			t.Fatalf("kept is %+v, %v", k, err)
		}
		return k.Digest
	}
	if one, same, other := kept(1), kept(1), kept(2); one != same || one == other {
		t.Errorf("of one request there are kept %s and %s, and with another key %s", one, same, other)
	}
}
