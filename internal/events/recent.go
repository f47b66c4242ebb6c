package events

import (
	"context"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/sand-boxer/sandboxer"
)

// Recent is how many of the newest events are kept in memory.
const Recent = 1024

// recentEvents has the newest events, so that they are read once for all followers.
//
// mu guards the fields below it, and is held while the store is read: other callers wait for the result and share it. It is
// taken under no other lock.
type recentEvents struct {
	store   sandboxer.Store
	commits atomic.Uint64 // how often something was committed

	mu     sync.Mutex
	begun  bool
	loaded uint64            // commits when events was last brought up to date
	events []sandboxer.Event // never changed in place
	from   int64             // every event after this one is in events
	head   int64             // the last
}

// after returns every event after seq, and the number of the newest event. ok is false if memory no longer has events that old:
// then only the store has them.
func (r *recentEvents) after(ctx context.Context, seq int64) (events []sandboxer.Event, head int64, ok bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.load(ctx); err != nil {
		return nil, 0, false, err
	}
	if seq < r.from {
		return nil, r.head, false, nil
	}
	i := sort.Search(len(r.events), func(i int) bool { return r.events[i].Seq > seq })
	return r.events[i:len(r.events):len(r.events)], r.head, true, nil
}

func (r *recentEvents) load(ctx context.Context) error {
	if !r.begun {
		commits := r.commits.Load()
		newest, err := r.store.Events(ctx, sandboxer.EventQuery{Newest: true, Limit: 1})
		if err != nil {
			return err
		}
		if len(newest) > 0 {
			r.head = newest[0].Seq
		}
		r.from, r.loaded, r.begun = r.head, commits, true
	}
	for commits := r.commits.Load(); r.loaded != commits; {
		more, err := r.store.Events(ctx, sandboxer.EventQuery{After: r.head, Limit: sandboxer.MaxPage})
		if err != nil {
			return err
		}
		if len(more) > 0 {
			r.head = more[len(more)-1].Seq
			r.events = append(r.events, more...)
			if n := len(r.events) - Recent; n > 0 {
				r.from = r.events[n-1].Seq
				r.events = append([]sandboxer.Event(nil), r.events[n:]...)
			}
		}
		if len(more) < sandboxer.MaxPage {
			r.loaded = commits
		}
	}
	return nil
}
