package lifecycle

import (
	"cmp"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// FuseMargin is the time after the expiry until which a backend keeps a sandbox before it removes the sandbox by itself: long
// enough for a running broker to remove it first, short enough to bound the cost of a broker that died.
const FuseMargin = 2 * time.Minute

// FuseStep is the smallest step by which the fuse of a sandbox that lives as long as it is used moves. So it also bounds how
// often the fuse moves.
const FuseStep = time.Minute

// Pauses reports whether the server pauses sandboxes of p automatically. The backend must not remove such a sandbox before.
func Pauses(p sandboxer.Profile) bool {
	return p.OnTTL == sandboxer.ExpiryPause || p.OnCost == sandboxer.CostPause || p.Idle > 0 && p.OnIdle == sandboxer.ExpiryPause
}

// Postpone changes sb, which is not stored yet, as if it were created at that time.
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

// MarginOf is the time after the expiry until which the backend keeps a sandbox of the profile.
func MarginOf(p sandboxer.Profile) time.Duration {
	if Pauses(p) {
		return FuseMargin + StuckAfter // it must not remove it while it is being paused
	}
	return FuseMargin
}

// FirstFuse is the fuse of an object that is made at the time from, for a sandbox of the profile that expires at end. If the
// sandbox lives as long as it is used and its backend can move fuses (renews), the fuse is earlier, and KeepUntil moves it
// later.
func FirstFuse(p sandboxer.Profile, from, end time.Time, renews bool) time.Time {
	if soon := from.Add(StuckAfter + p.Idle + FuseStep); p.TTL == sandboxer.TTLIdle && renews && soon.Before(end) {
		end = soon
	}
	return end.Add(MarginOf(p))
}

// LifeOf is the longest life of a sandbox of the profile whose request asks for ttl; 0 means that it asks for none.
func LifeOf(p sandboxer.Profile, ttl time.Duration) time.Duration {
	if ttl > 0 {
		return ttl
	}
	return TTLOf(p)
}

// TTLOf is the longest life of a sandbox of the profile whose request names no ttl.
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

// GoesOnUntil is the first deadline that the backend gets for a paused sandbox that is resumed at the time at.
func GoesOnUntil(sb *sandboxer.Sandbox, at time.Time) time.Time {
	until := at.Add(sb.Pause.Left)
	if soon := at.Add(sb.Spec.Profile.Idle + FuseStep); sb.LivesByUse() && soon.Before(until) {
		until = soon
	}
	return until
}

// KeepUntil is the deadline that the backend gets for a running sandbox that lives as long as it is used. It is FuseStep later
// than necessary, so that it need not move again within that time.
func KeepUntil(sb *sandboxer.Sandbox) time.Time {
	until := sb.EndsAt().Add(FuseStep)
	if until.After(sb.ExpiresAt) {
		until = sb.ExpiresAt
	}
	return until
}

// IsFuseLate reports whether the use of sb keeps it alive beyond its fuse, so that the fuse must move. The last use in sb must
// be up to date.
func IsFuseLate(sb *sandboxer.Sandbox) bool {
	return sb.LivesByUse() && sb.State == sandboxer.Running && !sb.Spec.Fuse.IsZero() &&
		sb.Spec.Fuse.Before(sb.EndsAt().Add(MarginOf(sb.Spec.Profile)))
}

// LifeUntil is the running time of sb, without its pauses, if it ends at that time.
func LifeUntil(sb *sandboxer.Sandbox, until time.Time) time.Duration {
	return until.Sub(sb.CreatedAt) - sb.PausedFor
}

// LatestExpiry is the latest time at which sb may expire by its profile.
func LatestExpiry(sb *sandboxer.Sandbox) time.Time {
	return sb.CreatedAt.Add(sb.PausedFor + MaxTTL(sb.Spec.Profile))
}

// LifeLeft is how long a paused sandbox has run, and how long it may run after a resume: for ttl, or for the time that it had
// left. ok is false if its profile does not allow that; a pause that failed is undone in any case.
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
