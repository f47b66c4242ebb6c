package cli

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// TestSnapshotStoreTellsNoSharing: two tenants save the same file. The store has it once, and neither
// learns that from what it is shown.
func TestSnapshotStoreTellsNoSharing(t *testing.T) {
	v, err := openSnapshotStore(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	content := make([]byte, 1<<20)
	random := rand.NewChaCha8([32]byte{})
	_, _ = random.Read(content)
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write(content)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	var shown []string
	var stored []int64
	for _, tenant := range []string{"acme", "rival"} {
		rec := &sandboxer.SnapshotRecord{ID: "snap-" + strings.Repeat(tenant[:1], 12), Tenant: tenant, Kind: sandboxer.SnapshotPortable}
		if rec.Portable, err = v.Save(context.Background(), rec, bytes.NewReader(archive.Bytes())); err != nil {
			t.Fatal(err)
		}
		stored = append(stored, rec.StoredBytes())
		rec.ID, rec.Tenant = "", ""
		b, err := json.Marshal(api.NewSnapshot(rec))
		if err != nil {
			t.Fatal(err)
		}
		shown = append(shown, string(b))
	}
	if shown[0] != shown[1] {
		t.Errorf("the first is shown %s\nthe second %s", shown[0], shown[1])
	}
	if stored[1] > stored[0]/10 {
		t.Errorf("stored %d bytes: nothing is shared, and the test shows nothing", stored)
	}
}
