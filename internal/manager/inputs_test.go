package manager

import (
	"maps"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
)

// TestAnyInput: inputs that are not declared reach an extension that takes any, from whom they may come.
func TestAnyInput(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.fake.Drop = []sandboxer.Capability{sandboxer.CanAdmit} // as one that knows of nobody
		s.inputs = []sandboxer.Input{{Name: sandboxer.AnyInput, Restricted: true}, {Name: "open"}}
		s.profiles = []sandboxer.Profile{{ID: "profile.test", Extension: "ext.fake", Inputs: map[string]string{"of-profile": "x"}}}
	})
	sb := r.create(sandboxer.CreateRequest{Profile: "test", Inputs: map[string]string{"open": "y"}})
	if want := (map[string]string{"of-profile": "x", "open": "y"}); !maps.Equal(sb.Spec.Inputs, want) {
		t.Errorf("inputs %q; want %q", sb.Spec.Inputs, want)
	}
	order := sandboxer.CreateRequest{Profile: "test", NoWaiting: true, Inputs: map[string]string{"free": "y", "free-too": "z"}}
	_, err := r.Create(acme, order)
	wantErr(t, err, sandboxer.Denied, `takes "free" only from an administrator`)
	sb, err = r.Create(as(sandboxer.DefaultTenant, sandboxer.ScopeRead, sandboxer.ScopeWrite, sandboxer.ScopeAdmin), order)
	if err != nil || sb.Spec.Inputs["free"] != "y" || !slices.Equal(sb.Spec.Vouched, []string{"free", "free-too", "of-profile"}) {
		t.Errorf("an administrator's: %+v, %v", sb, err)
	}
}

// TestLacks: what an extension has not is said in the words of those who first wrote extensions.
func TestLacks(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.other = fake.NewWorld()
		s.profiles = append(s.profiles, sandboxer.Profile{ID: "profile.other", Extension: "ext.other"})
	})
	sb := r.create(sandboxer.CreateRequest{Profile: "other"})
	_, err := r.Pause(acme, sb.ID, PauseRequest{})
	wantErr(t, err, sandboxer.Unsupported, "ext.other does not support pause")
	_, err = r.Snapshot(acme, sb.ID, SnapshotRequest{Kind: sandboxer.SnapshotNative})
	wantErr(t, err, sandboxer.Unsupported, "ext.other does not support snapshots")
}
