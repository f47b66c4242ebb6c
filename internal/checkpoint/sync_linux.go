package checkpoint

import (
	"os"

	"golang.org/x/sys/unix"
)

// beginSync has the kernel begin to write a part of f to the disk. It promises nothing;
// Sync does.
func beginSync(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}
