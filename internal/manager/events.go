package manager

import (
	"context"
	"iter"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
)

// visible narrows q to the events that the principal may see, and turns a name or the beginning of an ID into an ID.
func (m *Manager) visible(ctx context.Context, q sandboxer.EventQuery) (sandboxer.EventQuery, error) {
	p, err := access.May(ctx, sandboxer.ScopeRead)
	if err != nil {
		return q, err
	}
	if err := access.CheckPage(q.Limit); err != nil {
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
			return q, sandboxer.E(sandboxer.Denied, nil, "you cannot see the events of another tenant").
				WithHint("leave out the tenant to see your own; an administrator sees all")
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

// Head returns the number of the newest event. A caller that begins to follow now continues
// after it.
func (m *Manager) Head(ctx context.Context) (int64, error) {
	if _, err := access.May(ctx, sandboxer.ScopeRead); err != nil {
		return 0, err
	}
	return m.events.Head(ctx)
}

// Follow yields the events after q.After that are not older than q.Since, oldest first, and then each new one as it is
// committed. For one sandbox it also yields the progress of its creation. When ctx or the manager ends, it yields an error
// last. Nothing is locked while the caller handles an event. Exhausted: too many streams.
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

// Subscribe is Follow, but reports immediately if there will be no events. The caller must range over the returned sequence,
// once: it counts as a stream until then.
func (m *Manager) Subscribe(ctx context.Context, q sandboxer.EventQuery) (iter.Seq2[sandboxer.Event, error], error) {
	q, err := m.visible(ctx, q)
	if err != nil {
		return nil, err
	}
	p := sandboxer.PrincipalFrom(ctx)
	end, err := m.Streams.Begin(q.SandboxID, p.Tenant, p)
	if err != nil {
		return nil, err
	}
	return func(yield func(sandboxer.Event, error) bool) {
		defer end()
		ctx, cancel := m.untilClosed(ctx)
		defer cancel(nil)
		m.events.Follow(ctx, q)(yield)
	}, nil
}
