package storetest

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func snapshot(id string, edit ...func(*sandboxer.SnapshotRecord)) *sandboxer.SnapshotRecord {
	r := &sandboxer.SnapshotRecord{
		ID: id, Tenant: "acme", SandboxID: "a", Generation: 1, Profile: "profile.local", Extension: "ext.local",
		Kind: sandboxer.SnapshotNative, State: sandboxer.SnapshotSaving, CreatedAt: start,
	}
	for _, f := range edit {
		f(r)
	}
	return r
}

func (s *suite) put(r *sandboxer.SnapshotRecord) *sandboxer.SnapshotRecord {
	s.Helper()
	s.ok(s.Write(s.ctx, sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{r}}))
	return r
}

func (s *suite) putFails(r *sandboxer.SnapshotRecord, kind sandboxer.Kind) {
	s.Helper()
	w := everything("x")
	w.Snapshots = []*sandboxer.SnapshotRecord{r}
	s.fails(s.Write(s.ctx, w), kind)
	s.wroteNothing("x")
}

func snapshotIDs(items []*sandboxer.SnapshotRecord) (out []string) {
	for _, r := range items {
		out = append(out, r.ID)
	}
	return out
}

func snapshotVersions(s *suite) {
	r := s.put(snapshot("one"))
	if r.Version != 1 {
		s.Errorf("version after the first write = %d; want 1", r.Version)
	}
	stale := *r
	r.State = sandboxer.SnapshotSealed
	s.put(r)
	got, err := s.Snapshot(s.ctx, "one")
	s.ok(err)
	if r.Version != 2 || got.Version != 2 || got.State != sandboxer.SnapshotSealed {
		s.Errorf("after the second write %d, stored %+v", r.Version, got)
	}
	s.putFails(&stale, sandboxer.Conflict)
	if stale.Version != 1 {
		s.Errorf("a refused write set version %d", stale.Version)
	}
	s.putFails(snapshot("one"), sandboxer.Conflict)
	s.putFails(snapshot("two", func(r *sandboxer.SnapshotRecord) { r.Version = 3 }), sandboxer.NotFound)
	s.putFails(snapshot(""), sandboxer.Invalid)
	s.putFails(snapshot("three", func(r *sandboxer.SnapshotRecord) { r.State = "odd" }), sandboxer.Invalid)
	_, err = s.Snapshot(s.ctx, "two")
	s.fails(err, sandboxer.NotFound)
}

func snapshotNames(s *suite) {
	named := func(tenant string) func(*sandboxer.SnapshotRecord) {
		return func(r *sandboxer.SnapshotRecord) { r.Tenant, r.Name = tenant, "base" }
	}
	one := s.put(snapshot("one", named("acme")))
	s.put(snapshot("other", named("rival")))
	s.putFails(snapshot("two", named("acme")), sandboxer.Conflict)
	unnamed := s.put(snapshot("three"))
	s.put(snapshot("four"))
	unnamed.Name = "base"
	s.putFails(unnamed, sandboxer.Conflict)
	one.State = sandboxer.SnapshotDropped
	s.put(one)
	s.put(snapshot("two", named("acme")))
}

func snapshotEveryField(s *suite) {
	want := filled[sandboxer.SnapshotRecord](s.T)
	want.State, want.Version = sandboxer.SnapshotSealed, 0
	s.put(&want)
	got, err := s.Snapshot(s.ctx, want.ID)
	s.ok(err)
	truncateTimes(reflect.ValueOf(&want).Elem())
	want.Spec.Env, want.Spec.Place, want.Damaged = nil, "", "" // sealed, and not stored
	want.Spec.Profile.Route = nil                              // never in a spec
	s.same("record", *got, want)
	items, _, err := s.Snapshots(s.ctx, sandboxer.SnapshotQuery{})
	s.ok(err)
	s.same("listed", *items[0], want)
	empty := s.put(snapshot("zero"))
	got, err = s.Snapshot(s.ctx, "zero")
	s.ok(err)
	s.same("record", *got, *empty)
}

