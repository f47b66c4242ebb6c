//go:build linux

package local

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
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/erofs/go-erofs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/local/pause"
)

// An image is a root file system in one EROFS file, read by gVisor itself: it needs
// no file server, and its pages are shared by all sandboxes. Owners are inside the
// file, so that an ordinary user can make one.
type image struct {
	path    string
	env     []string
	user    string
	workdir string
}

// imageStore converts what profiles name as their image, once per content.
//
//	dir:/path          a root directory
//	oci:/path[:tag]    an OCI image layout
//	tar:/path          a tar made by "docker save" or of an OCI layout's image
type imageStore struct {
	dir   string
	agent string

	mu     sync.Mutex
	making map[string]*sync.Mutex
}

// Bounds of an image, against broken and hostile archives.
const (
	maxImageEntries = 2_000_000
	maxImageBytes   = 64 << 30
	maxNameLength   = 4096
)

// empty is the directory that gVisor is told to be the root of a sandbox whose real
// root is an image.
func (s *imageStore) empty() string { return filepath.Join(s.dir, "empty") }

func splitImage(ref string) (kind, p, tag string) {
	kind, p, ok := strings.Cut(ref, ":")
	if !ok {
		return "", ref, ""
	}
	if kind == "oci" {
		if i := strings.LastIndex(p, ":"); i > strings.LastIndex(p, "/") {
			p, tag = p[:i], p[i+1:]
		}
	}
	return kind, p, tag
}

func (s *imageStore) check(ref string) error {
	kind, p, _ := splitImage(ref)
	switch kind {
	case "dir", "oci", "tar":
	default:
		return sandboxer.E(sandboxer.Unsupported, nil, "image %q: this extension takes images from this machine only", ref).
			WithHint("write dir:/root/directory, oci:/layout[:tag] or tar:/saved.tar; save one with: docker save -o saved.tar IMAGE")
	}
	if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" {
		return sandboxer.E(sandboxer.Invalid, nil, "image %q: want a clean absolute path after %s:", ref, kind)
	}
	fi, err := os.Stat(p)
	if err != nil {
		return sandboxer.E(sandboxer.Failed, err, "image %q: %s does not exist on this machine", ref, p)
	}
	if fi.IsDir() != (kind != "tar") {
		return sandboxer.E(sandboxer.Failed, nil, "image %q: %s is not what %s: takes", ref, p, kind)
	}
	return nil
}

// get returns the image for ref, converting it first if its content is new.
func (s *imageStore) get(ctx context.Context, ref string) (*image, error) {
	if err := s.check(ref); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.empty(), 0o755); err != nil {
		return nil, diskError(err, "making the image directory")
	}
	src, err := openImage(ref)
	if err != nil {
		return nil, err
	}
	agent, err := fileDigest(s.agent)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the in-sandbox agent cannot be read")
	}
	sum := sha256.Sum256([]byte(src.digest + "\x00" + agent + "\x00" + string(pause.Program)))
	key := hex.EncodeToString(sum[:])[:32]
	img := &image{path: filepath.Join(s.dir, key+".erofs"), env: src.config.Env, user: src.config.User, workdir: src.config.WorkingDir}

	s.mu.Lock()
	if s.making == nil {
		s.making = map[string]*sync.Mutex{}
	}
	m := s.making[key]
	if m == nil {
		m = &sync.Mutex{}
		s.making[key] = m
	}
	s.mu.Unlock()
	m.Lock()
	defer m.Unlock()
	if _, err := os.Stat(img.path); err == nil {
		return img, nil
	}
	if err := s.convert(ctx, img.path, src); err != nil {
		var se *sandboxer.Error
		switch {
		case errors.As(err, &se), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
			return nil, err
		case errors.Is(err, unix.ENOSPC):
			return nil, diskError(err, "converting image "+ref)
		}
		return nil, sandboxer.E(sandboxer.Failed, err, "image %q cannot be converted: %v", ref, err)
	}
	return img, nil
}

func (s *imageStore) convert(ctx context.Context, to string, src imageSource) (err error) {
	f, err := os.CreateTemp(s.dir, ".new-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	defer f.Close()
	b := &imageBuilder{ctx: ctx, w: erofs.Create(f, erofs.WithTempDir(s.dir)), dirs: map[string]bool{"/": true}, files: map[string]bool{}}
	if err := src.write(b); err != nil {
		return err
	}
	if err := b.finish(s.agent); err != nil {
		return err
	}
	if err := errors.Join(f.Chmod(0o444), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), to)
}

// imageSource is an opened image: what identifies its content, its configuration,
// and how to write it.
type imageSource struct {
	digest string
	config v1.Config
	write  func(*imageBuilder) error
}

