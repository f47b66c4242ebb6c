package extensiontest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func (s *suite) exec(t *testing.T) {
	sb := s.up(t) // one for the whole group; a behaviour that hurts it makes its own

	s.execMemory(t)

	s.test(t, "streams are apart", func(t *testing.T) {
		x, o, e := sb.run(t, sandboxer.Cmd{Args: s.script("echo out; echo err >&2")})
		if x != (sandboxer.Exit{}) || o != "out\n" || e != "err\n" {
			t.Errorf("got %+v, stdout %q, stderr %q", x, o, e)
		}
	})

	s.test(t, "exit code is a result", func(t *testing.T) {
		for _, code := range []int{0, 1, 43, 125, 126, 127, 200, 255} {
			x, _, _ := sb.run(t, sandboxer.Cmd{Args: s.script("exit " + strconv.Itoa(code))})
			if x != (sandboxer.Exit{Code: code}) {
				t.Errorf("exit %d: got %+v", code, x)
			}
		}
	})

	s.test(t, "killed by a signal", func(t *testing.T) {
		for _, tt := range []struct {
			name string
			n    int
		}{{"KILL", 9}, {"TERM", 15}, {"SEGV", 11}} {
			x, _, _ := sb.run(t, sandboxer.Cmd{Args: s.script("kill -" + tt.name + " $$; sleep 5")})
			if x != (sandboxer.Exit{Code: 128 + tt.n, Signal: tt.name}) {
				t.Errorf("%s: got %+v", tt.name, x)
			}
		}
	})

	s.test(t, "arguments arrive as given", func(t *testing.T) {
		args := []string{"", "two words", "$HOME `id` \"'\\", "*", "ü\n", "-n", strings.Repeat("x", 100<<10)}
		x, o, e := sb.run(t, sandboxer.Cmd{Args: s.script(`for a do printf '%s\n--\n' "$a"; done`, args...)})
		want := strings.Join(args, "\n--\n") + "\n--\n"
		if x.Code != 0 || o != want {
			t.Errorf("got %+v, %d bytes of output (%.200q, %q); want %d", x, len(o), o, e, len(want))
		}
	})

	s.test(t, "1 MiB of binary both ways", func(t *testing.T) {
		data := noise(1 << 20)
		var out bytes.Buffer
		x, _, e := sb.run(t, sandboxer.Cmd{Args: []string{"cat"}, Stdin: bytes.NewReader(data), Stdout: &out})
		if x.Code != 0 || !bytes.Equal(out.Bytes(), data) {
			t.Errorf("got %+v, %d bytes back (equal: %t), stderr %q", x, out.Len(), bytes.Equal(out.Bytes(), data), e)
		}
	})

	s.test(t, "stdin ends", func(t *testing.T) {
		if _, o, _ := sb.run(t, sandboxer.Cmd{Args: []string{"wc", "-c"}, Stdin: strings.NewReader("12345")}); strings.TrimSpace(o) != "5" {
			t.Errorf("wc -c counted %q; want 5", o)
		}
	})

	s.test(t, "no stdin is empty", func(t *testing.T) {
		if x, o, _ := sb.run(t, sandboxer.Cmd{Args: []string{"wc", "-c"}}); x.Code != 0 || strings.TrimSpace(o) != "0" {
			t.Errorf("wc -c counted %q, %+v; want 0", o, x)
		}
	})

	s.test(t, "stdin is interactive", func(t *testing.T) {
		in, feed := io.Pipe()
		defer feed.Close()
		out := &buffer{}
		r := sb.start(t, sandboxer.Cmd{Args: s.script(`while read -r l; do echo "got $l"; done`), Stdin: in, Stdout: out})
		for _, word := range []string{"one", "two"} {
			go fmt.Fprintln(feed, word)
			poll(t, "the answer to "+word, 10*time.Second, func() bool { return strings.HasSuffix(out.String(), "got "+word+"\n") })
		}
		feed.Close()
		if x, err := r.wait(t); err != nil || x.Code != 0 {
			t.Errorf("got %+v, %s", x, describe(err))
		}
	})

	s.test(t, "ends although stdin does not", func(t *testing.T) {
		in, feed := io.Pipe()
		defer feed.Close()
		if x, err := sb.start(t, sandboxer.Cmd{Args: s.script("exit 7"), Stdin: in}).wait(t); err != nil || x.Code != 7 {
			t.Errorf("got %+v, %s; want code 7", x, describe(err))
		}
	})

	s.test(t, "stdin is not read", func(t *testing.T) {
		x, o, _ := sb.run(t, sandboxer.Cmd{Args: s.script("echo early; exit 3"), Stdin: bytes.NewReader(noise(4 << 20))})
		if x.Code != 3 || o != "early\n" {
			t.Errorf("got %+v, %q", x, o)
		}
	})

	s.test(t, "a child in the background does not hold", func(t *testing.T) {
		own := s.up(t)
		seconds, start := sleepLength(), time.Now()
		if got := own.sh(t, "sleep "+seconds+" & echo started"); got != "started" {
			t.Errorf("got %q", got)
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("Exec took %s", took)
		}
		poll(t, "the child to run on", s.long(), func() bool { return own.count(t, seconds) == 1 })
	})

	s.test(t, "large output to a slow reader", func(t *testing.T) {
		w := &slowWriter{}
		x, _, e := sb.run(t, sandboxer.Cmd{Args: s.script("head -c 3000000 /dev/zero; echo end"), Stdout: w})
		if x.Code != 0 || w.n != 3000004 {
			t.Errorf("got %+v, %d bytes, %q; want 3000004 bytes", x, w.n, e)
		}
	})

	s.test(t, "the last words of a short command", func(t *testing.T) {
		for range 20 {
			if x, o, e := sb.run(t, sandboxer.Cmd{Args: s.script("echo out; echo err >&2; exit 1")}); x.Code != 1 || o != "out\n" || e != "err\n" {
				t.Fatalf("got %+v, %q, %q", x, o, e)
			}
		}
	})

	s.test(t, "a failing writer ends the command", func(t *testing.T) {
		own := s.up(t)
		seconds := sleepLength()
		broken := errors.New("the reader left")
		_, err := own.b.Exec(ctx(t), own.h, sandboxer.Cmd{
			Args:   s.script("while echo line; do sleep 0; done; sleep " + seconds),
			Stdout: writerFunc(func([]byte) (int, error) { return 0, broken }),
		})
		if err == nil {
			t.Error("no error although the output could not be delivered")
		}
		if n := own.count(t, seconds); n != 0 {
			t.Errorf("%d commands run on", n)
		}
	})

	s.test(t, "working directory", func(t *testing.T) {
		if got := sb.sh(t, "cd / && pwd"); got != "/" {
			t.Errorf("pwd = %q", got)
		}
		x, o, _ := sb.run(t, sandboxer.Cmd{Args: []string{"pwd"}, Dir: "/"})
		if x.Code != 0 || o != "/\n" {
			t.Errorf("in /: %+v, %q", x, o)
		}
		dir := sb.dir(t)
		if got := sb.sh(t, "mkdir -p 'a dir' && echo x >'a dir/f' && pwd -P"); got != dir {
			t.Errorf("the workspace is %q, then %q", dir, got)
		}
		if _, o, _ := sb.run(t, sandboxer.Cmd{Args: []string{"cat", "f"}, Dir: dir + "/a dir"}); o != "x\n" {
			t.Errorf("cat in the directory: %q", o)
		}
	})

	s.test(t, "missing working directory", func(t *testing.T) {
		for _, dir := range []string{"/no/such/directory", sb.dir(t) + "/file"} {
			sb.sh(t, ": >file")
			_, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: []string{"true"}, Dir: dir})
			wantKind(t, err, "Exec in "+dir, sandboxer.Invalid)
		}
	})

	s.test(t, "env is added", func(t *testing.T) {
		show := s.script(`echo "$A $B $C"`)
		given := func(sp *sandboxer.Spec) { sp.Env["A"], sp.Env["B"] = "spec", "spec" }
		own := s.up(t, given)
		if _, o, _ := own.run(t, sandboxer.Cmd{Args: show, Env: map[string]string{"B": "cmd", "C": "cmd"}}); o != "spec cmd cmd\n" {
			t.Errorf("environment: %q", o)
		}
		if _, o, _ := own.run(t, sandboxer.Cmd{Args: show}); o != "spec spec \n" {
			t.Errorf("the environment of the command before is left: %q", o)
		}
	})

	s.alone(t, "the broker's environment stays outside", func(t *testing.T) {
		t.Setenv("SANDBOXER_CONFORMANCE_CANARY", "leaked")
		if got := s.up(t).sh(t, `echo "${SANDBOXER_CONFORMANCE_CANARY-}"`); got != "" {
			t.Errorf("the command sees the broker's environment: %q", got)
		}
	})

	s.test(t, "user", func(t *testing.T) {
		uid, gid := sb.sh(t, `id -u "$1"`, s.User), sb.sh(t, `id -g "$1"`, s.User)
		for user, want := range map[string]string{
			"":              sb.sh(t, `echo "$(id -u):$(id -g)"`),
			s.User:          uid + ":" + gid,
			uid:             uid + ":" + gid,
			uid + ":" + gid: uid + ":" + gid,
		} {
			x, o, e := sb.run(t, sandboxer.Cmd{Args: s.script(`echo "$(id -u):$(id -g)"`), User: user})
			if x.Code != 0 || strings.TrimSpace(o) != want {
				t.Errorf("as %q: %+v, %q, %q; want %s", user, x, o, e, want)
			}
		}
	})

	s.test(t, "unknown user", func(t *testing.T) {
		_, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: []string{"true"}, User: "no-such-user"})
		wantKind(t, err, "Exec as no-such-user", sandboxer.Invalid)
	})

	s.test(t, "unknown service", func(t *testing.T) {
		_, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: []string{"true"}, Service: "no-such-service"})
		wantKind(t, err, "Exec in no-such-service", sandboxer.Invalid, sandboxer.Unsupported)
	})

	s.test(t, "missing command is 127", func(t *testing.T) {
		for _, name := range []string{"no-such-command", "/no/such/command", "./no-such-command"} {
			x, _, e := sb.run(t, sandboxer.Cmd{Args: []string{name}})
			if x.Code != 127 || !strings.Contains(e, name) {
				t.Errorf("%s: got %+v, stderr %q; want 127 and an explanation that names it", name, x, e)
			}
		}
	})

	s.test(t, "not executable is 126", func(t *testing.T) {
		dir := sb.dir(t)
		sb.sh(t, "echo x >plain; chmod 644 plain")
		for _, name := range []string{dir + "/plain", "./plain", dir} {
			x, _, e := sb.run(t, sandboxer.Cmd{Args: []string{name}})
			if x.Code != 126 || !strings.Contains(e, name) {
				t.Errorf("%s: got %+v, stderr %q; want 126 and an explanation that names it", name, x, e)
			}
		}
	})

	s.test(t, "a program in the workspace", func(t *testing.T) {
		sb.sh(t, `printf '#!/bin/sh\necho "ran $1"\n' >prog; chmod 755 prog`)
		if x, o, e := sb.run(t, sandboxer.Cmd{Args: []string{"./prog", "it"}}); x.Code != 0 || o != "ran it\n" {
			t.Errorf("got %+v, %q, %q", x, o, e)
		}
	})

	s.test(t, "cancel kills the command", func(t *testing.T) {
		sb.cancel(t, sandboxer.Cmd{}, 1, "exec sleep $1")
	})
	s.test(t, "cancel kills its children", func(t *testing.T) {
		sb.cancel(t, sandboxer.Cmd{}, 4, "sleep $1 & (sleep $1 & sleep $1) & sleep $1; sleep $1")
	})
	s.test(t, "cancel kills what it detached", func(t *testing.T) {
		sb.cancel(t, sandboxer.Cmd{}, 4, `
			if command -v setsid >/dev/null; then setsid sleep $1 & else sleep $1 & fi
			if command -v nohup >/dev/null; then nohup sleep $1 >/dev/null 2>&1 & else sleep $1 & fi
			(trap '' HUP INT TERM; (sleep $1) &)
			sleep $1`)
	})
	s.test(t, "cancel kills what hides", func(t *testing.T) {
		sb.cancel(t, sandboxer.Cmd{}, 3, hiding+"sleep $1")
	})
	s.test(t, "cancel kills what hides of a terminal", func(t *testing.T) {
		sb.cancel(t, sandboxer.Cmd{TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}}, 3, hiding+"sleep $1")
	})
	s.test(t, "cancel spares what hid before", func(t *testing.T) {
		own, seconds := s.up(t), sleepLength()
		own.sh(t, `setsid env -i sleep "$1" >/dev/null 2>&1 </dev/null &`, seconds)
		poll(t, "the other command's process to be there", s.long(), func() bool { return own.count(t, seconds) == 1 })
		own.cancel(t, sandboxer.Cmd{}, 1, "sleep $1")
		if n := own.count(t, seconds); n != 1 {
			t.Errorf("%d processes are left of a command that ended before", n)
		}
	})
	s.test(t, "cancel kills what ignores signals", func(t *testing.T) {
		sb.cancel(t, sandboxer.Cmd{}, 1, "trap '' HUP INT TERM QUIT; while :; do sleep $1; done")
	})
	s.test(t, "cancel kills the terminal's session", func(t *testing.T) {
		sb.cancel(t, sandboxer.Cmd{TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}}, 2, "sleep $1 & sleep $1")
	})
	s.test(t, "cancel spares other commands", func(t *testing.T) {
		started, w := newSignalWriter()
		in, feed := io.Pipe()
		defer feed.Close()
		other := sb.start(t, sandboxer.Cmd{Args: s.script("echo started; read -r l; exit 5"), Stdin: in, Stdout: w})
		await(t, started, "the other command to start")
		sb.cancel(t, sandboxer.Cmd{}, 1, "sleep $1")
		go fmt.Fprintln(feed, "on")
		if x, err := other.wait(t); err != nil || x.Code != 5 {
			t.Errorf("the other command: %+v, %s", x, describe(err))
		}
	})
	s.test(t, "cancel while the output is not read", func(t *testing.T) {
		own := s.up(t)
		blocked := make(chan struct{})
		defer close(blocked)
		started := make(chan struct{})
		var once sync.Once
		r := own.start(t, sandboxer.Cmd{Args: s.script("while echo line; do :; done"), Stdout: writerFunc(func(p []byte) (int, error) {
			once.Do(func() { close(started) })
			<-blocked
			return len(p), nil
		})})
		await(t, started, "the first output")
		r.cancel()
		_, err := r.wait(t)
		wantKind(t, err, "canceled Exec", sandboxer.Canceled)
	})
	s.test(t, "a deadline is a timeout", func(t *testing.T) {
		c, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := sb.b.Exec(c, sb.h, sandboxer.Cmd{Args: []string{"sleep", "3600"}})
		wantKind(t, err, "Exec past its deadline", sandboxer.Timeout)
		if took := time.Since(start); took > 20*time.Second {
			t.Errorf("Exec returned %s after it began; its deadline was 300 ms", took)
		}
	})

	s.test(t, "signals are delivered", func(t *testing.T) {
		signals := make(chan os.Signal, 4)
		started, w := newSignalWriter()
		r := sb.start(t, sandboxer.Cmd{
			Args:    s.script("trap 'echo hup' HUP; trap 'exit 9' TERM; echo ready; while :; do sleep 1; done"),
			Stdout:  w,
			Signals: signals,
		})
		await(t, started, "the command to start")
		signals <- syscall.SIGHUP
		poll(t, "the command to tell of SIGHUP", 10*time.Second, func() bool { return strings.Contains(w.String(), "hup") })
		signals <- syscall.SIGTERM
		if x, err := r.wait(t); err != nil || x.Code != 9 {
			t.Errorf("after SIGTERM: %+v, %s; want the trap's exit code 9", x, describe(err))
		}
	})

	s.test(t, "closed channels are no news", func(t *testing.T) {
		resize, signals := make(chan sandboxer.WinSize), make(chan os.Signal)
		close(resize)
		close(signals)
		for _, tty := range []*sandboxer.WinSize{nil, {Cols: 80, Rows: 24}} {
			x, o, _ := sb.run(t, sandboxer.Cmd{Args: s.script("sleep 1; echo slept"), TTY: tty, Resize: resize, Signals: signals})
			if x.Code != 0 || strings.TrimSpace(o) != "slept" {
				t.Errorf("terminal %v: %+v, %q", tty, x, o)
			}
		}
	})

	s.test(t, "no terminal unless asked", func(t *testing.T) {
		x, _, _ := sb.run(t, sandboxer.Cmd{Args: s.script("test -t 0 || test -t 1 || test -t 2")})
		if x.Code != 1 {
			t.Errorf("a command without TTY has a terminal: %+v", x)
		}
	})
	s.test(t, "tty", func(t *testing.T) {
		in, feed := io.Pipe() // an end of input would hang up
		defer feed.Close()
		x, o, e := sb.run(t, sandboxer.Cmd{
			Args: s.script("test -t 0 && test -t 1 && test -t 2 && stty size && echo err >&2; exit 6"),
			TTY:  &sandboxer.WinSize{Cols: 101, Rows: 37}, Stdin: in,
		})
		if x.Code != 6 || !strings.Contains(o, "37 101") || !strings.Contains(o, "err") || e != "" {
			t.Errorf("got %+v, %q, stderr %q; want 6, the size 37 101 and no separate stderr", x, o, e)
		}
	})
	s.test(t, "tty without stdin ends", func(t *testing.T) {
		out := &buffer{}
		r := sb.start(t, sandboxer.Cmd{Args: s.script("cat; echo end"), TTY: &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdout: out})
		if x, err := r.wait(t); err != nil || x.Code != 0 || !strings.Contains(out.String(), "end") {
			t.Errorf("got %+v, %s, %q", x, describe(err), out.String())
		}
	})
	s.test(t, "tty resize", func(t *testing.T) {
		resize := make(chan sandboxer.WinSize, 1)
		out := &buffer{}
		r := sb.start(t, sandboxer.Cmd{
			Args:  s.script("while :; do stty size; read -r l || exit 0; done"),
			TTY:   &sandboxer.WinSize{Cols: 80, Rows: 24},
			Stdin: &lines{}, Stdout: out, Resize: resize,
		})
		poll(t, "the first size", s.long(), func() bool { return strings.Contains(out.String(), "24 80") })
		resize <- sandboxer.WinSize{Cols: 123, Rows: 45}
		poll(t, "the new size", s.long(), func() bool { return strings.Contains(out.String(), "45 123") })
		r.cancel()
		_, err := r.wait(t)
		wantKind(t, err, "canceled Exec", sandboxer.Canceled)
	})
	s.test(t, "tty interrupt", func(t *testing.T) {
		in, feed := io.Pipe()
		defer feed.Close()
		out := &buffer{}
		r := sb.start(t, sandboxer.Cmd{
			Args: s.script("trap 'echo caught; exit 8' INT; echo ready; sleep 3600; echo slept"),
			TTY:  &sandboxer.WinSize{Cols: 80, Rows: 24}, Stdin: in, Stdout: out,
		})
		poll(t, "the command to start", s.long(), func() bool { return strings.Contains(out.String(), "ready") })
		go func() { // again and again: a shell may just be starting sleep, which then gets none of the first
			for {
				if _, err := feed.Write([]byte{3}); err != nil {
					return
				}
				select {
				case <-t.Context().Done():
					return
				case <-time.After(500 * time.Millisecond):
				}
			}
		}()
		if x, err := r.wait(t); err != nil || x.Code != 8 || !strings.Contains(out.String(), "caught") {
			t.Errorf("after ^C: %+v, %s, %q; want the trap's 8", x, describe(err), out.String())
		}
	})

	s.test(t, "16 in parallel", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				data := noise(64<<10 + i)
				var out bytes.Buffer
				x, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{
					Args: s.script("cat; exit " + strconv.Itoa(i)), Stdin: bytes.NewReader(data), Stdout: &out,
				})
				if err != nil || x.Code != i || !bytes.Equal(out.Bytes(), data) {
					t.Errorf("command %d: %+v, %v, %d bytes", i, x, err, out.Len())
				}
			})
		}
		wg.Wait()
	})

	s.test(t, "unknown sandbox", func(t *testing.T) {
		_, err := sb.b.Exec(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}, sandboxer.Cmd{Args: []string{"true"}})
		wantKind(t, err, "Exec", sandboxer.NotFound)
	})

	s.test(t, "from another process of the broker", func(t *testing.T) {
		other := *sb
		other.b, other.h = s.open(t), viaJSON(t, sb.h)
		sb.sh(t, "echo here >shared")
		if got := other.sh(t, "cat shared"); got != "here" {
			t.Errorf("the other process reads %q", got)
		}
	})
}
