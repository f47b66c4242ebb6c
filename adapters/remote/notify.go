package remote

import (
	"context"
	"iter"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// maxKnown bounds the sandboxes there of which a stream of notices remembers whose they are.
const maxKnown = 10_000

// Notify implements sandboxer.Notifier, by the events of the other installation. They do not say whose a sandbox
// is, so that its labels are looked at when it is met first.
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

// matters reports whether a look (IsAlive) may find something else after ev than before it. What is being torn down is there until that is
// done, unless it was killed for its memory.
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

// ours returns what we call the sandbox there that is called id; "" if it is none of owner's, or there is no record of it any more.
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
	if s, ok := stampOf(sb); ok && sb.ID == id && p.owns(s, owner) {
		return s.id, nil
	}
	return "", nil
}
