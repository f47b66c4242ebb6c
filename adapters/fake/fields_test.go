package fake

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// TestSpecFields: of each field of a spec it is known what becomes of it; what could not be
// kept is refused.
func TestSpecFields(t *testing.T) {
	w := NewWorld()
	defer w.Close()
	e := New(w, Config{})
	broker := "the broker's business"
	fieldtest.Taken(t, sandboxer.Spec{}, fieldtest.Values{
		"Workspace": {"/w", "/w"}, "Network.Mode": {sandboxer.NetworkPublic, sandboxer.NetworkPublic}, "User": {"0", "0"},
	}, e.check, fieldtest.Withheld{
		"ID": "names the object", "Generation": "names the object", "Owner": "names the object", "Profile": broker, "Inputs": "those that it declares",
		"Consumer": broker, "Tenant": broker, "Image": "noted", "Command": "the fake's sandboxes have no main process, and are for tests",
		"Env": "kept", "Labels": broker, "Network.Mode": "none and public look alike here",
		"Ports": "every port can be dialled", "Workspace": "kept", "User": "kept", "Fuse": "the sweep is first; the fake's world ends with the test",
		"Warm": "nothing to prepare", "Credential": "set for a Credentialed extension alone", "Vouched": "asked by internal/backend", "Place": "where it is made",
	})
	if err := e.check(sandboxer.Spec{Network: sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"a.example"}}}); err == nil {
		t.Error("a list of allowed destinations is taken")
	}
}
