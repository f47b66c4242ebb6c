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

// garble makes the records of an ID unreadable, past the store.
func (r *rig) garble(table, id string) {
	r.t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(r.setup.dir, "sandboxer.db")+"?_busy_timeout=5000")
	if err != nil {
		r.t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(`UPDATE `+table+` SET data = '{"id":' WHERE id = ?`, id); err != nil {
		r.t.Fatal(err)
	}
}

// damagedTo checks that get tells whose a record is that it is damaged and how to be rid of
// it, and that there is none to others, under each of refs.
func (r *rig) damagedTo(who, other context.Context, refs []string, way string, get func(ctx context.Context, ref string) error) {
	r.t.Helper()
	for _, ref := range refs {
		err := get(who, ref)
		wantErr(r.t, err, sandboxer.Failed, "damaged")
		if !strings.Contains(sandboxer.HintOf(err), way) {
			r.t.Errorf("hint %q names no way out", sandboxer.HintOf(err))
		}
		wantErr(r.t, get(other, ref), sandboxer.NotFound, "")
	}
}

// auditNames checks that the audit finds nothing but a damaged record.
func (r *rig) auditNames(is func(Violation) bool) {
	r.t.Helper()
	a, err := r.Audit(admin)
	if err != nil || len(a.Violations) != 1 || a.Violations[0].Invariant != invWhole || !is(a.Violations[0]) {
		r.t.Fatalf("audit = %+v, %v; want the damaged record named", a.Violations, err)
	}
}

// TestDamagedRecord damages one of several records: the rest of the world goes on, its
// object is not taken for nobody's, and there is a way to be rid of it.
func TestDamagedRecord(t *testing.T) {
	r := newRig(t, func(s *setup) { s.opts.Grace = time.Nanosecond })
	if err := r.Grant(admin, "acme", sandboxer.Credit, "", ""); err != nil {
		t.Fatal(err)
	}
	first := r.create(sandboxer.CreateRequest{Profile: "paid"})
	bad := r.create(sandboxer.CreateRequest{Profile: "paid", Name: "poor"})
	short := r.create(sandboxer.CreateRequest{TTL: time.Minute})
	r.garble("sandboxes", bad.ID)

	r.damagedTo(acme, rival, []string{bad.ID, "poor", bad.ID[:5]}, "sandboxer destroy "+bad.ID, func(ctx context.Context, ref string) error {
		_, err := r.Get(ctx, ref)
		return err
	})
	items, _, err := r.List(acme, sandboxer.Query{States: live})
	if err != nil || len(items) != 3 || items[1].Damaged == "" {
		t.Fatalf("list = %d, %v; want three, the second damaged", len(items), err)
	}

	// The sweep leaves it and its object alone, and goes on with the others.
	if _, err := r.Extend(acme, short.ID, Extend{TTL: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	r.await(short.ID, sandboxer.Terminated)
	for range 3 {
		rep, err := r.Sweep(admin)
		if err != nil || rep.Damaged != 1 || rep.Orphans != 0 || rep.Seen != 2 {
			t.Fatalf("sweep = %+v, %v; want one damaged of two seen and nothing removed", rep, err)
		}
	}
	if n := len(r.world.Live()); n != 2 {
		t.Fatalf("%d objects live; want 2", n)
	}
	r.auditNames(func(v Violation) bool { return v.SandboxID == bad.ID })

	// It survives a restart as it is, and can be destroyed: nothing is charged.
	r.restart()
	_, err = r.Destroy(rival, bad.ID)
	wantErr(t, err, sandboxer.NotFound, "")
	sb, err := r.Destroy(acme, bad.ID)
	if err != nil || sb.State != sandboxer.Terminated || sb.Cost != 0 || !strings.Contains(sb.Message, "damaged") || sb.CreatedAt.IsZero() {
		t.Fatalf("destroy = %+v, %v", sb, err)
	}
	r.get(bad.ID)
	r.destroy(first.ID)
	r.sound(0)
	r.noHolds()
}

// TestDamagedCutShort dies while a sandbox with a damaged record is being destroyed.
func TestDamagedCutShort(t *testing.T) {
	r := newRig(t, nil)
	bad := r.create(sandboxer.CreateRequest{})
	r.garble("sandboxes", bad.ID)
	r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, Kind: sandboxer.Unavailable, Times: 1})
	if _, err := r.Destroy(acme, bad.ID); !isKind(err, sandboxer.Unavailable) {
		t.Fatalf("destroy = %v; want it to be tried again", err)
	}
	r.restart() // what was written is whole now: the sweep does the rest
	if sb := r.await(bad.ID, sandboxer.Terminated); sb.Damaged != "" {
		t.Errorf("damaged: %q", sb.Damaged)
	}
	r.sound(0)
}

// TestDamagedSnapshot damages one of several records: the others can be used, what it
// saved is not taken for nobody's, and there is a way to be rid of it.
func TestDamagedSnapshot(t *testing.T) {
	for _, kind := range sandboxer.SnapshotKinds() {
		t.Run(string(kind), func(t *testing.T) {
			r := newSnapshotRig(t, func(s *setup) { s.opts.Grace = time.Nanosecond })
			sb := r.create(sandboxer.CreateRequest{})
			good := r.snapshot(sb.ID, SnapshotRequest{Name: "good", Kind: kind})
			bad := r.snapshot(sb.ID, SnapshotRequest{Name: "bad", Kind: kind})
			r.garble("snapshots", bad.ID)

			refs := []string{bad.ID, "bad", strings.TrimPrefix(bad.ID, "snap-")[:6]}
			r.damagedTo(acme, rival, refs, "sandboxer snapshot rm "+bad.ID, func(ctx context.Context, ref string) error {
				_, err := r.GetSnapshot(ctx, ref)
				return err
			})
			for _, ref := range refs {
				_, err := r.DropSnapshot(rival, ref)
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
			r.auditNames(func(v Violation) bool { return strings.Contains(v.Detail, bad.ID) })
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
	r.garble("snapshots", id)
	_, err = r.DropSnapshot(acme, id)
	wantErr(t, err, sandboxer.Conflict, "resumes from")
	r.destroy(sb.ID)
	if _, err := r.DropSnapshot(acme, id); err != nil {
		t.Fatal(err)
	}
	r.clean()
}
