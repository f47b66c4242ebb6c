package sqlstore

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
)

// slack is how much the disk must have free, in addition to the reserve, before new sandboxes
// are accepted again.
const slack = 8 << 20

// A reserve is a file that does nothing but occupy space. It is given up when the
// disk is full, so that running sandboxes can still be destroyed and settled, and
// restored when there is room again. While any of it is missing, nothing new is created.
// Others can take the space that it gives up. Therefore an eighth stays, and is given up in small
// steps, each for one database write that met a full disk, also at the next start.
// It belongs to the writer's goroutine.
type reserve struct {
	path string
	size int64 // 0 keeps no file
	full bool
	log  *slog.Logger
}

// openReserve makes the file if it is missing; a disk too small for it counts as
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

// release notes that the disk is full, gives up a part of the file, and reports whether there
// was one.
func (r *reserve) release() bool {
	if !r.full {
		r.full = true
		r.log.Warn("the disk that holds the data directory is full: no new sandboxes until there is room", "path", r.path)
	}
	ok, err := giveUp(r.path, r.size)
	if err != nil {
		r.log.Error("cannot give up the space held in reserve", "path", r.path, "err", err)
	}
	return ok
}

// giveUp frees the next part of the reserve of size at path, and reports whether there
// was one.
func giveUp(path string, size int64) (bool, error) {
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && st.Size() == 0 {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	rest := size / 8
	if st.Size() <= rest {
		rest = max(0, st.Size()-max(size/256, 64<<10))
	}
	err = os.Truncate(path, rest)
	return err == nil, err
}

// refill makes the file again if the disk has room for it.
func (r *reserve) refill() {
	if !r.full {
		return
	}
	if free, err := freeBytes(r.path); err != nil || free < r.size+slack {
		return
	}
	if r.size > 0 {
		if err := r.fill(); err != nil {
			_, _ = giveUp(r.path, r.size)
			return
		}
	}
	r.full = false
	r.log.Info("there is room on the disk for new sandboxes", "path", r.path)
}

func (r *reserve) fill() error {
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(allocate(f, r.size), f.Truncate(r.size), f.Close())
}
