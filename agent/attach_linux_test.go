package agent

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// A place is where attach runs: a program, a user, and an address of its own.
type place struct {
	t       testing.TB
	program string
	cred    *syscall.Credential
	socket  string
}

// abstract is a place with an abstract address. Its agents end with the test.
func abstract(t testing.TB) *place { return newPlace(t, "@sandboxer-test-"+rand.Text()) }

func newPlace(t testing.TB, socket string) *place {
	p := &place{t: t, program: os.Args[0], socket: socket}
	t.Cleanup(func() {
		for _, pid := range p.agents() {
			_ = unix.Kill(pid, unix.SIGTERM)
		}
		eventually(t, "an agent stays", func() bool { return len(p.agents()) == 0 })
	})
	return p
}

// run is a RunFunc: it runs our program with args.
func (p *place) run(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
	cmd := exec.CommandContext(ctx, p.program, args...)
	cmd.Env = append(os.Environ(), "AGENT_TEST_RUN=always", "GORACE=atexit_sleep_ms=0", "SANDBOXER_EXEC=mark")
	cmd.Stdout, cmd.Stderr = out, errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.cred}
	feed, err := cmd.StdinPipe() // Wait does not wait for it
	if err != nil {
		return sandboxer.Exit{}, err
	}
	go func() { _, _ = io.Copy(feed, in); feed.Close() }()
	err = cmd.Run()
	if x := (*exec.ExitError)(nil); errors.As(err, &x) {
		err = nil
	}
	return sandboxer.Exit{Code: cmd.ProcessState.ExitCode()}, err
}

func (p *place) dial(ctx context.Context, flags ...string) (net.Conn, error) {
	return DialAttached(ctx, p.run, append([]string{"attach", "--socket", p.socket}, flags...)...)
}

// client returns a client that connects by attach.
func (p *place) client(flags ...string) *Client {
	c := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) { return p.dial(ctx, flags...) }})
	p.t.Cleanup(func() { c.Close() })
	return c
}

// agents are the processes that serve, or will.
func (p *place) agents() []int {
	p.t.Helper()
	all, err := os.ReadDir("/proc")
	if err != nil {
		p.t.Fatal(err)
	}
	var pids []int
	for _, d := range all {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && slices.Contains(strings.Split(string(line), "\x00"), "--listen="+ownPrefix+p.socket) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// agent is the only agent.
func (p *place) agent() int {
	p.t.Helper()
	pids := p.agents()
	if len(pids) != 1 {
		p.t.Fatalf("agents %v; want one", pids)
	}
	return pids[0]
}

func TestAttach(t *testing.T) {
	for name, socket := range map[string]string{"abstract": "@sandboxer-test-" + rand.Text(), "path": filepath.Join(t.TempDir(), "s")} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t, socket)
			work := t.TempDir()
			c := p.client("--workdir", work, "--fuse=0")
			var out bytes.Buffer
			x, err := c.Exec(t.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", "pwd; cat; echo \"$SANDBOXER_EXEC\""}, Stdin: strings.NewReader("in\n"), Stdout: &out})
			if err != nil || x.Code != 0 || out.String() != work+"\nin\n\n" {
				t.Fatalf("%q, %+v, %v", out.String(), x, err)
			}
			started, err := c.Start(t.Context(), sandboxer.ProcessSpec{Args: []string{"sleep", "1000"}})
			if err != nil {
				t.Fatal(err)
			}
			c.Close()

			// It has a session, a directory and streams of its own, and no other open files.
			agent := p.agent()
			if sid, err := unix.Getsid(agent); err != nil || sid != agent {
				t.Errorf("session %d, %v; want %d", sid, err, agent)
			}
			if dir, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", agent)); dir != "/" {
				t.Errorf("directory %q, %v", dir, err)
			}
			for fd := range 3 {
				if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", agent, fd)); to != os.DevNull {
					t.Errorf("descriptor %d is %q, %v", fd, to, err)
				}
			}

			// A later caller finds the same agent.
			again := p.client()
			all, err := again.Processes(t.Context())
			if err != nil || len(all) != 1 || all[0].PID != started {
				t.Errorf("processes %v, %v; want %d", all, err, started)
			}
			if now := p.agent(); now != agent {
				t.Errorf("agent %d, was %d", now, agent)
			}
		})
	}
}

