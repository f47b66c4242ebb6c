package fake

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"iter"
	"os"
	"os/user"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/sand-boxer/sandboxer"
)

// Commands see the machine, not only the sandbox's directory. So that both ways into
// a sandbox can name the same file, a path may be written as the sandbox's own
// (/workspace/f) or as the machine's (what pwd prints).

// inside returns the path of a file relative to the sandbox's directory.
func (o Object) inside(name string) string {
	if name == o.Dir || strings.HasPrefix(name, o.Dir+"/") {
		name = name[len(o.Dir):]
	}
	if name = strings.TrimPrefix(name, "/"); name == "" {
		return "."
	}
	return name
}

// workDir returns the directory of the machine in which a command runs.
func (o Object) workDir(dir string) string {
	switch {
	case dir == "":
		return o.workspace()
	case dir == o.inner() || strings.HasPrefix(dir, o.inner()+"/"):
		return filepath.Join(o.Dir, dir)
	}
	return dir
}

// in calls f with the root directory of sandbox h, which no path and no link can
// leave: what is mounted is in it. It names the file in errors.
func (e *Extension) in(ctx context.Context, h sandboxer.Handle, name string, f func(*os.Root, Object) error) error {
	return e.at(ctx, VerbFiles, h, name, f)
}

func (e *Extension) at(ctx context.Context, verb Verb, h sandboxer.Handle, name string, f func(*os.Root, Object) error) error {
	return e.call(ctx, verb, h.SandboxID, func(Fault) error {
		o, err := e.use(ctx, h)
		if err != nil {
			return err
		}
		var root *os.Root
		if err := o.within(func() (err error) { root, err = os.OpenRoot(o.Dir); return err }); err != nil {
			return sandboxer.E(sandboxer.NotFound, err, "there is no sandbox %s", h.SandboxID)
		}
		defer root.Close()
		return fileError(f(root, o), name)
	})
}

// ReadFile implements sandboxer.Filer.
func (e *Extension) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (r io.ReadCloser, err error) {
	err = e.in(ctx, h, name, func(root *os.Root, o Object) error {
		file, err := root.OpenFile(o.inside(name), os.O_RDONLY|syscall.O_NONBLOCK, 0) // a named pipe must not hold us
		if err != nil {
			return err
		}
		if fi, err := file.Stat(); err != nil || !fi.Mode().IsRegular() {
			file.Close()
			return errors.Join(err, sandboxer.E(sandboxer.Invalid, nil, "%s is not a regular file", name))
		}
		r = file
		return nil
	})
	return r, err
}

// WriteFile implements sandboxer.Filer.
func (e *Extension) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	return e.in(ctx, h, name, func(root *os.Root, o Object) error {
		to := o.inside(name)
		for range 40 { // what it leads to is written
			target, err := root.Readlink(to)
			if err != nil {
				break
			}
			if path.IsAbs(target) {
				to = o.inside(target)
			} else {
				to = path.Join(path.Dir(to), target)
			}
		}
		was, err := root.Lstat(to)
		if err == nil && was.IsDir() {
			return syscall.EISDIR
		}
		if err == nil && !was.Mode().IsRegular() {
			return sandboxer.E(sandboxer.Invalid, nil, "%s is not a regular file", name)
		}
		if err := o.makeDirs(root, path.Dir(to)); err != nil {
			return notDir(err)
		}
		temp := path.Join(path.Dir(to), ".sandboxer-"+rand.Text())
		file, err := root.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return notDir(err)
		}
		defer root.Remove(temp)
		defer file.Close()
		if _, err := io.Copy(file, contextReader{ctx, r}); err != nil {
			return err
		}
		uid, gid, other := o.user()
		perm, names := cmp.Or(mode.Perm(), 0o644), uint64(1)
		if was != nil {
			perm = cmp.Or(mode.Perm(), was.Mode().Perm())
			if st, ok := was.Sys().(*syscall.Stat_t); ok {
				uid, gid, other, names = int(st.Uid), int(st.Gid), true, uint64(st.Nlink)
			}
		}
		if names > 1 { // they stay names of one file
			old, err := root.OpenFile(to, os.O_WRONLY|os.O_TRUNC, 0)
			if err != nil {
				return err
			}
			defer old.Close()
			_, err = file.Seek(0, io.SeekStart)
			if err == nil {
				_, err = io.Copy(old, file)
			}
			return errors.Join(err, old.Chmod(perm))
		}
		if other {
			err = file.Chown(uid, gid)
		}
		if err := errors.Join(err, file.Chmod(perm)); err != nil {
			return err
		}
		return root.Rename(temp, to)
	})
}

// user is whom what the broker brings belongs to, if that is not us.
func (o Object) user() (uid, gid int, ok bool) {
	cred, err := credential(o.Spec.User)
	if err != nil || cred == nil {
		return 0, 0, false
	}
	return int(cred.Uid), int(cred.Gid), true
}

// makeDirs is MkdirAll, for the user of the sandbox.
func (o Object) makeDirs(root *os.Root, dir string) error {
	uid, gid, other := o.user()
	if !other || dir == "." {
		return root.MkdirAll(dir, 0o755)
	}
	if err := o.makeDirs(root, path.Dir(dir)); err != nil {
		return err
	}
	if err := root.Mkdir(dir, 0o755); err != nil {
		return root.MkdirAll(dir, 0o755) // it is there, or says why not
	}
	return root.Lchown(dir, uid, gid)
}

// StatFile implements sandboxer.Filer.
func (e *Extension) StatFile(ctx context.Context, h sandboxer.Handle, name string) (fi sandboxer.FileInfo, err error) {
	err = e.in(ctx, h, name, func(root *os.Root, o Object) (err error) {
		fi, err = describe(root, o.inside(name), name)
		return err
	})
	return fi, err
}

// ListFiles implements sandboxer.Filer.
func (e *Extension) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		var all []sandboxer.FileInfo
		err := e.in(ctx, h, dir, func(root *os.Root, o Object) error {
			file, err := root.Open(o.inside(dir))
			if err != nil {
				return err
			}
			defer file.Close()
			names, err := file.Readdirnames(-1)
			if err != nil {
				return err
			}
			slices.Sort(names)
			for _, name := range names {
				if name <= after {
					continue
				}
				fi, err := describe(root, path.Join(o.inside(dir), name), path.Join(dir, name))
				if err == nil { // else it was removed meanwhile
					all = append(all, fi)
				}
			}
			return nil
		})
		if err != nil {
			yield(sandboxer.FileInfo{}, err)
			return
		}
		for _, fi := range all {
			if !yield(fi, nil) {
				return
			}
		}
	}
}

// MakeDir implements sandboxer.Filer.
func (e *Extension) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return e.in(ctx, h, dir, func(root *os.Root, o Object) error {
		if err := o.makeDirs(root, o.inside(dir)); err != nil {
			return notDir(err)
		}
		if fi, err := root.Stat(o.inside(dir)); err != nil || !fi.IsDir() {
			return syscall.ENOTDIR
		}
		return nil
	})
}

// MoveFile implements sandboxer.Filer.
func (e *Extension) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	return e.in(ctx, h, from, func(root *os.Root, o Object) error {
		if fi, err := root.Lstat(o.inside(to)); err == nil && fi.IsDir() {
			return sandboxer.E(sandboxer.Invalid, nil, "%s is a directory", to)
		}
		return root.Rename(o.inside(from), o.inside(to))
	})
}

// RemoveFile implements sandboxer.Filer.
func (e *Extension) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	return e.in(ctx, h, name, func(root *os.Root, o Object) error {
		if o.inside(name) == "." {
			return sandboxer.E(sandboxer.Invalid, nil, "the sandbox's root cannot be removed")
		}
		return root.RemoveAll(o.inside(name))
	})
}

// describe describes the file rel, which the caller calls name.
func describe(root *os.Root, rel, name string) (sandboxer.FileInfo, error) {
	fi, err := root.Lstat(rel)
	if err != nil {
		return sandboxer.FileInfo{}, err
	}
	out := sandboxer.FileInfo{Path: name, Size: fi.Size(), Mode: fi.Mode(), ModTime: fi.ModTime()}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		out.Owner, out.Group = strconv.Itoa(int(st.Uid)), strconv.Itoa(int(st.Gid))
		if u, err := user.LookupId(out.Owner); err == nil {
			out.Owner = u.Username
		}
		if g, err := user.LookupGroupId(out.Group); err == nil {
			out.Group = g.Name
		}
	}
	if fi.Mode().Type() == fs.ModeSymlink {
		out.Target, err = root.Readlink(rel)
	}
	return out, err
}

// notDir tells a path that leads through a file from one that does not exist.
func notDir(err error) error {
	if errors.Is(err, syscall.ENOTDIR) || errors.Is(err, fs.ErrExist) {
		return sandboxer.E(sandboxer.Invalid, err, "a part of the path is not a directory")
	}
	return err
}

// fileError gives an error of the file system its kind.
func fileError(err error, name string) error {
	var known *sandboxer.Error
	switch {
	case err == nil || errors.As(err, &known):
		return err
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, fs.ErrNotExist):
		return sandboxer.E(sandboxer.NotFound, err, "%s does not exist", name)
	case errors.Is(err, syscall.EISDIR):
		return sandboxer.E(sandboxer.Invalid, err, "%s is a directory", name)
	case errors.Is(err, syscall.ENOTDIR):
		return sandboxer.E(sandboxer.Invalid, err, "%s is not a directory", name)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandboxer.E(sandboxer.Exhausted, err, "the disk is full")
	case errors.Is(err, fs.ErrPermission):
		return sandboxer.E(sandboxer.Denied, err, "%s may not be changed", name)
	}
	return sandboxer.E(sandboxer.Invalid, err, "%s cannot be used", name)
}

// contextReader fails once ctx is done, also while r says nothing.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	type read struct {
		data []byte
		err  error
	}
	got := make(chan read, 1)
	buf := make([]byte, len(p)) // a read that was left may still write to it
	go func() {
		n, err := c.r.Read(buf)
		got <- read{buf[:n], err}
	}()
	select {
	case r := <-got:
		return copy(p, r.data), r.err
	case <-c.ctx.Done():
		return 0, c.ctx.Err()
	}
}

// copyTree copies the directory from into to, with modes, owners where possible and
// links as they are, and returns the bytes of its files. Sockets, pipes and devices
// are left out.
func copyTree(from, to string) (bytes int64, err error) {
	err = filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, name)
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		dst := filepath.Join(to, rel)
		switch fi.Mode().Type() {
		case fs.ModeDir:
			if err := os.MkdirAll(dst, 0o755); err != nil {
				return err
			}
		case fs.ModeSymlink:
			target, err := os.Readlink(name)
			if err != nil {
				return err
			}
			return os.Symlink(target, dst)
		case 0:
			n, err := copyFile(name, dst)
			if bytes += n; err != nil {
				return err
			}
		default:
			return nil
		}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && os.Getuid() == 0 {
			if err := os.Chown(dst, int(st.Uid), int(st.Gid)); err != nil {
				return err
			}
		}
		return os.Chmod(dst, fi.Mode().Perm())
	})
	return bytes, err
}

func copyFile(from, to string) (int64, error) {
	src, err := os.Open(from)
	if err != nil {
		return 0, err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(dst, src)
	return n, errors.Join(err, dst.Close())
}
