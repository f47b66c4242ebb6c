package sshrun_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
	"github.com/sand-boxer/sandboxer/internal/sshrun/sshtest"
)

// shortDir is a directory whose name leaves room for sockets.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "sr")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func newPool(t testing.TB, o sshrun.Options) *sshrun.Pool {
	t.Helper()
	if o.Dir == "" {
		o.Dir = shortDir(t)
	}
	if o.Config == "" {
		o.Config = "none"
	}
	p, err := sshrun.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return p
}

func host(t testing.TB, p *sshrun.Pool, target sshrun.Target) *sshrun.Host {
	t.Helper()
	h, err := p.Host(target)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// leaveNothing checks at the end of the test that no goroutine is left of it.
func leaveNothing(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		if err := goleak.Find(ignore); err != nil {
			t.Errorf("goroutines left: %v", err)
		}
	})
}

func TestRun(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	dir := t.TempDir()
	binary := make([]byte, 1<<20)
	for i := range binary {
		binary[i] = byte(i*7 + i>>8)
	}
	long := strings.Repeat("x'y\n", 5000)
	tests := []struct {
		name        string
		cmd         sshrun.Cmd
		out, errOut string
		exit        sandboxer.Exit
	}{
		{name: "streams apart", cmd: sshrun.Cmd{Script: "echo out; echo err >&2"}, out: "out\n", errOut: "err\n"},
		{name: "exit status", cmd: sshrun.Cmd{Args: []string{"sh", "-c", "exit 43"}}, exit: sandboxer.Exit{Code: 43}},
		{name: "255 is the command's", cmd: sshrun.Cmd{Script: "exit 255"}, exit: sandboxer.Exit{Code: 255}},
		{name: "missing", cmd: sshrun.Cmd{Args: []string{"no-such-command"}, Stderr: io.Discard}, exit: sandboxer.Exit{Code: 127}},
		{name: "not executable", cmd: sshrun.Cmd{Args: []string{"/etc/passwd"}, Stderr: io.Discard}, exit: sandboxer.Exit{Code: 126}},
		{name: "signal", cmd: sshrun.Cmd{Args: []string{"sh", "-c", "kill -TERM $$"}}, exit: sandboxer.Exit{Code: 143, Signal: "TERM"}},
		{name: "group killed", cmd: sshrun.Cmd{Script: "kill -KILL 0"}, exit: sandboxer.Exit{Code: 137, Signal: "KILL"}},
		{name: "args", cmd: sshrun.Cmd{Args: []string{"printf", "%s|", "", "a b", "'", `\n`, "$HOME", "-n", "ü\xff", "a\nb", long}},
			out: "|a b|'|\\n|$HOME|-n|ü\xff|a\nb|" + long + "|"},
		{name: "script args", cmd: sshrun.Cmd{Script: "printf '%s,' \"$#\" \"$@\"", Args: []string{"x y", "."}}, out: "2,x y,.,"},
		{name: "script lines", cmd: sshrun.Cmd{Script: "cat <<'E'\n.\n:\n\\n\n\nE\n"}, out: ".\n:\n\\n\n\n"},
		{name: "env", cmd: sshrun.Cmd{Script: `printf %s "$A$B"`, Env: map[string]string{"A": "1\n'2'", "B": "$A"}}, out: "1\n'2'$A"},
		{name: "dir", cmd: sshrun.Cmd{Args: []string{"pwd"}, Dir: dir}, out: dir + "\n"},
		{name: "no stdin", cmd: sshrun.Cmd{Args: []string{"cat"}}},
		{name: "stdin", cmd: sshrun.Cmd{Args: []string{"cat"}, Stdin: bytes.NewReader(binary)}, out: string(binary)},
		{name: "what is left behind does not hold it up", cmd: sshrun.Cmd{Script: "sleep 30 & echo done"}, out: "done\n"},
		{name: "traps are not inherited", cmd: sshrun.Cmd{Script: "sh -c 'kill -INT $$; echo alive'"}, exit: sandboxer.Exit{Code: 130, Signal: "INT"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			tt.cmd.Stdout = &out
			if tt.cmd.Stderr == nil {
				tt.cmd.Stderr = &errOut
			}
			start := time.Now()
			exit, err := h.Run(t.Context(), tt.cmd)
			if err != nil || exit != tt.exit {
				t.Errorf("exit %+v, %v; want %+v", exit, err, tt.exit)
			}
			if out.String() != tt.out || errOut.String() != tt.errOut {
				t.Errorf("out %.200q, err %.200q; want %.200q, %.200q", out.String(), errOut.String(), tt.out, tt.errOut)
			}
			if d := time.Since(start); d > 20*time.Second {
				t.Errorf("it took %s", d)
			}
		})
	}
	refused := []struct {
		name string
		cmd  sshrun.Cmd
		kind sandboxer.Kind
	}{
		{"nothing", sshrun.Cmd{}, sandboxer.Invalid},
		{"NUL", sshrun.Cmd{Args: []string{"a\x00b"}}, sandboxer.Invalid},
		{"bad variable", sshrun.Cmd{Args: []string{"true"}, Env: map[string]string{"A;B": ""}}, sandboxer.Invalid},
		{"missing dir", sshrun.Cmd{Args: []string{"true"}, Dir: "/no/such"}, sandboxer.Invalid},
	}
	for _, tt := range refused {
		if _, err := h.Run(t.Context(), tt.cmd); sandboxer.KindOf(err) != tt.kind {
			t.Errorf("%s: %v, want %s", tt.name, err, tt.kind)
		}
	}
}

