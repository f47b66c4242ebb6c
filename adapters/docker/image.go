package docker

import (
	"archive/tar"
	"bytes"
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
//	tar:/path                 a tar made by "docker save" with one image in it
//	registry/name:tag@digest  an image of a registry
type imageStore struct {
	store *images.Store
	never []netip.Prefix
}

func (e *extension) newImageStore() (*imageStore, error) {
	c := e.cfg.Images
	never, err := c.never()
	if err != nil {
		return nil, err
	}
	s := &imageStore{never: never}
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
	for _, k := range []string{"engine", "tar"} {
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
		if strings.HasPrefix(ref, "dir:") || strings.HasPrefix(ref, "oci:") {
			return sandboxer.E(sandboxer.Unsupported, nil, "image %q: engines take no directory as an image", ref).
				WithHint("write registry/name:tag, engine:name of an image that the engine has, or tar:/saved.tar")
		}
		return s.store.Check(ref, s.store.Access(vouched))
	case "engine":
		if !engineImage(rest) {
			return sandboxer.E(sandboxer.Invalid, nil, "image %q: %q cannot be the name of an image", ref, rest)
		}
		return nil
	}
	if !filepath.IsAbs(rest) || filepath.Clean(rest) != rest {
		return sandboxer.E(sandboxer.Invalid, nil, "image %q: a clean absolute path follows %s:", ref, kind)
	}
	if fi, err := os.Stat(rest); err != nil || !fi.Mode().IsRegular() {
		return sandboxer.E(sandboxer.Invalid, err, "image %q: there is no such file on the server's machine", ref)
	}
	return nil
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
	id     string // digest of the configuration
	public bool   // fetched as anybody could
	pinned string
	config []byte
	layers func(context.Context) ([]layer, error)
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
	if kind == "tar" {
		img, err := tarball.ImageFromPath(rest, nil)
		if err != nil {
			return imageSource{}, sandboxer.E(sandboxer.Failed, err, "image %q cannot be used: it is not a saved image with exactly one image in it", ref)
		}
		return ofTar(ref, img)
	}
	access := s.store.Access(vouched)
	img, err := s.store.Find(ctx, ref, access)
	if err != nil {
		return imageSource{}, err
	}
	return imageSource{id: img.ConfigID, public: access == images.Public, pinned: img.Pinned(), config: img.Raw, layers: func(ctx context.Context) ([]layer, error) {
		paths, err := s.store.Pull(ctx, img)
		if err != nil {
			return nil, err
		}
		unpacked := img.Layers(paths)
		out := make([]layer, len(paths))
		for i, p := range paths {
			out[i] = layer{-1, unpacked[i].Open}
			if fi, err := os.Stat(p); err == nil && gzipped(p) { // which every engine takes as it is
				out[i] = layer{fi.Size(), func() (io.ReadCloser, error) { return os.Open(p) }}
			}
		}
		return out, nil
	}}, nil
}

func ofTar(ref string, img v1.Image) (imageSource, error) {
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
	return imageSource{id: id.String(), pinned: id.String(), config: config, layers: func(context.Context) ([]layer, error) {
		all, err := img.Layers()
		out := make([]layer, len(all))
		for i, l := range all {
			out[i] = layer{-1, l.Uncompressed}
		}
		return out, err
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
	layers, err := src.layers(ctx)
	if err != nil {
		return err
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "loading the image into " + h.name})
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := writeImage(w, name, src, layers)
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
func writeImage(to io.Writer, name string, src imageSource, layers []layer) error {
	w := tar.NewWriter(to)
	put := func(file string, size int64, r io.Reader) error {
		if err := w.WriteHeader(&tar.Header{Name: file, Typeflag: tar.TypeReg, Mode: 0o644, Size: size}); err != nil {
			return err
		}
		_, err := io.Copy(w, r)
		return err
	}
	config := strings.TrimPrefix(src.id, "sha256:") + ".json"
	manifest := []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}{{Config: config, RepoTags: []string{name}, Layers: []string{}}}
	if err := put(config, int64(len(src.config)), bytes.NewReader(src.config)); err != nil {
		return err
	}
	for i, l := range layers {
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