func openImage(ref string) (imageSource, error) {
	kind, p, tag := splitImage(ref)
	fail := func(err error) (imageSource, error) {
		return imageSource{}, sandboxer.E(sandboxer.Failed, err, "image %q cannot be read: %v", ref, err)
	}
	if kind == "dir" {
		digest, err := treeDigest(p)
		if err != nil {
			return fail(err)
		}
		return imageSource{digest: digest, write: func(b *imageBuilder) error { return b.addTree(p) }}, nil
	}
	var img v1.Image
	var err error
	if kind == "oci" {
		img, err = fromLayout(p, tag)
	} else if img, err = tarball.ImageFromPath(p, nil); err != nil {
		err = fmt.Errorf("not a saved image with exactly one image in it: %w", err)
	}
	if err != nil {
		return fail(err)
	}
	digest, err := img.ConfigName() // covers the layers' content, unlike a tar's name
	if err != nil {
		return fail(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		return fail(err)
	}
	return imageSource{digest: digest.String(), config: cf.Config, write: func(b *imageBuilder) error { return b.addImage(img) }}, nil
}

// fromLayout picks the image of an OCI layout: the one tagged so, or the only one.
func fromLayout(dir, tag string) (v1.Image, error) {
	idx, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, err
	}
	m, err := idx.IndexManifest()
	if err != nil {
		return nil, err
	}
	var found []v1.Descriptor
	for _, d := range m.Manifests {
		if d.MediaType.IsImage() && (tag == "" || d.Annotations["org.opencontainers.image.ref.name"] == tag) {
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%d images match; name one as oci:%s:TAG", len(found), dir)
	}
	return idx.Image(found[0].Digest)
}

// imageBuilder writes an EROFS image entry by entry.
type imageBuilder struct {
	ctx     context.Context
	w       *erofs.Writer
	dirs    map[string]bool
	files   map[string]bool
	entries int
	bytes   int64
}

func (b *imageBuilder) count(name string, size int64) error {
	b.entries++
	b.bytes += size
	switch {
	case b.entries > maxImageEntries:
		return fmt.Errorf("more than %d entries", maxImageEntries)
	case b.bytes > maxImageBytes:
		return fmt.Errorf("more than %d GiB of content", maxImageBytes>>30)
	case len(name) > maxNameLength:
		return fmt.Errorf("a name of more than %d bytes", maxNameLength)
	}
	return b.ctx.Err()
}

func (b *imageBuilder) mkdir(name string, perm fs.FileMode, uid, gid int, mtime time.Time) error {
	if !b.dirs[name] {
		if err := b.parents(name); err != nil {
			return err
		}
		b.dirs[name] = true
	}
	if err := b.w.Mkdir(name, perm&^fs.ModeType); err != nil {
		return err
	}
	return b.meta(name, perm, uid, gid, mtime)
}

// parents makes the directories above name that no entry named yet.
func (b *imageBuilder) parents(name string) error {
	up := path.Dir(name)
	if b.dirs[up] {
		return nil
	}
	if err := b.parents(up); err != nil {
		return err
	}
	b.dirs[up] = true
	return b.w.Mkdir(up, 0o755)
}

func (b *imageBuilder) meta(name string, mode fs.FileMode, uid, gid int, mtime time.Time) error {
	err := b.w.Chown(name, uid, gid)
	if err == nil {
		err = b.w.Chmod(name, mode)
	}
	if err == nil && !mtime.IsZero() && mtime.Unix() >= 0 {
		err = b.w.Chtimes(name, mtime, mtime)
	}
	return err
}

func (b *imageBuilder) file(name string, mode fs.FileMode, uid, gid int, mtime time.Time, r io.Reader) error {
	if err := b.parents(name); err != nil {
		return err
	}
	f, err := b.w.Create(name)
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, r); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	b.files[name] = true
	return b.meta(name, mode, uid, gid, mtime)
}

// addTree adds a directory of this machine. Devices and sockets are left out; a
// second name of a file becomes a copy.
func (b *imageBuilder) addTree(root string) error {
	return filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		name := path.Join("/", filepath.ToSlash(rel))
		if err := b.count(name, fi.Size()); err != nil {
			return err
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		uid, gid := 0, 0
		if ok && os.Geteuid() == 0 {
			uid, gid = int(st.Uid), int(st.Gid)
		}
		switch {
		case fi.IsDir():
			return b.mkdir(name, fi.Mode().Perm()|fi.Mode()&fs.ModeSticky, uid, gid, fi.ModTime())
		case fi.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			return b.symlink(to, name, uid, gid)
		case fi.Mode().IsRegular():
			f, err := os.Open(p)
			if err != nil {
				return err
			}
			defer f.Close()
			return b.file(name, fi.Mode().Perm(), uid, gid, fi.ModTime(), f)
		}
		return nil
	})
}

func (b *imageBuilder) symlink(to, name string, uid, gid int) error {
	if err := b.parents(name); err != nil {
		return err
	}
	if err := b.w.Symlink(to, name); err != nil {
		return err
	}
	return b.w.Chown(name, uid, gid)
}

