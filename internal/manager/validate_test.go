package manager

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestRestricted follows what only an operator may choose through a sandbox's life: it is
// asked about once, and what was decided goes with the spec, not with who asks later.
func TestRestricted(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("ours"), 0o644); err != nil {
		t.Fatal(err)
	}
	owner := as(sandboxer.DefaultTenant, sandboxer.ScopeAdmin)
	repo := map[string]string{"repo": dir}
	change := func(s *setup) {
		s.profiles = append(s.profiles,
			sandboxer.Profile{ID: "profile.named", Extension: "ext.fake", Inputs: repo},
			sandboxer.Profile{ID: "profile.shipped", Extension: "ext.fake", Inputs: repo, Builtin: true})
	}
	none := func(r *rig) {
		t.Helper()
		if n := len(r.live()); n != 0 {
			t.Errorf("%d sandboxes after a refusal", n)
		}
	}

	t.Run("create", func(t *testing.T) {
		r := newRig(t, change)
		for _, req := range []sandboxer.CreateRequest{
			{Profile: "test", Inputs: repo},
			{Profile: "shipped"},
			{Profile: "named", Inputs: map[string]string{"repo": filepath.Dir(dir)}},
			{Profile: "test", Image: "oci:/var/lib/x"},
		} {
			_, err := r.Create(acme, req)
			wantErr(t, err, sandboxer.Denied, "administrator")
			_, err = r.Plan(acme, req)
			wantErr(t, err, sandboxer.Denied, "administrator")
		}
		none(r)
		r.wantFile(r.create(sandboxer.CreateRequest{Profile: "named"}).ID, "f", "ours")
		r.wantFile(r.create(sandboxer.CreateRequest{Profile: "named", Inputs: repo}).ID, "f", "ours")
		sb, err := r.Create(owner, sandboxer.CreateRequest{Profile: "shipped"})
		if err != nil || !slices.Equal(sb.Spec.Vouched, []string{"repo"}) {
			t.Fatalf("an administrator got %+v, %v", sb, err)
		}
		r.wantFile(sb.ID, "f", "ours")
		for _, sb := range r.live() {
			r.destroy(sb.ID)
		}
	})

	t.Run("restart", func(t *testing.T) {
		r := newRig(t, change)
		r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Hang: true})
		sb, err := r.Create(owner, sandboxer.CreateRequest{Profile: "test", Inputs: repo, NoWaiting: true})
		if err != nil {
			t.Fatal(err)
		}
		r.close()
		r.world.Forgive()
		r.open()
		r.await(sb.ID, sandboxer.Running)
		r.wantFile(sb.ID, "f", "ours")
		r.destroy(sb.ID)
	})

	t.Run("pool", func(t *testing.T) {
		r := newRig(t, func(s *setup) { change(s); pooled(1)(s) })
		r.full("test", 1)
		_, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test", Inputs: repo})
		wantErr(t, err, sandboxer.Denied, "administrator")
		r.full("test", 1) // it is there still
		sb, err := r.Create(owner, sandboxer.CreateRequest{Profile: "test", Inputs: repo})
		if err != nil || sb.Pool == "" {
			t.Fatalf("from the pool: %+v, %v", sb, err)
		}
		r.wantFile(sb.ID, "f", "ours")
		r.destroy(sb.ID)
	})

	t.Run("restore and fork", func(t *testing.T) {
		r := newSnapshotRig(t, change)
		sb, err := r.Create(owner, sandboxer.CreateRequest{Profile: "test", Inputs: repo})
		if err != nil {
			t.Fatal(err)
		}
		both := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth})
		// What an administrator gave to the source stands; what is given now is the caller's.
		for _, kind := range []sandboxer.SnapshotKind{sandboxer.SnapshotNative, sandboxer.SnapshotPortable} {
			got := r.restored(both.ID, RestoreRequest{Kind: kind})
			if !slices.Equal(got.Spec.Vouched, []string{"repo"}) {
				t.Errorf("restored as %s: vouched for are %q", kind, got.Spec.Vouched)
			}
			again := r.snapshot(got.ID, SnapshotRequest{Kind: sandboxer.SnapshotPortable})
			r.destroy(r.restored(again.ID, RestoreRequest{}).ID)
			r.destroy(got.ID)
		}
		other := RestoreRequest{Inputs: map[string]string{"repo": filepath.Dir(dir)}}
		_, err = r.Restore(acme, both.ID, other)
		wantErr(t, err, sandboxer.Denied, "administrator")
		if sb, err := r.Restore(owner, both.ID, other); err != nil {
			t.Error(err)
		} else {
			r.destroy(sb.ID)
		}
		copies, err := r.Fork(acme, sb.ID, ForkRequest{Count: 2})
		if err != nil {
			t.Fatal(err)
		}
		r.destroy(sb.ID)
		for _, sb := range copies {
			r.destroy(sb.ID)
		}

		// What the profile vouched for ends with the profile's word.
		sb = r.create(sandboxer.CreateRequest{Profile: "named"})
		both = r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth})
		r.destroy(sb.ID)
		i := slices.IndexFunc(r.setup.profiles, func(p sandboxer.Profile) bool { return p.ID == "profile.named" })
		r.setup.profiles[i].Inputs = nil
		r.restart()
		_, err = r.Restore(acme, both.ID, RestoreRequest{Kind: sandboxer.SnapshotPortable})
		wantErr(t, err, sandboxer.Denied, "administrator")
		r.destroy(r.restored(both.ID, RestoreRequest{Kind: sandboxer.SnapshotNative}).ID) // which reads nothing again
		none(r)
	})
}

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
	admin := as(sandboxer.DefaultTenant, sandboxer.ScopeAdmin)
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
			wantErr(t, err, sandboxer.Invalid, "is too large")
		}
	}
	r.sound(0)
}

