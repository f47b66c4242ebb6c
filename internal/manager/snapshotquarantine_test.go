package manager

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestQuarantinedSnapshots restores a backup. What was saved since, for people or for a pause, is kept
// and reported until an administrator removes it.
func TestQuarantinedSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { sweeping(s); s.opts.SnapshotStore = dirStore{s.dir} })
		sb := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour, Env: map[string]string{"TOKEN": "of the source"}})
		rests := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		save := func(kind sandboxer.SnapshotKind) string {
			t.Helper()
			rec, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: kind, Name: "before-" + string(kind)})
			if err != nil {
				t.Fatal(err)
			}
			return rec.ID
		}
		known := save(sandboxer.SnapshotNative)
		if _, err := r.DropSnapshot(acme, known); err != nil {
			t.Fatal(err)
		}
		back := r.backUp()
		native, portable, both := save(sandboxer.SnapshotNative), save(sandboxer.SnapshotPortable), save(sandboxer.SnapshotBoth)
		if _, err := r.Pause(acme, rests.ID, PauseRequest{Depth: sandboxer.PauseFiles}); err != nil {
			t.Fatal(err)
		}
		paused := r.get(rests.ID).Pause.Snapshot
		back()
		time.Sleep(time.Hour)
		synctest.Wait()

		lost := []string{native, portable, both, paused}
		told := func(text string) (ids []string) {
			for _, id := range lost {
				if strings.Contains(text, "sandboxer snapshot rm "+id) {
					ids = append(ids, id)
				}
			}
			return ids
		}
		audit := func() string {
			t.Helper()
			a, err := r.Audit(admin)
			if err != nil {
				t.Fatal(err)
			}
			var all []string
			for _, v := range a.Violations {
				all = append(all, v.Invariant+": "+v.Detail)
			}
			return strings.Join(all, "\n")
		}
		if said := audit(); !slices.Equal(told(said), lost) {
			t.Errorf("audit says\n%s", said)
		}
		events, err := r.Events(admin, sandboxer.EventQuery{Newest: true, Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		var said []string
		for _, e := range events {
			if e.Type == sandboxer.EventQuarantine {
				said = append(said, e.Message)
			}
		}
		if all := strings.Join(said, "\n"); !slices.Equal(told(all), lost) || len(said) != len(lost) {
			t.Errorf("told was\n%s", all)
		}

		refused := func(err error, kind sandboxer.Kind) {
			t.Helper()
			if sandboxer.KindOf(err) != kind {
				t.Errorf("%v; want %s", err, kind)
			}
		}
		// They have no owner yet, and an administrator decides about them.
		for _, id := range lost {
			_, err := r.DropSnapshot(acme, id)
			refused(err, sandboxer.NotFound)
			_, err = r.Restore(acme, id, RestoreRequest{})
			refused(err, sandboxer.NotFound)
		}
		for _, id := range lost {
			if _, err := r.DropSnapshot(admin, id); err != nil {
				t.Errorf("dropping %s: %v", id, err)
			}
		}
		if said := audit(); len(told(said)) > 0 {
			t.Errorf("audit still says\n%s", said)
		}
	})
}

// TestQuarantinedSnapshotsAreDropped has an administrator drop what the database does not know.
func TestQuarantinedSnapshotsAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(s *setup) { sweeping(s); s.opts.SnapshotStore = dirStore{s.dir} })
		sb := r.create(sandboxer.CreateRequest{TTL: 2 * time.Hour})
		back := r.backUp()
		var ids []string
		for _, kind := range sandboxer.SnapshotKinds() {
			rec, err := r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: kind})
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, rec.ID)
		}
		back()
		time.Sleep(time.Hour)
		for _, id := range ids {
			for range 2 { // the second time it is known, and dropped
				if rec, err := r.DropSnapshot(admin, id); err != nil || rec.State != sandboxer.SnapshotDropped {
					t.Errorf("dropping %s: %+v, %v", id, rec, err)
				}
			}
		}
		left, err := r.opts.SnapshotStore.List(t.Context())
		if err != nil || len(left) > 0 || len(r.world.Snapshots()) > 0 {
			t.Errorf("left are %v and %v, %v", left, r.world.Snapshots(), err)
		}
		synctest.Wait()
		r.accept()
		a, err := r.Audit(admin)
		if err != nil || len(a.Violations) > 0 {
			t.Errorf("audit: %+v, %v", a.Violations, err)
		}
	})
}