// A target that reaches the same server by another key, or expects another host key,
// has connections of its own: no target's commands end because of another's.
func TestKeysOfOneAddress(t *testing.T) {
	leaveNothing(t)
	dir := t.TempDir()
	one, first, _ := sshtest.NewKey(t, dir, "one")
	two, second, _ := sshtest.NewKey(t, dir, "two")
	s := sshtest.Start(t, sshtest.Options{Authorized: "environment=\"KEY=one\" " + first + "\nenvironment=\"KEY=two\" " + second, Config: "PermitUserEnvironment yes"})
	p := newPool(t, sshrun.Options{})
	target := func(change func(*sshrun.Target)) sshrun.Target {
		t := s.Target()
		t.Name = "same"
		change(&t)
		return t
	}
	stranger, _, _ := sshtest.NewKey(t, dir, "stranger")
	_, otherHost, _ := sshtest.NewKey(t, dir, "host")
	mine := host(t, p, target(func(t *sshrun.Target) { t.IdentityFile = one }))
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		_, err := mine.Run(t.Context(), sshrun.Cmd{Script: "echo on; read x; echo $KEY $x", Stdin: r})
		ended <- err
	}()
	for what, change := range map[string]struct {
		of   func(*sshrun.Target)
		key  string
		fail error
	}{
		"another key":      {func(t *sshrun.Target) { t.IdentityFile = two }, "two", nil},
		"a wrong key":      {func(t *sshrun.Target) { t.IdentityFile = stranger }, "", sshrun.ErrAuth},
		"another host key": {func(t *sshrun.Target) { t.IdentityFile, t.HostKeys = one, []string{otherHost} }, "", sshrun.ErrHostKey},
	} {
		for range 2 {
			out, err := host(t, p, target(change.of)).Output(t.Context(), "echo $KEY")
			if got := strings.TrimSpace(string(out)); got != change.key || !errors.Is(err, change.fail) {
				t.Errorf("%s: %q, %v; want %q, %v", what, got, err, change.key, change.fail)
			}
			if out, err := mine.Output(t.Context(), "echo $KEY"); err != nil || strings.TrimSpace(string(out)) != "one" {
				t.Errorf("beside %s: %q, %v", what, out, err)
			}
		}
	}
	io.WriteString(w, "more\n")
	w.Close()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the command that ran meanwhile: %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("the command that ran meanwhile does not end")
	}
	p.Forget(target(func(t *sshrun.Target) { t.IdentityFile = two }))
	if _, err := mine.Output(t.Context(), "true"); err != nil {
		t.Errorf("once the other is forgotten: %v", err)
	}
}

func TestNothingInLists(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	out, err := h.Output(t.Context(), "X=sesame-script; cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo; echo \"$S$X\"", "sesame-arg")
	if err != nil {
		t.Fatal(err)
	}
	if list, _, _ := strings.Cut(string(out), "\n"); strings.Contains(list, "sesame") {
		t.Error("a script or its argument is in the list of processes")
	}
}

