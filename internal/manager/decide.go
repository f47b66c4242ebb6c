package manager

import (
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	// confirmAfter is how far apart two absences must lie to prove a loss.
	confirmAfter = 5 * time.Second
	// stuckAfter is how long a sandbox may stay half made.
	stuckAfter = 30 * time.Minute
)

// A verb is the one small step the sweep takes with a record.
type verb string

const (
	verbNone             verb = "leave"    // nothing is owed, or somebody is at it, or not yet
	verbResume           verb = "resume"   // go on making it, or bringing it back
	verbMarkAbsent       verb = "suspect"  // note its first absence
	verbClearMarks       verb = "trust"    // it is there again, and responds: forget what was noted
	verbMarkUnresponsive verb = "doubt"    // note that it is there and does not respond
	verbPause            verb = "pause"    // its time is over: pause it, or go on pausing it
	verbEnd              verb = "end"      // commit to terminating, then tear down
	verbTeardown         verb = "teardown" // pay what terminating owes
)

// An action is a verb, with the reason where it is end.
type action struct {
	verb   verb
	reason sandboxer.Reason
}

// decide says what sb needs now. seen is what a look at its backend proved, working
// whether a job is in flight on it; sb.UsedAt must be up to date. It depends on
// nothing else, so that it can be tried on every combination.
func decide(sb *sandboxer.Sandbox, seen sandboxer.Liveness, working bool, now time.Time) action {
	unasked := sb.Unconfirmed == sandboxer.Unasked
	due := func(t time.Time) bool { return sb.Unconfirmed == "" && !t.IsZero() && !now.Before(t) }
	early := now.Before(sb.RetryAt)
	dead := seen == sandboxer.Gone || seen == sandboxer.OOMKilled
	missed := dead && sb.AbsentSince.IsZero()
	lost := dead && !missed && now.Sub(sb.AbsentSince) >= confirmAfter
	loss := action{verbEnd, sandboxer.ReasonLost}
	if seen == sandboxer.OOMKilled {
		loss.reason = sandboxer.ReasonOOMKilled
	}
	back := seen == sandboxer.Alive && !sb.AbsentSince.IsZero()
	switch sb.State {
	case sandboxer.Creating:
		switch {
		case due(sb.ExpiresAt): // also what hangs: ending it stops the job
			return action{verbEnd, sandboxer.ReasonExpired}
		case working && isProvisioned(sb) && missed:
			return action{verb: verbMarkAbsent}
		case working && isProvisioned(sb) && lost: // also what hangs
			return loss
		case working && isProvisioned(sb) && back:
			return action{verb: verbClearMarks}
		case working || early || unasked || mayBeClaimed(sb):
		case now.Sub(sb.CreatedAt) > stuckAfter && now.Sub(sb.ConfirmedAt) > stuckAfter && !isPaused(sb):
			return action{verbEnd, sandboxer.ReasonFailed}
		default:
			return action{verb: verbResume}
		}
	case sandboxer.Warm, sandboxer.Running:
		idle := sb.Spec.Profile.Idle
		switch {
		case !working && seen == sandboxer.OOMKilled: // seen dead, not only missed
			return action{verbEnd, sandboxer.ReasonOOMKilled}
		case due(sb.ExpiresAt) && (sb.State == sandboxer.Warm || sb.Spec.Profile.OnTTL != sandboxer.ExpiryPause):
			return action{verbEnd, sandboxer.ReasonExpired} // also while it is being saved: ending it stops that
		case !working && due(sb.ExpiresAt):
			return action{verbPause, sandboxer.ReasonExpired}
		case missed:
			return action{verb: verbMarkAbsent}
		case lost: // also while a save of it hangs
			return loss
		case back:
			return action{verb: verbClearMarks}
		case working:
		case seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
			return action{verb: verbMarkUnresponsive}
		case seen == sandboxer.Alive && hasMarks(sb):
			return action{verb: verbClearMarks}
		case sb.State == sandboxer.Running && idle > 0 && !unasked && now.Sub(sb.UsedAt) >= idle:
			return action{verbEnd, sandboxer.ReasonIdle}
		}
	case sandboxer.Pausing: // seen is Unknown if its absence is what pausing comes to (saved)
		switch {
		case unasked: // what it is paused to may be whole since
		case !working && due(sb.ExpiresAt):
			return action{verbEnd, sandboxer.ReasonExpired}
		case !working && !early:
			return action{verb: verbPause}
		case missed:
			return action{verb: verbMarkAbsent}
		case lost: // it need not wait for the next try, nor for a call that hangs
			return loss
		case back:
			return action{verb: verbClearMarks}
		}
	case sandboxer.Paused:
		switch {
		case working:
		case due(sb.ExpiresAt):
			return action{verbEnd, sandboxer.ReasonExpired}
		case sb.Pause.Undo && !early && !unasked:
			return action{verb: verbResume}
		case !hasReadyObject(sb): // nothing that a backend could lose
		case seen == sandboxer.OOMKilled:
			return loss
		case missed:
			return action{verb: verbMarkAbsent}
		case lost:
			return loss
		case seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
			return action{verb: verbMarkUnresponsive}
		case seen == sandboxer.Alive && hasMarks(sb):
			return action{verb: verbClearMarks}
		}
	case sandboxer.Terminating:
		switch {
		case working:
		case !early:
			return action{verb: verbTeardown}
		case missed: // what could not be removed is gone: that can be found out now
			return action{verb: verbMarkAbsent}
		case back:
			return action{verb: verbClearMarks}
		}
	case sandboxer.Terminated:
	}
	return action{verb: verbNone}
}

// isPaused reports whether sb stands still, or is on its way there or back.
func isPaused(sb *sandboxer.Sandbox) bool { return !sb.Pause.At.IsZero() }

// hasMarks reports whether sb was missed, or did not respond, at the last look.
func hasMarks(sb *sandboxer.Sandbox) bool {
	return !sb.AbsentSince.IsZero() || !sb.UnresponsiveSince.IsZero()
}

// hasReadyObject reports whether a ready object belongs to sb: it runs, waits in the
// pool, or is frozen.
func hasReadyObject(sb *sandboxer.Sandbox) bool {
	switch sb.State {
	case sandboxer.Running, sandboxer.Warm:
		return true
	case sandboxer.Paused:
		return sb.Pause.Depth == sandboxer.PauseFreeze || sb.Pause.Undo
	}
	return false
}

// needsProbe reports whether a look at the object of sb is worth it: it stands, or is
// needed by what is being done with it, or is what cannot be removed now.
func needsProbe(sb *sandboxer.Sandbox) bool {
	switch sb.State {
	case sandboxer.Creating:
		return isProvisioned(sb)
	case sandboxer.Pausing:
		return true
	case sandboxer.Terminating:
		return !sb.RetryAt.IsZero()
	}
	return hasReadyObject(sb)
}

// isProvisioned reports whether the object of sb, which is being made, was made already; what a
// claim does to it is not known.
func isProvisioned(sb *sandboxer.Sandbox) bool { return sb.Handle.SandboxID != "" && !isClaimed(sb) }

// objectGeneration is the generation of sb's object outside, the latest if there were several.
func objectGeneration(sb *sandboxer.Sandbox) int { return max(sb.Generation, sb.Spec.Generation) }

// objectSince is since when the object of sb has been there as it is now.
func objectSince(sb *sandboxer.Sandbox) time.Time {
	return slices.MaxFunc([]time.Time{sb.ProvisionedAt, sb.ReadyAt, sb.ResumedAt}, time.Time.Compare)
}
