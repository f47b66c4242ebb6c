// Package notices passes each notice about a sandbox on to many listeners. An adapter
// with sandboxer.Notifier reports here that something happened to a sandbox.
package notices

import (
	"context"
	"iter"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// MaxWaiting bounds the sandboxes with notices that one listener has not taken. The sequence of a listener that
// exceeds it ends.
const MaxWaiting = 10_000

// A Hub takes notices and gives each to all listeners. The zero value is ready for use.
type Hub struct {
	mu        sync.Mutex
	listeners map[*listener]struct{}
}

type listener struct {
	waiting map[string]struct{} // guarded by Hub.mu; nil when there were too many
	changed chan struct{}       // one slot
}

// Tell reports that something happened to the sandbox id. It never waits.
func (h *Hub) Tell(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for l := range h.listeners {
		if len(l.waiting) == MaxWaiting {
			l.waiting = nil
		}
		if l.waiting != nil {
			l.waiting[id] = struct{}{}
		}
		select {
		case l.changed <- struct{}{}:
		default:
		}
	}
}

// Listen yields the sandboxes that Tell reports from now on, each once for all reports before it is
// taken, until ctx is done, as sandboxer.Notifier requires. The sequence is for one use, and listens until
// then.
func (h *Hub) Listen(ctx context.Context) iter.Seq2[string, error] {
	l := &listener{waiting: map[string]struct{}{}, changed: make(chan struct{}, 1)}
	h.mu.Lock()
	if h.listeners == nil {
		h.listeners = map[*listener]struct{}{}
	}
	h.listeners[l] = struct{}{}
	h.mu.Unlock()
	leave := func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.listeners, l)
	}
	context.AfterFunc(ctx, leave) // also if the caller never takes the sequence
	return func(yield func(string, error) bool) {
		defer leave()
		for {
			select {
			case <-l.changed:
			case <-ctx.Done():
				yield("", ctx.Err())
				return
			}
			h.mu.Lock()
			told := l.waiting
			if told != nil {
				l.waiting = map[string]struct{}{}
			}
			h.mu.Unlock()
			if told == nil {
				yield("", sandboxer.E(sandboxer.Exhausted, nil, "more than %d sandboxes had changes that were not handled", MaxWaiting))
				return
			}
			for id := range told {
				if !yield(id, nil) {
					return
				}
			}
		}
	}
}
