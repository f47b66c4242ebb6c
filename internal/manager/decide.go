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
	verbNone             verb = "none"              // nothing is owed, or somebody is at it, or not yet
	verbResume           verb = "resume"            // go on making it, or bringing it back
	verbMarkAbsent       verb = "mark absent"       // note its first absence
	verbClearMarks       verb = "clear marks"       // it is there again, and responds: forget what was noted
	verbMarkUnresponsive verb = "mark unresponsive" // note that it is there and does not respond
	verbPause            verb = "pause"             // its time is over, or nobody uses it: pause it, or go on pausing it
	verbEnd              verb = "end"               // commit to terminating, then tear down
	verbTeardown         verb = "teardown"          // pay what terminating owes
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
	dead := seen == sandboxer.Gone || seen == sandboxer.OOMKilled || seen == died
	f := facts{
		sb: sb, seen: seen, working: working, now: now,
		unasked: sb.Unconfirmed == sandboxer.Unasked,
		early:   now.Before(sb.RetryAt),
		missed:  dead && sb.AbsentSince.IsZero() && seen != died,
		lost:    seen == died || dead && !sb.AbsentSince.IsZero() && now.Sub(sb.AbsentSince) >= confirmAfter,
		back:    seen == sandboxer.Alive && !sb.AbsentSince.IsZero(),
	}
	switch sb.State {
	case sandboxer.Creating:
		return f.creating()
	case sandboxer.Warm, sandboxer.Running:
		return f.ready()
	case sandboxer.Pausing:
		return f.pausing()
	case sandboxer.Paused:
		return f.paused()
	case sandboxer.Terminating:
		return f.terminating()
	case sandboxer.Terminated:
	}
	return action{verb: verbNone}
}

// facts are what decide decides by. Their methods are one for each state, whose first case
// that holds counts.
type facts struct {
	sb      *sandboxer.Sandbox
	seen    sandboxer.Liveness
	working bool
	now     time.Time
	unasked bool // the database went back, and its backend was not asked yet
	early   bool // what failed is tried again later
	missed  bool // its object is absent, for the first time
	lost    bool // and was absent before, long enough ago to prove that it is gone
	back    bool // it was absent, and is there again
}

// expired reports whether its time is over, as far as its record can be relied on for that.
func (f facts) expired() bool {
	return f.sb.Unconfirmed == "" && !f.sb.ExpiresAt.IsZero() && !f.now.Before(f.sb.ExpiresAt)
}

// loss ends what is lost, with the reason that was seen.
func (f facts) loss() action {
	if f.seen == sandboxer.OOMKilled {
		return action{verbEnd, sandboxer.ReasonOOMKilled}
	}
	return action{verbEnd, sandboxer.ReasonLost}
}

func (f facts) creating() action {
	switch sb := f.sb; {
	case f.expired(): // also what hangs: ending it stops the job
		return action{verbEnd, sandboxer.ReasonExpired}
	case f.working && isProvisioned(sb) && f.missed:
		return action{verb: verbMarkAbsent}
	case f.working && isProvisioned(sb) && f.lost: // also what hangs
		return f.loss()
	case f.working && isProvisioned(sb) && f.back:
		return action{verb: verbClearMarks}
	case f.working, f.early, f.unasked, mayBeClaimed(sb):
		return action{verb: verbNone}
	case f.now.Sub(sb.CreatedAt) > stuckAfter && f.now.Sub(sb.ConfirmedAt) > stuckAfter && !isPaused(sb):
		return action{verbEnd, sandboxer.ReasonFailed}
	}
	return action{verb: verbResume}
}

// ready is for what is warm or runs.
func (f facts) ready() action {
	sb := f.sb
	pauses := sb.State == sandboxer.Running && sb.Spec.Profile.OnTTL == sandboxer.ExpiryPause
	idle := sb.Spec.Profile.Idle
	switch {
	case !f.working && f.seen == sandboxer.OOMKilled: // seen dead, not only missed
		return action{verbEnd, sandboxer.ReasonOOMKilled}
	case f.expired() && !pauses:
		return action{verbEnd, sandboxer.ReasonExpired} // also while it is being saved: ending it stops that
	case f.expired() && !f.working:
		return action{verbPause, sandboxer.ReasonExpired}
	case f.missed:
		return action{verb: verbMarkAbsent}
	case f.lost: // also while a save of it hangs
		return f.loss()
	case f.back:
		return action{verb: verbClearMarks}
	case f.working:
	case f.seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
		return action{verb: verbMarkUnresponsive}
	case f.seen == sandboxer.Alive && hasMarks(sb):
		return action{verb: verbClearMarks}
	case sb.State == sandboxer.Running && idle > 0 && !f.unasked && f.now.Sub(sb.UsedAt) >= idle:
		if sb.Spec.Profile.OnIdle == sandboxer.ExpiryPause {
			return action{verbPause, sandboxer.ReasonIdle}
		}
		return action{verbEnd, sandboxer.ReasonIdle}
	}
	return action{verb: verbNone}
}

// pausing takes seen to be Unknown if its absence is what pausing comes to (interpret).
func (f facts) pausing() action {
	switch {
	case f.unasked: // what it is paused to may be whole since
	case !f.working && f.expired():
		return action{verbEnd, sandboxer.ReasonExpired}
	case !f.working && !f.early:
		return action{verb: verbPause}
	case f.missed:
		return action{verb: verbMarkAbsent}
	case f.lost: // it need not wait for the next try, nor for a call that hangs
		return f.loss()
	case f.back:
		return action{verb: verbClearMarks}
	}
	return action{verb: verbNone}
}

func (f facts) paused() action {
	switch sb := f.sb; {
	case f.working:
	case f.expired():
		return action{verbEnd, sandboxer.ReasonExpired}
	case sb.Pause.Undo && !f.early && !f.unasked:
		return action{verb: verbResume}
	case !hasReadyObject(sb): // nothing that a backend could lose
	case f.seen == sandboxer.OOMKilled:
		return f.loss()
	case f.missed:
		return action{verb: verbMarkAbsent}
	case f.lost:
		return f.loss()
	case f.seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
		return action{verb: verbMarkUnresponsive}
	case f.seen == sandboxer.Alive && hasMarks(sb):
		return action{verb: verbClearMarks}
	}
	return action{verb: verbNone}
}

func (f facts) terminating() action {
	switch {
	case f.working:
	case !f.early:
		return action{verb: verbTeardown}
	case f.missed: // what could not be removed is gone: that can be found out now
		return action{verb: verbMarkAbsent}
	case f.back:
		return action{verb: verbClearMarks}
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
