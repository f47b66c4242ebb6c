package backend_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/extensiontest"
)

// An extension with nothing but exec passes the suite with files as well, with the
// tools of this machine and with busybox. Its own files would fail.
func TestFilesFromExec(t *testing.T) {
	run := func(t *testing.T, env map[string]string) {
		w := fake.NewWorld()
		defer w.Close()
		w.Inject(fake.Fault{Verb: fake.VerbFiles, Kind: sandboxer.Internal})
		others := slices.DeleteFunc(sandboxer.Capabilities(), func(c sandboxer.Capability) bool { return c == sandboxer.CanExec })
		extensiontest.RunGroups(t, extensiontest.Harness{
			Inputs: fake.Adapter.Inputs,
			Open: func(*testing.T) sandboxer.Extension {
				return fake.New(w, fake.Config{Drop: others, Images: []string{"demo"}})
			},
			Spec: sandboxer.Spec{Image: "demo", Env: env},
			Want: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles},
		}, "core", "exec", "files", "archive")
	}
	t.Run("machine", func(t *testing.T) { run(t, nil) })
	t.Run("busybox", func(t *testing.T) {
		busybox, err := exec.LookPath("busybox")
		if err != nil {
			t.Skip("busybox is not installed")
		}
		dir := t.TempDir()
		for d := dir; d != filepath.Clean(os.TempDir()); d = filepath.Dir(d) {
			os.Chmod(d, 0o755) // another user must reach the tools
		}
		if out, err := exec.Command(busybox, "--install", "-s", dir).CombinedOutput(); err != nil {
			t.Skipf("busybox installs no commands: %v, %s", err, out)
		}
		run(t, map[string]string{"PATH": dir})
	})
}
