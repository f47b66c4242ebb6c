package storetest

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sand-boxer/sandboxer"
)

// inRoom is a sandbox of an extension and a profile that share the room of r.
func inRoom(id string, r sandboxer.Room, tenant string) *sandboxer.Sandbox {
	sb := sandbox(id, 1)
	sb.Extension, sb.Profile, sb.Tenant = r.Extension, r.Profile, tenant
	return sb
}

func roomCounted(s *suite) {
	r := sandboxer.Room{Extension: "ext.one", ExtensionMax: 2}
	n := 0
	// hasPlace reports whether one more would find room, and leaves nothing behind.
	hasPlace := func() bool {
		s.Helper()
		n++
		sb := inRoom(fmt.Sprintf("try%d", n), r, "acme")
		err := s.CreateSandbox(s.ctx, sb, sandboxer.Writes{Room: &r})
		if err == nil {
			s.end(sb)
			return true
		}
		s.fails(err, sandboxer.Exhausted)
		return false
	}
	a, b := inRoom("a", r, "acme"), inRoom("b", r, "acme")
	for _, sb := range []*sandboxer.Sandbox{a, b, inRoom("c", sandboxer.Room{Extension: "ext.two"}, "acme")} {
		s.ok(s.CreateSandbox(s.ctx, sb, sandboxer.Writes{}))
	}
	for _, c := range []struct {
		state sandboxer.State
		pause sandboxer.Pause
		takes bool
	}{
		{state: sandboxer.Creating, takes: true},
		{state: sandboxer.Warm, takes: true},
		{state: sandboxer.Running, takes: true},
		{state: sandboxer.Pausing, pause: sandboxer.Pause{Depth: sandboxer.PauseDisk, At: start}, takes: true},
		{state: sandboxer.Paused, pause: sandboxer.Pause{Depth: sandboxer.PauseDisk, At: start}},
		{state: sandboxer.Paused, pause: sandboxer.Pause{Depth: sandboxer.PauseFiles, At: start}},
		{state: sandboxer.Paused, pause: sandboxer.Pause{Depth: sandboxer.PauseFreeze, At: start}, takes: true},
		{state: sandboxer.Paused, pause: sandboxer.Pause{Depth: sandboxer.PauseDisk, Undo: true, At: start}, takes: true},
		{state: sandboxer.Creating, pause: sandboxer.Pause{Depth: sandboxer.PauseDisk, At: start}, takes: true},
		{state: sandboxer.Terminating, takes: true},
	} {
		s.update(a, func(sb *sandboxer.Sandbox) { sb.State, sb.Pause = c.state, c.pause })
		if hasPlace() == c.takes {
			s.Errorf("%s, paused to %q (undo: %t): want that it takes room: %t", c.state, c.pause.Depth, c.pause.Undo, c.takes)
		}
		want := sandboxer.RoomUse{Extension: 1} // r bounds no profile
		if c.takes {
			want.Extension++
		}
		if use, err := s.RoomUse(s.ctx, r); err != nil || use != want {
			s.Errorf("%s, paused to %q (undo: %t): RoomUse = %+v, %v; want %+v", c.state, c.pause.Depth, c.pause.Undo, use, err, want)
		}
	}
	s.end(a)
	if !hasPlace() {
		s.Errorf("one has ended, and its place is not free")
	}
	s.ok(s.CreateSandbox(s.ctx, inRoom("pooled", r, ""), sandboxer.Writes{}))
	r.Profile, r.ProfileMax = b.Profile, 1
	if use, err := s.RoomUse(s.ctx, r); err != nil || use != (sandboxer.RoomUse{Extension: 1, Profile: 2}) {
		s.Errorf("RoomUse = %+v, %v; want one on the extension and two of the profile, without the pooled one", use, err)
	}
}

