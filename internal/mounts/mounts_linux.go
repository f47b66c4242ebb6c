package mounts

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// A Source is an opened source of a mount.
type Source struct {
	Mount sandboxer.Mount
	IsDir bool
	fd    *os.File  // by which it is known, and nothing can be read
	owner [2]uint32 // user and group on this machine
}

// Open opens the mounts of spec, each through no symbolic link; Close closes them. The opened file is
// mounted, even if its name changes meanwhile. Kinds: Invalid for what cannot be mounted, Denied for what must
// not be, Unsupported for a file system that cannot map owners.
func (o *Opener) Open(spec sandboxer.Spec) (sources []*Source, err error) {
	if len(spec.Mounts) == 0 {
		return nil, nil
	}
	defer func() {
		if err != nil {
			Close(sources)
			sources = nil
		}
	}()
	own, err := o.ownPlaces()
	if err != nil {
		return nil, err
	}
	for _, m := range spec.Mounts {
		s, err := o.open(m, spec.VouchesMount(m), own)
		if err != nil {
			return sources, err
		}
		sources = append(sources, s)
	}
	return sources, nil
}

// Close closes sources.
func Close(sources []*Source) {
	for _, s := range sources {
		s.fd.Close()
	}
}

// ID identifies the directory or file, whatever its name.
func (s *Source) ID() (string, error) {
	i, err := inodeOf(int(s.fd.Fd()))
	return fmt.Sprintf("%d:%d", i.dev, i.ino), err
}

// open opens one source, through no symbolic link from a trusted directory: the root of
// the configuration that contains it, or the machine's.
func (o *Opener) open(m sandboxer.Mount, vouched bool, own *ownPlaces) (*Source, error) {
	base, inRoot := o.rootOf(m)
	if vouched {
		base = "/"
	} else if !inRoot {
		return nil, o.notOffered(m)
	}
	refuse := func(err error, format string, args ...any) *sandboxer.Error {
		return sandboxer.E(sandboxer.Invalid, err, "mount %s: %s", m.Source, fmt.Sprintf(format, args...))
	}
	rel, err := filepath.Rel(base, m.Source)
	if err != nil {
		return nil, refuse(err, "it is not below %s", base)
	}
	root, err := openRoot(base)
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return nil, refuse(err, "there is a symbolic link in the path of %s, the root that %s offers, and links are not followed", base, o.Extension).
			WithHint("if the link is yours, have the operator list the directory that it leads to in mounts.roots")
	case err != nil:
		return nil, refuse(err, "%s, the root that it is in, cannot be opened", base)
	}
	defer unix.Close(root)
	fd, err := openBeneath(root, rel, unix.O_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nil, refuse(err, "there is no such directory or file on the server's machine").WithHint("make it first, or name another source")
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return nil, refuse(err, "there is a symbolic link in the path, and links are not followed").WithHint("name the directory that it leads to")
	case err != nil:
		return nil, refuse(err, "it cannot be opened: %v", err)
	}
	s := &Source{Mount: m, fd: os.NewFile(uintptr(fd), m.Source)}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil {
		s.owner = [2]uint32{st.Uid, st.Gid}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			s.IsDir = true
		case unix.S_IFREG:
		case unix.S_IFLNK:
			err = refuse(nil, "it is a symbolic link, and links are not followed").WithHint("name the directory that it leads to")
		default:
			err = refuse(nil, "it is neither a directory nor a regular file")
		}
	}
	if err == nil {
		err = own.refuse(s, refuse)
	}
	if err == nil && s.IsDir {
		err = nothingBelow(s, refuse)
	}
	if err == nil && !m.ReadOnly {
		err = writable(fd, refuse)
	}
	if err == nil && o.CanMap != nil {
		err = unmappable(m, o.CanMap(fd))
	}
	if err != nil {
		s.fd.Close()
		return nil, err
	}
	return s, nil
}

// openRoot opens the directory below which a source is opened: through no symbolic link either, ever. A sandbox may have
// replaced a root by one, if the root is within another or within a profile's mount, even before the server started.
func openRoot(base string) (int, error) {
	top, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil || base == "/" {
		return top, err
	}
	defer unix.Close(top)
	return openBeneath(top, strings.TrimPrefix(base, "/"), unix.O_DIRECTORY)
}

