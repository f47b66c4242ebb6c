package sshrun

import (
	"errors"
	"os"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sand-boxer/sandboxer"
)

// openTerminal returns both ends of a local terminal. The remote terminal gets its
// modes, and so it is made raw only after that.
func openTerminal(size sandboxer.WinSize) (ours, theirs *os.File, err error) {
	ours, theirs, err = pty.Open()
	if err != nil {
		return nil, nil, err
	}
	if err = setSize(ours, size); err != nil {
		ours.Close()
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// setSize may be called while f is closed: the descriptor is held meanwhile, where
// that of f.Fd could be another file's by then.
func setSize(f *os.File, size sandboxer.WinSize) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = rc.Control(func(fd uintptr) {
		serr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: size.Cols, Row: size.Rows})
	})
	return errors.Join(err, serr)
}

// makeRaw has the terminal pass bytes on unchanged: the remote one does the work of a
// terminal.
func makeRaw(f *os.File) error {
	_, err := term.MakeRaw(int(f.Fd()))
	return err
}
