package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

func TestProgressOfAPull(t *testing.T) {
	for _, mode := range []string{"plain", "json", "live", "none"} {
		name := filepath.Join(t.TempDir(), mode)
		out, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		p := &progress{io: &streams{err: printer{out}}, mode: mode, begin: time.Now()}
		for done := range int64(101) {
			p.step(api.Event{SandboxID: "box", Type: sandboxer.EventProgress, Message: "pulling x:1",
				Progress: &sandboxer.Progress{Step: "pulling x:1\x1b[2J", Done: done * 1_000_000, Total: 100_000_000}})
		}
		p.stop()
		out.Close()
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		got := string(data)
		if strings.Contains(got, "\x1b[2J") {
			t.Errorf("%s: a stranger's control characters are shown", mode)
		}
		switch mode {
		case "plain":
			if n := strings.Count(got, "\n"); n != 11 || !strings.Contains(got, "box pulling x:1") || !strings.Contains(got, "50%  50.0 MB of 100.0 MB") {
				t.Errorf("%d lines:\n%s", n, got)
			}
		case "json":
			if n := strings.Count(got, `"done":`); n != 101 {
				t.Errorf("%d objects", n)
			}
		case "live":
			if !strings.Contains(got, "[============            ] 50%  50.0 MB of 100.0 MB") || !strings.HasSuffix(got, "\r\x1b[K") {
				t.Errorf("got %q", got)
			}
		case "none":
			if got != "" {
				t.Errorf("got %q", got)
			}
		}
	}
	if got := bar(sandboxer.Progress{Step: "unpacking", Done: 2_500_000}); got != "2.5 MB" {
		t.Errorf("without a total: %q", got)
	}
	if got := bar(sandboxer.Progress{Step: "building web", Done: 4_000}); got != "" {
		t.Errorf("of a step with next to no bytes: %q", got)
	}
	if got := bar(sandboxer.Progress{Done: 300, Total: 100}); !strings.HasPrefix(got, "["+strings.Repeat("=", 24)+"] 100%") {
		t.Errorf("beyond the total: %q", got)
	}
}

// TestChanges: what a backend left out of a request is said when the sandbox is ready, and
// shown with it.
func TestChanges(t *testing.T) {
	sb := &api.Sandbox{ID: "box"}
	sb.Reachability.Extra = map[string]string{sandboxer.ExtraChanged: "a is left out; b is left out\x1b[2J; c is empty; d; e", "service": "web"}
	rows := map[string]string{}
	for _, r := range sandboxView().detail(sb) {
		rows[r[0]] = r[1]
	}
	if got := rows["changed"]; strings.Count(got, "\n") != 4 || !strings.HasPrefix(got, "a is left out\nb ") {
		t.Errorf("changed is %q", got)
	}
	if got := rows["details"]; got != "service=web" {
		t.Errorf("details are %q", got)
	}
	name := filepath.Join(t.TempDir(), "out")
	out, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	p := &progress{io: &streams{err: out}, mode: "plain"}
	p.changes(sb)
	p.changes(&api.Sandbox{ID: "other"})
	p.stop()
	out.Close()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got := string(data)
	if strings.Count(got, "\n") != 4 || !strings.Contains(got, "changed: c is empty\n") || !strings.Contains(got, "changed: 2 more; see them with: sandboxer get box\n") || strings.Contains(got, "\x1b") {
		t.Errorf("said when it is ready:\n%s", got)
	}
}
