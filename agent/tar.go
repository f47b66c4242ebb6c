package agent

import (
	"archive/tar"
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
)

// TarLimits bound what an archive may unpack to. A zero field means its default.
type TarLimits struct {
	Entries int   // default 1,000,000
	Path    int   // bytes of one name; default 4096
	Depth   int   // elements of one name; default 128
	Bytes   int64 // content of all files; default 64 GiB
}

// UntarOptions say how an archive is unpacked.
type UntarOptions struct {
	Limits TarLimits
	Strip  bool // drop the first element of every name
	// Replace lets files take the place of existing ones. Without it an existing file
	// is Invalid. An archive that holds one file twice is refused in either case.
	Replace bool
	Owner   *[2]int // uid and gid of what is made; nil leaves it to the system
}

func (o UntarOptions) rules() safetar.Rules {
	return safetar.Rules{Entries: o.Limits.Entries, PathBytes: o.Limits.Path, Depth: cmp.Or(o.Limits.Depth, 128), Bytes: o.Limits.Bytes, OutsideLinks: true, Strip: o.Strip}
}

// Untar unpacks the tar stream r below dir, which it makes if it is missing. It does
// not trust the archive: it is held to the rules of package safetar, and nothing outside dir
// is touched, whatever names and links say, those of dir's own included. Entries other
// than directories, regular files, symbolic links and hard links to files of the
// archive are refused; set-user-ID and its kin are dropped. After an
// error dir holds what came before. Kinds: Invalid for an archive that is refused or
// broken, Exhausted when a limit is passed or the disk is full.
func Untar(r io.Reader, dir string, o UntarOptions) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	u := &untarrer{root: root, opts: o, checker: safetar.NewChecker(o.rules()), buf: make([]byte, 128<<10)}
	defer u.leave()
	u.rootDir, err = newFileMaker(root)
	if err != nil {
		return err
	}
	defer u.rootDir.close()
	tr := tar.NewReader(bufio.NewReaderSize(r, 256<<10))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return u.finishDirs()
		}
		if err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "the archive cannot be read: %v", err)
		}
		if err := u.entry(h, tr); err != nil {
			return err
		}
	}
}

type untarrer struct {
	root    *os.Root
	opts    UntarOptions
	checker *safetar.Checker
	buf     []byte

	// Most archives are in the order of directories: the last one stays open, which
	// spares the walk from the root for every file.
	parent     *os.Root
	parentDir  fileMaker
	parentName string
	rootDir    fileMaker

	dirs []dirMode // applied last: a directory may be closed to writing
}

type dirMode struct {
	name string
	mode fs.FileMode
	time time.Time
}

func (u *untarrer) entry(h *tar.Header, r io.Reader) error {
	e, err := u.checker.Check(h)
	if err != nil || e.Kind == 0 {
		return err
	}
	name := e.Name
	bad := func(format string, args ...any) error {
		return safetar.Refuse("%.200q: %s", h.Name, fmt.Sprintf(format, args...))
	}
	if name == "." {
		return nil
	}
	dir, base := path.Split(name)
	in, files, err := u.enter(path.Clean(dir))
	if err != nil {
		return u.failed(h.Name, err)
	}
	// replacing makes something, in the place of what is there if that may be replaced.
	replacing := func(make func() error) error {
		err := make()
		if !u.opts.Replace || !errors.Is(err, fs.ErrExist) {
			return err
		}
		if fi, lerr := in.Lstat(base); lerr != nil || fi.IsDir() {
			return err
		}
		if err := in.Remove(base); err != nil {
			return err
		}
		return make()
	}
	switch h.Typeflag {
	case tar.TypeDir:
		err = in.Mkdir(base, 0o755)
		if errors.Is(err, fs.ErrExist) {
			fi, lerr := in.Lstat(base)
			if lerr == nil && !fi.IsDir() {
				return bad("a file or link of this name exists already")
			}
			err = lerr
		} else if err == nil {
			err = u.chown(in, base)
		}
		if err == nil {
			u.dirs = append(u.dirs, dirMode{name, fs.FileMode(h.Mode & 0o777), h.ModTime})
		}
	case tar.TypeReg:
		err = replacing(func() error { return u.file(files, base, h, r) })
	case tar.TypeSymlink:
		if err = replacing(func() error { return in.Symlink(h.Linkname, base) }); err == nil {
			err = u.chown(in, base)
		}
	case tar.TypeLink:
		// What was a file of the archive may be somebody else's by now.
		if fi, lerr := u.root.Lstat(e.Link); e.Kind != tar.TypeLink || lerr != nil || !fi.Mode().IsRegular() {
			return bad("a hard link to %.200q, which is no earlier file of the archive", h.Linkname)
		}
		err = replacing(func() error { return u.root.Link(e.Link, name) })
	}
	if errors.Is(err, fs.ErrExist) {
		return bad("a file of this name exists already")
	}
	return u.failed(h.Name, err)
}

