package docker

import (
	"context"
	"iter"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/notices"
)

const (
	// listenTime is how long Notify waits for the streams of engines, so that nothing is missed from then
	// on. One that is away does not hold up the others.
	listenTime = 2 * time.Second
	// reopenTime is the first pause after a stream was lost, maxReopenTime the longest. Whatever happens
	// meanwhile is found by who looks.
	reopenTime    = 100 * time.Millisecond
	maxReopenTime = 30 * time.Second
	// settleTime is how long an engine's listings may be behind what it told.
	settleTime = 2 * time.Second
)

// Notify implements sandboxer.Notifier, by the events of the engines.
func (e *extension) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	var hub notices.Hub
	if owner != e.env.Owner { // nothing of others is known here
		return hub.Listen(ctx), nil
	}
	ctx, end := context.WithCancel(ctx)
	stop := context.AfterFunc(e.ctx, end)
	told := hub.Listen(ctx)
	var opened sync.WaitGroup
	e.mu.Lock()
	if e.ctx.Err() == nil {
		for _, h := range e.hosts {
			opened.Add(1)
			e.work.Go(func() { e.follow(ctx, h, hub.Tell, sync.OnceFunc(opened.Done)) })
		}
	}
	e.mu.Unlock()
	all := make(chan struct{})
	go func() { opened.Wait(); close(all) }() // each is opened, or fails, or ends with ctx
	select {
	case <-all:
	case <-time.After(listenTime):
	case <-ctx.Done():
	}
	return func(yield func(string, error) bool) {
		defer stop()
		defer end()
		for id, err := range told {
			if !yield(id, err) {
				return
			}
		}
	}, nil
}

// follow tells what an engine says of this extension's sandboxes, until ctx ends. tried is called when it
// listens, or cannot.
func (e *extension) follow(ctx context.Context, h *host, tell func(id string), tried func()) {
	defer tried()
	for pause := reopenTime; ; pause = min(2*pause, maxReopenTime) {
		began := time.Now()
		err := h.api.Events(ctx, e.ours(), tried, func(ev engine.Event) {
			id := ev.Labels[labelID]
			if sandboxer.CheckID(id) != nil || ev.Labels[labelOwner] != e.env.Owner || ev.Labels[labelExtension] != e.env.Extension {
				return
			}
			switch ev.Action {
			case "die", "died": // Docker's word and Podman's
				e.settle(ctx, h, ev.ID, id)
			case "pause", "unpause", "destroy", "remove":
			default:
				return
			}
			tell(id)
		})
		tried()
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > maxReopenTime {
			pause = reopenTime
		}
		e.log.Debug("an engine tells nothing for a while", "extension", e.env.Extension, "engine", h.name, "err", err, "again", pause)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// settle waits until the engine's listing knows, too, that a container has ended: Docker tells of it before.
func (e *extension) settle(ctx context.Context, h *host, container, id string) {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	for {
		runs := false
		list, err := e.on(ctx, h, id, 0)
		for _, b := range list {
			runs = runs || b.container == container && b.state == "running"
		}
		if err != nil || !runs {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}
