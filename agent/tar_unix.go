//go:build unix

package agent

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const openNonblock = syscall.O_NONBLOCK

func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// linkID identifies a file that has more than one name.
func linkID(fi fs.FileInfo) ([2]uint64, bool) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || st.Nlink < 2 {
		return [2]uint64{}, false
	}
	return [2]uint64{uint64(st.Dev), st.Ino}, true
}

// sameDevice reports whether nothing is mounted at fi, which is in the directory in.
func sameDevice(in, fi fs.FileInfo) bool {
	a, aok := in.Sys().(*syscall.Stat_t)
	b, bok := fi.Sys().(*syscall.Stat_t)
	return aok && bok && a.Dev == b.Dev
}

// A fileMaker makes files in one directory, with as few system calls as possible: in a
// sandbox, each may cost as much as a small file.
type fileMaker struct{ dir *os.File }

func newFileMaker(root *os.Root) (fileMaker, error) {
	d, err := root.Open(".")
	return fileMaker{d}, err
}

func (m fileMaker) close() { m.dir.Close() }

// create makes the file base, which must be a name without slashes, and must not exist
// yet.
func (m fileMaker) create(base string, mode fs.FileMode) (newFile, error) {
	f := newFile{dir: int(m.dir.Fd()), base: base}
	var err error
	for {
		f.fd, err = unix.Openat(f.dir, base, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, uint32(mode.Perm()))
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return f, &fs.PathError{Op: "open", Path: base, Err: err}
	}
	return f, nil
}

type newFile struct {
	dir, fd int
	base    string
}

func (f newFile) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Write(f.fd, p[done:])
		if n > 0 {
			done += n
		}
		if err != nil && err != unix.EINTR {
			return done, &fs.PathError{Op: "write", Path: f.base, Err: err}
		}
	}
	return done, nil
}

func (f newFile) close() error {
	if err := unix.Close(f.fd); err != nil && err != unix.EINTR {
		return &fs.PathError{Op: "close", Path: f.base, Err: err}
	}
	return nil
}

// finish sets an owner, if that is not nil, a mode and a time, if that is not zero.
func (f newFile) finish(owner *[2]int, mode fs.FileMode, at time.Time) error {
	failed := func(op string, err error) error { return &fs.PathError{Op: op, Path: f.base, Err: err} }
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return failed("stat", err)
	}
	if owner != nil && (int(st.Uid) != owner[0] || int(st.Gid) != owner[1]) {
		if err := unix.Fchown(f.fd, owner[0], owner[1]); err != nil {
			return failed("chown", err)
		}
	}
	if uint32(st.Mode)&0o7777 != uint32(mode) { // the umask applied to the creation mode
		if err := unix.Fchmod(f.fd, uint32(mode)); err != nil {
			return failed("chmod", err)
		}
	}
	if at.IsZero() {
		return nil
	}
	ts, err := unix.TimeToTimespec(at)
	if err != nil {
		return failed("utimes", err)
	}
	if err := unix.UtimesNanoAt(f.dir, f.base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failed("utimes", err)
	}
	return nil
}
