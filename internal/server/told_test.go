package server

import (
	"bytes"
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

// telling is an extension with something to say to its operator.
type telling struct{ *fake.Extension }

func (telling) Notices(context.Context) []string { return []string{"the paint is wet"} }

// newTellingRig is a rig with an extension that cannot be opened, beside one that can and has a
// notice.
func newTellingRig(t *testing.T, opts Options) *rig {
	t.Helper()
	r := &rig{T: t, world: fake.NewWorld()}
	store, err := sqlstore.OpenSQLite(context.Background(), t.TempDir(), sqlstore.Options{Reserve: -1})
	if err != nil {
		t.Fatal(err)
	}
	b := backend.New("ext.fake", telling{fake.New(r.world, fake.Config{Owner: "test"})}, backend.Options{})
	r.m, err = manager.New(store, nil, []manager.Extension{
		{Info: sandboxer.ExtensionInfo{ID: "ext.fake", Adapter: "fake", Isolation: fake.Adapter.Isolation, Capabilities: b.Capabilities()}, Backend: b},
		{Info: sandboxer.ExtensionInfo{ID: "ext.shut", Adapter: "fake", Problem: "the disk is full", RetryAt: time.Now().Add(time.Hour)}},
	}, manager.Options{Owner: "test", Key: bytes.Repeat([]byte{7}, 32), SweepEvery: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	r.sock = filepath.Join(t.TempDir(), "s", "api.sock")
	lu, err := ListenUnix(r.sock)
	if err != nil {
		t.Fatal(err)
	}
	lt, err := ListenTCP("127.0.0.1:0", false)
	if err != nil {
		t.Fatal(err)
	}
	r.tcp = "http://" + lt.Addr().String()
	opts.Log, opts.Metrics, opts.Owner = slog.New(slog.DiscardHandler), NewMetrics(), "test"
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	s := New(r.m, opts)
	go func() { done <- s.Serve(ctx, lu, lt) }()
	r.admin = r.client("unix://"+r.sock, "")
	t.Cleanup(func() {
		cancel()
		if err := receive(t, done, "the end of the server"); err != nil {
			t.Errorf("Serve: %v", err)
		}
		if err := r.m.Close(); err != nil {
			t.Errorf("manager: %v", err)
		}
		if err := store.Close(); err != nil {
			t.Errorf("store: %v", err)
		}
		r.world.Close()
	})
	return r
}

// Who asks without a key learns that an extension cannot be used and not which, others learn
// which, and why.
func TestUnusableExtensionIsTold(t *testing.T) {
	r := newTellingRig(t, Options{})
	k, reader := r.key("acme", sandboxer.ScopeRead)
	if a := r.send("GET", "/healthz", "", "", ""); a.status != 200 || a.body != "ok\ndegraded: 1 of 2 extensions cannot be used\n" {
		t.Errorf("health: %d %q", a.status, a.body)
	}
	ak, _ := r.key("root", sandboxer.ScopeAdmin)
	a := r.send("GET", "/metrics", ak.Token, "", "")
	for _, want := range []string{"sandboxer_extension_up{extension=\"ext.fake\"} 1\n", "sandboxer_extension_up{extension=\"ext.shut\"} 0\n"} {
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

// For a day whoever asks is told that the database went back.
func TestHealthAfterTheDatabaseWentBack(t *testing.T) {
	at := time.Now().Add(-23 * time.Hour)
	r := newTellingRig(t, Options{WentBack: at})
	if a := r.send("GET", "/healthz", "", "", ""); a.status != 200 || !strings.HasSuffix(a.body, "\nthe database went back: noticed at "+at.UTC().Format(time.RFC3339)+"\n") {
		t.Errorf("health: %d %q", a.status, a.body)
	}
	if st, err := r.admin.Status(t.Context()); err != nil || !st.WentBack.Equal(at) {
		t.Errorf("status: %+v, %v", st, err)
	}
	r = newTellingRig(t, Options{WentBack: time.Now().Add(-25 * time.Hour)})
	if a := r.send("GET", "/healthz", "", "", ""); strings.Contains(a.body, "went back") {
		t.Errorf("health after a day: %q", a.body)
	}
}

func TestNoticesAreInTheStatus(t *testing.T) {
	r := newTellingRig(t, Options{})
	if st, err := r.admin.Status(t.Context()); err != nil || !slices.Equal(st.Notices, []string{"ext.fake: the paint is wet"}) {
		t.Errorf("%+v, %v", st, err)
	}
	_, reader := r.key("acme", sandboxer.ScopeRead)
	if st, err := reader.Status(t.Context()); err != nil || st.Notices != nil {
		t.Errorf("a tenant is told %+v, %v", st, err)
	}
}
