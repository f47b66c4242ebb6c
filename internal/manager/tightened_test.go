package manager

import (
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

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
			boss := as("acme", sandboxer.ScopeAdmin)
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
