package server

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// scripted is a backend whose streams are Go functions: what is tested with it is the
// way between client and backend. Without a function the fake's own is used.
type scripted struct {
	*fake.Extension
	exec func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error)
	dial func(ctx context.Context) (net.Conn, error)
	read func() (io.ReadCloser, error)
	wire func(ctx context.Context) (net.Conn, error) // to the agent
}

func (x *scripted) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	if x.exec == nil {
		return x.Extension.Exec(ctx, h, cmd)
	}
	return x.exec(ctx, cmd)
}

func (x *scripted) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	if x.dial == nil {
		return x.Extension.Dial(ctx, h, port)
	}
	return x.dial(ctx)
}

func (x *scripted) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	if x.read == nil {
		return x.Extension.ReadFile(ctx, h, name)
	}
	return x.read()
}

func (x *scripted) DialAgent(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	if x.wire == nil {
		return x.Extension.DialAgent(ctx, h)
	}
	return x.wire(ctx)
}

func (x *scripted) Without() []sandboxer.Capability {
	return slices.DeleteFunc(x.Extension.Without(), func(c sandboxer.Capability) bool { return x.wire != nil && c == sandboxer.CanAgent })
}

// scripts has a rig use x in place of the fake.
func scripts(x *scripted) func(*setup) {
	return func(s *setup) {
		s.extend = func(f *fake.Extension) sandboxer.Extension {
			x.Extension = f
			return x
		}
	}
}

// serveUnix serves x, with a sandbox named sb in it, on a Unix socket and returns a client
// of it.
func serveUnix(t testing.TB, x *scripted) *api.Client {
	t.Helper()
	r := newRig(t, scripts(x))
	r.create(r.admin, api.CreateSandbox{Name: "sb"})
	return r.admin
}

// silent opens a stream and reads nothing from it, as a machine that lost its power.
func silent(t *testing.T, x *scripted, path, protocol string, first []byte) {
	t.Helper()
	r := newRig(t, scripts(x), func(s *setup) { s.keepaliveEvery = 20 * time.Millisecond })
	r.create(r.admin, api.CreateSandbox{Name: "sb"})
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.Unix)
	}}}
	ws, _, err := websocket.Dial(t.Context(), "ws://localhost"+path, &websocket.DialOptions{HTTPClient: hc, Subprotocols: []string{protocol}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ws.CloseNow()
		r.stop()
		hc.CloseIdleConnections()
	})
	if first != nil {
		if err := ws.Write(t.Context(), websocket.MessageText, first); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSilentClients: both kinds of stream end when the client is gone.
func TestSilentClients(t *testing.T) {
	t.Run("exec", func(t *testing.T) {
		ended := make(chan struct{})
		m := &scripted{exec: func(ctx context.Context, _ sandboxer.Cmd) (sandboxer.Exit, error) {
			<-ctx.Done()
			close(ended)
			return sandboxer.Exit{}, ctx.Err()
		}}
		silent(t, m, "/v1/sandboxes/sb/exec", api.ExecProtocol, []byte(`{"args":["x"]}`))
		within(t, 10*time.Second, "the end of the command", ended)
	})
	for what, path := range map[string]string{api.PortProtocol: "/ports/80/connect", api.AgentProtocol: "/agent"} {
		t.Run(what, func(t *testing.T) {
			ended := make(chan struct{})
			dial := func(context.Context) (net.Conn, error) {
				here, there := net.Pipe()
				go func() {
					defer close(ended)
					io.Copy(io.Discard, there)
					there.Close()
				}()
				return here, nil
			}
			silent(t, &scripted{dial: dial, wire: dial}, "/v1/sandboxes/sb"+path, what, nil)
			within(t, 10*time.Second, "the end of the connection", ended)
		})
	}
}

// TestAgentStream: the stream to the agent carries bytes both ways, is closed by halves, ends with a pause, and says why; a key that
// only looks gets none.
func TestAgentStream(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // net.Pipe has no halves
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			there, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer there.Close()
				if n, err := io.Copy(there, there); err == nil {
					fmt.Fprintf(there, "after the end, %d", n)
				}
			}()
		}
	}()
	x := &scripted{wire: func(context.Context) (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) }}
	r := newRig(t, scripts(x))
	_, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	_, reader := r.key("acme", sandboxer.ScopeRead)
	r.create(c, api.CreateSandbox{Name: "sb"})
	if _, err := reader.DialAgent(t.Context(), "sb"); sandboxer.KindOf(err) != sandboxer.Denied {
		t.Errorf("with a key that only looks: %v; want denied", err)
	}
	conn, err := c.DialAgent(t.Context(), "sb")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(edgetest.Patience))
	b := make([]byte, 4)
	if _, err := io.WriteString(conn, "ping"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, b); err != nil || string(b) != "ping" {
		t.Fatalf("%q came back, %v", b, err)
	}
	halved, err := c.DialAgent(t.Context(), "sb")
	if err != nil {
		t.Fatal(err)
	}
	defer halved.Close()
	halved.SetDeadline(time.Now().Add(edgetest.Patience))
	if _, err := io.WriteString(halved, "ping"); err != nil {
		t.Fatal(err)
	}
	if err := halved.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if all, err := io.ReadAll(halved); err != nil || string(all) != "pingafter the end, 4" { // the other direction is open
		t.Errorf("once the client's half is closed, %q comes, %v", all, err)
	}
	if _, err := c.Pause(t.Context(), "sb", api.PauseSandbox{Depth: sandboxer.PauseFreeze}); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(b); err == nil || err == io.EOF || !strings.Contains(err.Error(), "stopped running") {
		t.Errorf("after a pause the stream ends with %v; want why", err)
	}
	if _, err := c.DialAgent(t.Context(), "sb"); sandboxer.KindOf(err) != sandboxer.Conflict {
		t.Errorf("of what is paused: %v; want conflict", err)
	}
	plain := serveUnix(t, &scripted{})
	if _, err := plain.DialAgent(t.Context(), "sb"); sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Errorf("without an agent: %v; want unsupported", err)
	}
}