func TestCancelEndsEverything(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{Config: "MaxSessions 2"})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	dir := t.TempDir()
	// A child in the group, one in a session of its own, one that ignores signals.
	script := `cd "$1"; sleep 1000 & echo $! >a; setsid sleep 1001 & echo $! >b; sh -c 'trap "" TERM INT HUP; echo $$ >c; while :; do sleep 0.1; done'`
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range 5 {
		d := filepath.Join(dir, fmt.Sprint(i))
		os.Mkdir(d, 0o755)
		wg.Go(func() {
			_, err := h.Run(ctx, sshrun.Cmd{Script: script, Args: []string{d}})
			if sandboxer.KindOf(err) != sandboxer.Canceled {
				t.Errorf("Run: %v, want canceled", err)
			}
		})
	}
	for i := range 5 {
		waitFor(t, func() bool { data, _ := os.ReadFile(filepath.Join(dir, fmt.Sprint(i), "c")); return len(data) > 1 })
	}
	cancel()
	wg.Wait()
	for i := range 5 {
		for _, f := range []string{"a", "b", "c"} {
			data, err := os.ReadFile(filepath.Join(dir, fmt.Sprint(i), f))
			if err != nil {
				t.Fatal(err)
			}
			if alive(strings.TrimSpace(string(data))) {
				t.Errorf("process %s%d lives on", f, i)
			}
		}
	}
}

func alive(pid string) bool {
	data, err := os.ReadFile("/proc/" + pid + "/stat")
	return err == nil && !strings.Contains(string(data), ") Z ") && !strings.Contains(string(data), ") X ")
}

func withEnv(t testing.TB, entry string) []int {
	t.Helper()
	pids, err := procs.WithEnv(entry)
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

func waitFor(t testing.TB, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("it did not come about")
}

func TestTerminal(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	in, feed := io.Pipe()
	out := &buffer{}
	resize := make(chan sandboxer.WinSize, 1)
	done := make(chan error, 1)
	go func() {
		exit, err := h.Run(t.Context(), sshrun.Cmd{Script: `stty size; read l; trap 'stty size' WINCH; echo "got $l"; while :; do sleep 0.05; done`,
			TTY: &sandboxer.WinSize{Cols: 101, Rows: 37}, Stdin: in, Stdout: out, Resize: resize})
		if err == nil && exit.Code != 130 {
			err = fmt.Errorf("exit %+v", exit)
		}
		done <- err
	}()
	waitFor(t, func() bool { return strings.Contains(out.String(), "37 101") })
	io.WriteString(feed, "hello\n")
	waitFor(t, func() bool { return strings.Contains(out.String(), "got hello") })
	resize <- sandboxer.WinSize{Cols: 55, Rows: 22}
	waitFor(t, func() bool { return strings.Contains(out.String(), "22 55") })
	io.WriteString(feed, "\x03")
	if err := <-done; err != nil {
		t.Errorf("%v, with output %q", err, out.String())
	}
	feed.Close()
	if strings.Contains(out.String(), "SANDBOXER") || strings.Contains(out.String(), "export") {
		t.Errorf("the script was echoed: %q", out.String())
	}
}

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) { b.mu.Lock(); defer b.mu.Unlock(); return b.b.Write(p) }
func (b *buffer) String() string              { b.mu.Lock(); defer b.mu.Unlock(); return b.b.String() }

func TestSignals(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	signals := make(chan os.Signal, 1)
	out := &buffer{}
	go func() {
		for !strings.Contains(out.String(), "ready") {
			time.Sleep(10 * time.Millisecond)
		}
		signals <- syscall.SIGTERM
	}()
	exit, err := h.Run(t.Context(), sshrun.Cmd{Args: []string{"sh", "-c", "trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.05; done"}, Stdout: out, Signals: signals})
	if err != nil || exit.Code != 7 || !strings.Contains(out.String(), "caught") {
		t.Errorf("exit %+v, %v, output %q", exit, err, out.String())
	}
}

