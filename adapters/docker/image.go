package docker

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
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// An imageStore brings images to engines. It is the server that fetches them, by the same rules as
// for sandboxes on this machine; engines are asked for nothing but what they have.
//
//	engine:NAME               an image that the engine has
//	dir:/path                 a root directory
//	oci:/path[:tag]           an OCI image layout
//	tar:/path                 a tar made by "docker save" with one image in it
//	registry/name:tag@digest  an image of a registry
type imageStore struct {
	dir   string
	store *images.Store
	never []netip.Prefix
}

func (e *extension) newImageStore() (*imageStore, error) {
	c := e.cfg.Images
	never, err := c.never()
	if err != nil {
		return nil, err
	}
	s := &imageStore{dir: e.dir("image"), never: never}
	s.store, err = images.New(e.dir("image"), images.Options{
		Policy: images.Policy(c.Pull), Registries: c.Registries, Insecure: c.Insecure, Mirrors: c.Mirrors, Keep: c.Keep,
		Limits: images.Limits{Download: c.MaxDownload},
		InUse:  func() (map[string]bool, error) { return nil, nil }, // engines have what they use
		Reach:  s.reachesForAnybody,
	})
	if err != nil {
		return nil, err
	}
	if _, err := s.store.Prune(); err != nil {
		e.log.Warn("images could not be pruned", "extension", e.env.Extension, "err", err)
	}
	return s, nil
}

// reachesForAnybody reports whether the server may connect to a at the wish of anybody.
func (s *imageStore) reachesForAnybody(a netip.Addr) bool {
	return sandboxer.PublicAddr(a) && !usernet.OwnAddr(a) && !slices.ContainsFunc(s.never, func(p netip.Prefix) bool { return p.Contains(a) })
}

// splitImage tells an image's kind, "" for one of a registry, and what follows it.
func splitImage(ref string) (kind, rest string) {
	for _, k := range []string{"engine", "dir", "oci", "tar"} {
		if rest, ok := strings.CutPrefix(ref, k+":"); ok {
			return k, rest
		}
	}
	return "", ref
}

// check says what is wrong with a reference, without asking anybody.
func (s *imageStore) check(ref string, vouched bool) error {
	kind, rest := splitImage(ref)
	switch kind {
	case "":
		return s.store.Check(ref, s.store.Access(vouched))
	case "engine":
		if !engineImage(rest) {
			return sandboxer.E(sandboxer.Invalid, nil, "image %q: %q cannot be the name of an image", ref, rest)
		}
		return nil
	}
	what := "file"
	switch kind {
	case "dir":
		what = "directory"
	case "oci":
		rest, _ = splitLayout(rest)
		what = "directory"
	}
	if !filepath.IsAbs(rest) || filepath.Clean(rest) != rest || rest == "/" {
		return sandboxer.E(sandboxer.Invalid, nil, "image %q: a clean absolute path follows %s:", ref, kind)
	}
	if fi, err := os.Stat(rest); err != nil || !fi.Mode().IsRegular() && !fi.IsDir() || fi.IsDir() != (what == "directory") {
		return sandboxer.E(sandboxer.Invalid, err, "image %q: there is no such %s on the server's machine", ref, what)
	}
	return nil
}

// splitLayout takes a tag off the path of an OCI image layout.
func splitLayout(p string) (dir, tag string) {
	if i := strings.LastIndex(p, ":"); i > strings.LastIndex(p, "/") {
		return p[:i], p[i+1:]
	}
	return p, ""
}

// engineImage reports whether name can be part of a request's path: whoever names an image says nothing
// else to the engine.
func engineImage(name string) bool {
	if name == "" || len(name) > 512 || strings.Contains(name, "//") || strings.HasPrefix(name, "/") || strings.HasSuffix(name, "/") {
		return false
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == "." || part == ".." {
			return false
		}
	}
	return !strings.ContainsFunc(name, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-/:@", r))
	})
}

// repo is where names of our images on engines are. None of a registry is there.
func (e *extension) repo(what string) string {
	sum := sha256.Sum256([]byte(e.env.Owner + "\x00" + e.env.Extension))
	return "localhost/sandboxer-" + what + "/" + hex.EncodeToString(sum[:])[:12]
}

// An image is one that an engine has.
type image struct {
	engine.APIImage
	pinned string // for people
}

