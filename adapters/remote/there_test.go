package remote

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// Answers of the other installation are bounded, and shown as text alone; an unknown kind, and a fault of its own,
// are not ours.
func TestErrorsThere(t *testing.T) {
	p := &peer{name: "there"}
	for said, kind := range map[sandboxer.Kind]sandboxer.Kind{
		sandboxer.Conflict: sandboxer.Conflict, sandboxer.Exhausted: sandboxer.Exhausted, sandboxer.NotFound: sandboxer.NotFound, sandboxer.Invalid: sandboxer.Invalid,
		sandboxer.Internal: sandboxer.Unavailable, sandboxer.Canceled: sandboxer.Unavailable, sandboxer.Unauthenticated: sandboxer.Unavailable, "nonsense\x1b": sandboxer.Unavailable,
	} {
		problem := &api.Problem{Code: said, Detail: "\x1b[2J" + strings.Repeat("x", 1<<20), Hint: "\x07\xff" + strings.Repeat("y", 1<<20), RetryAfter: api.Duration(1000 * time.Hour),
			Status: 409, RequestID: "r1\x1b" + strings.Repeat("z", 1<<20)}
		err := p.fail(problem.Err())
		wantKind(t, string(said), err, kind)
		for _, text := range []string{sandboxer.Message(err), sandboxer.HintOf(err), err.Error()} { // the last is what logs show
			if len(text) > 2*maxText || strings.ContainsAny(text, "\x1b\x07") || !utf8.ValidString(text) {
				t.Errorf("%q is told in %d bytes: %.20q", said, len(text), text)
			}
		}
		if text := err.Error(); !strings.Contains(text, "409 ") || !strings.Contains(text, "to request r1") || !strings.Contains(text, "[2Jxxx") {
			t.Errorf("%q: logs do not show what it said, and in which answer: %.50q…%q", said, text, text[max(0, len(text)-200):])
		}
		if after := sandboxer.RetryAfterOf(err); after > time.Hour {
			t.Errorf("%q: it is to be tried again in %s", said, after)
		}
	}
	given := p.fail(sandboxer.E(sandboxer.Canceled, (&api.Problem{Code: sandboxer.Canceled}).Err(), "given up"))
	wantKind(t, "what was given up here", given, sandboxer.Canceled)
	broken := p.fail(sandboxer.E(sandboxer.Unavailable, fmt.Errorf("malformed \x1b%s: %w", strings.Repeat("x", 1<<20), context.DeadlineExceeded), "it does not answer"))
	if text := broken.Error(); len(text) > 2*maxText || strings.Contains(text, "\x1b") || !errors.Is(broken, context.DeadlineExceeded) {
		t.Errorf("what cannot be read is told in %d bytes: %.60q", len(text), text)
	}
}

// A redirect is not followed, and takes the key nowhere: neither of a request, nor of a stream.
func TestNoRedirectThere(t *testing.T) {
	f := newFar(t)
	var elsewhere atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	var astray atomic.Bool
	front := inFront(t, f, func(w http.ResponseWriter, r *http.Request) bool {
		if astray.Load() {
			http.Redirect(w, r, other.URL+r.URL.Path, http.StatusTemporaryRedirect)
		}
		return astray.Load()
	})
	config := f.config()
	config["url"] = front
	p := opened(t, t.TempDir(), config)
	ctx := t.Context()
	h, err := p.Provision(ctx, order("astray", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		astray.Store(false)
		if _, err := p.Teardown(context.WithoutCancel(ctx), h); err != nil {
			t.Error(err)
		}
	}()
	astray.Store(true)
	for what, f := range map[string]func() error{
		"IsAlive":  func() error { _, err := p.IsAlive(ctx, h); return err },
		"Exec":     func() error { _, err := p.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}}); return err },
		"ReadFile": func() error { _, err := p.ReadFile(ctx, h, "/x"); return err },
		"Dial":     func() error { _, err := p.Dial(ctx, h, 80); return err },
		"Notify":   func() error { _, err := p.Notify(ctx, "test"); return err },
		"DialAgent": func() error {
			_, err := p.DialAgent(ctx, h)
			return err
		},
		"ListProcesses": func() error { _, err := p.ListProcesses(ctx, h); return err },
	} {
		if f() == nil {
			t.Errorf("%s went well", what)
		}
	}
	if n := elsewhere.Load(); n > 0 {
		t.Errorf("%d requests went where a redirect leads", n)
	}
}

