package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// flaky cuts the connection of the first fails requests, after having read them.
type flaky struct {
	mu    sync.Mutex
	fails int
	seen  []string // method, path and idempotency key
}

func (f *flaky) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body)
	f.mu.Lock()
	f.seen = append(f.seen, r.Method+" "+r.URL.Path+" "+r.Header.Get("Idempotency-Key"))
	cut := len(f.seen) <= f.fails
	f.mu.Unlock()
	if cut {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write([]byte(`{}`))
}

// Only what may be repeated is repeated, and a create keeps its key.
func TestRetries(t *testing.T) {
	tests := []struct {
		name  string
		call  func(c *Client) error
		again bool
	}{
		{"get", func(c *Client) error { _, err := c.Get(t.Context(), "x"); return err }, true},
		{"destroy", func(c *Client) error { _, err := c.Destroy(t.Context(), "x", false); return err }, true},
		{"create", func(c *Client) error { _, err := c.Create(t.Context(), CreateSandbox{Profile: "p"}); return err }, true},
		{"plan", func(c *Client) error { _, err := c.Plan(t.Context(), CreateSandbox{Profile: "p"}); return err }, true},
		{"set the lifetime", func(c *Client) error { _, err := c.Extend(t.Context(), "x", ExtendSandbox{TTL: 1}); return err }, true},
		{"add to the lifetime", func(c *Client) error { _, err := c.Extend(t.Context(), "x", ExtendSandbox{Add: 1}); return err }, false},
		{"run", func(c *Client) error { _, err := c.Run(t.Context(), "x", Exec{Args: []string{"x"}}); return err }, false},
		{"write a file", func(c *Client) error { return c.WriteFile(t.Context(), "x", "/f", 0, strings.NewReader("x")) }, false},
		{"move a file", func(c *Client) error { return c.MoveFile(t.Context(), "x", "/a", "/b") }, false},
		{"make a key", func(c *Client) error { _, err := c.CreateKey(t.Context(), NewKey{}); return err }, false},
		{"grant", func(c *Client) error { _, err := c.Grant(t.Context(), Grant{Amount: 1}); return err }, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := &flaky{fails: 2}
			s := httptest.NewServer(f)
			defer s.Close()
			c, err := New(s.URL, Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			err = tt.call(c)
			f.mu.Lock()
			defer f.mu.Unlock()
			if tt.again {
				if err != nil || len(f.seen) != 3 || f.seen[0] != f.seen[2] {
					t.Errorf("requests %q, %v", f.seen, err)
				}
			} else if !errors.Is(err, sandboxer.Unavailable) || len(f.seen) != 1 {
				t.Errorf("requests %q, %v", f.seen, err)
			}
			if tt.name == "create" && strings.HasSuffix(f.seen[0], " ") {
				t.Error("a create without a key")
			}
		})
	}
}

func TestNoRetry(t *testing.T) {
	f := &flaky{fails: 1}
	s := httptest.NewServer(f)
	defer s.Close()
	c, err := New(s.URL, Options{NoRetry: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Create(t.Context(), CreateSandbox{Profile: "p"})
	f.mu.Lock()
	defer f.mu.Unlock()
	if !errors.Is(err, sandboxer.Unavailable) || len(f.seen) != 1 {
		t.Errorf("requests %q, %v", f.seen, err)
	}
}

// What answers is not always a sandboxer server.
func TestForeignAnswers(t *testing.T) {
	for _, tt := range []struct {
		status int
		body   string
		kind   sandboxer.Kind
	}{
		{502, "<html>Bad gateway", sandboxer.Unavailable},
		{404, "not found", sandboxer.NotFound},
		{302, "", sandboxer.Internal},
		{418, `{"code":"invalid"}`, sandboxer.Invalid},
		{200, "null", sandboxer.Unavailable},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/elsewhere" {
				t.Error("the client followed a redirect")
			}
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(tt.status)
			io.WriteString(w, tt.body)
		}))
		c, _ := New(s.URL, Options{Token: "sbx_key_k_secret"})
		_, err := c.Get(t.Context(), "x")
		if sandboxer.KindOf(err) != tt.kind {
			t.Errorf("%d: %v (%s); want %s", tt.status, err, sandboxer.KindOf(err), tt.kind)
		}
		c.Close()
		s.Close()
	}
}