func quoted(s string) string {
	if len(s) > 200 {
		s = s[:200] + "…"
	}
	return "'" + strings.ToValidUTF8(s, "�") + "'"
}

// enter opens the directory of the next entry, making it if need be.
func (u *untarrer) enter(dir string) (*os.Root, fileMaker, error) {
	if dir == "." {
		return u.root, u.rootDir, nil
	}
	if u.parent != nil && u.parentName == dir {
		return u.parent, u.parentDir, nil
	}
	u.leave()
	r, err := u.root.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err := u.makeParents(dir); err != nil {
			return nil, fileMaker{}, err
		}
		r, err = u.root.OpenRoot(dir)
	}
	if err != nil {
		return nil, fileMaker{}, err
	}
	files, err := newFileMaker(r)
	if err != nil {
		r.Close()
		return nil, fileMaker{}, err
	}
	u.parent, u.parentDir, u.parentName = r, files, dir
	return r, files, nil
}

func (u *untarrer) makeParents(dir string) error {
	if dir == "." {
		return nil
	}
	if err := u.makeParents(path.Dir(dir)); err != nil {
		return err
	}
	err := u.root.Mkdir(dir, 0o755)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return u.chown(u.root, dir)
}

func (u *untarrer) leave() {
	if u.parent != nil {
		u.parentDir.close()
		u.parent.Close()
		u.parent = nil
	}
}

func (u *untarrer) chown(in *os.Root, name string) error {
	if u.opts.Owner == nil {
		return nil
	}
	return in.Lchown(name, u.opts.Owner[0], u.opts.Owner[1])
}

func (u *untarrer) file(in fileMaker, base string, h *tar.Header, r io.Reader) (err error) {
	mode := fs.FileMode(h.Mode & 0o777)
	f, err := in.create(base, mode|0o200)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.close(); err == nil {
			err = e
		}
	}()
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, r, u.buf)
	if err != nil {
		return err
	}
	if n != h.Size {
		return io.ErrUnexpectedEOF
	}
	return f.finish(u.opts.Owner, mode, h.ModTime)
}

// finishDirs sets the modes and times of directories, the inner ones first.
func (u *untarrer) finishDirs() error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		fi, err := u.root.Lstat(d.name)
		if err == nil && !fi.IsDir() {
			continue
		}
		if err == nil {
			err = u.root.Chmod(d.name, d.mode)
		}
		if err == nil && !d.time.IsZero() {
			err = u.root.Chtimes(d.name, d.time, d.time)
		}
		if err != nil {
			return u.failed(d.name, err)
		}
	}
	return nil
}

// failed gives an error of unpacking its Kind.
func (u *untarrer) failed(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case isFull(err):
		return sandboxer.E(sandboxer.Exhausted, err, "archive entry %s: the disk is full", quoted(name))
	}
	return sandboxer.E(sandboxer.Invalid, err, "archive entry %s cannot be unpacked: %v", quoted(name), err)
}

// Tar writes the tree below dir to w as a tar stream: directories, regular files, and
// symbolic and hard links; sockets, pipes and devices are left out. It reads dir
// without leaving it, whatever links say, and enters nothing of the kernel's, such as
// /proc, that is mounted there. Names are relative, in lexical order in each directory;
// owners are not recorded, nor set-user-ID and its kin.
//
// Files may change meanwhile: what vanishes is left out, and a file that grows or shrinks
// has the length that it had when it was begun, cut or filled up with zeros.
func Tar(w io.Writer, dir string) error { return (&tarrer{modes: fs.ModePerm}).write(w, dir) }

// maxTarDepth is how many levels deep a tree may be that is packed. Each takes a descriptor.
const maxTarDepth = 500

// A tarrer packs one tree.
type tarrer struct {
	modes fs.FileMode // the bits that are recorded
	tw    *tar.Writer
	buf   []byte
	links map[[2]uint64]string // the first name of files that have several
}

