package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
)

// eventually polls until ok or fails the test.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("timed out: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func alive(pid int) bool {
	return !procs.Ended(pid)
}

// readPID waits for a file with the number of a process.
func readPID(t testing.TB, file string) int {
	t.Helper()
	pid := 0
	eventually(t, "no process number in "+file, func() bool {
		b, _ := os.ReadFile(file)
		n, err := strconv.Atoi(strings.TrimSpace(string(b)))
		pid = n
		return err == nil && bytes.HasSuffix(b, []byte("\n"))
	})
	return pid
}

func TestExec(t *testing.T) {
	a := startAgent(t)
	notProgram := filepath.Join(a.dir, "text")
	if err := os.WriteFile(notProgram, []byte("\x00\x01\x02"), 0o755); err != nil {
		t.Fatal(err)
	}
	badLoader := filepath.Join(a.dir, "script")
	if err := os.WriteFile(badLoader, []byte("#!/no/such/shell\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	plain := filepath.Join(a.dir, "plain")
	if err := os.WriteFile(plain, []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	sh := func(s string) []string { return []string{"sh", "-c", s} }
	tests := []struct {
		name     string
		cmd      sandboxer.Cmd
		out, err string // err: a part of it
		want     sandboxer.Exit
	}{
		{"streams apart", sandboxer.Cmd{Args: sh("echo out; echo err >&2")}, "out\n", "err\n", sandboxer.Exit{}},
		{"exit code", sandboxer.Cmd{Args: sh("exit 43")}, "", "", sandboxer.Exit{Code: 43}},
		{"exit code 255", sandboxer.Cmd{Args: sh("exit 255")}, "", "", sandboxer.Exit{Code: 255}},
		{"killed", sandboxer.Cmd{Args: sh("kill -KILL $$")}, "", "", sandboxer.Exit{Code: 137, Signal: "KILL"}},
		{"own signal", sandboxer.Cmd{Args: sh("kill -USR1 $$")}, "", "", sandboxer.Exit{Code: 138, Signal: "USR1"}},
		{"real-time signal", sandboxer.Cmd{Args: sh("kill -36 $$")}, "", "", sandboxer.Exit{Code: 164, Signal: "RTMIN+2"}},
		{"no input", sandboxer.Cmd{Args: []string{"cat"}}, "", "", sandboxer.Exit{}},
		{"input", sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("abc")}, "abc", "", sandboxer.Exit{}},
		{"a MiB both ways", sandboxer.Cmd{Args: []string{"cat"}, Stdin: bytes.NewReader(big)}, string(big), "", sandboxer.Exit{}},
		{"input nobody reads", sandboxer.Cmd{Args: []string{"true"}, Stdin: bytes.NewReader(big)}, "", "", sandboxer.Exit{}},
		{"default directory", sandboxer.Cmd{Args: []string{"pwd"}}, a.dir + "\n", "", sandboxer.Exit{}},
		{"directory", sandboxer.Cmd{Args: []string{"pwd"}, Dir: "/usr"}, "/usr\n", "", sandboxer.Exit{}},
		{"environment", sandboxer.Cmd{Args: sh("echo $A-$B"), Env: map[string]string{"A": "1", "B": "x y=z"}}, "1-x y=z\n", "", sandboxer.Exit{}},
		{"PATH of the command", sandboxer.Cmd{Args: []string{"script-of-ours"}, Env: map[string]string{"PATH": a.dir}}, "", "not found", sandboxer.Exit{Code: 127}},
		{"missing command", sandboxer.Cmd{Args: []string{"no-such-command"}}, "", "no-such-command: command not found", sandboxer.Exit{Code: 127}},
		{"missing file", sandboxer.Cmd{Args: []string{"./no-such-file"}}, "", "no such file", sandboxer.Exit{Code: 127}},
		{"missing interpreter", sandboxer.Cmd{Args: []string{badLoader}}, "", "interpreter", sandboxer.Exit{Code: 127}},
		{"not executable", sandboxer.Cmd{Args: []string{plain}}, "", "permission denied", sandboxer.Exit{Code: 126}},
		{"not a program", sandboxer.Cmd{Args: []string{notProgram}}, "", "exec format error", sandboxer.Exit{Code: 126}},
		{"a directory", sandboxer.Cmd{Args: []string{"/usr"}}, "", "is a directory", sandboxer.Exit{Code: 126}},
		{"child left behind with the streams", sandboxer.Cmd{Args: sh("echo now; sleep 100 &")}, "now\n", "", sandboxer.Exit{}},
		{"odd arguments", sandboxer.Cmd{Args: []string{"printf", "%s|", "", "a b", "ü\n"}}, "|a b|ü\n|", "", sandboxer.Exit{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out, errs bytes.Buffer
			tt.cmd.Stdout, tt.cmd.Stderr = &out, &errs
			x, err := a.Exec(t.Context(), tt.cmd)
			if err != nil || x != tt.want || out.String() != tt.out || !strings.Contains(errs.String(), tt.err) {
				t.Errorf("exit %+v (want %+v), error %v, stdout %.80q, stderr %.200q", x, tt.want, err, out.String(), errs.String())
			}
		})
	}
	t.Run("discards output", func(t *testing.T) {
		if x, err := a.Exec(t.Context(), sandboxer.Cmd{Args: sh("echo a; echo b >&2; exit 3")}); err != nil || x.Code != 3 {
			t.Errorf("%+v, %v", x, err)
		}
	})
	t.Run("a late child is heard", func(t *testing.T) {
		eventually(t, "never heard", func() bool { // on a busy machine it may come after the wait
			var out bytes.Buffer
			_, err := a.Exec(t.Context(), sandboxer.Cmd{Args: sh("(sleep 0.02; echo late) & echo now"), Stdout: &out})
			return err == nil && out.String() == "now\nlate\n"
		})
	})
	t.Run("broken writer", func(t *testing.T) {
		_, err := a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"yes"}, Stdout: brokenWriter{}})
		if sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("yes into a broken writer: %v", err)
		}
		ps, err := a.Processes(t.Context())
		if err != nil || len(ps) != 0 {
			t.Errorf("left behind: %v, %v", ps, err)
		}
	})
	for _, tt := range []struct {
		name string
		cmd  sandboxer.Cmd
		kind sandboxer.Kind
		msg  string
	}{
		{"missing directory", sandboxer.Cmd{Args: []string{"true"}, Dir: "/no/such"}, sandboxer.Invalid, "cwd '/no/such' does not exist"},
		{"directory is a file", sandboxer.Cmd{Args: []string{"true"}, Dir: "/etc/passwd"}, sandboxer.Invalid, "not a directory"},
		{"unknown user", sandboxer.Cmd{Args: []string{"true"}, User: "no-such-user"}, sandboxer.Invalid, "invalid username: 'no-such-user'"},
		{"unknown group", sandboxer.Cmd{Args: []string{"true"}, User: "root:no-such-group"}, sandboxer.Invalid, "invalid username"},
		{"no command", sandboxer.Cmd{}, sandboxer.Invalid, "no command given"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := a.Exec(t.Context(), tt.cmd)
			if sandboxer.KindOf(err) != tt.kind || !strings.Contains(sandboxer.Message(err), tt.msg) {
				t.Errorf("%v (%s); want %s with %q", err, sandboxer.KindOf(err), tt.kind, tt.msg)
			}
		})
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestExecParallel(t *testing.T) {
	a := startAgent(t)
	var wg sync.WaitGroup
	for i := range 48 {
		wg.Go(func() {
			var out bytes.Buffer
			want := strconv.Itoa(i)
			x, err := a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", "cat; exit " + want},
				Stdin: strings.NewReader(want), Stdout: &out})
			if err != nil || x.Code != i || out.String() != want {
				t.Errorf("exec %d: %+v, %v, %q", i, x, err, out.String())
			}
		})
	}
	wg.Wait()
}

func TestExecUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("switching users needs root")
	}
	a := startAgent(t)
	run := func(user, script string) string {
		t.Helper()
		var out bytes.Buffer
		x, err := a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", script}, User: user, Stdout: &out, Stderr: &out, Dir: "/"})
		if err != nil || x.Code != 0 {
			t.Fatalf("as %s: %+v, %v, %s", user, x, err, out.String())
		}
		return strings.TrimSpace(out.String())
	}
	nobody, ok := userDB{"/etc/passwd", "/etc/group"}.lookup("nobody")
	if !ok {
		t.Skip("this machine has no user nobody")
	}
	id := fmt.Sprintf("%d:%d", nobody.uid, nobody.gid)
	const who = "echo $(id -u):$(id -g)"
	if got := run("nobody", who); got != id {
		t.Errorf("nobody: %s; want %s", got, id)
	}
	if got := run("nobody", "echo $USER $LOGNAME $HOME"); got != "nobody nobody "+nobody.home {
		t.Errorf("environment of nobody: %q", got)
	}
	if got := run("4711", who); got != "4711:4711" {
		t.Errorf("uid alone: %s", got)
	}
	if got := run("4711:12", who+"; id -G"); got != "4711:12\n12" {
		t.Errorf("uid:gid: %q (the agent's own groups must not come along)", got)
	}
	if got := run("", who); got != "0:0" {
		t.Errorf("default: %s", got)
	}
	var out bytes.Buffer
	x, err := a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", "stat -c %u $(tty) && tty < /dev/tty > /dev/null"},
		User: "nobody", TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdout: &out})
	if err != nil || x.Code != 0 || strings.TrimSpace(out.String()) != strconv.Itoa(int(nobody.uid)) {
		t.Errorf("owner of the terminal: %+v, %v, %q", x, err, out.String())
	}
}

