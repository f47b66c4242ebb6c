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
	Unauthenticated Kind = "unauthenticated" // the caller did not prove its identity
	Denied          Kind = "denied"          // not permitted; ask an administrator
	NotFound        Kind = "not_found"       // does not exist, or belongs to another tenant
	Conflict        Kind = "conflict"        // wrong state, stale version, or another request under the same key
	NoCredit        Kind = "no_credit"       // not enough credits
	Exhausted       Kind = "exhausted"       // no capacity, or a quota is used up; see RetryAfter
	Unsupported     Kind = "unsupported"     // this extension cannot do it; choose another
	Unavailable     Kind = "unavailable"     // may work later, or on another backend
	Timeout         Kind = "timeout"         // did not finish in time; may work later
	Failed          Kind = "failed"          // the sandbox itself is broken; do not retry
	Canceled        Kind = "canceled"        // the caller canceled the request
	Internal        Kind = "internal"        // a bug; clients get only an error ID
)

// Kinds lists every Kind, for tables that must be complete.
func Kinds() []Kind {
	return []Kind{Invalid, Unauthenticated, Denied, NotFound, Conflict, NoCredit, Exhausted,
		Unsupported, Unavailable, Timeout, Failed, Canceled, Internal}
}

// Error makes a Kind usable as a target of errors.Is.
func (k Kind) Error() string { return string(k) }

// Error gives a cause a Kind and a message.
//
// Clients see Msg and Hint, so these must not contain secrets. Err is only for the operator's log. If
// Msg or Hint reveal something to administrators only, such as the response of an address that the
// caller may have chosen, other callers get Public instead of both (Discreet).
type Error struct {
	Kind       Kind
	Msg        string        // what failed and why
	Hint       string        // what to do or type next; may be empty
	RetryAfter time.Duration // for Exhausted and Unavailable; 0 means unknown
	Err        error
	Public     string
	// Untouched says, in an error of Provision and the calls that replace it, that this call changed
	// nothing at its host, for example because it could not connect to it.
	Untouched bool
}

// Error returns the message with the texts of its causes, for logs. Message returns the part for
// clients.
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

// WithHint sets the hint and returns e.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// WithPublic sets the message that callers without the admin scope get instead of message and hint, and
// returns e.
func (e *Error) WithPublic(format string, args ...any) *Error {
	e.Public = fmt.Sprintf(format, args...)
	return e
}

// Untouched returns a copy of err, which must not be nil, with Untouched set.
func Untouched(err error) error {
	e, ok := err.(*Error)
	if !ok {
		return &Error{Kind: KindOf(err), Msg: Message(err), Hint: HintOf(err), RetryAfter: RetryAfterOf(err), Err: err, Untouched: true}
	}
	own := *e
	own.Untouched = true
	return &own
}

// IsUntouched reports whether an error in err's chain has Untouched set.
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

// Discreet returns err in the form for callers without the admin scope. If an error in its tree has a
// Public message, the result has the same Kind, that message, and err as its cause. Otherwise it is err
// itself.
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

// Message returns the message of err for a client. An error without a Kind yields a general message,
// because its text may name paths or secrets.
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