// image has the engine have an image, and returns what it is there. The caller holds the host's lock, shared. Kinds: those of
// the image store; Failed for one that the engine does not have, or that cannot run there.
func (e *extension) image(ctx context.Context, h *host, info engine.Info, ref string, vouched bool) (*image, error) {
	if err := e.images.check(ref, vouched); err != nil {
		return nil, err
	}
	kind, rest := splitImage(ref)
	if kind == "engine" {
		i, err := h.api.InspectImage(ctx, rest)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			return nil, sandboxer.E(sandboxer.Failed, err, "image %q: the engine %s does not have it", ref, h.name)
		}
		img := &image{i, i.ID}
		if err != nil {
			return nil, err
		}
		return img, img.usable(ref, info)
	}
	if info.Arch() != runtime.GOARCH {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "image %q: the server fetches images for linux/%s, and the engine %s runs linux/%s", ref, runtime.GOARCH, h.name, info.Arch()).
			WithHint("name one that the engine has: engine:NAME")
	}
	release, err := e.images.store.Hold(ctx)
	if err != nil {
		return nil, err
	}
	grown := false
	defer func() {
		release()
		if grown {
			if _, err := e.images.store.Prune(); err != nil {
				e.log.Warn("images could not be pruned", "extension", e.env.Extension, "err", err)
			}
		}
	}()
	src, err := e.images.open(ctx, ref, kind, rest, vouched)
	if err != nil {
		return nil, err
	}
	name := e.repo("image") + ":" + src.tag()
	unlock, err := e.images.store.Lock(ctx, "load-"+h.name+"-"+src.tag())
	if err != nil {
		return nil, err
	}
	defer unlock()
	i, err := h.api.InspectImage(ctx, name)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		grown = true
		if err := e.load(ctx, h, name, src); err != nil {
			return nil, err
		}
		if i, err = h.api.InspectImage(ctx, name); err == nil {
			e.sweepSoon(h)
		}
	}
	if err != nil {
		return nil, err
	}
	img := &image{i, src.pinned}
	return img, img.usable(ref, info)
}

// usable refuses what cannot run.
func (i *image) usable(ref string, info engine.Info) error {
	if i.Os != "" && i.Os != "linux" || i.Architecture != "" && info.Arch() != "" && i.Architecture != info.Arch() {
		return sandboxer.E(sandboxer.Failed, nil, "image %q is for %s/%s; the engine runs linux/%s", ref, i.Os, i.Architecture, info.Arch())
	}
	for _, kv := range i.Config.Env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" || strings.HasPrefix(k, agentEnvPrefix) {
			return sandboxer.E(sandboxer.Failed, nil, "image %q: its environment variable %q is not possible", ref, k)
		}
	}
	return nil
}

// imageSource is what is loaded.
type imageSource struct {
	id     string // digest of the configuration, or of what it is made from
	public bool   // fetched as anybody could
	pinned string
	// parts are what it consists of, which is closed when it was loaded.
	parts func(context.Context) (imageParts, error)
}

type imageParts struct {
	config []byte
	layers []layer
	close  func() // nil for nothing
}

// tag names what was loaded: who can name the configuration of a private image has not fetched it.
func (s imageSource) tag() string {
	t := strings.TrimPrefix(s.id, "sha256:")[:32]
	if s.public {
		return t + "-public"
	}
	return t
}

// A layer is one of an image, as docker load takes it.
type layer struct {
	size int64 // negative: it has to be counted
	open func() (io.ReadCloser, error)
}