func TestDial(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	unix, err := net.Listen("unix", filepath.Join(shortDir(t), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close()
	for _, l := range []net.Listener{tcp, unix} {
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					data, _ := io.ReadAll(c)
					c.Write(bytes.ToUpper(data))
				}()
			}
		}()
		for range 12 { // more than there may be sessions
			c, err := h.Dial(t.Context(), l.Addr().Network(), l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			big := bytes.Repeat([]byte("abc"), 50000)
			go func() {
				c.Write(big)
				c.(interface{ CloseWrite() error }).CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, bytes.ToUpper(big)) {
				t.Errorf("%s: %d bytes, %v", l.Addr().Network(), len(got), err)
			}
		}
	}
	tcp.Close()
	if _, err := h.Dial(t.Context(), "tcp", tcp.Addr().String()); sandboxer.KindOf(err) != sandboxer.Unavailable || errors.Is(err, sshrun.ErrUnreachable) {
		t.Errorf("nobody listens: %v", err)
	}
	if _, err := h.Output(t.Context(), "true"); err != nil {
		t.Errorf("after that: %v", err)
	}
}

// A reader of the output may be slow, after the command has ended, and loses
// nothing; if it stops, the end of ctx ends the waiting.
func TestOutputIsTakenLate(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	const size = 1 << 20
	t.Run("slowly", func(t *testing.T) {
		var out bytes.Buffer
		slow := writer(func(p []byte) (int, error) {
			if out.Len() == 0 {
				time.Sleep(1200 * time.Millisecond) // longer than an output may be silent
			}
			return out.Write(p)
		})
		if _, err := h.Run(t.Context(), sshrun.Cmd{Script: `head -c "$1" /dev/zero`, Args: []string{fmt.Sprint(size)}, Stdout: slow}); err != nil || out.Len() != size {
			t.Errorf("%d of %d bytes, %v", out.Len(), size, err)
		}
	})
	t.Run("never", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 800*time.Millisecond)
		defer cancel()
		stop := make(chan struct{})
		stuck := writer(func(p []byte) (int, error) { <-stop; return len(p), nil })
		done := make(chan error, 1)
		go func() {
			_, err := h.Run(ctx, sshrun.Cmd{Script: "echo done", Stdout: stuck})
			done <- err
		}()
		select {
		case err := <-done:
			if sandboxer.KindOf(err) != sandboxer.Timeout {
				t.Errorf("%v, want a timeout", err)
			}
		case <-time.After(time.Minute):
			t.Error("Run hangs")
		}
		close(stop)
	})
	t.Run("what is left behind talks on", func(t *testing.T) {
		// What says nothing for half a second, as it may on a busy machine, is let go.
		var err error
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 800*time.Millisecond)
			done := make(chan error, 1)
			go func() {
				_, err := h.Run(ctx, sshrun.Cmd{Script: "(while echo x; do sleep 0.1; done) & echo done", Stdout: io.Discard})
				done <- err
			}()
			select {
			case err = <-done:
			case <-time.After(time.Minute):
				t.Fatal("Run hangs")
			}
			cancel()
			if sandboxer.KindOf(err) == sandboxer.Timeout {
				return
			}
		}
		t.Errorf("%v, want a timeout", err)
	})
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// TestCapture: an answer is as long as is expected at most, or the command ends.
func TestCapture(t *testing.T) {
	leaveNothing(t)
	s := sshtest.Start(t, sshtest.Options{})
	h := host(t, newPool(t, sshrun.Options{}), s.Target())
	const most = 100_000
	for script, ok := range map[string]bool{"head -c 100000 /dev/zero": true, "head -c 100001 /dev/zero": false, "exec yes": false} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		out, exit, err := h.Capture(ctx, sshrun.Cmd{Script: script}, most)
		cancel()
		if ok && (err != nil || exit.Code != 0 || len(out) != most) {
			t.Errorf("%s: %d bytes, %+v, %v", script, len(out), exit, err)
		}
		if !ok && (sandboxer.KindOf(err) != sandboxer.Failed || !strings.Contains(err.Error(), "longer than 100000 bytes") || out != nil) {
			t.Errorf("%s: %d bytes, %v", script, len(out), err)
		}
	}
	if out, err := h.Output(t.Context(), "exec yes"); sandboxer.KindOf(err) != sandboxer.Failed || out != nil {
		t.Errorf("Output: %d bytes, %v", len(out), err)
	}
}
