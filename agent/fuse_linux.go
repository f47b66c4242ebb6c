package agent

import (
	"sync"
	"time"
)

// A fuse ends the sandbox at a set time, so that it does not long outlive a broker that
// never comes back.
type fuse struct {
	mu    sync.Mutex
	timer *time.Timer
	blown chan struct{} // receives once
}

func newFuse() *fuse { return &fuse{blown: make(chan struct{}, 1)} }

// A fuse waits fuseGrace steps after its time, so that the process that thaws or restores a
// sandbox can move it. Steps are counted, so that none passes while the machine is paused.
const (
	fuseGrace = 10
	graceStep = time.Second
)

// set moves the fuse; a zero time removes it.
func (f *fuse) set(at time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.timer != nil {
		f.timer.Stop()
		f.timer = nil
	}
	if at.IsZero() {
		return
	}
	left := fuseGrace
	var timer *time.Timer
	timer = time.AfterFunc(time.Until(at), func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.timer != timer {
			return
		}
		if left--; left >= 0 {
			timer.Reset(graceStep)
			return
		}
		select {
		case f.blown <- struct{}{}:
		default:
		}
	})
	f.timer = timer
}
