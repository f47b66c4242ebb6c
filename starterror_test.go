package sandboxer_test

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestStartErrorOf reads what Linux, gVisor, runc and crun say of commands that do not start.
func TestStartErrorOf(t *testing.T) {
	path := func(err error) error {
		return &os.PathError{Op: "fork/exec", Path: "/not found/permission denied", Err: err}
	}
	for _, c := range []struct {
		err  error
		code int // 0: it is not said
		text string
	}{
		{nil, 0, ""},
		{path(syscall.ENOENT), 127, "x: command not found"},
		{path(syscall.ENOTDIR), 127, "x: command not found"},
		{fs.ErrNotExist, 127, "x: command not found"},
		{path(syscall.EACCES), 126, "x: cannot be executed: permission denied"},
		{path(syscall.EISDIR), 126, "x: cannot be executed: is a directory"},
		{path(syscall.ENOEXEC), 126, "x: cannot be executed: exec format error"},
		{path(syscall.E2BIG), 126, "x: cannot be executed: argument list too long"},
		{path(syscall.EPERM), 0, ""},
		{path(syscall.EAGAIN), 0, ""},
		{errors.New(`error finding executable "x" in PATH [/bin]: no such file or directory`), 127, "x: command not found"},
		{errors.New(`OCI runtime exec failed: exec failed: unable to start container process: exec: "x": executable file not found in $PATH: unknown`), 127, "x: command not found"},
		{errors.New("crun: executable file `x` not found in $PATH: No such file or directory: OCI runtime attempted to invoke a command that was not found"), 127, "x: command not found"},
		{errors.New(`unable to start container process: exec: "x": stat /etc/passwd/x: not a directory`), 127, "x: command not found"},
		{errors.New("crun: open executable: Permission denied: OCI permission denied"), 126, "x: cannot be executed: permission denied"},
		{errors.New("the connection broke"), 0, ""},
	} {
		se := sandboxer.StartErrorOf("x", c.err)
		switch {
		case c.code == 0 && se != nil:
			t.Errorf("%v is taken for %v", c.err, se)
		case c.code == 0:
		case se == nil || se.Code != c.code || se.Error() != c.text:
			t.Errorf("%v: got %+v; want %d, %q", c.err, se, c.code, c.text)
		}
	}
	if se := sandboxer.StartErrorOf("./x", syscall.ENOENT); se.Error() != "./x: command not found: no such file or directory" {
		t.Errorf("of a path: %v", se)
	}
}

// TestStartErrorExit: the explanation goes where the command's complaints would.
func TestStartErrorExit(t *testing.T) {
	se := &sandboxer.StartError{Name: "x", Code: sandboxer.ExitNotFound}
	const want = "sandboxer: x: command not found\n"
	var out, errs strings.Builder
	if x := se.Exit(sandboxer.Cmd{Stdout: &out, Stderr: &errs}); x != (sandboxer.Exit{Code: 127}) || out.String() != "" || errs.String() != want {
		t.Errorf("got %+v, %q, %q", x, &out, &errs)
	}
	errs.Reset()
	if se.Exit(sandboxer.Cmd{Stdout: &out, Stderr: &errs, TTY: &sandboxer.WinSize{}}); out.String() != want || errs.String() != "" {
		t.Errorf("at a terminal: %q, %q", &out, &errs)
	}
	out.Reset()
	if se.Exit(sandboxer.Cmd{Stdout: &out}); out.String() != "" {
		t.Errorf("what nobody wants to hear was said: %q", &out)
	}
}
