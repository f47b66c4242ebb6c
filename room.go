package sandboxer

import (
	"fmt"
	"time"
)

// TakesRoom reports whether sb has, or may have, resources on its backend: from before it is made until
// it is proven gone. A sandbox that is paused to disk or to files has none.
func (sb *Sandbox) TakesRoom() bool {
	switch sb.State {
	case Terminated:
		return false
	case Paused:
		return sb.Pause.Undo || sb.Pause.Depth == PauseFreeze
	}
	return true
}

// Room bounds how many sandboxes may take room at the same time (Sandbox.TakesRoom). The bound of an
// extension counts sandboxes in pools; that of a profile does not. A bound of 0 is none.
type Room struct {
	Extension    string
	ExtensionMax int
	Profile      string
	ProfileMax   int
}

// MaxRoom is the largest bound that can be set.
const MaxRoom = 1_000_000

// A FullError is the cause of an Exhausted error that comes from Room.
type FullError struct {
	Of string // ID of the extension or of the profile
}

// Error returns "ID is full".
func (e *FullError) Error() string { return e.Of + " is full" }

// fullRetryAfter is when a caller may retry after "there is no room". It is a guess: it is not
// known when a sandbox ends.
const fullRetryAfter = 5 * time.Second

// Check refuses a change that raises the number of sandboxes of the extension or of the profile above
// its bound. Kind: Exhausted, with a FullError as its cause.
func (r *Room) Check(before, after RoomUse) error {
	full := func(what, id string, used, most int) error {
		e := E(Exhausted, &FullError{id}, "%s", fmt.Sprintf("%s %s is full: it has %d of %d sandboxes", what, id, used, most))
		e.RetryAfter = fullRetryAfter
		return e.WithHint("try again when one has ended, destroy one (sandboxer destroy ID), or ask an administrator for more room (max)")
	}
	switch {
	case r.ProfileMax > 0 && after.Profile > r.ProfileMax && after.Profile > before.Profile:
		return full("profile", r.Profile, before.Profile, r.ProfileMax)
	case r.ExtensionMax > 0 && after.Extension > r.ExtensionMax && after.Extension > before.Extension:
		return full("extension", r.Extension, before.Extension, r.ExtensionMax)
	}
	return nil
}

// RoomUse is how many sandboxes take room.
type RoomUse struct{ Extension, Profile int }
