package manager

import (
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	// confirmAfter is how far apart two absences must lie to prove a loss.
	confirmAfter = 5 * time.Second
	// patience is how long a sandbox may stay half made.
	patience = 30 * time.Minute
)

// A verb is the one small step the sweep takes with a record.
type verb string

const (
	leave    verb = "leave"    // nothing is owed, or somebody is at it, or not yet
	resume   verb = "resume"   // go on making it, or bringing it back
	suspect  verb = "suspect"  // note its first absence
	trust    verb = "trust"    // it is there again, and responds: forget what was noted
	doubt    verb = "doubt"    // note that it is there and does not respond
	pause    verb = "pause"    // its time is over: pause it, or go on pausing it
	end      verb = "end"      // commit to terminating, then tear down
	teardown verb = "teardown" // pay what terminating owes
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
	loss := action{end, sandboxer.ReasonLost}
	if seen == sandboxer.OOMKilled {
		loss.reason = sandboxer.ReasonOOMKilled
	}
	back := seen == sandboxer.Alive && !sb.AbsentSince.IsZero()
	switch sb.State {
	case sandboxer.Creating:
		switch {
		case due(sb.ExpiresAt): // also what hangs: ending it stops the job
			return action{end, sandboxer.ReasonExpired}
		case working && isMade(sb) && missed:
			return action{verb: suspect}
		case working && isMade(sb) && lost: // also what hangs
			return loss
		case working && isMade(sb) && back:
			return action{verb: trust}
		case working || early || unasked || isContested(sb):
		case now.Sub(sb.CreatedAt) > patience && now.Sub(sb.ConfirmedAt) > patience && !isPaused(sb):
			return action{end, sandboxer.ReasonFailed}
		default:
			return action{verb: resume}
		}
	case sandboxer.Warm, sandboxer.Running:
		idle := sb.Spec.Profile.Idle
		switch {
		case !working && seen == sandboxer.OOMKilled: // seen dead, not only missed
			return action{end, sandboxer.ReasonOOMKilled}
		case due(sb.ExpiresAt) && (sb.State == sandboxer.Warm || sb.Spec.Profile.OnTTL != sandboxer.ExpiryPause):
			return action{end, sandboxer.ReasonExpired} // also while it is being saved: ending it stops that
		case !working && due(sb.ExpiresAt):
			return action{pause, sandboxer.ReasonExpired}
		case missed:
			return action{verb: suspect}
		case lost: // also while a save of it hangs
			return loss
		case back:
			return action{verb: trust}
		case working:
		case seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
			return action{verb: doubt}
		case seen == sandboxer.Alive && isDoubted(sb):
			return action{verb: trust}
		case sb.State == sandboxer.Running && idle > 0 && !unasked && now.Sub(sb.UsedAt) >= idle:
			return action{end, sandboxer.ReasonIdle}
		}
	case sandboxer.Pausing: // seen is Unknown if its absence is what pausing comes to (saved)
		switch {
		case unasked: // what it is paused to may be whole since
		case !working && due(sb.ExpiresAt):
			return action{end, sandboxer.ReasonExpired}
		case !working && !early:
			return action{verb: pause}
		case missed:
			return action{verb: suspect}
		case lost: // it need not wait for the next try, nor for a call that hangs
			return loss
		case back:
			return action{verb: trust}
		}
	case sandboxer.Paused:
		switch {
		case working:
		case due(sb.ExpiresAt):
			return action{end, sandboxer.ReasonExpired}
		case sb.Pause.Undo && !early && !unasked:
			return action{verb: resume}
		case !isStanding(sb): // nothing that a backend could lose
		case seen == sandboxer.OOMKilled:
			return loss
		case missed:
			return action{verb: suspect}
		case lost:
			return loss
		case seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
			return action{verb: doubt}
		case seen == sandboxer.Alive && isDoubted(sb):
			return action{verb: trust}
		}
	case sandboxer.Terminating:
		switch {
		case working:
		case !early:
			return action{verb: teardown}
		case missed: // what could not be removed is gone: that can be found out now
			return action{verb: suspect}
		case back:
			return action{verb: trust}
		}
	case sandboxer.Terminated:
	}
	return action{verb: leave}
}

// isPaused reports whether sb stands still, or is on its way there or back.
func isPaused(sb *sandboxer.Sandbox) bool { return !sb.Pause.At.IsZero() }

// isDoubted reports whether sb was missed, or did not respond, at the last look.
func isDoubted(sb *sandboxer.Sandbox) bool {
	return !sb.AbsentSince.IsZero() || !sb.UnresponsiveSince.IsZero()
}

// isStanding reports whether a ready object belongs to sb: it runs, waits in the
// pool, or is frozen.
func isStanding(sb *sandboxer.Sandbox) bool {
	switch sb.State {
	case sandboxer.Running, sandboxer.Warm:
		return true
	case sandboxer.Paused:
		return sb.Pause.Depth == sandboxer.PauseFreeze || sb.Pause.Undo
	}
	return false
}

// isProbed reports whether a look at the object of sb is worth it: it stands, or is
// needed by what is being done with it, or is what cannot be removed now.
func isProbed(sb *sandboxer.Sandbox) bool {
	switch sb.State {
	case sandboxer.Creating:
		return isMade(sb)
	case sandboxer.Pausing:
		return true
	case sandboxer.Terminating:
		return !sb.RetryAt.IsZero()
	}
	return isStanding(sb)
}

// isMade reports whether the object of sb, which is being made, was made already; what a
// claim does to it is not known.
func isMade(sb *sandboxer.Sandbox) bool { return sb.Handle.SandboxID != "" && !isClaimed(sb) }

// objectOf is the generation of sb's object outside, the latest if there were several.
func objectOf(sb *sandboxer.Sandbox) int { return max(sb.Generation, sb.Spec.Generation) }

// standsSince is since when the object of sb has been there as it is now.
func standsSince(sb *sandboxer.Sandbox) time.Time {
	return slices.MaxFunc([]time.Time{sb.ProvisionedAt, sb.ReadyAt, sb.ResumedAt}, time.Time.Compare)
}