func within(t testing.TB, d time.Duration, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(d):
		t.Fatalf("%s did not happen within %s", what, d)
	}
}

func TestExecStreams(t *testing.T) {
	tests := []struct {
		name string
		cmd  sandboxer.Cmd
		exec func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error)
		out  string
		errs string
		exit sandboxer.Exit
		kind sandboxer.Kind
		msg  string
	}{
		{
			name: "streams apart and exit code",
			cmd:  sandboxer.Cmd{Args: []string{"a", "b c", ""}},
			exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
				fmt.Fprintf(cmd.Stdout, "%q", cmd.Args)
				io.WriteString(cmd.Stderr, "oops")
				return sandboxer.Exit{Code: 43}, nil
			},
			out: `["a" "b c" ""]`, errs: "oops", exit: sandboxer.Exit{Code: 43},
		},
		{
			name: "everything of the command arrives",
			cmd:  sandboxer.Cmd{Args: []string{"x"}, Env: map[string]string{"K": "v=w"}, Dir: "/d", User: "1000:1000", TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}},
			exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
				fmt.Fprint(cmd.Stdout, cmd.Env["K"], cmd.Dir, cmd.User, *cmd.TTY)
				return sandboxer.Exit{}, nil
			},
			out: "v=w/d1000:1000{80 24}",
		},
		{
			name: "half-closed stdin",
			cmd:  sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("hello")},
			exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
				b, err := io.ReadAll(cmd.Stdin)
				if err != nil {
					return sandboxer.Exit{}, err
				}
				fmt.Fprintf(cmd.Stdout, "%s after the end", b) // the other direction is open
				return sandboxer.Exit{}, nil
			},
			out: "hello after the end",
		},
		{
			name: "no stdin is the end at once",
			cmd:  sandboxer.Cmd{Args: []string{"cat"}},
			exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
				b, err := io.ReadAll(cmd.Stdin)
				return sandboxer.Exit{Code: len(b)}, err
			},
		},
		{
			name: "killed by a signal",
			cmd:  sandboxer.Cmd{Args: []string{"x"}},
			exec: func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error) {
				return sandboxer.Exit{Code: 137, Signal: "KILL"}, nil
			},
			exit: sandboxer.Exit{Code: 137, Signal: "KILL"},
		},
		{
			name: "an error keeps kind, message and hint",
			cmd:  sandboxer.Cmd{Args: []string{"x"}},
			exec: func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error) {
				return sandboxer.Exit{}, sandboxer.E(sandboxer.NotFound, errors.New("private"), "sandbox gone").WithHint("look")
			},
			kind: sandboxer.NotFound, msg: "sandbox gone",
		},
		{
			name: "no arguments",
			cmd:  sandboxer.Cmd{},
			exec: func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error) { panic("called") },
			kind: sandboxer.Invalid, msg: "the request body does not fit: args: expected array",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := serveUnix(t, &scripted{exec: func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) { return tt.exec(ctx, cmd) }})
			var out, errs bytes.Buffer
			tt.cmd.Stdout, tt.cmd.Stderr = &out, &errs
			exit, err := c.Exec(t.Context(), "sb", tt.cmd)
			if sandboxer.KindOf(err) != tt.kind || tt.kind != "" && sandboxer.Message(err) != tt.msg {
				t.Fatalf("error %v (%s), hint %q; want %s %q", err, sandboxer.KindOf(err), sandboxer.HintOf(err), tt.kind, tt.msg)
			}
			if exit != tt.exit || out.String() != tt.out || errs.String() != tt.errs {
				t.Errorf("exit %+v, stdout %q, stderr %q; want %+v, %q, %q", exit, out.String(), errs.String(), tt.exit, tt.out, tt.errs)
			}
		})
	}
}

