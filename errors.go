package sandboxer

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// A Kind classifies an error by what the caller can do about it. Kinds are
// themselves errors, so that errors.Is(err, sandboxer.NotFound) works.
type Kind string

// The kinds. Each edge (REST, CLI, …) has one table that translates all of them.
const (
	Invalid         Kind = "invalid"         // fix the request
	Unauthenticated Kind = "unauthenticated" // say who you are
	Denied          Kind = "denied"          // you may not; ask someone
	NotFound        Kind = "not_found"       // not there, or not yours
	Conflict        Kind = "conflict"        // wrong state, stale version, or another body under the same key
	NoCredit        Kind = "no_credit"       // pay first
	Exhausted       Kind = "exhausted"       // capacity or quota; see RetryAfter
	Unsupported     Kind = "unsupported"     // this extension cannot; choose another
	Unavailable     Kind = "unavailable"     // may work later, or on another backend
	Timeout         Kind = "timeout"         // did not finish in time; may work later
	Failed          Kind = "failed"          // the sandbox itself is broken; do not retry
	Canceled        Kind = "canceled"        // the caller left
	Internal        Kind = "internal"        // a bug; clients see an error ID only
)

// Kinds lists every Kind, for tables that must be complete.
func Kinds() []Kind {
	return []Kind{Invalid, Unauthenticated, Denied, NotFound, Conflict, NoCredit, Exhausted,
		Unsupported, Unavailable, Timeout, Failed, Canceled, Internal}
}

// Error makes a Kind usable as a target of errors.Is.
func (k Kind) Error() string { return string(k) }

// Error attaches a Kind and a sentence for people to a cause.
//
// Msg and Hint travel to clients and must not contain secrets; Err is for the
// operator's log and does not travel. Where Msg or Hint tell what is an administrator's
// to know, such as what answers at an address that the caller may have chosen, Public is
// what everybody else gets instead of both (Discreet).
type Error struct {
	Kind       Kind
	Msg        string        // what failed and why
	Hint       string        // what to do or type next; may be empty
	RetryAfter time.Duration // for Exhausted and Unavailable; 0 means unknown
	Err        error
	Public     string
	// Untouched says, of an error of Provision and what stands in its place, that this call
	// made nothing and did nothing at its place, such as a host that it could not reach.
	Untouched bool
}

func (e *Error) Error() string {
	if e.Err == nil {
		return e.Msg
	}
	return e.Msg + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is reports whether target is e's Kind.
func (e *Error) Is(target error) bool { return target == error(e.Kind) }

// WithHint sets what the reader should do next and returns e.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// WithPublic sets what callers who are no administrators get instead of message and hint,
// and returns e.
func (e *Error) WithPublic(format string, args ...any) *Error {
	e.Public = fmt.Sprintf(format, args...)
	return e
}

// Untouched returns err, which is not nil, as one that is Untouched.
func Untouched(err error) error {
	e, ok := err.(*Error)
	if !ok {
		return &Error{Kind: KindOf(err), Msg: Message(err), Hint: HintOf(err), RetryAfter: RetryAfterOf(err), Err: err, Untouched: true}
	}
	own := *e
	own.Untouched = true
	return &own
}

// IsUntouched reports whether an error in err's chain is Untouched.
func IsUntouched(err error) bool {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return false
		}
		if e.Untouched {
			return true
		}
		err = e.Err
	}
	return false
}

// Discreet returns err as callers who are no administrators may see it: if a Public
// sentence is anywhere in its tree, an error of the same Kind with that sentence and err
// as its cause; else err itself.
func Discreet(err error) error {
	public := publicOf(err)
	if public == "" {
		return err
	}
	return E(KindOf(err), err, "%s", public).WithHint("ask an administrator: the server's log has the cause")
}

func publicOf(err error) string {
	switch e := err.(type) {
	case *Error:
		if e.Public != "" {
			return e.Public
		}
		return publicOf(e.Err)
	case interface{ Unwrap() error }:
		return publicOf(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			if p := publicOf(err); p != "" {
				return p
			}
		}
	}
	return ""
}

// E returns an *Error: E(NotFound, err, "profile %q does not exist", name).
func E(k Kind, cause error, format string, args ...any) *Error {
	return &Error{Kind: k, Msg: fmt.Sprintf(format, args...), Err: cause}
}

// KindOf returns the outermost Kind in err's chain. Context errors map to Timeout
// and Canceled; anything else is Internal. KindOf(nil) is "".
func KindOf(err error) Kind {
	var e *Error
	var k Kind
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Kind
	case errors.As(err, &k):
		return k
	case errors.Is(err, context.DeadlineExceeded):
		return Timeout
	case errors.Is(err, context.Canceled):
		return Canceled
	}
	return Internal
}

// Message returns the sentence of err that may be shown to a client. An error
// without a Kind of its own yields a general sentence: its text was not written for
// strangers and may name paths or secrets.
func Message(err error) string {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e) && e.Kind != Internal:
		return e.Msg
	case errors.Is(err, context.DeadlineExceeded):
		return "the operation did not finish in time"
	case errors.Is(err, context.Canceled):
		return "the operation was canceled"
	}
	return "internal error"
}

// HintOf returns the outermost hint in err's chain, or "".
func HintOf(err error) string {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return ""
		}
		if e.Hint != "" {
			return e.Hint
		}
		err = e.Err
	}
	return ""
}

// RetryAfterOf returns the outermost retry delay in err's chain, or 0.
func RetryAfterOf(err error) time.Duration {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return 0
		}
		if e.RetryAfter > 0 {
			return e.RetryAfter
		}
		err = e.Err
	}
	return 0
}
