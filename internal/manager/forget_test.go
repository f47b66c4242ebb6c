package manager

import (
	"context"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

type forgetter struct {
	*fake.Extension
	forgot *[]string
}

func (f forgetter) Forget(_ context.Context, h sandboxer.Handle) ([]string, error) {
	*f.forgot = append(*f.forgot, h.SandboxID)
	return []string{"on host a the directory " + h.SandboxID}, nil
}

// A sandbox that cannot be removed is given up by an administrator: its record ends, what may
// remain is said, and named by audit until its backend says that it is gone.
func TestForget(t *testing.T) {
	var forgot []string
	r := newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return forgetter{e, &forgot} }
	})
	sb := r.create(sandboxer.CreateRequest{})
	if _, err := r.Forget(admin, sb.ID); sandboxer.KindOf(err) != sandboxer.Conflict {
		t.Errorf("a running one: %v", err)
	}
	r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable})
	if _, err := r.Destroy(admin, sb.ID); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Fatalf("Destroy: %v", err)
	}
	if _, err := r.Forget(acme, sb.ID); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("a tenant: %v", err)
	}
	got, err := r.Forget(admin, sb.ID)
	if err != nil || got.State != sandboxer.Terminated || !got.Cleanup.Forgotten || len(got.Cleanup.Kept) != 1 || len(forgot) != 1 {
		t.Fatalf("Forget = %+v, %v; forgot %q", got, err, forgot)
	}
	if again, err := r.Forget(admin, sb.ID); err != nil || again.State != sandboxer.Terminated || len(forgot) != 1 {
		t.Errorf("again: %+v, %v", again, err)
	}
	named := func() (out []string) {
		t.Helper()
		a, err := r.Audit(admin)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range a.Violations {
			if v.Invariant == invForgotten {
				out = append(out, v.SandboxID+" "+v.Detail)
			}
		}
		return out
	}
	if got := named(); len(got) != 1 || !strings.Contains(got[0], "these may remain: on host a the directory "+sb.ID) {
		t.Errorf("audit names %q", got)
	}
	r.world.Forgive()
	r.world.Kill(sb.ID)
	if got := named(); len(got) != 0 {
		t.Errorf("once it is gone audit names %q", got)
	}
}
