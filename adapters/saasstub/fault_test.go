package saasstub

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/saasstub/service"
)

// made makes a sandbox with a well service, and then sets faults for it.
func made(t *testing.T, dir string, spec sandboxer.Spec, faults string) (*extension, sandboxer.Handle) {
	t.Helper()
	h, err := opens(t, "test", dir, `{}`).Provision(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return opens(t, "test", dir, `{"faults":`+faults+`}`), h
}

// there lists what the service has, whatever its faults are.
func there(t *testing.T, dir string) (refs []string) {
	t.Helper()
	x := opens(t, "test", dir, `{}`)
	for h, err := range x.ListRunning(t.Context(), "test") {
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, h.Ref)
	}
	return refs
}

// A refusal has its kind and says when to try again. It changes nothing, and the request succeeds once the fault is over.
func TestRefusals(t *testing.T) {
	for faults, kind := range map[string]sandboxer.Kind{
		`{"throttled":100}`: sandboxer.Exhausted, `{"unavailable":100}`: sandboxer.Unavailable, `{"conflict":100}`: sandboxer.Unavailable,
	} {
		t.Run(faults, func(t *testing.T) {
			ctx, dir := t.Context(), home(t)
			x, h := made(t, dir, order("old"), faults)
			_, err := x.Provision(ctx, order("new"))
			wantKind(t, "Provision", err, kind)
			if sandboxer.HintOf(err) == "" {
				t.Errorf("it does not say what to do: %v", err)
			}
			if kind == sandboxer.Exhausted && sandboxer.RetryAfterOf(err) != service.RetryAfter*time.Second {
				t.Errorf("it is to be tried again in %s", sandboxer.RetryAfterOf(err))
			}
			_, err = x.Teardown(ctx, h)
			wantKind(t, "Teardown", err, kind)
			if l, err := x.IsAlive(ctx, h); l == sandboxer.Gone {
				t.Errorf("IsAlive = %s, %v", l, err)
			}
			if refs := there(t, dir); len(refs) != 1 || refs[0] != h.Ref {
				t.Errorf("the service has %q; want %q", refs, h.Ref)
			}
			x = opens(t, "test", dir, `{}`)
			if _, err := x.Teardown(ctx, sandboxer.Handle{SandboxID: "new", Generation: 1}); err != nil { // known to be absent at once
				t.Error(err)
			}
			if _, err := x.Provision(ctx, order("new")); err != nil {
				t.Error(err)
			}
		})
	}
}

// After a lost answer the sandbox is adopted by its tags, at once or, where the listing lags, as soon as it shows. Until
// then it is neither made again nor called absent.
func TestLostAnswer(t *testing.T) {
	ctx := t.Context()
	t.Run("listed", func(t *testing.T) {
		dir := home(t)
		x := opens(t, "test", dir, `{"faults":{"lost":100}}`)
		h, err := x.Provision(ctx, order("box"))
		if refs := there(t, dir); err != nil || len(refs) != 1 || refs[0] != h.Ref {
			t.Errorf("Provision = %+v, %v; the service has %q", h, err, refs)
		}
	})
	lagging := func(t *testing.T) (dir string) {
		t.Helper()
		dir = home(t)
		x := opens(t, "test", dir, fmt.Sprintf(`{"settle":%d,"faults":{"lost":100,"lag":%[1]d}}`, time.Minute))
		for range 2 {
			_, err := x.Provision(ctx, order("box"))
			wantKind(t, "Provision with a listing that lags", err, sandboxer.Unavailable)
			_, err = x.Teardown(ctx, sandboxer.Handle{SandboxID: "box", Generation: 1})
			wantKind(t, "Teardown", err, sandboxer.Unavailable)
			if after := sandboxer.RetryAfterOf(err); after <= 0 || after > time.Minute {
				t.Errorf("it is to be tried again in %s", after)
			}
			if l, _ := x.IsAlive(ctx, sandboxer.Handle{SandboxID: "box", Generation: 1}); l != sandboxer.Unknown {
				t.Errorf("IsAlive = %s", l)
			}
		}
		return dir
	}
	t.Run("adopted later", func(t *testing.T) {
		dir := lagging(t)
		h, err := opens(t, "test", dir, `{}`).Provision(ctx, order("box"))
		if refs := there(t, dir); err != nil || len(refs) != 1 || refs[0] != h.Ref {
			t.Errorf("Provision = %+v, %v; the service has %q", h, err, refs)
		}
	})
	t.Run("removed later", func(t *testing.T) {
		dir := lagging(t)
		if _, err := opens(t, "test", dir, `{}`).Teardown(ctx, sandboxer.Handle{SandboxID: "box", Generation: 1}); err != nil {
			t.Error(err)
		}
		if refs := there(t, dir); len(refs) > 0 {
			t.Errorf("the service still has %q", refs)
		}
	})
}