func TestText(t *testing.T) {
	var v struct {
		D Duration
		C Credits
	}
	if err := json.Unmarshal([]byte(`{"D":"1h30m","C":"-3.5"}`), &v); err != nil || v.D.Std() != 90*time.Minute || v.C != -3_500_000 {
		t.Fatalf("%+v, %v", v, err)
	}
	if b, err := json.Marshal(v); err != nil || string(b) != `{"D":"1h30m0s","C":"-3.50"}` {
		t.Errorf("%s, %v", b, err)
	}
	for _, bad := range []string{`{"D":"90"}`, `{"D":"soon"}`, `{"C":"1e3"}`, `{"C":"0.1234567"}`} {
		if err := json.Unmarshal([]byte(bad), &v); !errors.Is(err, sandboxer.Invalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func FuzzParseMode(f *testing.F) {
	for _, s := range []string{"0644", "755", "7777", "8", "-1", "", "0o644"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		m, err := ParseMode(s)
		if err != nil {
			if !errors.Is(err, sandboxer.Invalid) {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		if back, err := ParseMode(FormatMode(m)); err != nil || back != m {
			t.Errorf("%q is %v and then %v, %v", s, m, back, err)
		}
	})
}

func TestSignals(t *testing.T) {
	for name, sig := range signals {
		for _, n := range []string{name, "SIG" + name} {
			if got, err := ParseSignal(n); err != nil || got != sig {
				t.Errorf("ParseSignal(%q) = %v, %v", n, got, err)
			}
		}
		if got := SignalName(sig); got != name {
			t.Errorf("SignalName(%v) = %q; want %q", sig, got, name)
		}
	}
	for _, bad := range []string{"", "SIG", "9", "term", "SEGVX"} {
		if _, err := ParseSignal(bad); !errors.Is(err, sandboxer.Invalid) {
			t.Errorf("ParseSignal(%q): %v", bad, err)
		}
	}
}

// TestHintsFit: what cannot be reached is explained by how it was addressed.
func TestHintsFit(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("{}")) })
	plain, secure := httptest.NewServer(h), httptest.NewTLSServer(h)
	defer plain.Close()
	defer secure.Close()
	plain.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.Config.ErrorLog = plain.Config.ErrorLog
	for _, tt := range []struct{ url, msg, hint string }{
		{"https" + strings.TrimPrefix(plain.URL, "http"), "does not speak TLS", "http://"},
		{"http" + strings.TrimPrefix(secure.URL, "https"), "speaks TLS", "https://"},
		{"http://127.0.0.1:1", "no server answers", "check the address"},
		{"unix:///nonexistent/api.sock", "no server answers", "sandboxer up"},
	} {
		c, err := New(tt.url, Options{NoRetry: true})
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Status(t.Context())
		c.Close()
		if !errors.Is(err, sandboxer.Unavailable) || !strings.Contains(sandboxer.Message(err), tt.msg) || !strings.Contains(sandboxer.HintOf(err), tt.hint) ||
			strings.HasPrefix(tt.url, "http") == strings.Contains(sandboxer.HintOf(err), "sandboxer up") {
			t.Errorf("%s: %v, hint %q", tt.url, err, sandboxer.HintOf(err))
		}
	}
}

// TestEmptyNames: a name that would make the path another route is sent to nobody.
func TestEmptyNames(t *testing.T) {
	asked := atomic.Int32{}
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer srv.Close()
	c, err := New(srv.URL, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, ref := range []string{"", ".", ".."} {
		_, get := c.Get(t.Context(), ref)
		_, exec := c.Exec(t.Context(), ref, sandboxer.Cmd{Args: []string{"true"}})
		_, dial := c.Dial(t.Context(), ref, 80)
		_, profile := c.Profile(t.Context(), ref)
		for what, err := range map[string]error{"Get": get, "Exec": exec, "Dial": dial, "Profile": profile, "RevokeKey": c.RevokeKey(t.Context(), ref)} {
			if !errors.Is(err, sandboxer.Invalid) {
				t.Errorf("%s of %q: %v", what, ref, err)
			}
		}
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("the server was asked %d times", n)
	}
}

// What is held in memory is bounded, whatever type it has; a file is not held.
func TestMaxAnswer(t *testing.T) {
	long := strings.Repeat("x", 200)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/events"):
			w.Header().Set("Content-Type", "text/event-stream")
			for range 10 {
				io.WriteString(w, "data: "+long+"\n")
			}
			io.WriteString(w, "\n")
		case r.URL.Path == "/v1/sandboxes/short":
			io.WriteString(w, `{"id":"short"}`)
		case r.URL.Path == "/v1/sandboxes/long":
			io.WriteString(w, `{"id":"`+strings.Repeat(long, 10)+`"}`)
		default:
			io.WriteString(w, strings.Repeat(long, 10))
		}
	}))
	defer s.Close()
	c, err := New(s.URL, Options{MaxAnswer: 1000, NoRetry: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if sb, err := c.Get(t.Context(), "short"); err != nil || sb.ID != "short" {
		t.Errorf("a short answer: %+v, %v", sb, err)
	}
	tooLong := func(what string, err error) {
		t.Helper()
		if sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), "too long") {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err = c.Get(t.Context(), "long")
	tooLong("a long answer", err)
	err = nil
	for _, e := range c.Follow(t.Context(), EventQuery{}) {
		err = e
	}
	tooLong("a long event", err)
	r, err := c.ReadFile(t.Context(), "x", "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if n, err := io.Copy(io.Discard, r); err != nil || n != 2000 {
		t.Errorf("a file: %d bytes, %v", n, err)
	}
}

// TestSilentUpload: an upload whose source is silent ends with the server, and with the context.
func TestSilentUpload(t *testing.T) {
	arrived := make(chan struct{}, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadFull(r.Body, make([]byte, 3))
		if r.URL.Query().Get("path") == "/waits" {
			arrived <- struct{}{}
			_, _ = io.Copy(io.Discard, r.Body) // until the client has gone
			return
		}
		if c, _, err := w.(http.Hijacker).Hijack(); err == nil {
			c.Close()
		}
	}))
	defer srv.Close()
	c, err := New(srv.URL, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for path, want := range map[string]sandboxer.Kind{"/ends": sandboxer.Unavailable, "/waits": sandboxer.Canceled} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r, w := io.Pipe()
		defer w.Close()
		done := make(chan error, 1)
		go func() {
			done <- c.WriteFile(ctx, "box", path, 0, io.MultiReader(strings.NewReader("abc"), r))
		}()
		if want == sandboxer.Canceled {
			<-arrived
			cancel()
		}
		select {
		case err := <-done:
			if sandboxer.KindOf(err) != want {
				t.Errorf("%s: %v", path, err)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("%s: it waits for its source", path)
		}
	}
	broken := sandboxer.E(sandboxer.NotFound, nil, "it is gone")
	if err := c.WriteFile(t.Context(), "box", "/waits", 0, iotest.ErrReader(broken)); sandboxer.KindOf(err) != sandboxer.NotFound || !strings.Contains(err.Error(), "could not be read") {
		t.Errorf("of a source that fails: %v", err)
	}
}
