package mounts

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// Can refuses, as Unsupported, where this process may not make mounts that map owners.
func Can(extension string) error {
	if os.Geteuid() != 0 {
		return sandboxer.E(sandboxer.Unsupported, nil, "%s cannot mount while the server runs as an ordinary user, who cannot map the owners of files", extension).
			WithHint("run the server as root, or give a directory as the repo input: it is copied")
	}
	return nil
}

// try refuses sources that cannot be mounted.
func try(sources []*Source) error {
	for _, s := range sources {
		fd, err := s.Tree(0, 0, 0)
		if err != nil {
			return told(s, err)
		}
		unix.Close(fd)
	}
	return nil
}

func told(s *Source, err error) error {
	if _, ok := errors.AsType[*sandboxer.Error](err); ok {
		return err
	}
	return sandboxer.E(sandboxer.Unavailable, err, "mount %s cannot be made", s.Mount.Source)
}

// At is where Show shows the source with that number.
func At(place string, i int) string { return filepath.Join(place, fmt.Sprint(i)) }

// Show makes the directory place, which only root enters, and shows the sources in it (At), with their owners mapped for
// the user uid with the group gid, whose numbers are the same inside and on this machine. They are on a file
// system of their own, so that a process that does not see it (in another mount namespace, on another machine) finds
// nothing rather than something else. It is made in space, where place has to be the same directory; else the error is ErrApart.
// Hide removes it, even if Show failed or its process died.
func Show(place string, sources []*Source, uid, gid uint32, space *Space) error {
	if err := os.MkdirAll(place, 0o700); err != nil {
		return err
	}
	here, err := os.Lstat(place)
	if err != nil {
		return err
	}
	var trees []int // made of what is open here
	defer func() {
		for _, fd := range trees {
			unix.Close(fd)
		}
	}()
	for _, s := range sources {
		fd, err := s.Tree(uid, gid, 0)
		if err != nil {
			return told(s, err)
		}
		trees = append(trees, fd)
	}
	return space.do(func() error {
		if there, err := os.Lstat(place); space != nil && (err != nil || !os.SameFile(here, there)) {
			return ErrApart
		}
		if err := unix.Mount("sandboxer", place, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700,size=64k,nr_inodes=64"); err != nil {
			return os.NewSyscallError("mount", err)
		}
		if err := unix.Mount("", place, "", unix.MS_PRIVATE, ""); err != nil {
			return os.NewSyscallError("mount", err)
		}
		for i, s := range sources {
			if err := show(At(place, i), s.IsDir, trees[i]); err != nil {
				return told(s, err)
			}
		}
		return nil
	})
}

func show(at string, isDir bool, tree int) error {
	var err error
	if isDir {
		err = os.Mkdir(at, 0o700)
	} else {
		err = os.WriteFile(at, nil, 0o600)
	}
	if err != nil {
		return err
	}
	return os.NewSyscallError("move_mount", unix.MoveMount(tree, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH))
}

// Hide removes what Show has made; a process that uses it keeps it. Absence is success. Sources
// are left alone: only empty directories are removed, that of the place and those that an engine that did not see the mounts has
// made there. A mount in another namespace goes with its directory there, without space; but if that namespace's
// mounts propagate here, as with a service of systemd, and another mount covers them, the error is EBUSY until Hide is called with space.
// If the place is in another directory there, mounts there are left alone, and the error is ErrApart.
func Hide(place string, space *Space) error {
	here, err := os.Lstat(place)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if space != nil {
		// What is mounted over the place may differ; its directory may not.
		parent, err := os.Lstat(filepath.Dir(place))
		if err != nil {
			return err
		}
		if err := space.do(func() error {
			if there, err := os.Lstat(filepath.Dir(place)); err != nil || !os.SameFile(parent, there) {
				return ErrApart
			}
			err := unmount(place)
			if there, serr := os.Lstat(place); err == nil && (serr != nil || !os.SameFile(here, there)) {
				return ErrApart
			}
			return err
		}); err != nil {
			return err
		}
	}
	if err := unmount(place); err != nil {
		return err
	}
	made, err := os.ReadDir(place)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, d := range made {
		if err := unix.Rmdir(filepath.Join(place, d.Name())); err != nil {
			return os.NewSyscallError("rmdir", err)
		}
	}
	if err := unix.Rmdir(place); err != nil && !errors.Is(err, unix.ENOENT) {
		return os.NewSyscallError("rmdir", err)
	}
	return nil
}

// Holds refuses, as Invalid, a target within the mount of s, at rel below it, that cannot be a mount point: through a symbolic link, of
// another kind than its source, or missing where nothing can be made.
func (s *Source) Holds(rel string, target sandboxer.Mount, isDir bool) error {
	refuse := func(err error, why string) error {
		return sandboxer.E(sandboxer.Invalid, err, "mount %s:%s: %s", target.Source, target.Target, why)
	}
	fd, err := openBeneath(int(s.fd.Fd()), rel, unix.O_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT) && s.Mount.ReadOnly:
		return refuse(err, "it does not exist, and its directory is read-only")
	case errors.Is(err, unix.ENOENT):
		// The existing part of the path to it, including a dangling link.
		up := filepath.Dir(rel)
		if up == "." {
			return nil
		}
		return s.Holds(up, target, true)
	case errors.Is(err, unix.ENOTDIR):
		return refuse(err, "a file is on the way there")
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return refuse(err, "a symbolic link is on the way there")
	case err != nil:
		return refuse(err, "it cannot be inspected")
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return refuse(err, "it cannot be inspected")
	}
	return Fits(target, isDir, st.Mode&unix.S_IFMT == unix.S_IFDIR, st.Mode&unix.S_IFMT == unix.S_IFLNK)
}

// unmount removes all mounts on place.
func unmount(place string) error {
	for {
		err := unix.Unmount(place, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return os.NewSyscallError("umount", err)
		}
	}
}

// In reports whether a running process has s at its target, with the owners that this process sees.
func (s *Source) In(pid int) (bool, error) {
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", pid))
	if err != nil {
		return false, err
	}
	if ours, err := os.Readlink("/proc/self/ns/user"); err != nil || ours != theirs {
		return false, err
	}
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, os.NewSyscallError("open", err)
	}
	defer unix.Close(root)
	fd, err := openBeneath(root, strings.TrimPrefix(s.Mount.Target, "/"), unix.O_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, os.NewSyscallError("openat2", err)
	}
	defer unix.Close(fd)
	there, err := inodeOf(fd)
	here, herr := inodeOf(int(s.fd.Fd()))
	return there == here, errors.Join(err, herr)
}

// Inside returns target's path below the mount point of s.
func (s *Source) Inside(target string) (rel string, ok bool) {
	return strings.CutPrefix(target, s.Mount.Target+"/")
}