func snapshotWithSandbox(s *suite) {
	sb := s.create("a", 1)
	sb.State = sandboxer.Pausing
	r := snapshot("one")
	s.ok(s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{r}}))
	if _, err := s.Snapshot(s.ctx, "one"); err != nil || r.Version != 1 {
		s.Errorf("written with its sandbox: %v, version %d", err, r.Version)
	}
	stale := *sb
	stale.Version = 1
	s.fails(s.UpdateSandbox(s.ctx, &stale, sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{snapshot("two")}}), sandboxer.Conflict)
	_, err := s.Snapshot(s.ctx, "two")
	s.fails(err, sandboxer.NotFound)
	old := *r
	old.Version = 7
	sb.State = sandboxer.Paused
	s.fails(s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{&old}}), sandboxer.Conflict)
	got, err := s.Sandbox(s.ctx, "a")
	s.ok(err)
	if got.State != sandboxer.Pausing {
		s.Errorf("the sandbox was written without its snapshot: %s", got.State)
	}
}

func snapshotList(s *suite) {
	due := start.Add(time.Hour)
	for i := range 6 {
		s.put(snapshot(fmt.Sprint("s", i), func(r *sandboxer.SnapshotRecord) {
			r.State = []sandboxer.SnapshotState{sandboxer.SnapshotSaving, sandboxer.SnapshotSealed, sandboxer.SnapshotDropped}[i%3]
			r.Tenant = []string{"acme", "rival"}[i%2]
			switch i {
			case 1:
				r.Parent, r.Name, r.ExpiresAt = "s0", "base", due
			case 2:
				r.SandboxID, r.Purpose = "b", sandboxer.ForPause
			case 3:
				r.RetryAt, r.Purpose = due, sandboxer.ForFork
			}
		}))
	}
	states := func(states ...sandboxer.SnapshotState) []sandboxer.SnapshotState { return states }
	for _, tt := range []struct {
		q    sandboxer.SnapshotQuery
		want string
	}{
		{sandboxer.SnapshotQuery{}, "s5 s4 s3 s2 s1 s0"},
		{sandboxer.SnapshotQuery{Tenant: "acme"}, "s4 s2 s0"},
		{sandboxer.SnapshotQuery{SandboxID: "b"}, "s2"},
		{sandboxer.SnapshotQuery{Parent: "s0"}, "s1"},
		{sandboxer.SnapshotQuery{Name: "base"}, "s1"},
		{sandboxer.SnapshotQuery{IDPrefix: "s4"}, "s4"},
		{sandboxer.SnapshotQuery{States: states(sandboxer.SnapshotSealed)}, "s4 s1"},
		{sandboxer.SnapshotQuery{States: states(sandboxer.SnapshotSaving, sandboxer.SnapshotDropped), Tenant: "rival"}, "s5 s3"},
		{sandboxer.SnapshotQuery{Purposes: []sandboxer.SnapshotPurpose{sandboxer.ForPause, sandboxer.ForFork}}, "s3 s2"},
		{sandboxer.SnapshotQuery{Purposes: []sandboxer.SnapshotPurpose{""}}, "s5 s4 s1 s0"},
		{sandboxer.SnapshotQuery{DueBefore: due}, "s3 s1"},
		{sandboxer.SnapshotQuery{DueBefore: due.Add(-time.Second)}, ""},
	} {
		var got, paged []string
		items, next, err := s.Snapshots(s.ctx, tt.q)
		s.ok(err)
		for _, r := range items {
			got = append(got, r.ID)
		}
		if strings.Join(got, " ") != tt.want || next != "" {
			s.Errorf("Snapshots(%+v) = %q, %q; want %q", tt.q, got, next, tt.want)
		}
		for tt.q.Limit = 2; ; tt.q.After = next {
			if items, next, err = s.Snapshots(s.ctx, tt.q); err != nil {
				s.Fatal(err)
			}
			for _, r := range items {
				paged = append(paged, r.ID)
			}
			if next == "" {
				break
			}
		}
		if !slices.Equal(paged, got) {
			s.Errorf("in pages of 2 %q; want %q", paged, got)
		}
	}
	_, _, err := s.Snapshots(s.ctx, sandboxer.SnapshotQuery{After: "nonsense"})
	s.fails(err, sandboxer.Invalid)
}

func snapshotReopen(s *suite) {
	if s.reopen == nil {
		s.Skip("the store does not outlive its process")
	}
	s.put(snapshot("one", func(r *sandboxer.SnapshotRecord) { r.SealedEnv = []byte{1, 2, 0} }))
	s.Store = s.reopen(s.T, s.Store)
	got, err := s.Snapshot(s.ctx, "one")
	s.ok(err)
	if string(got.SealedEnv) != "\x01\x02\x00" || got.Version != 1 {
		s.Errorf("after reopening: %+v", got)
	}
}
