//go:build linux

package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// The directories and files of this machine that a sandbox has mounted reach its file server
// as mounts of their own, each at a place that is the sandbox's while it is made: not a name
// of the source, which somebody could lead elsewhere, but the very directory that was looked
// at. They map user IDs. In the sandbox they begin at a fixed place beside the agent, whatever
// its root has, and before anything of the guest's runs the agent moves them to their targets.

// mountsDir is where, inside, mounts begin: in a directory each, or on a file.
const mountsDir = agentDir + "/mounts"

// mountAt is where the mount with that number begins.
func mountAt(i int, isDir bool) string {
	if isDir {
		return fmt.Sprintf("%s/d%d", mountsDir, i)
	}
	return fmt.Sprintf("%s/f%d", mountsDir, i)
}

// A mountSource is what is mounted, opened.
type mountSource struct {
	mount sandboxer.Mount
	fd    *os.File // by which it is known, and nothing can be read
	isDir bool
	owner [2]uint32 // user and group on this machine
	place string    // where the file server finds it
}

// at is where the mount with that number begins inside.
func (s *mountSource) at(i int) string { return mountAt(i, s.isDir) }

// openSources opens what spec mounts. Kinds: Invalid for what cannot be mounted, Denied for
// what must not be, Unsupported.
func (e *extension) openSources(spec sandboxer.Spec) (sources []*mountSource, err error) {
	if len(spec.Mounts) == 0 {
		return nil, nil
	}
	switch {
	case !e.asRoot:
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "%s mounts nothing where the server is an ordinary user, who cannot map the owners of files", e.env.Extension).
			WithHint("run the server as root, or give a directory as the repo input: it is copied")
	case e.ids == nil || e.ids.why != nil:
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "%s mounts nothing on this machine, which cannot give sandboxes user IDs of their own", e.env.Extension).
			WithHint("the log says why at the start; or give a directory as the repo input: it is copied")
	}
	defer func() {
		if err != nil {
			closeSources(sources)
			sources = nil
		}
	}()
	own, err := e.ownPlaces()
	if err != nil {
		return nil, err
	}
	for _, m := range spec.Mounts {
		s, err := e.openSource(m, spec.VouchesMount(m), own)
		if err != nil {
			return sources, err
		}
		sources = append(sources, s)
	}
	return sources, nil
}

func closeSources(sources []*mountSource) {
	for _, s := range sources {
		s.fd.Close()
	}
}

// rootOf finds the root of the configuration that m lies in, with as many rights.
func (e *extension) rootOf(m sandboxer.Mount) (string, bool) {
	for _, r := range e.cfg.Mounts.Roots {
		if m.Within(r.Path, r.ReadOnly) {
			return r.Path, true
		}
	}
	return "", false
}

// admitMounts admits mounts of what lies in the configured roots.
func (e *extension) admitMounts(spec sandboxer.Spec) error {
	for _, m := range spec.Mounts {
		if _, ok := e.rootOf(m); !ok && !spec.VouchesMount(m) {
			return e.notOffered(m)
		}
	}
	return nil
}

func (e *extension) notOffered(m sandboxer.Mount) error {
	return sandboxer.E(sandboxer.Denied, nil, "mount %s: %s does not offer that path%s", m.Source, e.env.Extension, map[bool]string{false: " for writing"}[m.ReadOnly]).
		WithHint("only an administrator mounts any path of the server's machine; others what the profile has, or what lies in mounts.roots of the extension")
}