func TestExecResizeAndSignals(t *testing.T) {
	c := serveUnix(t, &scripted{exec: func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		for {
			select {
			case size := <-cmd.Resize:
				fmt.Fprintf(cmd.Stdout, "%dx%d\n", size.Cols, size.Rows)
			case sig := <-cmd.Signals:
				fmt.Fprintln(cmd.Stdout, sig)
				return sandboxer.Exit{Code: 128 + int(sig.(syscall.Signal))}, nil
			case <-ctx.Done():
				return sandboxer.Exit{}, ctx.Err()
			}
		}
	}})
	resize, signals := make(chan sandboxer.WinSize), make(chan os.Signal)
	pr, pw := io.Pipe()
	type result struct {
		exit sandboxer.Exit
		err  error
	}
	done := make(chan result, 1)
	go func() {
		exit, err := c.Exec(t.Context(), "sb", sandboxer.Cmd{Args: []string{"x"}, TTY: &sandboxer.WinSize{Cols: 1, Rows: 1},
			Stdout: pw, Resize: resize, Signals: signals})
		pw.Close()
		done <- result{exit, err}
	}()
	var line string
	resize <- sandboxer.WinSize{Cols: 132, Rows: 50}
	if fmt.Fscanln(pr, &line); line != "132x50" {
		t.Errorf("the command saw the size %q", line)
	}
	signals <- syscall.SIGTERM
	if fmt.Fscanln(pr, &line); line != "terminated" {
		t.Errorf("the command saw the signal %q", line)
	}
	if r := edgetest.Receive(t, done, "the end"); r.err != nil || r.exit.Code != 143 {
		t.Errorf("exit %+v, %v", r.exit, r.err)
	}
}

