package manager

import (
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
	owner := as("acme", sandboxer.ScopeAdmin)
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
