package docker

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine/enginetest"
)

// TestImagesHere: directories of the server's machine are images, as a layout or as a root.
func TestImagesHere(t *testing.T) {
	dir := t.TempDir()
	root, marked := filepath.Join(dir, "root"), filepath.Join(dir, "layout")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	untar := exec.Command("tar", "-x", "-C", root)
	untar.Stdin = bytes.NewReader(enginetest.BusyboxTar(t))
	if out, err := untar.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	mark := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, "mark"), []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(filepath.Join(root, "mark"), 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	mark("one")
	if err := os.Symlink("/mark", filepath.Join(root, "link")); err != nil {
		t.Fatal(err)
	}
	l, err := layout.Write(marked, empty.Index)
	if err == nil {
		err = l.AppendImage(testImage(t), layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "v1"}))
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, start := range engines {
		t.Run(name, func(t *testing.T) {
			en := start(t)
			o := en.options(t, "images-here")
			e := o.opened(t)
			of := func(id, image string) sandboxer.Spec {
				return order(id, o, func(s *sandboxer.Spec) { s.Image = image })
			}
			if got := run(t, e, up(t, e, of("layout", "oci:"+marked+":v1")), "pwd; id -un"); got != "/srv/app\nnobody" {
				t.Errorf("of a layout: %q", got)
			}
			mark("one")
			h := up(t, e, of("root", "dir:"+root))
			if got := run(t, e, h, "cat /link; stat -c ' %U %a' /mark"); got != "one nobody 640" {
				t.Errorf("of a root: %q", got)
			}
			mark("changed")
			if got := run(t, e, up(t, e, of("changed", "dir:"+root)), "cat /mark"); got != "changed" {
				t.Errorf("of a root that has changed: %q", got)
			}
			for _, image := range []string{"dir:" + root, "oci:" + marked} {
				s := of("none", image)
				s.Vouched = nil
				wantKind(t, e.Admit(s, "image"), sandboxer.Denied, "administrator")
			}
			for _, image := range []string{"dir:/", "dir:root", "dir:" + root + "/mark", "oci:" + dir + "/missing:v1", "tar:" + root} {
				wantKind(t, e.check(of("none", image)), sandboxer.Invalid, image)
			}
			_, err := e.Provision(t.Context(), of("none", "oci:"+marked+":v2"))
			wantKind(t, err, sandboxer.Failed, "0 images match")
			for _, id := range []string{"layout", "root", "changed"} {
				if _, err := e.Teardown(t.Context(), sandboxer.Handle{SandboxID: id}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := e.PruneCaches(context.WithoutCancel(t.Context()), ""); err != nil {
				t.Error(err)
			}
		})
	}
}
