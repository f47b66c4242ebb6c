package docker

import (
	"cmp"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
	"github.com/sand-boxer/sandboxer/internal/images"
)

// TestSpecFields: the effect of each field of a spec is known; one that could not be enforced is
// refused.
func TestSpecFields(t *testing.T) {
	e := &extension{cfg: Config{Image: "engine:x", UnfilteredEgress: true}, hosts: map[string]*host{"one": {name: "one"}}, images: &images.Store{}}
	base := sandboxer.Spec{ID: "x", Generation: 1, Owner: "test", Image: "engine:y"}
	fieldtest.Taken(t, base, fieldtest.Values{
		"Env[key]": {"A", "A"}, "User": {"ci", "ci"}, "Network.Mode": {sandboxer.NetworkPublic, sandboxer.NetworkPublic}, "Image": {"engine:z", "engine:z"}, "Host": {"one", "one"},
		"Limits.MilliCPU": {2000, 2000}, "Limits.MemoryBytes": {1 << 30, 1 << 30}, "Limits.PIDs": {100, 100}, "Limits.DiskBytes": {1 << 30, 1 << 30}, "Workspace": {"/w", "/w"},
	}, func(s sandboxer.Spec) error { return cmp.Or(s.Network.Check(), e.Check(t.Context(), s)) }, fieldtest.Withheld{
		"ID": "names the container", "Generation": "names the container", "Owner": "a label", "Profile": "the broker's business", "Consumer": "the broker's business", "Tenant": "the broker's business",
		"Labels": "the broker's business", "Inputs": "those that it declares", "Image": "what it is made of", "Command": "the main command", "Env": "the agent's", "User": "of commands", "Workspace": "of commands",
		"Limits.MilliCPU": "the container's", "Limits.MemoryBytes": "the container's", "Limits.PIDs": "the container's", "Limits.DiskBytes": "the container's, where the engine keeps it", "Network.Mode": "the container's", "Ports": "shown", "Host": "where it is placed",
		"Fuse": "the agent's", "Warm": "see Claim", "Credential": "set for a Credentialed extension alone", "Vouched": "asked by internal/backend", "Place": "the engine it is made on",
	})
}
