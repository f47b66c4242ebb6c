package manager

import (
	"testing"
	"time"
)

// A clock that was set, by however much, to whichever side, begins a grace period; time that
// passes and small corrections do not.
func TestGraceClock(t *testing.T) {
	start := time.Now()
	for _, c := range []struct {
		name string
		wall time.Duration // how far it moved while a minute passed
		set  bool
	}{
		{"as time passes", time.Minute, false},
		{"a correction", time.Minute + 4*time.Second, false},
		{"a correction back", time.Minute - 4*time.Second, false},
		{"set forward", time.Hour, true},
		{"set back", -time.Hour, true},
		{"set back by as much as passed", 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			clock := newGraceClock(time.Minute, start)
			if clock.inGracePeriod(start) {
				t.Error("it begins in a grace period")
			}
			if set := clock.read(start.Round(0).Add(c.wall), time.Minute); set != c.set {
				t.Errorf("it was set: %t; want %t", set, c.set)
			}
			if in := clock.inGracePeriod(start.Add(2*time.Minute - 1)); in != c.set {
				t.Errorf("in a grace period: %t; want %t", in, c.set)
			}
			if clock.inGracePeriod(start.Add(2 * time.Minute)) {
				t.Error("the grace period does not end")
			}
			if clock.read(start.Round(0).Add(c.wall+time.Hour), time.Minute+time.Hour) {
				t.Error("one jump counts twice")
			}
		})
	}
	clock := newGraceClock(time.Minute, start)
	if clock.check(start.Add(time.Hour)) {
		t.Error("an hour that passed is no jump")
	}
}
