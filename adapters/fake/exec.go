package fake

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// command is one command of a sandbox.
type command struct {
	in     Object
	cmd    sandboxer.Cmd
	proc   exec.Cmd
	cookie string // in the environment of the command and of what it starts
}

// newCommand prepares cmd in sandbox o. A *sandboxer.StartError says that the program cannot
// be run.
func newCommand(o Object, cmd sandboxer.Cmd) (*command, error) {
	dir := o.workDir(cmd.Dir)
	if err := o.within(func() error {
		if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
			return sandboxer.E(sandboxer.Invalid, err, "%s is not a directory inside the sandbox", dir)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	name := cmd.User
	if name == "" {
		name = o.Spec.User
	}
	cred, err := credential(name)
	if err != nil {
		return nil, err
	}

	c := &command{in: o, cmd: cmd, cookie: procs.ExecVar + "=" + rand.Text()}
	// Nothing of our own environment but what a login would set.
	env := map[string]string{
		"PATH": os.Getenv("PATH"), "LANG": "C.UTF-8", "HOME": o.workspace(), "PWD": dir, "SANDBOXER_ID": o.Spec.ID,
	}
	if env["PATH"] == "" {
		env["PATH"] = "/usr/local/bin:/usr/bin:/bin"
	}
	maps.Copy(env, o.Env)
	maps.Copy(env, cmd.Env)
	for _, k := range slices.Sorted(maps.Keys(env)) {
		c.proc.Env = append(c.proc.Env, k+"="+env[k])
	}
	c.proc.Env = append(c.proc.Env, o.cookie(), c.cookie)

	var file string
	if err := o.within(func() (err error) { file, err = look(cmd.Args[0], env["PATH"], dir); return err }); err != nil {
		return nil, err
	}
	c.proc.Path, c.proc.Args, c.proc.Dir = "/bin/sh", append([]string{"sh", "-c", tagging(c.cookie, o.cookie()), "sh", file}, cmd.Args[1:]...), dir
	c.proc.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: cred}
	return c, nil
}

// look finds the program name as a shell in dir would.
func look(name, path, dir string) (string, error) {
	refused := error(syscall.ENOENT)
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		candidates = nil
		for _, d := range filepath.SplitList(path) {
			candidates = append(candidates, filepath.Join(d, name))
		}
	}
	for _, file := range candidates {
		if !filepath.IsAbs(file) {
			file = filepath.Join(dir, file)
		}
		switch fi, err := os.Stat(file); {
		case err != nil:
		case fi.Mode().IsRegular() && fi.Mode()&0o111 != 0:
			return file, nil
		case fi.IsDir():
			refused = syscall.EISDIR
		default:
			refused = syscall.EACCES
		}
	}
	return "", sandboxer.StartErrorOf(name, refused)
}

// credential returns how to become user, "" being who we are.
func credential(name string) (*syscall.Credential, error) {
	if name == "" {
		return nil, nil
	}
	unknown := func(err error) error {
		return sandboxer.E(sandboxer.Invalid, err, "there is no user %q inside the sandbox", name)
	}
	id, group, _ := strings.Cut(name, ":")
	u, err := user.Lookup(id)
	if err != nil {
		if u, err = user.LookupId(id); err != nil {
			if _, err := strconv.ParseUint(id, 10, 31); err != nil {
				return nil, unknown(err)
			}
			u = &user.User{Uid: id, Gid: id} // need not be in the book
		}
	}
	if group == "" {
		group = u.Gid
	}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 31)
	gid, err2 := strconv.ParseUint(group, 10, 31)
	if err := errors.Join(err1, err2); err != nil {
		return nil, unknown(err)
	}
	if int(uid) == os.Getuid() && int(gid) == os.Getgid() {
		return nil, nil
	}
	if os.Getuid() != 0 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the fake cannot become user %q: it does not run as root", name)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// copying is what is copied while a command runs: its outputs, and its input.
type copying struct {
	outputs  []func(end <-chan struct{}) error
	input    io.WriteCloser
	terminal *os.File
	theirs   []*os.File // ends of pipes that are closed after the start
	ours     []*os.File // and after all
}

