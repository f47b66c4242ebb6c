package images

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// A Tree is the root file system of an image: what is left when all layers are laid
// on top of each other. It has names and attributes; the files' content is read when
// it is written.
//
// Device nodes, sockets and pipes of an image are left out, and so are extended
// attributes, set-user-ID and set-group-ID bits: a sandbox would not honour them. The
// names of a hard link become files of their own.
type Tree struct {
	limits  Limits
	root    *node
	layers  []Layer
	entries int
	bytes   int64
}

// A Layer is one layer of an image, opened again for each reading: a tar archive,
// uncompressed.
type Layer struct {
	Open   func() (io.ReadCloser, error)
	DiffID string // digest of the uncompressed archive; empty if there is none to check
}

type node struct {
	mode   fs.FileMode // type and permission
	uid    int
	gid    int
	mtime  time.Time
	target string           // of a symbolic link
	kids   map[string]*node // of a directory
	file   *content         // of a regular file
	layer  int              // the last one that had something to say about it
}

// content is a regular file's content: an entry of a layer, or a file of this machine.
type content struct {
	layer, entry int
	size         int64
	open         func() (io.ReadCloser, error) // nil for an entry of a layer
}

const (
	maxPath   = 4096
	maxName   = 255
	maxLink   = 4096
	maxFollow = 40
)

// NewTree returns a tree with nothing but its root.
func NewTree(limits Limits) *Tree {
	return &Tree{limits: limits, root: newDir(0o755, 0)}
}

func newDir(perm fs.FileMode, layer int) *node {
	return &node{mode: fs.ModeDir | perm, kids: map[string]*node{}, layer: layer}
}

func (t *Tree) count(size int64) error {
	t.entries++
	t.bytes += (size + blockSize - 1) &^ (blockSize - 1) // as it will be in the image
	switch {
	case t.entries > t.limits.Entries:
		return fmt.Errorf("it has more than %d files, directories and links", t.limits.Entries)
	case size < 0 || t.bytes > t.limits.Unpacked || t.bytes < 0:
		return fmt.Errorf("its files have more than %s", bytesText(t.limits.Unpacked))
	}
	return nil
}

// parts splits a name of an archive. Layers are not archives for package safetar: a second entry of a name
// replaces the first, absolute names and names below links are common, and devices are left
// out. They are laid on a tree in memory, so nothing leads out of it. Names are relative to the image's root, with or
// without a slash in front.
func parts(name string) ([]string, error) {
	if len(name) > maxPath {
		return nil, fmt.Errorf("a name has more than %d bytes", maxPath)
	}
	var out []string
	for p := range strings.SplitSeq(name, "/") {
		switch {
		case p == "" || p == ".":
		case p == "..":
			return nil, fmt.Errorf("the name %q leads upwards", tell(name))
		case strings.ContainsRune(p, 0):
			return nil, fmt.Errorf("the name %q has a NUL byte", tell(name))
		case len(p) > maxName:
			return nil, fmt.Errorf("a name has more than %d bytes between slashes", maxName)
		default:
			out = append(out, p)
		}
	}
	return out, nil
}

// dir walks to a directory, through symbolic links as the sandbox's kernel would, but
// never out of the tree. It makes missing directories if mk is set.
func (t *Tree) dir(names []string, layer int, mk bool) (*node, error) {
	at := []*node{t.root}
	todo := slices.Clone(names)
	for follow := 0; len(todo) > 0; {
		here, p := at[len(at)-1], todo[0]
		todo = todo[1:]
		switch p {
		case "", ".":
			continue
		case "..":
			if len(at) == 1 {
				return nil, fmt.Errorf("the symbolic links in %q lead out of the image", tell(path.Join(names...)))
			}
			at = at[:len(at)-1]
			continue
		}
		n := here.kids[p]
		switch {
		case n == nil && !mk:
			return nil, fs.ErrNotExist
		case n == nil:
			n = newDir(0o755, layer)
			here.kids[p] = n
			if err := t.count(0); err != nil {
				return nil, err
			}
		case n.mode&fs.ModeSymlink != 0:
			if follow++; follow > maxFollow {
				return nil, fmt.Errorf("the symbolic links in %q lead in a circle", tell(path.Join(names...)))
			}
			if strings.HasPrefix(n.target, "/") {
				at = at[:1]
			}
			todo = append(strings.Split(n.target, "/"), todo...)
			if len(todo) > maxPath {
				return nil, fmt.Errorf("the symbolic links in %q lead too far", tell(path.Join(names...)))
			}
			continue
		case !n.mode.IsDir():
			return nil, fmt.Errorf("%q is below a file", tell(path.Join(names...)))
		}
		at = append(at, n)
	}
	return at[len(at)-1], nil
}

