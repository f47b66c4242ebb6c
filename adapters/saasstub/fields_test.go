package saasstub

import (
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/fieldtest"
)

// TestSpecFields: what a spec asks for beyond the note is refused, or it is known what becomes of it.
func TestSpecFields(t *testing.T) {
	x := opens(t, "test", t.TempDir(), `{}`)
	values := fieldtest.Values{"ID": {"x1", "x2"}, "Env[key]": {"A", "A"}, "Network.Mode": {sandboxer.NetworkAllow, sandboxer.NetworkAllow}}
	fieldtest.Taken(t, sandboxer.Spec{ID: "x", Generation: 1}, values, func(spec sandboxer.Spec) error { return x.Check(t.Context(), spec) }, fieldtest.Withheld{
		"ID": "a tag", "Generation": "a tag", "Owner": "a tag", "Fuse": "a lifetime, and a tag", "Inputs": "the note",
		"Profile": "the broker's business", "Consumer": "the broker's business", "Tenant": "the broker's business", "Labels": "the broker's business",
		"Network.Allow": "of no effect without its mode", "Vouched": "asked by internal/backend", "Place": "it is no Placer", "Credential": "names the key of each call",
	})
}
