package manager

import (
	"context"
	"iter"
	"math"

	"github.com/sand-boxer/sandboxer"
)

// notify wakes whoever waits for a change of the sandbox. Call it after the commit.
func (m *Manager) notify(id string) {
	m.recent.commits.Add(1)
	m.notifier.notify(id)
}

// visible narrows q to what the principal may see, and turns a name or the beginning
// of an ID into an ID.
func (m *Manager) visible(ctx context.Context, q sandboxer.EventQuery) (sandboxer.EventQuery, error) {
	p, err := may(ctx, sandboxer.ScopeRead)
	if err != nil {
		return q, err
	}
	if err := checkPage(q.Limit); err != nil {
		return q, err
	}
	if q.SandboxID != "" {
		sb, err := m.find(ctx, sandboxer.ScopeRead, q.SandboxID)
		if err != nil {
			return q, err
		}
		q.SandboxID = sb.ID
	}
	if !p.Can(sandboxer.ScopeAdmin) {
		if q.Tenant != "" && q.Tenant != p.Tenant {
			return q, sandboxer.E(sandboxer.Denied, nil, "the events of another tenant are not yours to see")
		}
		q.Tenant = p.Tenant
	}
	return q, nil
}

// Events returns up to q.Limit events after q.After, oldest first; without the admin
// scope those of the caller's tenant. q.SandboxID may be anything Get takes.
func (m *Manager) Events(ctx context.Context, q sandboxer.EventQuery) ([]sandboxer.Event, error) {
	q, err := m.visible(ctx, q)
	if err != nil {
		return nil, err
	}
	return m.store.Events(ctx, q)
}

// Head returns the number of the newest event, after which whoever begins to follow now
// goes on.
func (m *Manager) Head(ctx context.Context) (int64, error) {
	if _, err := may(ctx, sandboxer.ScopeRead); err != nil {
		return 0, err
	}
	_, head, _, err := m.recent.after(ctx, math.MaxInt64)
	return head, err
}

// Follow yields the events after q.After, and not before q.Since, oldest first, and then
// each new one as it is committed, and of one sandbox also the progress of its creation,
// until ctx or the manager ends, which is its last value, an error. Nothing is held while
// the caller takes his time. Exhausted: too many streams.
func (m *Manager) Follow(ctx context.Context, q sandboxer.EventQuery) iter.Seq2[sandboxer.Event, error] {
	return func(yield func(sandboxer.Event, error) bool) {
		events, err := m.Subscribe(ctx, q)
		if err != nil {
			yield(sandboxer.Event{}, err)
			return
		}
		events(yield)
	}
}

// Subscribe is Follow that says at once why there will be no events. What it returns has to
// be ranged over, once: it takes a place among the streams until then.
func (m *Manager) Subscribe(ctx context.Context, q sandboxer.EventQuery) (iter.Seq2[sandboxer.Event, error], error) {
	q, err := m.visible(ctx, q)
	if err != nil {
		return nil, err
	}
	p := sandboxer.PrincipalFrom(ctx)
	end, err := m.streams.begin(q.SandboxID, p.Tenant, p)
	if err != nil {
		return nil, err
	}
	return func(yield func(sandboxer.Event, error) bool) {
		defer end()
		ctx, cancel := m.untilClosed(ctx)
		defer cancel(nil)
		changed, unsubscribe := m.notifier.subscribe(q.SandboxID)
		defer unsubscribe()
		q.Limit, q.Newest = sandboxer.MaxPage, false
		var told *sandboxer.Event
		for {
			events, more, err := m.next(ctx, &q)
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
			if ev := m.notifier.latestProgress(q.SandboxID); ev != nil && ev != told {
				if told = ev; !yield(*ev, nil) {
					return
				}
			}
			if err := wait(ctx, changed); err != nil {
				yield(sandboxer.Event{}, err)
				return
			}
		}
	}, nil
}

// next returns events after q.After, among them all that q selects, and moves it. What
// is long ago is read by few at a time, so that those who replay history leave readers to
// everybody else.
func (m *Manager) next(ctx context.Context, q *sandboxer.EventQuery) (events []sandboxer.Event, more bool, err error) {
	events, head, ok, err := m.recent.after(ctx, q.After)
	if err != nil || ok {
		q.After = max(q.After, head)
		return events, false, err
	}
	select {
	case m.replays <- struct{}{}:
		defer func() { <-m.replays }()
	case <-ctx.Done():
		return nil, false, wait(ctx, nil)
	}
	if events, err = m.store.Events(ctx, *q); err != nil {
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