// Whiteouts: files of a layer that delete files of the layers below.
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
	aufs     = ".wh..wh." // notes of that file system to itself
)

// purge removes what layers below put in a directory.
func (n *node) purge(layer int) {
	for name, k := range n.kids {
		if k.mode.IsDir() {
			k.purge(layer)
		}
		if k.layer < layer && len(k.kids) == 0 {
			delete(n.kids, name)
		}
	}
}

// put lays one entry of a layer on the tree.
func (t *Tree) put(layer, entry int, h *tar.Header) error {
	switch h.Typeflag {
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeDir, tar.TypeReg, tar.TypeSymlink, tar.TypeLink, tar.TypeChar, tar.TypeBlock, tar.TypeFifo, tar.TypeGNUSparse, tar.TypeCont:
	default:
		return fmt.Errorf("%q is of the unknown type %q", tell(h.Name), h.Typeflag)
	}
	names, err := parts(h.Name)
	if err != nil {
		return err
	}
	size := h.Size
	if h.Typeflag == tar.TypeDir || h.Typeflag == tar.TypeSymlink || h.Typeflag == tar.TypeLink {
		size = 0
	}
	if err := t.count(size); err != nil {
		return err
	}
	if h.Uid < 0 || h.Gid < 0 || h.Uid > math.MaxUint32 || h.Gid > math.MaxUint32 {
		return fmt.Errorf("%q has the impossible owner %d:%d", tell(h.Name), h.Uid, h.Gid)
	}
	mode := h.FileInfo().Mode()
	if len(names) == 0 {
		if h.Typeflag != tar.TypeDir {
			return errors.New("its root is not a directory")
		}
		t.root.set(mode, h, layer)
		return nil
	}
	base := names[len(names)-1]
	up, err := t.dir(names[:len(names)-1], layer, true)
	if err != nil {
		return err
	}
	switch {
	case base == opaque:
		up.purge(layer)
		return nil
	case strings.HasPrefix(base, aufs):
		return nil
	case strings.HasPrefix(base, whiteout):
		gone := strings.TrimPrefix(base, whiteout)
		k := up.kids[gone]
		if k == nil {
			return nil
		}
		if k.mode.IsDir() {
			k.purge(layer)
		}
		if k.layer < layer && len(k.kids) == 0 {
			delete(up.kids, gone)
		}
		return nil
	}
	n := &node{layer: layer}
	switch h.Typeflag {
	case tar.TypeDir:
		if old := up.kids[base]; old != nil && old.mode.IsDir() {
			n = old
		} else {
			n.kids = map[string]*node{}
		}
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) > maxLink || strings.ContainsRune(h.Linkname, 0) {
			return fmt.Errorf("%q is a symbolic link with an impossible target", tell(h.Name))
		}
		n.target = h.Linkname
	case tar.TypeLink:
		to, err := t.find(h.Linkname)
		if err != nil {
			return fmt.Errorf("%q is a hard link to %q: %w", tell(h.Name), tell(h.Linkname), err)
		}
		if to.file == nil && to.target == "" {
			return fmt.Errorf("%q is a hard link to %q, which is not a file", tell(h.Name), tell(h.Linkname))
		}
		if to.file != nil {
			if err := t.count(to.file.size); err != nil { // it becomes a copy
				return err
			}
		}
		if up.kids[base] == to {
			return nil
		}
		link := *to
		link.layer = layer
		up.kids[base] = &link
		return nil
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		delete(up.kids, base)
		return nil
	default:
		n.file = &content{layer: layer, entry: entry, size: h.Size}
	}
	n.set(mode, h, layer)
	up.kids[base] = n
	return nil
}

func (n *node) set(mode fs.FileMode, h *tar.Header, layer int) {
	n.mode = mode.Type() | mode.Perm()
	if mode.IsDir() {
		n.mode |= mode & fs.ModeSticky
	}
	n.uid, n.gid, n.mtime, n.layer = h.Uid, h.Gid, h.ModTime, layer
}

// find returns the node called name, not following it if it is a symbolic link.
func (t *Tree) find(name string) (*node, error) {
	names, err := parts(name)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return t.root, nil
	}
	up, err := t.dir(names[:len(names)-1], 0, false)
	if err != nil {
		return nil, err
	}
	n := up.kids[names[len(names)-1]]
	if n == nil {
		return nil, fs.ErrNotExist
	}
	return n, nil
}

