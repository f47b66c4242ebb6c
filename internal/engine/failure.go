package engine

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// ErrAbsent is the cause of errors that say that the engine is not there: its program could
// not connect to it. Cached facts about its host may be outdated.
var ErrAbsent = errors.New("the engine is not there")

// absent is ErrAbsent in the program's words.
type absent string

func (a absent) Error() string        { return string(a) }
func (a absent) Is(target error) bool { return target == ErrAbsent }

// Failure is the error of a program that was to do what on a host, with an engine, and
// failed. said is its whole output, reason the relevant part.
func Failure(host, what, said, reason string) *sandboxer.Error {
	said = strings.ToLower(said)
	says := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(said, w) })
	}
	text := cmp.Or(OneLine(reason), "it gave no reason")
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
		return failed.WithHint("the engine of host %s pulls images: check that it reaches the registry, and that its account may pull there; or load the image there first (docker load, podman load)", host)
	}
	return failed
}

// Said returns a program's output before it failed with exit, or, without output, how it ended.
func Said(said string, exit sandboxer.Exit) string {
	if strings.TrimSpace(said) != "" {
		return said
	}
	return fmt.Sprintf("it exited with code %d and gave no reason", exit.Code)
}

// OneLine is the end of a program's output, on one line that moves no cursor.
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

// MaxSaid is how much of a program's output is kept, in bytes, where Failure is to find a reason in it.
const MaxSaid = 16 << 10
