package daytona

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// up makes a sandbox.
func up(t *testing.T, x *extension, spec sandboxer.Spec) sandboxer.Handle {
	t.Helper()
	h, err := x.Provision(t.Context(), spec)
	if err == nil {
		_, err = x.WaitReady(t.Context(), h)
	}
	if err != nil {
		t.Fatal(err)
	}
	return h
}

var byID = sandboxer.Handle{SandboxID: "box", Generation: 1}

// A refusal has its kind, says when to try again, and changes nothing. What is refused is not gone.
func TestRefusals(t *testing.T) {
	for status, kind := range map[int]sandboxer.Kind{
		http.StatusTooManyRequests: sandboxer.Exhausted, http.StatusConflict: sandboxer.Unavailable, http.StatusServiceUnavailable: sandboxer.Unavailable,
	} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			ctx, w := t.Context(), newWorld(t)
			x := w.opens(t, "test", t.TempDir(), map[string]any{"settle": 0})
			h := up(t, x, specOf("old"))
			w.with(faults{status: status, header: "Retry-After-sandbox-create"})
			_, err := x.Provision(ctx, specOf("new"))
			wantKind(t, "Provision", err, kind)
			if status != http.StatusServiceUnavailable && (sandboxer.HintOf(err) == "" || sandboxer.RetryAfterOf(err) != 7*time.Second) {
				t.Errorf("it does not say what to do, and when: %v", err)
			}
			_, err = x.Teardown(ctx, h)
			wantKind(t, "Teardown", err, kind)
			if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown || sandboxer.HintOf(err) == "" {
				t.Errorf("IsAlive = %s, %v", l, err)
			}
			if there := w.there(); len(there) != 1 {
				t.Errorf("Daytona has %q", there)
			}
			w.with(faults{})
			if _, err := x.Teardown(ctx, sandboxer.Handle{SandboxID: "new", Generation: 1}); err != nil {
				t.Error(err)
			}
			up(t, x, specOf("new"))
		})
	}
}

// After a lost answer the sandbox is adopted by its labels, at once or, where the listing lags, as soon as it shows. Until then it is
// neither made again, which its name prevents, nor called absent.
func TestLostAnswer(t *testing.T) {
	ctx := t.Context()
	t.Run("listed", func(t *testing.T) {
		w := newWorld(t)
		w.with(faults{lost: true})
		if h := up(t, w.opens(t, "test", t.TempDir(), nil), specOf("box")); w.made != 1 || w.boxes[h.Ref] == nil {
			t.Errorf("Provision = %+v; Daytona made %d", h, w.made)
		}
	})
	lagging := func(t *testing.T, settle time.Duration) (*world, *extension) {
		t.Helper()
		w := newWorld(t)
		w.with(faults{lost: true, lagging: true})
		x := w.opens(t, "test", t.TempDir(), map[string]any{"settle": settle})
		for range 2 {
			_, err := x.Provision(ctx, specOf("box"))
			wantKind(t, "Provision with a listing that lags", err, sandboxer.Unavailable)
			if settle > 0 {
				_, err = x.Teardown(ctx, byID)
				wantKind(t, "Teardown", err, sandboxer.Unavailable)
				if l, _ := x.IsAlive(ctx, byID); l != sandboxer.Unknown {
					t.Errorf("IsAlive = %s", l)
				}
			}
		}
		w.with(faults{})
		return w, x
	}
	for name, settle := range map[string]time.Duration{"adopted later": time.Minute, "after another create": 0} {
		t.Run(name, func(t *testing.T) {
			w, x := lagging(t, settle)
			if h := up(t, x, specOf("box")); w.made != 1 || w.boxes[h.Ref] == nil {
				t.Errorf("Provision = %+v; Daytona made %d", h, w.made)
			}
		})
	}
	t.Run("removed later", func(t *testing.T) {
		w, x := lagging(t, time.Minute)
		if _, err := x.Teardown(ctx, byID); err != nil || len(w.there()) > 0 {
			t.Errorf("Teardown: %v; Daytona has %q", err, w.there())
		}
	})
}

// A listing that lags shows neither what is new nor that something is gone; each sandbox itself is asked.
func TestLaggingList(t *testing.T) {
	ctx, w := t.Context(), newWorld(t)
	x := w.opens(t, "test", t.TempDir(), nil)
	h := up(t, x, specOf("box"))
	w.with(faults{lagging: true})
	for h := range x.ListRunning(ctx, "test") {
		t.Errorf("the listing shows %+v", h)
	}
	if again, err := x.Provision(ctx, specOf("box")); err != nil || again.Ref != h.Ref {
		t.Errorf("Provision again = %+v, %v; first %+v", again, err, h)
	}
	if l, err := x.IsAlive(ctx, byID); l != sandboxer.Alive {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if _, err := x.Teardown(ctx, sandboxer.Handle{SandboxID: "box"}); err != nil || len(w.there()) > 0 {
		t.Errorf("Teardown: %v; Daytona has %q", err, w.there())
	}
}

const canary = "canary-of-"

// Each tenant's sandbox is made, entered, saved and removed with its own key. A key that is revoked proves nothing, and troubles
// nobody else.
func TestKeys(t *testing.T) {
	ctx, w := t.Context(), newWorld(t)
	var recorded []sandboxer.Handle
	w.keys = map[string]string{canary + "acme": "acme", canary + "rival": "rival"}
	dir := t.TempDir()
	opens := func() *extension {
		return w.opens(t, "test", dir, map[string]any{"key": "", "credential": map[string]any{"by": "tenant", "secret": "key"}}, func(e *sandboxer.Env) {
			e.Recorded = func(context.Context) ([]sandboxer.Handle, error) { return recorded, nil }
			e.Secret = func(_ context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
				if ref.Name != "key" || ref.Version != 1 {
					return "", sandboxer.E(sandboxer.NotFound, nil, "there is no %s", ref)
				}
				return sandboxer.Secret(canary + ref.Tenant), nil
			}
		})
	}
	x, saved := opens(), map[string]sandboxer.Snapshot{}
	for _, tenant := range []string{"acme", "rival"} {
		spec := specOf("box-" + tenant)
		spec.Credential = sandboxer.SecretRef{Tenant: tenant, Name: "key", Version: 1}
		h := up(t, x, spec)
		recorded = append(recorded, h)
		if h.Credential != spec.Credential || w.boxes[h.Ref].org != tenant {
			t.Errorf("%+v is in the account of %s", h, w.boxes[h.Ref].org)
		}
		s, err := x.Snapshot(ctx, h, "snap-"+tenant)
		if err != nil || s.Credential != spec.Credential {
			t.Errorf("Snapshot = %+v, %v", s, err)
		}
		saved[tenant] = s
	}
	x = opens() // another process
	for _, h := range recorded {
		if e, err := x.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || e.Code != 0 {
			t.Errorf("Exec: %+v, %v", e, err)
		}
		if f, err := x.Discover(ctx, h.SandboxID); err != nil || f.Handle.Credential != h.Credential {
			t.Errorf("Discover = %+v, %v", f, err)
		}
	}
	if _, err := x.RestoreFromSnapshot(ctx, sandboxer.Spec{ID: "stolen", Generation: 1, Owner: "test", Credential: recorded[1].Credential}, saved["acme"]); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("a snapshot of another account is restored: %v", err)
	}

	w.mu.Lock()
	delete(w.keys, canary+"acme") // it is revoked
	w.mu.Unlock()
	_, err := x.Teardown(ctx, recorded[0])
	wantKind(t, "Teardown with a revoked key", err, sandboxer.Unavailable)
	if text := fmt.Sprintf("%+v %s", err, sandboxer.HintOf(err)); !hosted.IsRefused(err) || !strings.Contains(text, "secret key (version 1)") || strings.Contains(text, canary) {
		t.Errorf("it says %s", text)
	}
	if l, err := x.IsAlive(ctx, recorded[0]); l != sandboxer.Unknown || err == nil {
		t.Errorf("with a revoked key it is %s, %v", l, err)
	}
	if e, err := x.Exec(ctx, recorded[0], sandboxer.Cmd{Args: []string{"true"}}); err != nil || e.Code != 0 { // by the way that is known
		t.Errorf("Exec: %+v, %v", e, err)
	}
	spec := specOf("late")
	spec.Credential = recorded[0].Credential
	_, err = x.Provision(ctx, spec)
	wantKind(t, "Provision with a revoked key", err, sandboxer.Invalid) // no fault of Daytona
	snapshots := 0
	for f, err := range x.ListSnapshots(ctx, "test") {
		if snapshots++; err == nil && f.Snapshot.Credential.Tenant != "rival" || err != nil && !hosted.IsRefused(err) {
			t.Errorf("listed is %+v, %v", f, err)
		}
	}
	if snapshots != 2 { // the rival's, and the refusal
		t.Errorf("%d snapshots are listed", snapshots)
	}
	if err := x.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: "snap-rival"}); err != nil || len(w.saved) != 1 {
		t.Errorf("DropSnapshot: %v; Daytona has %d", err, len(w.saved))
	}
	if _, err := x.Teardown(ctx, recorded[1]); err != nil {
		t.Error(err)
	}
	if remains, err := x.Forget(ctx, recorded[0]); err != nil || len(remains) != 1 || !strings.Contains(remains[0], recorded[0].Ref) {
		t.Errorf("Forget = %q, %v", remains, err)
	}
}

// What Daytona ended is gone, by each call, and so is a command that ran there.
func TestGone(t *testing.T) {
	ctx, w := t.Context(), newWorld(t)
	x := w.opens(t, "test", t.TempDir(), nil)
	h := up(t, x, specOf("box"))
	started, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		_, err := x.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo x; sleep 3600"}, Stdout: out})
		ended <- err
	}()
	if _, err := started.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, started) }()
	w.set(h.Ref, "destroyed")
	wantKind(t, "a command under way", <-ended, sandboxer.NotFound)
	_, err := x.WaitReady(ctx, h)
	wantKind(t, "WaitReady", err, sandboxer.NotFound)
	wantKind(t, "Renew", x.Renew(ctx, h, time.Now().Add(time.Hour)), sandboxer.NotFound)
	_, err = x.Snapshot(ctx, h, "snap")
	wantKind(t, "Snapshot", err, sandboxer.NotFound)
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Gone {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if _, err := x.Teardown(ctx, h); err != nil {
		t.Error(err)
	}
}

// A command that the service accepts and does not run is sent again.
func TestCommandDoesNotRun(t *testing.T) {
	w := newWorld(t)
	w.with(faults{unrun: true})
	x := w.opens(t, "test", t.TempDir(), nil)
	if _, err := x.WaitReady(t.Context(), up(t, x, specOf("box"))); err != nil {
		t.Error(err)
	}
}

