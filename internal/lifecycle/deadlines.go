package lifecycle

import (
	"cmp"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// FuseMargin is how much longer than we a backend keeps a sandbox before it removes
// it on its own: long enough for a live broker to be first, short enough to
// bound what a dead broker costs.
const FuseMargin = 2 * time.Minute

// FuseStep is the least by which the fuse of a sandbox that lives as long as it is used moves, and so
// how often it moves at most.
const FuseStep = time.Minute

// Pauses reports whether sandboxes of p are paused automatically: the backend must then not remove
// them meanwhile.
func Pauses(p sandboxer.Profile) bool {
	return p.OnTTL == sandboxer.ExpiryPause || p.OnCost == sandboxer.CostPause || p.Idle > 0 && p.OnIdle == sandboxer.ExpiryPause
}

// Postpone changes sb, which is not stored yet, to one that is created at that time.
func Postpone(sb *sandboxer.Sandbox, at time.Time) {
	by := at.Sub(sb.CreatedAt)
	sb.CreatedAt, sb.ExpiresAt, sb.Spec.Fuse = at, sb.ExpiresAt.Add(by), sb.Spec.Fuse.Add(by)
}

// Backoff is how long to wait before the nth repetition: 1s doubling to 5 minutes,
// plus or minus a quarter by chance (0 ≤ chance < 1).
func Backoff(n int, chance float64) time.Duration {
	d := 5 * time.Minute
	if n < 10 {
		d = min(d, time.Second<<max(0, n-1))
	}
	return time.Duration(float64(d) * (0.75 + chance/2))
}

// MarginOf is how much longer than we the backend keeps a sandbox of the profile.
func MarginOf(p sandboxer.Profile) time.Duration {
	if Pauses(p) {
		return FuseMargin + StuckAfter // it must not remove it while it is being paused
	}
	return FuseMargin
}

// FirstFuse is the fuse of an object that is made at from, for a sandbox of the profile that expires at
// end. A sandbox that lives as long as it is used gets an earlier one if its backend renews fuses (renews);
// KeepUntil then moves it.
func FirstFuse(p sandboxer.Profile, from, end time.Time, renews bool) time.Time {
	if soon := from.Add(StuckAfter + p.Idle + FuseStep); p.TTL == sandboxer.TTLIdle && renews && soon.Before(end) {
		end = soon
	}
	return end.Add(MarginOf(p))
}

// LifeOf is how long a sandbox of the profile lives at most if its request asks for ttl; 0 means no wish.
func LifeOf(p sandboxer.Profile, ttl time.Duration) time.Duration {
	if ttl > 0 {
		return ttl
	}
	return TTLOf(p)
}

// TTLOf is how long a sandbox of the profile lives at most if its request does not say.
func TTLOf(p sandboxer.Profile) time.Duration {
	if p.TTL == sandboxer.TTLIdle {
		return MaxTTL(p)
	}
	return cmp.Or(p.TTL, min(sandboxer.DefaultTTL, MaxTTL(p)))
}

// MaxTTL is the longest life that a request may ask for.
func MaxTTL(p sandboxer.Profile) time.Duration {
	return cmp.Or(p.MaxTTL, max(sandboxer.DefaultMaxTTL, p.TTL))
}

// GoesOnUntil is until when the backend is first to keep a paused sandbox that goes on at the time at.
func GoesOnUntil(sb *sandboxer.Sandbox, at time.Time) time.Time {
	until := at.Add(sb.Pause.Left)
	if soon := at.Add(sb.Spec.Profile.Idle + FuseStep); sb.LivesByUse() && soon.Before(until) {
		until = soon
	}
	return until
}

// KeepUntil is until when the backend is to keep a running sandbox that lives as long as it is used. It is
// FuseStep later than necessary, so that the fuse does not move again within that time.
func KeepUntil(sb *sandboxer.Sandbox) time.Time {
	until := sb.EndsAt().Add(FuseStep)
	if until.After(sb.ExpiresAt) {
		until = sb.ExpiresAt
	}
	return until
}

// IsFuseLate reports whether sb, whose last use is up to date, lives on by its use for longer than its
// fuse allows.
func IsFuseLate(sb *sandboxer.Sandbox) bool {
	return sb.LivesByUse() && sb.State == sandboxer.Running && !sb.Spec.Fuse.IsZero() &&
		sb.Spec.Fuse.Before(sb.EndsAt().Add(MarginOf(sb.Spec.Profile)))
}

// LifeUntil is how long sb lives, without its pauses, if it ends then.
func LifeUntil(sb *sandboxer.Sandbox, until time.Time) time.Duration {
	return until.Sub(sb.CreatedAt) - sb.PausedFor
}

// LatestExpiry is when sb expires at the latest by its profile.
func LatestExpiry(sb *sandboxer.Sandbox) time.Time {
	return sb.CreatedAt.Add(sb.PausedFor + MaxTTL(sb.Spec.Profile))
}

// LifeLeft is how long a paused sandbox ran, and how long it may go on: for ttl, or for the time it had left.
// It is not ok if its profile does not allow that; an undone pause goes on in any case.
func LifeLeft(sb *sandboxer.Sandbox, ttl time.Duration) (ran, left time.Duration, ok bool) {
	prof := sb.Spec.Profile
	ran = sb.Pause.At.Sub(sb.CreatedAt) - sb.PausedFor
	left = cmp.Or(ttl, sb.Pause.Left)
	if sb.Pause.Undo {
		return ran, left, true
	}
	if left < time.Second { // its time was over: it gets a new one, as far as there is one
		left = min(TTLOf(prof), MaxTTL(prof)-ran)
	}
	return ran, left, ran+left <= MaxTTL(prof) && left > 0
}
