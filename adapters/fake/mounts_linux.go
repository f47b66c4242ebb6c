package fake

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/mounts"
	"github.com/sand-boxer/sandboxer/internal/namespaces"
)

// A sandbox with mounts has a mount namespace, in which its commands and its agent run and its files are opened. It is this machine's, and
// besides the mounts are there, once at their targets and once at the same in the sandbox's directory, where the fake's files are. Nothing of
// it is seen outside of the namespace, so that neither a copy nor a removal of the sandbox's directory meets a source.

// mounted makes the namespace of o, with what its spec mounts. It ends with unmount, and the last process in it.
func (o *Object) mounted(opener mounts.Opener) error {
	if len(o.Spec.Mounts) == 0 || o.Mounts != nil {
		return nil
	}
	if err := o.use(); err != nil {
		return err
	}
	opener.Own = append(slices.Clone(opener.Own), path.Dir(o.Dir)) // all sandboxes are there
	sources, err := opener.Open(o.Spec)
	if err != nil {
		return err
	}
	defer mounts.Close(sources)
	uid, gid, ok := o.user()
	if !ok {
		uid, gid = os.Getuid(), os.Getgid()
	}
	if uid >= mounts.IDCount || gid >= mounts.IDCount {
		return sandboxer.E(sandboxer.Unsupported, nil, "the sandbox's user %q is %d:%d, and owners of files are mapped up to %d", o.Spec.User, uid, gid, mounts.IDCount-1)
	}
	// What lies below another is mounted after it.
	slices.SortStableFunc(sources, func(a, b *mounts.Source) int { return cmp.Compare(len(a.Mount.Target), len(b.Mount.Target)) })
	b := &mounting{o: o, uid: uid, gid: gid, root: -1, ours: map[string]bool{}}
	defer b.close()
	for _, s := range sources {
		if o.Dir == s.Mount.Target || strings.HasPrefix(o.Dir, s.Mount.Target+"/") {
			return refuseTarget(s, nil, "the fake keeps its sandboxes there")
		}
		for range 2 { // while their file systems are still those of this thread
			fd, err := s.Tree(uint32(uid), uint32(gid), 0)
			if err != nil {
				return toldMount(s, err)
			}
			b.trees = append(b.trees, fd)
		}
	}
	var ns *os.File
	if err := namespaces.OnThread(func() (err error) { ns, err = b.make(sources); return err }); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		ns.Close()
		return err
	}
	o.Mounts = &Namespace{Path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd()), Inode: st.Ino, file: ns}
	return nil
}

func refuseTarget(s *mounts.Source, err error, why string) error {
	return sandboxer.E(sandboxer.Invalid, err, "mount %s:%s: %s", s.Mount.Source, s.Mount.Target, why)
}

func toldMount(s *mounts.Source, err error) error {
	if _, ok := errors.AsType[*sandboxer.Error](err); ok {
		return err
	}
	return sandboxer.E(sandboxer.Unavailable, err, "mount %s cannot be made", s.Mount.Source)
}

// unmount lets go of the namespace of o.
func (o *Object) unmount() {
	if o.Mounts != nil && o.Mounts.file != nil {
		o.Mounts.file.Close()
	}
	o.Mounts = nil
}

// within calls f on a thread that sees what o has mounted.
func (o Object) within(f func() error) error {
	if o.Mounts == nil {
		return f()
	}
	return namespaces.OnThread(func() error {
		ns, err := os.Open(o.Mounts.Path)
		if err == nil {
			defer ns.Close()
			err = o.Mounts.enter(int(ns.Fd()))
		}
		if err != nil {
			return sandboxer.E(sandboxer.NotFound, err, "there is no sandbox %s, or its mounts are gone", o.Spec.ID)
		}
		return f()
	})
}

// enter has this thread, which nothing else runs on any more, see what is in the namespace. What it starts cannot change that, root neither.
func (n *Namespace) enter(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Ino != n.Inode { // the number of the descriptor is another one's by now
		return unix.ESTALE
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns", err)
	}
	return dropAdmin()
}

func dropAdmin() error {
	return os.NewSyscallError("prctl", unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_ADMIN, 0, 0, 0))
}

// A mounting is a namespace that is made.
type mounting struct {
	o        *Object
	uid, gid int   // the sandbox's user
	trees    []int // what is mounted, twice each; -1 once it is
	root     int
	ours     map[string]bool // directories of the machine's tree in which names can be made that nobody else sees
}

func (b *mounting) close() {
	for _, fd := range b.trees {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	if b.root >= 0 {
		unix.Close(b.root)
	}
}

// make makes it of this thread's.
func (b *mounting) make(sources []*mounts.Source) (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return nil, sandboxer.E(sandboxer.Unsupported, os.NewSyscallError("unshare", err), "the fake mounts nothing here: the server may not make a mount namespace").
			WithHint("give a directory as the repo input: it is copied")
	}
	ns, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, err
	}
	// Of what the machine mounts and unmounts later it has its part; the other way round nothing is seen.
	if err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err == nil {
		b.root, err = unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	for i, s := range sources {
		for j, dir := range []string{"/", b.o.Dir} {
			if err == nil {
				err = b.mount(s, sources[:i], dir, &b.trees[2*i+j])
			}
		}
	}
	if err == nil && dropAdmin() != nil { // as whoever enters it has to
		err = sandboxer.E(sandboxer.Unsupported, nil, "the fake mounts nothing here: the server may not drop the capability that lets root change mounts").
			WithHint("give a directory as the repo input: it is copied")
	}
	if err != nil {
		ns.Close()
		return nil, err
	}
	return ns, nil
}

