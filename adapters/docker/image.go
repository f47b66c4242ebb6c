package docker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/images"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/usernet"
)

// openImages opens the store of images. The server fetches them, by the same rules as for sandboxes on this machine; engines only
// provide the images that they have. In addition to the names of images.Split there is engine:NAME, an image that the engine has.
func (e *extension) openImages() (err error) {
	c := e.cfg.Images
	never, err := c.never()
	if err != nil {
		return err
	}
	e.images, err = images.New(e.dir("image"), images.Options{
		Settings: c.Settings, Keep: c.Keep, Limits: images.Limits{Download: c.MaxDownload, Unpacked: c.MaxDownload, Entries: maxDirEntries},
		InUse: func() (map[string]bool, error) { return nil, nil }, // engines have the images that they use
		Reach: usernet.Public(never),
	})
	if err == nil {
		e.pruneStore()
	}
	return err
}

func (e *extension) pruneStore() {
	if _, err := e.images.Prune(); err != nil {
		e.log.Warn("images could not be pruned", "extension", e.env.Extension, "err", err)
	}
}

// maxDirEntries is how many files, directories and links an image directory may have.
const maxDirEntries = 1 << 20

// checkImage checks the name of an image, without a call.
func (e *extension) checkImage(ref string, vouched bool) error {
	name, ok := strings.CutPrefix(ref, "engine:")
	if !ok {
		return e.images.CheckName(ref, vouched)
	}
	if !engineImage(name) {
		return sandboxer.E(sandboxer.Invalid, nil, "image %q: %q cannot be the name of an image", ref, name)
	}
	return nil
}

// engineImage reports whether name can be part of a request's path: the name of an image must not change the
// request.
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

// repo names our images on engines. No registry has that name.
func (e *extension) repo(what string) string {
	sum := sha256.Sum256([]byte(e.env.Owner + "\x00" + e.env.Extension))
	return "localhost/sandboxer-" + what + "/" + hex.EncodeToString(sum[:])[:12]
}

// An image is one that an engine has.
type image struct {
	engine.APIImage
	pinned string // for users
}

// image makes sure that the engine has an image, and returns its description there. The caller holds the host's lock, shared.
// Kinds: those of the image store; Failed for one that the engine does not have, or that cannot run there.
func (e *extension) image(ctx context.Context, h *host, info engine.Info, ref string, vouched bool) (*image, error) {
	if err := e.checkImage(ref, vouched); err != nil {
		return nil, err
	}
	if rest, ok := strings.CutPrefix(ref, "engine:"); ok {
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
	release, err := e.images.Hold(ctx)
	if err != nil {
		return nil, err
	}
	grown := false
	defer func() {
		release()
		if grown {
			e.pruneStore()
		}
	}()
	src, err := e.images.Open(ctx, ref, e.images.Access(vouched))
	if err != nil {
		return nil, err
	}
	name := e.repo("image") + ":" + tag(src)
	unlock, err := e.images.Lock(ctx, "load-"+h.name+"-"+tag(src))
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
	img := &image{i, src.Pinned}
	if img.pinned == "" && strings.HasPrefix(src.ID, "sha256:") { // an image from files
		img.pinned = src.ID
	}
	return img, img.usable(ref, info)
}

// usable refuses an image that cannot run.
func (i *image) usable(ref string, info engine.Info) error {
	if i.Os != "" && i.Os != "linux" || i.Architecture != "" && info.Arch() != "" && i.Architecture != info.Arch() {
		return sandboxer.E(sandboxer.Failed, nil, "image %q is for %s/%s; the engine runs linux/%s", ref, i.Os, i.Architecture, info.Arch())
	}
	return inside.CheckImageEnv(ref, i.Config.Env)
}

// tag names an image that is loaded: a caller that can name the configuration of a private image has not fetched it.
func tag(src *images.Source) string {
	t := strings.TrimPrefix(src.ID, "sha256:")[:32]
	if src.Public {
		return t + "-public"
	}
	return t
}

// load loads an image into an engine, under a name.
func (e *extension) load(ctx context.Context, h *host, name string, src *images.Source) error {
	archive, err := src.Archive(ctx)
	if err != nil {
		return err
	}
	defer archive.Close()
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "loading the image into " + h.name})
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := archive.Write(w, name)
		w.CloseWithError(err)
		packed <- err
	}()
	err = h.api.LoadImage(ctx, r)
	r.Close() // if the engine stopped reading, the packer must not wait for it
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return sandboxer.E(sandboxer.Failed, perr, "the image cannot be read whole: %v", perr)
	}
	return err
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
func (e *extension) Caches(ctx context.Context, name string) ([]sandboxer.Cache, error) {
	return e.ofHosts(name, func(h *host) ([]sandboxer.Cache, error) { return e.loaded(ctx, h) })
}

// PruneCaches implements sandboxer.Cacher: it removes loaded images that no container uses.
func (e *extension) PruneCaches(ctx context.Context, name string) ([]sandboxer.Cache, error) {
	return e.ofHosts(name, func(h *host) ([]sandboxer.Cache, error) { return e.pruneImages(ctx, h) })
}

// ofHosts returns the answers of one host or of all; nothing for a host of another extension.
func (e *extension) ofHosts(name string, of func(*host) ([]sandboxer.Cache, error)) ([]sandboxer.Cache, error) {
	at, err := e.where(name)
	if err != nil {
		return nil, nil
	}
	all, silent := hosts.Ask(at, of)
	return all, silent.Err()
}

// pruneImages removes loaded images that no container uses from an engine.
func (e *extension) pruneImages(ctx context.Context, h *host) (gone []sandboxer.Cache, err error) {
	unlock, err := e.env.Notes.Lock(ctx, "host-"+h.name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return e.pruneLocked(ctx, h, 0)
}

// pruneLocked removes images until at most keep bytes of them are left, the oldest first. The caller holds the host's lock.
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
		case "":
			gone = append(gone, c)
			total -= c.Bytes
		case sandboxer.Conflict: // a sandbox uses it
		default:
			return gone, err
		}
	}
	return gone, nil
}