func (s *copying) close() {
	for _, f := range slices.Concat(s.theirs, s.ours) {
		f.Close()
	}
}

// connect gives the command a terminal, or pipes. What is open must be closed also after an error.
func (c *command) connect() (s copying, err error) {
	if c.cmd.TTY != nil {
		master, slave, err := pty.Open()
		if err != nil {
			return s, sandboxer.E(sandboxer.Unavailable, err, "cannot open a terminal")
		}
		s.terminal, s.theirs, s.ours = master, append(s.theirs, slave), append(s.ours, master)
		resize(master, *c.cmd.TTY)
		if cred := c.proc.SysProcAttr.Credential; cred != nil {
			slave.Chown(int(cred.Uid), int(cred.Gid))
		}
		c.proc.Stdin, c.proc.Stdout, c.proc.Stderr = slave, slave, slave
		c.proc.SysProcAttr.Setctty = true
		s.input = endless{master}
		s.outputs = append(s.outputs, func(end <-chan struct{}) error { return drain(c.cmd.Stdout, master, end) })
		return s, nil
	}
	pipe := func() (r, w *os.File) {
		if err == nil {
			r, w, err = os.Pipe()
		}
		return r, w
	}
	if c.cmd.Stdin != nil {
		if r, w := pipe(); err == nil {
			c.proc.Stdin, s.input = r, w
			s.theirs, s.ours = append(s.theirs, r), append(s.ours, w)
		}
	}
	for _, o := range []struct {
		to   io.Writer
		from *io.Writer
	}{{c.cmd.Stdout, &c.proc.Stdout}, {c.cmd.Stderr, &c.proc.Stderr}} {
		if o.to == nil {
			continue
		}
		if r, w := pipe(); err == nil {
			*o.from = w
			s.theirs, s.ours = append(s.theirs, w), append(s.ours, r)
			s.outputs = append(s.outputs, func(end <-chan struct{}) error { return drain(o.to, r, end) })
		}
	}
	if err != nil {
		err = sandboxer.E(sandboxer.Unavailable, err, "cannot open a pipe")
	}
	return s, err
}

// run runs the command to its end. Once it has started, check is asked whether it
// still may.
func (c *command) run(ctx context.Context, check func() error) (x sandboxer.Exit, err error) {
	s, err := c.connect()
	defer func() { s.close() }()
	if err != nil {
		return x, err
	}
	if err := c.start(); err != nil {
		if se := sandboxer.StartErrorOf(c.cmd.Args[0], err); se != nil {
			return se.Exit(c.cmd), nil
		}
		return x, sandboxer.E(sandboxer.Unavailable, err, "the command could not be started")
	}
	for _, f := range s.theirs {
		f.Close()
	}
	s.theirs = nil

	// The copying of input ends when its reader lets it: nobody waits for that.
	if s.input != nil {
		go func() {
			if c.cmd.Stdin != nil {
				io.Copy(s.input, c.cmd.Stdin)
			}
			s.input.Close()
		}()
	}
	failed := check()          // before the caller hears of the command
	end := make(chan struct{}) // the command is over
	copied := make(chan error, len(s.outputs))
	for _, f := range s.outputs {
		go func() { copied <- f(end) }()
	}
	var aside sync.WaitGroup
	aside.Go(func() { c.steer(s.terminal, end) })
	waited := make(chan sandboxer.Exit, 1)
	go func() { waited <- c.wait() }()

	for running := true; running; {
		var bad error
		if failed == nil {
			select {
			case x = <-waited:
				running = false
				continue
			case <-ctx.Done():
				bad = sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "the command was interrupted")
			case bad = <-copied:
				s.outputs = s.outputs[1:]
				if bad != nil {
					bad = sandboxer.E(sandboxer.Canceled, bad, "the command's output could not be delivered")
				}
			}
			if failed = bad; failed == nil {
				continue
			}
		}
		if err := c.kill(); err != nil {
			failed = sandboxer.E(sandboxer.Unavailable, errors.Join(failed, err), "the command could not be ended")
		}
		x = <-waited
		running = false
	}
	close(end)
	aside.Wait()
	// What the command wrote is in the pipes now. Only a writer that blocks can keep us;
	// an interrupted caller need not wait for it.
	var patience <-chan time.Time
	if failed != nil {
		patience = time.After(time.Second)
	}
	for range s.outputs {
		select {
		case err := <-copied:
			if err != nil && failed == nil {
				failed = sandboxer.E(sandboxer.Canceled, err, "the command's output could not be delivered")
			}
		case <-ctx.Done():
			if failed == nil {
				failed = sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "the command ended, but the caller did not read its output")
			}
			if patience == nil {
				patience = time.After(time.Second)
			}
			select {
			case <-copied:
			case <-patience:
			}
		case <-patience:
		}
	}
	if failed != nil {
		return sandboxer.Exit{}, failed
	}
	return x, nil
}

