package fake

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/safetar"
)

// Archive implements sandboxer.Archiver.
func (e *Extension) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	return e.at(ctx, VerbArchive, h, dir, func(root *os.Root, o Object) error {
		base := o.archived(dir)
		if fi, err := root.Stat(base); err != nil || !fi.IsDir() {
			return sandboxer.E(kindOfMissing(err), err, "%s is not a directory that exists", dir)
		}
		out := tar.NewWriter(w)
		err := fs.WalkDir(root.FS(), base, func(name string, d fs.DirEntry, err error) error {
			if err == nil {
				err = ctx.Err()
			}
			if err != nil || name == base {
				return err
			}
			return pack(out, root, name, strings.TrimPrefix(name, base+"/"))
		})
		return errors.Join(err, out.Close())
	})
}

func kindOfMissing(err error) sandboxer.Kind {
	if errors.Is(err, fs.ErrNotExist) {
		return sandboxer.NotFound
	}
	return sandboxer.Invalid
}

// archived is inside for a directory that may be left out.
func (o Object) archived(dir string) string {
	if dir == "" {
		dir = o.inner()
	}
	return o.inside(dir)
}

// pack adds the file name of root to out, which calls it rel. A file that grows while
// it is read is in there with the length it had.
func pack(out *tar.Writer, root *os.Root, name, rel string) error {
	fi, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // removed meanwhile
	}
	if err != nil {
		return err
	}
	target := ""
	switch fi.Mode().Type() {
	case 0, fs.ModeDir:
	case fs.ModeSymlink:
		if target, err = root.Readlink(name); err != nil {
			return err
		}
	default: // for the reader to count
		return out.WriteHeader(&tar.Header{Typeflag: tar.TypeFifo, Name: rel, Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime()})
	}
	hdr, err := tar.FileInfoHeader(fi, target)
	if err != nil {
		return err
	}
	hdr.Name = rel
	if fi.IsDir() {
		hdr.Name += "/"
	}
	if !fi.Mode().IsRegular() {
		return out.WriteHeader(hdr)
	}
	file, err := root.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := out.WriteHeader(hdr); err != nil {
		return err
	}
	if _, err := io.CopyN(out, file, hdr.Size); err != io.EOF {
		return err
	}
	return sandboxer.E(sandboxer.Unavailable, nil, "%s became shorter while it was read", rel)
}

// Unarchive implements sandboxer.Archiver.
func (e *Extension) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
	return e.at(ctx, VerbUnarchive, h, dir, func(root *os.Root, o Object) error {
		base := o.archived(dir)
		if err := o.makeDirs(root, base); err != nil {
			return notDir(err)
		}
		if fi, err := root.Stat(base); err != nil || !fi.IsDir() {
			return sandboxer.E(sandboxer.Invalid, err, "%s is not a directory", dir)
		}
		into, err := root.OpenRoot(base) // which no name and no link leaves
		if err != nil {
			return err
		}
		defer into.Close()
		old, err := fs.ReadDir(into.FS(), ".")
		if err != nil {
			return err
		}
		for _, d := range old {
			if err := into.RemoveAll(d.Name()); err != nil {
				return err
			}
		}
		if err := unpack(into, contextReader{ctx, r}, false); err != nil {
			return err
		}
		uid, gid, other := o.user()
		if !other {
			return nil
		}
		return fs.WalkDir(into.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
			return errors.Join(err, into.Lchown(name, uid, gid))
		})
	})
}

// unpack makes what the tar r holds in the empty directory root, with the owners that it
// names where those may be set.
func unpack(root *os.Root, r io.Reader, owners bool) error {
	var dirs []*tar.Header // their modes and times come last: the one may forbid, the other forgets
	in := safetar.NewReader(r, safetar.Rules{OutsideLinks: true, SkipSpecial: true})
	for {
		hdr, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		name := hdr.Name
		if name == "." {
			continue
		}
		if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return notDir(err)
		}
		switch mode := hdr.FileInfo().Mode(); hdr.Typeflag {
		case tar.TypeDir:
			if err := root.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			dirs = append(dirs, hdr)
		case tar.TypeReg:
			file, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
			if err != nil {
				return err
			}
			_, err = io.Copy(file, in)
			if err := errors.Join(err, file.Chmod(mode.Perm()), file.Close()); err != nil {
				return err
			}
			if err := root.Chtimes(name, hdr.ModTime, hdr.ModTime); err != nil {
				return err
			}
		case tar.TypeSymlink:
			if err := root.Symlink(hdr.Linkname, name); err != nil {
				return err
			}
		case tar.TypeLink:
			if err := root.Link(hdr.Linkname, name); err != nil {
				return err
			}
		}
		if owners && os.Getuid() == 0 {
			if err := root.Lchown(name, hdr.Uid, hdr.Gid); err != nil {
				return err
			}
		}
	}
	for _, hdr := range slices.Backward(dirs) {
		if err := errors.Join(root.Chtimes(hdr.Name, hdr.ModTime, hdr.ModTime), root.Chmod(hdr.Name, hdr.FileInfo().Mode().Perm())); err != nil {
			return err
		}
	}
	return nil
}
