//go:build linux

package local

import (
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A call that finds that a sandbox has ended, before what watches for it does, reports the end.
func TestEndFoundByACall(t *testing.T) {
	e := openTest(t)
	h := up(t, e, sandboxer.Spec{})
	b, err := e.hold(h.Ref)
	if err != nil {
		t.Fatal(err)
	}
	all, err := e.Notify(t.Context(), ours("test"))
	if err != nil {
		t.Fatal(err)
	}
	b.process.forget() // as if its turn had not come
	killKernel(t, b)
	if _, err := e.hold(h.Ref); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Fatalf("a call for the sandbox: %v", err)
	}
	ids := make(chan string, 1)
	go func() {
		for id := range all {
			ids <- id
			return
		}
	}()
	select {
	case id := <-ids:
		if id != h.SandboxID {
			t.Errorf("%q ended; want %q", id, h.SandboxID)
		}
	case <-time.After(time.Minute):
		t.Error("nobody heard of the end")
	}
}
