//go:build linux

package modal

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

func order(id string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "test", Fuse: time.Now().Add(time.Hour), Env: map[string]string{"CANARY": "cafe"}}
}

func wantKind(t *testing.T, what string, err error, kind sandboxer.Kind) {
	t.Helper()
	if sandboxer.KindOf(err) != kind {
		t.Errorf("%s: %v (%s); want %s", what, err, sandboxer.KindOf(err), kind)
	}
}

// called is how many calls of a method came.
func (f *fake) called(method string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[method]
}

func (f *fake) running() (refs []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, sb := range f.boxes {
		if sb.ended.IsZero() {
			refs = append(refs, id)
		}
	}
	return refs
}

// made makes a sandbox while the fake is well.
func made(t *testing.T, change ...func(map[string]any)) (*fake, *extension, sandboxer.Handle) {
	t.Helper()
	canBox(t)
	f := newFake(t)
	x := opens(t, f, "test", t.TempDir(), change...)
	h, err := x.Provision(t.Context(), order("old"))
	if err != nil {
		t.Fatal(err)
	}
	return f, x, h
}

func says(t *testing.T, x *extension, h sandboxer.Handle, script string) (string, error) {
	t.Helper()
	var out strings.Builder
	_, err := x.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", script}, Stdout: &out})
	return out.String(), err
}

// A refusal has its kind and says what to do. It changes nothing, and the request succeeds once the fault is over.
func TestRefusals(t *testing.T) {
	f, x, h := made(t)
	throttled, err := status.New(codes.ResourceExhausted, "too many").WithDetails(pb.RPCRetryPolicy_builder{RetryAfterSecs: 90}.Build())
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		err  error
		kind sandboxer.Kind
	}{
		"throttled":   {throttled.Err(), sandboxer.Exhausted},
		"quota":       {status.Error(codes.ResourceExhausted, "the plan's containers are in use"), sandboxer.Exhausted},
		"conflict":    {status.Error(codes.FailedPrecondition, "another change"), sandboxer.Unavailable},
		"unavailable": {status.Error(codes.Unavailable, "no worker \x1b[2J"), sandboxer.Unavailable},
		"denied":      {status.Error(codes.PermissionDenied, "the token may not"), sandboxer.Unavailable},
	} {
		t.Run(what, func(t *testing.T) {
			ctx := t.Context()
			f.set(func(f *faults) { f.refuse, f.times = map[string]error{"": c.err}, -1 })
			_, err := x.Provision(ctx, order("new"))
			wantKind(t, "Provision", err, c.kind)
			if sandboxer.HintOf(err) == "" || strings.Contains(sandboxer.Message(err), "\x1b") {
				t.Errorf("the message is %q, and what to do %q", sandboxer.Message(err), sandboxer.HintOf(err))
			}
			if what == "throttled" && sandboxer.RetryAfterOf(err) != 90*time.Second {
				t.Errorf("it is to be tried again in %s", sandboxer.RetryAfterOf(err))
			}
			_, err = x.Teardown(ctx, h)
			wantKind(t, "Teardown", err, c.kind)
			if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown {
				t.Errorf("IsAlive = %s, %v", l, err)
			}
			f.set(func(f *faults) { f.refuse = nil })
			if refs := f.running(); len(refs) != 1 || refs[0] != h.Ref {
				t.Errorf("Modal has %q; want %q", refs, h.Ref)
			}
			if _, err := x.Teardown(ctx, sandboxer.Handle{SandboxID: "new", Generation: 1}); err != nil {
				t.Error(err)
			}
		})
	}
	if _, err := x.Provision(t.Context(), order("new")); err != nil {
		t.Error(err)
	}
}

// A short throttle is waited out by the client.
func TestThrottledShortly(t *testing.T) {
	f, x, _ := made(t)
	throttled, err := status.New(codes.ResourceExhausted, "too many").WithDetails(pb.RPCRetryPolicy_builder{RetryAfterSecs: 0.1}.Build())
	if err != nil {
		t.Fatal(err)
	}
	f.set(func(f *faults) { f.refuse, f.times = map[string]error{"SandboxCreateV2": throttled.Err()}, 2 })
	if _, err := x.Provision(t.Context(), order("new")); err != nil {
		t.Error(err)
	}
}

// After a lost answer the sandbox is adopted, at once or as soon as the listing shows it. It is made once, and not called absent.
func TestLostAnswer(t *testing.T) {
	ctx := t.Context()
	t.Run("listed", func(t *testing.T) {
		f, x, old := made(t)
		f.set(func(f *faults) { f.lose = map[string]bool{"SandboxCreateV2": true} })
		h, err := x.Provision(ctx, order("box"))
		if refs := f.running(); err != nil || len(refs) != 2 || h.Ref == old.Ref || f.called("SandboxCreateV2") < 3 {
			t.Errorf("Provision = %+v, %v; Modal has %q after %d requests", h, err, refs, f.called("SandboxCreateV2"))
		}
	})
	for _, then := range []string{"adopted later", "removed later"} {
		t.Run(then, func(t *testing.T) {
			f, x, _ := made(t, func(c map[string]any) { c["settle"] = time.Minute })
			byID := sandboxer.Handle{SandboxID: "box", Generation: 1}
			f.set(func(f *faults) { f.lose, f.lag = map[string]bool{"SandboxCreateV2": true}, time.Hour })
			for range 2 {
				_, err := x.Provision(ctx, order("box"))
				wantKind(t, "Provision with a listing that lags", err, sandboxer.Unavailable)
				_, err = x.Teardown(ctx, byID)
				wantKind(t, "Teardown", err, sandboxer.Unavailable)
				if l, _ := x.IsAlive(ctx, byID); l != sandboxer.Unknown {
					t.Errorf("IsAlive = %s", l)
				}
			}
			f.set(func(f *faults) { f.lose, f.lag = nil, 0 })
			if then == "removed later" {
				if _, err := x.Teardown(ctx, byID); err != nil || len(f.running()) != 1 {
					t.Errorf("Teardown: %v; Modal has %q", err, f.running())
				}
			} else if h, err := x.Provision(ctx, order("box")); err != nil || len(f.running()) != 2 || h.Ref == "" {
				t.Errorf("Provision = %+v, %v; Modal has %q", h, err, f.running())
			}
		})
	}
	t.Run("the note is lost, too", func(t *testing.T) { // the name at Modal prevents a second one
		f, x, h := made(t)
		f.set(func(f *faults) { f.lag = time.Hour })
		other := opens(t, f, "test", t.TempDir())
		_, err := other.Provision(ctx, order("old"))
		wantKind(t, "Provision", err, sandboxer.Unavailable)
		if refs := f.running(); len(refs) != 1 {
			t.Errorf("Modal has %q", refs)
		}
		f.set(func(f *faults) { f.lag = 0 })
		if again, err := other.Provision(ctx, order("old")); err != nil || again.Ref != h.Ref {
			t.Errorf("Provision = %+v, %v", again, err)
		}
		_ = x
	})
}

