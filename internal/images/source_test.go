//go:build linux

package images

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/sand-boxer/sandboxer"
)

// TestArchive: what is of this machine is written in the form of "docker save", which reads as the same image.
func TestArchive(t *testing.T) {
	s, err := New(filepath.Join(t.TempDir(), "store"), Options{Limits: Limits{Download: 1 << 20, Unpacked: 1 << 20, Entries: 100}, Reach: func(netip.Addr) bool { return false }})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	root, ofLayout := filepath.Join(dir, "root"), filepath.Join(dir, "layout")
	img, err := random.Image(100, 2)
	if err != nil {
		t.Fatal(err)
	}
	p, err := layout.Write(ofLayout, empty.Index)
	if err == nil {
		err = errors.Join(p.AppendImage(img), os.Mkdir(root, 0o755), os.WriteFile(filepath.Join(root, "a"), []byte("text"), 0o644))
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"dir:" + root, "oci:" + ofLayout} {
		if err := s.CheckName(ref, false); sandboxer.KindOf(err) != sandboxer.Denied {
			t.Errorf("%s, for everybody: %v; want an error of the kind Denied", ref, err)
		}
		if err := s.CheckName(ref, true); err != nil {
			t.Error(err)
		}
		src, err := s.Open(t.Context(), ref, Operator)
		if err != nil {
			t.Fatal(err)
		}
		a, err := src.Archive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := a.Write(&out, "localhost/x:1"); err != nil {
			t.Fatal(err)
		}
		a.Close()
		back, err := tarball.Image(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(out.Bytes())), nil }, nil)
		if err != nil {
			t.Fatal(err)
		}
		if id, err := back.ConfigName(); err != nil || strings.HasPrefix(ref, "oci:") && id.String() != src.ID {
			t.Errorf("%s: it came back as %s, not %s: %v", ref, id, src.ID, err)
		}
		layers, err := back.Layers()
		if err != nil || len(layers) == 0 {
			t.Fatal(len(layers), err)
		}
		if strings.HasPrefix(ref, "dir:") {
			r, err := layers[0].Uncompressed()
			if err != nil {
				t.Fatal(err)
			}
			found := false
			for tr := tar.NewReader(r); ; {
				h, err := tr.Next()
				if err != nil {
					break
				}
				found = found || strings.Trim(h.Name, "./") == "a"
			}
			if !found {
				t.Error("the file of the directory is not in the layer")
			}
		}
		var manifest []struct{ RepoTags []string }
		for tr := tar.NewReader(&out); ; {
			h, err := tr.Next()
			if err != nil {
				break
			}
			if h.Name == "manifest.json" {
				err = json.NewDecoder(tr).Decode(&manifest)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if len(manifest) != 1 || len(manifest[0].RepoTags) != 1 || manifest[0].RepoTags[0] != "localhost/x:1" {
			t.Errorf("%s: names %v", ref, manifest)
		}
	}
	for _, ref := range []string{"dir:/", "dir:root", "dir:" + root + "/a", "oci:" + dir + "/missing:v1", "tar:" + root, "tar:/dev/null"} {
		if err := s.CheckName(ref, true); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%s: %v; want an error of the kind Invalid", ref, err)
		}
	}
	if _, err := s.Open(t.Context(), "oci:"+ofLayout+":none", Operator); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("a tag that is not there: %v; want an error of the kind Failed", err)
	}
}
