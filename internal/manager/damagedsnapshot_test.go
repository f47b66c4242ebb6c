package manager

import (
	"context"
	"database/sql"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// garbleSnapshot makes the record of a snapshot unreadable, past the store.
func (r *rig) garbleSnapshot(id string) {
	r.t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(r.setup.dir, "sandboxer.db")+"?_busy_timeout=5000")
	if err != nil {
		r.t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(`UPDATE snapshots SET data = '{"id":' WHERE id = ?`, id); err != nil {
		r.t.Fatal(err)
	}
}

// TestDamagedSnapshot damages one of several records: the others can be used, its
// data is not taken for an orphan, and both can be removed.
func TestDamagedSnapshot(t *testing.T) {
	for _, kind := range sandboxer.SnapshotKinds() {
		t.Run(string(kind), func(t *testing.T) {
			r := newSnapshotRig(t, func(s *setup) { s.opts.Grace = time.Nanosecond })
			sb := r.create(sandboxer.CreateRequest{})
			good := r.snapshot(sb.ID, SnapshotRequest{Name: "good", Kind: kind})
			bad := r.snapshot(sb.ID, SnapshotRequest{Name: "bad", Kind: kind})
			r.garbleSnapshot(bad.ID)

			for _, ref := range []string{bad.ID, "bad", strings.TrimPrefix(bad.ID, "snap-")[:6]} {
				_, err := r.GetSnapshot(acme, ref)
				wantErr(t, err, sandboxer.Failed, "damaged")
				if !strings.Contains(sandboxer.HintOf(err), "sandboxer snapshot rm "+bad.ID) {
					t.Errorf("hint %q names no way out", sandboxer.HintOf(err))
				}
				_, err = r.GetSnapshot(rival, ref)
				wantErr(t, err, sandboxer.NotFound, "")
				_, err = r.DropSnapshot(rival, ref)
				wantErr(t, err, sandboxer.NotFound, "")
				_, err = r.Restore(acme, ref, RestoreRequest{})
				wantErr(t, err, sandboxer.Failed, "damaged")
			}
			items, _, err := r.Snapshots(acme, sandboxer.SnapshotQuery{})
			if err != nil || len(items) != 2 || items[0].Damaged == "" || items[1].Damaged != "" {
				t.Fatalf("list = %d, %v; want two, the newer damaged", len(items), err)
			}
			copied := r.restored("good", RestoreRequest{})
			for range 2 {
				if rep, err := r.Sweep(admin); err != nil || rep.Orphans != 0 || rep.Failed != 0 {
					t.Fatalf("sweep = %+v, %v", rep, err)
				}
			}
			a, err := r.Audit(admin)
			if err != nil || len(a.Violations) != 1 || a.Violations[0].Invariant != invWhole || !strings.Contains(a.Violations[0].Detail, bad.ID) {
				t.Fatalf("audit = %+v, %v; want the damaged record named", a.Violations, err)
			}
			// What the drop asks for fails at first: the sweep, of another process, goes on.
			if kind.Has(sandboxer.SnapshotNative) {
				r.world.Inject(fake.Fault{Verb: fake.VerbDropSnapshot, Kind: sandboxer.Unavailable, Times: 1})
				_, err = r.DropSnapshot(acme, "bad")
				wantErr(t, err, sandboxer.Unavailable, "")
				r.restart()
			} else if rec, err := r.DropSnapshot(acme, "bad"); err != nil || rec.State != sandboxer.SnapshotDropped {
				t.Fatalf("drop = %+v, %v", rec, err)
			}
			eventually(t, "the snapshot to be dropped", func() bool {
				r.Sweep(admin)
				rec, err := r.GetSnapshot(acme, bad.ID)
				return err == nil && rec.State == sandboxer.SnapshotDropped && strings.Contains(rec.Message, "damaged")
			})
			for _, id := range r.world.Snapshots() {
				if id == bad.ID {
					t.Errorf("the backend still has %s", id)
				}
			}
			r.destroy(sb.ID)
			r.destroy(copied.ID)
			if _, err := r.DropSnapshot(acme, good.ID); err != nil {
				t.Fatal(err)
			}
			r.clean()
		})
	}
}

// TestDamagedSnapshotOfAPause: what a paused sandbox resumes from is not dropped for
// its damaged record.
func TestDamagedSnapshotOfAPause(t *testing.T) {
	r := newSnapshotRig(t)
	sb := r.create(sandboxer.CreateRequest{})
	paused, err := r.Pause(acme, sb.ID, PauseRequest{Depth: sandboxer.PauseFiles})
	if err != nil {
		t.Fatal(err)
	}
	id := paused.Pause.Snapshot
	r.garbleSnapshot(id)
	_, err = r.DropSnapshot(acme, id)
	wantErr(t, err, sandboxer.Conflict, "resumes from")
	r.destroy(sb.ID)
	if _, err := r.DropSnapshot(acme, id); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

// TestSnapshotHistory: what was dropped long ago is forgotten with its events, what is
// kept is not.
func TestSnapshotHistory(t *testing.T) {
	r := newSnapshotRig(t, func(s *setup) { s.opts.History = 48 * time.Hour })
	sb := r.create(sandboxer.CreateRequest{})
	old, kept := r.snapshot(sb.ID, SnapshotRequest{Name: "old"}), r.snapshot(sb.ID, SnapshotRequest{Name: "kept"})
	rec, err := r.DropSnapshot(acme, old.ID)
	if err != nil {
		t.Fatal(err)
	}
	rec.DroppedAt = now().Add(-49 * time.Hour)
	if err := r.store.Write(context.Background(), sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{rec}}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Sweep(admin); err != nil {
		t.Fatal(err)
	}
	_, err = r.GetSnapshot(acme, old.ID)
	wantErr(t, err, sandboxer.NotFound, "")
	if _, err := r.GetSnapshot(acme, kept.ID); err != nil {
		t.Fatal(err)
	}
	r.sound(1)
	r.destroy(sb.ID)
	r.clean()
}