func (b bounded) RestoreFromSnapshot(ctx context.Context, s sandboxer.Spec, from sandboxer.Snapshot) (sandboxer.Handle, error) {
	s.Limits = sandboxer.Limits{}
	return b.Extension.RestoreFromSnapshot(ctx, s, from)
}

// TestTightened: what was saved or paused with more than the profile gives now comes back
// for administrators alone.
func TestTightened(t *testing.T) {
	wide := sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}
	for name, c := range map[string]struct {
		before, now sandboxer.Profile
		say         string
	}{
		"network": {sandboxer.Profile{Network: wide}, sandboxer.Profile{}, "wider than the profile's"},
		"limits": {sandboxer.Profile{Limits: sandboxer.Limits{MemoryBytes: 8 << 30}}, sandboxer.Profile{Limits: sandboxer.Limits{MemoryBytes: 1 << 30}},
			"memory_bytes=8589934592 is more"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newSnapshotRig(t, func(s *setup) {
				s.wrap = func(e *fake.Extension) sandboxer.Extension { return bounded{e} }
				c.before.ID, c.before.Extension, c.before.AutoResume = "profile.tight", "ext.fake", true
				s.profiles = append(slices.Clone(s.profiles), c.before)
			})
			paused := r.create(sandboxer.CreateRequest{Profile: "tight"})
			sb := r.create(sandboxer.CreateRequest{Profile: "tight"})
			both := r.snapshot(sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotBoth})
			r.pause(paused.ID, "")
			c.now.ID, c.now.Extension, c.now.AutoResume = "profile.tight", "ext.fake", true
			r.setup.profiles[len(r.setup.profiles)-1] = c.now
			r.restart()
			for _, kind := range []sandboxer.SnapshotKind{sandboxer.SnapshotNative, sandboxer.SnapshotPortable} {
				_, err := r.Restore(acme, both.ID, RestoreRequest{Kind: kind})
				wantErr(t, err, sandboxer.Denied, c.say)
			}
			_, err := r.Fork(acme, sb.ID, ForkRequest{Count: 2})
			wantErr(t, err, sandboxer.Denied, c.say)
			_, err = r.Resume(acme, paused.ID, ResumeRequest{})
			wantErr(t, err, sandboxer.Denied, c.say)
			err = r.MakeDir(acme, paused.ID, "/workspace/d") // which would resume it
			wantErr(t, err, sandboxer.Denied, c.say)
			if got := r.get(paused.ID); got.State != sandboxer.Paused {
				t.Errorf("it is %s", got.State)
			}
			boss := as(sandboxer.DefaultTenant, sandboxer.ScopeAdmin)
			if _, err := r.Resume(boss, paused.ID, ResumeRequest{}); err != nil {
				t.Error(err)
			}
			got, err := r.Restore(boss, both.ID, RestoreRequest{})
			if err != nil {
				t.Fatal(err)
			}
			for _, sb := range []*sandboxer.Sandbox{got, sb, paused} {
				r.destroy(sb.ID)
			}
			r.clean()
		})
	}
}
