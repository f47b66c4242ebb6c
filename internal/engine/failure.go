package engine

import (
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// ErrAbsent is the cause of errors that say that the engine is not there: its program could
// not connect to it. What was found out about its host may not be so any more.
var ErrAbsent = errors.New("the engine is not there")

// absent is ErrAbsent in the program's words.
type absent string

func (a absent) Error() string        { return string(a) }
func (a absent) Is(target error) bool { return target == ErrAbsent }

// Failure is the error of a program that was to do what on a host, with an engine, and ended
// badly. said is all that it said, reason what counts of it.
func Failure(host, what, said, reason string) *sandboxer.Error {
	said = strings.ToLower(said)
	says := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(said, w) })
	}
	text := OneLine(reason)
	switch {
	case says("no space left on device", "disk quota exceeded", "wrote only "): // as the kernel says it, and as tar does
		return sandboxer.E(sandboxer.Exhausted, errors.New(text), "the disk of host %s is full", host).
			WithHint("make room there (docker system prune), or drain it: sandboxer host drain %s", host)
	case says("cannot connect to the docker daemon", "is the docker daemon running", "failed to connect to the docker api", "if the daemon is running", "connection refused", "error while fetching server api version", "permission denied while trying to connect", "cannot connect to podman"):
		return sandboxer.E(sandboxer.Unavailable, absent(text), "host %s: the engine does not answer", host)
	case says("could not find an available", "address pool"):
		return sandboxer.E(sandboxer.Exhausted, errors.New(text), "host %s has no network left", host)
	}
	failed := sandboxer.E(sandboxer.Failed, errors.New(text), "%s on host %s failed: %s", what, host, text)
	if says("dial tcp: lookup", "pull access denied", "manifest unknown", "manifest for ", "toomanyrequests") { // as engines say it when they want an image
		return failed.WithHint("it is the engine of host %s that gets images: does it reach that registry, and may the account there? docker load or podman load puts one there beforehand", host)
	}
	return failed
}

// OneLine is the end of what a program said, on one line that moves no cursor.
func OneLine(said string) string {
	lines := strings.FieldsFunc(sshrun.Plain(said), func(r rune) bool { return r == '\n' || r == '\r' })
	if len(lines) > 4 {
		lines = lines[len(lines)-4:]
	}
	for i := range lines {
		lines[i] = strings.TrimSpace(strings.Map(func(r rune) rune {
			if r < ' ' {
				return -1
			}
			return r
		}, lines[i]))
	}
	text := strings.Join(lines, "; ")
	if len(text) > 600 {
		text = "…" + strings.ToValidUTF8(text[len(text)-600:], "")
	}
	return text
}

// Last returns a writer that keeps in b the end of what is written: 16 KiB at least, 32 KiB at
// most.
func Last(b *strings.Builder) io.Writer { return &last{b} }

type last struct{ b *strings.Builder }

func (l *last) Write(p []byte) (int, error) {
	l.b.Write(p)
	if l.b.Len() > 32<<10 {
		s := l.b.String()
		l.b.Reset()
		l.b.WriteString(s[len(s)-16<<10:])
	}
	return len(p), nil
}
