package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
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

// Bodies half sent wait in memory only up to a bound.
func TestHalfBodiesAreBounded(t *testing.T) {
	d := newDoor(t, &lobby{}, Options{})
	var refused atomic.Int64
	for range mostWaitingKey>>20 + 8 {
		c := d.dial("tcp")
		go func() {
			io.WriteString(c, request("POST /v1/sandboxes", "Authorization: Bearer "+goodKey, "Content-Type: application/json", "Content-Length: 1048576")+
				strings.Repeat(" ", 1<<20-100))
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err == nil && resp.StatusCode == 429 && resp.Header.Get("Retry-After") != "" {
				refused.Add(1)
			}
		}()
	}
	poll(t, "a refusal", func() bool { return refused.Load() > 0 })
	if got := d.s.memory.of("acme"); got > mostWaitingKey {
		t.Errorf("%d bytes of one key are held; want %d at most", got, mostWaitingKey)
	}
}

func (m *memory) of(tenant string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tenants[tenant]
}

// Input that a command does not read, and answers in one piece, are accounted for.
func TestMemoryOfExecs(t *testing.T) {
	m := newMemory()
	p := sandboxer.Principal{Actor: "key:a", Tenant: "t"}
	var rooms []*held
	cut := 0
	for range 40 {
		h := &held{of: m, p: p}
		rooms = append(rooms, h)
		c := capped{most: 16 << 20, room: h}
		for range 16 {
			c.Write(make([]byte, 1<<20))
		}
		if c.cut {
			cut++
		} else if len(c.b) != 16<<20 {
			t.Errorf("%d bytes and not cut", len(c.b))
		}
	}
	if cut != 38 || m.of("t") > mostWaitingKey {
		t.Errorf("%d of 40 are cut, %d bytes held", cut, m.of("t"))
	}
	in := intake{room: &held{of: m, p: p}}
	in.changed.L = &in.mu
	if err := in.put(make([]byte, freeInput)); err != nil {
		t.Errorf("a little input: %v", err)
	}
	if err := in.put(make([]byte, 1)); !errors.Is(err, sandboxer.Exhausted) || sandboxer.RetryAfterOf(err) <= 0 {
		t.Errorf("more input: %v", err)
	}
	other := &held{of: m, p: sandboxer.Principal{Actor: "key:b", Tenant: "u"}}
	if !other.grow(1 << 20) {
		t.Error("another tenant has no room")
	}
	for _, h := range append(rooms, other) {
		h.end()
	}
	if m.total != 0 || len(m.keys) != 0 || len(m.tenants) != 0 {
		t.Errorf("left: %+v", m)
	}
	if rooms[0].grow(1) {
		t.Error("a request that ended takes memory")
	}
}

// Through the whole server: one user has a hundred of each at once, and one too many is
// told to wait.
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
		case <-time.After(2 * patience):
			t.Fatal("they do not all begin")
		}
	}
	// Beside them the rest of the server works.
	if _, err := c.Stats(ctx, sb.ID); err != nil {
		t.Error(err)
	}
}
