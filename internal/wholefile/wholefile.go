// Package wholefile writes files that are whole or not there, whatever ends the process or
// the machine meanwhile, and clears away what the attempts of processes that died have left.
package wholefile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// draft begins the names of files that are not whole yet. Nothing else may have such a name in
// a directory that Sweep is called for.
const draft = ".new-"

// Write replaces the file at name by one with that content, for its owner alone. When it
// returns nil, the file outlives a crash of the machine.
func Write(name string, data []byte) error {
	dir := filepath.Dir(name)
	f, err := os.CreateTemp(dir, draft) // 0600
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// age is how old a draft is that nobody writes any more.
const age = time.Minute

// Sweep removes what writers that died have left in dir; other processes may be writing there
// now. A directory that is not there has nothing.
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
			if err := os.Remove(filepath.Join(dir, d.Name())); !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
