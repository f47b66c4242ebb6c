package manager

import (
	"context"
	"math"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// bounded is the fake with limits that it claims to enforce.
type bounded struct{ *fake.Extension }

func (bounded) DefaultLimits(sandboxer.Spec) sandboxer.Limits {
	return sandboxer.Limits{MemoryBytes: 4 << 30, PIDs: 2048}
}

func (b bounded) Provision(ctx context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	s.Limits = sandboxer.Limits{}
	return b.Extension.Provision(ctx, s)
}

// TestCeilings: who is no administrator gets no more than the profile's max_limits say, or
// its limits, or what the extension takes by default.
func TestCeilings(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.wrap = func(e *fake.Extension) sandboxer.Extension { return bounded{e} }
		s.profiles = []sandboxer.Profile{
			{ID: "profile.none", Extension: "ext.fake"},
			{ID: "profile.some", Extension: "ext.fake", Limits: sandboxer.Limits{MemoryBytes: 1 << 30, MilliCPU: 1000}},
			{ID: "profile.more", Extension: "ext.fake", Limits: sandboxer.Limits{MemoryBytes: 1 << 30}, MaxLimits: sandboxer.Limits{MemoryBytes: 8 << 30, DiskBytes: 1 << 40}},
		}
	})
	admin := as("acme", sandboxer.ScopeAdmin)
	type l = sandboxer.Limits
	for _, c := range []struct {
		profile string
		ask     sandboxer.Limits
		ok      bool
	}{
		{"none", l{MemoryBytes: 4 << 30, PIDs: 2048, MilliCPU: 64_000}, true},
		{"none", l{MemoryBytes: 4<<30 + 1}, false},
		{"none", l{PIDs: 2049}, false},
		{"none", l{PIDs: 1_000_000}, false},
		{"some", l{MemoryBytes: 1 << 30, MilliCPU: 1000, PIDs: 2048}, true},
		{"some", l{MemoryBytes: 1<<30 + 1}, false},
		{"some", l{MilliCPU: 1001}, false},
		{"some", l{PIDs: 2049}, false},
		{"more", l{MemoryBytes: 8 << 30, DiskBytes: 1 << 40}, true},
		{"more", l{MemoryBytes: 8<<30 + 1}, false},
		{"more", l{PIDs: 2049}, false},
	} {
		req := sandboxer.CreateRequest{Profile: c.profile, Limits: c.ask}
		_, err := r.Plan(acme, req)
		if c.ok && err != nil {
			t.Errorf("%s, %+v: %v", c.profile, c.ask, err)
		} else if !c.ok {
			wantErr(t, err, sandboxer.Invalid, "is more than profile profile."+c.profile+" allows")
		}
		if _, err := r.Plan(admin, req); err != nil {
			t.Errorf("%s, %+v, asked for by an administrator: %v", c.profile, c.ask, err)
		}
	}
	for _, ask := range []sandboxer.Limits{{MilliCPU: 92233720368547758}, {MilliCPU: 184467440737095}, {MemoryBytes: math.MaxInt64}, {DiskBytes: math.MaxInt64}, {PIDs: math.MaxInt64}} {
		for _, who := range []context.Context{acme, admin} {
			_, err := r.Create(who, sandboxer.CreateRequest{Profile: "none", Limits: ask})
			wantErr(t, err, sandboxer.Invalid, "beyond every machine")
		}
	}
	r.sound(0)
}

func (b bounded) RestoreFromSnapshot(ctx context.Context, s sandboxer.Spec, from sandboxer.Snapshot) (sandboxer.Handle, error) {
	s.Limits = sandboxer.Limits{}
	return b.Extension.RestoreFromSnapshot(ctx, s, from)
}
