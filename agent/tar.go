package agent

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Tar writes the tree below dir to w as a tar stream: directories, regular files, and symbolic and hard
// links. It leaves out sockets, pipes and devices, and returns them as Skipped. It never leaves dir,
// whatever links say, and does not enter file systems of the kernel, such as /proc, that are mounted
// there. Names are relative, sorted in each directory. Owners are not recorded, nor the set-user-ID,
// set-group-ID and sticky bits of files.
//
// Files may change during the call: a file that vanishes is left out, and a file that grows or shrinks
// keeps the length that it had at its beginning, cut or filled with zeros.
func Tar(w io.Writer, dir string) (Skipped, error) {
	t := &tarrer{modes: fs.ModePerm}
	err := t.write(w, dir)
	return t.skipped, err
}

// maxTarDepth is how many levels deep a packed tree may be. Each takes a descriptor.
const maxTarDepth = 500

// A tarrer packs one tree.
type tarrer struct {
	modes fs.FileMode // the recorded mode bits of files
	named bool        // sockets, pipes and devices become entries, as pipes, for the reader to count
	tw    *tar.Writer
	buf   []byte
	links map[[2]uint64]string // the first name of files with several

	skipped Skipped
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

// dir packs the content of the directory root, which fi describes, at the path real, with the entry
// name, which ends with a slash.
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

// name packs base of the directory root, unless it is gone.
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
		// A replaced entry need not be read. An unchanged one may have been replaced for a
		// moment in between.
		now, lerr := root.Lstat(base)
		switch {
		case errors.Is(lerr, fs.ErrNotExist), lerr == nil && was != nil && (!os.SameFile(was, now) || was.Mode().Type() != now.Mode().Type()):
			return nil
		case try == 3:
			return err
		}
	}
}

// errWriting is a failure after which the archive must not continue.
type errWriting struct{ error }

func (t *tarrer) entry(root *os.Root, in, fi fs.FileInfo, base, real, name string, depth int) error {
	// busybox's tar reads this format, too, whatever the length of a name.
	modes := t.modes
	if fi.IsDir() {
		modes |= fs.ModeSetgid | fs.ModeSticky
	}
	h := &tar.Header{Format: tar.FormatGNU, Name: name, Mode: int64(unixMode(fi.Mode() & modes)), ModTime: fi.ModTime().Truncate(time.Second)}
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
	if t.named {
		h.Typeflag = tar.TypeFifo
		return t.header(h)
	}
	t.skipped.add(name)
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

// A zeroReader reads zeros without end.
type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }
