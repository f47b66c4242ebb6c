package docker

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestSparseSnapshot: files that would fill the engine's disk, written out, are not saved.
func TestSparseSnapshot(t *testing.T) {
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			o := start(t).options(t, "sparse")
			o.config["images"] = map[string]any{"max_download": 1 << 20}
			e := o.opened(t)
			h := up(t, e, order("sparse", o))
			run(t, e, h, "truncate -s 2M /large")
			_, err := e.Snapshot(t.Context(), h, "sparse")
			wantKind(t, err, sandboxer.Exhausted, "2 MiB", "images.max_download", "1 MiB", "--portable sparse")
			run(t, e, h, "rm /large")
			snap, err := e.Snapshot(t.Context(), h, "sparse")
			if err != nil {
				t.Fatal(err)
			}
			if err := e.DropSnapshot(t.Context(), snap); err != nil {
				t.Error(err)
			}
			nothing, err := e.saved(t.Context(), e.hosts["one"], "sparse")
			wantKind(t, err, sandboxer.NotFound)
			if nothing.ID != "" {
				t.Error("it was saved")
			}
		})
	}
}
