package engine

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Commands here end and fail as they do over SSH.
func TestLocal(t *testing.T) {
	l, dir := Local{}, t.TempDir()
	for name, c := range map[string]struct {
		cmd       sshrun.Cmd
		code      int
		out, errs string
	}{
		"a script":       {cmd: sshrun.Cmd{Script: `echo "$1,$2"; echo err >&2; exit 3`, Args: []string{"a b", "$c"}}, code: 3, out: "a b,$c\n", errs: "err\n"},
		"a command":      {cmd: sshrun.Cmd{Args: []string{"printf", "%s", "x"}}, out: "x"},
		"environment":    {cmd: sshrun.Cmd{Script: `echo "$A"; pwd`, Env: map[string]string{"A": "a"}, Dir: dir}, out: "a\n" + dir + "\n"},
		"input":          {cmd: sshrun.Cmd{Args: []string{"cat"}, Stdin: strings.NewReader("in")}, out: "in"},
		"no input":       {cmd: sshrun.Cmd{Args: []string{"cat"}}},
		"not there":      {cmd: sshrun.Cmd{Args: []string{"/no/such"}}, code: 127},
		"not executable": {cmd: sshrun.Cmd{Args: []string{"/etc/passwd"}}, code: 126},
		"a signal":       {cmd: sshrun.Cmd{Script: "kill -TERM $$"}, code: 143},
		"a full pipe":    {cmd: sshrun.Cmd{Script: "head -c 300000 /dev/zero | tr '\\0' x"}, out: strings.Repeat("x", 300000)},
	} {
		var out, errs strings.Builder
		c.cmd.Stdout, c.cmd.Stderr = &slow{w: &out}, &errs
		exit, err := l.Run(t.Context(), c.cmd)
		if err != nil || exit.Code != c.code || out.String() != c.out || c.code < 126 && errs.String() != c.errs || (exit.Signal == "TERM") != (c.code == 143) {
			t.Errorf("%s: %+v, %.80q, %q, %v", name, exit, out.String(), errs.String(), err)
		}
	}
	for name, c := range map[string]sshrun.Cmd{
		"a NUL byte": {Args: []string{"echo", "\x00"}}, "a NUL byte in a script": {Script: "echo \x00"}, "a name": {Args: []string{"true"}, Env: map[string]string{"A=B": "c"}},
		"no directory": {Args: []string{"true"}, Dir: filepath.Join(dir, "none")}, "nothing": {}, "too much": {Args: []string{"echo", strings.Repeat("x", 4<<20)}},
	} {
		if _, err := l.Run(t.Context(), c); sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%s: %v; want invalid", name, err)
		}
	}
	if _, _, err := l.Capture(t.Context(), sshrun.Cmd{Script: "while :; do echo more; done"}, 1<<10); sandboxer.KindOf(err) != sandboxer.Failed || sandboxer.HintOf(err) == "" {
		t.Errorf("an endless answer: %v", err)
	}
	if out, exit, err := l.Capture(t.Context(), sshrun.Cmd{Script: "echo x; exit 2"}, 2); string(out) != "x\n" || exit.Code != 2 || err != nil {
		t.Errorf("Capture = %q, %+v, %v", out, exit, err)
	}
	if _, err := l.Run(t.Context(), sshrun.Cmd{Script: "while :; do echo more; done", Stdout: refusing{}}); !errors.Is(err, errRefuses) || !errors.Is(err, sshrun.ErrOutput) {
		t.Errorf("a reader that leaves: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Run(ended, sshrun.Cmd{Args: []string{"touch", filepath.Join(dir, "ran")}}); sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("under a context that ended: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "ran")); err == nil {
		t.Error("it ran")
	}
}

// slow is a reader that takes its time.
type slow struct{ w io.Writer }

func (s *slow) Write(p []byte) (int, error) {
	time.Sleep(time.Millisecond)
	return s.w.Write(p)
}

// What a command started ends with its context, also in a session of its own; what it leaves
// behind when it ends by itself goes on, and holds nobody up.
func TestLocalEnds(t *testing.T) {
	l := Local{}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	began := newBeginning()
	ended := make(chan error, 1)
	go func() {
		_, err := l.Run(ctx, sshrun.Cmd{Script: "sleep 300 & setsid sleep 300 & echo begun; wait", Env: map[string]string{"SANDBOXER_TEST_LOCAL": t.Name()}, Stdout: began})
		ended <- err
	}()
	<-began.c
	left := func() int {
		pids, err := procs.WithEnv("SANDBOXER_TEST_LOCAL=" + t.Name())
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, pid := range pids {
			if !procs.Ended(pid) {
				n++
			}
		}
		return n
	}
	if left() < 3 {
		t.Error("it does not run")
	}
	cancel()
	if err := <-ended; sandboxer.KindOf(err) != sandboxer.Canceled || left() > 0 {
		t.Errorf("it ended with %v, and %d processes are left", err, left())
	}
	short, scancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer scancel()
	if _, err := l.Run(short, sshrun.Cmd{Args: []string{"sleep", "300"}}); sandboxer.KindOf(err) != sandboxer.Timeout {
		t.Errorf("beyond its time: %v", err)
	}

	var out strings.Builder
	exit, err := l.Run(t.Context(), sshrun.Cmd{Script: "sleep 300 & echo out; exit 4", Env: map[string]string{"SANDBOXER_TEST_LOCAL": t.Name()}, Stdout: &out})
	if err != nil || exit.Code != 4 || out.String() != "out\n" || left() != 1 {
		t.Errorf("with something left behind: %+v, %q, %v, %d", exit, out.String(), err, left())
	}
	if err := l.Kill(t.Context(), "SANDBOXER_TEST_LOCAL", t.Name()); err != nil || left() != 0 {
		t.Errorf("Kill: %v, %d are left", err, left())
	}
}

// A terminal here has its size, its changes and an end; signals reach the command.
func TestLocalTerminal(t *testing.T) {
	var screen safeBuilder
	sizes, signals := make(chan sandboxer.WinSize, 1), make(chan os.Signal, 1)
	go func() {
		waitFor(t, "a prompt", func() bool { return strings.Contains(screen.String(), "ready") })
		sizes <- sandboxer.WinSize{Cols: 99, Rows: 33}
		waitFor(t, "the change", func() bool { return strings.Contains(screen.String(), "changed") })
		signals <- syscall.SIGTERM
	}()
	exit, err := Local{}.Run(t.Context(), sshrun.Cmd{TTY: &sandboxer.WinSize{Cols: 77, Rows: 22}, Resize: sizes, Signals: signals, Stdout: &screen,
		Script: `[ -t 0 ] && stty size; trap 'exit 6' TERM; echo ready; while [ "$(stty size)" != "33 99" ]; do sleep 0.02; done; echo changed; while :; do sleep 0.02; done`})
	if got := screen.String(); err != nil || exit.Code != 6 || !strings.HasPrefix(got, "22 77") {
		t.Errorf("%+v, %q, %v", exit, got, err)
	}
	if exit, err := (Local{}).Run(t.Context(), sshrun.Cmd{TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Args: []string{"cat"}, Stdin: strings.NewReader("typed\n")}); err != nil || exit.Code != 0 {
		t.Errorf("what is typed ends: %+v, %v", exit, err)
	}
}

func TestLocalDial(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "sock")
	if _, err := (Local{}).Dial(t.Context(), "unix", sock); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("where nobody listens: %v", err)
	}
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := Local{}.Dial(t.Context(), "unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}
