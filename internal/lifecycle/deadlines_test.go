package lifecycle

import (
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestFirstFuse: a backend keeps a sandbox for longer than we do, and one that lives as long as it is used
// at first only for as long as it may take to become ready and be unused.
func TestFirstFuse(t *testing.T) {
	from := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	end := from.Add(24 * time.Hour)
	byUse := sandboxer.Profile{TTL: sandboxer.TTLIdle, Idle: time.Minute}
	for _, c := range []struct {
		name    string
		profile sandboxer.Profile
		end     time.Time
		renews  bool
		want    time.Time
	}{
		{"a fixed life", sandboxer.Profile{}, end, true, end.Add(FuseMargin)},
		{"one that pauses", sandboxer.Profile{OnTTL: sandboxer.ExpiryPause}, end, true, end.Add(FuseMargin + StuckAfter)},
		{"by use", byUse, end, true, from.Add(StuckAfter + time.Minute + FuseStep + FuseMargin)},
		{"by use, with a fuse that cannot be moved", byUse, end, false, end.Add(FuseMargin)},
		{"by use, with a short life", byUse, from.Add(time.Minute), true, from.Add(time.Minute + FuseMargin)},
	} {
		if got := FirstFuse(c.profile, from, c.end, c.renews); !got.Equal(c.want) {
			t.Errorf("%s: %s; want %s", c.name, got, c.want)
		}
	}
}

// TestLifeLeft: a paused sandbox goes on for what was left, or asked for, within what its profile allows.
func TestLifeLeft(t *testing.T) {
	at := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	const ran = 2 * time.Hour
	for _, c := range []struct {
		name      string
		kept, ttl time.Duration
		undo      bool
		want      time.Duration
		ok        bool
	}{
		{"what was left", time.Hour, 0, false, time.Hour, true},
		{"what is asked for", time.Hour, 2 * time.Hour, false, 2 * time.Hour, true},
		{"too much", time.Hour, 3*time.Hour + 1, false, 3*time.Hour + 1, false},
		{"its time was over", 0, 0, false, 30 * time.Minute, true},
		{"its time was over, and the pause is undone", -time.Second, 0, true, -time.Second, true},
	} {
		sb := &sandboxer.Sandbox{CreatedAt: at.Add(-ran - time.Hour), PausedFor: time.Hour, Pause: sandboxer.Pause{At: at, Left: c.kept, Undo: c.undo}}
		sb.Spec.Profile = sandboxer.Profile{TTL: 30 * time.Minute, MaxTTL: 5 * time.Hour}
		if was, left, ok := LifeLeft(sb, c.ttl); was != ran || left != c.want || ok != c.ok {
			t.Errorf("%s: it ran for %s and goes on for %s, %t; want %s, %t", c.name, was, left, ok, c.want, c.ok)
		}
	}
}

// TestIsFuseLate: a fuse is late if it comes before the end that the last use gives.
func TestIsFuseLate(t *testing.T) {
	at := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	sb := &sandboxer.Sandbox{State: sandboxer.Running, CreatedAt: at, ExpiresAt: at.Add(2 * time.Hour), UsedAt: at.Add(time.Hour)}
	sb.Spec.Profile = sandboxer.Profile{TTL: sandboxer.TTLIdle, Idle: 5 * time.Minute, MaxTTL: 2 * time.Hour}
	if sb.Spec.Fuse = sb.EndsAt(); !IsFuseLate(sb) {
		t.Error("a fuse at its end is not late")
	}
	if sb.Spec.Fuse = KeepUntil(sb).Add(MarginOf(sb.Spec.Profile)); IsFuseLate(sb) {
		t.Error("a fuse behind its end is late")
	}
}
