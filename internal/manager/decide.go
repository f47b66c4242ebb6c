package manager

import (
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
	due := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	early := now.Before(sb.RetryAt)
	switch sb.State {
	case sandboxer.Creating:
		switch {
		case due(sb.ExpiresAt): // also what hangs: ending it stops the job
			return action{end, sandboxer.ReasonExpired}
		case working || early:
		case now.Sub(sb.CreatedAt) > patience && !isPaused(sb):
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
		case working:
		case due(sb.ExpiresAt):
			return action{pause, sandboxer.ReasonExpired}
		case seen == sandboxer.Gone && sb.AbsentSince.IsZero():
			return action{verb: suspect}
		case seen == sandboxer.Gone && now.Sub(sb.AbsentSince) >= confirmAfter:
			return action{end, sandboxer.ReasonLost}
		case seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
			return action{verb: doubt}
		case seen == sandboxer.Alive && isDoubted(sb):
			return action{verb: trust}
		case sb.State == sandboxer.Running && idle > 0 && now.Sub(sb.UsedAt) >= idle:
			return action{end, sandboxer.ReasonIdle}
		}
	case sandboxer.Pausing:
		switch {
		case working:
		case due(sb.ExpiresAt):
			return action{end, sandboxer.ReasonExpired}
		case early:
		default:
			return action{verb: pause}
		}
	case sandboxer.Paused:
		switch {
		case working:
		case due(sb.ExpiresAt):
			return action{end, sandboxer.ReasonExpired}
		case sb.Pause.Undo && !early:
			return action{verb: resume}
		case !isStanding(sb): // nothing that a backend could lose
		case seen == sandboxer.OOMKilled:
			return action{end, sandboxer.ReasonOOMKilled}
		case seen == sandboxer.Gone && sb.AbsentSince.IsZero():
			return action{verb: suspect}
		case seen == sandboxer.Gone && now.Sub(sb.AbsentSince) >= confirmAfter:
			return action{end, sandboxer.ReasonLost}
		case seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
			return action{verb: doubt}
		case seen == sandboxer.Alive && isDoubted(sb):
			return action{verb: trust}
		}
	case sandboxer.Terminating:
		if !working && !early {
			return action{verb: teardown}
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

// objectOf is the generation of sb's object outside, the latest if there were several.
func objectOf(sb *sandboxer.Sandbox) int { return max(sb.Generation, sb.Spec.Generation) }

// standsSince is when the object of sb became ready.
func standsSince(sb *sandboxer.Sandbox) time.Time {
	if sb.ResumedAt.After(sb.ReadyAt) {
		return sb.ResumedAt
	}
	return sb.ReadyAt
}
