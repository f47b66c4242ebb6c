package engine

import (
	"errors"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// What failed has a kind by what its program said, which is shown on one line and kept in part.
func TestFailure(t *testing.T) {
	for said, want := range map[string]struct {
		kind sandboxer.Kind
		msg  string
	}{
		"tar: wrote only 5 of 10 bytes":                                 {sandboxer.Exhausted, "the disk of host h is full"},
		"Cannot connect to the Docker daemon at unix:///x. Is the ...":  {sandboxer.Unavailable, "the engine does not answer"},
		"Error: could not find an available, non-overlapping IPv4 pool": {sandboxer.Exhausted, "no network left"},
		"\x1b[31mmanifest unknown\x1b[0m":                               {sandboxer.Failed, "a step on host h failed: manifest unknown"},
		"one\ntwo\r\n\x07three":                                         {sandboxer.Failed, "a step on host h failed: one; two; three"},
		"":                                                              {sandboxer.Failed, "a step on host h failed: it gave no reason"},
		Said("\n", sandboxer.Exit{Code: 137}):                           {sandboxer.Failed, "a step on host h failed: it exited with code 137 and gave no reason"},
		Said("no", sandboxer.Exit{Code: 1}):                             {sandboxer.Failed, "a step on host h failed: no"},
	} {
		err := Failure("h", "a step", said, said)
		if err.Kind != want.kind || !strings.Contains(err.Msg, want.msg) {
			t.Errorf("%q: %s: %v", said, err.Kind, err)
		}
		if got := errors.Is(err, ErrAbsent); got != (want.kind == sandboxer.Unavailable) {
			t.Errorf("%q: absent %t", said, got)
		}
		if got := err.Hint != ""; strings.Contains(said, "manifest") && !got {
			t.Errorf("%q: no hint", said)
		}
	}
	long := OneLine(strings.Repeat("ä", 5000))
	if len(long) > 610 || !strings.HasPrefix(long, "…ä") {
		t.Errorf("a long line is %d bytes: %.20q", len(long), long)
	}
}
