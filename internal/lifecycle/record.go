package lifecycle

import (
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// IsFrozen reports whether the object of sb is frozen, or is being frozen, and is to continue later.
func IsFrozen(sb *sandboxer.Sandbox) bool {
	return IsPaused(sb) && (sb.Pause.Depth == sandboxer.PauseFreeze || sb.Pause.Undo)
}

// IsPooled reports whether sb has no owner: it is in a pool or being made for one.
func IsPooled(sb *sandboxer.Sandbox) bool { return sb.Pool != "" && sb.Tenant == "" }

// IsClaimed reports whether sb was in a pool and its owner waits for it.
func IsClaimed(sb *sandboxer.Sandbox) bool {
	return sb.Pool != "" && sb.Tenant != "" && sb.ReadyAt.IsZero() && !IsPaused(sb)
}

// SourceOf returns the snapshot from which the object of sb is made, or "".
func SourceOf(sb *sandboxer.Sandbox) string {
	switch {
	case IsPaused(sb):
		return sb.Pause.Snapshot
	case sb.RestoredAs == sandboxer.SnapshotNative:
		return sb.RestoredFrom
	case sb.RestoredAs == sandboxer.SnapshotPortable && sb.ReadyAt.IsZero():
		return sb.RestoredFrom
	}
	return ""
}

// ResumesFrom reports whether sb is paused to the snapshot, or being paused to it or resumed from it.
func ResumesFrom(sb *sandboxer.Sandbox, snapshot string) bool {
	return sb.Pause.Snapshot == snapshot && sb.State != sandboxer.Terminated
}

// IsNative reports whether that snapshot is used in its extension's native form.
func IsNative(sb *sandboxer.Sandbox) bool {
	if IsPaused(sb) {
		return sb.Pause.As != sandboxer.SnapshotPortable
	}
	return sb.RestoredAs == sandboxer.SnapshotNative
}

// Died is the result of a probe that finds a sandbox gone after its extension reported it. The report and the probe together
// prove the loss, which otherwise takes two probes, ConfirmAfter apart. No backend returns this value.
const Died sandboxer.Liveness = "died"

// MayBeClaimed reports whether sb waited in a pool when the database went back in time, so that it may have an owner whom the
// database does not know. (Former versions wrote other words than Claimed.)
func MayBeClaimed(sb *sandboxer.Sandbox) bool { return sb.Unconfirmed != "" && IsPooled(sb) }

// IsPaused reports whether sb is paused, being paused or being resumed.
func IsPaused(sb *sandboxer.Sandbox) bool { return !sb.Pause.At.IsZero() }

// IsOverspent reports whether the meter of the backend counts at least the amount that is on hold for sb.
func IsOverspent(sb *sandboxer.Sandbox) bool {
	return sb.Quote.Amount > 0 && sb.Usage.Cost >= sb.Quote.Amount
}

// HasMarks reports whether sb was missing, or did not respond, at the last probe.
func HasMarks(sb *sandboxer.Sandbox) bool {
	return !sb.AbsentSince.IsZero() || !sb.UnresponsiveSince.IsZero()
}

// HasReadyObject reports whether a ready object belongs to sb: it runs, waits in the
// pool, or is frozen.
func HasReadyObject(sb *sandboxer.Sandbox) bool {
	switch sb.State {
	case sandboxer.Running, sandboxer.Warm:
		return true
	case sandboxer.Paused:
		return sb.Pause.Depth == sandboxer.PauseFreeze || sb.Pause.Undo
	}
	return false
}

// NeedsProbe reports whether to probe the object of sb: it exists, or a job needs it, or it cannot be removed now.
func NeedsProbe(sb *sandboxer.Sandbox) bool {
	switch sb.State {
	case sandboxer.Creating:
		return IsProvisioned(sb)
	case sandboxer.Pausing:
		return true
	case sandboxer.Terminating:
		return !sb.RetryAt.IsZero()
	}
	return HasReadyObject(sb)
}

// IsProvisioned reports whether the object of sb, which is being created, exists already; for a claim that is unknown.
func IsProvisioned(sb *sandboxer.Sandbox) bool { return sb.Handle.SandboxID != "" && !IsClaimed(sb) }

// ObjectGeneration is the generation of the backend's object of sb, the latest if there were several.
func ObjectGeneration(sb *sandboxer.Sandbox) int { return max(sb.Generation, sb.Spec.Generation) }

// ObjectSince is the time since which the object of sb has existed in its present form.
func ObjectSince(sb *sandboxer.Sandbox) time.Time {
	return slices.MaxFunc([]time.Time{sb.ProvisionedAt, sb.ReadyAt, sb.ResumedAt}, time.Time.Compare)
}

// IsDead reports whether a probe proved that an object no longer works.
func IsDead(seen sandboxer.Liveness) bool {
	return seen == sandboxer.Gone || seen == sandboxer.OOMKilled || seen == Died
}
