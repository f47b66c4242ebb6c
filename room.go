package sandboxer

import (
	"fmt"
	"time"
)

// TakesRoom reports whether sb has, or may have, something on its backend: from before it is made
// until it is proven gone. One that is paused to disk or to files has nothing there.
func (sb *Sandbox) TakesRoom() bool {
	switch sb.State {
	case Terminated:
		return false
	case Paused:
		return sb.Pause.Undo || sb.Pause.Depth == PauseFreeze
	}
	return true
}

// Room bounds how many sandboxes may take room at once (Sandbox.TakesRoom): of an extension, those
// that wait in pools too, and of a profile, which those are not counted for. A bound of 0 is none.
type Room struct {
	Extension    string
	ExtensionMax int
	Profile      string
	ProfileMax   int
}

// MaxRoom is the largest bound that can be set.
const MaxRoom = 1_000_000

// A FullError is the cause of an Exhausted error that Room is the reason of.
type FullError struct {
	Of string // the ID of the extension, or of the profile
}

func (e *FullError) Error() string { return e.Of + " is full" }

// fullRetryAfter is after how long somebody asks again who was told that there is no room: nobody
// knows when a sandbox ends.
const fullRetryAfter = 5 * time.Second

// Check refuses, as Exhausted with a FullError as its cause, a change after which one of both has
// more sandboxes than before and than it may have.
func (r *Room) Check(before, after RoomUse) error {
	full := func(what, id string, used, most int) error {
		e := E(Exhausted, &FullError{id}, "%s", fmt.Sprintf("%s %s is full: it has %d of %d sandboxes", what, id, used, most))
		e.RetryAfter = fullRetryAfter
		return e.WithHint("try again when one has ended, destroy one (sandboxer destroy), or ask an administrator for more room (max)")
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