// openSource opens one source, through no symbolic link from where it is trusted: the root of
// the configuration that it lies in, or the machine's.
func (e *extension) openSource(m sandboxer.Mount, vouched bool, own *ownPlaces) (*mountSource, error) {
	base, inRoot := e.rootOf(m)
	if vouched {
		base = "/"
	} else if !inRoot {
		return nil, e.notOffered(m)
	}
	refuse := func(err error, format string, args ...any) *sandboxer.Error {
		return sandboxer.E(sandboxer.Invalid, err, "mount %s: %s", m.Source, fmt.Sprintf(format, args...))
	}
	root, err := unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, refuse(err, "%s, which it is in, cannot be opened", base)
	}
	defer unix.Close(root)
	rel, err := filepath.Rel(base, m.Source)
	if err != nil {
		return nil, refuse(err, "it is not below %s", base)
	}
	fd, err := unix.Openat2(root, rel, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC | unix.O_NOFOLLOW,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nil, refuse(err, "there is no such directory or file on the server's machine")
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return nil, refuse(err, "a symbolic link is on the way there, and none is followed").WithHint("name the directory that it leads to")
	case err != nil:
		return nil, refuse(err, "it cannot be opened: %v", err)
	}
	s := &mountSource{mount: m, fd: os.NewFile(uintptr(fd), m.Source)}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil {
		s.owner = [2]uint32{st.Uid, st.Gid}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			s.isDir = true
		case unix.S_IFREG:
		case unix.S_IFLNK:
			err = refuse(nil, "it is a symbolic link, and none is followed").WithHint("name the directory that it leads to")
		default:
			err = refuse(nil, "it is neither a directory nor a regular file")
		}
	}
	if err == nil {
		err = own.refuse(s, refuse)
	}
	if err == nil && s.isDir {
		err = nothingBelow(s, refuse)
	}
	if err == nil {
		err = unmappable(m, e.ids.canMap(fd))
	}
	if err != nil {
		s.fd.Close()
		return nil, err
	}
	return s, nil
}

// realPath is where what is open lies.
func (s *mountSource) realPath() (string, error) {
	return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", s.fd.Fd()))
}

// nothingBelow refuses a directory with mounts in it: they would not be seen.
func nothingBelow(s *mountSource, refuse func(error, string, ...any) *sandboxer.Error) error {
	real, err := s.realPath()
	if err != nil {
		return err
	}
	below, err := mountsBelow(real)
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

// An inode is a directory, by whatever name.
type inode struct{ dev, ino uint64 }

func inodeOf(fd int) (inode, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return inode{st.Dev, st.Ino}, err
}

// ownPlaces are the broker's own directories, of which no sandbox sees anything.
type ownPlaces struct {
	paths []string
	are   map[inode]string // each of them
	above map[inode]string // and what they lie in
}

func (e *extension) ownPlaces() (*ownPlaces, error) {
	o := &ownPlaces{are: map[inode]string{}, above: map[inode]string{}}
	for _, p := range slices.Concat(e.env.Own, []string{e.env.Dir, filepath.Dir(e.mounts())}) {
		if p == "" {
			continue
		}
		real, err := filepath.EvalSymlinks(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			o.paths = append(o.paths, real)
			err = o.add(real)
		}
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the server's own directory %s cannot be looked at", p)
		}
	}
	return o, nil
}

// add notes what the directory, or the file, at p is, and what it lies in.
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

// ancestors calls f with the directory at p and then with each that it lies in, until f says
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

// refuse refuses what is the broker's own, lies in it, or has it inside: by its name, and by
// what it is where it has several.
func (o *ownPlaces) refuse(s *mountSource, refuse func(error, string, ...any) *sandboxer.Error) error {
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
	if !s.isDir {
		// A file has no way up; its directory is looked for by name, and is right or not there.
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

// idMaps says how the owners on this machine of what is mounted look to the sandbox with the
// range at base. To its user who the source belongs to is itself; all others that it has are, on
// this machine, the IDs from idShift on. Whoever else owns files here is nobody there.
func idMaps(owner, user, base uint32) []syscall.SysProcIDMap {
	one := func(host, inside, n uint32) syscall.SysProcIDMap {
		return syscall.SysProcIDMap{ContainerID: int(host), HostID: int(base + inside), Size: int(n)}
	}
	if owner == idShift+user {
		return []syscall.SysProcIDMap{one(idShift, 0, idCount)}
	}
	maps := []syscall.SysProcIDMap{one(owner, user, 1)}
	span := func(from, to uint32) { // inside, without to
		if from < to {
			maps = append(maps, one(idShift+from, from, to-from))
		}
	}
	if owner < idShift || owner >= idShift+idCount {
		span(0, user)
		span(user+1, idCount)
		return maps
	}
	other := owner - idShift // who would be that, is what the user would be
	maps = append(maps, one(idShift+user, other, 1))
	lo, hi := min(user, other), max(user, other)
	span(0, lo)
	span(lo+1, hi)
	span(hi+1, idCount)
	return maps
}

// open returns a mount of what s is, without a place yet, for who is the sandbox's user.
func (s *mountSource) open(who identity, base uint32) (int, error) {
	space, err := idSpace(idMaps(s.owner[0], who.uid, base), idMaps(s.owner[1], who.gid, base))
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
	if s.mount.ReadOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
		unix.Close(fd)
		return -1, unmappable(s.mount, os.NewSyscallError("mount_setattr", err))
	}
	return fd, nil
}

// unmappable says what it means that a mount cannot map user IDs.
func unmappable(m sandboxer.Mount, err error) error {
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EPERM) {
		return err
	}
	return sandboxer.E(sandboxer.Unsupported, err, "mount %s: its file system has no mounts that map user IDs", m.Source).
		WithHint("ext4, xfs and btrfs have; or give a directory as the repo input: it is copied")
}

