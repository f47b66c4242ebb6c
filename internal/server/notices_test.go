package server

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// withNotices is an extension with something to say to its operator.
type withNotices struct{ *fake.Extension }

func (withNotices) Notices(context.Context) []string { return []string{"the paint is wet"} }

// newNoticesRig is a rig with an extension that cannot be opened, and one that can and has a
// notice.
func newNoticesRig(t *testing.T, wentBack time.Time) *rig {
	t.Helper()
	return newRig(t, func(s *setup) {
		s.wentBack = wentBack
		s.extend = func(x *fake.Extension) sandboxer.Extension { return withNotices{x} }
		s.more = []manager.Extension{{Info: sandboxer.ExtensionInfo{ID: "ext.shut", Adapter: "fake", Problem: "the disk is full", RetryAt: time.Now().Add(time.Hour)}}}
	})
}

// Who asks without a key learns that an extension cannot be used and not which, others learn
// which, and why.
func TestUnusableExtensionIsTold(t *testing.T) {
	r := newNoticesRig(t, time.Time{})
	k, reader := r.key("acme", sandboxer.ScopeRead)
	if a := r.send("GET", "/healthz", "", "", ""); a.status != 200 || a.body != "ok\ndegraded: 1 of 2 extensions cannot be used\n" {
		t.Errorf("health: %d %q", a.status, a.body)
	}
	ak, _ := r.key("root", sandboxer.ScopeAdmin)
	a := r.send("GET", "/metrics", ak.Token, "", "")
	for _, want := range []string{"sandboxer_extension_up{extension=\"ext.fake\"} 1\n", "sandboxer_extension_up{extension=\"ext.shut\"} 0\n", "sandboxer_extension_failing{extension=\"ext.fake\"} 0\n"} {
		if !strings.Contains(a.body, want) {
			t.Errorf("the metrics (%d) lack %q", a.status, want)
		}
	}
	for who, c := range map[string]*api.Client{"an administrator": r.admin, "a reader": reader} {
		st, err := c.Status(t.Context())
		if err != nil || st.Extensions != 2 || !slices.Equal(st.Unavailable, []string{"ext.shut"}) {
			t.Errorf("status for %s: %+v, %v", who, st, err)
		}
	}
	if a := r.send("GET", "/v1/extensions", k.Token, "", ""); !strings.Contains(a.body, "the disk is full") || !strings.Contains(a.body, `"retry_at"`) {
		t.Errorf("extensions: %d %s", a.status, a.body)
	}
}

// The health and the status say that the database went back, until an administrator accepts it.
func TestHealthAfterTheDatabaseWentBack(t *testing.T) {
	at := time.Now().Add(-25 * time.Hour).Truncate(time.Second)
	r := newNoticesRig(t, at)
	if a := r.send("GET", "/healthz", "", "", ""); a.status != 200 || !strings.HasSuffix(a.body, "\nthe database went back: noticed at "+at.UTC().Format(time.RFC3339)+", not accepted yet\n") {
		t.Errorf("health: %d %q", a.status, a.body)
	}
	if st, err := r.admin.Status(t.Context()); err != nil || !st.WentBack.Equal(at) {
		t.Errorf("status: %+v, %v", st, err)
	}
	if st, err := r.admin.AcceptDatabase(t.Context()); err != nil || !st.WentBack.IsZero() {
		t.Errorf("accepted: %+v, %v", st, err)
	}
	if a := r.send("GET", "/healthz", "", "", ""); strings.Contains(a.body, "went back") {
		t.Errorf("health, accepted: %q", a.body)
	}
}

func TestNoticesAreInTheStatus(t *testing.T) {
	r := newNoticesRig(t, time.Time{})
	if st, err := r.admin.Status(t.Context()); err != nil || !slices.Equal(st.Notices, []string{"ext.fake: the paint is wet"}) {
		t.Errorf("%+v, %v", st, err)
	}
	_, reader := r.key("acme", sandboxer.ScopeRead)
	if st, err := reader.Status(t.Context()); err != nil || st.Notices != nil {
		t.Errorf("a tenant is told %+v, %v", st, err)
	}
}