// start starts the command where what its sandbox mounts is seen.
func (c *command) start() error { return c.in.within(c.proc.Start) }

// wait waits for the command itself, not for what it started.
func (c *command) wait() (x sandboxer.Exit) {
	c.proc.Wait() // the state tells it all
	ws, ok := c.proc.ProcessState.Sys().(syscall.WaitStatus)
	if ok && ws.Signaled() {
		return sandboxer.Exit{Code: 128 + int(ws.Signal()), Signal: strings.TrimPrefix(unix.SignalName(ws.Signal()), "SIG")}
	}
	return sandboxer.Exit{Code: c.proc.ProcessState.ExitCode()}
}

// cpu returns what the finished command spent.
func (c *command) cpu() time.Duration {
	if c.proc.ProcessState == nil {
		return 0
	}
	return c.proc.ProcessState.UserTime() + c.proc.ProcessState.SystemTime()
}

// kill ends the command and all it started. The processes are known by the cookie
// they inherited, because what detaches itself leaves group, session and parent.
func (c *command) kill() error {
	syscall.Kill(-c.proc.Process.Pid, syscall.SIGKILL)
	return kill(c.cookie)
}

// steer passes on sizes and signals until the command is over.
func (c *command) steer(terminal *os.File, end <-chan struct{}) {
	resizes := c.cmd.Resize
	if terminal == nil {
		resizes = nil
	}
	signals := c.cmd.Signals
	for {
		select {
		case <-end:
			return
		case size, ok := <-resizes:
			if !ok {
				resizes = nil
				continue
			}
			resize(terminal, size)
		case sig, ok := <-signals:
			if !ok {
				signals = nil
				continue
			}
			c.proc.Process.Signal(sig)
		}
	}
}

func resize(terminal *os.File, size sandboxer.WinSize) {
	pty.Setsize(terminal, &pty.Winsize{Cols: size.Cols, Rows: size.Rows})
}

// endless is the input of a terminal. It is never closed: its end is a ^D.
type endless struct{ *os.File }

func (e endless) Close() error {
	_, err := e.File.Write([]byte{4})
	return err
}

// drain copies r to w until r ends, or until end is closed and r is empty: a child
// that runs on with the command's output must not hold the command.
func drain(w io.Writer, r *os.File, end <-chan struct{}) error {
	if w == nil {
		w = io.Discard
	}
	over := make(chan struct{})
	defer close(over)
	go func() {
		select {
		case <-end:
			r.SetReadDeadline(time.Unix(1, 0)) // wakes the Read below
		case <-over:
		}
	}()
	_, err := io.Copy(w, onlyReader{r})
	switch {
	case errors.Is(err, syscall.EIO): // a terminal that nobody holds any more
		return nil
	case !errors.Is(err, os.ErrDeadlineExceeded):
		return err
	}
	raw, err := r.SyscallConn()
	if err != nil {
		return err
	}
	r.SetReadDeadline(time.Time{})
	buf := make([]byte, 64<<10)
	for {
		n, errno := 0, error(nil)
		err := raw.Read(func(fd uintptr) bool {
			n, errno = syscall.Read(int(fd), buf)
			return true
		})
		if err != nil || errno != nil && errno != syscall.EINTR || n == 0 && errno == nil {
			return nil // empty
		}
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return err
			}
		}
	}
}

// onlyReader hides that a file knows faster ways to be copied: its Read must be
// woken.
type onlyReader struct{ io.Reader }
