package storetest

import (
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// breakSnapshot damages one record, or skips where nobody can: generation 0 stands for
// a snapshot.
func (s *suite) breakSnapshot(id string) {
	s.Helper()
	s.breakOne(id, 0)
}

func snapshotIDs(items []*sandboxer.SnapshotRecord) (out []string) {
	for _, r := range items {
		out = append(out, r.ID)
	}
	return out
}

// putSealed stores a sealed snapshot that every filter selects.
func (s *suite) putSealed(id string) *sandboxer.SnapshotRecord {
	s.Helper()
	return s.put(snapshot(id, func(r *sandboxer.SnapshotRecord) {
		r.Name, r.Parent, r.Purpose = "n-"+id, "p", sandboxer.ForFork
		r.State, r.ExpiresAt = sandboxer.SnapshotSealed, start
	}))
}

func damagedSnapshotListed(s *suite) {
	var sandboxID string
	for _, id := range []string{"a", "b", "c"} {
		sandboxID = s.putSealed(id).SandboxID
	}
	s.breakSnapshot("b")
	for _, q := range []sandboxer.SnapshotQuery{
		{}, {Tenant: "acme"}, {SandboxID: sandboxID}, {Parent: "p"}, {States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}},
		{Purposes: []sandboxer.SnapshotPurpose{sandboxer.ForFork}}, {DueBefore: start},
	} {
		items, next, err := s.Snapshots(s.ctx, q)
		s.ok(err)
		if got := snapshotIDs(items); next != "" || !slices.Equal(got, []string{"c", "b", "a"}) {
			s.Errorf("Snapshots(%+v) = %v, %q; want all three", q, got, next)
		}
		for _, r := range items {
			if (r.ID == "b") != (r.Damaged != "") {
				s.Errorf("snapshot %s: damaged is %q", r.ID, r.Damaged)
			}
		}
	}
	got, err := s.Snapshot(s.ctx, "b")
	s.fails(err, sandboxer.Failed)
	if got == nil || got.Damaged == "" {
		s.Fatalf("what is left is %+v", got)
	}
	s.same("remains", got, &sandboxer.SnapshotRecord{
		ID: "b", Version: 1, Tenant: "acme", Name: "n-b", SandboxID: sandboxID, Parent: "p", Purpose: sandboxer.ForFork,
		State: sandboxer.SnapshotSealed, Damaged: got.Damaged,
	})
	// Its ID and name stay taken.
	s.putFails(snapshot("b"), sandboxer.Conflict)
	s.putFails(snapshot("d", func(r *sandboxer.SnapshotRecord) { r.Name = "n-b" }), sandboxer.Conflict)
}

func damagedSnapshotMended(s *suite) {
	s.putSealed("b")
	s.breakSnapshot("b")
	r, err := s.Snapshot(s.ctx, "b")
	s.fails(err, sandboxer.Failed)
	r.State = sandboxer.SnapshotDropping
	s.put(r)
	got, err := s.Snapshot(s.ctx, "b")
	s.ok(err)
	if got.Damaged != "" || got.State != sandboxer.SnapshotDropping || got.Version != 2 {
		s.Errorf("mended: %+v", got)
	}
}

func historySnapshots(s *suite) {
	edge := start.Add(time.Hour)
	drop := func(id string, at time.Time) {
		r := s.put(snapshot(id))
		r.State = sandboxer.SnapshotDropping
		s.put(r)
		r.State, r.DroppedAt = sandboxer.SnapshotDropped, at
		s.put(r)
	}
	for _, id := range []string{"one", "two", "three"} {
		drop(id, edge.Add(-time.Microsecond))
	}
	drop("young", edge)
	s.put(snapshot("sealed", func(r *sandboxer.SnapshotRecord) { // whatever it says: it was not dropped
		r.State, r.DroppedAt = sandboxer.SnapshotSealed, edge.Add(-time.Hour)
	}))
	for _, want := range []int{2, 1, 0} {
		if n, err := s.ForgetHistory(s.ctx, edge, 2); err != nil || n != want {
			s.Errorf("%d went, %v; want %d", n, err, want)
		}
	}
	items, _, err := s.Snapshots(s.ctx, sandboxer.SnapshotQuery{})
	s.ok(err)
	if got := snapshotIDs(items); !slices.Equal(got, []string{"sealed", "young"}) {
		s.Errorf("left: %v", got)
	}
	_, err = s.Snapshot(s.ctx, "one")
	s.fails(err, sandboxer.NotFound)
}
