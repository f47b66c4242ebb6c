package agent

import (
	"archive/tar"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
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
	tr := tar.NewReader(r)
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
	parentName string

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
	in, err := u.enter(path.Clean(dir))
	if err != nil {
		return u.failed(h.Name, err)
	}
	if u.opts.Replace && h.Typeflag != tar.TypeDir {
		if fi, err := in.Lstat(base); err == nil && !fi.IsDir() {
			if err := in.Remove(base); err != nil {
				return u.failed(h.Name, err)
			}
		}
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
		err = u.file(in, base, h, r)
	case tar.TypeSymlink:
		if err = in.Symlink(h.Linkname, base); err == nil {
			err = u.chown(in, base)
		}
	case tar.TypeLink:
		// What was a file of the archive may be somebody else's by now.
		if fi, lerr := u.root.Lstat(e.Link); e.Kind != tar.TypeLink || lerr != nil || !fi.Mode().IsRegular() {
			return bad("a hard link to %.200q, which is no earlier file of the archive", h.Linkname)
		}
		err = u.root.Link(e.Link, name)
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
func (u *untarrer) enter(dir string) (*os.Root, error) {
	if dir == "." {
		return u.root, nil
	}
	if u.parent != nil && u.parentName == dir {
		return u.parent, nil
	}
	u.leave()
	r, err := u.root.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err := u.makeParents(dir); err != nil {
			return nil, err
		}
		r, err = u.root.OpenRoot(dir)
	}
	if err != nil {
		return nil, err
	}
	u.parent, u.parentName = r, dir
	return r, nil
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

func (u *untarrer) file(in *os.Root, base string, h *tar.Header, r io.Reader) (err error) {
	mode := fs.FileMode(h.Mode & 0o777)
	f, err := in.OpenFile(base, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode|0o200)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
		if err == nil && !h.ModTime.IsZero() {
			err = in.Chtimes(base, h.ModTime, h.ModTime)
		}
	}()
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, r, u.buf)
	if err != nil {
		return err
	}
	if n != h.Size {
		return io.ErrUnexpectedEOF
	}
	if u.opts.Owner != nil {
		if err := f.Chown(u.opts.Owner[0], u.opts.Owner[1]); err != nil {
			return err
		}
	}
	// The creation mode went through the umask.
	if fi, err := f.Stat(); err != nil || fi.Mode().Perm() != mode {
		return f.Chmod(mode)
	}
	return nil
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
// /proc, that is mounted there. Names are relative and in lexical order;
// owners are not recorded.
func Tar(w io.Writer, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	tw := tar.NewWriter(w)
	buf := make([]byte, 128<<10)
	links := map[[2]uint64]string{}
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) && name != "." {
				return nil // gone meanwhile
			}
			return err
		}
		if name == "." {
			return nil
		}
		fi, err := d.Info()
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		h := &tar.Header{Name: name, Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime().Truncate(time.Second)}
		switch {
		case fi.IsDir():
			if isKernels(filepath.Join(dir, name)) {
				return fs.SkipDir
			}
			h.Typeflag, h.Name = tar.TypeDir, name+"/"
		case fi.Mode()&fs.ModeSymlink != 0:
			h.Typeflag = tar.TypeSymlink
			if h.Linkname, err = root.Readlink(name); err != nil {
				return err
			}
		case fi.Mode().IsRegular():
			if id, ok := linkID(fi); ok {
				if first, ok := links[id]; ok {
					h.Typeflag, h.Linkname = tar.TypeLink, first
					return tw.WriteHeader(h)
				}
				links[id] = name
			}
			return packFile(tw, root, name, h, buf)
		default:
			return nil
		}
		return tw.WriteHeader(h)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func packFile(tw *tar.Writer, root *os.Root, name string, h *tar.Header, buf []byte) error {
	f, err := root.OpenFile(name, os.O_RDONLY|openNonblock, 0)
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
	h.Typeflag, h.Size = tar.TypeReg, fi.Size()
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	// A file that grows is cut, one that shrinks is an error: the header is gone.
	n, err := io.CopyBuffer(struct{ io.Writer }{tw}, io.LimitReader(f, h.Size), buf)
	if err == nil && n < h.Size {
		err = sandboxer.E(sandboxer.Conflict, nil, "%s shrank while it was read", quoted(name))
	}
	return err
}
