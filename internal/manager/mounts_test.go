package manager

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// mounter is the fake that takes mounts, lets anybody mount what is in /roots, and does not
// make them.
type mounter struct {
	*fake.Extension
	got []sandboxer.Spec
}

func (x *mounter) Admit(spec sandboxer.Spec, name string) error {
	if name == sandboxer.RestrictedMounts && !slices.ContainsFunc(spec.Mounts, func(m sandboxer.Mount) bool { return !m.Within("/roots", false) }) {
		return nil
	}
	return x.Extension.Admit(spec, name)
}

func (x *mounter) take(spec sandboxer.Spec) sandboxer.Spec {
	x.got = append(x.got, spec)
	spec.Mounts = nil
	return spec
}

func (x *mounter) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	return x.Extension.Provision(ctx, x.take(spec))
}

func (x *mounter) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	return x.Extension.RestoreFromSnapshot(ctx, x.take(spec), s)
}

// TestMounts: callers mount what the extension admits, administrators anything; a snapshot says
// that it holds nothing of it, and whoever restores it has to be allowed the same.
func TestMounts(t *testing.T) {
	x := &mounter{}
	r := newRig(t, func(s *setup) {
		s.wrap = func(f *fake.Extension) sandboxer.Extension { x.Extension = f; return x }
	})
	of := func(src string) []sandboxer.Mount { return []sandboxer.Mount{{Source: src, Target: "/mnt/x"}} }
	for name, c := range map[string]struct {
		ctx  context.Context
		src  string
		kind sandboxer.Kind
		text string
	}{
		"in a root":              {acme, "/roots/a", "", ""},
		"out of it":              {acme, "/rootsy", sandboxer.Denied, "profile.test does not offer that path for writing, nor does ext.fake"},
		"out of it, by an admin": {admin, "/srv", "", ""},
		"relative, by an admin":  {admin, "relative", sandboxer.Invalid, "clean absolute"},
	} {
		t.Run(name, func(t *testing.T) {
			x.got = nil
			sb, err := r.Create(c.ctx, sandboxer.CreateRequest{Profile: "test", Mounts: of(c.src)})
			if c.kind != "" {
				wantErr(t, err, c.kind, c.text)
				if len(x.got) > 0 {
					t.Error("the extension was asked to make it")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			vouched := c.ctx == admin
			if len(x.got) != 1 || !slices.Equal(x.got[0].Mounts, of(c.src)) || slices.Contains(x.got[0].Vouched, sandboxer.RestrictedMounts) != vouched {
				t.Errorf("the extension got %+v", x.got)
			}
			rec, err := r.Snapshot(c.ctx, sb.ID, sandboxer.SnapshotRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if rec.Message != "it holds nothing of what is mounted at /mnt/x" {
				t.Errorf("the snapshot says %q", rec.Message)
			}
			x.got = nil
			copied, err := r.Restore(c.ctx, rec.ID, sandboxer.RestoreRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if len(x.got) != 1 || !slices.Equal(x.got[0].Mounts, of(c.src)) || !slices.Equal(copied.Spec.Mounts, of(c.src)) {
				t.Errorf("the restored one has %+v", x.got)
			}
			if !vouched {
				return
			}
			// Somebody else of the tenant may not have what the administrator had.
			_, err = r.Restore(as("root"), rec.ID, sandboxer.RestoreRequest{})
			wantErr(t, err, sandboxer.Denied, "has more than profile profile.test gives now")
			if !strings.Contains(sandboxer.Message(err), "/srv") {
				t.Errorf("it does not say which: %v", err)
			}
		})
	}
	plain, err := r.Create(acme, sandboxer.CreateRequest{Profile: "test"})
	if err != nil {
		t.Fatal(err)
	}
	if rec, err := r.Snapshot(acme, plain.ID, sandboxer.SnapshotRequest{}); err != nil || rec.Message != "" {
		t.Errorf("without mounts: %+v, %v", rec, err)
	}
}
