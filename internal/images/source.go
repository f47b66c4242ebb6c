//go:build linux

package images

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// Split parses the name of an image. Its kind is dir, oci or tar for a path of this machine, which may be followed by
// a tag, and empty for a reference to an image of a registry:
//
//	dir:/path                 a root directory
//	oci:/path[:tag]           an OCI image layout
//	tar:/path                 a tar made by "docker save", with one image in it
//	registry/name:tag@digest  an image of a registry
func Split(ref string) (kind, path, tag string) {
	kind, path, _ = strings.Cut(ref, ":")
	switch kind {
	case "dir", "tar":
		return kind, path, ""
	case "oci":
		if i := strings.LastIndex(path, ":"); i > strings.LastIndex(path, "/") {
			path, tag = path[:i], path[i+1:]
		}
		return kind, path, tag
	}
	return "", ref, ""
}

// CheckName says what is wrong with the name of an image, without any request. vouched says that an administrator or a
// profile names it. Kinds: Invalid; Denied.
func (s *Store) CheckName(ref string, vouched bool) error {
	kind, p, _ := Split(ref)
	if kind == "" {
		return s.Check(ref, s.Access(vouched))
	}
	if !vouched {
		return sandboxer.E(sandboxer.Denied, nil, "image %q is a path on the broker's machine, which only an administrator may use", ref).
			WithHint("use an image of a registry")
	}
	if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" {
		return sandboxer.E(sandboxer.Invalid, nil, "image %q: want a clean absolute path after %s:", ref, kind)
	}
	fi, err := os.Stat(p)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return sandboxer.E(sandboxer.Invalid, err, "image %q: %s does not exist on this machine", ref, p)
	case err != nil:
		return sandboxer.E(sandboxer.Invalid, err, "image %q: %s cannot be read on this machine", ref, p)
	case fi.IsDir() != (kind != "tar") || !fi.IsDir() && !fi.Mode().IsRegular():
		return sandboxer.E(sandboxer.Invalid, nil, "image %q: %s is not the kind of file that %s: needs", ref, p, kind)
	}
	return nil
}

// A Source is an image that was found: what identifies its content, its configuration, and how to read it.
type Source struct {
	ID     string // digest of the configuration, or of what a directory has
	Pinned string // the reference with its digest, if it is of a registry
	Public bool   // fetched with public access
	Config v1.Config

	store *Store
	ref   string
	dir   string   // of a root directory
	image *Image   // of a registry
	file  v1.Image // of a layout or a tar
}

// Open finds an image, whose name CheckName accepts. Kinds: those of Find; Failed for an unusable image.
func (s *Store) Open(ctx context.Context, ref string, access Access) (*Source, error) {
	kind, p, tag := Split(ref)
	src := &Source{store: s, ref: ref}
	var err error
	switch kind {
	case "":
		img, err := s.Find(ctx, ref, access)
		if err != nil {
			return nil, err
		}
		src.image, src.ID, src.Pinned, src.Public, src.Config = img, img.ConfigID, img.Pinned(), access == Public, img.Config.Config
		return src, nil
	case "dir":
		src.dir = p
		src.ID, err = DirDigest(p, s.opts.Limits.Entries)
		return src, src.cannot(err)
	case "oci":
		src.file, err = FromLayout(p, tag)
	default:
		if src.file, err = tarball.ImageFromPath(p, nil); err != nil {
			err = fmt.Errorf("not a saved image with exactly one image in it: %w", err)
		}
	}
	if err != nil {
		return nil, src.cannot(err)
	}
	digest, err := src.file.ConfigName() // covers the layers' content, unlike a tar's name
	if err != nil {
		return nil, src.cannot(err)
	}
	cf, err := src.file.ConfigFile()
	if err != nil {
		return nil, src.cannot(err)
	}
	src.ID, src.Config = digest.String(), cf.Config
	return src, nil
}

// cannot returns err, of reading the image, with a kind.
func (src *Source) cannot(err error) error {
	var se *sandboxer.Error
	kind := sandboxer.Failed
	switch {
	case err == nil, errors.As(err, &se), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		kind = sandboxer.Exhausted
	}
	return sandboxer.E(kind, err, "image %q cannot be used: %v", src.ref, err)
}

// Tree is the image as one tree. If a stored layer was damaged since it was fetched, it is fetched once more.
func (src *Source) Tree(ctx context.Context) (*Tree, error) {
	limits := src.store.opts.Limits
	switch {
	case src.dir != "":
		t := NewTree(limits)
		return t, t.AddDir(ctx, src.dir)
	case src.file != nil:
		layers, err := src.fileLayers()
		if err != nil {
			return nil, err
		}
		t := NewTree(limits)
		return t, t.AddLayers(ctx, src.ref, layers)
	}
	for again := false; ; again = true {
		paths, err := src.store.Pull(ctx, src.image)
		if err != nil {
			return nil, err
		}
		t := NewTree(limits)
		err = t.AddLayers(ctx, src.ref, src.image.Layers(paths))
		if err == nil || again || ctx.Err() != nil {
			return t, err
		}
		if mended, merr := src.image.Mend(paths); merr != nil || !mended {
			return nil, errors.Join(err, merr)
		}
	}
}

