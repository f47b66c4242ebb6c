package checkpoint

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Dir keeps objects as files below one directory. An object that Put has acknowledged survives a
// power cut. Several processes may use one directory, if it is on a local file system.
type Dir struct {
	root *os.Root
}

var _ Blobs = (*Dir)(nil)

// writeSize is how much is written at once. For a larger piece a kernel allocates its memory in
// one piece too, which on virtual machines has been seen to cost five times as much.
const (
	writeSize = 64 << 10
	// beginSize is after how many bytes the kernel is asked to begin to write to the disk.
	beginSize = 4 << 20
)

// tempDir holds objects that Put has not completed yet.
const tempDir = "tmp"

// OpenDir returns the objects below path, making the directory if there is none (0700).
func OpenDir(path string) (*Dir, error) {
	if err := os.MkdirAll(filepath.Join(path, tempDir), 0o700); err != nil {
		return nil, dirError(err, "the directory of checkpoints", path)
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, dirError(err, "the directory of checkpoints", path)
	}
	return &Dir{root: root}, nil
}

// Close closes the directory.
func (d *Dir) Close() error { return d.root.Close() }

// dirError gives an error of the file system its kind.
func dirError(err error, what, name string) error {
	kind, hint := sandboxer.Unavailable, ""
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		kind = sandboxer.NotFound
	case errors.Is(err, fs.ErrExist):
		kind = sandboxer.Conflict
	case errors.Is(err, fs.ErrPermission):
		kind, hint = sandboxer.Denied, "give the user that sandboxer runs as access to the directory of checkpoints"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EFBIG):
		kind, hint = sandboxer.Exhausted, "make room on that disk, or remove checkpoints"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	var e *sandboxer.Error
	if errors.As(err, &e) { // the reader's own
		return err
	}
	e = sandboxer.E(kind, err, "%s %s: %s", what, name, map[sandboxer.Kind]string{
		sandboxer.Unavailable: "cannot be read or written", sandboxer.NotFound: "is not there", sandboxer.Conflict: "is there already",
		sandboxer.Denied: "is not accessible", sandboxer.Exhausted: "finds no room"}[kind])
	e.Hint = hint
	return e
}

// Put implements Blobs.
func (d *Dir) Put(ctx context.Context, name string, r io.Reader) (err error) {
	defer func() { err = dirError(err, "the object", name) }()
	if err := ctx.Err(); err != nil {
		return err
	}
	temp := path.Join(tempDir, rand.Text())
	f, err := d.root.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ignoreMissing(d.root.Remove(temp))) }()
	out := &pieces{ctx: ctx, f: f}
	if w, ok := r.(io.WriterTo); ok {
		_, err = w.WriteTo(out)
	} else {
		_, err = io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{r}, make([]byte, writeSize))
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	dir := path.Dir(name)
	if err := d.mkdir(dir); err != nil {
		return err
	}
	// A link, unlike a rename, never replaces anything.
	if err := d.root.Link(temp, name); err != nil {
		return err
	}
	return d.sync(dir)
}

// pieces writes to a file, and has the kernel begin to write it to the disk, so that
// little is left to wait for at the end.
type pieces struct {
	ctx      context.Context
	f        *os.File
	n, begun int64
}

func (w *pieces) Write(p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		if err = w.ctx.Err(); err == nil {
			var m int
			m, err = w.f.Write(p[n:min(len(p), n+writeSize)])
			n += m
			w.n += int64(m)
		}
		if w.n-w.begun >= beginSize {
			beginSync(w.f, w.begun, w.n-w.begun)
			w.begun = w.n
		}
	}
	return n, err
}

// mkdir makes dir and those above it, durably.
func (d *Dir) mkdir(dir string) error {
	if dir == "." {
		return nil
	}
	if fi, err := d.root.Stat(dir); err == nil && fi.IsDir() {
		return nil
	}
	up := path.Dir(dir)
	if err := d.mkdir(up); err != nil {
		return err
	}
	if err := d.root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return d.sync(up)
}

func (d *Dir) sync(dir string) error {
	f, err := d.root.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Get implements Blobs.
func (d *Dir) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := d.root.Open(name)
	if err != nil {
		return nil, dirError(err, "the object", name)
	}
	if n < 0 {
		n = 1<<62 - off
	}
	return &section{SectionReader: io.NewSectionReader(f, off, n), f: f}, nil
}

type section struct {
	*io.SectionReader
	f *os.File
}

func (s *section) Close() error { return s.f.Close() }

// Stat implements Blobs.
func (d *Dir) Stat(ctx context.Context, name string) (Blob, error) {
	if err := ctx.Err(); err != nil {
		return Blob{}, err
	}
	fi, err := d.root.Lstat(name)
	if err == nil && !fi.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return Blob{}, dirError(err, "the object", name)
	}
	return Blob{Name: name, Size: fi.Size(), Time: fi.ModTime()}, nil
}

// List implements Blobs.
func (d *Dir) List(ctx context.Context, prefix string) ([]Blob, error) {
	top := "."
	if i := strings.LastIndexByte(prefix, '/'); i >= 0 {
		top = prefix[:i]
	}
	var list []Blob
	err := fs.WalkDir(d.root.FS(), top, func(name string, e fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			return nil
		}
		if err != nil {
			return err
		}
		if e.IsDir() {
			if name == tempDir {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasPrefix(name, prefix) || !e.Type().IsRegular() {
			return nil
		}
		fi, err := e.Info()
		if err != nil {
			return ignoreMissing(err)
		}
		list = append(list, Blob{Name: name, Size: fi.Size(), Time: fi.ModTime()})
		return nil
	})
	if err != nil {
		return nil, dirError(err, "the objects", prefix)
	}
	return list, nil
}

// Delete implements Blobs.
func (d *Dir) Delete(ctx context.Context, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := ignoreMissing(d.root.Remove(name)); err != nil {
		return dirError(err, "the object", name)
	}
	return ignoreMissing(d.sync(path.Dir(name)))
}

// Tidy implements Blobs.
func (d *Dir) Tidy(ctx context.Context, before time.Time) error {
	list, err := fs.ReadDir(d.root.FS(), tempDir)
	if err != nil {
		return dirError(err, "the objects", tempDir)
	}
	for _, e := range list {
		fi, err := e.Info()
		if err == nil && fi.ModTime().Before(before) {
			err = d.root.Remove(path.Join(tempDir, e.Name()))
		}
		if err = ignoreMissing(err); err != nil {
			return dirError(err, "the object", e.Name())
		}
	}
	return ctx.Err()
}
