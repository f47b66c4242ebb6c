package images

import (
	"archive/tar"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"time"

	"github.com/erofs/go-erofs"

	"github.com/sand-boxer/sandboxer"
)

// Write writes the tree as an EROFS image to out, a new file, with temporary files in tmp.
//
// Every regular file has blocks of its own: gVisor maps nothing else into memory, and a
// program that cannot be mapped cannot be run.
func (t *Tree) Write(ctx context.Context, ref string, out *os.File, tmp string) error {
	w := &writer{ctx: ctx, fs: erofs.Create(out, erofs.WithTempDir(tmp), erofs.WithBlockSize(blockSize)), step: "preparing " + ref, padded: map[string]int64{}}
	wanted := make([]map[int][]named, len(t.layers)+1)
	var mine []named
	if err := w.walk("/", t.root, func(f named) {
		w.total += f.node.file.size
		if f.node.file.open != nil {
			mine = append(mine, f)
			return
		}
		m := wanted[f.node.file.layer]
		if m == nil {
			m = map[int][]named{}
			wanted[f.node.file.layer] = m
		}
		m[f.node.file.entry] = append(m[f.node.file.entry], f)
	}); err != nil {
		return err
	}
	for i, l := range t.layers {
		want := wanted[i+1]
		if len(want) == 0 {
			continue
		}
		rc, err := l.Open()
		if err != nil {
			return err
		}
		err = eachEntry(rc, func(n int, _ *tar.Header, r io.Reader) error {
			names := want[n]
			delete(want, n)
			for k, f := range names {
				if k > 0 { // another name of the same file
					first, err := w.fs.Open(names[0].path)
					if err != nil {
						return err
					}
					err = w.file(f, first)
					first.Close()
					if err != nil {
						return err
					}
				} else if err := w.file(f, r); err != nil {
					return err
				}
			}
			return ctx.Err()
		})
		rc.Close()
		if err == nil && len(want) > 0 {
			err = errDamaged
		}
		if err != nil {
			return fmt.Errorf("layer %d: %w", i+1, err)
		}
	}
	for _, f := range mine {
		rc, err := f.node.file.open()
		if err != nil {
			return err
		}
		err = w.file(f, rc)
		rc.Close()
		if err != nil {
			return err
		}
	}
	if err := w.fs.Close(); err != nil {
		return err
	}
	return w.unpad(out)
}

type named struct {
	path string
	node *node
}

// writer writes a tree into an EROFS image.
type writer struct {
	ctx   context.Context
	fs    *erofs.Writer
	step  string
	done  int64
	total int64
	told  time.Time

	padded map[string]int64 // files that were filled up to a block, and their size
}

// walk writes directories and links, and gives the files to f: their content comes in
// an order of its own.
func (w *writer) walk(at string, n *node, f func(named)) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	switch {
	case n.mode.IsDir():
		if err := w.fs.Mkdir(at, n.mode.Perm()); err != nil {
			return err
		}
		for name, k := range n.kids {
			if err := w.walk(path.Join(at, name), k, f); err != nil {
				return err
			}
		}
		return w.meta(at, n)
	case n.mode&fs.ModeSymlink != 0:
		if err := w.fs.Symlink(n.target, at); err != nil {
			return err
		}
		return w.fs.Chown(at, n.uid, n.gid)
	}
	f(named{at, n})
	return nil
}

func (w *writer) meta(at string, n *node) error {
	err := w.fs.Chown(at, n.uid, n.gid)
	if err == nil {
		err = w.fs.Chmod(at, n.mode)
	}
	if err == nil && !n.mtime.IsZero() && n.mtime.Unix() >= 0 {
		err = w.fs.Chtimes(at, n.mtime, n.mtime)
	}
	return err
}

func (w *writer) file(f named, r io.Reader) error {
	out, err := w.fs.Create(f.path)
	if err != nil {
		return err
	}
	n, err := io.Copy(out, io.LimitReader(r, f.node.file.size))
	if err != nil {
		return err
	}
	if n != f.node.file.size {
		return fmt.Errorf("%s ended too early", f.path)
	}
	// The library puts a file smaller than a block next to its inode.
	if n > 0 && n < blockSize {
		if _, err := out.Write(make([]byte, blockSize-n)); err != nil {
			return err
		}
		w.padded[f.path] = n
	}
	if err := out.Close(); err != nil {
		return err
	}
	w.done += n
	if time.Since(w.told) > 100*time.Millisecond {
		w.told = time.Now()
		sandboxer.ReportProgress(w.ctx, sandboxer.Progress{Step: w.step, Done: w.done, Total: w.total})
	}
	return w.meta(f.path, f.node)
}

// unpad restores the sizes of padded files.
func (w *writer) unpad(image *os.File) error {
	fsys, err := erofs.Open(image)
	if err != nil {
		return err
	}
	var block [4]byte // address of the block at which inodes begin
	if _, err := image.ReadAt(block[:], superBlock+metaBlock); err != nil {
		return err
	}
	inodes := int64(binary.LittleEndian.Uint32(block[:])) * blockSize
	left := len(w.padded)
	err = fs.WalkDir(fsys, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		size, ok := w.padded["/"+p]
		if !ok {
			return nil
		}
		left--
		fi, err := d.Info()
		if err != nil {
			return err
		}
		st, ok := fi.Sys().(*erofs.Stat)
		if !ok || st.Size != blockSize || st.InodeLayout != flatPlain {
			return fmt.Errorf("the image of %s is not as it was written", p)
		}
		at := inodes + st.Ino*inodeSlot
		// The upper half of an extended inode's size is zero already.
		var low [4]byte
		binary.LittleEndian.PutUint32(low[:], uint32(size))
		_, err = image.WriteAt(low[:], at+inodeSize)
		return errors.Join(err, w.ctx.Err())
	})
	if err == nil && left > 0 {
		err = fmt.Errorf("%d files are missing from the image", left)
	}
	return err
}

// The format of EROFS, as far as it is needed here.
const (
	blockSize  = 4096
	superBlock = 1024 // where it is
	metaBlock  = 40   // in the superblock: the block at which inodes begin
	inodeSlot  = 32   // what an inode's number counts
	inodeSize  = 8    // in an inode, compact or extended: its size, in 4 or 8 bytes
	flatPlain  = 0    // data in blocks of its own
)
