package process

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/protocol"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
)

// maxStderr bounds the lines of a process's standard error; longer ones are cut.
const maxStderr = 16 << 10

// stopTime is how long a process may take to end after the end of its input, before it is killed.
const stopTime = time.Second

// Processes that the process starts belong to its group, and end with it. One in a session of its own lives on: it
// may be a sandbox. For helpers in sessions of their own to end with it, an extension gives them the variable
// helperVar with the value of the variable markVar, which it has.
const (
	markVar   = "SANDBOXER_EXTENSION_MARK"
	helperVar = "SANDBOXER_EXTENSION_PROCESS"
)

// begin starts the process, or connects to the service, and exchanges hellos.
func (s *supervisor) begin() (*session, error) {
	if s.p.Connect != "" {
		return s.beginService()
	}
	if s.p.Handler != "" {
		if err := s.p.unpackSDK(s.env.Dir); err != nil {
			return nil, err
		}
	}
	x, err := newExchange(s.env.Dir, s.p.user)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "the socket for streams of %s cannot be made", s.env.Extension)
	}
	c, err := s.spawn(x, nil, nil)
	if err != nil {
		x.close()
		return nil, err
	}
	sess := &session{streams: x, ended: c.ended, reason: func() error { return c.why() }, stop: c.stop}
	r := protocol.NewReader(c.out)
	d, err := s.greet(r, c.in, x.forChild(), c.stop)
	if err != nil {
		c.stop(err)
		<-c.ended
		if sandboxer.KindOf(err) != sandboxer.Invalid && sandboxer.KindOf(err) != sandboxer.Unsupported {
			hint := sandboxer.HintOf(err)
			why := c.why()
			if hint != "" {
				why = why.WithHint("%s", hint)
			}
			err = why
		}
		return nil, err
	}
	sess.description = d
	s.connect(sess, r, c.in)
	return sess, nil
}

// A child is a process of the extension.
type child struct {
	s     *supervisor
	cmd   *subprocess.Cmd
	mark  string
	in    *os.File // its input
	out   *os.File // its output
	x     *exchange
	ended chan struct{} // closed when nothing of it is left

	mu     sync.Mutex
	last   string // line of its standard error
	cause  error  // why it was stopped
	status error  // how it ended
	reaped bool   // its number may be another's
	once   sync.Once
	said   chan struct{} // closed when its standard error has ended
	err    *os.File      // that
}

// spawn starts the process, with further arguments and variables. x is where it connects for streams; nil if it has none.
func (s *supervisor) spawn(x *exchange, args, env []string) (*child, error) {
	var pipes [3][2]*os.File // of its input, output and error output: what it has, and what we have
	closeAll := func() {
		for _, p := range pipes {
			for _, f := range p {
				if f != nil {
					f.Close()
				}
			}
		}
	}
	for i := range pipes {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll()
			return nil, err
		}
		pipes[i] = [2]*os.File{w, r}
	}
	pipes[0][0], pipes[0][1] = pipes[0][1], pipes[0][0]
	c := &child{s: s, mark: sandboxer.NewID() + sandboxer.NewID(), in: pipes[0][1], out: pipes[1][1], x: x, ended: make(chan struct{}), said: make(chan struct{})}
	c.cmd = subprocess.Command(context.Background(), subprocess.Extension, s.p.command[0], append(slices.Clone(s.p.command[1:]), args...)...)
	c.cmd.Dir = "" // that of its thread
	c.cmd.Env = slices.Concat(s.p.environ(), env, []string{markVar + "=" + c.mark})
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = pipes[0][0], pipes[1][0], pipes[2][0]
	if x != nil {
		c.cmd.ExtraFiles = []*os.File{x.dir}
	}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if u := s.p.user; u != nil && int(u.uid) != os.Geteuid() {
		c.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}
	}
	started := make(chan error)
	go c.run(started)
	err := <-started
	for _, p := range pipes {
		p[0].Close()
	}
	if err != nil {
		closeAll()
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be started: %s", s.p.command[0], reason(err))
	}
	c.err = pipes[2][1]
	go c.listen(c.err)
	return c, nil
}

