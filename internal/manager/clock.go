package manager

import (
	"sync"
	"time"
)

// A graceClock notices that the wall clock was set, by comparing it with the elapsed time. For one grace period after that, the
// sweep ends and removes nothing because of a time, so that the correction of a wrong clock ends no sandbox.
//
// mu guards the readings. Nothing is called while it is held.
type graceClock struct {
	grace time.Duration
	start time.Time // with a monotonic reading

	mu     sync.Mutex
	wall   time.Time     // of the last reading
	passed time.Duration // since start, at the last reading
	until  time.Duration // since start: the clock ends and removes nothing before this
}

func newGraceClock(grace time.Duration, start time.Time) *graceClock {
	return &graceClock{grace: grace, start: start, wall: start.Round(0)}
}

// check takes a reading and reports whether the clock was set since the last one. If it was, a
// grace period begins.
func (c *graceClock) check(now time.Time) (wasSet bool) {
	return c.read(now.Round(0), now.Sub(c.start))
}

// read is check with the wall clock's time and the time that has passed since the start.
func (c *graceClock) read(wall time.Time, passed time.Duration) (wasSet bool) {
	const tolerance = 5 * time.Second
	c.mu.Lock()
	defer c.mu.Unlock()
	off := wall.Sub(c.wall) - (passed - c.passed)
	c.wall, c.passed = wall, passed
	if off.Abs() <= tolerance {
		return false
	}
	c.until = passed + c.grace
	return true
}

// inGracePeriod reports whether the clock must not be trusted yet.
func (c *graceClock) inGracePeriod(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return now.Sub(c.start) < c.until
}
