package storetest

import (
	"fmt"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// ended stores a sandbox that ended at the given time, with an event.
func (s *suite) ended(id string, generation int, at time.Time) {
	s.Helper()
	w := func(msg string) sandboxer.Writes {
		return sandboxer.Writes{Events: []sandboxer.Event{{Tenant: "acme", SandboxID: id, Generation: generation, Type: sandboxer.EventStep, Message: msg, At: at}}}
	}
	sb := sandbox(id, generation)
	s.ok(s.CreateSandbox(s.ctx, sb, w(fmt.Sprint(id, "/", generation, " made"))))
	sb.State, sb.EndedAt = sandboxer.Terminated, at
	s.ok(s.UpdateSandbox(s.ctx, sb, w(fmt.Sprint(id, "/", generation, " ended"))))
}

func historyForgotten(s *suite) {
	edge := start.Add(time.Hour)
	old := edge.Add(-time.Microsecond)
	s.ended("old", 1, old)
	s.ended("two", 1, old)
	s.ended("two", 2, edge)
	s.ended("held", 1, old)
	s.create("lives", 1, func(sb *sandboxer.Sandbox) { sb.EndedAt = old }) // whatever it says: it has not ended
	s.book(grant("g", "acme", 100), entry("h", sandboxer.EntryHold, "held", 1, -10), entry("x", sandboxer.EntryHold, "old", 1, -10),
		entry("y", sandboxer.EntryVoid, "old", 1, 10))
	for i, at := range []time.Time{old, edge} {
		s.ok(s.Write(s.ctx, sandboxer.Writes{Events: []sandboxer.Event{
			{Tenant: "acme", Type: sandboxer.EventKey, Message: fmt.Sprint("key ", i), At: at},
			{Tenant: "acme", SandboxID: "lives", Generation: 1, Type: sandboxer.EventStep, Message: fmt.Sprint("lives ", i), At: at},
		}}))
	}
	for id, at := range map[string]time.Time{"snap-old": old, "snap-edge": edge, "snap-kept": {}} {
		s.put(snapshot(id, func(r *sandboxer.SnapshotRecord) {
			r.DroppedAt, r.ExpiresAt = at, old
			if r.State = sandboxer.SnapshotDropped; at.IsZero() {
				r.State = sandboxer.SnapshotSealed
			}
		}))
	}
	n, err := s.ForgetHistory(s.ctx, edge, 100)
	s.ok(err)
	if n != 4 {
		s.Errorf("%d went; want 2 sandboxes, a snapshot and an event", n)
	}
	for id, want := range map[string]sandboxer.Kind{"snap-old": sandboxer.NotFound, "snap-edge": "", "snap-kept": ""} {
		if _, err := s.Snapshot(s.ctx, id); sandboxer.KindOf(err) != want {
			s.Errorf("%s: %v; want %q", id, err, want)
		}
	}
	if got := s.list(sandboxer.Query{}); !slices.Equal(got, []string{"lives", "held", "two/2"}) {
		s.Errorf("left: %v", got)
	}
	var events []string
	for _, e := range s.events(sandboxer.EventQuery{}) {
		events = append(events, e.Message)
	}
	if want := []string{"two/2 made", "two/2 ended", "held/1 made", "held/1 ended", "lives 0", "key 1", "lives 1"}; !slices.Equal(events, want) {
		s.Errorf("events left: %q; want %q", events, want)
	}
	if n := len(s.entries(sandboxer.EntryQuery{})); n != 4 || s.balance("acme") != 90 {
		s.Errorf("%d entries, balance %d; want all 4 and 90", n, s.balance("acme"))
	}
	if n, err := s.ForgetHistory(s.ctx, edge, 100); n != 0 || err != nil {
		s.Errorf("again: %d, %v", n, err)
	}
}

func historyBatches(s *suite) {
	for i := range 7 {
		s.ended(fmt.Sprint("s", i), 1, start.Add(time.Duration(-i)*time.Hour))
	}
	for _, want := range []int{3, 3, 1, 0} {
		if n, err := s.ForgetHistory(s.ctx, start.Add(time.Hour), 3); err != nil || n != want {
			s.Errorf("%d went, %v; want %d", n, err, want)
		}
		if want == 3 && len(s.list(sandboxer.Query{})) == 4 {
			if got := s.list(sandboxer.Query{}); !slices.Equal(got, []string{"s3", "s2", "s1", "s0"}) {
				s.Errorf("left: %v; want the oldest gone first", got)
			}
		}
	}
	if n := len(s.events(sandboxer.EventQuery{})); n != 0 {
		s.Errorf("%d events are left", n)
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