// TestAttachAtOnce: one agent serves any number of concurrent callers.
func TestAttachAtOnce(t *testing.T) {
	for name, socket := range map[string]string{"abstract": "@sandboxer-test-" + rand.Text(), "path": filepath.Join(t.TempDir(), "s")} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t, socket)
			var wg sync.WaitGroup
			for range 8 {
				c := p.client()
				wg.Go(func() {
					if err := c.Health(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			p.agent()
		})
	}
}

// TestAttachHalfCloses: a service's output arrives after its caller has closed the input.
func TestAttachHalfCloses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		_, _ = fmt.Fprintf(c, "heard %q", b)
	}()
	c, err := abstract(t).client().Dial(t.Context(), l.Addr().(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "all"); err != nil {
		t.Fatal(err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); string(got) != `heard "all"` || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// TestAttachAfterAKill: a socket without a listener is replaced.
func TestAttachAfterAKill(t *testing.T) {
	p := newPlace(t, filepath.Join(t.TempDir(), "s"))
	if err := p.client().Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	first := p.agent()
	if err := unix.Kill(first, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent stays", func() bool { return len(p.agents()) == 0 })
	if _, err := os.Lstat(p.socket); err != nil {
		t.Fatal(err)
	}
	if err := p.client().Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(p.socket); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v", fi.Mode(), err)
	}
}

// TestAttachWhileItEnds: a killed agent may still accept connections when it has no program any more. That makes it
// no stranger: another one is started once it is gone.
func TestAttachWhileItEnds(t *testing.T) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	asked := 0
	conn, err := attached(l.Addr().String(), nil, func(*net.UnixConn) error {
		switch asked++; asked {
		case 1:
			return fmt.Errorf("%w: process 7", errEnding)
		case 2:
			return nil
		}
		return errStranger
	})
	if err != nil || asked != 2 {
		t.Errorf("asked %d times: %v", asked, err)
	} else {
		conn.Close()
	}
	l.Close()

	p := newPlace(t, filepath.Join(t.TempDir(), "s"))
	for i := range 10 {
		if err := p.client().WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(p.agent(), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		// The dying agent may have accepted the connection.
		if err := p.client().Health(t.Context()); err != nil && strings.Contains(err.Error(), errStranger.Error()) {
			t.Fatalf("round %d: %v", i, err)
		}
	}
}

func TestAttachRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	attach := func(args ...string) (int, string) {
		var out, errs bytes.Buffer
		x, err := abstract(t).run(t.Context(), append([]string{"attach"}, args...), strings.NewReader(""), &out, &errs)
		if err != nil || out.Len() > 0 {
			t.Errorf("%q: %q, %v", args, out.String(), err)
		}
		return x.Code, errs.String()
	}
	for _, test := range []struct {
		args []string
		code int
		says string
	}{
		{nil, 2, "--socket"},
		{[]string{"--socket", "relative"}, 2, "absolute"},
		{[]string{"--socket", "/" + strings.Repeat("x", 108)}, 2, "longer"},
		{[]string{"--socket", "@x", "--listen", "@y"}, 2, "--listen"},
		{[]string{"--socket", "@x", "sh"}, 2, "no command"},
		{[]string{"--socket", "@x", "--replay-kib", "1"}, 2, "--replay-kib 1"},
		{[]string{"--socket", filepath.Join(dir, "none", "s")}, 1, "no such file"},
		{[]string{"--socket", file}, 1, "not a socket"},
		{[]string{"--socket", "@sandboxer-test-" + rand.Text(), "--user", "no-such-user"}, 1, "no-such-user"},
	} {
		if code, said := attach(test.args...); code != test.code || !strings.Contains(said, test.says) {
			t.Errorf("%q: %d, %q; want %d, %q", test.args, code, said, test.code, test.says)
		}
	}
	if b, err := os.ReadFile(file); string(b) != "mine" {
		t.Errorf("what was no socket: %q, %v", b, err)
	}
}

// copied returns a copy of our program that every user may run: another file.
func copied(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sandboxer-agent-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = errors.Join(os.Chmod(dir, 0o755), os.WriteFile(filepath.Join(dir, "agent"), b, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "agent")
}

// TestAttachStranger: a listener with another program gets nothing, and is not replaced.
func TestAttachStranger(t *testing.T) {
	p := abstract(t)
	stranger := *p
	stranger.program = copied(t)
	if err := stranger.client().Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	first := p.agent()
	_, err := p.dial(t.Context())
	if sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), stranger.program) || !strings.Contains(err.Error(), "another program") {
		t.Errorf("%v", err)
	}
	if now := p.agent(); now != first {
		t.Errorf("agent %d; was %d", now, first)
	}
}

