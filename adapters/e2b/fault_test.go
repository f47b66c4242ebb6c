package e2b

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/notes"
)

func want(id string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "test", Fuse: time.Now().Add(time.Hour)}
}

func wantKind(t testing.TB, what string, err error, kind sandboxer.Kind) {
	t.Helper()
	if sandboxer.KindOf(err) != kind {
		t.Errorf("%s: %v (%s); want %s", what, err, sandboxer.KindOf(err), kind)
	}
}

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

// refs are the names of what the service has.
func (p *plane) refs() (all []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.boxes {
		all = append(all, id)
	}
	return all
}

// A refusal has its kind and says what to do. It changes nothing, and the request succeeds once the fault is over. What is refused
// is not gone.
func TestRefusals(t *testing.T) {
	for status, kind := range map[int]sandboxer.Kind{
		http.StatusTooManyRequests: sandboxer.Exhausted, http.StatusServiceUnavailable: sandboxer.Unavailable, http.StatusConflict: sandboxer.Unavailable,
	} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			ctx, p := t.Context(), newPlane(t)
			x := p.opens(t, "test", t.TempDir(), "")
			h := up(t, x, want("old"))
			p.set(func(p *plane) {
				p.fault = func(w http.ResponseWriter, r *http.Request) {
					if r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, "/v2/") { // the listing works
						answer(w, http.StatusOK, []string{})
						return
					}
					w.Header().Set("Retry-After", "7")
					refuse(w, status, "not now")
				}
			})
			_, err := x.Provision(ctx, want("new"))
			wantKind(t, "Provision", err, kind)
			if sandboxer.HintOf(err) == "" || sandboxer.RetryAfterOf(err) != 7*time.Second || !sandboxer.IsUntouched(err) {
				t.Errorf("it does not say what to do, and when: %v", err)
			}
			_, err = x.Teardown(ctx, h)
			wantKind(t, "Teardown", err, kind)
			if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown {
				t.Errorf("IsAlive = %s, %v", l, err)
			}
			wantKind(t, "Pause", x.Pause(ctx, h), kind)
			p.set(func(p *plane) { p.fault = nil })
			if _, err := x.Teardown(ctx, sandboxer.Handle{SandboxID: "new", Generation: 1}); err != nil { // known to be absent at once
				t.Error(err)
			}
			up(t, x, want("new"))
		})
	}
}

// After a lost answer the sandbox is adopted by its tags, at once or, where the listing lags, as soon as it shows. Until
// then it is neither made again nor called absent.
func TestLostAnswer(t *testing.T) {
	ctx := t.Context()
	t.Run("listed", func(t *testing.T) {
		p := newPlane(t)
		p.lost = 1
		h := up(t, p.opens(t, "test", t.TempDir(), ""), want("box"))
		if refs := p.refs(); len(refs) != 1 || refs[0] != h.Ref {
			t.Errorf("Provision = %+v; the service has %q", h, refs)
		}
	})
	lagging := func(t *testing.T) (*plane, *extension) {
		t.Helper()
		p := newPlane(t)
		p.lost, p.lag = 1, time.Hour
		x := p.opens(t, "test", t.TempDir(), `,"settle":60000000000`)
		for range 2 {
			_, err := x.Provision(ctx, want("box"))
			wantKind(t, "Provision with a listing that lags", err, sandboxer.Unavailable)
			_, err = x.Teardown(ctx, sandboxer.Handle{SandboxID: "box", Generation: 1})
			wantKind(t, "Teardown", err, sandboxer.Unavailable)
			if l, _ := x.IsAlive(ctx, sandboxer.Handle{SandboxID: "box", Generation: 1}); l != sandboxer.Unknown {
				t.Errorf("IsAlive = %s", l)
			}
		}
		p.set(func(p *plane) { p.lag = 0 })
		return p, x
	}
	t.Run("adopted later", func(t *testing.T) {
		p, x := lagging(t)
		h, err := x.Provision(ctx, want("box"))
		if refs := p.refs(); err != nil || len(refs) != 1 || refs[0] != h.Ref {
			t.Errorf("Provision = %+v, %v; the service has %q", h, err, refs)
		}
	})
	t.Run("removed later", func(t *testing.T) {
		p, x := lagging(t)
		if _, err := x.Teardown(ctx, sandboxer.Handle{SandboxID: "box", Generation: 1}); err != nil {
			t.Error(err)
		}
		if refs := p.refs(); len(refs) > 0 {
			t.Errorf("the service still has %q", refs)
		}
	})
}

// A listing that lags shows neither what is new nor that something is gone; each sandbox itself is asked.
func TestLaggingList(t *testing.T) {
	ctx, p := t.Context(), newPlane(t)
	p.lag = time.Hour
	x := p.opens(t, "test", t.TempDir(), "")
	h := up(t, x, want("box"))
	for h := range x.ListRunning(ctx, "test") {
		t.Errorf("the listing shows %+v already", h)
	}
	byID := sandboxer.Handle{SandboxID: "box"}
	if again, err := x.Provision(ctx, want("box")); err != nil || again.Ref != h.Ref {
		t.Errorf("Provision again = %+v, %v; first %+v", again, err, h)
	}
	if l, err := x.IsAlive(ctx, byID); l != sandboxer.Alive {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if _, err := x.Teardown(ctx, byID); err != nil || len(p.refs()) > 0 {
		t.Errorf("Teardown: %v; the service has %q", err, p.refs())
	}
}

// A key that is revoked ends nothing: what cannot be asked for is not gone. What runs inside goes on, by the token of the sandbox.
func TestRevokedKey(t *testing.T) {
	ctx, p := t.Context(), newPlane(t)
	x := p.opens(t, "test", t.TempDir(), "")
	h := up(t, x, want("box"))
	p.set(func(p *plane) { p.key = "another" })
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown || sandboxer.HintOf(err) == "" || strings.Contains(err.Error(), testKey) {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	_, err := x.Teardown(ctx, h)
	wantKind(t, "Teardown", err, sandboxer.Unavailable)
	_, err = x.Provision(ctx, want("next"))
	wantKind(t, "Provision", err, sandboxer.Unavailable)
	if x, err := x.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}}); err != nil || x.Code != 0 {
		t.Errorf("a command: %+v, %v", x, err)
	}
	p.set(func(p *plane) { p.key = testKey })
	if _, err := x.Teardown(ctx, h); err != nil || len(p.refs()) > 0 {
		t.Errorf("Teardown with the key again: %v; the service has %q", err, p.refs())
	}
}

// Tenants with keys of their own reach what is in their accounts, and nothing else, also where a way in is known already.
func TestKeyOfEachTenant(t *testing.T) {
	ctx, p, dir := t.Context(), newPlane(t), t.TempDir()
	p.other = testKey + "0"
	var all []sandboxer.Handle
	config := fmt.Sprintf(`{"credential":{"secret":"e2b","by":"tenant"},"api_url":%q,"sandbox_url":%[1]q,"settle":0}`, p.url)
	ext, err := Adapter.Open(ctx, sandboxer.Env{Extension: "ext.e2b", Owner: "test", Dir: dir, Notes: notes.New(dir, "ext.e2b", []byte("key")),
		Decode:   func(v any) error { return json.Unmarshal([]byte(config), v) },
		Recorded: func(context.Context) ([]sandboxer.Handle, error) { return all, nil },
		Secret: func(_ context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error) {
			return map[string]sandboxer.Secret{"acme": testKey, "rival": testKey + "0"}[ref.Tenant], nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	x := ext.(*extension)
	defer x.Close()
	run := func(h sandboxer.Handle) error {
		_, err := x.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}})
		return err
	}
	for _, tenant := range []string{"acme", "rival"} {
		spec := want("box-" + tenant)
		spec.Credential = sandboxer.SecretRef{Tenant: tenant, Name: "e2b", Version: 1}
		all = append(all, up(t, x, spec))
		if err := run(all[len(all)-1]); err != nil {
			t.Error(err)
		}
	}
	crossed := all[1]
	crossed.Credential = all[0].Credential
	wantKind(t, "acme in rival's sandbox", run(crossed), sandboxer.NotFound)
	if s, err := x.Snapshot(ctx, all[0], "snap-1"); err != nil || !s.Memory || !s.Quiesced {
		t.Errorf("Snapshot = %+v, %v", s, err)
	}
	p.set(func(p *plane) { p.other = "" }) // rival's key is revoked
	if s, err := x.Snapshot(ctx, all[0], "snap-2"); err != nil || s.SnapshotID != "snap-2" {
		t.Errorf("Snapshot of acme after rival's key was revoked: %+v, %v", s, err)
	}
	for _, id := range []string{"snap-1", "snap-2"} {
		if err := x.DropSnapshot(ctx, sandboxer.Snapshot{SnapshotID: id, Credential: all[0].Credential}); err != nil {
			t.Errorf("DropSnapshot of acme after rival's key was revoked: %v", err)
		}
	}
	if _, err := x.Teardown(ctx, all[0]); err != nil {
		t.Error(err)
	}
	if err := run(all[1]); err != nil { // by the token of the sandbox
		t.Error(err)
	}
	if _, err := x.Teardown(ctx, all[1]); !hosted.IsRefused(err) {
		t.Errorf("Teardown with a revoked key: %v", err)
	}
}

// What the service ended is gone, by each call, and so is a command that ran there.
func TestGone(t *testing.T) {
	ctx, p := t.Context(), newPlane(t)
	x := p.opens(t, "test", t.TempDir(), "")
	h := up(t, x, want("box"))
	started, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		_, err := x.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo x; sleep 3600"}, Stdout: w})
		ended <- err
	}()
	if _, err := started.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, started) }()
	p.set(func(p *plane) { p.kill(p.boxes[h.Ref]) })
	wantKind(t, "a command under way", <-ended, sandboxer.NotFound)
	_, err := x.WaitReady(ctx, h)
	wantKind(t, "WaitReady", err, sandboxer.NotFound)
	_, err = x.Stats(ctx, h)
	wantKind(t, "Stats", err, sandboxer.NotFound)
	_, err = x.MeterActual(ctx, h, time.Minute)
	wantKind(t, "MeterActual", err, sandboxer.NotFound)
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Gone {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if _, err := x.Teardown(ctx, h); err != nil {
		t.Error(err)
	}
}

// A service that does not answer ends no call as absent; a caller that leaves gets its own error at once. A server that is not the
// service ends nothing either.
func TestSilence(t *testing.T) {
	p := newPlane(t)
	x := p.opens(t, "test", t.TempDir(), "")
	h := up(t, x, want("box"))
	resume := p.hang()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown || sandboxer.KindOf(err) != sandboxer.Timeout {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	resume()
	p.set(func(p *plane) { p.fault = http.NotFound })
	if l, _ := x.IsAlive(t.Context(), h); l != sandboxer.Unknown {
		t.Errorf("where another server is: IsAlive = %s", l)
	}
}

// The service's clock decides nothing here: it gets lifetimes, and the fuse is kept by our clock, also one that was moved.
func TestSkewedClock(t *testing.T) {
	for _, skew := range []time.Duration{time.Hour, -time.Hour} {
		ctx, p := t.Context(), newPlane(t)
		p.skew = skew
		x := p.opens(t, "test", t.TempDir(), "")
		spec := want("box")
		h := up(t, x, spec)
		check := func(fuse time.Time) {
			t.Helper()
			if f, err := x.Discover(ctx, "box"); err != nil || !f.Fuse.Equal(fuse) {
				t.Errorf("clock %s ahead: Discover = %+v, %v; want the fuse %s", skew, f, err, fuse)
			}
		}
		check(spec.Fuse)
		moved := spec.Fuse.Add(time.Hour).UTC()
		if err := x.Renew(ctx, h, moved); err != nil {
			t.Errorf("clock %s ahead: Renew: %v", skew, err)
		}
		check(moved)
		st, err := x.Stats(ctx, h)
		u, merr := x.MeterActual(ctx, h, time.Hour)
		for _, at := range []time.Time{st.At, u.At} {
			if age := time.Since(at); err != nil || merr != nil || age < 0 || age > time.Minute {
				t.Errorf("clock %s ahead: measured at %s, %v, %v", skew, at, err, merr)
			}
		}
	}
}

// A service that cuts a deadline to what its plan allows says so nowhere; we do. A later one than the plan allows is refused before
// anything exists.
func TestPlan(t *testing.T) {
	ctx, p := t.Context(), newPlane(t)
	x := p.opens(t, "test", t.TempDir(), `,"max_lifetime":7200000000000`)
	h := up(t, x, want("box"))
	p.set(func(p *plane) { p.most = 90 * time.Minute })
	err := x.Renew(ctx, h, time.Now().Add(119*time.Minute))
	wantKind(t, "a deadline that the service cuts", err, sandboxer.Invalid)
	wantKind(t, "one beyond the plan", x.Renew(ctx, h, time.Now().Add(3*time.Hour)), sandboxer.Invalid)
	// A paused sandbox is kept: its deadline is that of its resume.
	if err := x.Pause(ctx, h); err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(72 * time.Hour)
	if err := x.Renew(ctx, h, later); err != nil {
		t.Errorf("the deadline of a paused one: %v", err)
	}
	if err := x.Renew(ctx, h, time.Now().Add(30*time.Minute)); err != nil {
		t.Errorf("the deadline of its resume: %v", err)
	}
	if err := x.Resume(ctx, h); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	if left := time.Until(p.boxes[h.Ref].end); left > 31*time.Minute || left < 25*time.Minute {
		t.Errorf("after its resume it has %s", left)
	}
	p.mu.Unlock()
	long := want("long")
	long.Fuse = time.Now().Add(3 * time.Hour)
	_, err = x.Provision(ctx, long)
	wantKind(t, "a life beyond the plan", err, sandboxer.Unsupported)
	unbounded := want("unbounded")
	unbounded.Fuse = time.Time{}
	if u := up(t, x, unbounded); len(p.refs()) != 2 {
		t.Errorf("without a fuse: %+v; the service has %q", u, p.refs())
	}
}

// A service that has v1 only makes sandboxes and resumes them by v1.
func TestFirstVersion(t *testing.T) {
	ctx, p := t.Context(), newPlane(t)
	p.old = true
	x := p.opens(t, "test", t.TempDir(), "")
	h := up(t, x, want("box"))
	for _, f := range []func(context.Context, sandboxer.Handle) error{x.Pause, x.Pause, x.Resume, x.Resume} {
		if err := f(ctx, h); err != nil {
			t.Error(err)
		}
	}
	if got, err := x.WaitReady(ctx, h); err != nil {
		t.Errorf("after a pause: %+v, %v", got, err)
	}
	missing := want("missing")
	missing.Image = "none"
	_, err := x.Provision(ctx, missing)
	wantKind(t, "a template that is not there", err, sandboxer.Failed)
}

// Names that the service cannot have given lead nowhere, and what it says of a size is not believed.
func TestHostileAnswers(t *testing.T) {
	ctx, p := t.Context(), newPlane(t)
	x := p.opens(t, "test", t.TempDir(), "")
	h := up(t, x, want("box"))
	says := func(body string) {
		p.set(func(p *plane) {
			p.fault = func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(http.StatusOK)
				_, _ = io.WriteString(w, body)
			}
		})
	}
	says(`[{"sandboxID":"../other"}]`)
	for _, err := range x.ListRunning(ctx, "test") {
		wantKind(t, "a listing with an impossible name", err, sandboxer.Unavailable)
	}
	says(`{"sandboxID":"x","cpuCount":-1,"memoryMB":512}`)
	_, err := x.MeterActual(ctx, h, time.Hour)
	wantKind(t, "an impossible size", err, sandboxer.Unavailable)
	says(`{"sandboxID":"x","domain":"elsewhere.example","state":"running"}`)
	x.cfg.SandboxURL = ""
	_, err = x.WaitReady(ctx, h)
	wantKind(t, "another domain", err, sandboxer.Unavailable)
}

