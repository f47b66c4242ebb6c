// Package wholefile writes files that are complete or missing, even if the process or
// the machine ends meanwhile, and removes what processes that died have left.
package wholefile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// draft begins the names of files that are not complete yet. No other file may have such a name in
// a directory that Sweep is called for.
const draft = ".new-"

// Write replaces the file at name by one with that content, for its owner alone. When it
// returns nil, the file outlives a crash of the machine.
func Write(name string, data []byte) error {
	return write(name, data, true)
}

// Replace is Write for data that a crash of the machine makes useless anyway: it does not wait for the disk.
// If the process dies the file is complete all the same.
func Replace(name string, data []byte) error {
	return write(name, data, false)
}

func write(name string, data []byte, durably bool) error {
	dir := filepath.Dir(name)
	f, err := os.CreateTemp(dir, draft) // 0600
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && durably {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	if durably {
		return SyncDir(dir)
	}
	return nil
}

// Publish renames the finished file at from to the name to, in the same file system, and replaces
// any file there. When it returns nil, its content and its name outlive
// a crash of the machine.
func Publish(from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(to))
}

// SyncDir makes the names in dir outlive a crash of the machine. A file system that cannot do
// that for directories returns EINVAL or ENOTSUP, and keeps names in a way of its own.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP) {
		err = nil
	}
	return errors.Join(err, d.Close())
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// age is how old a draft is that no process writes any more.
const age = time.Minute

// Sweep removes what writers that died have left in dir; other processes may be writing there
// now. A missing directory has nothing.
func Sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, d := range entries {
		if !strings.HasPrefix(d.Name(), draft) || !d.Type().IsRegular() {
			continue
		}
		if fi, err := d.Info(); err == nil && time.Since(fi.ModTime()) > age {
			errs = append(errs, ignoreMissing(os.Remove(filepath.Join(dir, d.Name()))))
		}
	}
	return errors.Join(errs...)
}