// showSources mounts the sources at their places.
func (e *extension) showSources(sources []*mountSource, who identity, base uint32) error {
	for _, s := range sources {
		if err := e.showSource(s, who, base); err != nil {
			if _, told := errors.AsType[*sandboxer.Error](err); told {
				return err
			}
			return sandboxer.E(sandboxer.Unavailable, err, "mount %s cannot be made", s.mount.Source)
		}
	}
	return nil
}

func (e *extension) showSource(s *mountSource, who identity, base uint32) error {
	var err error
	if s.isDir {
		err = walkable(s.place)
	} else if err = walkable(filepath.Dir(s.place)); err == nil {
		var f *os.File
		if f, err = os.OpenFile(s.place, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return err
	}
	fd, err := s.open(who, base)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return os.NewSyscallError("move_mount", unix.MoveMount(fd, "", unix.AT_FDCWD, s.place, unix.MOVE_MOUNT_F_EMPTY_PATH))
}

// identify says who the user called name is, before the sandbox is there.
func identify(name string, skel *skeleton, img *image) (identity, error) {
	if isRoot(name) {
		return rootIdentity, nil
	}
	var passwd []byte
	var err error
	if img == nil {
		passwd, err = os.ReadFile(filepath.Join(skel.dir, "etc/passwd"))
	} else {
		passwd, err = img.read("etc/passwd")
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return identity{}, sandboxer.E(sandboxer.Invalid, err, "who the user %q is in the sandbox cannot be told: /etc/passwd cannot be read", name)
	}
	return findUser(name, string(passwd))
}

// read returns the beginning of a file of the image, which is no link.
func (i *image) read(name string) ([]byte, error) {
	f, err := os.Open(i.path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fsys, err := erofs.Open(f)
	if err != nil {
		return nil, err
	}
	r, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(io.LimitReader(r, maxSmall))
}

// mountTargets moves the sandbox's mounts to where they are asked for. Nothing of the guest's
// has run yet.
func (b *liveSandbox) mountTargets(ctx context.Context, mounts []sandboxer.Mount) error {
	if len(mounts) == 0 {
		return nil
	}
	at := map[string]string{} // target to where it begins
	for _, m := range b.c.Spec.Mounts {
		var i int
		var kind rune
		if n, _ := fmt.Sscanf(m.Destination, mountsDir+"/%c%d", &kind, &i); n == 2 && i < len(mounts) {
			at[mounts[i].Target] = m.Destination
		}
	}
	args := []string{agentPath, "mount", mountsDir}
	for _, m := range slices.SortedFunc(slices.Values(mounts), func(a, b sandboxer.Mount) int { return cmp.Compare(a.Target, b.Target) }) {
		args = append(args, at[m.Target], m.Target)
	}
	said, err := memoryFile("sandboxer")
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "no memory for what the agent says")
	}
	defer said.Close()
	ws, err := b.run(ctx, append(slices.Clone(ownCapabilities), "CAP_SYS_ADMIN"), map[int]*os.File{2: said}, args...)
	if err != nil {
		return b.failed(ctx, err, "mounting")
	}
	if code := ws.ExitStatus(); code != 0 {
		text, _ := io.ReadAll(io.NewSectionReader(said, 0, 1024))
		kind := sandboxer.Failed
		if code == 2 {
			kind = sandboxer.Invalid
		}
		return sandboxer.E(kind, nil, "%s", strings.TrimPrefix(strings.TrimSpace(string(text)), "sandboxer-agent: "))
	}
	return nil
}

// sameMounts reports whether two lists mount at the same targets, with the same rights, in the
// same order. What is mounted there may differ: a snapshot has nothing of it.
func sameMounts(a, b []sandboxer.Mount) bool {
	return slices.EqualFunc(a, b, func(a, b sandboxer.Mount) bool { return a.Target == b.Target && a.ReadOnly == b.ReadOnly })
}
