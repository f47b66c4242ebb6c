//go:build linux

package local

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sand-boxer/sandboxer"
)

// busybox is the only program of the test images: a static one with a shell.
func busybox(t *testing.T) string {
	t.Helper()
	const path = "/usr/bin/busybox"
	if _, err := os.Stat(path); err != nil {
		t.Skipf("no busybox to make an image of: %v (install busybox-static)", err)
	}
	return path
}

// layer makes an image layer of tar headers, with content by name.
func layer(t *testing.T, entries []tar.Header, content map[string][]byte) v1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		h.Size = int64(len(content[h.Name]))
		h.ModTime = time.Unix(1e9, 0)
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content[h.Name]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// testImage has two layers; the second removes and replaces files of the first,
// hard links, owners and a configuration.
func testImage(t *testing.T) v1.Image {
	t.Helper()
	box, err := os.ReadFile(busybox(t))
	if err != nil {
		t.Fatal(err)
	}
	first := layer(t, []tar.Header{
		{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755},
		{Name: "bin/sh", Typeflag: tar.TypeLink, Linkname: "bin/busybox"},
		{Name: "bin/cat", Typeflag: tar.TypeSymlink, Linkname: "busybox"},
		{Name: "bin/stat", Typeflag: tar.TypeLink, Linkname: "bin/busybox"},
		{Name: "bin/ls", Typeflag: tar.TypeSymlink, Linkname: "busybox"},
		{Name: "bin/id", Typeflag: tar.TypeSymlink, Linkname: "busybox"},
		{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "old", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "gone", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "srv/app/", Typeflag: tar.TypeDir, Mode: 0o750, Uid: 70, Gid: 71},
		{Name: "dev/sda", Typeflag: tar.TypeBlock, Mode: 0o600},
	}, map[string][]byte{"bin/busybox": box, "etc/passwd": []byte("root:x:0:0::/root:/bin/sh\napp:x:70:71::/srv/app:/bin/sh\n"), "old": []byte("old"), "gone": []byte("x")})
	second := layer(t, []tar.Header{
		{Name: "old", Typeflag: tar.TypeReg, Mode: 0o600},
		{Name: ".wh.gone", Typeflag: tar.TypeReg},
	}, map[string][]byte{"old": []byte("new")})
	img, err := mutate.AppendLayers(empty.Image, first, second)
	if err != nil {
		t.Fatal(err)
	}
	img, err = mutate.Config(img, v1.Config{Env: []string{"PATH=/bin", "FROM_IMAGE=yes"}, User: "app", WorkingDir: "/srv/app"})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestImages(t *testing.T) {
	e := openTest(t)
	dir := t.TempDir()
	img := testImage(t)
	p, err := layout.Write(filepath.Join(dir, "layout"), empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "v1"})); err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(empty.Image, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "v2"})); err != nil {
		t.Fatal(err)
	}
	saved := filepath.Join(dir, "saved.tar")
	if err := tarball.WriteToFile(saved, name.MustParseReference("test/image:v1"), img); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"oci:" + filepath.Join(dir, "layout") + ":v1", "tar:" + saved} {
		t.Run(ref[:3], func(t *testing.T) {
			h := up(t, e, sandboxer.Spec{Image: ref})
			got := sh(t, e, h, "pwd; id -u; echo $FROM_IMAGE; cat /old 2>&1; ls /gone 2>&1; stat -c %u:%g:%a /srv/app; ls /dev/sda 2>&1 || true")
			want := "/srv/app\n70\nyes\ncat: can't open '/old': Permission denied\nls: /gone: No such file or directory\n70:71:750\nls: /dev/sda: No such file or directory"
			if got != want {
				t.Errorf("inside:\n%s\nwant:\n%s", got, want)
			}
			var out bytes.Buffer
			if _, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", "cat /old; echo changed >/old; cat /old"}, User: "root", Stdout: &out}); err != nil || out.String() != "newchanged\n" {
				t.Errorf("as root: %q %v", out.String(), err)
			}
			other := up(t, e, sandboxer.Spec{Image: ref, User: "root"})
			if got := sh(t, e, other, "cat /old"); got != "new" {
				t.Errorf("a neighbour of the same image reads %q", got)
			}
			if fi, err := e.StatFile(t.Context(), h, "/srv/app"); err != nil || fi.Owner != "app" {
				t.Errorf("StatFile = %+v, %v", fi, err)
			}
		})
	}
	t.Run("dir", func(t *testing.T) {
		root := filepath.Join(dir, "root")
		if err := os.MkdirAll(filepath.Join(root, "bin"), 0o755); err != nil {
			t.Fatal(err)
		}
		box, err := os.ReadFile(busybox(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []string{"sh", "cat", "ls"} {
			if err := os.WriteFile(filepath.Join(root, "bin", n), box, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		mark := filepath.Join(root, "mark")
		if err := os.WriteFile(mark, []byte("one"), 0o644); err != nil {
			t.Fatal(err)
		}
		h := up(t, e, sandboxer.Spec{Image: "dir:" + root})
		if got := sh(t, e, h, "cat /mark; echo x >/mark"); got != "one" {
			t.Errorf("inside: %q", got)
		}
		// The directory itself stays unchanged, without even a mount point.
		if got, _ := os.ReadFile(mark); string(got) != "one" {
			t.Errorf("the original says %q", got)
		}
		if entries, _ := os.ReadDir(root); len(entries) != 2 {
			t.Errorf("the original directory has %v", entries)
		}
		if err := os.WriteFile(mark, []byte("two"), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := sh(t, e, up(t, e, sandboxer.Spec{Image: "dir:" + root}), "cat /mark"); got != "two" {
			t.Errorf("after the directory changed, a new sandbox reads %q", got)
		}
		if got := sh(t, e, h, "cat /mark"); got != "x" {
			t.Errorf("the first sandbox now reads %q", got)
		}
	})
	t.Run("two images, no tag", func(t *testing.T) {
		_, err := e.Provision(t.Context(), sandboxer.Spec{ID: "x", Generation: 1, Owner: ours("test"), Image: "oci:" + filepath.Join(dir, "layout"), Vouched: []string{sandboxer.RestrictedImage}})
		if sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(sandboxer.Message(err), "2 images match") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("disk limit", func(t *testing.T) {
		h := up(t, e, sandboxer.Spec{Image: "tar:" + saved, User: "root", Limits: sandboxer.Limits{DiskBytes: 16 << 20}})
		if got := sh(t, e, h, "busybox dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null; busybox du -k /big | busybox cut -f1"); len(got) > 5 {
			t.Errorf("%s KiB were written; the limit is 16 MiB", got)
		}
	})
}