// A command that does not read its input does not hold up signals, and a client
// that leaves meanwhile is noticed.
func TestExecStuckInput(t *testing.T) {
	for _, leave := range []bool{false, true} {
		t.Run(fmt.Sprint("leave=", leave), func(t *testing.T) {
			begun, ended := make(chan struct{}), make(chan struct{})
			c := serveUnix(t, &scripted{exec: func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
				defer close(ended)
				close(begun)
				select {
				case <-cmd.Signals:
					return sandboxer.Exit{Code: 130}, nil
				case <-ctx.Done():
					return sandboxer.Exit{}, context.Cause(ctx)
				}
			}})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			signals := make(chan os.Signal)
			sent := &counting{r: zeros{}}
			go func() {
				// The window is full when no more is read.
				for sent.n.Load() < api.ExecWindow {
					time.Sleep(time.Millisecond)
				}
				<-begun
				if leave {
					cancel()
					return
				}
				signals <- os.Interrupt
			}()
			exit, err := c.Exec(ctx, "sb", sandboxer.Cmd{Args: []string{"x"}, Stdin: sent, Signals: signals})
			if leave {
				if sandboxer.KindOf(err) != sandboxer.Canceled {
					t.Errorf("error %v; want Canceled", err)
				}
			} else if err != nil || exit.Code != 130 {
				t.Errorf("exit %+v, %v", exit, err)
			}
			within(t, 5*time.Second, "the end of the command", ended)
			if n := sent.n.Load(); n > api.ExecWindow+2*api.ExecFrame {
				t.Errorf("%d bytes were taken from the client for a window of %d", n, api.ExecWindow)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

type counting struct {
	r io.Reader
	n atomic.Int64
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	return n, err
}

func TestExecLargeBothWays(t *testing.T) {
	const size = 64 << 20
	c := serveUnix(t, &scripted{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		_, err := io.CopyBuffer(struct{ io.Writer }{cmd.Stdout}, struct{ io.Reader }{cmd.Stdin}, make([]byte, 200<<10))
		return sandboxer.Exit{}, err
	}})
	in, out := sha256.New(), sha256.New()
	src := io.TeeReader(io.LimitReader(pattern(), size), in)
	exit, err := c.Exec(t.Context(), "sb", sandboxer.Cmd{Args: []string{"cat"}, Stdin: src, Stdout: out})
	if err != nil || exit.Code != 0 {
		t.Fatal(exit, err)
	}
	if !bytes.Equal(in.Sum(nil), out.Sum(nil)) {
		t.Error("what came back is not what was sent")
	}
}

// pattern yields bytes that differ from place to place.
func pattern() io.Reader {
	var n uint32
	return readFunc(func(p []byte) (int, error) {
		for i := range p {
			n = n*1664525 + 1013904223
			p[i] = byte(n >> 24)
		}
		return len(p), nil
	})
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// A client that does not read holds the command up instead of filling memory.
func TestExecSlowReader(t *testing.T) {
	var written atomic.Int64
	c := serveUnix(t, &scripted{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		buf := make([]byte, 64<<10)
		for range 1024 {
			n, err := cmd.Stdout.Write(buf)
			written.Add(int64(n))
			if err != nil {
				return sandboxer.Exit{}, err
			}
		}
		return sandboxer.Exit{}, nil
	}})
	open := make(chan struct{})
	var got int64
	first := true
	w := writeFunc(func(p []byte) (int, error) {
		if first {
			first = false
			<-open
		}
		got += int64(len(p))
		return len(p), nil
	})
	done := make(chan error, 1)
	go func() {
		_, err := c.Exec(t.Context(), "sb", sandboxer.Cmd{Args: []string{"x"}, Stdout: w})
		done <- err
	}()
	// What the command has written comes to rest far below what it wants to write.
	var last int64 = -1
	for last != written.Load() || last == 0 {
		last = written.Load()
		time.Sleep(50 * time.Millisecond)
	}
	if last > 8<<20 {
		t.Errorf("%d bytes are under way to a client that does not read", last)
	}
	close(open)
	if err := edgetest.Receive(t, done, "the end"); err != nil || got != 64<<20 {
		t.Errorf("%d bytes arrived, %v", got, err)
	}
}

type writeFunc func([]byte) (int, error)

func (f writeFunc) Write(p []byte) (int, error) { return f(p) }

// Whatever ends a stream ends the command, and says so to a client that is there.
func TestExecEnds(t *testing.T) {
	tests := []struct {
		name string
		end  func(cancel context.CancelFunc, revoke, stop func())
		kind sandboxer.Kind
		msg  string
	}{
		{"the client leaves", func(cancel context.CancelFunc, _, _ func()) { cancel() }, sandboxer.Canceled, ""},
		{"the key is revoked", func(_ context.CancelFunc, revoke, _ func()) { revoke() }, sandboxer.Unauthenticated, "the API key was revoked or has expired"},
		{"the server shuts down", func(_ context.CancelFunc, _, stop func()) { stop() }, sandboxer.Unavailable, "the server is shutting down"},
	}
	for _, tt := range tests {
		for _, busy := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/busy=%v", tt.name, busy), func(t *testing.T) {
				begun, ended := make(chan struct{}), make(chan struct{})
				x := &scripted{exec: func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
					defer close(ended)
					close(begun)
					for busy && ctx.Err() == nil {
						cmd.Stdout.Write(make([]byte, 32<<10))
					}
					<-ctx.Done()
					return sandboxer.Exit{}, ctx.Err()
				}}
				r := newRig(t, scripts(x))
				k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
				r.create(c, api.CreateSandbox{Name: "sb"})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				revoke := func() {
					if err := r.admin.RevokeKey(context.Background(), k.Key.ID); err != nil {
						t.Error(err)
					}
				}
				go func() {
					<-begun
					tt.end(cancel, revoke, r.stop)
				}()
				_, err := c.Exec(ctx, "sb", sandboxer.Cmd{Args: []string{"x"}})
				if sandboxer.KindOf(err) != tt.kind || tt.msg != "" && sandboxer.Message(err) != tt.msg {
					t.Errorf("error %v (%s); want %s %q", err, sandboxer.KindOf(err), tt.kind, tt.msg)
				}
				within(t, 5*time.Second, "the end of the command", ended)
			})
		}
	}
}

