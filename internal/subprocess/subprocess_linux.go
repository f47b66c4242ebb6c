package subprocess

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// role is the name by which this program is started to become a child's program.
const role = "sandboxer-subprocess"

// A child itself closes descriptors that were not meant for it. Not everything that this process has open is marked to be closed by
// an execve: gVisor's library opens sockets without that mark, on any thread, while a child is started on another. A child begins as
// the program that links this package, which may be a test: that is why this is an init function.
// It runs on the first thread, whose death signal an execve keeps.
func init() {
	if len(os.Args) > 0 && os.Args[0] == role {
		become()
	}
}

// become makes this process the program of its arguments: how many descriptors it has, the file, and its arguments.
func become() {
	if len(os.Args) < 4 {
		os.Exit(127)
	}
	n, err := strconv.Atoi(os.Args[1])
	if err != nil || n < 3 {
		os.Exit(127)
	}
	unix.Umask(Umask)
	// Closed by the execve and not before: Go's runtime may have some of its own open and be using them. n is
	// where an error is reported.
	if err := unix.CloseRange(uint(n), math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		closeOnExec(n)
	}
	err = unix.Exec(os.Args[2], os.Args[3:], syscall.Environ())
	var told [4]byte
	errno, _ := errors.AsType[syscall.Errno](err)
	binary.NativeEndian.PutUint32(told[:], uint32(errno))
	_, _ = unix.Write(n, told[:])
	os.Exit(127)
}

// closeOnExec is for kernels before 5.11.
func closeOnExec(n int) {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd >= n {
			unix.CloseOnExec(fd)
		}
	}
}

// Start starts the child and returns when it has become its program, or could not.
func (c *Cmd) Start() error {
	if c.Err != nil {
		return c.Err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	path, args, files := c.Path, c.Args, c.ExtraFiles
	if len(args) == 0 {
		args = []string{path}
	}
	c.Args = append([]string{role, strconv.Itoa(3 + len(files)), path}, args...)
	c.Path, c.ExtraFiles = "/proc/self/exe", append(files[:len(files):len(files)], w)
	err = c.Cmd.Start()
	w.Close()
	c.Path, c.Args, c.ExtraFiles = path, args, files
	if err != nil {
		return err
	}
	var told [4]byte
	if _, err := io.ReadFull(r, told[:]); err != nil {
		return nil // it closed with the execve
	}
	_ = c.Cmd.Wait()
	return &fs.PathError{Op: "fork/exec", Path: path, Err: syscall.Errno(binary.NativeEndian.Uint32(told[:]))}
}

// Run is as in os/exec.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output is as in os/exec; an *exec.ExitError has the end of the standard error.
func (c *Cmd) Output() ([]byte, error) {
	var out, said bytes.Buffer
	c.Stdout = &out
	if c.Stderr == nil {
		c.Stderr = &said
	}
	err := c.Run()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		e.Stderr = said.Bytes()
	}
	return out.Bytes(), err
}

// CombinedOutput is as in os/exec.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}
