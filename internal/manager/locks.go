package manager

import (
	"context"
	"sync"

	"github.com/sand-boxer/sandboxer/internal/events"
)

// A keyedLock is one lock for each key. Waiting for it ends with a context.
//
// mu guards the map. No caller waits under it.
type keyedLock struct {
	mu   sync.Mutex
	held map[string]chan struct{} // closed when the key is unlocked
}

func newKeyedLock() *keyedLock { return &keyedLock{held: map[string]chan struct{}{}} }

// lock waits until no other caller holds key, or ctx ends.
func (l *keyedLock) lock(ctx context.Context, key string) (unlock func(), err error) {
	for {
		l.mu.Lock()
		busy := l.held[key]
		if busy == nil {
			mine := make(chan struct{})
			l.held[key] = mine
			l.mu.Unlock()
			return sync.OnceFunc(func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				delete(l.held, key)
				close(mine)
			}), nil
		}
		l.mu.Unlock()
		if err := events.Wait(ctx, busy); err != nil {
			return nil, err
		}
	}
}

// sweepLocks prevent the sweep from working twice on a sandbox or snapshot at a time. Jobs prevent every other conflict.
//
// mu guards the map. Nothing is called while it is held.
type sweepLocks struct {
	mu   sync.Mutex
	held map[string]bool // by ID of what is locked: whether a caller was refused since
}

func newSweepLocks() *sweepLocks { return &sweepLocks{held: map[string]bool{}} }

// tryLock gives the caller the lock of id, until unlock, or returns false.
func (l *sweepLocks) tryLock(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, busy := l.held[id]
	l.held[id] = busy
	return !busy
}

// unlock releases the lock, and reports whether another caller was refused in between: that caller may have seen a step that
// has become due.
func (l *sweepLocks) unlock(id string) (refused bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	refused = l.held[id]
	delete(l.held, id)
	return refused
}

// A syncSet is a set that several goroutines may use.
type syncSet[K comparable] struct {
	mu  sync.Mutex
	has map[K]struct{}
}

func newSyncSet[K comparable]() *syncSet[K] { return &syncSet[K]{has: map[K]struct{}{}} }

// add reports whether k was not in the set before.
func (s *syncSet[K]) add(k K) (added bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, had := s.has[k]
	s.has[k] = struct{}{}
	return !had
}

func (s *syncSet[K]) contains(k K) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.has[k]
	return ok
}

func (s *syncSet[K]) remove(k K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.has, k)
}
