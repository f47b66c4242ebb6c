package agent

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// runMount moves mounts out of a directory, which is then hidden, to their targets: pairs SRC
// TARGET, parents before the targets below them. No link is followed on the way to a target;
// another mount on the way may change at the same time.
func runMount(args []string) int {
	if len(args) < 3 || len(args)%2 == 0 {
		fmt.Fprintln(os.Stderr, "sandboxer-agent: mount needs a directory, and pairs of SRC and TARGET")
		return 2
	}
	for rest := args[1:]; len(rest) > 0; rest = rest[2:] {
		if err := moveMount(rest[0], rest[1]); err != nil {
			return report(err)
		}
	}
	// A file server that has the directory also shows what is mounted in it there.
	return report(os.NewSyscallError("mount", unix.Mount("none", args[0], "tmpfs", unix.MS_RDONLY, "size=4096,mode=0555")))
}

func moveMount(src, target string) error {
	var st unix.Stat_t
	if err := unix.Lstat(src, &st); err != nil {
		return err
	}
	at, err := mountPoint(target, st.Mode&unix.S_IFMT == unix.S_IFDIR)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	// Bound first: the kernel of gVisor has no move_mount, which takes a descriptor.
	if err := unix.Mount(src, fmt.Sprintf("/proc/self/fd/%d", at), "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting at %s: %w", target, err)
	}
	return os.NewSyscallError("umount", unix.Unmount(src, unix.UMOUNT_NOFOLLOW))
}

// mountPoint opens the directory or file target, and makes missing parts of its path.
func mountPoint(target string, isDir bool) (int, error) {
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	names := strings.Split(strings.Trim(target, "/"), "/")
	for i, name := range names {
		next, err := enterMountPoint(fd, name, path.Join("/", path.Join(names[:i+1]...)), isDir || i < len(names)-1)
		unix.Close(fd)
		if err != nil {
			return -1, err
		}
		fd = next
	}
	return fd, nil
}

// enterMountPoint opens name in the directory fd; whole is its path for messages.
func enterMountPoint(fd int, name, whole string, isDir bool) (int, error) {
	what, how := "a file", 0
	if isDir {
		what, how = "a directory", unix.O_DIRECTORY
	}
	refuse := func(err error, format string, args ...any) error {
		return sandboxer.E(sandboxer.Invalid, err, "cannot mount at %s: %s", whole, fmt.Sprintf(format, args...))
	}
	for try := 0; ; try++ {
		var st unix.Stat_t
		err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) && try < 3 {
			if isDir {
				err = unix.Mkdirat(fd, name, 0o755)
			} else {
				var f int
				if f, err = unix.Openat(fd, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644); err == nil {
					unix.Close(f)
				}
			}
			switch {
			case err == nil, errors.Is(err, unix.EEXIST):
				continue
			case errors.Is(err, unix.EROFS):
				return -1, refuse(err, "it does not exist, and its parent directory is read-only")
			}
			return -1, refuse(err, "it does not exist and cannot be made: %v", err)
		}
		switch kind := st.Mode & unix.S_IFMT; {
		case err != nil:
			return -1, refuse(err, "%v", err)
		case kind == unix.S_IFLNK:
			return -1, refuse(nil, "it is a symbolic link")
		case isDir != (kind == unix.S_IFDIR), !isDir && kind != unix.S_IFREG:
			return -1, refuse(nil, "it is not %s", what)
		}
		next, err := unix.Openat(fd, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC|how, 0)
		if err != nil {
			return -1, refuse(err, "%v", err)
		}
		// A link may have replaced what we checked.
		var now unix.Stat_t
		if err := unix.Fstat(next, &now); err != nil || now.Mode&unix.S_IFMT != st.Mode&unix.S_IFMT {
			unix.Close(next)
			return -1, refuse(err, "it changes")
		}
		return next, nil
	}
}
