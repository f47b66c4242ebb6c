// Package lifecycle decides what the sweep does next with a sandbox, and when a sandbox and its backend's
// deadline end. Everything in it is a function of values: a record, what a probe of the backend proved, and a
// time that the caller gives. It knows neither a store nor a backend, and has no clock.
package lifecycle

import (
	"time"

	"github.com/sand-boxer/sandboxer"
)

const (
	// ConfirmAfter is how far apart two absences must be to prove a loss.
	ConfirmAfter = 5 * time.Second
	// StuckAfter is how long a sandbox may stay half made.
	StuckAfter = 30 * time.Minute
)

// A Verb is the one small step the sweep takes with a record.
type Verb string

const (
	None             Verb = "none"              // nothing to do now
	Resume           Verb = "resume"            // continue to make or resume it
	MarkAbsent       Verb = "mark absent"       // note its first absence
	ClearMarks       Verb = "clear marks"       // it responds again: remove the marks of earlier probes
	MarkUnresponsive Verb = "mark unresponsive" // note that it exists and does not respond
	Pause            Verb = "pause"             // it expired or is idle: pause it, or continue to
	End              Verb = "end"               // commit to terminating, then tear down
	Teardown         Verb = "teardown"          // pay what terminating owes
	PayDebts         Verb = "pay debts"         // tear down objects on extensions that failed to make it
)

// An Action is a verb, with a reason if the verb is end.
type Action struct {
	Verb   Verb
	Reason sandboxer.Reason
}

// Decide returns the next step for sb. seen is the result of a probe of its backend. working says whether a job is in flight on
// sb. sb.UsedAt must be up to date. Deadlines count since from. Until then the database, which went back in time, is not
// accepted, and the sweep only notes lost sandboxes. Decide depends on nothing else, so that tests can try every combination.
func Decide(sb *sandboxer.Sandbox, seen sandboxer.Liveness, working bool, now, from time.Time) Action {
	dead := IsDead(seen)
	f := facts{
		sb: sb, seen: seen, working: working, now: now, from: from,
		held:   now.Before(from),
		early:  now.Before(sb.RetryAt),
		missed: dead && sb.AbsentSince.IsZero() && seen != Died,
		lost:   seen == Died || dead && !sb.AbsentSince.IsZero() && now.Sub(sb.AbsentSince) >= ConfirmAfter,
		back:   seen == sandboxer.Alive && !sb.AbsentSince.IsZero(),
	}
	a := f.step()
	due := sb.DebtsDue()
	if a.Verb == None && !due.IsZero() && !now.Before(due) && !f.held && sb.State != sandboxer.Terminating { // whose teardown pays them
		return Action{Verb: PayDebts} // also while a job works on the sandbox: its object is another
	}
	return a
}

