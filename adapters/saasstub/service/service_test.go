package service

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer/internal/compattest"
	"github.com/sand-boxer/sandboxer/internal/filelock"
)

// ask sends one request to s, and decodes the answer into out.
func ask(t *testing.T, s *server, method, path string, body, out any) (status int) {
	t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	s.handler().ServeHTTP(w, httptest.NewRequest(method, path, bytes.NewReader(data)))
	if out != nil && w.Code == http.StatusOK {
		if err := json.Unmarshal(w.Body.Bytes(), out); err != nil {
			t.Fatal(err)
		}
	}
	return w.Code
}

func start(t *testing.T, dir string, now *time.Time, set Settings) *server {
	t.Helper()
	if err := (Launcher{dir}).Configure(set); err != nil {
		t.Fatal(err)
	}
	s, err := newServer(dir, func() time.Time { return *now })
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var hour = time.Hour.Milliseconds()

// The same seed and requests have the same faults and names; another seed has others.
func TestDeterministic(t *testing.T) {
	run := func(seed int64) (said string) {
		now := time.Unix(1000, 0)
		s := start(t, t.TempDir(), &now, Settings{Seed: seed, Faults: Faults{Throttled: 20, Unavailable: 20, Conflict: 20}})
		for range 50 {
			var sb Sandbox
			said += fmt.Sprint(ask(t, s, http.MethodPost, "/v1/sandboxes", Create{TTLMS: hour}, &sb), sb.Ref, " ")
		}
		return said
	}
	first := run(1)
	if again := run(1); again != first {
		t.Errorf("the same seed says\n%s\nand\n%s", first, again)
	}
	if run(2) == first {
		t.Error("another seed says the same")
	}
	for _, status := range []string{"200", "409", "429", "503"} {
		if !strings.Contains(first, status) {
			t.Errorf("no request was answered with %s", status)
		}
	}
}

// Usage is by the service's clock, ends with the sandbox, and outlives it and the process.
func TestUsage(t *testing.T) {
	now, dir := time.Unix(1000, 0), t.TempDir()
	s := start(t, dir, &now, Settings{Faults: Faults{Skew: time.Hour}})
	var a, b Sandbox
	ask(t, s, http.MethodPost, "/v1/sandboxes", Create{TTLMS: hour}, &a)
	ask(t, s, http.MethodPost, "/v1/sandboxes", Create{TTLMS: 5000}, &b)
	if want := now.Add(time.Hour); !a.Created.Equal(want) {
		t.Errorf("created at %s; want %s", a.Created, want)
	}
	now = now.Add(10 * time.Second)
	want := func(s *server, ref string, lived time.Duration, final bool) {
		t.Helper()
		var u Usage
		if status := ask(t, s, http.MethodGet, "/v1/sandboxes/"+ref+"/usage", nil, &u); status != http.StatusOK || u.LivedMS != lived.Milliseconds() || u.Final != final {
			t.Errorf("usage of %s: %d, %+v; want %s, final: %t", ref, status, u, lived, final)
		}
	}
	want(s, a.Ref, 10*time.Second, false)
	want(s, b.Ref, 5*time.Second, true) // it expired
	if status := ask(t, s, http.MethodDelete, "/v1/sandboxes/"+a.Ref, nil, nil); status != http.StatusOK {
		t.Errorf("removed: %d", status)
	}
	now = now.Add(time.Hour)
	s = start(t, dir, &now, Settings{})
	want(s, a.Ref, 10*time.Second, true)
	want(s, b.Ref, 5*time.Second, true)
	if status := ask(t, s, http.MethodGet, "/v1/sandboxes/"+a.Ref, nil, nil); status != http.StatusNotFound {
		t.Errorf("an ended sandbox: %d", status)
	}
}

// Whatever a caller sends and however much it makes is bounded.
func TestBounds(t *testing.T) {
	now, dir := time.Unix(1000, 0), t.TempDir()
	s := start(t, dir, &now, Settings{Capacity: MaxPage + 1})
	many := map[string]string{}
	for i := range maxTags + 1 {
		many[fmt.Sprint(i)] = ""
	}
	for what, c := range map[string]any{
		"no lifetime": Create{}, "a long lifetime": Create{TTLMS: MaxTTL.Milliseconds() + 1}, "a long note": Create{TTLMS: hour, Note: strings.Repeat("x", MaxNoteBytes+1)},
		"many tags": Create{TTLMS: hour, Tags: many}, "a long tag": Create{TTLMS: hour, Tags: map[string]string{"x": strings.Repeat("x", maxTagBytes+1)}},
		"an unknown field": map[string]int{"odd": 1},
	} {
		if status := ask(t, s, http.MethodPost, "/v1/sandboxes", c, nil); status != http.StatusBadRequest {
			t.Errorf("%s: %d", what, status)
		}
	}
	if status := ask(t, s, http.MethodPost, "/v1/sandboxes", Create{TTLMS: hour, Note: strings.Repeat("x", MaxBodyBytes)}, nil); status != http.StatusRequestEntityTooLarge {
		t.Errorf("a long body: %d", status)
	}
	for i := range MaxPage + 1 {
		if status := ask(t, s, http.MethodPost, "/v1/sandboxes", Create{TTLMS: hour, Tags: map[string]string{"odd": fmt.Sprint(i % 2)}}, nil); status != http.StatusOK {
			t.Fatalf("sandbox %d: %d", i, status)
		}
	}
	if status := ask(t, s, http.MethodPost, "/v1/sandboxes", Create{TTLMS: hour}, nil); status != http.StatusTooManyRequests {
		t.Errorf("one too many: %d", status)
	}
	list := func(query string) (refs []string, pages int) {
		seen := map[string]bool{}
		for after := ""; ; pages++ {
			var p Page[Sandbox]
			ask(t, s, http.MethodGet, "/v1/sandboxes?"+query+"after="+after, nil, &p)
			for _, sb := range p.Items {
				seen[sb.Ref] = true
			}
			if after = p.Next; after == "" {
				return slices.Collect(maps.Keys(seen)), pages + 1
			}
		}
	}
	if refs, pages := list(""); len(refs) != MaxPage+1 || pages != 2 {
		t.Errorf("%d sandboxes on %d pages", len(refs), pages)
	}
	if refs, pages := list("odd=1&"); len(refs) != MaxPage/2 || pages != 1 {
		t.Errorf("%d odd sandboxes on %d pages", len(refs), pages)
	}
	for range maxEnded + 1 {
		s.state.end(Sandbox{Ref: "x"}, now)
	}
	if n := len(s.state.Ended); n != maxEnded {
		t.Errorf("%d ended sandboxes are kept; want %d", n, maxEnded)
	}
}

// The idle time begins when there is no sandbox, and not before.
func TestIdle(t *testing.T) {
	now := time.Unix(1000, 0)
	s := start(t, t.TempDir(), &now, Settings{})
	at := func(what string, want time.Duration) {
		t.Helper()
		if got := s.idleFor(); got != want {
			t.Errorf("%s: idle for %s; want %s", what, got, want)
		}
	}
	at("at first", 0)
	now = now.Add(idleTime)
	at("a minute later", idleTime)
	ask(t, s, http.MethodPost, "/v1/sandboxes", Create{TTLMS: 5000}, nil)
	at("with a sandbox", 0)
	now = now.Add(5 * time.Second)
	at("when it expired", 0)
	now = now.Add(time.Second)
	at("a second later", time.Second)
}

// running waits until the service of dir runs.
func running(t *testing.T, dir string) {
	t.Helper()
	tick, late := time.NewTicker(time.Millisecond), time.After(time.Minute)
	defer tick.Stop()
	for !(Launcher{dir}).Running(t.Context()) {
		select {
		case <-tick.C:
		case <-late:
			t.Fatal("it does not start")
		}
	}
}

// The process ends when it is idle, and when its directory is gone. A second process in the directory leaves it to the first.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	if err := run(t.Context(), dir, time.Millisecond); err != nil {
		t.Errorf("idle: %v", err)
	}
	if (Launcher{dir}).Running(t.Context()) {
		t.Error("it runs on")
	}
	lock, err := filelock.Try(filepath.Join(dir, lockFile), filelock.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), dir, time.Hour); err != nil {
		t.Errorf("with another one: %v", err)
	}
	lock.Release()
	ended := make(chan error, 1)
	go func() { ended <- run(t.Context(), dir, 30*time.Second) }()
	running(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("without its directory: %v", err)
	}
}

// A long path is no obstacle, though a socket's address is short.
func TestLongPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long/", 40))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, dir, time.Hour) }()
	running(t, dir)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A state that cannot be read is not overwritten.
func TestDamagedState(t *testing.T) {
	for _, text := range []string{"{", `{"v":2}`, `{"v":1,"V":1}`} {
		dir := t.TempDir()
		name := filepath.Join(dir, stateFile)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := run(t.Context(), dir, time.Millisecond); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", text, err)
		}
		if (Launcher{dir}).Empty(t.Context()) {
			t.Errorf("%s: it is called empty", text)
		}
		if got, _ := os.ReadFile(name); string(got) != text {
			t.Errorf("%s became %s", text, got)
		}
	}
}

func TestFormOfState(t *testing.T) {
	compattest.CheckForm(t, "saas-stub-state", compattest.Shape("1", state{}))
}

// What the service wrote last says why it ended.
func TestLogEnd(t *testing.T) {
	l := Launcher{t.TempDir()}
	if err := os.WriteFile(filepath.Join(l.Dir, logFile), []byte(strings.Repeat("earlier\n", 1000)+"the cause"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := l.log(); !strings.HasSuffix(got, "the cause") {
		t.Errorf("the end of the log is %q", got)
	}
}