func (s *imageStore) open(ctx context.Context, ref, kind, rest string, vouched bool) (imageSource, error) {
	switch kind {
	case "dir":
		return s.ofDir(ref, rest)
	case "oci":
		dir, tag := splitLayout(rest)
		img, err := images.FromLayout(dir, tag)
		if err != nil {
			return imageSource{}, sandboxer.E(sandboxer.Failed, err, "image %q cannot be used: %v", ref, err)
		}
		return ofFiles(ref, img)
	case "tar":
		img, err := tarball.ImageFromPath(rest, nil)
		if err != nil {
			return imageSource{}, sandboxer.E(sandboxer.Failed, err, "image %q cannot be used: it is not a saved image with exactly one image in it", ref)
		}
		return ofFiles(ref, img)
	}
	access := s.store.Access(vouched)
	img, err := s.store.Find(ctx, ref, access)
	if err != nil {
		return imageSource{}, err
	}
	return imageSource{id: img.ConfigID, public: access == images.Public, pinned: img.Pinned(), parts: func(ctx context.Context) (imageParts, error) {
		paths, err := s.store.Pull(ctx, img)
		if err != nil {
			return imageParts{}, err
		}
		unpacked := img.Layers(paths)
		out := make([]layer, len(paths))
		for i, p := range paths {
			out[i] = layer{-1, unpacked[i].Open}
			if fi, err := os.Stat(p); err == nil && gzipped(p) { // which every engine takes as it is
				out[i] = layer{fi.Size(), func() (io.ReadCloser, error) { return os.Open(p) }}
			}
		}
		return imageParts{config: img.Raw, layers: out}, nil
	}}, nil
}

// ofFiles is an image in files of the server's machine.
func ofFiles(ref string, img v1.Image) (imageSource, error) {
	failed := func(err error) (imageSource, error) {
		return imageSource{}, sandboxer.E(sandboxer.Failed, err, "image %q cannot be used: %v", ref, err)
	}
	id, err := img.ConfigName()
	if err != nil {
		return failed(err)
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return failed(err)
	}
	return imageSource{id: id.String(), pinned: id.String(), parts: func(context.Context) (imageParts, error) {
		all, err := img.Layers()
		out := make([]layer, len(all))
		for i, l := range all {
			out[i] = layer{-1, l.Uncompressed}
		}
		return imageParts{config: config, layers: out}, err
	}}, nil
}

// maxDirEntries is how many files, directories and links a directory may have that is an image.
const maxDirEntries = 1 << 20

// ofDir is a root directory of the server's machine, as an image of one layer without a configuration.
func (s *imageStore) ofDir(ref, dir string) (imageSource, error) {
	failed := func(err error) error {
		kind := sandboxer.Failed
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			kind = sandboxer.Exhausted
		}
		return sandboxer.E(kind, err, "image %q cannot be used: %v", ref, err)
	}
	digest, err := images.DirDigest(dir, maxDirEntries)
	if err != nil {
		return imageSource{}, failed(err)
	}
	return imageSource{id: digest, parts: func(ctx context.Context) (imageParts, error) {
		f, err := os.CreateTemp(s.dir, "dir-*")
		if err == nil {
			err = os.Remove(f.Name()) // it ends with this process, if not before
		}
		if err != nil {
			return imageParts{}, failed(err)
		}
		sum := sha256.New()
		err = images.TarDir(ctx, io.MultiWriter(f, sum), dir, images.Limits{Unpacked: s.store.Limits().Download, Entries: maxDirEntries})
		size, serr := f.Seek(0, io.SeekCurrent)
		config, jerr := json.Marshal(v1.ConfigFile{Architecture: runtime.GOARCH, OS: "linux",
			RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}}}})
		if err = cmp.Or(ctx.Err(), err, serr, jerr); err != nil {
			f.Close()
			if ctx.Err() != nil {
				return imageParts{}, err
			}
			return imageParts{}, failed(err)
		}
		return imageParts{config: config, close: func() { f.Close() }, layers: []layer{{size, func() (io.ReadCloser, error) {
			return io.NopCloser(io.NewSectionReader(f, 0, size)), nil
		}}}}, nil
	}}, nil
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

// load loads an image into an engine, under a name.
func (e *extension) load(ctx context.Context, h *host, name string, src imageSource) error {
	parts, err := src.parts(ctx)
	if err != nil {
		return err
	}
	if parts.close != nil {
		defer parts.close()
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "loading the image into " + h.name})
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := writeImage(w, name, parts)
		w.CloseWithError(err)
		packed <- err
	}()
	err = h.api.LoadImage(ctx, r)
	r.Close() // if the engine left early, the packer must not wait for it
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return sandboxer.E(sandboxer.Failed, perr, "the image cannot be read whole: %v", perr)
	}
	return err
}