// inFront starts a server in front of f, and returns its URL. What handles a request itself reports so.
func inFront(t *testing.T, f *far, handles func(http.ResponseWriter, *http.Request) bool) string {
	t.Helper()
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: f.TCP})
	proxy.Transport = &http.Transport{DisableKeepAlives: true}
	proxy.FlushInterval = -1
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !handles(w, r) {
			proxy.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// An installation that is older than the way to the agents says what it lacks, and not that the sandbox is gone.
func TestOlderInstallation(t *testing.T) {
	f := newFar(t)
	config := f.config()
	config["url"] = inFront(t, f, func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, "/agent") {
			return false
		}
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusNotFound)
		_ = json.NewEncoder(w).Encode(api.Problem{Code: sandboxer.NotFound, Detail: "there is nothing at this path"})
		return true
	})
	ctx := t.Context()
	p := opened(t, t.TempDir(), config)
	h, err := p.Provision(ctx, order("older", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Teardown(context.WithoutCancel(ctx), h)
	_, err = p.DialAgent(ctx, h)
	wantKind(t, "DialAgent", err, sandboxer.Unsupported)
	_, err = p.ListProcesses(ctx, h)
	wantKind(t, "ListProcesses", err, sandboxer.Unsupported)
	_, err = p.WatchFiles(ctx, h, "/tmp", false)
	wantKind(t, "WatchFiles", err, sandboxer.Unsupported)
}

// A notice reports that a sandbox is paused, and that it goes on; calls of its agent are refused meanwhile. It costs what the
// other installation booked in the end.
func TestNoticesAndCost(t *testing.T) {
	ctx := t.Context()
	f := newFar(t)
	p := opened(t, t.TempDir(), f.config())
	h, err := p.Provision(ctx, order("told", nil))
	if err != nil {
		t.Fatal(err)
	}
	listening, stop := context.WithCancel(ctx)
	seq, err := p.Notify(listening, "test")
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan string, 100)
	go func() {
		defer close(told)
		for id, err := range seq {
			if err != nil {
				return
			}
			told <- id
		}
	}()
	defer func() {
		stop()
		for range told {
		}
	}()
	until := func(what string) {
		t.Helper()
		if id := edgetest.Receive(t, told, what); id != "told" {
			t.Fatalf("%s: %q is told", what, id)
		}
	}
	// Somebody else's, in the same tenant, whose events come first.
	theirs := edgetest.Client(t, "http://"+f.TCP, api.Options{Token: sandboxer.Secret(f.key)})
	other, err := theirs.Create(ctx, api.CreateSandbox{Profile: "far"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := theirs.Destroy(ctx, other.ID, true); err != nil {
		t.Fatal(err)
	}
	if err := p.Pause(ctx, h); err != nil {
		t.Fatal(err)
	}
	until("the pause")
	_, err = p.ListProcesses(ctx, h)
	wantKind(t, "ListProcesses of what stands still", err, sandboxer.Conflict)
	if err := p.Resume(ctx, h); err != nil {
		t.Fatal(err)
	}
	until("that it goes on")
	sb, err := f.client.Get(ctx, "ours/"+h.Ref)
	if err != nil {
		t.Fatal(err)
	}
	if u, err := p.MeterActual(ctx, h, time.Hour); err != nil || u.Cost <= 0 || u.Cost > sb.Quote.Amount.Std() {
		t.Errorf("it costs %+v so far, %v; want something of %s", u, err, sb.Quote.Amount.Std())
	}
	if _, err := p.Teardown(ctx, h); err != nil {
		t.Fatal(err)
	}
	until("its end")
	if sb, err = f.client.Get(ctx, "ours/"+h.Ref); err != nil {
		t.Fatal(err)
	}
	if u, err := p.MeterActual(ctx, h, time.Hour); err != nil || u.Cost != sb.Cost.Std() {
		t.Errorf("it cost %+v, %v; the other installation booked %s", u, err, sb.Cost.Std())
	}
}

// Without an agent there, files are brought out and in by way of commands.
func TestWithoutAgent(t *testing.T) {
	ctx := t.Context()
	f := newFar(t, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch)
	p := opened(t, t.TempDir(), f.config())
	for _, c := range []sandboxer.Capability{sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch} {
		if p.Can(c) {
			t.Errorf("it has %s, for which the extension there has nothing", c)
		}
	}
	if !p.Can(sandboxer.CanArchive) {
		t.Error("it has no archives, which commands make")
	}
	h, err := p.Provision(ctx, order("bare", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Teardown(context.WithoutCancel(ctx), h)
	if _, err := p.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo kept >file"}, Stdout: io.Discard}); err != nil {
		t.Fatal(err)
	}
	var tar bytes.Buffer
	if err := p.Archive(ctx, h, "", &tar); err != nil || !bytes.Contains(tar.Bytes(), []byte("kept\n")) {
		t.Errorf("an archive of %d bytes, %v", tar.Len(), err)
	}
}

// Where there are neither commands nor an agent, there is nothing that could make an archive, and the extension does not claim to.
func TestWithoutArchive(t *testing.T) {
	for _, drop := range [][]sandboxer.Capability{{sandboxer.CanExec}, {sandboxer.CanExec, sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch}} {
		p := opened(t, t.TempDir(), newFar(t, drop...).config())
		if got, want := p.Can(sandboxer.CanArchive), len(drop) == 1; got != want {
			t.Errorf("without %s there: archive is %t, want %t", drop, got, want)
		}
	}
}