// mount mounts tree at the target of s below dir. What lies in one of upper is made in that one's source, for the sandbox's user.
func (b *mounting) mount(s *mounts.Source, upper []*mounts.Source, dir string, tree *int) error {
	at, err := unix.Openat(b.root, strings.TrimPrefix(dir, "/")+"/.", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return toldMount(s, err)
	}
	defer func() { unix.Close(at) }()
	parts := strings.Split(strings.TrimPrefix(s.Mount.Target, "/"), "/")
	for i, name := range parts {
		in := "/" + strings.Join(parts[:i], "/") // where at is
		isDir := s.IsDir || i < len(parts)-1
		fd, err := openName(at, name)
		if errors.Is(err, unix.ENOENT) {
			source := slices.ContainsFunc(upper, func(u *mounts.Source) bool { _, ok := u.Inside(in + "/"); return ok })
			if dir == "/" && !source && !b.ours[in] {
				if at, err = b.cover(in, at); err != nil {
					return toldMount(s, err)
				}
			}
			if err = makeName(at, name, isDir); err == nil && source {
				err = unix.Fchownat(at, name, b.uid, b.gid, unix.AT_SYMLINK_NOFOLLOW)
			}
			switch {
			case errors.Is(err, unix.EROFS):
				return refuseTarget(s, err, "it does not exist, and its parent directory is read-only")
			case errors.Is(err, unix.EEXIST): // somebody else was faster; what that is, is seen now
			case err != nil:
				return toldMount(s, err)
			case dir == "/" && !source && isDir:
				b.ours[path.Join(in, name)] = true
			}
			fd, err = openName(at, name)
		}
		if err != nil {
			return refuseTarget(s, err, "it cannot be inspected")
		}
		unix.Close(at)
		at = fd
		var st unix.Stat_t
		if err := unix.Fstat(at, &st); err != nil {
			return refuseTarget(s, err, "it cannot be inspected")
		}
		if err := mounts.Fits(s.Mount, isDir, st.Mode&unix.S_IFMT == unix.S_IFDIR, st.Mode&unix.S_IFMT == unix.S_IFLNK); err != nil {
			return err
		}
	}
	if err := moveMount(*tree, at, ""); err != nil {
		return toldMount(s, err)
	}
	unix.Close(*tree)
	*tree = -1
	return nil
}

func openName(dir int, name string) (int, error) {
	return unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

func makeName(dir int, name string, isDir bool) error {
	if isDir {
		return unix.Mkdirat(dir, name, 0o755)
	}
	return unix.Mknodat(dir, name, unix.S_IFREG|0o644, 0)
}

func moveMount(tree, dir int, name string) error {
	flags := unix.MOVE_MOUNT_F_EMPTY_PATH
	if name == "" {
		flags |= unix.MOVE_MOUNT_T_EMPTY_PATH
	}
	return os.NewSyscallError("move_mount", unix.MoveMount(tree, "", dir, name, flags))
}

// coverMax bounds what a directory may hold in which a target is missing.
const coverMax = 10_000

// cover puts a directory of this namespace alone over one of the machine's, open as at, and in it all that the other has: names can be made there.
// It closes at.
func (b *mounting) cover(name string, at int) (top int, err error) {
	var st unix.Stat_t
	list, err := unix.Openat(at, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return at, os.NewSyscallError("open", err)
	}
	from := os.NewFile(uintptr(list), name)
	defer from.Close()
	names, err := from.Readdirnames(coverMax + 1)
	if err == nil && len(names) > coverMax {
		err = sandboxer.E(sandboxer.Unsupported, nil, "cannot mount in %s, which has more than %d names", name, coverMax)
	}
	if err == nil || errors.Is(err, io.EOF) { // it has none
		err = unix.Fstat(at, &st)
	}
	if err != nil {
		return at, err
	}
	top, err = tmpfs()
	if err != nil {
		return at, err
	}
	old := at
	defer unix.Close(old)
	if err := moveMount(top, old, ""); err != nil {
		return top, err
	}
	if err := errors.Join(unix.Fchownat(top, "", int(st.Uid), int(st.Gid), unix.AT_EMPTY_PATH), unix.Fchmodat(top, ".", st.Mode&0o7777, 0)); err != nil {
		return top, err
	}
	for _, n := range names {
		if err := carry(old, top, n); err != nil && !errors.Is(err, unix.ENOENT) { // removed meanwhile
			return top, fmt.Errorf("%s of %s: %w", n, name, err)
		}
	}
	if name == "/" { // paths begin there from now on
		if err := errors.Join(unix.Fchdir(top), unix.Chroot(".")); err != nil {
			return top, err
		}
		unix.Close(b.root)
		b.root, err = unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	b.ours[name] = true
	return top, err
}

// tmpfs makes one without a place yet.
func tmpfs() (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	if err := errors.Join(unix.FsconfigSetString(fs, "source", "sandboxer"), unix.FsconfigCreate(fs)); err != nil {
		return -1, os.NewSyscallError("fsconfig", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	return fd, os.NewSyscallError("fsmount", err)
}

// carry has what is called name in one directory be in another, too.
func carry(from, to int, name string) error {
	fd, err := openName(from, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", buf)
		if err != nil {
			return err
		}
		return unix.Symlinkat(string(buf[:n]), to, name)
	}
	if err := makeName(to, name, st.Mode&unix.S_IFMT == unix.S_IFDIR); err != nil {
		return err
	}
	tree, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|unix.AT_RECURSIVE)
	if err != nil {
		return os.NewSyscallError("open_tree", err)
	}
	defer unix.Close(tree)
	return moveMount(tree, to, name)
}
