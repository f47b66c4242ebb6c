package backend_test

import (
	"context"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// judge is an extension that counts what it is asked about specs, and admits nothing but the input "mine".
type judge struct {
	plain
	checks, admits int
}

func (j *judge) Check(context.Context, sandboxer.Spec) error { j.checks++; return nil }

func (j *judge) Admit(s sandboxer.Spec, name string) error {
	j.admits++
	if s.Inputs[name] != "mine" {
		return sandboxer.E(sandboxer.Denied, nil, "not yours")
	}
	return nil
}

// What Check returns stands for the spec that it was given, at the same backend, and for nothing else: another spec is
// checked when a sandbox is made of it.
func TestChecked(t *testing.T) {
	j := &judge{}
	j.provision = func(_ context.Context, s sandboxer.Spec) (sandboxer.Handle, error) {
		return sandboxer.Handle{SandboxID: s.ID, Generation: s.Generation, Host: s.Place}, nil
	}
	options := backend.Options{Inputs: []sandboxer.Input{{Name: "kept", Restricted: true}}}
	b := backend.New("ext.test", j, options)
	spec := sandboxer.Spec{ID: "x", Generation: 1, Owner: "test", Env: map[string]string{"A": "b"}, Inputs: map[string]string{"kept": "mine"}}
	checked, err := b.Check(t.Context(), spec)
	if err != nil || j.checks != 1 || j.admits == 0 {
		t.Fatalf("Check: %v after %d checks and %d admissions", err, j.checks, j.admits)
	}
	for what, c := range map[string]struct {
		by      *backend.Backend
		checked *backend.Checked
		change  func(*sandboxer.Spec)
		judged  bool
		kind    sandboxer.Kind
	}{
		"the same":           {b, checked, func(*sandboxer.Spec) {}, false, ""},
		"place and fuse":     {b, checked, func(s *sandboxer.Spec) { s.Place, s.Fuse = "there", time.Now() }, false, ""},
		"unchecked":          {b, nil, func(*sandboxer.Spec) {}, true, ""},
		"another backend":    {backend.New("ext.test", j, options), checked, func(*sandboxer.Spec) {}, true, ""},
		"another input":      {b, checked, func(s *sandboxer.Spec) { s.Inputs = map[string]string{"kept": "yours"} }, true, sandboxer.Denied},
		"another generation": {b, checked, func(s *sandboxer.Spec) { s.Generation++ }, true, ""},
		"a mount": {b, checked, func(s *sandboxer.Spec) {
			s.Mounts, s.Vouched = []sandboxer.Mount{{Source: "/a", Target: "/proc"}}, []string{sandboxer.RestrictedMounts}
		}, true, sandboxer.Invalid},
		"a network": {b, checked, func(s *sandboxer.Spec) { s.Network.Mode = "other" }, true, sandboxer.Invalid},
	} {
		t.Run(what, func(t *testing.T) {
			s := spec
			s.Inputs = map[string]string{"kept": "mine"}
			c.change(&s)
			j.checks, j.admits = 0, 0
			_, err := c.by.ProvisionChecked(t.Context(), s, c.checked)
			if sandboxer.KindOf(err) != c.kind {
				t.Errorf("%v; want %q", err, c.kind)
			}
			if judged := j.admits > 0 || c.kind == sandboxer.Invalid; judged != c.judged || j.checks > 0 {
				t.Errorf("%d admissions and %d checks", j.admits, j.checks)
			}
		})
	}
	bad := spec
	bad.Limits.PIDs = -1
	if checked, err := b.Check(t.Context(), bad); checked != nil || sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("a bad spec: %+v, %v", checked, err)
	}
}
