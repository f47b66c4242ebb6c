package manager

import (
	"context"
	"sync"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// One caller holds a key at a time; a waiting one gets it, or leaves with its context.
func TestKeyedLock(t *testing.T) {
	l := newKeyedLock()
	ctx := context.Background()
	unlock, err := l.lock(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	if other, err := l.lock(ctx, "b"); err != nil { // another key is another's
		t.Error(err)
	} else {
		other()
	}
	left, leave := context.WithCancel(ctx)
	leave()
	if _, err := l.lock(left, "a"); sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("who left got %v", err)
	}
	unlock()
	var all sync.WaitGroup
	in := 0 // guarded by the key, which the race detector checks
	for range 8 {
		all.Go(func() {
			for range 100 {
				unlock, err := l.lock(ctx, "a")
				if err != nil {
					t.Error(err)
					return
				}
				if in++; in != 1 {
					t.Errorf("%d hold the key", in)
				}
				in--
				unlock()
				unlock() // once counts
			}
		})
	}
	all.Wait()
	if len(l.held) != 0 {
		t.Errorf("left: %v", l.held)
	}
}

// A refused caller is not forgotten: the unlock reports it.
func TestSweepLocks(t *testing.T) {
	l := newSweepLocks()
	if !l.tryLock("a") || l.tryLock("a") || !l.tryLock("b") {
		t.Error("it is not one at a time")
	}
	if !l.unlock("a") {
		t.Error("who was refused is forgotten")
	}
	if l.unlock("b") {
		t.Error("nobody was refused")
	}
	if !l.tryLock("a") || l.unlock("a") {
		t.Error("a refusal counts twice")
	}
	if len(l.held) != 0 {
		t.Errorf("left: %v", l.held)
	}
}

func TestSyncSet(t *testing.T) {
	s := newSyncSet[string]()
	if s.contains("a") || !s.add("a") || s.add("a") || !s.contains("a") || s.contains("b") {
		t.Error("it is no set")
	}
	s.remove("a")
	if s.contains("a") || !s.add("a") {
		t.Error("what is removed is in it")
	}
}
