package checkpoint

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// beginSync has the kernel begin to write a part of f to the disk. It promises nothing;
// Sync does.
func beginSync(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}

// pipeSize is what an ordinary user may ask for.
const pipeSize = 1 << 20

// widen has the pipe that r may be hold more, so that who writes and we take turns less
// often: a tenth of the time of a checkpoint of what tar says.
func widen(r io.Reader) {
	f, ok := r.(*os.File)
	if !ok {
		return
	}
	if c, err := f.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize) })
	}
}
