package manager

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	// lookEvery is how often at most a sandbox is looked at because its extension told of it.
	lookEvery = 100 * time.Millisecond
	// maxNotices bounds the sandboxes of one extension that wait to be looked at. While there
	// are so many no more is heard.
	maxNotices = 1000
)

// died is what a probe comes to of a sandbox that is gone, and of which its extension has told that something
// happened to it: two who say so prove what otherwise takes two looks, confirmAfter apart. Only
// decide and interpret meet it.
const died sandboxer.Liveness = "died"

// listen has what the extension e tells of looked at, until the manager closes. What is told while
// nobody listens the survey finds.
func (m *Manager) listen(e *extension) {
	if e.Backend == nil || !e.Backend.Can(sandboxer.CanNotify) {
		return
	}
	for n := 1; ; n++ {
		began := time.Now()
		err := m.hear(e)
		if time.Since(began) > reopenEvery {
			n = 1
		}
		wait := min(backoff(n, rand.Float64()), reopenEvery)
		m.log.Debug("notices", "extension", e.Info.ID, "err", err, "again", wait)
		select {
		case <-time.After(wait):
		case <-m.ctx.Done():
			return
		}
	}
}

// hear is listen until the notices end, and returns why.
func (m *Manager) hear(e *extension) error {
	ctx, stop := context.WithCancel(m.ctx)
	defer stop()
	told, err := e.Backend.Notify(ctx, m.opts.Owner)
	if err != nil {
		return err
	}
	ids := make(chan string)
	over := make(chan error, 1)
	go func() {
		over <- func() error {
			for id, err := range told {
				if err != nil {
					return err
				}
				select {
				case ids <- id:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		}()
	}()
	waiting := map[string]struct{}{}
	var look <-chan time.Time
	var last time.Time
	for {
		more := ids
		if len(waiting) == maxNotices {
			more = nil
		}
		select {
		case id := <-more:
			waiting[id] = struct{}{}
			if look == nil {
				look = time.After(time.Until(last.Add(lookEvery)))
			}
		case <-look:
			for id := range waiting {
				m.lookAt(e, id)
			}
			clear(waiting)
			look, last = nil, time.Now()
		case err := <-over:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// lookAt looks at a sandbox that stands, as far as is known, and of which its extension told. Whatever is
// being made, moved or removed sees to itself.
func (m *Manager) lookAt(e *extension, id string) {
	sb, err := m.store.Sandbox(m.ctx, id)
	if err != nil || sb.Extension != e.Info.ID || sb.Damaged != "" || sb.Unconfirmed == sandboxer.Unasked || !hasReadyObject(sb) ||
		!e.Backend.Can(sandboxer.CanProbe) {
		return
	}
	m.probe(newTracker(), e, sb, false, true)
}
