//go:build linux

package local

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/mounts"
)

// If the broker is root, each sandbox has a range of host user and group IDs of its own: a
// process that breaks out of its kernel or file server is, on this machine, a user that owns
// only this sandbox's files, and cannot signal or trace the processes of others. The record
// has the first ID of the range; the sandbox's ID 0 becomes that one.
//
// A skeleton's files belong, on the disk, to the IDs from idShift on. For each sandbox a
// mount of the skeleton maps these to the sandbox's own, and is removed once the sandbox's
// file server has it.

// idRanges allocates ranges. Claims are for the whole machine: links in a directory that all
// installations share. Their names are the first IDs, and they point to the directories of
// the sandboxes.
type idRanges struct {
	dir    string
	base   uint32
	count  int
	mounts string // where skeletons are mounted for single sandboxes
	why    error  // why this machine does not support it; nil if it does

	mu      sync.Mutex
	spaces  map[uint32]*os.File // user namespaces that map idShift to a range
	placed  int                 // how many places this process has used
	leaving sync.WaitGroup
}

// maxSpaces bounds the user namespaces that are kept for the next sandbox of a range.
const maxSpaces = 64

// newIDRanges prepares ranges, and tests whether this machine supports them for skel.
func newIDRanges(cfg Config, mounts string, skel *skeleton) *idRanges {
	r := &idRanges{
		dir: filepath.Join(filepath.Dir(mounts), "ids"), base: uint32(cfg.UIDBase), count: cfg.UIDRanges,
		mounts: filepath.Join(mounts, boxMounts), spaces: map[uint32]*os.File{},
	}
	for _, kind := range []string{"uid", "gid"} {
		if r.why = mapped("/proc/self/"+kind+"_map", r.base, r.count); r.why != nil {
			return r
		}
	}
	fd, err := r.open(skel.root, r.base, false)
	if err == nil {
		err = unix.Close(fd)
	}
	r.why = err
	return r
}

// mapped fails if not all of the ranges are IDs in this process's user namespace.
func mapped(file string, base uint32, count int) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	first, after := uint64(base), uint64(base)+uint64(count)*idCount
	for s := bufio.NewScanner(bytes.NewReader(data)); s.Scan(); {
		var inside, outside, n uint64
		if _, err := fmt.Sscan(s.Text(), &inside, &outside, &n); err == nil && inside <= first && after <= inside+n {
			return nil
		}
	}
	return fmt.Errorf("this user namespace does not have all IDs from %d to %d (%s)", first, after-1, file)
}

// take finds a free range, records it with note, and claims it for the sandbox whose
// directory is box. Kinds: Exhausted when there is none; that of ctx's end.
func (r *idRanges) take(ctx context.Context, box string, note func(base uint32) error) error {
	unlock, err := r.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	claimed, err := r.claims()
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "the user IDs of other sandboxes cannot be read")
	}
	claim := func(base uint32) error {
		if err := note(base); err != nil {
			return err
		}
		if err := os.Symlink(box, r.link(base)); err != nil {
			return diskError(err, "recording the sandbox's user IDs")
		}
		return nil
	}
	for i := range r.count {
		base := r.base + uint32(i)*idCount
		if _, ok := claimed[base]; !ok && !inUse(base) {
			return claim(base)
		}
	}
	// Claims of directories that were removed by hand.
	for i := range r.count {
		base := r.base + uint32(i)*idCount
		if owner, ok := claimed[base]; ok && owner != box && !inUse(base) {
			if _, err := os.Lstat(owner); !errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err := os.Remove(r.link(base)); err != nil {
				return diskError(err, "taking user IDs that no sandbox uses any more")
			}
			return claim(base)
		}
	}
	return sandboxer.E(sandboxer.Exhausted, nil, "all %d ranges of user IDs for sandboxes on this machine are in use", r.count).
		WithHint("destroy sandboxes, or raise uid_ranges of the extension")
}

// retake claims the range of an existing sandbox, if the claim is gone: the directory may
// have been emptied.
func (r *idRanges) retake(ctx context.Context, box string, base uint32) error {
	if owner, err := os.Readlink(r.link(base)); err == nil && owner == box {
		return nil
	}
	unlock, err := r.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.Symlink(box, r.link(base)); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil // its present owner was first; see inUse
}

