package agent

import (
	"archive/tar"
	"bufio"
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
)

// TarLimits bound the unpacked size of an archive. A zero field means its default.
type TarLimits struct {
	Entries int   // default 1,000,000
	Path    int   // bytes of one name; default 4096
	Depth   int   // elements of one name; default 128
	Bytes   int64 // content of all files; default 64 GiB
}

// draftPrefix begins the names of incomplete files. A killed process leaves them; a later upload into
// their directory removes those that have not been written to for an hour.
const draftPrefix = ".sandboxer-"

// UntarOptions say how to unpack an archive.
type UntarOptions struct {
	Limits TarLimits
	Strip  bool // drop the first element of every name
	// Replace lets files replace existing ones. Without it, an existing file is Invalid. An archive
	// with the same file twice is refused in either case.
	Replace bool
	Owner   *[2]int // uid and gid of new files; nil leaves them to the system
	// Skipped receives the sockets, pipes and devices of the archive, which are not unpacked. Without
	// it, an archive with one is refused.
	Skipped *Skipped
}

// Skipped lists sockets, pipes and devices that a copy left out.
type Skipped struct {
	Count int
	First []string // names, quoted
}

func (s *Skipped) add(name string) {
	if s.Count++; len(s.First) < 3 {
		s.First = append(s.First, quoted(name))
	}
}

// String describes the skipped entries for display; "" if there are none.
func (s Skipped) String() string {
	if s.Count == 0 {
		return ""
	}
	more := ""
	if s.Count > len(s.First) {
		more = ", …"
	}
	return fmt.Sprintf("%d sockets, pipes or devices are not copied: %s%s", s.Count, strings.Join(s.First, ", "), more)
}

func (o UntarOptions) rules() safetar.Rules {
	return safetar.Rules{Entries: o.Limits.Entries, PathBytes: o.Limits.Path, Depth: cmp.Or(o.Limits.Depth, 128), Bytes: o.Limits.Bytes, OutsideLinks: true, Strip: o.Strip, SkipSpecial: o.Skipped != nil}
}

// Untar unpacks the tar stream r below dir, which it makes if it is missing. It does not trust the
// archive: the rules of package safetar apply, and nothing outside dir is changed, whatever names and
// links the archive or dir contain. Untar refuses entries other than directories, regular files,
// symbolic links, hard links to files of the archive, and entries that o.Skipped takes. Files lose the
// set-user-ID, set-group-ID and sticky bits; directories keep the set-group-ID and sticky bits. After
// an error dir has the earlier entries and no incomplete file: a file that was being replaced has its
// former content. Kinds: Invalid for an archive that is refused or damaged, Exhausted when a limit is
// exceeded or the disk is full.
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

	// Most archives are ordered by directory: the last one stays open, which saves the
	// walk from the root for every file.
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
	if err == nil && e.Kind == 0 && (h.Typeflag == tar.TypeFifo || h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock) {
		u.opts.Skipped.add(h.Name)
	}
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
	// replacing makes an entry, in place of an existing one if that may be replaced.
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
			u.dirs = append(u.dirs, dirMode{name, goMode(uint32(h.Mode & 0o3777)), h.ModTime})
		}
	case tar.TypeReg:
		err = u.file(in, files, base, base, h, r)
		if fi, lerr := in.Lstat(base); u.opts.Replace && errors.Is(err, fs.ErrExist) && lerr == nil && !fi.IsDir() {
			err = u.file(in, files, draftPrefix+rand.Text(), base, h, r) // the old file stays until the new content is complete
		}
	case tar.TypeSymlink:
		if err = replacing(func() error { return in.Symlink(h.Linkname, base) }); err == nil {
			err = u.chown(in, base)
		}
	case tar.TypeLink:
		// Another process may have replaced a file of the archive by now.
		if fi, lerr := u.root.Lstat(e.Link); e.Kind != tar.TypeLink || lerr != nil || !fi.Mode().IsRegular() {
			return bad("a hard link to %.200q, which is not an earlier file of the archive", h.Linkname)
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

// enter opens the directory of the next entry, and makes it if it is missing.
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

// file makes the file draft in the directory in and renames it to base when it is complete.
func (u *untarrer) file(in *os.Root, files fileMaker, draft, base string, h *tar.Header, r io.Reader) (err error) {
	mode := fs.FileMode(h.Mode & 0o777)
	f, err := files.create(draft, mode|0o200)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.close(); err == nil {
			err = e
		}
		if err == nil && draft != base {
			err = in.Rename(draft, base)
		}
		if err != nil {
			_ = in.Remove(draft)
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

// failed gives an unpacking error its Kind.
func (u *untarrer) failed(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case isFull(err):
		return sandboxer.E(sandboxer.Exhausted, err, "archive entry %s: the disk is full", quoted(name))
	}
	return sandboxer.E(sandboxer.Invalid, err, "archive entry %s cannot be unpacked: %v", quoted(name), err)
}
