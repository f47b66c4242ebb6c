//go:build unix

package vmpacker

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// tryLockFile takes an exclusive lock on the file at name, making it. A nil release
// without an error: somebody else holds it.
func tryLockFile(name string) (release func(), err error) {
	for {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case errors.Is(err, unix.EWOULDBLOCK):
				return nil, nil
			}
			return nil, err
		}
		held, herr := f.Stat()
		there, terr := os.Stat(name)
		if herr == nil && terr == nil && os.SameFile(held, there) {
			return func() {
				_ = os.Remove(name) // while it is held: whoever waits for it looks again
				f.Close()
			}, nil
		}
		f.Close() // its former holder removed it meanwhile
	}
}