// addImage adds an image's layers, flattened. Hard links become copies, which takes
// a second reading of the layers.
func (b *imageBuilder) addImage(img v1.Image) error {
	links := map[string][]*tar.Header{} // target → its other names
	if err := eachEntry(img, func(h *tar.Header, r io.Reader) error {
		name := path.Join("/", h.Name)
		if err := b.count(name, h.Size); err != nil {
			return err
		}
		mode := h.FileInfo().Mode()
		switch h.Typeflag {
		case tar.TypeDir:
			return b.mkdir(name, mode.Perm()|mode&fs.ModeSticky, h.Uid, h.Gid, h.ModTime)
		case tar.TypeReg:
			return b.file(name, mode.Perm(), h.Uid, h.Gid, h.ModTime, r)
		case tar.TypeSymlink:
			return b.symlink(h.Linkname, name, h.Uid, h.Gid)
		case tar.TypeLink:
			target := path.Join("/", h.Linkname)
			links[target] = append(links[target], h)
		}
		return nil // devices have no place in a sandbox
	}); err != nil || len(links) == 0 {
		return err
	}
	err := eachEntry(img, func(h *tar.Header, r io.Reader) error {
		names := links[path.Join("/", h.Name)]
		if len(names) == 0 || h.Typeflag != tar.TypeReg {
			return b.ctx.Err()
		}
		delete(links, path.Join("/", h.Name))
		// One reading serves all names: the first copy is read back for the others.
		for i, l := range names {
			name := path.Join("/", l.Name)
			if err := b.count(name, h.Size); err != nil {
				return err
			}
			src := r
			if i > 0 {
				first, err := b.w.Open(path.Join("/", names[0].Name))
				if err != nil {
					return err
				}
				defer first.Close()
				src = first
			}
			if err := b.file(name, h.FileInfo().Mode().Perm(), h.Uid, h.Gid, h.ModTime, src); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for target := range links {
		return fmt.Errorf("a hard link leads to %s, which is not a file of the image", target)
	}
	return nil
}

func eachEntry(img v1.Image, f func(*tar.Header, io.Reader) error) error {
	rc := mutate.Extract(img)
	defer rc.Close()
	tr := tar.NewReader(rc)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := f(h, tr); err != nil {
			return err
		}
	}
}

// finish adds what every sandbox needs: mount points, name service, the workspace
// and the agent. What the image has is kept, but for the agent.
func (b *imageBuilder) finish(agent string) error {
	for _, d := range []struct {
		name string
		mode fs.FileMode
	}{{"/dev", 0o755}, {"/etc", 0o755}, {"/proc", 0o555}, {"/sys", 0o555}, {"/root", 0o700}, {"/run", 0o755},
		{"/tmp", fs.ModeSticky | 0o777}, {workspaceDefault, 0o755}, {agentDir, 0o755}} {
		if !b.dirs[d.name] {
			if err := b.mkdir(d.name, d.mode, 0, 0, time.Time{}); err != nil {
				return fmt.Errorf("%s: %w", d.name, err)
			}
		}
	}
	passwd, group := "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n", "root:x:0:\nnogroup:x:65534:\n"
	for _, f := range []struct {
		name, content string
		always        bool
	}{
		{"/etc/passwd", passwd, false}, {"/etc/group", group, false}, {tmpKeeper, "", false},
		{"/etc/resolv.conf", "nameserver " + gatewayIP + "\n", true},
		{"/etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost\n", true},
	} {
		if f.always || !b.files[f.name] {
			if err := b.file(f.name, 0o644, 0, 0, time.Time{}, strings.NewReader(f.content)); err != nil {
				return fmt.Errorf("%s: %w", f.name, err)
			}
		}
	}
	a, err := os.Open(agent)
	if err != nil {
		return err
	}
	defer a.Close()
	if err := b.file(agentPath, 0o755, 0, 0, time.Time{}, a); err != nil {
		return err
	}
	if err := b.file(pausePath, 0o755, 0, 0, time.Time{}, bytes.NewReader(pause.Program)); err != nil {
		return err
	}
	return b.w.Close()
}

// treeDigest identifies a directory's content by names, sizes, modes and times of
// change, without reading the files.
func treeDigest(root string) (string, error) {
	sum := sha256.New()
	enc := json.NewEncoder(sum)
	n := 0
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if n++; n > maxImageEntries {
			return fmt.Errorf("more than %d entries", maxImageEntries)
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		var ino uint64
		var ctime int64
		if st, ok := fi.Sys().(*syscall.Stat_t); ok {
			ino, ctime = st.Ino, st.Ctim.Nano()
		}
		return enc.Encode([]any{p, fi.Mode(), fi.Size(), fi.ModTime().UnixNano(), ino, ctime})
	})
	return hex.EncodeToString(sum.Sum(nil)), err
}

func fileDigest(p string) (string, error) {
	fi, err := os.Stat(p)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s %d %d", p, fi.Size(), fi.ModTime().UnixNano()), nil
}
