package manager

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// slowly reports progress while it provisions.
type slowly struct {
	*fake.Extension
	gate chan struct{}
}

func (s slowly) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	for i := range int64(50) {
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "pulling", Done: i, Total: 100})
	}
	<-s.gate
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "pulling", Done: 100, Total: 100})
	<-s.gate
	return s.Extension.Provision(ctx, spec)
}

// TestFollowersHearOfProgress: while a create lasts, from whenever on they follow, and
// nothing of it is stored.
func TestFollowersHearOfProgress(t *testing.T) {
	gate := make(chan struct{})
	r := newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return slowly{e, gate} }
	})
	ctx, cancel := context.WithTimeout(as("alice", sandboxer.ScopeWrite, sandboxer.ScopeRead), 20*time.Second)
	defer cancel()
	sb, err := r.Create(ctx, sandboxer.CreateRequest{Profile: "profile.test", NoWaiting: true})
	if err != nil {
		t.Fatal(err)
	}
	var heard []sandboxer.Event
	steps := 0
	for ev, err := range r.Follow(ctx, sandboxer.EventQuery{SandboxID: sb.ID}) {
		if err != nil {
			t.Fatal(err)
		}
		if ev.Type == sandboxer.EventProgress {
			heard = append(heard, ev)
			if ev.Seq != 0 || ev.SandboxID != sb.ID || ev.Progress.Step != "pulling" {
				t.Errorf("heard %+v", ev)
			}
			if steps++; steps == 1 || ev.Progress.Done == 100 {
				gate <- struct{}{}
			}
		}
		if ev.To == sandboxer.Running {
			break
		}
	}
	if len(heard) == 0 || len(heard) > 4 || heard[len(heard)-1].Progress.Done != 100 {
		t.Errorf("heard %d times of progress: %+v", len(heard), heard)
	}
	stored, err := r.Events(ctx, sandboxer.EventQuery{SandboxID: sb.ID, Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	for _, ev := range stored {
		if ev.Type == sandboxer.EventProgress || strings.Contains(ev.Message, "pulling") {
			t.Errorf("stored: %+v", ev)
		}
	}
	if len(r.notifier.progress) > 0 {
		t.Errorf("kept: %v", r.notifier.progress)
	}
}