func TestExecTerminal(t *testing.T) {
	a := startAgent(t)
	var out bytes.Buffer
	x, err := a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", "test -t 0 && test -t 1 && test -t 2 && stty size"},
		TTY: &sandboxer.WinSize{Cols: 91, Rows: 17}, Stdout: &out})
	if err != nil || x.Code != 0 || out.String() != "17 91\r\n" {
		t.Errorf("stty size: %+v, %v, %q", x, err, out.String())
	}
	out.Reset()
	x, err = a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"cat"}, TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdout: &out})
	if err != nil || x.Code != 0 {
		t.Errorf("cat on a terminal without input: %+v, %v, %q", x, err, out.String())
	}

	t.Run("resize and keys", func(t *testing.T) {
		in, keys := io.Pipe()
		defer keys.Close()
		w := &awaited{}
		resize := make(chan sandboxer.WinSize)
		done := make(chan sandboxer.Exit, 1)
		go func() {
			x, err := a.Exec(t.Context(), sandboxer.Cmd{
				Args: []string{"sh", "-c", `trap 'stty size; echo changed' WINCH; trap 'echo interrupted; exit 5' INT; echo ready; while :; do sleep 0.01; done`},
				TTY:  &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdout: w, Stdin: in, Resize: resize,
			})
			if err != nil {
				t.Error(err)
			}
			done <- x
		}()
		w.wait(t, "ready")
		resize <- sandboxer.WinSize{Cols: 120, Rows: 40}
		w.wait(t, "40 120\r\nchanged")
		if _, err := keys.Write([]byte{3}); err != nil { // ^C, to be turned into a signal by the terminal
			t.Fatal(err)
		}
		w.wait(t, "interrupted")
		if x := <-done; x.Code != 5 {
			t.Errorf("exit %+v", x)
		}
	})
}

// awaited is a writer that tests can wait on for text.
type awaited struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (a *awaited) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.b.Write(p)
}

func (a *awaited) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.b.String()
}

func (a *awaited) wait(t testing.TB, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("no %q in the output", text), func() bool { return strings.Contains(a.String(), text) })
}

func TestExecSignals(t *testing.T) {
	a := startAgent(t)
	w := &awaited{}
	sigs := make(chan os.Signal, 1)
	done := make(chan sandboxer.Exit, 1)
	go func() {
		x, err := a.Exec(t.Context(), sandboxer.Cmd{Stdout: w, Signals: sigs,
			Args: []string{"sh", "-c", `trap 'echo got usr2; exit 9' USR2; echo ready; while :; do sleep 0.01; done`}})
		if err != nil {
			t.Error(err)
		}
		done <- x
	}()
	w.wait(t, "ready")
	sigs <- syscall.SIGUSR2
	if x := <-done; x.Code != 9 || !strings.Contains(w.String(), "got usr2") {
		t.Errorf("%+v, %q", x, w.String())
	}
}

// family is a command that starts relatives of every kind, each noting its number.
func family(dir string) string {
	return fmt.Sprintf(`cd %s
sleep 1000 & echo $! > child
setsid sh -c 'echo $$ > session; exec sleep 1000' &
( ( setsid sh -c 'echo $$ > orphan; exec sleep 1000' & ) & )
sh -ic 'echo $$ > shell; sleep 1000' < /dev/null > /dev/null 2>&1 &
echo $$ > leader
wait`, dir)
}

var relatives = []string{"leader", "child", "session", "orphan", "shell"}

// expiring is a context whose deadline passes when over is closed.
type expiring struct {
	context.Context
	over chan struct{}
}

