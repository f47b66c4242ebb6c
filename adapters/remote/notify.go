package remote

import (
	"context"
	"iter"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// maxKnown bounds for how many sandboxes there a stream of notices remembers the owner.
const maxKnown = 10_000

// Notify implements sandboxer.Notifier, by the events of the other installation. They do not say whose a sandbox
// is, so its labels are read at its first event.
func (p *peer) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	last, err := p.client.Events(ctx, api.EventQuery{Newest: true, Limit: 1})
	if err != nil {
		return nil, p.fail(err)
	}
	var from api.EventQuery
	for _, ev := range last.Items {
		from.After = max(from.After, ev.Seq)
	}
	return func(yield func(string, error) bool) {
		known := map[string]string{} // by ID there; "" for one that is not ours
		for ev, err := range p.client.Follow(ctx, from) {
			switch {
			case ctx.Err() != nil:
				yield("", ctx.Err())
				return
			case err != nil:
				yield("", p.fail(err))
				return
			case !matters(ev) || p.admin && ev.Tenant != p.tenant:
				continue
			}
			id, ok := known[ev.SandboxID]
			if !ok {
				if id, err = p.ours(ctx, owner, ev.SandboxID); err != nil {
					yield("", err)
					return
				}
				if len(known) == maxKnown {
					clear(known)
				}
				known[ev.SandboxID] = id
			}
			if id != "" && !yield(id, nil) {
				return
			}
		}
	}, nil
}

// matters reports whether a probe (IsAlive) may give another result after ev than before it. A sandbox that is being torn down
// exists until that is done, unless it was killed for its memory.
func matters(ev api.Event) bool {
	if ev.Type != sandboxer.EventState || sandboxer.CheckID(ev.SandboxID) != nil {
		return false
	}
	switch ev.To {
	case sandboxer.Running, sandboxer.Paused, sandboxer.Terminated:
		return true
	}
	return ev.To == sandboxer.Terminating && ev.Cause == sandboxer.ReasonOOMKilled
}

// ours returns our ID of the sandbox that is called id there; "" if it is not owner's, or its record does not exist any more.
func (p *peer) ours(ctx context.Context, owner, id string) (string, error) {
	sb, err := p.client.Get(ctx, p.ref(id))
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return "", nil
	case ctx.Err() != nil:
		return "", ctx.Err()
	case err != nil:
		return "", p.fail(err)
	}
	if s, ok := originOf(sb); ok && sb.ID == id && p.owns(s, owner) {
		return s.ID, nil
	}
	return "", nil
}