// step is the next step for sb itself, without its debts.
func (f facts) step() Action {
	switch f.sb.State {
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
	return Action{Verb: None}
}

// facts are the input of Decide. Each state has a method, whose first true case decides.
type facts struct {
	sb      *sandboxer.Sandbox
	seen    sandboxer.Liveness
	working bool
	now     time.Time
	from    time.Time
	held    bool // deadlines do not count yet
	early   bool // what failed is tried again later
	missed  bool // its object is absent, for the first time
	lost    bool // and was absent before, long enough ago to prove that it is gone
	back    bool // it was absent, and is there again
}

// expired reports whether the sandbox has expired, and deadlines count.
func (f facts) expired() bool {
	return !f.held && !MayBeClaimed(f.sb) && !f.sb.ExpiresAt.IsZero() && !f.now.Before(f.sb.ExpiresAt)
}

// loss ends a lost sandbox, with the reason that the probe gave.
func (f facts) loss() Action {
	if f.seen == sandboxer.OOMKilled {
		return Action{End, sandboxer.ReasonOOMKilled}
	}
	return Action{End, sandboxer.ReasonLost}
}

func (f facts) creating() Action {
	switch sb := f.sb; {
	case f.expired(): // also what hangs: ending it stops the job
		return Action{End, sandboxer.ReasonExpired}
	case f.working && IsProvisioned(sb) && f.missed:
		return Action{Verb: MarkAbsent}
	case f.working && IsProvisioned(sb) && f.lost: // also what hangs
		return f.loss()
	case f.working && IsProvisioned(sb) && f.back:
		return Action{Verb: ClearMarks}
	case f.working, f.early, f.held, MayBeClaimed(sb):
		return Action{Verb: None}
	case f.now.Sub(sb.CreatedAt) > StuckAfter && f.now.Sub(f.from) > StuckAfter && !IsPaused(sb):
		return Action{End, sandboxer.ReasonFailed}
	}
	return Action{Verb: Resume}
}

// ready decides for sandboxes that are warm or running.
func (f facts) ready() Action {
	sb := f.sb
	pauses := sb.State == sandboxer.Running && sb.Spec.Profile.OnTTL == sandboxer.ExpiryPause
	idle := sb.Spec.Profile.Idle
	switch {
	case !f.working && f.seen == sandboxer.OOMKilled: // seen dead, not only missed
		return Action{End, sandboxer.ReasonOOMKilled}
	case f.expired() && !pauses:
		return Action{End, sandboxer.ReasonExpired} // also while it is being saved: ending it stops that
	case f.expired() && !f.working:
		return Action{Pause, sandboxer.ReasonExpired}
	case f.missed:
		return Action{Verb: MarkAbsent}
	case f.lost: // also while a save of it hangs
		return f.loss()
	case f.back:
		return Action{Verb: ClearMarks}
	case !f.held && IsOverspent(sb) && sb.Spec.Profile.OnCost != sandboxer.CostPause:
		return Action{End, sandboxer.ReasonNoCredit} // also while it is being saved
	case f.working:
	case !f.held && IsOverspent(sb):
		return Action{Pause, sandboxer.ReasonNoCredit}
	case f.seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
		return Action{Verb: MarkUnresponsive}
	case f.seen == sandboxer.Alive && HasMarks(sb):
		return Action{Verb: ClearMarks}
	case sb.State == sandboxer.Running && idle > 0 && !f.held && f.now.Sub(sb.UsedAt) >= idle:
		if sb.Spec.Profile.OnIdle == sandboxer.ExpiryPause {
			return Action{Pause, sandboxer.ReasonIdle}
		}
		return Action{End, sandboxer.ReasonIdle}
	}
	return Action{Verb: None}
}

// pausing decides for a sandbox that is being paused. seen is Unknown if the pause itself removed the object (see interpret in
// the manager).
func (f facts) pausing() Action {
	switch {
	case f.held: // what it is paused to may be whole since
	case !f.working && f.expired():
		return Action{End, sandboxer.ReasonExpired}
	case !f.working && !f.early:
		return Action{Verb: Pause}
	case f.missed:
		return Action{Verb: MarkAbsent}
	case f.lost: // it need not wait for the next try, nor for a call that hangs
		return f.loss()
	case f.back:
		return Action{Verb: ClearMarks}
	}
	return Action{Verb: None}
}

func (f facts) paused() Action {
	switch sb := f.sb; {
	case f.working:
	case f.expired():
		return Action{End, sandboxer.ReasonExpired}
	case sb.Pause.Undo && !f.early && !f.held:
		return Action{Verb: Resume}
	case !HasReadyObject(sb): // nothing that a backend could lose
	case f.seen == sandboxer.OOMKilled:
		return f.loss()
	case f.missed:
		return Action{Verb: MarkAbsent}
	case f.lost:
		return f.loss()
	case f.seen == sandboxer.Unresponsive && sb.UnresponsiveSince.IsZero():
		return Action{Verb: MarkUnresponsive}
	case f.seen == sandboxer.Alive && HasMarks(sb):
		return Action{Verb: ClearMarks}
	}
	return Action{Verb: None}
}

func (f facts) terminating() Action {
	switch {
	case f.working:
	case !f.early:
		return Action{Verb: Teardown}
	case f.missed: // what could not be removed is gone: that can be found out now
		return Action{Verb: MarkAbsent}
	case f.back:
		return Action{Verb: ClearMarks}
	}
	return Action{Verb: None}
}
