package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// said is what a command prints of what a server answers, by path.
func said(t *testing.T, answers map[string]any, line string) string {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v, ok := answers[strings.TrimPrefix(r.URL.Path, "/v1/")]
		if !ok {
			t.Errorf("%s asks for %s", line, r.URL.Path)
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}))
	defer srv.Close()
	stdout, stderr := runWith(t, srv.URL, strings.Fields(line))
	if len(stderr) > 0 {
		t.Errorf("%s: %s", line, stderr)
	}
	return string(stdout)
}

func wantSaid(t *testing.T, answers map[string]any, line string, want ...string) {
	t.Helper()
	got := said(t, answers, line)
	for _, w := range want {
		if !strings.Contains(strings.Join(strings.Fields(got), " "), w) {
			t.Errorf("%s does not say %q:\n%s", line, w, got)
		}
	}
}

// An extension that cannot be opened is in the status, with its cause and the next attempt in
// what is shown of it.
func TestUnusableExtensionIsShown(t *testing.T) {
	at := time.Now().Add(time.Minute)
	ext := api.Extension{ID: "ext.shut", Adapter: "fake", Problem: "the disk is full", RetryAt: at}
	answers := map[string]any{
		"status":     api.Status{SchemaVersion: api.SchemaVersion, Owner: "test", Extensions: 2, Unavailable: []string{"ext.shut"}},
		"extensions": api.List[api.Extension]{Items: []api.Extension{ext}},
	}
	problem := "the disk is full; tried again at " + at.Local().Format(time.TimeOnly)
	wantSaid(t, answers, "status", "unavailable: ext.shut")
	wantSaid(t, answers, "extension ls", problem)
	wantSaid(t, answers, "extension show ext.shut", "problem: "+problem)
}

// The status says when the database went back and what to do. A sandbox of a pool that may be a tenant's
// since is in every list.
func TestWentBackIsShown(t *testing.T) {
	sb := api.Sandbox{ID: "abcdefgh", State: sandboxer.Warm, Unconfirmed: sandboxer.Claimed}
	answers := map[string]any{
		"status":             api.Status{SchemaVersion: api.SchemaVersion, Owner: "test", WentBack: time.Now().Add(-48 * time.Hour)},
		"sandboxes":          api.List[api.Sandbox]{Items: []api.Sandbox{sb}},
		"sandboxes/abcdefgh": sb,
		"quarantine":         api.List[api.Quarantined]{},
	}
	wantSaid(t, answers, "ls", "warm (unconfirmed)")
	wantSaid(t, answers, "get abcdefgh", "may belong to a tenant since then; kept until it is destroyed")
	wantSaid(t, answers, "status", "went back: ", "so no deadline counts; see: sandboxer audit; then: sandboxer accept")
}

// What an operator should know of an extension is in the status, and in what is shown of it.
func TestNoticesAreShown(t *testing.T) {
	answers := map[string]any{
		"status":     api.Status{SchemaVersion: api.SchemaVersion, Owner: "test", Notices: []string{"ext.fake: the paint is wet"}},
		"extensions": api.List[api.Extension]{Items: []api.Extension{{ID: "ext.fake", Adapter: "fake", Notices: []string{"the paint is wet", "mind the step"}}}},
	}
	wantSaid(t, answers, "status", "notice: ext.fake: the paint is wet")
	wantSaid(t, answers, "extension show ext.fake", "notices: the paint is wet", "mind the step")
}
