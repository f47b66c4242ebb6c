package sqlstore

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestRevokedStaysRevoked restores a backup from before API keys were revoked.
func TestRevokedStaysRevoked(t *testing.T) {
	dir := t.TempDir()
	s := openTest(t, dir)
	for _, id := range []string{"stays", "goes", "torn", "after"} {
		if err := s.PutAPIKey(t.Context(), sandboxer.APIKey{ID: id, Tenant: "acme", CreatedAt: time.Now()}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := BackUp(t.Context(), dir, "", 1); err != nil {
		t.Fatal(err)
	}
	revoke := func(id string) {
		t.Helper()
		k, err := s.APIKey(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		k.RevokedAt = time.Now()
		for range 2 {
			if err := s.PutAPIKey(t.Context(), k); err != nil {
				t.Fatal(err)
			}
		}
	}
	revoke("goes")
	f, err := os.OpenFile(filepath.Join(dir, revokedFile), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("torn 0"); err != nil {
		t.Fatal(err)
	}
	f.Close()
	revoke("after")
	s.Close()
	check := func() {
		t.Helper()
		s = openTest(t, dir)
		defer s.Close()
		for id, want := range map[string]bool{"stays": false, "goes": true, "torn": false, "after": true} {
			if k, err := s.APIKey(t.Context(), id); err != nil || !k.RevokedAt.IsZero() != want {
				t.Errorf("%s: %+v, %v; revoked: want %t", id, k, err, want)
			}
		}
	}
	check()
	if _, _, err := Restore(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	check()
	// Without the list, it is written again from what the database knows.
	if err := os.Remove(filepath.Join(dir, revokedFile)); err != nil {
		t.Fatal(err)
	}
	check()
	if _, _, err := Restore(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	check()
}
