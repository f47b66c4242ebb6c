package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// Streams without a cursor begin now, whatever there was before.
func TestEventStreamsBeginNow(t *testing.T) {
	r := newRig(t)
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	r.create(c, api.CreateSandbox{Name: "before"})
	read := func(query, cursor string) (next func(want string) string, end func()) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		req, _ := http.NewRequestWithContext(ctx, "GET", r.tcp+"/v1/events"+query, nil)
		req.Header.Set("Authorization", "Bearer "+k.Token)
		req.Header.Set("Accept", "text/event-stream")
		if cursor != "" {
			req.Header.Set("Last-Event-ID", cursor)
		}
		tr := &http.Transport{}
		resp, err := tr.RoundTrip(req)
		if err != nil || resp.StatusCode != 200 {
			t.Fatal(resp, err)
		}
		var got strings.Builder
		buf := make([]byte, 4096)
		return func(want string) string {
				for !strings.Contains(got.String(), want) {
					n, err := resp.Body.Read(buf)
					got.Write(buf[:n])
					if err != nil {
						t.Fatalf("%v, after %s", err, got.String())
					}
				}
				return got.String()
			}, func() {
				cancel()
				resp.Body.Close()
				tr.CloseIdleConnections()
			}
	}
	now, end := read("", "")
	defer end()
	now("\n\n")
	begun := time.Now()
	sb := r.create(c, api.CreateSandbox{Name: "after"})
	got := now(sb.ID)
	if strings.Contains(got, "before") || !strings.Contains(got, "retry: 1000\nid: ") {
		t.Errorf("a stream without a cursor: %s", got)
	}
	for _, from := range [][2]string{{"", "0"}, {"?after=0", ""}, {"?since=2020-01-01T00:00:00Z", ""}} {
		next, end := read(from[0], from[1])
		if got := next(sb.ID); !strings.Contains(got, `"seq":1,`) {
			t.Errorf("from %q: %s", from, got)
		}
		end()
	}
	next, end := read("?since="+begun.UTC().Format("2006-01-02T15:04:05.000000Z"), "")
	defer end()
	if got := next(sb.ID); strings.Contains(got, `"seq":1,`) {
		t.Errorf("since %s: %s", begun, got)
	}
}

// Input that a command does not read, and answers in one piece, are accounted for.
func TestMemoryOfExecs(t *testing.T) {
	const each, fit = 16 << 20, 2 // as many as one key may have in memory
	r := newRig(t)
	k, _ := r.key("acme", sandboxer.ScopeRead)
	other, _ := r.key("rival", sandboxer.ScopeRead)
	var handle func(context.Context)
	e := edge.New(r.m, edge.Options{})
	var mux edge.Mux
	mux.Handle(edge.Route{Pattern: "GET /{who}", Access: edge.Needs(sandboxer.ScopeRead), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("who") == "acme" {
			handle(r.Context())
		} else if err := edge.ReserveMemory(r.Context()).Grow(1 << 20); err != nil {
			t.Errorf("another tenant: %v", err)
		}
	})})
	e.Mount(edge.Door{Name: "test", Path: "/", Routes: &mux})
	ts := httptest.NewServer(e.Handler())
	defer ts.Close()
	ask := func(path, token string) {
		t.Helper()
		req, _ := http.NewRequestWithContext(t.Context(), "GET", ts.URL+path, nil)
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := ts.Client().Do(req)
		if err != nil || resp.StatusCode != 200 {
			t.Fatal(resp, err)
		}
		resp.Body.Close()
	}
	for range 2 { // a request that ended has given everything back
		var room *edge.MemoryReservation
		handle = func(ctx context.Context) {
			cut := 0
			for range 40 {
				c := capped{limit: each, reservation: edge.ReserveMemory(ctx)}
				if room == nil {
					room = c.reservation
				}
				for range 16 {
					c.Write(make([]byte, each/16))
				}
				if c.cut {
					cut++
				} else if len(c.b) != each {
					t.Errorf("%d bytes and not cut", len(c.b))
				}
			}
			if cut != 40-fit {
				t.Errorf("%d of 40 are cut", cut)
			}
			in := stdinBuffer{reservation: edge.ReserveMemory(ctx)}
			in.changed.L = &in.mu
			if err := in.put(make([]byte, unreservedInput)); err != nil {
				t.Errorf("a little input: %v", err)
			}
			if err := in.put(make([]byte, 1)); !errors.Is(err, sandboxer.Exhausted) || sandboxer.RetryAfterOf(err) <= 0 {
				t.Errorf("more input: %v", err)
			}
			ask("/rival", other.Token)
		}
		ask("/acme", k.Token)
		// The answer may be there before the request has ended, which then takes no more.
		edgetest.Poll(t, "the end of the request", func() bool { return room.Grow(1) != nil })
	}
}

// Through the whole server: one user has a hundred of each at once, and one more
// has to wait.
func TestManyAtOnce(t *testing.T) {
	r := newRig(t)
	_, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(c, api.CreateSandbox{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	ready := make(chan error, 200)
	for range 100 {
		wg.Go(func() {
			var once sync.Once
			_, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "echo ready; exec sleep 600"},
				Stdout: writeFunc(func(p []byte) (int, error) { once.Do(func() { ready <- nil }); return len(p), nil })})
			once.Do(func() { ready <- fmt.Errorf("exec: %w", err) })
		})
		wg.Go(func() {
			once := sync.OnceFunc(func() { ready <- nil })
			for _, err := range c.Follow(ctx, api.EventQuery{Sandbox: sb.ID}) {
				if err != nil {
					ready <- fmt.Errorf("events: %w", err)
					return
				}
				once()
			}
		})
	}
	for range 200 {
		select {
		case err := <-ready:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(2 * edgetest.Patience):
			t.Fatal("they do not all begin")
		}
	}
	// Beside them the rest of the server works.
	if _, err := c.Stats(ctx, sb.ID); err != nil {
		t.Error(err)
	}
}
