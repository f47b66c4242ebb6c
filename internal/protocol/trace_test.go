package protocol

import (
	"errors"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestTrace: where an error came from is its cause, which is logged and does not travel.
func TestTrace(t *testing.T) {
	e := &Error{Kind: sandboxer.Internal, Message: "Mine.exec failed: ZeroDivisionError", Trace: "in exec, line 7: secret"}
	err := e.Err(func(s string) string { return strings.ReplaceAll(s, "secret", "***") })
	if !strings.Contains(err.Error(), "in exec, line 7: ***") || strings.Contains(sandboxer.Message(err), "line 7") {
		t.Errorf("%v; told: %s", err, sandboxer.Message(err))
	}
	if again := ErrorOf(err); again.Trace != "" {
		t.Errorf("it travels on: %+v", again)
	}
}

// TestTraced: an extension tells the causes of an internal error, and of no other.
func TestTraced(t *testing.T) {
	cause := errors.New("the index is 7 of 3")
	e := Traced(sandboxer.E(sandboxer.Internal, cause, "could not look it up"))
	if !strings.Contains(e.Trace, "could not look it up: the index is 7 of 3") || e.Message != "internal error" {
		t.Errorf("%+v", e)
	}
	if e := Traced(cause); e.Kind != sandboxer.Internal || !strings.Contains(e.Trace, "7 of 3") {
		t.Errorf("%+v", e)
	}
	if e := Traced(sandboxer.E(sandboxer.Failed, cause, "it failed")); e.Trace != "" {
		t.Errorf("%+v", e)
	}
	if e := ErrorOf(cause); e.Trace != "" {
		t.Errorf("the broker tells %+v", e)
	}
	if e := Traced(errors.New(strings.Repeat("word ", 10_000))); len(e.Trace) > maxText+len("…") {
		t.Errorf("a trace of %d bytes", len(e.Trace))
	}
	if Traced(nil) != nil {
		t.Error("no error is one")
	}
}
