//go:build linux

package local

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/compattest"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// All fields that earlier builds recorded of sandboxes and snapshots are read.
func TestFormerState(t *testing.T) {
	var records, snapshots int
	for _, f := range compattest.Fixtures(t) {
		t.Run(f.Name, func(t *testing.T) {
			dir := t.TempDir()
			f.Install(t, dir)
			e := &extension{env: sandboxer.Env{Dir: filepath.Join(dir, compattest.DataDir, "extensions", "ext.local")}}
			strict := func(name string, v any) {
				t.Helper()
				data, err := os.ReadFile(name)
				var unknown []string
				if err == nil {
					unknown, err = strictjson.DecodeStored(data, v)
				}
				unknown = slices.DeleteFunc(unknown, func(field string) bool { return field == "stamp" }) // of earlier versions
				if err != nil || len(unknown) > 0 {
					t.Errorf("%s: %v, unknown fields %q", name, err, unknown)
				}
			}
			for _, name := range compattest.Glob(t, true, e.dir("box", "*", recordFile)) {
				records++
				box := filepath.Base(filepath.Dir(name))
				rec, err := e.record(box)
				if err != nil || boxName(rec.SandboxID, rec.Generation) != box || rec.Skeleton == "" || rec.Workspace == "" || !rec.Ready ||
					rec.Limits.DiskBytes != 8<<30 || rec.Network.Mode != sandboxer.NetworkNone || rec.Fuse.IsZero() != (f.Schema < 4) {
					t.Errorf("the record of %s is read as %+v: %v", box, rec, err)
				}
				strict(name, new(record))
			}
			skeletons, _, err := e.savedRoots()
			if err != nil {
				t.Fatal(err)
			}
			found := compattest.Glob(t, len(f.Snapshots) > 0, e.dir("snapshot", "*", savedFile))
			if len(skeletons) != len(found) || slices.Contains(skeletons, "") {
				t.Errorf("snapshots need %q; there are %q", skeletons, found)
			}
			for _, name := range found {
				snapshots++
				var s saved
				if err := readJSON(name, &s); err != nil || s.Record.SandboxID == "" || len(s.Args) == 0 || len(s.Shown) == 0 {
					t.Errorf("%s is read as %+v: %v", name, s, err)
				}
				strict(name, new(saved))
				r, err := readReceipt(filepath.Dir(name))
				if err != nil || r.Snapshot.SnapshotID != filepath.Base(filepath.Dir(name)) || !r.Snapshot.Memory || len(r.Files) != 3 || r.Snapshot.Meta["gvisor"] != f.GVisor {
					t.Errorf("the receipt beside %s is read as %+v: %v", name, r, err)
				}
				strict(filepath.Join(filepath.Dir(name), receiptFile), new(receipt))

				// It is restored with the spec that it ran with.
				spec := &specs.Spec{Process: &specs.Process{Env: []string{"A=b"}}, Root: &specs.Root{}}
				for _, m := range s.Mounts {
					if m.Type == "bind" {
						spec.Mounts = append(spec.Mounts, specs.Mount{Type: "bind", Destination: m.Destination, Source: "/now" + m.Destination})
					}
				}
				if err := s.dress(spec, &skeleton{root: "/now", shown: s.Shown}); err != nil {
					t.Errorf("%s: %v", name, err)
					continue
				}
				if !slices.Equal(spec.Process.Args, s.Args) || !slices.Equal(spec.Process.Env, []string{"A=b"}) || spec.Process.Capabilities == nil || len(spec.Mounts) != len(s.Mounts) {
					t.Errorf("%s is restored with %+v", name, spec.Process)
				}
			}
		})
	}
	if records < 9 || snapshots < 12 {
		t.Errorf("the fixtures have %d records and %d snapshots", records, snapshots)
	}
}

func TestFormOfLocal(t *testing.T) {
	compattest.CheckForm(t, "local-record", compattest.Shape("", record{}))
	compattest.CheckForm(t, "local-snapshot", compattest.Shape("", saved{}, receipt{}))
}
