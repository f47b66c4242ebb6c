package storetest

import (
	"slices"

	"github.com/sand-boxer/sandboxer"
)

// breakOne damages one record, or skips where nobody can.
func (s *suite) breakOne(id string, generation int) {
	s.Helper()
	if s.damage == nil {
		s.Skip("nobody can damage a record of this store")
	}
	s.damage(s.T, s.Store, id, generation)
}

func damagedListed(s *suite) {
	for _, id := range []string{"a", "b", "c", "d"} {
		s.create(id, 1, func(sb *sandboxer.Sandbox) {
			sb.Name, sb.State, sb.ExpiresAt = "n-"+id, sandboxer.Running, start
		})
	}
	s.breakOne("b", 1)
	for _, q := range []sandboxer.Query{
		{}, {Tenant: "acme"}, {Profile: "profile.local"}, {Extension: "ext.local"}, {States: []sandboxer.State{sandboxer.Running}}, {DueBefore: start},
	} {
		items, next, err := s.Sandboxes(s.ctx, q)
		s.ok(err)
		if got := ids(items); next != "" || !slices.Equal(got, []string{"d", "c", "b", "a"}) {
			s.Errorf("Sandboxes(%+v) = %v, %q; want all four", q, got, next)
		}
		for _, sb := range items {
			if (sb.ID == "b") != (sb.Damaged != "") {
				s.Errorf("sandbox %s: damaged is %q", sb.ID, sb.Damaged)
			}
		}
	}
	items, _, err := s.Sandboxes(s.ctx, sandboxer.Query{Name: "n-b"})
	s.ok(err)
	if len(items) != 1 {
		s.Fatalf("%d records of that name; want 1", len(items))
	}
	s.remains(items[0])
	// Pages go on behind it.
	var seen []string
	q := sandboxer.Query{Limit: 1}
	for {
		items, next, err := s.Sandboxes(s.ctx, q)
		s.ok(err)
		seen = append(seen, ids(items)...)
		if q.After = next; next == "" {
			break
		}
	}
	if !slices.Equal(seen, []string{"d", "c", "b", "a"}) {
		s.Errorf("pages of one have %v", seen)
	}
}

// remains checks what is left of b.
func (s *suite) remains(sb *sandboxer.Sandbox) {
	s.Helper()
	s.same("remains", sb, &sandboxer.Sandbox{
		ID: "b", Generation: 1, Version: 1, Tenant: "acme", Name: "n-b", Profile: "profile.local", Extension: "ext.local",
		State: sandboxer.Running, Damaged: sb.Damaged,
	})
	if sb.Damaged == "" {
		s.Error("it does not say that it is damaged")
	}
}

func damagedGet(s *suite) {
	s.create("b", 1, func(sb *sandboxer.Sandbox) { sb.Name, sb.State = "n-b", sandboxer.Running })
	s.breakOne("b", 1)
	sb, err := s.Sandbox(s.ctx, "b")
	s.fails(err, sandboxer.Failed)
	s.remains(sb)
	sb, err = s.SandboxGeneration(s.ctx, "b", 1)
	s.fails(err, sandboxer.Failed)
	s.remains(sb)
	// Its ID and name stay taken.
	s.fails(s.CreateSandbox(s.ctx, sandbox("b", 2), sandboxer.Writes{}), sandboxer.Conflict)
	c := sandbox("c", 1)
	c.Name = "n-b"
	s.fails(s.CreateSandbox(s.ctx, c, sandboxer.Writes{}), sandboxer.Conflict)
}

func damagedMended(s *suite) {
	s.create("b", 1, func(sb *sandboxer.Sandbox) { sb.State = sandboxer.Running })
	s.breakOne("b", 1)
	sb, err := s.Sandbox(s.ctx, "b")
	s.fails(err, sandboxer.Failed)
	sb.State = sandboxer.Terminated
	s.ok(s.UpdateSandbox(s.ctx, sb, sandboxer.Writes{}))
	got, err := s.Sandbox(s.ctx, "b")
	s.ok(err)
	if got.Damaged != "" || got.State != sandboxer.Terminated || got.Version != 2 {
		s.Errorf("mended: %+v", got)
	}
}
