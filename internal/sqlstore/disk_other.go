//go:build !linux

package sqlstore

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// remoteFilesystem names the file system of dir if it is not a local one.
func remoteFilesystem(dir string) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "", err
	}
	switch name := unix.ByteSliceToString(st.Fstypename[:]); name {
	case "nfs", "smbfs", "afpfs", "webdav", "macfuse", "osxfuse", "fusefs":
		return name, nil
	}
	return "", nil
}

// freeBytes returns how much this process may still write to the file system of path.
func freeBytes(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// allocate gives f size bytes of real space.
func allocate(f *os.File, size int64) error { return writeZeros(f, size) }