// TestOwnAsTwoUsers: an agent accepts its own user only, and no user attaches to another's agent.
func TestOwnAsTwoUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be two users")
	}
	program := copied(t)
	ours, theirs := abstract(t), abstract(t)
	ours.program, theirs.program = program, program
	theirs.cred = &syscall.Credential{Uid: 65534, Gid: 65534}
	for _, p := range []*place{ours, theirs} {
		if err := p.client().Health(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []*place{ours, theirs} {
		other := *p
		other.socket = map[*place]*place{ours: theirs, theirs: ours}[p].socket
		if _, err := other.dial(t.Context()); err == nil || !strings.Contains(err.Error(), "it belongs to user") {
			t.Errorf("attached to another's agent: %v", err)
		}
	}
	// The agent itself does not serve another user that calls it directly.
	conn, err := net.Dial("unix", theirs.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	_, werr := io.WriteString(conn, "GET /health HTTP/1.0\r\n\r\n")
	if b, err := io.ReadAll(conn); len(b) > 0 {
		t.Errorf("answered another user: %q, %v, %v", b, err, werr)
	}
	if err := theirs.client().Health(t.Context()); err != nil {
		t.Errorf("its own user, after that: %v", err)
	}
}

// TestAttachLeavesTheRest: an agent that is not the first process ends alone.
func TestAttachLeavesTheRest(t *testing.T) {
	other := exec.Command("sleep", "1000")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()
	p := abstract(t)
	c := p.client()
	pid, err := c.Start(t.Context(), sandboxer.ProcessSpec{Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(p.agent(), unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent stays", func() bool { return len(p.agents()) == 0 })
	eventually(t, "what it started stays", func() bool { return unix.Kill(pid, 0) != nil })
	if err := other.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("another process: %v", err)
	}
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", other.Process.Pid)); err != nil || !strings.Contains(string(b), ") S ") {
		t.Errorf("another process: %q, %v", b, err)
	}
}

// TestListenOwnAtOnce: of many processes that find a socket without a listener, one replaces it.
func TestListenOwnAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for range 20 {
		var wg sync.WaitGroup
		won := make(chan net.Listener, 16)
		for range cap(won) {
			wg.Go(func() {
				l, err := listenOwn(path)
				if err == nil {
					l.(ownListener).SetUnlinkOnClose(false) // it stays, and is stale
					won <- l
				} else if !errors.Is(err, unix.EADDRINUSE) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := len(won); n != 1 {
			t.Fatalf("%d listen; want 1", n)
		}
		(<-won).Close()
	}
}

// TestHalfOpen: a connection whose caller has gone ends once it is silent, and not while it still sends.
func TestHalfOpen(t *testing.T) {
	dir := t.TempDir()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dir + "/s", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	service, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	const halfOpen = 400 * time.Millisecond
	begun := time.Now()
	go func() {
		_, _ = io.Copy(io.Discard, service) // to the end of the input
		for range 4 {
			time.Sleep(halfOpen / 4)
			_, _ = service.Write([]byte("more"))
		}
	}()
	var out strings.Builder
	err = relay(conn, strings.NewReader("in"), &out, false, halfOpen)
	if !errors.Is(err, os.ErrDeadlineExceeded) || !strings.HasPrefix(out.String(), string(Mark)) || time.Since(begun) < halfOpen {
		t.Errorf("%q, %v after %v", out.String(), err, time.Since(begun))
	}
}

// TestCallerLeaves: a connection whose caller has gone ends, even through engines that end its input and read its output for ever, and even if
// the service ignores the end of the input, and never ends. Half a connection stays as long as its caller does.
func TestCallerLeaves(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	left := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.Copy(io.Discard, c)
		for err == nil {
			_, err = c.Write([]byte("more\n"))
		}
		left <- err
	}()
	p := abstract(t)
	engine := func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		return p.run(context.WithoutCancel(ctx), args, in, forEver{out}, errs)
	}
	c := NewClient(ClientOptions{Dial: func(ctx context.Context) (net.Conn, error) {
		return DialAttached(ctx, engine, "attach", "--socket", p.socket)
	}})
	defer c.Close()
	conn, err := c.Dial(t.Context(), l.Addr().(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1<<20)); err != nil {
		t.Fatalf("after the half close: %v", err)
	}
	conn.Close()
	select {
	case <-left:
	case <-time.After(time.Minute):
		t.Error("the connection stays, whose caller has gone")
	}
	c.Close()
	eventually(t, "attach ends", func() bool { return len(processesWith(t, "attach", p.socket)) == 0 })
}

// TestRelayLingers: a caller that still sends after the agent's last output is not cut off, even if nothing reads its input: engines
// would break the streams, and lose the agent's output.
func TestRelayLingers(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	end := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		return c.(*net.UnixConn)
	}
	ours, agent := end(fds[0]), end(fds[1])
	defer agent.Close()
	in, caller := net.Pipe()
	heard, out := io.Pipe()
	over := make(chan error, 1)
	go func() { over <- relay(ours, in, out, true, time.Minute); in.Close(); out.Close() }()
	hears := func(want string) {
		t.Helper()
		b := make([]byte, len(want))
		if _, err := io.ReadFull(heard, b); err != nil || string(b) != want {
			t.Fatalf("%q, %v; want %q", b, err, want)
		}
	}
	hears(string(rune(Mark)))
	frames := &frameWriter{to: caller}
	if _, err := frames.Write(make([]byte, 64<<10)); err != nil {
		t.Fatal(err)
	}
	if _, err := agent.Write([]byte("no")); err != nil {
		t.Fatal(err)
	}
	if err := agent.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	hears("no")
	// More than the socket, the pipe and all buffers hold together.
	_ = caller.SetWriteDeadline(time.Now().Add(time.Minute))
	if _, err := frames.Write(make([]byte, 4<<20)); err != nil {
		t.Errorf("who still sends: %v", err)
	}
	caller.Close()
	if err := <-over; err != nil {
		t.Error(err)
	}
}

// forEver accepts all writes, and discards them.
type forEver struct{ to io.Writer }

func (w forEver) Write(p []byte) (int, error) {
	_, _ = w.to.Write(p)
	return len(p), nil
}

// TestConnect: connect reaches an agent that listens, waits for one that is about to, and starts none.
func TestConnect(t *testing.T) {
	p := abstract(t)
	dialed := make(chan error, 1)
	go func() {
		conn, err := DialAttached(t.Context(), p.run, "connect", "--socket", p.socket)
		if err == nil {
			err = conn.Close()
		}
		dialed <- err
	}()
	eventually(t, "connect waits", func() bool { return len(processesWith(t, "connect", p.socket)) == 1 })
	if n := len(p.agents()); n != 0 {
		t.Fatalf("connect has started %d agents", n)
	}
	c := p.client()
	if _, err := c.Exec(t.Context(), sandboxer.Cmd{Args: []string{"true"}}); err != nil {
		t.Fatal(err)
	}
	if err := <-dialed; err != nil {
		t.Errorf("connect, which came before the agent: %v", err)
	}
	agent := p.agent()
	conn, err := DialAttached(t.Context(), p.run, "connect", "--socket", p.socket, "--pid", strconv.Itoa(agent))
	if err != nil {
		t.Fatalf("connect to process %d: %v", agent, err)
	}
	conn.Close()
	if x, err := p.run(t.Context(), []string{"connect", "--socket", p.socket, "--pid", strconv.Itoa(os.Getpid())}, strings.NewReader(""), io.Discard, io.Discard); err != nil || x.Code != StrangerExit {
		t.Errorf("connect to another process: %+v, %v; want code %d", x, err, StrangerExit)
	}
	for _, args := range [][]string{{"connect"}, {"connect", "--socket", p.socket, "sh"}, {"connect", "--socket", p.socket, "--fuse=0"}} {
		if x, err := p.run(t.Context(), args, strings.NewReader(""), io.Discard, io.Discard); err != nil || x.Code != 2 {
			t.Errorf("%q: %+v, %v; want code 2", args, x, err)
		}
	}
}

// processesWith are those whose arguments contain all of these.
func processesWith(t *testing.T, args ...string) (pids []int) {
	t.Helper()
	all, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		has := strings.Split(string(line), "\x00")
		if !slices.ContainsFunc(args, func(a string) bool { return !slices.Contains(has, a) }) {
			pids = append(pids, pid)
		}
	}
	return pids
}
