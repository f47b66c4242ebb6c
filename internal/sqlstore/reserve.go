package sqlstore

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
)

// slack is what must be left on the disk beside the reserve before new sandboxes
// are taken on again.
const slack = 8 << 20

// A reserve is a file that does nothing but occupy space. It is given up when the
// disk is full, so that running sandboxes can still be destroyed and settled, and
// laid in again when there is room. While it is missing, nothing new is created.
// It belongs to the writer's goroutine.
type reserve struct {
	path string
	size int64 // 0 keeps no file
	full bool
	log  *slog.Logger
}

// openReserve lays in the file if it is missing; a disk too small for it counts as
// full.
func openReserve(path string, size int64, log *slog.Logger) *reserve {
	r := &reserve{path: path, size: size, log: log}
	if size == 0 {
		return r
	}
	if st, err := os.Stat(path); err == nil && st.Size() == size {
		return r
	}
	r.full = true
	r.refill()
	if r.full {
		log.Warn("the disk that holds the data directory is nearly full: no new sandboxes until there is room",
			"path", path, "needed_bytes", size+slack)
	}
	return r
}

// release notes that the disk is full and gives up the file.
func (r *reserve) release() {
	if err := os.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Error("cannot give up the space held in reserve", "path", r.path, "err", err)
	}
	if !r.full {
		r.full = true
		r.log.Warn("the disk that holds the data directory is full: no new sandboxes until there is room", "path", r.path)
	}
}

// refill lays the file in again if the disk has room for it.
func (r *reserve) refill() {
	if !r.full {
		return
	}
	if free, err := freeBytes(r.path); err != nil || free < r.size+slack {
		return
	}
	if r.size > 0 {
		if err := r.fill(); err != nil {
			os.Remove(r.path)
			return
		}
	}
	r.full = false
	r.log.Info("there is room on the disk for new sandboxes", "path", r.path)
}

func (r *reserve) fill() error {
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(allocate(f, r.size), f.Close())
}