// A listing that lags shows neither what is new nor that something is gone; each sandbox itself is asked.
func TestLaggingList(t *testing.T) {
	ctx, dir := t.Context(), home(t)
	x := opens(t, "test", dir, fmt.Sprintf(`{"settle":%d,"faults":{"lag":%[1]d}}`, time.Minute))
	h, err := x.Provision(ctx, order("box"))
	if err != nil {
		t.Fatal(err)
	}
	for h := range x.ListRunning(ctx, "test") {
		t.Errorf("the listing shows %+v already", h)
	}
	byID := sandboxer.Handle{SandboxID: "box"}
	if again, err := x.Provision(ctx, order("box")); err != nil || again.Ref != h.Ref {
		t.Errorf("Provision again = %+v, %v; first %+v", again, err, h)
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

// The service's clock decides nothing here: lifetimes are relative, and the fuse is kept by our clock.
func TestSkewedClock(t *testing.T) {
	for _, skew := range []time.Duration{time.Hour, -time.Hour} {
		ctx, dir := t.Context(), home(t)
		x := opens(t, "test", dir, fmt.Sprintf(`{"bill":true,"setup":1,"per_hour":1000000,"faults":{"skew":%d}}`, skew))
		spec := order("box")
		h, err := x.Provision(ctx, spec)
		if err != nil {
			t.Fatal(err)
		}
		if f, err := x.Discover(ctx, "box"); err != nil || !f.Fuse.Equal(spec.Fuse) {
			t.Errorf("clock %s ahead: Discover = %+v, %v; want the fuse %s", skew, f, err, spec.Fuse)
		}
		if l, err := x.IsAlive(ctx, h); l != sandboxer.Alive {
			t.Errorf("clock %s ahead: IsAlive = %s, %v", skew, l, err)
		}
		u, err := x.MeterActual(ctx, h, 0)
		if age := time.Since(u.At); err != nil || age < 0 || age > time.Minute || u.Cost < 1 || u.Cost > 1_000_000/2 {
			t.Errorf("clock %s ahead: metered %+v, %v", skew, u, err)
		}
	}
}

// What the service ended is gone, and its usage is still known.
func TestExpiry(t *testing.T) {
	ctx, dir := t.Context(), home(t)
	x, h := made(t, dir, order("box"), `{"expire":1}`)
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Gone {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	_, err := x.WaitReady(ctx, h)
	wantKind(t, "WaitReady", err, sandboxer.NotFound)
	if u, err := x.MeterActual(ctx, h, 0); err != nil || u.Cost != 0 || !u.Final { // it bills nothing
		t.Errorf("metered %+v, %v", u, err)
	}
	if _, err := x.Teardown(ctx, h); err != nil {
		t.Error(err)
	}
}

// A service that was killed finds its sandboxes and snapshots again. Whatever asks for them starts it.
func TestServiceKilled(t *testing.T) {
	ctx, dir := t.Context(), home(t)
	x, h := made(t, dir, order("box"), `{}`)
	if _, err := x.Snapshot(ctx, h, "snap-1"); err != nil {
		t.Fatal(err)
	}
	first := pidOf(t, dir)
	kill(t, dir)
	r, err := x.WaitReady(ctx, h)
	if err != nil || r.Extra[inputNote] != "of box" || r.Extra["stub"] != said {
		t.Errorf("WaitReady = %+v, %v", r, err)
	}
	if again := pidOf(t, dir); again == first {
		t.Errorf("the service is still process %d", first)
	}
	kill(t, dir)
	other := order("copy")
	other.Inputs = nil
	copied, err := x.RestoreFromSnapshot(ctx, other, sandboxer.Snapshot{SnapshotID: "snap-1"})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := x.WaitReady(ctx, copied); err != nil || r.Extra[inputNote] != "of box" {
		t.Errorf("the copy is %+v, %v", r, err)
	}
}

// A service that would have nothing is not started by a question.
func TestNothingStartsForNothing(t *testing.T) {
	ctx, dir := t.Context(), home(t)
	x := opens(t, "test", dir, `{"capacity":7}`)
	h := sandboxer.Handle{SandboxID: "box", Generation: 1}
	if c, err := x.Capacity(ctx, ""); err != nil || c.Free != 7 {
		t.Errorf("Capacity = %+v, %v", c, err)
	}
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Gone {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if _, err := x.Teardown(ctx, h); err != nil {
		t.Error(err)
	}
	for _, err := range x.ListSnapshots(ctx, "test") {
		t.Error(err)
	}
	if x.own.Running(ctx) {
		t.Error("the service runs")
	}
	if _, err := x.Provision(ctx, order("box")); err != nil || !x.own.Running(ctx) {
		t.Errorf("Provision: %v; the service runs: %t", err, x.own.Running(ctx))
	}
	if c, err := x.Capacity(ctx, ""); err != nil || c.Free != 6 {
		t.Errorf("Capacity = %+v, %v", c, err)
	}
}

// Several processes that need the service at once start one.
func TestStartedOnce(t *testing.T) {
	dir := home(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if _, err := opens(t, "test", dir, `{}`).Provision(t.Context(), order(fmt.Sprint("box-", i))); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if refs := there(t, dir); len(refs) != 8 {
		t.Errorf("the service has %q", refs)
	}
}

// A full service is exhausted, and refuses nothing that exists.
func TestFull(t *testing.T) {
	dir := home(t)
	x := opens(t, "test", dir, `{"capacity":1}`)
	if _, err := x.Provision(t.Context(), order("one")); err != nil {
		t.Fatal(err)
	}
	_, err := x.Provision(t.Context(), order("two"))
	wantKind(t, "Provision", err, sandboxer.Exhausted)
	if _, err := x.Provision(t.Context(), order("one")); err != nil {
		t.Error(err)
	}
}

// A service that does not answer ends no call as absent; a caller that leaves gets its own error at once.
func TestSilence(t *testing.T) {
	dir := home(t)
	x, h := made(t, dir, order("box"), `{"silent":100}`)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if l, err := x.IsAlive(ctx, h); l != sandboxer.Unknown || sandboxer.KindOf(err) != sandboxer.Timeout {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if refs := there(t, dir); len(refs) != 1 {
		t.Errorf("the service has %q", refs)
	}
}

// A service elsewhere gets the token. What it answers is bounded and not believed, and a redirect is not followed.
func TestElsewhere(t *testing.T) {
	dir := home(t)
	opens(t, "test", dir, `{}`)
	var answer atomic.Pointer[http.HandlerFunc]
	url := elsewhere(t, dir, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if f := answer.Load(); f != nil {
				(*f)(w, r)
			} else if r.Header.Get("Authorization") != "Bearer open" {
				http.Error(w, `{"message":"no \u001b[2J"}`, http.StatusUnauthorized)
			} else {
				h.ServeHTTP(w, r)
			}
		})
	})
	x := opens(t, "test", t.TempDir(), `{"url":"`+url+`","token":"open"}`)
	h, err := x.Provision(t.Context(), order("box"))
	if err != nil {
		t.Fatal(err)
	}
	revoked := opens(t, "test", t.TempDir(), `{"url":"`+url+`","token":"shut"}`)
	if l, err := revoked.IsAlive(t.Context(), h); l != sandboxer.Unknown || !strings.Contains(sandboxer.HintOf(err), "key in the extension") || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("with another token: IsAlive = %s, %v", l, err)
	}
	var astray atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { astray.Add(1) }))
	defer other.Close()
	for what, f := range map[string]http.HandlerFunc{
		"a redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
		},
		"an endless body": func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, endless{}) },
		"another server":  http.NotFound,
		"a gateway":       func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusBadGateway) },
		"no answer":       func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		answer.Store(&f)
		_, err := x.WaitReady(t.Context(), h)
		wantKind(t, what, err, sandboxer.Unavailable)
		if len(err.Error()) > 2000 {
			t.Errorf("%s: an error of %d bytes", what, len(err.Error()))
		}
	}
	lost := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, `{"message":"no route"}`, http.StatusNotFound)
	})
	answer.Store(&lost)
	if l, err := x.IsAlive(t.Context(), sandboxer.Handle{SandboxID: "box"}); l != sandboxer.Unknown {
		t.Errorf("where nothing is: IsAlive = %s, %v", l, err)
	}
	for _, err := range x.ListRunning(t.Context(), "test") {
		wantKind(t, "a listing where nothing is", err, sandboxer.Unavailable)
	}
	pages := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, `{"items":[],"next":"x"}`) })
	answer.Store(&pages)
	for _, err := range x.ListRunning(t.Context(), "test") {
		wantKind(t, "a listing without end", err, sandboxer.Unavailable)
	}
	if astray.Load() > 0 {
		t.Error("a redirect was followed")
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestConfig(t *testing.T) {
	for url, want := range map[string]bool{
		"": true, "https://stub.example": true, "https://stub.example/below": true, "http://127.0.0.1:8080": true, "http://[::1]:80": true, "http://localhost": true,
		"http://stub.example": false, "http://10.0.0.1": false, "stub.example": false, "https://u:p@stub.example": false, "unix:///run/stub": false, "https://stub.example?a=b": false,
	} {
		err := (&Config{URL: url}).Validate()
		if (err == nil) != want {
			t.Errorf("%q: %v", url, err)
		}
	}
	wantKind(t, "a lag beyond settle", (&Config{Faults: service.Faults{Lag: 2}, Settle: 1}).Validate(), sandboxer.Invalid)
}

// A sandbox costs nothing unless the file says so, and every quote says what it is.
func TestQuote(t *testing.T) {
	for config, want := range map[string]sandboxer.Credits{`{"setup":5,"per_hour":7}`: 0, `{"bill":true,"setup":5,"per_hour":7}`: 19} {
		q, err := opens(t, "test", t.TempDir(), config).EstimateCost(t.Context(), order("box"), 2*time.Hour)
		if err != nil || q.Amount != want || !strings.HasPrefix(q.Detail, said) {
			t.Errorf("%s: %+v, %v; want %s", config, q, err, want)
		}
	}
}

// The service gets the variables that are named, and no secret of the server.
func TestServiceEnvironment(t *testing.T) {
	t.Setenv("SANDBOXER_API_KEY", "canary")
	t.Setenv("TZ", "UTC")
	dir := home(t)
	if _, err := opens(t, "test", dir, `{}`).Provision(t.Context(), order("box")); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pidOf(t, dir)))
	if err != nil {
		t.Skip(err)
	}
	if text := string(data); strings.Contains(text, "canary") || !strings.Contains(text, "TZ=UTC") {
		t.Errorf("the service has the variables %q", text)
	}
}
