package docker

import (
	"context"
	"iter"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/notices"
)

const (
	// listenTime is how long Notify waits for the streams of engines, so that it misses nothing
	// afterwards. One that is away does not delay the others.
	listenTime = 2 * time.Second
	// reopenTime is the first pause after a lost stream, maxReopenTime the longest. Probes find what ends
	// meanwhile.
	reopenTime    = 100 * time.Millisecond
	maxReopenTime = 30 * time.Second
	// settleTime is how long an engine's listings may lag behind its events.
	settleTime = 2 * time.Second
)

// Notify implements sandboxer.Notifier, by the events of the engines.
func (e *extension) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	var hub notices.Hub
	if owner != e.env.Owner { // another owner has no sandboxes here
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

// follow reports an engine's events about this extension's sandboxes, until ctx ends. It calls tried once
// it listens, or cannot.
func (e *extension) follow(ctx context.Context, h *host, tell func(id string), tried func()) {
	defer tried()
	for pause := reopenTime; ; pause = min(2*pause, maxReopenTime) {
		began := time.Now()
		err := h.api.Events(ctx, e.ours(), tried, func(ev engine.Event) {
			m, ok := e.isOurs(ev.Labels)
			if !ok || ev.Labels["name"] != e.name(m.ID, m.Generation) {
				return
			}
			switch ev.Action {
			case "die", "died": // Docker's and Podman's word
				e.settle(ctx, h, ev.ID, m.ID)
			case "pause", "unpause", "destroy", "remove":
			default:
				return
			}
			tell(m.ID)
		})
		tried()
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > maxReopenTime {
			pause = reopenTime
		}
		e.log.Debug("no events from an engine for a while", "extension", e.env.Extension, "engine", h.name, "err", err, "again", pause)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// settle waits until the engine's listing also shows that a container has ended: Docker reports it earlier.
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
