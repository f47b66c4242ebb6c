package storetest

import (
	"slices"

	"github.com/sand-boxer/sandboxer"
)

// A damagedKind says how records T of a kind are stored and read, by queries Q, so that
// every kind has the same tests of unreadable records.
type damagedKind[T, Q any] struct {
	kind    Record
	create  func(s *suite, r *T) error
	update  func(s *suite, r *T) error
	record  func(id, name string) *T // that all of queries select
	later   func(r *T) *T            // what would take its ID
	get     []func(s *suite, id string) (*T, error)
	list    func(s *suite, q Q) ([]*T, string, error)
	queries []Q
	named   func(name string) Q
	page    func(limit int, after string) Q
	is      func(r *T) (id, why string) // and whether it is damaged
	remains func(r *T, why string) *T   // what columns say of r
	end     func(r *T)                  // changes the state
	ended   func(r *T) bool             // whether that is what is stored, in version 2
}

var damagedSandbox = damagedKind[sandboxer.Sandbox, sandboxer.Query]{
	kind:   SandboxRecord,
	create: func(s *suite, sb *sandboxer.Sandbox) error { return s.CreateSandbox(s.ctx, sb, sandboxer.Writes{}) },
	update: func(s *suite, sb *sandboxer.Sandbox) error { return s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{}) },
	record: func(id, name string) *sandboxer.Sandbox {
		sb := sandbox(id, 1)
		sb.Name, sb.State, sb.ExpiresAt, sb.ShownID = name, sandboxer.Running, start, "shown-"+id
		return sb
	},
	later: func(sb *sandboxer.Sandbox) *sandboxer.Sandbox { return sandbox(sb.ID, sb.Generation+1) },
	get: []func(*suite, string) (*sandboxer.Sandbox, error){
		func(s *suite, id string) (*sandboxer.Sandbox, error) { return s.Sandbox(s.ctx, id) },
		func(s *suite, id string) (*sandboxer.Sandbox, error) { return s.SandboxGeneration(s.ctx, id, 1) },
		func(s *suite, id string) (*sandboxer.Sandbox, error) {
			return s.SandboxShown(s.ctx, "acme", "shown-"+id)
		},
	},
	list: func(s *suite, q sandboxer.Query) ([]*sandboxer.Sandbox, string, error) { return s.Sandboxes(s.ctx, q) },
	queries: []sandboxer.Query{
		{}, {Tenant: "acme"}, {Profile: "profile.local"}, {IDPrefix: "shown-"}, {Extension: "ext.local"}, {States: []sandboxer.State{sandboxer.Running}}, {DueBefore: start},
	},
	named: func(name string) sandboxer.Query { return sandboxer.Query{Name: name} },
	page:  func(limit int, after string) sandboxer.Query { return sandboxer.Query{Limit: limit, After: after} },
	is:    func(sb *sandboxer.Sandbox) (id, why string) { return sb.ID, sb.Damaged },
	remains: func(sb *sandboxer.Sandbox, why string) *sandboxer.Sandbox {
		return &sandboxer.Sandbox{
			ID: sb.ID, Generation: sb.Generation, Version: 1, Tenant: sb.Tenant, ShownID: sb.ShownID, Name: sb.Name, Profile: sb.Profile, Extension: sb.Extension,
			State: sb.State, Damaged: why,
		}
	},
	end:   func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Terminated },
	ended: func(sb *sandboxer.Sandbox) bool { return sb.State == sandboxer.Terminated && sb.Version == 2 },
}

var damagedSnapshot = damagedKind[sandboxer.SnapshotRecord, sandboxer.SnapshotQuery]{
	kind:   SnapshotRecord,
	create: writeSnapshot,
	update: writeSnapshot,
	record: func(id, name string) *sandboxer.SnapshotRecord {
		return snapshot(id, func(r *sandboxer.SnapshotRecord) {
			r.Name, r.Parent, r.Purpose = name, "p", sandboxer.ForFork
			r.State, r.ExpiresAt = sandboxer.SnapshotSealed, start
		})
	},
	later: func(r *sandboxer.SnapshotRecord) *sandboxer.SnapshotRecord { return snapshot(r.ID) },
	get: []func(*suite, string) (*sandboxer.SnapshotRecord, error){
		func(s *suite, id string) (*sandboxer.SnapshotRecord, error) { return s.Snapshot(s.ctx, id) },
	},
	list: func(s *suite, q sandboxer.SnapshotQuery) ([]*sandboxer.SnapshotRecord, string, error) {
		return s.Snapshots(s.ctx, q)
	},
	queries: []sandboxer.SnapshotQuery{
		{}, {Tenant: "acme"}, {SandboxID: "a"}, {Parent: "p"}, {States: []sandboxer.SnapshotState{sandboxer.SnapshotSealed}},
		{Purposes: []sandboxer.SnapshotPurpose{sandboxer.ForFork}}, {DueBefore: start},
	},
	named: func(name string) sandboxer.SnapshotQuery { return sandboxer.SnapshotQuery{Name: name} },
	page: func(limit int, after string) sandboxer.SnapshotQuery {
		return sandboxer.SnapshotQuery{Limit: limit, After: after}
	},
	is: func(r *sandboxer.SnapshotRecord) (id, why string) { return r.ID, r.Damaged },
	remains: func(r *sandboxer.SnapshotRecord, why string) *sandboxer.SnapshotRecord {
		return &sandboxer.SnapshotRecord{
			ID: r.ID, Version: 1, Tenant: r.Tenant, Name: r.Name, SandboxID: r.SandboxID, Parent: r.Parent, Purpose: r.Purpose,
			State: r.State, Damaged: why,
		}
	},
	end:   func(r *sandboxer.SnapshotRecord) { r.State = sandboxer.SnapshotDropping },
	ended: func(r *sandboxer.SnapshotRecord) bool { return r.State == sandboxer.SnapshotDropping && r.Version == 2 },
}