// giveBack ends the claim of the sandbox whose directory is box. Only that directory may be
// left of it.
func (r *idRanges) giveBack(box string, base uint32) error {
	if owner, err := os.Readlink(r.link(base)); err != nil || owner != box {
		return nil // there is none
	}
	if err := os.Remove(r.link(base)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// giveBackAll does so for a sandbox whose range is not known.
func (r *idRanges) giveBackAll(box string) error {
	claimed, err := r.claims()
	errs := []error{err}
	for base, owner := range claimed {
		if owner == box {
			errs = append(errs, r.giveBack(box, base))
		}
	}
	return errors.Join(errs...)
}

func (r *idRanges) link(base uint32) string {
	return filepath.Join(r.dir, strconv.FormatUint(uint64(base), 10))
}

// claims returns the claimed ranges, and the directories of their sandboxes.
func (r *idRanges) claims() (map[uint32]string, error) {
	entries, err := os.ReadDir(r.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	out := map[uint32]string{}
	for _, d := range entries {
		if n, err := strconv.ParseUint(d.Name(), 10, 32); err == nil {
			owner, err := os.Readlink(filepath.Join(r.dir, d.Name()))
			if err == nil {
				out[uint32(n)] = owner
			}
		}
	}
	return out, nil
}

// inUse reports whether a process on this machine runs as the user: remains of an unknown
// sandbox.
func inUse(uid uint32) bool {
	_, err := unix.Getpriority(unix.PRIO_USER, int(uid))
	return !errors.Is(err, unix.ESRCH)
}

// lock keeps other installations of this machine from taking ranges.
func (r *idRanges) lock(ctx context.Context) (unlock func(), err error) {
	var l *filelock.Lock
	err = filelock.Wait(ctx, func() error {
		err := os.MkdirAll(r.dir, 0o700)
		if err == nil {
			l, err = tryLockDir(r.dir, filelock.Exclusive)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return filelock.ErrReplaced // the last process to close removed it, or the directory above it
		}
		return err
	})
	switch {
	case err == nil:
		return l.Release, nil
	case ctx.Err() != nil:
		return nil, sandboxer.E(sandboxer.KindOf(ctx.Err()), context.Cause(ctx), "another process is taking user IDs for a sandbox")
	}
	return nil, sandboxer.E(sandboxer.Unavailable, err, "the list of user IDs of sandboxes, %s, cannot be locked", r.dir)
}

// boxMounts is where, among the mounts of an installation, skeletons and other parts of this machine are mounted for
// single sandboxes: "<name>.<process>.<number>", while a create runs.
const boxMounts = "box"

// place returns a new mount point for the sandbox called name.
func (r *idRanges) place(name string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.placed++
	return filepath.Join(r.mounts, fmt.Sprintf("%s.%d.%d", name, os.Getpid(), r.placed))
}

// show mounts skel at a place, mapped to the range at base. whole includes the directories
// of this machine.
func (r *idRanges) show(skel *skeleton, at string, base uint32, whole bool) error {
	if err := walkable(at); err != nil {
		return err
	}
	fd, err := r.open(skel.root, base, whole)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return os.NewSyscallError("move_mount", unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH))
}

// leave unmounts a place in the background, since that waits for milliseconds; processes
// that use the mount keep it.
func (r *idRanges) leave(at string) {
	r.leaving.Go(func() { _ = unshow(at) }) // remove finds what stays
}

// unshow removes a mount of show.
func unshow(at string) error {
	if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return err
	}
	err := unix.Rmdir(at)
	if errors.Is(err, unix.ENOTDIR) { // a file was mounted
		err = unix.Unlink(at)
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// unshowAll removes the sandbox's mounts that a dead process has left.
func (r *idRanges) unshowAll(name string) error {
	entries, err := os.ReadDir(r.mounts)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var errs []error
	for _, d := range entries {
		if rest, ok := strings.CutPrefix(d.Name(), name+"."); ok && strings.Count(rest, ".") == 1 {
			errs = append(errs, unshow(filepath.Join(r.mounts, d.Name())))
		}
	}
	return errors.Join(errs...)
}

// open returns a mount of the tree at root, not yet attached, with files that belong to the
// range at base.
func (r *idRanges) open(root string, base uint32, whole bool) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	space := r.spaces[base]
	if space == nil {
		var err error
		maps := []syscall.SysProcIDMap{{ContainerID: idShift, HostID: int(base), Size: idCount}}
		if space, err = mounts.IDSpace(maps, maps); err != nil {
			return -1, err
		}
		if len(r.spaces) < maxSpaces {
			r.spaces[base] = space
		} else {
			defer space.Close()
		}
	}
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if whole {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, root, flags)
	if err != nil {
		return -1, os.NewSyscallError("open_tree", err)
	}
	// Only the skeleton's own files: those of this machine belong to no user inside. All
	// sandboxes see the same ones, and each would otherwise own them.
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP | unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Userns_fd: uint64(space.Fd())}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("a mount of %s cannot map user IDs: %w", root, os.NewSyscallError("mount_setattr", err))
	}
	return fd, nil
}

// canMap fails if mounts of the open file cannot map user IDs.
func (r *idRanges) canMap(fd int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	space := r.spaces[r.base] // since newIDRanges
	if space == nil {
		return nil
	}
	tree, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return os.NewSyscallError("open_tree", err)
	}
	defer unix.Close(tree)
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(space.Fd())}
	return os.NewSyscallError("mount_setattr", unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, attr))
}

// close closes what this process holds.
func (r *idRanges) close() {
	r.leaving.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.spaces {
		f.Close()
	}
	clear(r.spaces)
	for _, d := range []string{r.mounts, filepath.Dir(r.mounts), r.dir, filepath.Dir(r.dir)} {
		_ = unix.Rmdir(d) // if empty: the last two are for all installations
	}
}
