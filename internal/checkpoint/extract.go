package checkpoint

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Extract unpacks the tar that r has below root, which should be empty: nothing that
// is there is replaced. Every step goes through root, so that nothing outside is
// touched, whatever the archive or somebody beside us does. Owners and extended
// attributes are not restored, set-user-ID bits are cleared.
//
// After an error what was unpacked so far is left; ExtractTo removes it. Kinds: Invalid
// for an archive that is refused, Conflict for a name that is there already, Exhausted
// for a full disk. An error of r is returned as it is.
func Extract(ctx context.Context, r io.Reader, root *os.Root, rules Rules) error {
	s := newScanner(ctx, r, rules, Keep{})
	buf := make([]byte, copySize)
	var dirs []*entry
	listed := map[*entry]bool{}
	for {
		e, err := s.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if e.kind == tar.TypeDir {
			if listed[e] {
				continue // announced anew: its attributes are set at the end anyway
			}
			listed[e] = true
			dirs = append(dirs, e)
		}
		if err := unpack(root, e, s.body, buf); err != nil {
			return extractError(err, e.name)
		}
	}
	// The innermost first: from then on a directory may be closed, and its time stays.
	slices.SortFunc(dirs, func(a, b *entry) int { return compareNames(b.name, a.name) })
	for _, d := range dirs {
		err := root.Chmod(d.name, fs.FileMode(d.mode))
		if err == nil && !d.implied {
			err = root.Chtimes(d.name, time.Time{}, time.Unix(d.mtime, d.nsec))
		}
		if err != nil {
			return extractError(err, d.name)
		}
	}
	return nil
}

func unpack(root *os.Root, e *entry, body io.Reader, buf []byte) error {
	switch e.kind {
	case tar.TypeDir:
		return root.Mkdir(e.name, 0o700)
	case tar.TypeSymlink:
		return root.Symlink(e.link, e.name) // its own time cannot be set through a Root
	case tar.TypeLink:
		return root.Link(e.link, e.name)
	}
	f, err := root.OpenFile(e.name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{body}, buf)
	if err == nil && n != e.size {
		err = refuse("%q has %d bytes less than its header says", e.name, e.size-n)
	}
	if err == nil {
		err = f.Chmod(fs.FileMode(e.mode))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return root.Chtimes(e.name, time.Time{}, time.Unix(e.mtime, e.nsec))
}

func extractError(err error, name string) error {
	var own *sandboxer.Error
	var path *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &own):
		return err
	case !errors.As(err, &path) && !errors.As(err, &link):
		return err // the reader's
	case errors.Is(err, fs.ErrExist):
		return sandboxer.E(sandboxer.Conflict, err, "%q is there already", name).WithHint("unpack into an empty directory")
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandboxer.E(sandboxer.Exhausted, err, "the disk is full at %q", name).WithHint("make room and try again")
	}
	return sandboxer.E(sandboxer.Unavailable, err, "%q could not be unpacked", name)
}

// ExtractTo unpacks the tar that r has into the new directory dir: into a temporary one
// beside it, which gets its name when all went well and is removed otherwise. Conflict
// if dir exists and is not an empty directory; otherwise the kinds are those of Extract.
func ExtractTo(ctx context.Context, r io.Reader, dir string, rules Rules) (err error) {
	temp := filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+"."+rand.Text())
	if err := os.Mkdir(temp, 0o700); err != nil {
		return extractError(err, dir)
	}
	root, err := os.OpenRoot(temp)
	if err != nil {
		return errors.Join(extractError(err, dir), os.Remove(temp))
	}
	err = Extract(ctx, r, root, rules)
	if err == nil {
		err = root.Chmod(".", 0o755)
	}
	if err == nil {
		// Replaces an empty directory, nothing else.
		if err = os.Rename(temp, dir); errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.ENOTEMPTY) || errors.Is(err, syscall.ENOTDIR) {
			err = sandboxer.E(sandboxer.Conflict, err, "%s is there already", dir).WithHint("name a directory that does not exist")
		}
	}
	if err != nil {
		err = errors.Join(err, os.RemoveAll(temp)) // follows no links
	}
	return errors.Join(err, root.Close())
}