// What ends while its agent is waited for is gone, too.
func TestGoneBeforeItAnswers(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	h := up(t, w.opens(t, "test", dir, nil), specOf("box"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	w.boxes[h.Ref].previews[strconv.Itoa(agentPort)] = l
	w.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	context.AfterFunc(ctx, func() { l.Close() })
	ended := make(chan error, 1)
	x := w.opens(t, "test", dir, nil) // has no connection to the agent
	go func() {
		_, err := x.WaitReady(ctx, h)
		ended <- err
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	w.set(h.Ref, "destroyed")
	wantKind(t, "WaitReady", <-ended, sandboxer.NotFound)
}

// A service that does not answer ends nothing, and neither does a server that is not the service. A caller that leaves gets its own
// error at once.
func TestSilence(t *testing.T) {
	w := newWorld(t)
	x := w.opens(t, "test", t.TempDir(), nil)
	h := up(t, x, specOf("box"))
	resume := w.hang()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown || sandboxer.KindOf(err) != sandboxer.Timeout {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	resume()
	x.client.Base = w.srv.URL + "/elsewhere"
	for _, page := range []string{"<html>not found</html>", `{}`, `{"id":"..","state":"started"}`} {
		w.with(faults{page: page})
		if l, _ := x.IsAlive(t.Context(), h); l != sandboxer.Unknown {
			t.Errorf("where another server answers %s: IsAlive = %s", page, l)
		}
	}
	w.with(faults{page: `{"items":[{"id":"","state":"started"}]}`})
	for _, err := range x.ListRunning(t.Context(), "test") {
		wantKind(t, "a listing with an impossible name", err, sandboxer.Unavailable)
	}
}

// The key and the token of an agent go to no address but those that the API has, or https.
func TestAddresses(t *testing.T) {
	x := &extension{cfg: Config{URL: "https://app.daytona.io/api"}}
	for text, want := range map[string]sandboxer.Kind{
		"https://proxy.daytona.io/toolbox": "", "http://127.0.0.1:1": sandboxer.Unavailable, "http://proxy.example": sandboxer.Unavailable,
		"": sandboxer.Unavailable, "file:///x": sandboxer.Unavailable, "https://a@b": sandboxer.Unavailable,
	} {
		wantKind(t, text, x.link(text), want)
	}
}

// The lifetime is Daytona's, counted by its own clock; ours keeps the fuse. One that is shorter than asked for is refused, as is one
// beyond the organization's rules. The idle time, which does not count the use of previews, never ends a sandbox earlier.
func TestLifetime(t *testing.T) {
	ctx := t.Context()
	for _, skew := range []time.Duration{time.Hour, -time.Hour} {
		for _, old := range []bool{false, true} {
			w := newWorld(t)
			w.skew, w.oldAPI = skew, old
			x := w.opens(t, "test", t.TempDir(), nil)
			spec := specOf("box")
			h := up(t, x, spec)
			b := w.boxes[h.Ref]
			if b.ttl != 60 || b.autoStop != 60 || b.req["autoDeleteInterval"] != 0.0 {
				t.Errorf("a life of %d minutes, %d unused, %v stopped", b.ttl, b.autoStop, b.req["autoDeleteInterval"])
			}
			if f, err := x.Discover(ctx, "box"); err != nil || !f.Fuse.Equal(spec.Fuse) {
				t.Errorf("clock %s ahead: Discover = %+v, %v; want the fuse %s", skew, f, err, spec.Fuse)
			}
			b.created = b.created.Add(-30 * time.Minute)
			moved := time.Now().Add(40 * time.Minute).UTC()
			if err := x.Renew(ctx, h, moved); err != nil {
				t.Errorf("clock %s ahead: Renew: %v", skew, err)
			}
			if idle := b.autoStop; !old && (b.ttl != 40 || idle != 0) || old && (idle < 70 || idle > 72) {
				t.Errorf("after a renewal (old: %t): a life of %d minutes, %d unused", old, b.ttl, idle)
			}
			if f, err := x.Discover(ctx, "box"); err != nil || !f.Fuse.Equal(moved) {
				t.Errorf("clock %s ahead: Discover = %+v, %v; want the fuse %s", skew, f, err, moved)
			}
		}
	}
	w := newWorld(t)
	x := w.opens(t, "test", t.TempDir(), map[string]any{"max_lifetime": 2 * time.Hour})
	h := up(t, x, specOf("box"))
	wantKind(t, "a renewal beyond max_lifetime", x.Renew(ctx, h, time.Now().Add(3*time.Hour)), sandboxer.Unsupported)
	w.maxTTL = 10 * time.Minute
	wantKind(t, "a renewal that Daytona shortens", x.Renew(ctx, h, time.Now().Add(90*time.Minute)), sandboxer.Unsupported)
	_, err := x.Provision(ctx, specOf("short"))
	wantKind(t, "a life that Daytona shortens", err, sandboxer.Unsupported)
	long := specOf("long")
	long.Fuse = time.Now().Add(3 * time.Hour)
	_, err = x.Provision(ctx, long)
	wantKind(t, "a life beyond max_lifetime", err, sandboxer.Unsupported)
}

// Each of Daytona's 22 states means something here, and none that is not absence ends a sandbox.
func TestStates(t *testing.T) {
	w := newWorld(t)
	x := w.opens(t, "test", t.TempDir(), nil)
	h, err := x.Provision(t.Context(), specOf("box"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, want := range []struct {
		sandboxer.Liveness
		states string
	}{
		{sandboxer.Alive, "started resizing snapshotting forking pausing paused creating restoring starting resuming pending_build building_snapshot pulling_snapshot unknown"},
		{sandboxer.Unresponsive, "stopping stopped archiving archived error build_failed destroying"},
		{sandboxer.Gone, "destroyed"},
	} {
		for state := range strings.FieldsSeq(want.states) {
			n++
			w.set(h.Ref, state)
			if l, err := x.IsAlive(t.Context(), h); l != want.Liveness {
				t.Errorf("%s: IsAlive = %s, %v; want %s", state, l, err, want.Liveness)
			}
		}
	}
	if n != 22 {
		t.Errorf("%d states; Daytona has 22", n)
	}
	for state, want := range map[string]sandboxer.Kind{
		"paused": sandboxer.Conflict, "error": sandboxer.Failed, "archived": sandboxer.Unavailable, "creating": sandboxer.Unavailable, "destroyed": sandboxer.NotFound, "snapshotting": "",
	} {
		wantKind(t, state, object{State: state}.why(), want)
	}
}

// A destination is enforced as it is asked for, or refused, and so are limits.
func TestRequests(t *testing.T) {
	x := newWorld(t).opens(t, "test", t.TempDir(), nil)
	network := func(allow ...string) (c creation, err error) {
		err = c.network(sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: allow})
		return c, err
	}
	if c, err := network("10.1.0.0/16", "9.9.9.9"); err != nil || c.AllowList != "10.1.0.0/16,9.9.9.9/32" || c.BlockAll {
		t.Errorf("addresses: %+v, %v", c, err)
	}
	if c, err := network("a.example", "b.example"); err != nil || c.DomainAllow != "a.example,b.example" || c.BlockAll {
		t.Errorf("domains: %+v, %v", c, err)
	}
	if c, err := network(); err != nil || !c.BlockAll {
		t.Errorf("nothing: %+v, %v", c, err)
	}
	for _, allow := range [][]string{{"a.example:443"}, {"*.a.example"}, {"a.example", "9.9.9.9"}} {
		_, err := network(allow...)
		wantKind(t, strings.Join(allow, " "), err, sandboxer.Unsupported)
	}
	h := up(t, x, specOf("box"))
	s, err := x.Snapshot(t.Context(), h, "snap")
	if err != nil {
		t.Fatal(err)
	}
	larger := specOf("larger")
	larger.Image, larger.Limits = "debian", sandboxer.Limits{MilliCPU: 4000}
	_, err = x.RestoreFromSnapshot(t.Context(), larger, s)
	wantKind(t, "a snapshot with other limits", err, sandboxer.Unsupported)
	broken := specOf("broken")
	broken.Image = "invalid"
	_, err = x.Provision(t.Context(), broken)
	wantKind(t, "an image that cannot be pulled", err, sandboxer.Failed)
}

// 2 processors, 4 GiB, and 15 GiB of disk beyond the free ones: 0.1008 + 0.0648 + 0.00162 for an hour.
func TestQuote(t *testing.T) {
	x := &extension{cfg: Config{CPU: 1, Memory: gib, Disk: 3 * gib}}
	x.Env.Prices = book
	q, err := x.EstimateCost(t.Context(), sandboxer.Spec{Limits: sandboxer.Limits{MilliCPU: 2000, MemoryBytes: 4 * gib, DiskBytes: 20 * gib}}, time.Hour)
	if err != nil || q.Amount != 167_220 || len(q.Rows) != 3 {
		t.Errorf("%+v, %v", q, err)
	}
}

// Without a key the extension is one that this machine does not have.
func TestNoKey(t *testing.T) {
	_, err := Adapter.Open(t.Context(), sandboxer.Env{Extension: "ext.daytona", Secret: func(context.Context, sandboxer.SecretRef) (sandboxer.Secret, error) {
		return "", sandboxer.E(sandboxer.NotFound, nil, "there is none")
	}})
	wantKind(t, "Open", err, sandboxer.NotFound)
	if !strings.HasPrefix(sandboxer.Message(err), "needs a key: ") || !strings.HasSuffix(sandboxer.HintOf(err), ": sandboxer secret set --operator daytona") {
		t.Errorf("it says %v", err)
	}
	for _, url := range []string{"", "http://10.0.0.1", "ftp://x", "https://a@b"} {
		wantKind(t, "url "+url, (&Config{URL: url}).Validate(), sandboxer.Invalid)
	}
}

// TestSpecFields: what a spec asks for is done, or refused in words.
func TestSpecFields(t *testing.T) {
	x := newWorld(t).opens(t, "test", t.TempDir(), nil)
	values := fieldtest.Values{"ID": {"x1", "x2"}, "Env[key]": {"A", "B"}, "Workspace": {"/w", "/v"}, "Network.Mode": {sandboxer.NetworkNone, sandboxer.NetworkNone},
		"Fuse": {time.Now().Add(9000 * time.Hour), time.Now().Add(9001 * time.Hour)}}
	fieldtest.Taken(t, sandboxer.Spec{ID: "x", Generation: 1}, values, func(spec sandboxer.Spec) error { return x.Check(t.Context(), spec) }, fieldtest.Withheld{
		"ID": "a label", "Generation": "a label", "Owner": "a label", "Image": "what it is made from", "Env": "the agent's", "Workspace": "the agent's", "Inputs": "the workspace",
		"Command": "started by the agent", "Ports": "reached through the agent", "Profile": "the broker's business", "Consumer": "the broker's business", "Tenant": "the broker's business",
		"Labels": "the broker's business", "Network": "TestRequests", "Vouched": "asked by internal/backend", "Place": "it is no Placer", "Credential": "names the key of each call",
	})
}