// AddLayers lays the layers of an image on the tree, the lowest first, and checks
// that they match the image's configuration.
func (t *Tree) AddLayers(ctx context.Context, ref string, layers []Layer) error {
	t.layers = layers
	var raw int64
	told := time.Time{}
	for i, l := range layers {
		err := l.read(func(r io.Reader) error {
			return eachEntry(&bounded{ctx: ctx, r: r, n: &raw, max: t.limits.Unpacked, tick: func() {
				if time.Since(told) > 100*time.Millisecond {
					told = time.Now()
					sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "unpacking " + ref, Done: raw})
				}
			}}, func(n int, h *tar.Header, _ io.Reader) error { return t.put(i+1, n, h) })
		})
		if err != nil {
			return fmt.Errorf("layer %d: %w", i+1, err)
		}
	}
	return nil
}

// read opens the layer, passes it to f, reads what f leaves and checks the digest.
func (l Layer) read(f func(io.Reader) error) error {
	rc, err := l.Open()
	if err != nil {
		return err
	}
	defer rc.Close()
	sum := newDigest(rc)
	if err := f(sum); err != nil {
		return err
	}
	if l.DiffID != "" && sum.String() != l.DiffID {
		return fmt.Errorf("it unpacks to %s, and the image's configuration says %s: %w", sum, l.DiffID, errDamaged)
	}
	return nil
}

// bounded stops reading when a bomb unpacks, or the caller does not wait any more.
type bounded struct {
	ctx  context.Context
	r    io.Reader
	n    *int64
	max  int64
	tick func()
}

func (b *bounded) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := b.r.Read(p)
	if *b.n += int64(n); *b.n > b.max {
		return 0, fmt.Errorf("it unpacks to more than %s", bytesText(b.max))
	}
	b.tick()
	return n, err
}

// eachEntry calls f for every entry of an archive, and reads on to its very end.
func eachEntry(r io.Reader, f func(n int, h *tar.Header, r io.Reader) error) error {
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, r)
			return err
		}
		if err != nil {
			return err
		}
		if err := f(n, h, tr); err != nil {
			return err
		}
	}
}

// AddDir adds a directory of this machine.
func (t *Tree) AddDir(ctx context.Context, root string) error {
	return filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
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
		size := fi.Size()
		if !fi.Mode().IsRegular() {
			size = 0
		}
		if err := t.count(size); err != nil {
			return err
		}
		n := &node{mode: fi.Mode().Type() | fi.Mode().Perm(), mtime: fi.ModTime()}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 {
			n.uid, n.gid = int(st.Uid), int(st.Gid)
		}
		switch {
		case fi.IsDir():
			n.mode |= fi.Mode() & fs.ModeSticky
			n.kids = map[string]*node{}
		case fi.Mode()&fs.ModeSymlink != 0:
			if n.target, err = os.Readlink(p); err != nil {
				return err
			}
		case fi.Mode().IsRegular():
			n.file = &content{size: size, open: func() (io.ReadCloser, error) { return os.Open(p) }}
		default:
			return nil
		}
		if rel == "." {
			t.root = n
			return nil
		}
		names := strings.Split(filepath.ToSlash(rel), "/")
		up := t.root
		for _, name := range names[:len(names)-1] {
			if up = up.kids[name]; up == nil {
				return fmt.Errorf("%s changes while it is read", root)
			}
		}
		up.kids[names[len(names)-1]] = n
		return nil
	})
}

// top is the layer of additions that a sandbox needs.
const top = math.MaxInt

// Has reports whether the tree has a file called name.
func (t *Tree) Has(name string) bool {
	_, err := t.find(name)
	return err == nil
}

// Dir makes a directory, with its parents, unless there is one or a link to one. With
// own it replaces anything else.
func (t *Tree) Dir(name string, perm fs.FileMode, own bool) error {
	names, err := parts(name)
	if err != nil || len(names) == 0 {
		return err
	}
	up, err := t.dir(names[:len(names)-1], top, true)
	if err != nil {
		return err
	}
	base := names[len(names)-1]
	old := up.kids[base]
	if old != nil && (old.mode.IsDir() || !own) {
		return nil
	}
	up.kids[base] = newDir(perm, top)
	return nil
}

// File makes or replaces a file.
func (t *Tree) File(name string, perm fs.FileMode, size int64, open func() (io.ReadCloser, error)) error {
	names, err := parts(name)
	if err != nil {
		return err
	}
	up, err := t.dir(names[:len(names)-1], top, true)
	if err != nil {
		return err
	}
	up.kids[names[len(names)-1]] = &node{mode: perm, file: &content{size: size, open: open}}
	return nil
}
