// Package notices passes on to many what one of them notices: that something happened to a sandbox. An adapter
// with sandboxer.Notifier tells it here.
package notices

import (
	"context"
	"iter"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// MaxWaiting bounds the sandboxes of which one listener was told and has not taken the notice. The sequence of one that
// lets more come together ends.
const MaxWaiting = 10_000

// A Hub takes notices and gives each to all who listen. The zero value is ready for use.
type Hub struct {
	mu        sync.Mutex
	listeners map[*listener]struct{}
}

type listener struct {
	waiting map[string]struct{} // guarded by Hub.mu; nil when there were too many
	changed chan struct{}       // one slot
}

// Tell tells that something happened to the sandbox id. It never waits.
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

// Listen yields the sandboxes of which Tell is told from now on, each once for all that is told before it is
// taken, until ctx is done, as sandboxer.Notifier wants it. The sequence is for one use, and listens until
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
	context.AfterFunc(ctx, leave) // also if nobody takes the sequence
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
				yield("", sandboxer.E(sandboxer.Exhausted, nil, "more than %d sandboxes had something happen to them that nobody took notice of", MaxWaiting))
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