// A listing that lags shows neither what is new nor that something is gone; each sandbox itself is asked.
func TestLaggingList(t *testing.T) {
	ctx := t.Context()
	f, x, h := made(t)
	f.set(func(f *faults) { f.lag = time.Hour })
	byID := sandboxer.Handle{SandboxID: "old"}
	for h := range x.ListRunning(ctx, "test") {
		t.Errorf("the listing shows %+v already", h)
	}
	if again, err := x.Provision(ctx, order("old")); err != nil || again.Ref != h.Ref {
		t.Errorf("Provision again = %+v, %v", again, err)
	}
	if l, err := x.IsAlive(ctx, byID); l != sandboxer.Alive {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if _, err := x.Teardown(ctx, byID); err != nil {
		t.Fatal(err)
	}
	if l, err := x.IsAlive(ctx, byID); l != sandboxer.Gone {
		t.Errorf("IsAlive after Teardown = %s, %v", l, err)
	}
}

// A key that was revoked ends no sandbox, and nothing is called absent.
func TestRevoked(t *testing.T) {
	ctx := t.Context()
	f, x, h := made(t)
	f.set(func(f *faults) { f.revoked = true })
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown || !strings.Contains(sandboxer.HintOf(err), "key") {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	_, err := says(t, x, h, "true")
	wantKind(t, "Exec", err, sandboxer.Unavailable)
	_, err = x.Provision(ctx, order("new"))
	wantKind(t, "Provision", err, sandboxer.Unavailable)
	if strings.Contains(fmt.Sprintf("%+v %s", err, sandboxer.HintOf(err)), tokenSecret) {
		t.Errorf("the error has the key: %v", err)
	}
	f.set(func(f *faults) { f.revoked = false })
	if out, err := says(t, x, h, "echo $CANARY"); err != nil || out != "cafe\n" {
		t.Errorf("with the key again: %q, %v", out, err)
	}
}

// Tokens that end are renewed, with any clock at Modal, and the fuse is kept by our clock.
func TestTokensAndClocks(t *testing.T) {
	for _, skew := range []time.Duration{time.Hour, -time.Hour} {
		canBox(t)
		ctx, f := t.Context(), newFake(t)
		f.set(func(f *faults) { f.skew, f.life = skew, time.Minute })
		x, spec := opens(t, f, "test", t.TempDir()), order("box")
		h, err := x.Provision(ctx, spec)
		if err != nil {
			t.Fatalf("clock %s ahead: %v", skew, err)
		}
		f.mu.Lock()
		for token := range f.auth { // as if time passed
			f.auth[token] = login{account: tokenID}
		}
		f.mu.Unlock()
		x.agents.Drop(hosted.InAccount(ctx, h.Ref))
		if found, err := x.Discover(ctx, "box"); skew < 0 && (err != nil || !found.Fuse.Equal(spec.Fuse)) {
			t.Errorf("clock %s ahead: Discover = %+v, %v; want the fuse %s", skew, found, err, spec.Fuse)
		}
		if skew < 0 {
			if out, err := says(t, x, h, "echo yes"); err != nil || out != "yes\n" {
				t.Errorf("clock %s ahead: %q, %v", skew, out, err)
			}
		}
		f.mu.Lock()
		secs := f.boxes[h.Ref].req.GetTimeoutSecs()
		f.mu.Unlock()
		if secs < 3590 || secs > 3601 {
			t.Errorf("clock %s ahead: the lifetime is %d s", skew, secs)
		}
	}
}

// What Modal ended is gone.
func TestGone(t *testing.T) {
	ctx := t.Context()
	f, x, h := made(t)
	f.kill(h.Ref, 124)
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Gone {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	_, err := x.WaitReady(ctx, h)
	wantKind(t, "WaitReady", err, sandboxer.NotFound)
	_, err = says(t, x, h, "true")
	wantKind(t, "Exec", err, sandboxer.NotFound)
	_, err = x.Snapshot(ctx, h, "snap-1")
	wantKind(t, "Snapshot", err, sandboxer.NotFound)
	if _, err := x.Teardown(ctx, h); err != nil {
		t.Error(err)
	}
}

// Silence ends no call as absent; a caller that leaves gets its own error at once.
func TestSilence(t *testing.T) {
	f, x, h := made(t)
	silent := make(chan struct{})
	f.set(func(f *faults) { f.silent = silent })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown || sandboxer.KindOf(err) != sandboxer.Timeout {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if _, err := x.Teardown(ctx, h); sandboxer.KindOf(err) != sandboxer.Timeout {
		t.Errorf("Teardown: %v", err)
	}
	f.set(func(f *faults) { f.silent = nil })
	close(silent)
	if refs := f.running(); len(refs) != 1 {
		t.Errorf("Modal has %q", refs)
	}
}

// Streams that break go on where they were.
func TestBrokenStreams(t *testing.T) {
	f, x, h := made(t)
	f.set(func(f *faults) { f.drop = 10_007 })
	want := strings.Repeat("0123456789abcdef", 1<<13)
	if err := x.WriteFile(t.Context(), h, "/tmp/big", 0, strings.NewReader(want)); err != nil {
		t.Fatal(err)
	}
	if out, err := says(t, x, h, "cat /tmp/big"); err != nil || out != want {
		t.Errorf("%d bytes arrived, %v; want %d", len(out), err, len(want))
	}
}

// An app that somebody stopped, and a sandbox without the agent.
func TestIncomplete(t *testing.T) {
	ctx := t.Context()
	f, x, h := made(t)
	if _, err := says(t, x, h, "rm -rf /.sandboxer/old.g1"); err != nil {
		t.Fatal(err)
	}
	x.agents.Drop(hosted.InAccount(ctx, h.Ref))
	_, err := x.WaitReady(ctx, h)
	wantKind(t, "WaitReady", err, sandboxer.Failed)
	if _, err := x.Provision(ctx, order("old")); err != nil { // which completes it
		t.Fatal(err)
	}
	if _, err := x.WaitReady(ctx, h); err != nil {
		t.Error(err)
	}
	f.mu.Lock()
	f.apps = map[[2]string]string{}
	f.mu.Unlock()
	_, err = x.Provision(ctx, order("new"))
	wantKind(t, "Provision without the app", err, sandboxer.Unavailable)
	if _, err = x.Provision(ctx, order("new")); err != nil {
		t.Error(err)
	}
}

// A snapshot says when it expires, and a dropped one is not there.
func TestSnapshotExpires(t *testing.T) {
	ctx := t.Context()
	f, x, h := made(t)
	s, err := x.Snapshot(ctx, h, "snap-1")
	if left := time.Until(s.ExpiresAt); err != nil || left < keep-time.Hour || left > keep {
		t.Fatalf("Snapshot = %+v, %v", s, err)
	}
	err = x.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: "snap-1"})
	f.mu.Lock()
	kept := f.images[s.Meta[metaImage]].dir
	f.mu.Unlock()
	if err != nil || kept != "" {
		t.Errorf("DropSnapshot: %v; Modal has %s", err, kept)
	}
	_, err = x.RestoreFromSnapshot(ctx, order("copy"), s)
	wantKind(t, "RestoreFromSnapshot", err, sandboxer.NotFound)
}

// A main command, a workspace and its files are there once, however often a sandbox is provisioned.
func TestFilled(t *testing.T) {
	canBox(t)
	f, dir, repo := newFake(t), t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(repo, "f"), []byte("of repo"), 0o644); err != nil {
		t.Fatal(err)
	}
	spec := order("box")
	spec.Command, spec.User, spec.Workspace, spec.Inputs = []string{"sh", "-c", "echo run >>log; exec sleep 1000"}, "nobody", "/it's here", map[string]string{inputRepo: repo}
	for range 2 {
		x := opens(t, f, "test", dir)
		h, err := x.Provision(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		out, err := says(t, x, h, "until [ -s log ]; do sleep 0.01; done; id -un; pwd; cat f log")
		if err != nil || out != "nobody\n/it's here\nof reporun\n" {
			t.Errorf("inside: %q, %v", out, err)
		}
	}
}

func TestConfig(t *testing.T) {
	for key, want := range map[sandboxer.Secret]bool{fakeKey: true, "ak-1": false, "as-1:ak-1": false, ":": false, "ak-1:as-1\n": true, "ak-1 : as-1": false, "ak-1\nas-1": false, "ak-:as-": false} {
		if err := (&Config{Key: key}).Validate(); (err == nil) != want || err != nil && strings.Contains(err.Error(), string(key)) && len(key) > 1 {
			t.Errorf("%q: %v", key, err)
		}
	}
	for url, want := range map[string]bool{"": true, "https://modal.example": true, "http://127.0.0.1:1": true, "http://modal.example": false} {
		if err := (&Config{URL: url}).Validate(); (err == nil) != want {
			t.Errorf("%q: %v", url, err)
		}
	}
	t.Setenv("MODAL_SERVER_URL", "https://elsewhere.example")
	_, err := openWith(t, "test", t.TempDir(), map[string]any{"key": fakeKey})
	wantKind(t, "with another server in the environment", err, sandboxer.Unavailable)
}

// The client reads no file of the account, and none decides where the key goes.
func TestNoFileIsRead(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	if err := os.WriteFile(filepath.Join(home, ".modal.toml"), []byte("not = [toml"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, profile := range []string{"", "other"} {
		t.Setenv("MODAL_PROFILE", profile)
		f := newFake(t)
		x, err := openWith(t, "test", t.TempDir(), map[string]any{"key": fakeKey, "url": f.url})
		if err != nil {
			t.Fatal(err)
		}
		if l, err := x.(*extension).IsAlive(t.Context(), sandboxer.Handle{SandboxID: "box", Generation: 1}); l != sandboxer.Gone || f.called("AppGetOrCreate") == 0 {
			t.Errorf("profile %q: IsAlive = %s, %v", profile, l, err)
		}
		x.(*extension).Close()
	}
}

// Two virtual processors and 4 GiB for an hour.
func TestQuote(t *testing.T) {
	x, err := openWith(t, "test", t.TempDir(), map[string]any{"key": fakeKey})
	if err != nil {
		t.Fatal(err)
	}
	spec := order("box")
	spec.Limits = sandboxer.Limits{MilliCPU: 2000, MemoryBytes: 4 << 30}
	q, err := x.(*extension).EstimateCost(t.Context(), spec, time.Hour)
	if err != nil || q.Amount != 237_960 || q.PerHour != q.Amount || len(q.Rows) != 2 || !strings.Contains(q.Detail, "2026-10-08") {
		t.Errorf("%+v, %v", q, err)
	}
}

func TestFormOfSaved(t *testing.T) {
	compattest.CheckForm(t, "modal-snapshot", compattest.Shape("", saved{}))
}

// TestSpecFields: whatever a spec asks for is refused, or it is known what becomes of it.
func TestSpecFields(t *testing.T) {
	x, err := openWith(t, "test", t.TempDir(), map[string]any{"key": fakeKey})
	if err != nil {
		t.Fatal(err)
	}
	values := fieldtest.Values{"ID": {"x1", "x2"}, "Env[key]": {"A", "A"}, "Network.Mode": {sandboxer.NetworkAllow, sandboxer.NetworkAllow}}
	fieldtest.Taken(t, sandboxer.Spec{ID: "x", Generation: 1}, values, func(spec sandboxer.Spec) error { return x.(*extension).Check(t.Context(), spec) }, fieldtest.Withheld{
		"ID": "a tag, and in the name", "Generation": "a tag, and in the name", "Owner": "a tag, and in the name", "Inputs": "the repo",
		"Profile": "the broker's business", "Consumer": "the broker's business", "Tenant": "the broker's business", "Labels": "the broker's business",
		"Image": "pulled by Modal", "Command": "the agent's child", "Env": "the sandbox's", "Limits.MilliCPU": "the sandbox's",
		"Network": "the sandbox's", "Ports": "reached by way of the agent", "User": "the agent's default",
		"Credential": "names the key of each call", "Vouched": "asked by internal/backend", "Place": "it is no Placer",
	})
}
