package manager

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
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

// judged is a mounter that counts what it is asked about mounts.
type judged struct {
	mounter
	admits, checks atomic.Int64
	hangs          atomic.Bool // once
	made           chan int64  // for each Provision, how often Admit was asked before it
}

func (x *judged) Admit(spec sandboxer.Spec, name string) error {
	x.admits.Add(1)
	return x.mounter.Admit(spec, name)
}

func (x *judged) Check(context.Context, sandboxer.Spec) error {
	x.checks.Add(1)
	return nil
}

func (x *judged) Provision(ctx context.Context, spec sandboxer.Spec) (sandboxer.Handle, error) {
	x.made <- x.admits.Load()
	if x.hangs.CompareAndSwap(true, false) {
		<-ctx.Done()
		return sandboxer.Handle{}, ctx.Err()
	}
	return x.mounter.Provision(ctx, spec)
}

// A create checks its spec once, before it is written down, and the next process checks it when it goes on with it.
func TestCheckedOnce(t *testing.T) {
	x := &judged{made: make(chan int64, 10)}
	r := newRig(t, func(s *setup) {
		s.wrap = func(f *fake.Extension) sandboxer.Extension { x.Extension = f; return x }
	})
	req := sandboxer.CreateRequest{Profile: "test", Mounts: []sandboxer.Mount{{Source: "/roots/a", Target: "/mnt/x"}}, Env: map[string]string{"A": "b"}}
	if _, err := r.Plan(acme, req); err != nil {
		t.Fatal(err)
	}
	planned, checked := x.admits.Load(), x.checks.Load()
	x.hangs.Store(true)
	req.NoWaiting = true
	sb := r.create(req)
	if before := <-x.made; before != 2*planned || x.checks.Load() != 2*checked || planned == 0 || checked != 1 {
		t.Errorf("a create asks Admit %d times and Check %d times, a plan %d and %d times", before-planned, x.checks.Load()-checked, planned, checked)
	}
	r.restart()
	if after := <-x.made; after <= 2*planned {
		t.Error("the next process makes what it did not check")
	}
	r.await(sb.ID, sandboxer.Running)
}

// TestMounts: callers mount what the extension admits, administrators anything; a snapshot says
// that it holds nothing of it, and a caller that restores it needs the same rights.
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
			if rec.Message != "it does not include the mounts at /mnt/x" {
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
