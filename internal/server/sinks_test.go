package server

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// TestSinkMetrics: the metrics show how many rows a sink has not got.
func TestSinkMetrics(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, func(s *setup) {
		s.sinks = []sandboxer.Sink{{Name: "books", File: filepath.Join(dir, "books.jsonl")}, {Name: "down", File: filepath.Join(dir, "missing", "x.jsonl")}}
	})
	admin, c := r.key("root", sandboxer.ScopeAdmin, sandboxer.ScopeWrite, sandboxer.ScopeRead)
	for range 2 {
		sb := r.create(c, api.CreateSandbox{Profile: "test"})
		if _, err := c.Destroy(t.Context(), sb.ID, false); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{`sandboxer_sink_backlog_rows{sink="books"} 0`, `sandboxer_sink_backlog_rows{sink="down"} 2`, `sandboxer_sink_dead_letters{sink="down"} 0`}
	for late := time.After(time.Minute); len(want) > 0; {
		a := r.send("GET", "/metrics", admin.Token, "", "")
		if strings.Contains(a.body, want[0]+"\n") {
			want = want[1:]
			continue
		}
		select {
		case <-late:
			t.Fatalf("/metrics has no %s: %s", want[0], a.body)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