func roomWritesNothing(s *suite) {
	r := sandboxer.Room{Extension: "ext.one", ExtensionMax: 2, Profile: "profile.one", ProfileMax: 1}
	with := func(w sandboxer.Writes, r sandboxer.Room) sandboxer.Writes { w.Room = &r; return w }
	full := func(err error, of string) {
		s.Helper()
		s.fails(err, sandboxer.Exhausted)
		var full *sandboxer.FullError
		if !errors.As(err, &full) || full.Of != of || sandboxer.RetryAfterOf(err) <= 0 {
			s.Errorf("%v: want that %s is full, and when to come back", err, of)
		}
	}
	// A pooled sandbox takes room of its extension alone.
	pooled := inRoom("pooled", r, "")
	s.ok(s.CreateSandbox(s.ctx, pooled, with(sandboxer.Writes{}, r)))
	s.ok(s.CreateSandbox(s.ctx, inRoom("a", r, "acme"), with(sandboxer.Writes{}, r)))
	full(s.CreateSandbox(s.ctx, inRoom("b", r, "rival"), with(everything("b"), r)), "profile.one")
	s.wroteNothing("b")
	other := sandboxer.Room{Extension: "ext.one", ExtensionMax: 2, Profile: "profile.two", ProfileMax: 1}
	full(s.CreateSandbox(s.ctx, inRoom("b", other, "acme"), with(everything("b"), other)), "ext.one")
	s.wroteNothing("b")
	_, err := s.Sandbox(s.ctx, "b")
	s.fails(err, sandboxer.NotFound)

	// A claim takes no more room of the extension, but some of the profile.
	claimed := *pooled
	claimed.Tenant = "rival"
	full(s.UpdateSandbox(s.ctx, &claimed, with(everything("c"), r)), "profile.one")
	s.wroteNothing("c")
	more := r
	more.ProfileMax = 2
	s.ok(s.UpdateSandbox(s.ctx, &claimed, with(sandboxer.Writes{}, more)))

	// Use above the bound that does not grow is permitted.
	less := sandboxer.Room{Extension: "ext.one", ExtensionMax: 1, Profile: "profile.one", ProfileMax: 1}
	claimed.Message = "changed"
	s.ok(s.UpdateSandbox(s.ctx, &claimed, with(sandboxer.Writes{}, less)))

	// A full quota is reported first: waiting for room would not help.
	w := with(sandboxer.Writes{Quota: &sandboxer.TenantQuota{Tenant: "acme", Quota: sandboxer.Quota{sandboxer.QuotaSandboxes: 0}}}, less)
	err = s.CreateSandbox(s.ctx, inRoom("d", less, "acme"), w)
	s.fails(err, sandboxer.Exhausted)
	if errors.As(err, new(*sandboxer.FullError)) {
		s.Errorf("a used quota and a full extension gave the error of the extension: %v", err)
	}
}

func roomConcurrent(s *suite) {
	r := sandboxer.Room{Extension: "ext.one", ExtensionMax: 7, Profile: "profile.one", ProfileMax: 5}
	var won atomic.Int32
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			mine := r
			if i%2 == 1 {
				mine.Profile, mine.ProfileMax = "profile.two", 0
			}
			switch err := s.CreateSandbox(s.ctx, inRoom(fmt.Sprintf("s%d", i), mine, "acme"), sandboxer.Writes{Room: &mine}); {
			case err == nil:
				won.Add(1)
			case sandboxer.KindOf(err) != sandboxer.Exhausted:
				s.Errorf("create: %v", err)
			}
		})
	}
	wg.Wait()
	all, _, err := s.Sandboxes(s.ctx, sandboxer.Query{Extension: "ext.one"})
	s.ok(err)
	of, _, err := s.Sandboxes(s.ctx, sandboxer.Query{Profile: "profile.one"})
	s.ok(err)
	if won.Load() != 7 || len(all) != 7 || len(of) > 5 {
		s.Errorf("%d creates succeeded, %d sandboxes are there, %d of the profile; the extension has room for 7, the profile for 5", won.Load(), len(all), len(of))
	}
}