// TestMoney: the price is that of the price book, for the size of the template, or for the real size once it exists.
func TestMoney(t *testing.T) {
	ctx, p := t.Context(), newPlane(t)
	x := p.opens(t, "test", t.TempDir(), `,"vcpus":4,"memory":1073741824`)
	q, err := x.EstimateCost(ctx, want("box"), time.Hour)
	if err != nil || q.Amount != 217_800 || len(q.Rows) != 2 { // 4 × 0.0504 + 0.0162
		t.Errorf("quoted %+v, %v", q, err)
	}
	u, err := x.MeterActual(ctx, up(t, x, want("box")), time.Hour)
	if err != nil || u.Cost != 108_900 || u.Final || u.MiBMillis != 512*3_600_000 {
		t.Errorf("metered %+v, %v", u, err)
	}
	x.Env.Prices = nil
	_, err = x.EstimateCost(ctx, want("box"), time.Hour)
	wantKind(t, "a price book without the provider", err, sandboxer.NotFound)
}

// Without a key the extension is one that this machine does not have.
func TestNoKey(t *testing.T) {
	_, err := Adapter.Open(t.Context(), sandboxer.Env{Extension: "ext.e2b", Secret: func(context.Context, sandboxer.SecretRef) (sandboxer.Secret, error) {
		return "", sandboxer.E(sandboxer.NotFound, nil, "there is none")
	}})
	wantKind(t, "Open", err, sandboxer.NotFound)
	if !strings.HasPrefix(sandboxer.Message(err), "needs a key: ") || !strings.HasSuffix(sandboxer.HintOf(err), ": sandboxer secret set --operator e2b") {
		t.Errorf("it says %q (%s)", sandboxer.Message(err), sandboxer.HintOf(err))
	}
	for _, c := range []Config{{Domain: "e2b.app", APIURL: "http://10.0.0.1"}, {Domain: "e2b.app", SandboxURL: "ftp://x"}, {Domain: "a b"}, {Domain: "x@y"}} {
		wantKind(t, "Validate", c.Validate(), sandboxer.Invalid)
	}
}

// TestSpecFields: what a spec asks for is done, or refused in words.
func TestSpecFields(t *testing.T) {
	x := newPlane(t).opens(t, "test", t.TempDir(), "")
	values := fieldtest.Values{"ID": {"x1", "x2"}, "Env[key]": {"A", "B"}, "Workspace": {"/w", "/v"}, "Network.Mode": {sandboxer.NetworkAllow, sandboxer.NetworkAllow},
		"Fuse": {time.Now().Add(90 * time.Hour), time.Now().Add(91 * time.Hour)}}
	fieldtest.Taken(t, sandboxer.Spec{ID: "x", Generation: 1}, values, func(spec sandboxer.Spec) error { return x.Check(t.Context(), spec) }, fieldtest.Withheld{
		"ID": "a tag", "Generation": "a tag", "Owner": "a tag", "Image": "the template", "Env": "of the create", "User": "a tag", "Workspace": "a tag", "Inputs": "it has none",
		"Profile": "the broker's business", "Consumer": "the broker's business", "Tenant": "the broker's business", "Labels": "the broker's business",
		"Network.Allow": "of no effect without its mode", "Vouched": "asked by internal/backend", "Place": "it is no Placer", "Credential": "names the key of each call",
	})
}
