package manager

import (
	"time"
)

// checkClock notices that the clock was set: then nothing is ended by it for one
// grace period, so that a wrong clock that is put right kills nobody.
func (m *Manager) checkClock() {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	if jumped(m.clock, now) {
		m.graceUntil = now.Add(m.opts.Grace)
		m.log.Warn("the clock was set; nothing expires before the grace period is over", "grace", m.opts.Grace)
	}
	m.clock = now
}

// jumped reports whether the wall clock moved otherwise than time did between two
// readings.
func jumped(a, b time.Time) bool {
	d := b.Round(0).Sub(a.Round(0)) - b.Sub(a)
	return d.Abs() > 5*time.Second
}

// inGracePeriod reports whether the clock must not be trusted yet.
func (m *Manager) inGracePeriod() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Now().Before(m.graceUntil)
}
