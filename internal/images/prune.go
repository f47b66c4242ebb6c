package images

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// Prune removes what is neither being made nor needed: remains of brokers that died, and,
// beyond the size to keep, what was not used for longest. While a process holds the store
// it does nothing and returns false.
func (s *Store) Prune() (done bool, err error) {
	lock, err := filelock.Try(s.path("lock"), filelock.Exclusive)
	if errors.Is(err, filelock.ErrHeld) {
		return false, nil // in use
	}
	if err != nil {
		return false, err
	}
	defer lock.Release()
	inUse, err := s.opts.InUse()
	if err != nil {
		return false, fmt.Errorf("cannot determine which images are in use: %w", err)
	}
	type item struct {
		path string
		size int64
		used time.Time
	}
	var items []item
	var total int64
	add := func(path string, fi fs.FileInfo) {
		total += fi.Size()
		items = append(items, item{path, fi.Size(), fi.ModTime()})
	}
	var errs []error
	err = eachFile(s.dir, func(path string, fi fs.FileInfo) {
		switch name := fi.Name(); {
		case strings.HasSuffix(name, ".erofs"):
			if inUse[name] {
				total += fi.Size()
				return
			}
			add(path, fi)
		case strings.HasSuffix(name, ".tmp"), strings.HasPrefix(name, ".new-"):
			errs = append(errs, os.RemoveAll(path)) // it is not being made: that would hold the store
		case strings.HasSuffix(name, SumSuffix):
			if _, err := os.Lstat(strings.TrimSuffix(path, SumSuffix) + ".erofs"); errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, os.Remove(path))
			}
		case strings.HasSuffix(name, ".lock"):
			errs = append(errs, os.Remove(path))
		}
	})
	errs = append(errs, err)
	for _, d := range []string{"blobs", "partial"} {
		errs = append(errs, eachFile(s.path(d), func(path string, fi fs.FileInfo) {
			if d == "partial" && time.Since(fi.ModTime()) > partialAge {
				errs = append(errs, os.Remove(path))
				return
			}
			add(path, fi)
		}))
	}
	slices.SortFunc(items, func(a, b item) int { return a.used.Compare(b.used) })
	for _, it := range items {
		if total <= s.opts.Keep {
			break
		}
		if err := os.Remove(it.path); err != nil {
			errs = append(errs, err)
			continue
		}
		if key, ok := strings.CutSuffix(it.path, ".erofs"); ok {
			_ = os.Remove(key + SumSuffix) // what is left of it, the next one removes
		}
		total -= it.size
	}
	errs = append(errs, wholefile.Sweep(s.path("refs")))
	errs = append(errs, eachFile(s.path("refs"), func(path string, fi fs.FileInfo) {
		if time.Since(fi.ModTime()) > refAge {
			errs = append(errs, os.Remove(path))
		}
	}))
	return true, errors.Join(errs...)
}

const (
	partialAge = 7 * 24 * time.Hour
	refAge     = 90 * 24 * time.Hour
)

func eachFile(dir string, f func(path string, fi fs.FileInfo)) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, d := range entries {
		if fi, err := d.Info(); err == nil {
			f(filepath.Join(dir, d.Name()), fi)
		}
	}
	return nil
}

// touch notes that the file at path was used now.
func touch(path string) { _ = os.Chtimes(path, time.Now(), time.Now()) }
