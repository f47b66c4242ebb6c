package extension

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// failing is an extension with a bug.
type failing struct{}

var errBug = errors.New("the index is 7 of 3, token hush-hush")

func (failing) Provision(context.Context, sandboxer.Spec) (sandboxer.Handle, error) {
	return sandboxer.Handle{}, errBug
}

func (failing) WaitReady(context.Context, sandboxer.Handle) (sandboxer.Reachability, error) {
	return sandboxer.Reachability{}, sandboxer.E(sandboxer.Unavailable, errBug, "it is away")
}

func (failing) Teardown(context.Context, sandboxer.Handle) (sandboxer.CleanupReport, error) {
	return sandboxer.CleanupReport{}, sandboxer.E(sandboxer.Internal, errBug, "could not look it up")
}

// connect opens ext in a process of its own, as far as the protocol knows. What the broker logs has no "hush-hush".
func connect(t *testing.T, ext sandboxer.Extension) *protocol.Conn {
	t.Helper()
	a := sandboxer.Adapter{Kind: "failing", Open: func(context.Context, sandboxer.Env) (sandboxer.Extension, error) { return ext, nil }}
	ours, theirs := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- Serve(t.Context(), a, theirs, theirs) }()
	if err := protocol.WriteHello(ours, protocol.Hello{Protocols: protocol.Versions, Extension: "ext.failing", Owner: "test"}); err != nil {
		t.Fatal(err)
	}
	r := protocol.NewReader(ours)
	if hello, err := protocol.ReadHello(r); err != nil || hello.Error != nil {
		t.Fatal(err, hello)
	}
	conn := protocol.New(r, ours, protocol.Options{Hide: func(s string) string { return strings.ReplaceAll(s, "hush-hush", "[redacted]") }})
	run := make(chan error, 1)
	go func() { run <- conn.Run(context.Background()) }()
	t.Cleanup(func() {
		conn.Close()
		ours.Close()
		<-run
		conn.Wait()
		if err := <-ended; err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
			t.Error(err)
		}
	})
	return conn
}

// TestInternalErrorsKeepTheirCause: the broker has it for the log, with secrets blanked, and a caller is not told.
func TestInternalErrorsKeepTheirCause(t *testing.T) {
	conn := connect(t, failing{})
	handle := map[string]any{"handle": sandboxer.Handle{SandboxID: "abcdefgh", Generation: 1}}
	for _, c := range []struct {
		method string
		params any
		want   string // what the log gets; empty for nothing of the cause
	}{
		{"provision", map[string]any{"spec": sandboxer.Spec{ID: "abcdefgh", Generation: 1, Owner: "test"}}, "the index is 7 of 3, token [redacted]"},
		{"teardown", handle, "could not look it up: the index is 7 of 3, token [redacted]"},
		{"wait_ready", handle, ""},
	} {
		err := conn.Call(t.Context(), c.method, c.params, nil, "")
		if err == nil {
			t.Errorf("%s succeeded", c.method)
			continue
		}
		if text := err.Error(); strings.Contains(text, "hush-hush") || c.want != "" && !strings.Contains(text, c.want) || c.want == "" && strings.Contains(text, "7 of 3") {
			t.Errorf("the log of %s gets %q; want %q", c.method, text, c.want)
		}
		if told := sandboxer.Message(err) + sandboxer.HintOf(err); strings.Contains(told, "7 of 3") || c.want != "" && told != "internal error" {
			t.Errorf("the caller of %s is told %q", c.method, told)
		}
	}
}

// limited is an extension that makes whatever it gets.
type limited struct{ failing }

func (limited) Provision(_ context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation}, nil
}

func (limited) DefaultLimits(sandboxer.Spec) sandboxer.Limits { return sandboxer.Limits{PIDs: 7} }

func (limited) Admit(sandboxer.Spec, string) error { return nil }

// A spec comes from another process, so that it is checked before the extension gets it.
func TestSpecsAreChecked(t *testing.T) {
	conn := connect(t, limited{})
	for what, c := range map[string]struct {
		change func(*sandboxer.Spec)
		kind   sandboxer.Kind
	}{
		"good":          {func(*sandboxer.Spec) {}, ""},
		"no generation": {func(s *sandboxer.Spec) { s.Generation = 0 }, sandboxer.Invalid},
		"mount":         {func(s *sandboxer.Spec) { s.Mounts = []sandboxer.Mount{{Source: "/a", Target: "/proc"}} }, sandboxer.Invalid},
		"limit":         {func(s *sandboxer.Spec) { s.Limits.MemoryBytes = -1 }, sandboxer.Invalid},
		"network":       {func(s *sandboxer.Spec) { s.Network.Mode = "all" }, sandboxer.Invalid},
		"port":          {func(s *sandboxer.Spec) { s.Ports = []int{1 << 16} }, sandboxer.Invalid},
	} {
		spec := sandboxer.Spec{ID: "abcdefgh", Generation: 1, Owner: "test"}
		c.change(&spec)
		if err := conn.Call(t.Context(), protocol.MethodProvision, map[string]any{"spec": spec}, nil, ""); sandboxer.KindOf(err) != c.kind {
			t.Errorf("%s: %v; want %q", what, err, c.kind)
		}
	}
	// These are asked for a request that has no ID yet.
	var limits sandboxer.Limits
	if err := conn.Call(t.Context(), protocol.MethodDefaultLimits, map[string]any{"spec": sandboxer.Spec{}}, &limits, ""); err != nil || limits.PIDs != 7 {
		t.Errorf("default limits: %+v, %v", limits, err)
	}
	if err := conn.Call(t.Context(), protocol.MethodAdmit, map[string]any{"spec": sandboxer.Spec{}, "name": "image"}, nil, ""); err != nil {
		t.Errorf("admit: %v", err)
	}
}