// run starts the process and waits for its end. The thread is the process's parent: the kernel kills the process
// when the thread ends. It is also the only thread in the extension's directory, which a process with the rights
// of another user might not be able to enter by its path.
func (c *child) run(started chan<- error) {
	runtime.LockOSThread()              // until it ends
	if unix.Gettid() == unix.Getpid() { // the first thread never ends, and its directory is the broker's
		other := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(other)
			c.run(started)
		}()
		<-other
		runtime.UnlockOSThread()
		return
	}
	err := unix.Unshare(unix.CLONE_FS)
	if err == nil {
		err = c.s.p.enter(c.s.env.Dir)
	}
	release := func() {}
	if err == nil {
		release = c.guard() // before the process, which may start others at once
		err = c.cmd.Start()
	}
	if err == nil {
		err = c.limit()
		if err != nil {
			c.killGroup()
			_ = c.cmd.Wait()
		}
	}
	if err != nil {
		release()
		started <- err
		return
	}
	started <- nil
	// The process keeps its number until it is waited for.
	for {
		err := unix.Waitid(unix.P_PID, c.cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	c.killGroup()
	c.mu.Lock()
	c.reaped = true
	c.mu.Unlock()
	status := c.cmd.Wait()
	release()
	c.mu.Lock()
	c.status = status
	c.mu.Unlock()
	select { // what it said at last
	case <-c.said:
	case <-time.After(stopTime): // something that cannot be found has it
		c.err.Close()
	}
	c.in.Close()
	if c.x != nil { // what it said last is not of use to a session that has ended
		c.out.Close()
		c.x.close()
	}
	close(c.ended)
}

// guarding waits for the end of its input, which comes with the end of this program, and kills helpers and its
// own group.
const guarding = `read -r end
for p in /proc/[0-9]*; do
	if grep -qs "$1" "$p/environ"; then kill -KILL "${p#/proc/}"; fi
done
kill -KILL 0`

// guard starts a program that ends the process's children if this program is killed: the kernel kills only the process itself.
// It leads the group that the process will belong to, and dies with it. release waits for that.
func (c *child) guard() (release func()) {
	g := subprocess.Command(context.Background(), subprocess.Tool, "/bin/sh", "-c", guarding, "sandboxer-guard", helperVar+"="+c.mark)
	g.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	r, w, err := os.Pipe()
	if err == nil {
		g.Stdin = r
		err = g.Start()
		r.Close()
		if err != nil {
			w.Close()
		}
	}
	if err != nil {
		c.s.env.Log.Warn("processes of the extension would outlive a killed server: nothing supervises them", "err", err)
		return func() {}
	}
	c.cmd.SysProcAttr.Pgid = g.Process.Pid
	return func() {
		_ = g.Process.Kill() // the process may not have started
		_ = g.Wait()
		w.Close()
	}
}

// enter makes dir the directory of the calling thread, and the account its owner.
func (p *program) enter(dir string) error {
	if p.user != nil && int(p.user.uid) != os.Geteuid() {
		if err := os.Chown(dir, int(p.user.uid), int(p.user.gid)); err != nil {
			return err
		}
	}
	return unix.Chdir(dir)
}

// limit applies the limits of the file to the process.
func (c *child) limit() error {
	set := func(what int, most int64) error {
		if most == 0 {
			return nil
		}
		return unix.Prlimit(c.cmd.Process.Pid, what, &unix.Rlimit{Cur: uint64(most), Max: uint64(most)}, nil)
	}
	if u := c.s.p.user; u != nil && int(u.uid) != os.Geteuid() && c.s.p.MemoryBytes+c.s.p.PIDs > 0 {
		// Without CAP_SYS_RESOURCE only a process with its real IDs may: this thread takes them, and ends with the process.
		keep := ^uintptr(0)
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(u.gid), keep, keep); e != 0 {
			return e
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(u.uid), keep, keep); e != 0 {
			return e
		}
	}
	return errors.Join(set(unix.RLIMIT_DATA, c.s.p.MemoryBytes), set(unix.RLIMIT_NPROC, c.s.p.PIDs))
}

// stop ends the process: at once, or with time to end if why is errClosed.
func (c *child) stop(why error) {
	c.once.Do(func() {
		c.mu.Lock()
		c.cause = why
		c.mu.Unlock()
		if !errors.Is(why, errClosed) {
			c.killGroup()
			return
		}
		c.in.Close()
		go func() {
			select {
			case <-c.ended:
			case <-time.After(stopTime):
				c.killGroup()
			}
		}()
	})
	// A second reason may be more urgent.
	if !errors.Is(why, errClosed) {
		c.killGroup()
	}
}

// killGroup kills the process, its group and its helpers.
func (c *child) killGroup() {
	c.mu.Lock()
	if !c.reaped {
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL) // it may have left for a group of its own
		if group := c.cmd.SysProcAttr.Pgid; group > 0 {       // that of the guard
			_ = syscall.Kill(-group, syscall.SIGKILL)
		}
	}
	c.mu.Unlock()
	for range 5 { // one that is killed may just have started another
		pids, err := procs.WithEnv(helperVar + "=" + c.mark)
		if err != nil || len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// listen logs the process's standard error.
func (c *child) listen(r *os.File) {
	defer close(c.said)
	defer r.Close()
	br := bufio.NewReaderSize(r, maxStderr)
	for {
		line, err := br.ReadSlice('\n')
		long := errors.Is(err, bufio.ErrBufferFull)
		if long { // a secret that begins before the cut is recognised by what follows
			line = slices.Clone(line)
			for most := len(line) + c.s.hidden.reach(); long && len(line) < most; {
				var more []byte
				more, err = br.ReadSlice('\n')
				line = append(line, more[:min(len(more), most-len(line))]...)
				long = errors.Is(err, bufio.ErrBufferFull)
			}
		}
		if text := string(bytes.TrimRight(line, "\r\n")); text != "" {
			cut := len(text) > maxStderr
			text = c.s.hidden.hideIn(text, maxStderr)
			c.mu.Lock()
			c.last = text
			c.mu.Unlock()
			c.s.say(text, cut)
		}
		for long { // the rest of it
			_, err = br.ReadSlice('\n')
			long = errors.Is(err, bufio.ErrBufferFull)
		}
		if err != nil {
			_, _ = io.Copy(io.Discard, br)
			return
		}
	}
}

// maxLast bounds the part of the last line in errors.
const maxLast = 500

// why says why it ended. Kind: Unavailable.
func (c *child) why() *sandboxer.Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	msg := fmt.Sprintf("%s has ended", c.s.p.title())
	switch {
	case errors.Is(c.cause, errClosed):
	case c.cause != nil && !errors.Is(c.cause, io.EOF):
		msg = fmt.Sprintf("%s was ended: %s", c.s.p.title(), sandboxer.Message(plain(c.cause)))
	case c.status != nil:
		msg += " (" + c.status.Error() + ")"
	}
	if c.last != "" {
		msg += fmt.Sprintf("; its last output: %.*q", maxLast, c.last)
	}
	return sandboxer.E(sandboxer.Unavailable, nil, "%s", msg)
}

// plain replaces err by an error whose text is its message.
func plain(err error) error {
	var e *sandboxer.Error
	if errors.As(err, &e) {
		return err
	}
	return sandboxer.E(sandboxer.Unavailable, nil, "%s", err)
}
