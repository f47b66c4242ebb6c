package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/sand-boxer/sandboxer"
)

// maxOwnFile bounds a file that tells the program what to do.
const maxOwnFile = 1 << 20

// readConfigFile reads a file of settings. It must be a regular one, since a pipe would
// block for ever, and not everybody's to write: who writes it decides what the program
// does. Kinds: Invalid; an error of the file system as it is.
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
		return nil, invalid("%s can be written by everybody, who would decide what sandboxer does", name).WithHint("chmod o-w %s", name)
	}
	return readAtMost(f, name)
}

// readOwnFile reads a key or certificate, which may come by a pipe.
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

// unreadable is the error of a file that could not be read.
func unreadable(err error, format string, args ...any) error {
	if e, ok := errors.AsType[*sandboxer.Error](err); ok {
		return e
	}
	return sandboxer.E(sandboxer.Invalid, err, "%s", fmt.Sprintf(format, args...))
}
