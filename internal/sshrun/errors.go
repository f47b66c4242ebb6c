package sshrun

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode"

	"github.com/sand-boxer/sandboxer"
)

// Faults of a host, as targets of errors.Is. All are of the kind
// sandboxer.Unavailable.
var (
	ErrUnreachable = errors.New("host unreachable")
	ErrHostKey     = errors.New("host key not trusted")
	ErrAuth        = errors.New("host refused the login")
	ErrLost        = errors.New("connection lost midway; the command may have run")
	ErrShell       = errors.New("the host started no POSIX shell")
)

// errFull is a connection that admits no further session.
var errFull = errors.New("the host allows no further session on this connection")

// errDropped is a handshake that the server ended at once, as it does when too many
// are under way.
var errDropped = errors.New("handshake dropped")

// fault makes the error of one of the conditions above; detail is the message of ssh or
// the host.
func (t Target) fault(what error, detail string) error {
	// The detail reveals what is at an address: it is only for those who may choose addresses.
	return t.faulty(what, detail).WithPublic("host %s is not usable now", t.Name)
}

func (t Target) faulty(what error, detail string) *sandboxer.Error {
	cause := what
	if detail != "" {
		cause = fmt.Errorf("%w: %s", what, detail)
	}
	switch what {
	case ErrHostKey:
		changed := strings.Contains(detail, "CHANGED")
		msg := "the key of host %s is not trusted"
		if changed {
			msg = "host %s shows another key than the trusted one: it was reinstalled, or somebody intercepts the connection"
		}
		return sandboxer.E(sandboxer.Unavailable, cause, msg, t.Name).
			WithHint("compare the key with the one that the host's owner reports, then run: sandboxer host add %s %s", t.Name, t.Paste())
	case ErrAuth:
		return sandboxer.E(sandboxer.Unavailable, cause, "host %s refuses the configured login (%s)", t.Name, t.Addr).
			WithHint("try: ssh -o BatchMode=yes %s true", t.sshWords())
	case ErrLost:
		return sandboxer.E(sandboxer.Unavailable, cause, "the connection to host %s was lost midway", t.Name)
	case ErrShell:
		return sandboxer.E(sandboxer.Unavailable, cause, "host %s did not start /bin/sh%s", t.Name, saying(detail)).
			WithHint("give the account a login shell that can run: exec /bin/sh")
	}
	return sandboxer.E(sandboxer.Unavailable, cause, "host %s cannot be reached%s", t.Name, saying(detail)).
		WithHint("try: ssh -o BatchMode=yes %s true", t.sshWords())
}

func saying(detail string) string {
	if detail == "" {
		return ""
	}
	return " (" + detail + ")"
}

// failure is the error for the end of ctx if ctx ended, or else err.
func failure(ctx context.Context, t Target, err error, what string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		return sandboxer.E(sandboxer.Timeout, err, "%s on host %s did not finish in time", what, t.Name)
	case ctx.Err() != nil:
		return sandboxer.E(sandboxer.Canceled, err, "%s on host %s was canceled", what, t.Name)
	}
	return err
}

var dropped = regexp.MustCompile(`(?i)kex_exchange_identification|ssh_exchange_identification|Connection reset by|Exceeded MaxStartups|Connection closed by (remote host|[0-9a-f.:]+ port|UNKNOWN)`)

// classify returns the condition that the output of a failed ssh means.
func classify(said string) error {
	has := func(words ...string) bool {
		for _, w := range words {
			if strings.Contains(said, w) {
				return true
			}
		}
		return false
	}
	switch {
	case has("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED", "host key is known for"):
		return ErrHostKey
	case has("Permission denied", "Too many authentication failures", "No supported authentication methods", "no such identity"):
		return ErrAuth
	case dropped.MatchString(said):
		return errDropped
	}
	return ErrUnreachable
}

// escapes are the sequences of ECMA-48 by which a program colours its output or moves the
// cursor: with parameters (CSI), with text (OSC and its like), and the short ones.
var escapes = regexp.MustCompile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|[\\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[ -/]*[0-~])|\u009b[0-?]*[ -/]*[@-~]")

// Plain returns a program's output without the sequences that are for a terminal. Other
// characters that do not print stay.
func Plain(said string) string { return escapes.ReplaceAllString(said, "") }

// tidy makes the output of a program or host fit to be shown: one line, nothing that
// moves the cursor, not long.
func tidy(said string) string {
	said = strings.ReplaceAll(Plain(said), "@", "")
	said = strings.Join(strings.FieldsFunc(said, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }), " ")
	if r := []rune(said); len(r) > 300 {
		said = "…" + string(r[len(r)-300:])
	}
	return said
}
