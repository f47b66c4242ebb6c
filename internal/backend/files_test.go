package backend_test

import (
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/extensiontest"
)

// An extension with nothing but exec passes the suite with files as well. Its own
// files would fail.
func TestFilesFromExec(t *testing.T) {
	w := fake.NewWorld()
	defer w.Close()
	w.Inject(fake.Fault{Verb: fake.VerbFiles, Kind: sandboxer.Internal})
	others := slices.DeleteFunc(sandboxer.Capabilities(), func(c sandboxer.Capability) bool { return c == sandboxer.CanExec })
	extensiontest.Run(t, extensiontest.Harness{
		Open: func(*testing.T) sandboxer.Extension {
			return fake.New(w, fake.Config{Drop: others, Images: []string{"demo"}})
		},
		Spec: sandboxer.Spec{Image: "demo"},
		Want: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles},
	})
}
