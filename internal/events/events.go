// Package events keeps the history of an installation and wakes callers that wait for changes. The store has every event.
// Memory has the newest ones, so that they are read once for all followers, and the progress of creates, which is never stored.
//
// The package does not decide who may see an event: a caller narrows its query first.
package events

import (
	"context"
	"iter"
	"math"

	"github.com/sand-boxer/sandboxer"
)

// replays bounds how many callers read old events from the store at once.
const replays = 2

// A Log is the history, with the callers that wait for changes. Its methods are safe for concurrent use.
type Log struct {
	*notifier

	store   sandboxer.Store
	recent  recentEvents
	replays chan struct{} // slots for callers that read long histories
}

// New returns the log of the events in store.
func New(store sandboxer.Store) *Log {
	l := &Log{notifier: newNotifier(), store: store, replays: make(chan struct{}, replays)}
	l.recent.store = store
	return l
}

// Notify wakes all callers that wait for a change of the sandbox. Call it after the commit.
func (l *Log) Notify(id string) {
	l.recent.commits.Add(1)
	l.notifier.Notify(id)
}

// Head returns the number of the newest event.
func (l *Log) Head(ctx context.Context) (int64, error) {
	_, head, _, err := l.recent.after(ctx, math.MaxInt64)
	return head, err
}

// Subscribers is the number of callers that wait for changes, of any sandbox or of one.
func (l *Log) Subscribers() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, of := range l.subscribers {
		n += len(of)
	}
	return n
}

// Follow yields the events after q.After that are not older than q.Since, oldest first. Then it yields each new event as it is
// committed; for one sandbox also the progress of its creation. When ctx ends, it yields the error of ctx last. It ignores
// q.Limit and q.Newest.
func (l *Log) Follow(ctx context.Context, q sandboxer.EventQuery) iter.Seq2[sandboxer.Event, error] {
	return func(yield func(sandboxer.Event, error) bool) {
		changed, unsubscribe := l.Subscribe(q.SandboxID)
		defer unsubscribe()
		q.Limit, q.Newest = sandboxer.MaxPage, false
		var told *sandboxer.Event
		for {
			events, more, err := l.next(ctx, &q)
			if err != nil {
				yield(sandboxer.Event{}, err)
				return
			}
			for _, ev := range events {
				if (q.SandboxID == "" || ev.SandboxID == q.SandboxID) && (q.Tenant == "" || ev.Tenant == q.Tenant) && !ev.At.Before(q.Since) {
					if !yield(ev, nil) {
						return
					}
				}
			}
			if more {
				continue
			}
			if ev := l.LatestProgress(q.SandboxID); ev != nil && ev != told {
				if told = ev; !yield(*ev, nil) {
					return
				}
			}
			if err := Wait(ctx, changed); err != nil {
				yield(sandboxer.Event{}, err)
				return
			}
		}
	}
}

// next returns events after q.After, among them all that q selects, and moves q.After. Only a few callers read old events at a
// time, so that they leave connections of the store to other requests.
func (l *Log) next(ctx context.Context, q *sandboxer.EventQuery) (events []sandboxer.Event, more bool, err error) {
	events, head, ok, err := l.recent.after(ctx, q.After)
	if err != nil || ok {
		q.After = max(q.After, head)
		return events, false, err
	}
	select {
	case l.replays <- struct{}{}:
		defer func() { <-l.replays }()
	case <-ctx.Done():
		return nil, false, Wait(ctx, nil)
	}
	if events, err = l.store.Events(ctx, *q); err != nil {
		return nil, false, err
	}
	if len(events) < q.Limit {
		q.After = max(q.After, head)
	}
	if len(events) > 0 {
		q.After = max(q.After, events[len(events)-1].Seq)
	}
	return events, true, nil
}

// Wait returns when ch is closed or has a value. If ctx ends first, it returns the error of ctx.
func Wait(ctx context.Context, ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		err := context.Cause(ctx)
		return sandboxer.E(sandboxer.KindOf(err), err, "stopped waiting")
	}
}
