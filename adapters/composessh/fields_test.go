package composessh

import (
	"cmp"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// TestSpecFields: of each field of a spec it is known what becomes of it; what could not be
// kept is refused.
func TestSpecFields(t *testing.T) {
	e := &extension{cfg: defaults}
	base := order("x", repo(t, "services:\n  app:\n    image: busybox\n    command: [sleep, \"9\"]\n", nil))
	fieldtest.Taken(t, base, fieldtest.Values{
		"Network.Mode": {sandboxer.NetworkPublic, sandboxer.NetworkPublic}, "Network.Allow": {[]string{"a.example"}, []string{"b.example"}},
		"Limits.MemoryBytes": {1 << 40, 1 << 40}, "Limits.PIDs": {4000, 4000}, "Limits.MilliCPU": {64000, 64000},
	}, func(s sandboxer.Spec) error { _, err := e.plan(t.Context(), s); return cmp.Or(s.Network.Check(), err) }, fieldtest.Withheld{
		"ID": "names the object", "Generation": "names the object", "Owner": "names the object", "Profile": "its ID is a label", "Host": "where it is placed",
		"Consumer": "its ID is a label", "Tenant": "names and bounds the layers of its builds", "Env": "of every command, and of the file's variables", "Labels": "labels",
		"Limits.MilliCPU": "shared among the services", "Limits.MemoryBytes": "shared among the services", "Limits.PIDs": "shared among the services",
		"Network.Mode": "internal networks, or a gateway", "Ports": "in its note", "User": "of commands",
		"Fuse": "a label", "Warm": "nothing to prepare", "Credential": "set for a Credentialed extension alone", "Vouched": "asked by internal/backend", "Place": "the host it is made on",
	})
}