// The caller's own streams end the command when they fail.
func TestExecBrokenCallerStreams(t *testing.T) {
	broken := errors.New("broken")
	for _, name := range []string{"stdout", "stdin"} {
		t.Run(name, func(t *testing.T) {
			begun, ended := make(chan struct{}), make(chan struct{})
			cmd := sandboxer.Cmd{Stdout: writeFunc(func([]byte) (int, error) { return 0, broken })}
			if name == "stdin" {
				// One that breaks before the command began keeps it from that.
				cmd = sandboxer.Cmd{Stdin: readFunc(func([]byte) (int, error) { <-begun; return 0, broken })}
			}
			c := serveUnix(t, &scripted{exec: func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
				defer close(ended)
				close(begun)
				io.WriteString(cmd.Stdout, "x")
				<-ctx.Done()
				return sandboxer.Exit{}, ctx.Err()
			}})
			cmd.Args = []string{"x"}
			_, err := c.Exec(t.Context(), "sb", cmd)
			if !errors.Is(err, broken) || sandboxer.KindOf(err) != sandboxer.Canceled {
				t.Errorf("error %v", err)
			}
			within(t, 5*time.Second, "the end of the command", ended)
		})
	}
}

func TestDial(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				b, _ := io.ReadAll(conn) // until the half-close
				conn.Write(b)
			}()
		}
	}()
	x := &scripted{dial: func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", l.Addr().String())
	}}
	r := newRig(t, scripts(x))
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	r.create(c, api.CreateSandbox{Name: "sb"})
	conn, err := c.Dial(t.Context(), "sb", 80)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 3<<20)
	io.ReadFull(pattern(), want)
	go func() {
		conn.Write(want)
		conn.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d of %d bytes came back, %v", len(got), len(want), err)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}

	t.Run("deadline", func(t *testing.T) {
		conn, err := c.Dial(t.Context(), "sb", 80)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("Read after the deadline: %v", err)
		}
	})
	t.Run("revoked", func(t *testing.T) {
		conn, err := c.Dial(t.Context(), "sb", 80)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := r.admin.RevokeKey(t.Context(), k.Key.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "the API key was revoked") {
			t.Errorf("Read after the revocation: %v", err)
		}
	})
	t.Run("nothing listens", func(t *testing.T) {
		x.dial = func(context.Context) (net.Conn, error) {
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "nothing listens on port 80")
		}
		if _, err := r.admin.Dial(t.Context(), "sb", 80); !errors.Is(err, sandboxer.Unavailable) || sandboxer.Message(err) != "nothing listens on port 80" {
			t.Errorf("Dial: %v", err)
		}
	})
}