func (e expiring) Done() <-chan struct{} { return e.over }

func (e expiring) Err() error {
	select {
	case <-e.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

func TestCancelKillsTheFamily(t *testing.T) {
	a := startAgent(t)
	for _, how := range []string{"cancel", "deadline", "broken connection", "signal"} {
		t.Run(how, func(t *testing.T) {
			dir := filepath.Join(a.dir, strings.ReplaceAll(how, " ", "-"))
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			client := a.Client
			var mu sync.Mutex
			var conns []net.Conn
			if how == "broken connection" {
				client = NewClient(ClientOptions{Token: testToken, Dial: func(ctx context.Context) (net.Conn, error) {
					c, err := a.dial(ctx)
					mu.Lock()
					defer mu.Unlock()
					conns = append(conns, c)
					return c, err
				}})
				defer client.Close()
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			over := make(chan struct{})
			if how == "deadline" {
				ctx = expiring{ctx, over}
			}
			result := make(chan error, 1)
			go func() {
				_, err := client.Exec(ctx, sandboxer.Cmd{Args: []string{"sh", "-c", family(dir)}})
				result <- err
			}()
			pids := map[string]int{}
			for _, r := range relatives {
				pids[r] = readPID(t, filepath.Join(dir, r))
			}
			want := sandboxer.Canceled
			switch how {
			case "cancel":
				cancel()
			case "deadline":
				close(over)
				want = sandboxer.Timeout
			case "broken connection":
				mu.Lock()
				for _, c := range conns {
					c.Close()
				}
				mu.Unlock()
				want = sandboxer.Unavailable
			case "signal":
				// The process runs a moment before the agent knows it; callers learn its ID after that.
				eventually(t, "the agent does not know the process", func() bool {
					err := client.Signal(ctx, pids["leader"], 9)
					if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
						t.Error(err)
					}
					return sandboxer.KindOf(err) != sandboxer.NotFound
				})
				want = ""
			}
			if err := <-result; sandboxer.KindOf(err) != want {
				t.Errorf("Exec: %v; want kind %q", err, want)
			}
			for _, r := range relatives {
				if how == "broken connection" { // no caller was left to wait
					eventually(t, r+" still runs", func() bool { return !alive(pids[r]) })
				} else if alive(pids[r]) {
					t.Errorf("%s (process %d) still runs after Exec has returned", r, pids[r])
				}
			}
		})
	}
}

func TestCanceledBeforehand(t *testing.T) {
	a := startAgent(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	mark := filepath.Join(a.dir, "ran")
	_, err := a.Exec(ctx, sandboxer.Cmd{Args: []string{"touch", mark}})
	if sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("Exec: %v", err)
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("the command ran")
	}
}

func TestBackground(t *testing.T) {
	a := startAgent(t)
	ctx := t.Context()
	pid, err := a.Start(ctx, sandboxer.ProcessSpec{Args: []string{"sh", "-c", "echo early; read line; echo got $line; read rest; exit 7"},
		Input: true, Env: map[string]string{"K": "v"}, Dir: "/", Tag: "job"})
	if err != nil {
		t.Fatal(err)
	}
	ps, err := a.Processes(ctx)
	if err != nil || len(ps) != 1 || ps[0].PID != pid || ps[0].Tag != "job" || ps[0].Args[0] != "sh" || ps[0].Env["K"] != "v" || ps[0].Dir != "/" {
		t.Errorf("Processes: %+v, %v", ps, err)
	}
	if !alive(pid) {
		t.Errorf("the pid %d is not that of a process", pid)
	}
	// Two readers at once, from the beginning; the first one leaves, the process stays.
	w1, w2 := &awaited{}, &awaited{}
	leave, left := context.WithCancel(ctx)
	first := make(chan error, 1)
	go func() {
		_, err := a.Attach(leave, pid, sandboxer.ProcessStreams{Replay: true, Stdout: w1})
		first <- err
	}()
	second := make(chan sandboxer.Exit, 1)
	go func() {
		x, err := a.Attach(ctx, pid, sandboxer.ProcessStreams{Replay: true, Stdout: w2})
		if err != nil {
			t.Error(err)
		}
		second <- x
	}()
	w1.wait(t, "early\n")
	w2.wait(t, "early\n")
	if err := a.SendInput(ctx, pid, []byte("one\n"), false); err != nil {
		t.Fatal(err)
	}
	w1.wait(t, "got one\n")
	left()
	if err := <-first; sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("the reader who left: %v", err)
	}
	if err := a.CloseStdin(ctx, pid); err != nil {
		t.Fatal(err)
	}
	if x := <-second; x.Code != 7 || w2.String() != "early\ngot one\n" {
		t.Errorf("%+v, %q", x, w2.String())
	}
	for _, replay := range []bool{false, true} {
		w := &awaited{}
		x, err := a.Attach(ctx, pid, sandboxer.ProcessStreams{Replay: replay, Stdout: w})
		want := ""
		if replay {
			want = "early\ngot one\n"
		}
		if err != nil || x.Code != 7 || w.String() != want {
			t.Errorf("after the end, replay %v: %+v, %v, %q; want %q", replay, x, err, w.String(), want)
		}
	}
	if err := a.Signal(ctx, pid, 15); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("signal after the end: %v", err)
	}
	if _, err := a.Attach(ctx, 1<<22+1, sandboxer.ProcessStreams{}); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("Attach to nothing: %v", err)
	}
	if _, err := a.Start(ctx, sandboxer.ProcessSpec{Args: []string{"no-such-command"}}); sandboxer.KindOf(err) != sandboxer.NotFound {
		t.Errorf("Start of nothing: %v", err)
	}
}