func writeSnapshot(s *suite, r *sandboxer.SnapshotRecord) error {
	return s.Write(s.ctx, sandboxer.Writes{Snapshots: []*sandboxer.SnapshotRecord{r}})
}

// damaged returns the tests of damaged records of a kind.
func damaged[T, Q any](k damagedKind[T, Q]) []behaviour {
	of := "damaged " + string(k.kind)
	return []behaviour{
		{of + "/stops no listing", k.listed},
		{of + "/is failed when asked for by name", k.got},
		{of + "/is repaired by being written", k.repaired},
	}
}

// breakOne stores records with these IDs, damages the one called b, and returns
// its former content; or it skips if no record can be damaged.
func (k damagedKind[T, Q]) breakOne(s *suite, all ...string) *T {
	s.Helper()
	if s.damage == nil {
		s.Skip("records of this store cannot be damaged")
	}
	var b *T
	for _, id := range all {
		r := k.record(id, "n-"+id)
		s.ok(k.create(s, r))
		if id == "b" {
			b = r
		}
	}
	s.damage(s.T, s.Store, k.kind, "b")
	return b
}

// left checks what is left of b.
func (k damagedKind[T, Q]) left(s *suite, got, b *T) {
	s.Helper()
	if got == nil {
		s.Fatal("nothing is left of it")
	}
	_, why := k.is(got)
	if why == "" {
		s.Error("it does not say that it is damaged")
	}
	s.same("remains", got, k.remains(b, why))
}

func (k damagedKind[T, Q]) listed(s *suite) {
	b := k.breakOne(s, "a", "b", "c", "d")
	want := []string{"d", "c", "b", "a"}
	for _, q := range k.queries {
		items, next, err := k.list(s, q)
		s.ok(err)
		var ids []string
		for _, r := range items {
			id, why := k.is(r)
			if ids = append(ids, id); (id == "b") != (why != "") {
				s.Errorf("%s: damaged is %q", id, why)
			}
		}
		if next != "" || !slices.Equal(ids, want) {
			s.Errorf("%+v lists %v, %q; want all four", q, ids, next)
		}
	}
	items, _, err := k.list(s, k.named("n-b"))
	s.ok(err)
	if len(items) != 1 {
		s.Fatalf("%d records of that name; want 1", len(items))
	}
	k.left(s, items[0], b)
	// Pages continue behind it.
	var seen []string
	for next := ""; ; {
		items, after, err := k.list(s, k.page(1, next))
		s.ok(err)
		for _, r := range items {
			id, _ := k.is(r)
			seen = append(seen, id)
		}
		if next = after; next == "" {
			break
		}
	}
	if !slices.Equal(seen, want) {
		s.Errorf("pages of one have %v", seen)
	}
}

func (k damagedKind[T, Q]) got(s *suite) {
	b := k.breakOne(s, "b")
	for _, get := range k.get {
		r, err := get(s, "b")
		s.fails(err, sandboxer.Failed)
		k.left(s, r, b)
	}
	// Its ID and name stay taken.
	s.fails(k.create(s, k.later(b)), sandboxer.Conflict)
	s.fails(k.create(s, k.record("c", "n-b")), sandboxer.Conflict)
}

func (k damagedKind[T, Q]) repaired(s *suite) {
	k.breakOne(s, "b")
	r, err := k.get[0](s, "b")
	s.fails(err, sandboxer.Failed)
	k.end(r)
	s.ok(k.update(s, r))
	r, err = k.get[0](s, "b")
	s.ok(err)
	if _, why := k.is(r); why != "" || !k.ended(r) {
		s.Errorf("repaired: %+v", r)
	}
}
