package manager

import (
	"context"
	"errors"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
)

// Every use of a sandbox counts, and is counted off when it is over.
func TestUsesAreBounded(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.opts.Execs, s.opts.Streams = access.AtOnce{Sandbox: 1, Total: 9}, access.AtOnce{Sandbox: 1, Total: 9}
	})
	sb := r.create(sandboxer.CreateRequest{})
	ctx, cancel := context.WithCancel(acme)
	begun, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		r.Exec(ctx, sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "echo; exec sleep 600"}, Stdout: writer(func() { close(begun) })})
	}()
	<-begun
	if _, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"true"}}); !errors.Is(err, sandboxer.Exhausted) {
		t.Errorf("a second command: %v", err)
	}
	cancel()
	<-done
	if _, err := r.Exec(acme, sb.ID, sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		t.Errorf("after it: %v", err)
	}
	for ev, err := range r.Follow(acme, sandboxer.EventQuery{SandboxID: sb.ID}) {
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range r.Follow(acme, sandboxer.EventQuery{SandboxID: sb.ID}) {
			if !errors.Is(err, sandboxer.Exhausted) {
				t.Errorf("a second stream, at event %d: %v", ev.Seq, err)
			}
			break
		}
		if err := r.MakeDir(acme, sb.ID, "/tmp/x"); !errors.Is(err, sandboxer.Exhausted) {
			t.Errorf("a file beside it: %v", err)
		}
		break
	}
	if err := r.MakeDir(acme, sb.ID, "/tmp/x"); err != nil {
		t.Errorf("after it: %v", err)
	}
}

type writer func()

func (f writer) Write(p []byte) (int, error) { f(); return len(p), nil }
