//go:build linux

package local

import (
	"cmp"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// TestSpecFields: the effect of each field of a spec is known; one that could not be
// enforced is refused.
func TestSpecFields(t *testing.T) {
	e := &extension{cgroups: &cgroups{}, images: &imageStore{}}
	take := func(s sandboxer.Spec) error { return cmp.Or(s.Network.Check(), e.Check(t.Context(), s)) } // as the broker does
	values := fieldtest.Values{
		"Workspace": {"/w", "/w"}, "Network.Mode": {sandboxer.NetworkPublic, sandboxer.NetworkPublic}, "Network.Allow": {[]string{"a.example"}, []string{"b.example"}},
		"Limits.MemoryBytes": {1 << 30, 1 << 30}, "Limits.PIDs": {100, 100}, "Host": {"elsewhere", "elsewhere"}, "Image": {"", ""}, "Inputs[key]": {"ref", "ref"},
	}
	broker := "the broker's business"
	kept := fieldtest.Withheld{
		"ID": "names the object", "Generation": "names the object", "Owner": "names the object", "Profile": broker,
		"Consumer": broker, "Tenant": "nothing is shared between tenants that it would tell apart", "Image": "checked and unpacked (TestImages)", "Command": "run by the agent (agent.MainTag)",
		"Env": "of every command", "Labels": broker, "Limits.MilliCPU": "control groups", "Limits.MemoryBytes": "control groups", "Limits.DiskBytes": "the size of its overlay", "Limits.PIDs": "control groups",
		"Network.Mode": "its own network stack", "Ports": "every port can be dialled",
		"Workspace": "made", "User": "of commands", "Fuse": "in its record", "Warm": "prepared for a claim", "Credential": "set for a Credentialed extension alone", "Vouched": "asked where it matters (Vouches)", "Place": "there is one place",
	}
	fieldtest.Taken(t, sandboxer.Spec{}, values, take, kept)

	// An ordinary user has no control groups.
	e.cgroups.why = "not root"
	for _, name := range []string{"Limits.MilliCPU", "Limits.MemoryBytes", "Limits.PIDs"} {
		delete(kept, name)
	}
	fieldtest.Taken(t, sandboxer.Spec{}, values, take, kept)
}
