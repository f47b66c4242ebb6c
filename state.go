package sandboxer

import "slices"

// State is the state of a sandbox:
//
//	creating ─► warm ─(claim)─► creating
//	creating ─► running ─► pausing ─► paused ─(resume)─► creating
//	creating ─(failed resume)─► pausing
//	any of them but terminated ─► terminating ─► terminated
//
// There is no state "failed". A failure is a Reason to terminate, and the teardown is still due.
type State string

// The states, with the broker's duty in each.
const (
	Creating    State = "creating"    // owes Provision, RestoreFromSnapshot or Claim, then WaitReady
	Warm        State = "warm"        // owes nothing; ready in a pool, without an owner
	Running     State = "running"     // owes nothing; ready, with an owner
	Pausing     State = "pausing"     // owes a sealed checkpoint, then Teardown (or the native freeze)
	Paused      State = "paused"      // owes keeping the checkpoint
	Terminating State = "terminating" // owes Teardown, then settling the ledger
	Terminated  State = "terminated"  // owes nothing but a pending bill; history
)

// States lists every State in the order of a life.
func States() []State {
	return []State{Creating, Warm, Running, Pausing, Paused, Terminating, Terminated}
}

var transitions = map[State][]State{
	Creating:    {Warm, Running, Pausing, Terminating},
	Warm:        {Creating, Terminating},
	Running:     {Pausing, Terminating},
	Pausing:     {Paused, Terminating},
	Paused:      {Creating, Terminating},
	Terminating: {Terminated},
	Terminated:  nil,
}

// CanBecome reports whether a sandbox may move from s to next.
func (s State) CanBecome(next State) bool { return slices.Contains(transitions[s], next) }

// Valid reports whether s is one of the states.
func (s State) Valid() bool { _, ok := transitions[s]; return ok }

// Live reports whether outside objects may exist in state s.
func (s State) Live() bool { return s != Terminated }

// Reason says why a sandbox ends (or why it last changed).
type Reason string

// The reasons a sandbox is terminated.
const (
	ReasonRequested Reason = "requested"  // a caller destroyed it
	ReasonExpired   Reason = "expired"    // its time to live ran out
	ReasonIdle      Reason = "idle"       // it was not used for longer than the profile allows
	ReasonFailed    Reason = "failed"     // it could not be created, or broke
	ReasonLost      Reason = "lost"       // the backend proved that it is gone
	ReasonOOMKilled Reason = "oom_killed" // it used more memory than its limit and was killed
	ReasonNoCredit  Reason = "no_credit"  // the tenant has no credits left
	ReasonReplaced  Reason = "replaced"   // its create moved on to another backend and left this teardown
	ReasonPool      Reason = "pool"       // it was made for a pool, or the pool no longer needs it
)
