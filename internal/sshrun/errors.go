package sshrun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"unicode"

	"github.com/sand-boxer/sandboxer"
)

// What goes wrong with a host, as targets of errors.Is. All are of the kind
// sandboxer.Unavailable.
var (
	ErrUnreachable = errors.New("host unreachable")
	ErrHostKey     = errors.New("host key not trusted")
	ErrAuth        = errors.New("host refused the login")
	ErrLost        = errors.New("connection lost midway; the command may have run")
	ErrShell       = errors.New("the host started no POSIX shell")
)

// errFull is a connection that admits no further session.
var errFull = errors.New("no further session on this connection")

// errDropped is a handshake that the server ended at once, as it does when too many
// are under way.
var errDropped = errors.New("handshake dropped")

// fault makes the error of one of the conditions above; detail is what ssh or the
// host said.
func (t Target) fault(what error, detail string) error {
	// What is wrong tells what is at an address: that is for those who may choose them.
	return t.faulty(what, detail).WithPublic("host %s cannot be used now", t.Name)
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
			msg = "host %s shows another key than the trusted one: either it was set up anew or somebody is in between"
		}
		return sandboxer.E(sandboxer.Unavailable, cause, msg, t.Name).
			WithHint("compare the key with what the host's owner says, then: sandboxer host add %s %s", t.Name, t.Addr)
	case ErrAuth:
		return sandboxer.E(sandboxer.Unavailable, cause, "host %s does not let us log in as configured (%s)", t.Name, t.Addr).
			WithHint("try: ssh -o BatchMode=yes %s true", t.sshWords())
	case ErrLost:
		return sandboxer.E(sandboxer.Unavailable, cause, "the connection to host %s was lost midway", t.Name)
	case ErrShell:
		return sandboxer.E(sandboxer.Unavailable, cause, "host %s did not start /bin/sh for us%s", t.Name, saying(detail)).
			WithHint("the account needs a login shell that runs: exec /bin/sh")
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

// failure is what became of err if ctx ended, or else err.
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

// classify says which condition the words of a failed ssh amount to.
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

// escapes are the sequences of ECMA-48 by which a program colours its words or moves the
// cursor: with parameters (CSI), with text (OSC and its like), and the short ones.
var escapes = regexp.MustCompile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|[\\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[ -/]*[0-~])|\u009b[0-?]*[ -/]*[@-~]")

// Plain returns what a program said without the sequences that are for a terminal. What
// else does not print is left.
func Plain(said string) string { return escapes.ReplaceAllString(said, "") }

// tidy makes what a program or host said fit to be shown: one line, nothing that
// moves the cursor, not long.
func tidy(said string) string {
	said = strings.ReplaceAll(Plain(said), "@", "")
	said = strings.Join(strings.FieldsFunc(said, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }), " ")
	if r := []rune(said); len(r) > 300 {
		said = "…" + string(r[len(r)-300:])
	}
	return said
}

// tailBuffer keeps the end of what is written to it.
type tailBuffer struct {
	least int // how much of it, in bytes: up to twice that; 0 for 4 KiB

	mu sync.Mutex
	b  []byte
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if n := cmp.Or(t.least, 4<<10); len(t.b) > 2*n {
		t.b = append(t.b[:0], t.b[len(t.b)-n:]...)
	}
	return len(p), nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
