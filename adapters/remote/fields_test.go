package remote

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// TestSpecFields: each field of a spec is in what the other installation is asked for, or is refused, or it is known what becomes
// of it.
func TestSpecFields(t *testing.T) {
	p := &peer{name: "there", cfg: Config{Profile: "far"}, env: sandboxer.Env{Extension: "ext.far", Owner: "test"}, main: profile{Profile: api.Profile{ID: "profile.far", Isolation: sandboxer.IsolationVM}}}
	base := sandboxer.Spec{ID: "x", Generation: 1}
	asked := func(spec sandboxer.Spec) (string, error) {
		req, err := p.request(t.Context(), spec)
		if err != nil {
			return "", err
		}
		text, err := json.Marshal(req)
		return string(text), err
	}
	before, err := asked(base)
	if err != nil {
		t.Fatal(err)
	}
	values := fieldtest.Values{"ID": {"x1", "x2"}, "Env[key]": {"A", "A"}, "Network.Mode": {sandboxer.NetworkAllow, sandboxer.NetworkAllow},
		"Profile.Isolation": {sandboxer.IsolationVM, sandboxer.IsolationVM}}
	fieldtest.Taken(t, base, values, func(spec sandboxer.Spec) error {
		after, err := asked(spec)
		if err == nil && after != before {
			err = errors.New("it is in the request")
		}
		return err
	}, fieldtest.Withheld{
		"Owner": "the extension's own", "Profile": "the broker's business; an isolation that is not promised there is refused", "Tenant": "the tenant there is the key's",
		"Ports": "every port can be dialled", "Credential": "set for a Credentialed extension alone", "Vouched": "asked by internal/backend", "Place": "it is no Placer",
	})
	for what, spec := range map[string]sandboxer.Spec{
		"an isolation that is not promised": {ID: "x", Generation: 1, Profile: sandboxer.Profile{Isolation: sandboxer.IsolationGVisor}},
		"mounts":                            {ID: "x", Generation: 1, Mounts: []sandboxer.Mount{{Source: "/a", Target: "/b"}}},
		"a workspace":                       {ID: "x", Generation: 1, Workspace: "/w"},
		"one that is kept ready":            {ID: "x", Generation: 1, Warm: true},
	} {
		_, err := asked(spec)
		wantKind(t, what, err, sandboxer.Unsupported)
		if sandboxer.HintOf(err) == "" {
			t.Errorf("%s: it does not say what to do: %v", what, err)
		}
	}
}
