package sandboxer

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
)

// The exit codes of a command that did not start, as in shells and container engines.
const (
	ExitNotExecutable = 126 // it exists, and may not or cannot be executed
	ExitNotFound      = 127 // it does not exist
)

// A StartError says that a command does not exist or may not be executed. The caller of Exec gets it as
// a result and not as a failure: see Exit.
type StartError struct {
	Name string // as requested
	Code int    // ExitNotFound or ExitNotExecutable
	Why  string // the reason, if more is known than Code says
}

// StartErrorOf derives from the error of a system or an engine whether the command name does not exist
// or may not be executed. It returns nil if err says neither.
func StartErrorOf(name string, err error) *StartError {
	var errno syscall.Errno
	switch errors.As(err, &errno); {
	case err == nil:
		return nil
	case errno == syscall.EPERM: // whose it is to start something is another matter
		return nil
	case errors.Is(err, fs.ErrNotExist), errno == syscall.ENOTDIR:
		return notFound(name)
	case errno != 0:
		err = errno // its text is not that of a path
	}
	text := strings.ToLower(err.Error())
	for _, why := range []string{"permission denied", "exec format error", "is a directory", "argument list too long"} {
		if strings.Contains(text, why) {
			return &StartError{name, ExitNotExecutable, why}
		}
	}
	for _, why := range []string{"no such file or directory", "not a directory", "not found"} {
		if strings.Contains(text, why) {
			return notFound(name)
		}
	}
	return nil
}

func notFound(name string) *StartError {
	e := &StartError{Name: name, Code: ExitNotFound}
	if strings.Contains(name, "/") { // it was not looked for anywhere else
		e.Why = "no such file or directory"
	}
	return e
}

// Error returns the message as a shell would print it.
func (e *StartError) Error() string {
	text := e.Name + ": command not found"
	if e.Code != ExitNotFound {
		text = e.Name + ": cannot be executed"
	}
	if e.Why != "" {
		text += ": " + e.Why
	}
	return text
}

// Exit returns the result of Exec for a cmd that failed with e. It writes the explanation to cmd's
// Stderr, or to the output of its terminal.
func (e *StartError) Exit(cmd Cmd) Exit {
	w := cmd.Stderr
	if cmd.TTY != nil {
		w = cmd.Stdout
	}
	if w != nil {
		_, _ = fmt.Fprintf(w, "sandboxer: %v\n", e)
	}
	return Exit{Code: e.Code}
}
