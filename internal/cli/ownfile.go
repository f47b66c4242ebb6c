package cli

import (
	"cmp"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/sand-boxer/sandboxer"
)

// maxOwnFile bounds a file that configures the program.
const maxOwnFile = 1 << 20

// readConfigFile reads a file of settings. It must be a regular file, since a pipe would
// block for ever, and must not be writable by every user: its author controls what the program
// does. Kinds: Invalid; an error of the file system unchanged.
func readConfigFile(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe's open would wait for a writer
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, invalid("%s is not a regular file", name)
	case st.Mode().Perm()&0o002 != 0:
		return nil, invalid("every user can write %s, and could control sandboxer with it", name).WithHint("chmod o-w %s", name)
	}
	return readAtMost(f, name)
}

// readOwnFile reads a key or certificate, which may be a pipe.
func readOwnFile(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAtMost(f, name)
}

func readAtMost(f *os.File, name string) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, maxOwnFile+1))
	if err == nil && len(data) > maxOwnFile {
		err = sandboxer.E(sandboxer.Invalid, nil, "%s is larger than %d KiB", name, maxOwnFile>>10)
	}
	return data, err
}

// unreadable is fileError for a file of the settings. It is always Invalid: scripts take the exit codes of NotFound and
// Denied for the server's answer.
func unreadable(err error, format string, args ...any) error {
	e := fileError(err, format, args...)
	e.Kind = sandboxer.Invalid
	return e
}

// fileError is the error of the system about a file, with the kind that follows from its reason and a hint. The
// format says what failed; the reason is added where the error is shown. Our own errors stay unchanged.
func fileError(err error, format string, args ...any) *sandboxer.Error {
	if e, ok := errors.AsType[*sandboxer.Error](err); ok {
		return e
	}
	kind, hint := sandboxer.Invalid, "choose another path"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		kind, hint = sandboxer.NotFound, "check the path; a relative one begins in the current directory"
	case errors.Is(err, fs.ErrPermission):
		kind, hint = sandboxer.Denied, "give the user that runs sandboxer access to it, or choose another path"
	case errors.Is(err, syscall.EROFS):
		kind, hint = sandboxer.Denied, "its file system is mounted read-only: choose another path"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		kind, hint = sandboxer.Exhausted, "make room there, or choose another path"
	case errors.Is(err, fs.ErrExist):
		kind, hint = sandboxer.Conflict, "remove what is there, or choose another path"
	case errors.Is(err, syscall.EISDIR):
		hint = "name a file"
	case errors.Is(err, syscall.ENOTDIR):
		hint = "check the path: a part of it is a file and no directory"
	}
	return sandboxer.E(kind, err, format, args...).WithHint("%s", hint)
}

// ofSystem turns an error of the standard library about a file into our words. Other errors stay unchanged.
func ofSystem(err error) error {
	if _, ours := errors.AsType[*sandboxer.Error](err); ours {
		return err
	}
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		did := map[string]string{"open": "opened", "read": "read", "write": "written", "mkdir": "made"}[pe.Op]
		return fileError(err, "%s cannot be %s", pe.Path, cmp.Or(did, "used"))
	}
	return err
}

// fileIn names the file below dir that the system's error is about. Only the last part of its path is certain:
// directories are opened one in the other. ok is false for an error that is about no file.
func fileIn(dir string, err error) (name string, ok bool) {
	if pe, is := errors.AsType[*fs.PathError](err); is {
		name, ok = pe.Path, true
	} else if le, is := errors.AsType[*os.LinkError](err); is {
		name, ok = le.New, true
	}
	if name != dir && filepath.IsLocal(name) && name != "." {
		return dir + ": " + filepath.Base(name), ok
	}
	return dir, ok
}