// writeImage writes an image in the form of docker save.
func writeImage(to io.Writer, name string, parts imageParts) error {
	w := tar.NewWriter(to)
	put := func(file string, size int64, r io.Reader) error {
		if err := w.WriteHeader(&tar.Header{Name: file, Typeflag: tar.TypeReg, Mode: 0o644, Size: size}); err != nil {
			return err
		}
		_, err := io.Copy(w, r)
		return err
	}
	sum := sha256.Sum256(parts.config)
	config := hex.EncodeToString(sum[:]) + ".json"
	manifest := []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}{{Config: config, RepoTags: []string{name}, Layers: []string{}}}
	if err := put(config, int64(len(parts.config)), bytes.NewReader(parts.config)); err != nil {
		return err
	}
	for i, l := range parts.layers {
		file := fmt.Sprintf("%04d.tar", i)
		manifest[0].Layers = append(manifest[0].Layers, file)
		if l.size < 0 {
			n, err := l.count()
			if err != nil {
				return err
			}
			l.size = n
		}
		r, err := l.open()
		if err != nil {
			return err
		}
		err = put(file, l.size, r)
		if err = errors.Join(err, r.Close()); err != nil {
			return err
		}
	}
	data, err := json.Marshal(manifest)
	if err == nil {
		err = put("manifest.json", int64(len(data)), bytes.NewReader(data))
	}
	return errors.Join(err, w.Close())
}

func (l layer) count() (int64, error) {
	r, err := l.open()
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(io.Discard, r)
	return n, errors.Join(err, r.Close())
}

// loaded lists the images that were loaded into an engine.
func (e *extension) loaded(ctx context.Context, h *host) ([]sandboxer.Cache, error) {
	list, err := h.api.ListImages(ctx, e.repo("image"), nil)
	var all []sandboxer.Cache
	for _, i := range list {
		for _, t := range i.RepoTags {
			if tag, ok := strings.CutPrefix(t, e.repo("image")+":"); ok {
				all = append(all, sandboxer.Cache{Host: h.name, Name: "image/" + tag, Bytes: i.Size, UsedAt: time.Unix(i.Created, 0)})
			}
		}
	}
	return all, err
}

// Caches implements sandboxer.Cacher: the images that were loaded into engines.
func (e *extension) Caches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	hosts, err := e.where(sandboxer.Handle{Host: host})
	if err != nil {
		return nil, nil // it is no host of this extension's
	}
	var all []sandboxer.Cache
	var errs []error
	for _, h := range hosts {
		list, err := e.loaded(ctx, h)
		all, errs = append(all, list...), append(errs, err)
	}
	return all, errors.Join(errs...)
}

// PruneCaches implements sandboxer.Cacher: of them those that no container is made of.
func (e *extension) PruneCaches(ctx context.Context, host string) ([]sandboxer.Cache, error) {
	hosts, err := e.where(sandboxer.Handle{Host: host})
	if err != nil {
		return nil, nil // it is no host of this extension's
	}
	var gone []sandboxer.Cache
	var errs []error
	for _, h := range hosts {
		removed, err := e.pruneImages(ctx, h, 0)
		gone, errs = append(gone, removed...), append(errs, err)
	}
	return gone, errors.Join(errs...)
}

// pruneImages removes images that were loaded into an engine and that no container is made of, until
// there are no more than keep bytes of them, the oldest first.
func (e *extension) pruneImages(ctx context.Context, h *host, keep int64) (gone []sandboxer.Cache, err error) {
	l, err := e.lock(ctx, "host-"+h.name, filelock.Exclusive)
	if err != nil {
		return nil, err
	}
	defer l.Release()
	return e.pruneLocked(ctx, h, keep)
}

func (e *extension) pruneLocked(ctx context.Context, h *host, keep int64) (gone []sandboxer.Cache, err error) {
	list, err := e.loaded(ctx, h)
	if err != nil {
		return nil, err
	}
	var total int64
	for _, c := range list {
		total += c.Bytes
	}
	slices.SortFunc(list, func(a, b sandboxer.Cache) int { return a.UsedAt.Compare(b.UsedAt) })
	for _, c := range list {
		if total <= keep {
			break
		}
		err := h.api.RemoveImage(ctx, e.repo("image")+":"+strings.TrimPrefix(c.Name, "image/"))
		switch sandboxer.KindOf(err) {
		case "", sandboxer.NotFound:
			gone = append(gone, c)
			total -= c.Bytes
		case sandboxer.Conflict: // a sandbox is made of it
		default:
			return gone, err
		}
	}
	return gone, nil
}