func (t *tarrer) write(w io.Writer, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	fi, err := root.Stat(".")
	if err != nil {
		return err
	}
	t.tw, t.buf, t.links = tar.NewWriter(w), make([]byte, 128<<10), map[[2]uint64]string{}
	if err := t.dir(root, fi, dir, "", 1); err != nil {
		return err
	}
	return t.tw.Close()
}

// dir packs what is in the directory root, which fi describes and which is at real, and called
// name with a slash at its end.
func (t *tarrer) dir(root *os.Root, fi fs.FileInfo, real, name string, depth int) error {
	if depth > maxTarDepth {
		return sandboxer.E(sandboxer.Invalid, nil, "%s is more than %d levels deep", quoted(name), maxTarDepth)
	}
	d, err := root.Open(".")
	if err != nil {
		return err
	}
	names, err := d.Readdirnames(-1)
	d.Close()
	if err != nil && !(depth > 1 && errors.Is(err, fs.ErrNotExist)) { // removed since it was opened
		return err
	}
	slices.Sort(names)
	for _, base := range names {
		if err := t.name(root, fi, base, filepath.Join(real, base), name+base, depth); err != nil {
			return err
		}
	}
	return nil
}

// name packs what base is in the directory root, unless that is gone.
func (t *tarrer) name(root *os.Root, in fs.FileInfo, base, real, name string, depth int) error {
	for try := 0; ; try++ {
		was, err := root.Lstat(base)
		if err == nil {
			err = t.entry(root, in, was, base, real, name, depth)
		}
		var failed errWriting
		switch {
		case err == nil:
			return nil
		case errors.As(err, &failed):
			return failed.error
		case errors.Is(err, fs.ErrNotExist):
			return nil
		}
		// What is something else by now need not be read. It may be what it was, too, and
		// have been something else in between.
		now, lerr := root.Lstat(base)
		switch {
		case errors.Is(lerr, fs.ErrNotExist), lerr == nil && was != nil && (!os.SameFile(was, now) || was.Mode().Type() != now.Mode().Type()):
			return nil
		case try == 3:
			return err
		}
	}
}

// errWriting is a failure after which nothing may follow in the archive.
type errWriting struct{ error }

func (t *tarrer) entry(root *os.Root, in, fi fs.FileInfo, base, real, name string, depth int) error {
	// What busybox's tar reads, too, however long a name is.
	h := &tar.Header{Format: tar.FormatGNU, Name: name, Mode: int64(unixMode(fi.Mode() & t.modes)), ModTime: fi.ModTime().Truncate(time.Second)}
	switch {
	case fi.IsDir():
		if !sameDevice(in, fi) && isKernels(real) {
			return nil
		}
		sub, err := root.OpenRoot(base)
		if err != nil {
			return err
		}
		defer sub.Close()
		if now, err := sub.Stat("."); err != nil || !os.SameFile(fi, now) {
			return err
		}
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
		if err := t.header(h); err != nil {
			return err
		}
		if err := t.dir(sub, fi, real, h.Name, depth+1); err != nil {
			return errWriting{err}
		}
		return nil
	case fi.Mode()&fs.ModeSymlink != 0:
		var err error
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = root.Readlink(base); err != nil {
			return err
		}
		return t.header(h)
	case fi.Mode().IsRegular():
		return t.file(root, base, h)
	}
	return nil
}

func (t *tarrer) header(h *tar.Header) error {
	if err := t.tw.WriteHeader(h); err != nil {
		return errWriting{err}
	}
	return nil
}

func (t *tarrer) file(root *os.Root, base string, h *tar.Header) error {
	f, err := root.OpenFile(base, os.O_RDONLY|openNonblock, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() { // replaced since it was listed
		return nil
	}
	id, several := linkID(fi)
	if first, ok := t.links[id]; several && ok {
		h.Typeflag, h.Linkname = tar.TypeLink, first
		return t.header(h)
	}
	h.Typeflag, h.Size = tar.TypeReg, fi.Size()
	if err := t.header(h); err != nil {
		return err
	}
	if several {
		t.links[id] = h.Name
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{t.tw}, io.LimitReader(f, h.Size), t.buf)
	if err == nil && n < h.Size {
		_, err = io.CopyBuffer(struct{ io.Writer }{t.tw}, io.LimitReader(zeroReader{}, h.Size-n), t.buf)
	}
	if err != nil {
		return errWriting{err}
	}
	return nil
}

// A zeroReader reads as zeros, for ever.
type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }
