//go:build linux

package images

import (
	"archive/tar"
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
	"syscall"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"golang.org/x/sys/unix"
)

// FromLayout picks the image of an OCI layout: the one tagged so, or the only one.
func FromLayout(dir, tag string) (v1.Image, error) {
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

// DirDigest identifies a directory's content by names, sizes, modes and times of
// change, without reading the files.
func DirDigest(root string, maxEntries int) (string, error) {
	sum := sha256.New()
	enc := json.NewEncoder(sum)
	n := 0
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if n++; n > maxEntries {
			return fmt.Errorf("it has more than %d files, directories and links", maxEntries)
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

// TarDir writes a directory of this machine as a layer: what AddDir adds, and as that.
func TarDir(ctx context.Context, to io.Writer, dir string, limits Limits) error {
	root, err := os.OpenRoot(dir) // nothing that changes meanwhile leads out of it
	if err != nil {
		return err
	}
	defer root.Close()
	w := tar.NewWriter(to)
	bound := NewTree(limits)
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		fi, err := root.Lstat(name)
		if err != nil {
			return err
		}
		h := &tar.Header{Name: name, Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime().Truncate(1e9)}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 {
			h.Uid, h.Gid = int(st.Uid), int(st.Gid)
		}
		switch {
		case fi.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, name+"/"
			if fi.Mode()&fs.ModeSticky != 0 {
				h.Mode |= unix.S_ISVTX
			}
		case fi.Mode()&fs.ModeSymlink != 0:
			h.Typeflag = tar.TypeSymlink
			if h.Linkname, err = root.Readlink(name); err != nil {
				return err
			}
		case fi.Mode().IsRegular():
			h.Typeflag, h.Size = tar.TypeReg, fi.Size()
		}
		if err := bound.count(h.Size); err != nil {
			return err
		}
		if h.Typeflag == 0 || path.Clean(h.Name) == "." {
			return nil
		}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			return nil
		}
		f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		if now, err := f.Stat(); err != nil || !os.SameFile(now, fi) {
			return errors.Join(err, fmt.Errorf("%s changes while it is read", dir))
		}
		n, err := io.Copy(w, io.LimitReader(f, h.Size))
		if err == nil && n != h.Size {
			err = fmt.Errorf("%s changes while it is read", dir)
		}
		return err
	})
	if err != nil {
		return err
	}
	return w.Close()
}
