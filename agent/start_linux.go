package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// startError says why a command did not start, with the exit code that shells use.
func startError(err error, c command, file string) error {
	var e *sandboxer.Error
	if errors.As(err, &e) {
		return err
	}
	switch {
	case errors.Is(err, unix.EPERM):
		return sandboxer.E(sandboxer.Invalid, err, "cannot run as user %s: not permitted", c.as.name)
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		return sandboxer.E(sandboxer.Exhausted, err, "cannot start %s: %v", c.args[0], err)
	}
	se := sandboxer.StartErrorOf(c.args[0], err)
	switch {
	case se == nil:
		return &sandboxer.StartError{Name: c.args[0], Code: sandboxer.ExitNotExecutable, Why: err.Error()}
	case se.Code == sandboxer.ExitNotFound: // the file existed a moment ago
		se.Why = "the interpreter or loader that it names does not exist"
	case errors.Is(err, unix.EACCES):
		se.Why += " (as user " + c.as.name + ", in " + c.dir + ")"
	case errors.Is(err, unix.ENOEXEC) && file != c.args[0]:
		se.Why += " (" + file + ")"
	}
	return se
}

// lookPath finds the program of name for a process in dir with env.
func lookPath(name, dir string, env []string) (string, error) {
	if name == "" {
		return "", sandboxer.E(sandboxer.Invalid, nil, "no command given")
	}
	if strings.Contains(name, "/") {
		file := name
		if !filepath.IsAbs(file) {
			file = filepath.Join(dir, file)
		}
		if err := executable(name, file); err != nil {
			return "", err
		}
		return file, nil
	}
	denied := false
	for d := range strings.SplitSeq(getenv(env, "PATH"), ":") {
		if d == "" {
			d = "."
		}
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		file := filepath.Join(d, name)
		switch err := executable(name, file); {
		case err == nil:
			return file, nil
		case err.Code == sandboxer.ExitNotExecutable:
			denied = true
		}
	}
	if denied {
		return "", sandboxer.StartErrorOf(name, unix.EACCES)
	}
	return "", sandboxer.StartErrorOf(name, unix.ENOENT)
}

// executable returns why the file of the command called name is not executable.
func executable(name, file string) *sandboxer.StartError {
	fi, err := os.Stat(file)
	switch {
	case errors.Is(err, os.ErrPermission), err == nil && !fi.IsDir() && fi.Mode()&0o111 == 0:
		return sandboxer.StartErrorOf(name, unix.EACCES)
	case err != nil:
		return sandboxer.StartErrorOf(name, unix.ENOENT)
	case fi.IsDir():
		return sandboxer.StartErrorOf(name, unix.EISDIR)
	}
	return nil
}

func getenv(env []string, key string) string {
	for i := len(env) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(env[i], key+"="); ok {
			return v
		}
	}
	return ""
}

// openTerminal makes a pseudo-terminal that belongs to its user. It returns the slave
// as a bare descriptor, because only the child gets it.
func openTerminal(size sandboxer.WinSize, as user) (master *os.File, slave int, err error) {
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENOENT) {
		m, err = unix.Open("/dev/pts/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return nil, -1, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	defer func() {
		if err != nil {
			unix.Close(m)
		}
	}()
	if err := unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err != nil {
		return nil, -1, os.NewSyscallError("TIOCSPTLCK", err)
	}
	n, err := unix.IoctlGetUint32(m, unix.TIOCGPTN)
	if err != nil {
		return nil, -1, os.NewSyscallError("TIOCGPTN", err)
	}
	name := "/dev/pts/" + strconv.FormatUint(uint64(n), 10)
	slave, err = unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, -1, &os.PathError{Op: "open", Path: name, Err: err}
	}
	if os.Geteuid() == 0 && as.uid != 0 {
		_ = unix.Fchown(slave, int(as.uid), -1) // programs such as screen and gpg want to own it
	}
	if err := setSize(m, size); err != nil {
		unix.Close(slave)
		return nil, -1, err
	}
	return os.NewFile(uintptr(m), name), slave, nil
}

func setSize(fd int, s sandboxer.WinSize) error {
	return os.NewSyscallError("TIOCSWINSZ", unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: s.Cols, Row: s.Rows}))
}

// resize changes the size of p's terminal; the kernel informs its programs.
func (p *process) resize(s sandboxer.WinSize) error {
	if p.size == nil {
		return sandboxer.E(sandboxer.Conflict, nil, "process %d has no terminal", p.pid)
	}
	rc, err := p.in.SyscallConn()
	if err == nil {
		if e := rc.Control(func(fd uintptr) { err = setSize(int(fd), s) }); e != nil {
			err = e
		}
	}
	if err != nil && !errors.Is(err, os.ErrClosed) {
		return sandboxer.E(sandboxer.Internal, err, "cannot resize the terminal of process %d", p.pid)
	}
	return nil
}