// TestDeadlines distinguishes the deadline of a call from that of a process.
func TestDeadlines(t *testing.T) {
	a := startAgent(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	pid, err := a.Start(ctx, sandboxer.ProcessSpec{Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Attach(ctx, pid, sandboxer.ProcessStreams{}); sandboxer.KindOf(err) != sandboxer.Timeout {
		t.Errorf("Attach: %v", err)
	}
	time.Sleep(100 * time.Millisecond)
	if !alive(pid) {
		t.Error("a background process died with the deadline of the call that started it")
	}
	// A deadline on the wire also applies if the caller has left.
	mark := filepath.Join(a.dir, "pid")
	res := a.stream("process.Process/Start", `{"process":{"cmd":"/bin/sh","args":["-c","echo $$ > `+mark+`; sleep 1000; true"]}}`, "Connect-Timeout-Ms", "3000")
	pid = readPID(t, mark)
	res.Body.Close()
	eventually(t, "the process outlives its deadline", func() bool { return !alive(pid) })
}

// TestReplayIsBounded writes more than is kept, without a reader.
func TestReplayIsBounded(t *testing.T) {
	a := startAgent(t, "--replay-kib", "64")
	pid, err := a.Start(t.Context(), sandboxer.ProcessSpec{Args: []string{"sh", "-c", "seq 1 200000; sleep 2; echo err >&2; seq 200001 200010"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Attach(t.Context(), pid, sandboxer.ProcessStreams{}); err != nil { // what is written after an Attach comes in addition to what is kept
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	x, err := a.Attach(t.Context(), pid, sandboxer.ProcessStreams{Replay: true, Stdout: &out, Stderr: &errs})
	if err != nil || x.Code != 0 {
		t.Fatalf("%+v, %v", x, err)
	}
	if n := out.Len(); n > 64<<10 || n < 60<<10 || !strings.HasSuffix(out.String(), "200009\n200010\n") {
		t.Errorf("kept %d bytes, ending in %q", n, out.String()[max(0, n-20):])
	}
	if errs.String() != "err\n" {
		t.Errorf("stderr %q", errs.String())
	}
}

// stuckWriter stops reading after the first piece until it is released.
type stuckWriter struct{ let chan struct{} }

func (s stuckWriter) Write(p []byte) (int, error) { <-s.let; return len(p), nil }

// TestBackPressure lets a single slow reader block the process and lose nothing.
func TestBackPressure(t *testing.T) {
	a := startAgent(t)
	let := make(chan struct{})
	time.AfterFunc(300*time.Millisecond, func() { close(let) })
	const size = 64 << 20
	n := counter(0)
	x, err := a.Exec(t.Context(), sandboxer.Cmd{Args: []string{"head", "-c", strconv.Itoa(size), "/dev/zero"},
		Stdout: io.MultiWriter(stuckWriter{let}, &n)})
	if err != nil || x.Code != 0 || n != size {
		t.Errorf("%+v, %v, %d bytes", x, err, n)
	}
}

// hears reports that something was written.
type hears struct {
	first chan<- struct{}
	once  sync.Once
}

func (h *hears) Write(p []byte) (int, error) {
	h.once.Do(func() { h.first <- struct{}{} })
	return len(p), nil
}

// TestStalledReader lets one reader stop while another one wants everything.
func TestStalledReader(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the stall limit")
	}
	t.Parallel()
	a := startAgent(t)
	const size = 64 << 20
	pid, err := a.Start(t.Context(), sandboxer.ProcessSpec{Args: []string{"sh", "-c", "echo; read go; head -c " + strconv.Itoa(size) + " /dev/zero"},
		Input: true})
	if err != nil {
		t.Fatal(err)
	}
	let := make(chan struct{})
	var wg sync.WaitGroup
	attached := make(chan struct{}, 2)
	stalled := make(chan error, 1)
	wg.Go(func() {
		_, err := a.Attach(t.Context(), pid, sandboxer.ProcessStreams{Replay: true, Stdout: io.MultiWriter(&hears{first: attached}, stuckWriter{let})})
		stalled <- err
	})
	n := counter(0)
	wg.Go(func() {
		x, err := a.Attach(t.Context(), pid, sandboxer.ProcessStreams{Replay: true, Stdout: io.MultiWriter(&hears{first: attached}, &n)})
		if err != nil || x.Code != 0 || n != size+1 {
			t.Errorf("the good reader: %+v, %v, %d bytes", x, err, n)
		}
		close(let)
	})
	<-attached
	<-attached
	if err := a.SendInput(t.Context(), pid, []byte("go\n"), false); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if err := <-stalled; sandboxer.KindOf(err) != sandboxer.Exhausted {
		t.Errorf("the stalled reader: %v", err)
	}
}

// TestInputNotDelivered: a command whose input cannot be delivered does not wait for it for
// ever.
func TestInputNotDelivered(t *testing.T) {
	r := startAgent(t)
	var dials atomic.Int32
	c := NewClient(ClientOptions{Token: testToken, Dial: func(ctx context.Context) (net.Conn, error) {
		if dials.Add(1) == 2 {
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "there is no room for another connection")
		}
		return r.dial(ctx)
	}})
	defer c.Close()
	exit, err := c.Exec(t.Context(), sandboxer.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("in"), Stdout: io.Discard})
	if sandboxer.KindOf(err) != sandboxer.Unavailable || !strings.Contains(err.Error(), "no room for another connection") {
		t.Errorf("%+v, %v", exit, err)
	}
	// It was killed.
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		list, err := r.Processes(t.Context())
		if err == nil && len(list) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("it goes on: %+v, %v", list, err)
		}
	}
	// A command that reads no input is not disturbed by that.
	var out strings.Builder
	if exit, err := r.Exec(t.Context(), sandboxer.Cmd{Args: []string{"sh", "-c", "exec <&-; sleep 0.3; echo done"}, Stdin: strings.NewReader(strings.Repeat("x", 1<<20)), Stdout: &out}); err != nil || exit.Code != 0 || out.String() != "done\n" {
		t.Errorf("with its input closed: %+v, %v: %q", exit, err, &out)
	}
}

// TestEndSparesOthers: net/http gives a connection to the next request before the request that had it has returned, and closes it
// if the context of that one ends in between. So the end of a command must not end a call that caused it.
func TestEndSparesOthers(t *testing.T) {
	signals := make(chan os.Signal, 1)
	signals <- syscall.SIGKILL
	for call, cmd := range map[string]sandboxer.Cmd{
		"CloseStdin": {Args: []string{"cat"}, Stdin: strings.NewReader("x")},
		"SendSignal": {Args: []string{"sleep", "60"}, Signals: signals},
	} {
		t.Run(call, func(t *testing.T) {
			r := startAgent(t)
			ended, outcome := make(chan struct{}), make(chan error, 1)
			transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return r.dial(ctx) }}
			defer transport.CloseIdleConnections()
			c := NewClient(ClientOptions{Token: testToken, BaseURL: "http://sandbox", HTTP: &http.Client{Transport: tripper(func(req *http.Request) (*http.Response, error) {
				res, err := transport.RoundTrip(req)
				if strings.HasSuffix(req.URL.Path, call) {
					<-ended
					outcome <- errors.Join(err, req.Context().Err())
				}
				return res, err
			})}})
			if _, err := c.Exec(t.Context(), cmd); err != nil {
				t.Error(err)
			}
			close(ended)
			if err := <-outcome; err != nil {
				t.Errorf("%s: %v", call, err)
			}
		})
	}
}

type tripper func(*http.Request) (*http.Response, error)

func (f tripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
