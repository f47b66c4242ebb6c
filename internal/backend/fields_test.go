package backend

import (
	"context"
	"io"
	"iter"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// specs is an extension that notes the spec it is called with.
type specs struct {
	sandboxer.Extension
	got sandboxer.Spec
}

func (x *specs) made(s sandboxer.Spec) (sandboxer.Handle, error) {
	x.got = s
	return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation, Host: s.Place}, nil
}

func (x *specs) Check(_ context.Context, s sandboxer.Spec) error { x.got = s; return nil }
func (x *specs) Provision(_ context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
	return x.made(s)
}
func (x *specs) ProvisionFrom(_ context.Context, s sandboxer.Spec, _ sandboxer.Contents, _ io.Reader) (sandboxer.Handle, error) {
	return x.made(s)
}
func (x *specs) Checkpoint(context.Context, sandboxer.Handle, func(sandboxer.Contents) io.Writer) error {
	return nil
}
func (x *specs) RestoreFromSnapshot(_ context.Context, s sandboxer.Spec, _ sandboxer.Snapshot) (sandboxer.Handle, error) {
	return x.made(s)
}
func (x *specs) Snapshot(context.Context, sandboxer.Handle, string) (sandboxer.Snapshot, error) {
	return sandboxer.Snapshot{}, nil
}
func (x *specs) DropSnapshot(context.Context, sandboxer.Snapshot) error { return nil }
func (x *specs) ListSnapshots(context.Context, string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return nil
}
func (x *specs) Claim(_ context.Context, _ sandboxer.Handle, s sandboxer.Spec) (sandboxer.Handle, error) {
	return x.made(s)
}
func (x *specs) Basis(_ context.Context, s sandboxer.Spec) (string, error) {
	x.got = s
	return "b", nil
}
func (x *specs) EstimateCost(_ context.Context, s sandboxer.Spec, _ time.Duration) (*sandboxer.MeterQuote, error) {
	x.got = s
	return nil, nil
}
func (x *specs) DefaultLimits(s sandboxer.Spec) sandboxer.Limits {
	x.got = s
	return sandboxer.Limits{}
}
func (x *specs) Admit(sandboxer.Spec, string) error { return nil }

// TestSpecReachesTheExtension: every call that takes a spec hands on all of it.
func TestSpecReachesTheExtension(t *testing.T) {
	x := &specs{}
	b := New("ext.x", x, Options{})
	ctx, h := t.Context(), sandboxer.Handle{SandboxID: "x", Generation: 1}
	for name, call := range map[string]func(s sandboxer.Spec) error{
		"check":     func(s sandboxer.Spec) error { _, err := b.Check(ctx, s); return err },
		"provision": func(s sandboxer.Spec) error { _, err := b.Provision(ctx, s); return err },
		"provision from": func(s sandboxer.Spec) error {
			_, err := b.ProvisionFrom(ctx, s, sandboxer.Contents{}, strings.NewReader(""))
			return err
		},
		"restore": func(s sandboxer.Spec) error {
			_, err := b.RestoreFromSnapshot(ctx, s, sandboxer.Snapshot{SnapshotID: "snap"})
			return err
		},
		"claim": func(s sandboxer.Spec) error {
			h := h
			h.SandboxID, h.Generation = s.ID, s.Generation
			_, err := b.Claim(ctx, h, s)
			return err
		},
		"basis":          func(s sandboxer.Spec) error { _, err := b.Basis(ctx, s); return err },
		"quote":          func(s sandboxer.Spec) error { _, err := b.EstimateCost(ctx, s, time.Hour); return err },
		"default limits": func(s sandboxer.Spec) error { b.DefaultLimits(s); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			fieldtest.Conversion[sandboxer.Spec, sandboxer.Spec]{
				Convert: func(s sandboxer.Spec) sandboxer.Spec {
					x.got = sandboxer.Spec{}
					if err := call(s); err != nil {
						t.Errorf("%s: %v", name, err)
					}
					return x.got
				},
				Values: fieldtest.Values{
					"Mounts": {[]sandboxer.Mount{{Source: "/a", Target: "/c", ReadOnly: true}}, []sandboxer.Mount{{Source: "/b", Target: "/d", ReadOnly: true}}}, "Workspace": {"/w", "/v"},
					"Limits.GPUs": {1, 2}, "Network": {sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"a.example"}}, sandboxer.NetworkPolicy{Mode: sandboxer.NetworkPublic}},
				},
			}.Check(t)
		})
	}
}