// A file that breaks off is never taken for a whole one.
func TestReadFileBreaksOff(t *testing.T) {
	c := serveUnix(t, &scripted{read: func() (io.ReadCloser, error) {
		return io.NopCloser(io.MultiReader(strings.NewReader("begin"), readFunc(func([]byte) (int, error) { return 0, errors.New("disk") }))), nil
	}})
	f, err := c.ReadFile(t.Context(), "sb", "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if !errors.Is(err, sandboxer.Unavailable) {
		t.Errorf("read %q, %v", b, err)
	}
}

func BenchmarkExecTrue(b *testing.B) {
	c := serveUnix(b, &scripted{exec: func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error) { return sandboxer.Exit{}, nil }})
	for b.Loop() {
		if _, err := c.Exec(b.Context(), "sb", sandboxer.Cmd{Args: []string{"true"}}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkExecOutput measures streamed output through the client.
func BenchmarkExecOutput(b *testing.B) {
	const size = 64 << 20
	for _, chunk := range []int{4 << 10, 32 << 10, 64 << 10, 128 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("chunk=%dK", chunk>>10), func(b *testing.B) {
			c := serveUnix(b, &scripted{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
				buf := make([]byte, chunk)
				for range size / chunk {
					if _, err := cmd.Stdout.Write(buf); err != nil {
						return sandboxer.Exit{}, err
					}
				}
				return sandboxer.Exit{}, nil
			}})
			b.SetBytes(size)
			for b.Loop() {
				if _, err := c.Exec(b.Context(), "sb", sandboxer.Cmd{Args: []string{"x"}, Stdout: io.Discard}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkExecInput measures streamed input.
func BenchmarkExecInput(b *testing.B) {
	const size = 64 << 20
	c := serveUnix(b, &scripted{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{cmd.Stdin}, make([]byte, 64<<10))
		return sandboxer.Exit{}, err
	}})
	b.SetBytes(size)
	for b.Loop() {
		if _, err := c.Exec(b.Context(), "sb", sandboxer.Cmd{Args: []string{"x"}, Stdin: io.LimitReader(zeros{}, size)}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkExecEcho measures one byte there and back, as a key press.
func BenchmarkExecEcho(b *testing.B) {
	c := serveUnix(b, &scripted{exec: func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		_, err := io.CopyBuffer(struct{ io.Writer }{cmd.Stdout}, struct{ io.Reader }{cmd.Stdin}, make([]byte, 1024))
		return sandboxer.Exit{}, err
	}})
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := c.Exec(b.Context(), "sb", sandboxer.Cmd{Args: []string{"cat"}, Stdin: inR, Stdout: outW})
		outW.Close()
		done <- err
	}()
	p := make([]byte, 1)
	for b.Loop() {
		inW.Write(p)
		if _, err := io.ReadFull(outR, p); err != nil {
			b.Fatal(err)
		}
	}
	inW.Close()
	io.Copy(io.Discard, outR)
	if err := edgetest.Receive(b, done, "the end"); err != nil {
		b.Fatal(err)
	}
}

// A client that gives up a command gets a message when it has ended.
func TestExecCancelWaits(t *testing.T) {
	var r *rig
	var ended atomic.Bool
	begun := make(chan struct{})
	x := &scripted{exec: func(ctx context.Context, _ sandboxer.Cmd) (sandboxer.Exit, error) {
		close(begun)
		<-ctx.Done()
		for range 3 { // it takes a while: whoever does not wait is back before
			if _, err := r.admin.Get(context.Background(), "sb"); err != nil {
				t.Error(err)
			}
		}
		ended.Store(true)
		return sandboxer.Exit{}, ctx.Err()
	}}
	r = newRig(t, scripts(x))
	r.create(r.admin, api.CreateSandbox{Name: "sb"})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		<-begun
		cancel()
	}()
	if _, err := r.admin.Exec(ctx, "sb", sandboxer.Cmd{Args: []string{"x"}}); sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("got %v; want canceled", err)
	}
	if !ended.Load() {
		t.Error("Exec is back, and the command still ends")
	}
}
