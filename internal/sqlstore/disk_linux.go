package sqlstore

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// remoteFilesystems are those on which locks and shared memory cannot be trusted,
// by the magic number that statfs reports. FUSE is among them because nothing distinguishes an
// SSH mount from a local one.
var remoteFilesystems = map[int64]string{
	unix.NFS_SUPER_MAGIC:   "NFS",
	unix.SMB_SUPER_MAGIC:   "SMB",
	unix.SMB2_SUPER_MAGIC:  "SMB",
	unix.CIFS_SUPER_MAGIC:  "CIFS",
	unix.CEPH_SUPER_MAGIC:  "Ceph",
	unix.AFS_SUPER_MAGIC:   "AFS",
	unix.AFS_FS_MAGIC:      "AFS",
	unix.CODA_SUPER_MAGIC:  "Coda",
	unix.OCFS2_SUPER_MAGIC: "OCFS2",
	unix.V9FS_MAGIC:        "9P",
	unix.FUSE_SUPER_MAGIC:  "FUSE",
	0x01161970:             "GFS2",
	0x0BD00BD0:             "Lustre",
	0x786f4256:             "VirtualBox shared folders",
}

// remoteFilesystem names the file system of dir if it is not a local one.
func remoteFilesystem(dir string) (string, error) {
	var st unix.Statfs_t
	if err := statfs(dir, &st); err != nil {
		return "", err
	}
	return remoteFilesystems[int64(uint32(st.Type))], nil
}

// freeBytes returns how much this process may still write to the file system of path.
func freeBytes(path string) (int64, error) {
	var st unix.Statfs_t
	if err := statfs(filepath.Dir(path), &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

func statfs(path string, st *unix.Statfs_t) error {
	for {
		if err := unix.Statfs(path, st); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// allocate gives f size bytes of real space.
func allocate(f *os.File, size int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, size)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return writeZeros(f, size)
		}
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