// openBeneath opens a path below the directory dir, through no symbolic link. One at the end is opened itself with
// O_NOFOLLOW in flags.
func openBeneath(dir int, rel string, flags uint64) (int, error) {
	return unix.Openat2(dir, rel, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC | flags,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
}

// realPath is the path of the opened file.
func (s *Source) realPath() (string, error) {
	return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", s.fd.Fd()))
}

// nothingBelow refuses a directory with mounts in it: they would not be seen.
func nothingBelow(s *Source, refuse func(error, string, ...any) *sandboxer.Error) error {
	real, err := s.realPath()
	if err != nil {
		return err
	}
	below, err := Below(real)
	if err != nil {
		return err
	}
	for _, p := range below {
		if p != real {
			return refuse(nil, "another file system is mounted in it, at %s, and would not be seen", p).
				WithHint("mount its directories one by one")
		}
	}
	return nil
}

// writable refuses a source that is mounted read-only on this machine, or for this process, and would be so in the sandbox.
func writable(fd int, refuse func(error, string, ...any) *sandboxer.Error) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return refuse(nil, "the server has it read-only, and the mount asks for write access").
			WithHint("mount it read-only (:ro), or allow the systemd service to write there (ReadWritePaths=)")
	}
	return nil
}

// An inode is a directory, whatever its name.
type inode struct{ dev, ino uint64 }

func inodeOf(fd int) (inode, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return inode{st.Dev, st.Ino}, err
}

// ownPlaces are the broker's own directories. No sandbox sees anything of them.
type ownPlaces struct {
	paths []string
	are   map[inode]string // each of them
	above map[inode]string // and what they lie in
}

func (o *Opener) ownPlaces() (*ownPlaces, error) {
	out := &ownPlaces{are: map[inode]string{}, above: map[inode]string{}}
	for _, p := range o.Own {
		if p == "" {
			continue
		}
		real, err := filepath.EvalSymlinks(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			out.paths = append(out.paths, real)
			err = out.add(real)
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the server's own directory %s cannot be inspected", p)
		}
	}
	return out, nil
}

// add notes which directory or file is at p, and its parents.
func (o *ownPlaces) add(p string) error {
	fi, err := os.Lstat(p)
	if err != nil {
		return err
	}
	dir := p
	if !fi.IsDir() { // a socket, say
		dir = filepath.Dir(p)
	}
	return ancestors(dir, func(i inode, first bool) bool {
		if first && fi.IsDir() {
			o.are[i] = p
		}
		o.above[i] = p
		return true
	})
}

