//go:build !unix

package agent

import (
	"io/fs"
	"os"
	"time"
)

const openNonblock = 0

func isFull(error) bool { return false }

func linkID(fs.FileInfo) ([2]uint64, bool) { return [2]uint64{}, false }

func sameDevice(_, _ fs.FileInfo) bool { return true }

// A fileMaker makes files in one directory.
type fileMaker struct{ root *os.Root }

func newFileMaker(root *os.Root) (fileMaker, error) { return fileMaker{root}, nil }

func (m fileMaker) close() {}

func (m fileMaker) create(base string, mode fs.FileMode) (newFile, error) {
	f, err := m.root.OpenFile(base, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	return newFile{f, m.root, base}, err
}

type newFile struct {
	*os.File
	root *os.Root
	base string
}

func (f newFile) close() error { return f.File.Close() }

func (f newFile) finish(owner *[2]int, mode fs.FileMode, at time.Time) error {
	if owner != nil {
		if err := f.Chown(owner[0], owner[1]); err != nil {
			return err
		}
	}
	// The umask applied to the creation mode.
	if fi, err := f.Stat(); err != nil || fi.Mode().Perm() != mode {
		if err := f.Chmod(mode); err != nil {
			return err
		}
	}
	if at.IsZero() {
		return nil
	}
	return f.root.Chtimes(f.base, at, at)
}