func (src *Source) fileLayers() ([]Layer, error) {
	cf, err := src.file.ConfigFile()
	if err != nil {
		return nil, err
	}
	all, err := src.file.Layers()
	if err != nil {
		return nil, err
	}
	if len(all) != len(cf.RootFS.DiffIDs) {
		return nil, fmt.Errorf("it has %d layers, its configuration says %d", len(all), len(cf.RootFS.DiffIDs))
	}
	layers := make([]Layer, len(all))
	for i, l := range all {
		layers[i] = Layer{Open: l.Uncompressed, DiffID: cf.RootFS.DiffIDs[i].String()}
	}
	return layers, nil
}

// An Archive is an image that can be written in the form of "docker save". Close must be called.
type Archive struct {
	config []byte
	layers []archived
	temp   *os.File // nil for none
}

type archived struct {
	size int64 // negative: it has to be counted
	open func() (io.ReadCloser, error)
}

// Archive brings the image here, so that it can be written.
func (src *Source) Archive(ctx context.Context) (_ *Archive, err error) {
	a := &Archive{}
	switch {
	case src.dir != "":
		err = a.addDir(ctx, src.store, src.dir)
	case src.file != nil:
		var layers []Layer
		if layers, err = src.fileLayers(); err == nil {
			a.config, err = src.file.RawConfigFile()
		}
		for _, l := range layers {
			a.layers = append(a.layers, archived{-1, l.Open})
		}
	default:
		paths, err := src.store.Pull(ctx, src.image)
		if err != nil {
			return nil, err
		}
		a.config = src.image.Raw
		for i, l := range src.image.Layers(paths) {
			layer := archived{-1, l.Open}
			if fi, err := os.Stat(paths[i]); err == nil && gzipped(paths[i]) { // every engine takes that as it is
				layer = archived{fi.Size(), func() (io.ReadCloser, error) { return os.Open(paths[i]) }}
			}
			a.layers = append(a.layers, layer)
		}
	}
	if err != nil {
		a.Close()
		return nil, src.cannot(err)
	}
	return a, nil
}

// addDir packs a root directory as the one layer.
func (a *Archive) addDir(ctx context.Context, s *Store, dir string) (err error) {
	if a.temp, err = os.CreateTemp(s.dir, "dir-*"); err != nil {
		return err
	}
	if err := os.Remove(a.temp.Name()); err != nil { // it ends with this process, if not before
		return err
	}
	sum := sha256.New()
	err = TarDir(ctx, io.MultiWriter(a.temp, sum), dir, s.opts.Limits)
	size, serr := a.temp.Seek(0, io.SeekCurrent)
	var jerr error
	a.config, jerr = json.Marshal(v1.ConfigFile{Architecture: goarch, OS: "linux",
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}}}})
	a.layers = []archived{{size, func() (io.ReadCloser, error) { return io.NopCloser(io.NewSectionReader(a.temp, 0, size)), nil }}}
	return cmp.Or(ctx.Err(), err, serr, jerr)
}

// Close releases the archive's resources.
func (a *Archive) Close() {
	if a.temp != nil {
		a.temp.Close()
	}
}

// Write writes the image, under a name.
func (a *Archive) Write(to io.Writer, name string) error {
	w := tar.NewWriter(to)
	put := func(file string, size int64, r io.Reader) error {
		if err := w.WriteHeader(&tar.Header{Name: file, Typeflag: tar.TypeReg, Mode: 0o644, Size: size}); err != nil {
			return err
		}
		_, err := io.Copy(w, r)
		return err
	}
	config := strings.TrimPrefix(digestOf(a.config), "sha256:") + ".json"
	manifest := []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}{{Config: config, RepoTags: []string{name}, Layers: []string{}}}
	if err := put(config, int64(len(a.config)), bytes.NewReader(a.config)); err != nil {
		return err
	}
	for i, l := range a.layers {
		file := fmt.Sprintf("%04d.tar", i)
		manifest[0].Layers = append(manifest[0].Layers, file)
		if l.size < 0 {
			n, err := l.read(io.Discard)
			if err != nil {
				return err
			}
			l.size = n
		}
		if err := w.WriteHeader(&tar.Header{Name: file, Typeflag: tar.TypeReg, Mode: 0o644, Size: l.size}); err != nil {
			return err
		}
		if _, err := l.read(w); err != nil {
			return err
		}
	}
	data, err := json.Marshal(manifest)
	if err == nil {
		err = put("manifest.json", int64(len(data)), bytes.NewReader(data))
	}
	return errors.Join(err, w.Close())
}

func (l archived) read(to io.Writer) (int64, error) {
	r, err := l.open()
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(to, r)
	return n, errors.Join(err, r.Close())
}

func gzipped(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var head [2]byte
	_, err = io.ReadFull(f, head[:])
	return err == nil && head == [2]byte{0x1f, 0x8b}
}
