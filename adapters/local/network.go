//go:build linux

package local

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/local/usernet"
)

// networked reports whether p needs a link out of the sandbox.
func networked(p sandboxer.NetworkPolicy) bool {
	return p.Mode != "" && p.Mode != sandboxer.NetworkNone
}

// policy makes p ready to be enforced.
func (e *engine) policy(p sandboxer.NetworkPolicy) (usernet.Policy, error) {
	never, err := e.cfg.never()
	if err != nil {
		return usernet.Policy{}, err
	}
	return usernet.NewPolicy(p, never)
}

// link makes a network link that lets through what p says.
func (e *engine) link(p sandboxer.NetworkPolicy) (*usernet.Net, error) {
	policy, err := e.policy(p)
	if err != nil {
		return nil, err
	}
	resolvers := e.resolvers
	if list := e.cfg.DNS; len(list) > 0 {
		resolvers = func() []string { return list }
	}
	return usernet.New(usernet.Options{Policy: policy, Resolvers: resolvers})
}

// reconnect gives sandboxes that outlived a former broker process their network
// again. Open connections are lost, as with any change of network. It does not wait for
// those that do not answer, which get it when they do.
func (e *engine) reconnect() error {
	names, err := e.names()
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	for _, name := range names {
		if rec, err := e.record(name); err == nil && networked(rec.Network) {
			all.Add(1)
			e.aside(func() {
				defer all.Done()
				e.reconnectOne(name)
			})
		}
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(pulseEvery):
	}
	return nil
}

// replug is reconnect for a sandbox that answers again.
func (e *engine) replug(name string) {
	if rec, err := e.record(name); err == nil && networked(rec.Network) {
		e.aside(func() { e.reconnectOne(name) })
	}
}

// reconnectOne gives a sandbox its network if it has none and is to have one.
func (e *engine) reconnectOne(name string) {
	err := func() error {
		unlock, err := e.lock(e.ctx, name)
		if err != nil {
			return err
		}
		defer unlock()
		b, err := e.hold(name)
		if err != nil {
			return err
		}
		rec, err := e.record(name)
		if err != nil {
			return err
		}
		b.mu.Lock()
		has := b.net != nil
		b.mu.Unlock()
		if has || !networked(rec.Network) {
			return nil
		}
		return e.plugIn(e.ctx, b, rec)
	}()
	if err != nil && !errors.Is(err, sandboxer.NotFound) && e.ctx.Err() == nil {
		e.warn("a sandbox is without its network", fmt.Errorf("sandbox %s: %w", name, err))
	}
}

// plugIn gives a running sandbox a new link with the policy in rec, which it writes
// down first.
func (e *engine) plugIn(ctx context.Context, b *box, rec record) error {
	n, err := e.link(rec.Network)
	if err != nil {
		return err
	}
	rec.Plugs++
	if err = e.writeRecord(b.name, rec); err == nil {
		err = b.plug(ctx, n.Guest(), fmt.Sprintf("eth%d", rec.Plugs))
	}
	n.CloseGuest()
	if err != nil {
		n.Close()
		return err
	}
	b.mu.Lock()
	old := b.net
	b.net = n
	b.mu.Unlock()
	if old != nil {
		old.Close()
	}
	return nil
}

// SetNetwork implements sandboxer.Networker. What is in the record is what the next
// process of the broker enforces; so it is never wider than what is in force and was
// asked for: what narrows is written before, what fails is taken back.
func (e *engine) SetNetwork(ctx context.Context, h sandboxer.Handle, p sandboxer.NetworkPolicy) error {
	policy, err := e.policy(p)
	if err != nil {
		return err
	}
	b, unlock, err := e.alone(ctx, h)
	if err != nil {
		return err
	}
	defer unlock()
	name := b.name
	rec, err := e.record(name)
	if err != nil {
		return err
	}
	b.mu.Lock()
	link := b.net
	b.mu.Unlock()
	former := rec
	rec.Network = p
	if link == nil && networked(p) {
		if err = e.plugIn(ctx, b, rec); err == nil {
			return nil
		}
		// The number of the interface is used up, whether it came to be or not.
		former.Plugs = rec.Plugs + 1
		return errors.Join(sandboxer.E(sandboxer.Unavailable, err, "the sandbox's network could not be made"), e.writeRecord(name, former))
	}
	if err := e.writeRecord(name, rec); err != nil {
		return diskError(err, "writing the sandbox's record")
	}
	if link != nil {
		link.SetPolicy(policy)
	}
	return nil
}