// ancestors calls f with the directory at p and then with each parent, until f returns
// false.
func ancestors(p string, f func(i inode, first bool) bool) error {
	fd, err := unix.Open(p, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return ancestorsOf(fd, f)
}

// ancestorsOf is ancestors for an open directory, which it closes.
func ancestorsOf(fd int, f func(i inode, first bool) bool) error {
	defer func() { unix.Close(fd) }()
	var last inode
	for first := true; ; first = false {
		i, err := inodeOf(fd)
		if err != nil {
			return err
		}
		if !first && i == last || !f(i, first) {
			return nil // the root is its own parent
		}
		last = i
		up, err := unix.Openat(fd, "..", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		unix.Close(fd)
		fd = up
	}
}

// refuse refuses what is the broker's own, is within it, or contains it: by its name, and by
// its inode in case it has several names.
func (o *ownPlaces) refuse(s *Source, refuse func(error, string, ...any) *sandboxer.Error) error {
	no := func(own string) error {
		return sandboxer.E(sandboxer.Denied, nil, "%s", sandboxer.Message(refuse(nil, "no sandbox sees anything of the server's own directory, %s", own)))
	}
	real, err := s.realPath()
	if err != nil {
		return err
	}
	for _, own := range o.paths {
		if inDir(real, own) || inDir(own, real) {
			return no(own)
		}
	}
	dir, name := int(s.fd.Fd()), "."
	if !s.IsDir {
		// A file has no link to its parent; its directory is opened by name, and is right or does not exist.
		dir, name = unix.AT_FDCWD, filepath.Dir(real)
	} else {
		i, err := inodeOf(dir)
		if err != nil {
			return err
		}
		if own, ok := o.above[i]; ok {
			return no(own)
		}
	}
	up, err := unix.Openat(dir, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return refuse(err, "the directory that it is in cannot be opened: %v", err)
	}
	var found string
	err = ancestorsOf(up, func(i inode, _ bool) bool {
		found = o.are[i]
		return found == ""
	})
	if err == nil && found != "" {
		err = no(found)
	}
	return err
}

// idMaps maps the owners of a mount's files on this machine for the sandbox with the
// range at base. The source's owner becomes the sandbox's user; all other IDs of the sandbox are, on
// this machine, the IDs from IDShift on. All other owners of files here have no ID there.
func idMaps(owner, user, base uint32) []syscall.SysProcIDMap {
	one := func(host, inside, n uint32) syscall.SysProcIDMap {
		return syscall.SysProcIDMap{ContainerID: int(host), HostID: int(base + inside), Size: int(n)}
	}
	if owner == IDShift+user {
		return []syscall.SysProcIDMap{one(IDShift, 0, IDCount)}
	}
	maps := []syscall.SysProcIDMap{one(owner, user, 1)}
	span := func(from, to uint32) { // inside, without to
		if from < to {
			maps = append(maps, one(IDShift+from, from, to-from))
		}
	}
	if owner < IDShift || owner >= IDShift+IDCount {
		span(0, user)
		span(user+1, IDCount)
		return maps
	}
	other := owner - IDShift // this ID and the user's change places
	maps = append(maps, one(IDShift+user, other, 1))
	lo, hi := min(user, other), max(user, other)
	span(0, lo)
	span(lo+1, hi)
	span(hi+1, IDCount)
	return maps
}

// Tree returns a mount of s, without a mount point yet, for the user uid with the group gid inside, of a sandbox that has the
// range of IDs at base. Unsupported: its file system cannot map owners.
func (s *Source) Tree(uid, gid, base uint32) (int, error) {
	space, err := IDSpace(idMaps(s.owner[0], uid, base), idMaps(s.owner[1], gid, base))
	if errors.Is(err, unix.EPERM) {
		return -1, sandboxer.E(sandboxer.Unsupported, err, "mount %s: the server may not map the owners of files", s.Mount.Source).
			WithHint("give it CAP_SETFCAP, or give a directory as the repo input: it is copied")
	}
	if err != nil {
		return -1, err
	}
	defer space.Close()
	fd, err := unix.OpenTree(int(s.fd.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return -1, os.NewSyscallError("open_tree", err)
	}
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Userns_fd: uint64(space.Fd()),
		Propagation: unix.MS_PRIVATE}
	if s.Mount.ReadOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
		unix.Close(fd)
		return -1, unmappable(s.Mount, os.NewSyscallError("mount_setattr", err))
	}
	return fd, nil
}

// unmappable says what it means that a mount cannot map user IDs.
func unmappable(m sandboxer.Mount, err error) error {
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EPERM) {
		return err
	}
	return sandboxer.E(sandboxer.Unsupported, err, "mount %s: its file system has no mounts that map user IDs", m.Source).
		WithHint("use ext4, xfs or btrfs; or give a directory as the repo input: it is copied")
}

// inDir reports whether p is dir, or within it.
func inDir(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

// Below lists the mount points at or below dir, in the order they were made.
func Below(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	var out []string
	sc := bufio.NewScanner(f)
	sc.Buffer(make([]byte, 64<<10), 1<<20)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		if len(fields) < 5 {
			continue
		}
		at := unescapeMount(fields[4])
		if at == dir || strings.HasPrefix(at, dir+"/") {
			out = append(out, at)
		}
	}
	return out, sc.Err()
}

// unescapeMount undoes the octal escapes of mountinfo (\040 is a space).
func unescapeMount(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// IDSpace makes a user namespace that maps the owners of files. It
// takes a process, which ends before it has run.
func IDSpace(uids, gids []syscall.SysProcIDMap) (*os.File, error) {
	runtime.LockOSThread() // whose end would be the child's
	defer runtime.UnlockOSThread()
	p, err := os.StartProcess("/proc/self/exe", []string{"sandboxer-ids"}, &os.ProcAttr{Env: []string{}, Sys: &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER, UidMappings: uids, GidMappings: gids, Ptrace: true, Pdeathsig: syscall.SIGKILL,
	}})
	if err != nil {
		return nil, fmt.Errorf("a user namespace for the IDs from %d on cannot be made: %w", uids[0].HostID, err)
	}
	defer func() {
		_ = p.Kill()
		_, _ = p.Wait()
	}()
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid)) // it is our child, and not waited for: the number is its own
}
