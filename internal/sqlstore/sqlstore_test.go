package sqlstore

import (
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func openTest(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := OpenSQLite(t.Context(), dir, Options{Reserve: 1 << 20})
	if err != nil {
		t.Fatalf("OpenSQLite(%s) = %v (hint: %s)", dir, err, sandboxer.HintOf(err))
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestSmoke(t *testing.T) {
	dir := t.TempDir()
	s := openTest(t, dir)
	ctx := t.Context()
	sb := &sandboxer.Sandbox{ID: "a", Generation: 1, Tenant: "t", Name: "n", State: sandboxer.Creating, CreatedAt: time.Now()}
	w := sandboxer.Writes{Events: []sandboxer.Event{{Tenant: "t", SandboxID: "a", Type: sandboxer.EventState}},
		Entries: []sandboxer.Entry{{Key: "g", Tenant: "t", Type: sandboxer.EntryGrant, Amount: 5}, {Key: "h", Tenant: "t", SandboxID: "a", Generation: 1, Type: sandboxer.EntryHold, Amount: -3}}, Cover: true}
	if err := s.CreateSandbox(ctx, sb, w); err != nil {
		t.Fatal(err)
	}
	sb.State = sandboxer.Running
	if err := s.UpdateSandbox(ctx, sb, sandboxer.Writes{}); err != nil {
		t.Fatal(err)
	}
	got, err := s.Sandbox(ctx, "a")
	if err != nil || got.State != sandboxer.Running || got.Version != 2 {
		t.Fatal(got, err)
	}
	l, next, err := s.Sandboxes(ctx, sandboxer.Query{Tenant: "t", States: []sandboxer.State{sandboxer.Running}})
	t.Log(l, next, err)
	b, err := s.Balance(ctx, "t")
	t.Log(b, err)
	h, err := s.OpenHolds(ctx)
	t.Log(h, err)
	_, err = OpenSQLite(ctx, dir, Options{})
	t.Log(err, sandboxer.HintOf(err))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openTest(t, dir)
	if _, err := s.Sandbox(ctx, "a"); err != nil {
		t.Fatal(err)
	}
}

func BenchmarkOpen(b *testing.B) {
	for b.Loop() {
		s, err := OpenSQLite(b.Context(), b.TempDir(), Options{Reserve: 1 << 20})
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
}
