package agent

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// counted returns the capabilities of a's sandbox, and the number of calls in progress.
func counted(a *running) (Capabilities, *atomic.Int32) {
	var open atomic.Int32
	return Capabilities{Open: func(ctx context.Context, _ sandboxer.Handle, _ bool) (Call, error) {
		open.Add(1)
		return Call{Agent: a.Client, Ctx: ctx, Done: func(err error) error { open.Add(-1); return err }}, nil
	}}, &open
}

// TestCallsEnd: a call ends once, whatever its caller does with its result.
func TestCallsEnd(t *testing.T) {
	a := startAgent(t)
	c, open := counted(a)
	h := sandboxer.Handle{SandboxID: "x"}
	ended := func(what string) {
		t.Helper()
		eventually(t, what+" goes on", func() bool { return open.Load() == 0 })
	}

	ctx, leave := context.WithCancel(t.Context())
	if _, err := c.WatchFiles(ctx, h, a.dir, false); err != nil {
		t.Fatal(err)
	}
	if open.Load() != 1 {
		t.Fatalf("%d calls under way; want the watch", open.Load())
	}
	leave() // the caller read nothing
	ended("a watch that nobody took")

	ctx, leave = context.WithCancel(t.Context())
	seq, err := c.WatchFiles(ctx, h, a.dir, false)
	if err != nil {
		t.Fatal(err)
	}
	leave()
	for _, err := range seq {
		if sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("a watch that was left: %v", err)
		}
	}
	ended("a watch that was left")

	if err := c.WriteFile(t.Context(), h, a.dir+"/f", 0o600, strings.NewReader("content")); err != nil {
		t.Fatal(err)
	}
	r, err := c.ReadFile(t.Context(), h, a.dir+"/f")
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	r.Close()
	ended("a reading that was closed")
	if n, err := r.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, io.EOF) {
		t.Errorf("reading on after the end: %d, %v; want an error", n, err)
	}
	if _, err := c.ReadFile(t.Context(), h, a.dir+"/none"); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("a missing file: %v", err)
	}
	ended("a reading that failed")
}
