package manager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestLimiter(t *testing.T) {
	u := newLimiter("commands", AtOnce{Sandbox: 2, Key: 3, Tenant: 4, Total: 5})
	p := func(actor, tenant string) sandboxer.Principal {
		return sandboxer.Principal{Actor: actor, Tenant: tenant}
	}
	var ends []func()
	begin := func(sandbox, actor, tenant string, want string) {
		t.Helper()
		end, err := u.begin(sandbox, tenant, p(actor, tenant))
		switch {
		case want == "" && err != nil:
			t.Errorf("%s of %s: %v", sandbox, actor, err)
		case want != "" && (!errors.Is(err, sandboxer.Exhausted) || sandboxer.RetryAfterOf(err) <= 0 || sandboxer.Message(err) != want):
			t.Errorf("%s of %s: %v; want %s", sandbox, actor, err, want)
		}
		if err == nil {
			ends = append(ends, end)
		}
	}
	begin("a", "k1", "big", "")
	begin("a", "k1", "big", "")
	begin("a", "k2", "big", "sandbox a has 2 commands at once, as many as there may be")
	begin("b", "k1", "big", "")
	begin("c", "k1", "big", "k1 has 3 commands at once, as many as there may be")
	begin("c", "k2", "big", "")
	begin("d", "k3", "big", "tenant big has 4 commands at once, as many as there may be")
	begin("e", "k4", "small", "")
	begin("f", "k5", "other", "this server has 5 commands at once, as many as there may be")
	ends[0]()
	ends[0]() // once counts
	begin("a", "k1", "big", "")
	for _, end := range ends {
		end()
	}
	if u.total != 0 || len(u.sandboxes) != 0 || len(u.keys) != 0 || len(u.tenants) != 0 {
		t.Errorf("left: %+v", u)
	}
	for _, n := range []int{1024, 4096, 1 << 19} {
		x, s := defaultExecs(n), defaultStreams(n)
		if x.Sandbox < 100 || s.Sandbox < 100 || x.Total*execDescriptors+s.Total*streamDescriptors > n {
			t.Errorf("%d descriptors: %+v commands, %+v streams", n, x, s)
		}
	}
}

// Every use of a sandbox counts, and is counted off when it is over.
func TestUsesAreBounded(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.opts.Execs, s.opts.Streams = AtOnce{Sandbox: 1, Total: 9}, AtOnce{Sandbox: 1, Total: 9}
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

// What docs/api.md says of how much may go on at once is what the code has.
func TestDocumentedBounds(t *testing.T) {
	page, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("with 1,024 descriptors to %d and %d, with 8,192 or more to %d each", defaultExecs(1024).Total, defaultStreams(1024).Total, defaultExecs(8192).Total)
	if !strings.Contains(string(page), want) || defaultExecs(8192) != defaultStreams(8192) || defaultExecs(1<<20) != defaultExecs(8192) {
		t.Errorf("docs/api.md does not say %q", want)
	}
}
