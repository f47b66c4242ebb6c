package backend

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// crowded is an extension that finds no file descriptor.
type crowded struct{ sandboxer.Extension }

func (crowded) WaitReady(context.Context, sandboxer.Handle) (r sandboxer.Reachability, err error) {
	return r, sandboxer.E(sandboxer.Unavailable, &os.PathError{Op: "open", Path: "x", Err: syscall.EMFILE}, "no pipe")
}

// What fails for want of a file descriptor is exhausted, and says when to come back.
func TestWithoutDescriptors(t *testing.T) {
	_, err := New("ext.crowded", crowded{}, Options{}).WaitReady(t.Context(), sandboxer.Handle{SandboxID: "a", Generation: 1})
	if !errors.Is(err, sandboxer.Exhausted) || sandboxer.RetryAfterOf(err) <= 0 || sandboxer.HintOf(err) == "" {
		t.Errorf("%v (%s), again after %s", err, sandboxer.HintOf(err), sandboxer.RetryAfterOf(err))
	}
}
