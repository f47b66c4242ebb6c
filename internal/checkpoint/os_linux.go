package checkpoint

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// beginSync has the kernel begin to write a part of f to the disk. It guarantees nothing;
// Sync does.
func beginSync(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}

// pipeSize is what an ordinary user may ask for.
const pipeSize = 1 << 20

// widen enlarges the pipe that r may be, so that the writer and we take turns less
// often. This saved a tenth of the time of a checkpoint of tar's output.
func widen(r io.Reader) {
	f, ok := r.(*os.File)
	if !ok {
		return
	}
	if c, err := f.SyscallConn(); err == nil {
		_ = c.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize) })
	}
}
