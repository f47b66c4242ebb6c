package extensiontest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// ask makes one request on a connection to an agent and returns the answer's body.
func (s *suite) ask(t *testing.T, c net.Conn, method, target, body string) (status int, answer []byte) {
	t.Helper()
	c.SetDeadline(time.Now().Add(s.Patience))
	r, err := http.NewRequestWithContext(t.Context(), method, "http://sandbox"+target, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if err := r.Write(c); err != nil {
		t.Fatalf("%s %s: %v", method, target, err)
	}
	res, err := http.ReadResponse(bufio.NewReader(c), r)
	if err != nil {
		t.Fatalf("%s %s: %v", method, target, err)
	}
	defer res.Body.Close()
	answer, err = io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		t.Fatalf("%s %s: %v", method, target, err)
	}
	return res.StatusCode, answer
}

func (s *suite) agent(t *testing.T) {
	sb := s.up(t)
	dial := func(t *testing.T) net.Conn {
		t.Helper()
		c, err := sb.b.DialAgent(ctx(t), sb.h)
		if err != nil {
			t.Fatalf("DialAgent: %s", describe(err))
		}
		t.Cleanup(func() { c.Close() })
		return c
	}

	s.test(t, "its wire, without a token", func(t *testing.T) {
		c := dial(t)
		if status, _ := s.ask(t, c, "GET", "/health", ""); status != http.StatusNoContent {
			t.Errorf("GET /health: %d; want %d", status, http.StatusNoContent)
		}
		status, answer := s.ask(t, c, "POST", "/process.Process/List", "{}")
		if status != http.StatusOK || !json.Valid(answer) {
			t.Errorf("process.Process/List: %d, %q", status, answer)
		}
		if status, answer := s.ask(t, c, "GET", "/files?path="+sb.dir(t)+"/no-such-file", ""); status != http.StatusNotFound {
			t.Errorf("GET /files of nothing: %d, %q", status, answer)
		}
	})

	s.test(t, "several at a time", func(t *testing.T) {
		var wg sync.WaitGroup
		for range 8 {
			c := dial(t)
			wg.Go(func() {
				for range 3 {
					if status, _ := s.ask(t, c, "GET", "/health", ""); status != http.StatusNoContent {
						t.Errorf("GET /health: %d", status)
					}
				}
			})
		}
		wg.Wait()
	})

	s.test(t, "survives the context of the call", func(t *testing.T) {
		own, cancel := context.WithCancel(t.Context())
		c, err := sb.b.DialAgent(own, sb.h)
		if err != nil {
			t.Fatal(describe(err))
		}
		defer c.Close()
		cancel()
		if status, _ := s.ask(t, c, "GET", "/health", ""); status != http.StatusNoContent {
			t.Errorf("GET /health: %d", status)
		}
	})

	s.test(t, "in this sandbox and no other", func(t *testing.T) {
		if !sb.b.Can(sandboxer.CanProcesses) {
			t.Skip("without processes there is nothing to tell agents by")
		}
		other := s.up(t)
		tag := "only-of-" + sb.spec.ID
		sb.startProcess(t, sandboxer.ProcessSpec{Args: []string{"sleep", "1000"}, Tag: tag})
		c, err := other.b.DialAgent(ctx(t), other.h)
		if err != nil {
			t.Fatal(describe(err))
		}
		defer c.Close()
		if status, answer := s.ask(t, dial(t), "POST", "/process.Process/List", "{}"); status != http.StatusOK || !strings.Contains(string(answer), tag) {
			t.Errorf("its own agent does not know the process: %d, %q", status, answer)
		}
		if status, answer := s.ask(t, c, "POST", "/process.Process/List", "{}"); status != http.StatusOK || strings.Contains(string(answer), tag) {
			t.Errorf("another sandbox's agent knows the process: %d, %q", status, answer)
		}
	})

	s.test(t, "unknown sandbox", func(t *testing.T) {
		_, err := sb.b.DialAgent(ctx(t), sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1})
		wantKind(t, err, "DialAgent", sandboxer.NotFound)
	})

	s.test(t, "teardown ends the connection", func(t *testing.T) {
		own := s.up(t)
		c, err := own.b.DialAgent(ctx(t), own.h)
		if err != nil {
			t.Fatal(describe(err))
		}
		defer c.Close()
		s.ask(t, c, "GET", "/health", "")
		if _, err := own.b.Teardown(ctx(t), own.h); err != nil {
			t.Fatal(describe(err))
		}
		c.SetDeadline(time.Now().Add(s.long()))
		_, err = c.Read(make([]byte, 1))
		if ne := net.Error(nil); err == nil || errors.As(err, &ne) && ne.Timeout() {
			t.Errorf("the connection is still open: %v", err)
		}
	})
}

// started is a process that a test started.
type started struct {
	sb  *sandbox
	pid int
}

func (sb *sandbox) startProcess(t *testing.T, p sandboxer.ProcessSpec) started {
	t.Helper()
	pid, err := sb.b.StartProcess(ctx(t), sb.h, p)
	if err != nil {
		t.Fatalf("StartProcess(%q): %s", p.Args, describe(err))
	}
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		_ = sb.b.SignalProcess(c, sb.h, pid, int(syscall.SIGKILL)) // most have ended
	})
	return started{sb, pid}
}

// following is an AttachProcess under way.
type following struct {
	s        *suite
	out, err *buffer
	done     chan struct{}
	x        sandboxer.Exit
	failed   error
	leave    context.CancelFunc
}

func (p started) attach(t *testing.T, s sandboxer.ProcessStreams) *following {
	t.Helper()
	return p.sb.attachBy(t, p.sb.b.AttachProcess, p.pid, s)
}

func (sb *sandbox) attachBy(t *testing.T, attach func(context.Context, sandboxer.Handle, int, sandboxer.ProcessStreams) (sandboxer.Exit, error), pid int, s sandboxer.ProcessStreams) *following {
	t.Helper()
	f := &following{s: sb.s, out: &buffer{}, err: &buffer{}, done: make(chan struct{})}
	if s.Stdout == nil {
		s.Stdout = f.out
	}
	if s.Stderr == nil {
		s.Stderr = f.err
	}
	c, leave := context.WithCancel(ctx(t))
	f.leave = leave
	go func() {
		defer close(f.done)
		f.x, f.failed = attach(c, sb.h, pid, s)
	}()
	t.Cleanup(func() { leave(); <-f.done })
	return f
}

// ended waits for the end of the process.
func (f *following) ended(t *testing.T) sandboxer.Exit {
	t.Helper()
	select {
	case <-f.done:
	case <-time.After(f.s.Patience):
		t.Fatalf("the process does not end; it wrote %q, %q", f.out.String(), f.err.String())
	}
	if f.failed != nil {
		t.Fatalf("AttachProcess: %s", describe(f.failed))
	}
	return f.x
}

func (f *following) says(t *testing.T, text string) {
	t.Helper()
	poll(t, fmt.Sprintf("%q among the output", text), f.s.Patience, func() bool { return strings.Contains(f.out.String(), text) })
}

// An input is what a test types. A writer never waits for the reader.
type input struct {
	more chan string
	rest string
}

func newInput() *input { return &input{more: make(chan string, 100)} }

func (in *input) write(text string) { in.more <- text }
func (in *input) end()              { close(in.more) }

func (in *input) Read(p []byte) (int, error) {
	for in.rest == "" {
		text, ok := <-in.more
		if !ok {
			return 0, io.EOF
		}
		in.rest = text
	}
	n := copy(p, in.rest)
	in.rest = in.rest[n:]
	return n, nil
}

// processes are followed by connections to one agent, which opens a few at a time: concurrent tests would wait for each other.
func (s *suite) processes(t *testing.T) {
	sb := s.up(t)
	list := func(t *testing.T, b interface {
		ListProcesses(context.Context, sandboxer.Handle) ([]sandboxer.Process, error)
	}) []sandboxer.Process {
		t.Helper()
		ps, err := b.ListProcesses(ctx(t), sb.h)
		if err != nil {
			t.Fatalf("ListProcesses: %s", describe(err))
		}
		return ps
	}
	replay := sandboxer.ProcessStreams{Replay: true}

	s.alone(t, "start, and what was missed", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("echo out; echo err >&2; exit 43")})
		f := p.attach(t, replay)
		if x := f.ended(t); x.Code != 43 || f.out.String() != "out\n" || f.err.String() != "err\n" {
			t.Errorf("%+v, %q, %q; want 43, out, err", x, f.out.String(), f.err.String())
		}
		// It has ended a while ago, and is still known.
		f = p.attach(t, replay)
		if x := f.ended(t); x.Code != 43 || f.out.String() != "out\n" {
			t.Errorf("once more: %+v, %q", x, f.out.String())
		}
		f = p.attach(t, sandboxer.ProcessStreams{})
		if x := f.ended(t); x.Code != 43 || f.out.String() != "" {
			t.Errorf("without replay: %+v, %q; want nothing of before", x, f.out.String())
		}
	})

	s.alone(t, "environment, directory, default directory", func(t *testing.T) {
		dir := sb.dir(t)
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script(`echo "$COLOUR:$(pwd -P)"`), Env: map[string]string{"COLOUR": "blue"}, Dir: "/"})
		f := p.attach(t, replay)
		if f.ended(t); f.out.String() != "blue:/\n" {
			t.Errorf("%q", f.out.String())
		}
		f = sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("pwd -P")}).attach(t, replay)
		if f.ended(t); f.out.String() != dir+"\n" {
			t.Errorf("without a directory it runs in %q; want the workspace, %q", f.out.String(), dir)
		}
	})

	s.alone(t, "the sandbox's environment", func(t *testing.T) {
		own := s.up(t, func(sp *sandboxer.Spec) { sp.Env["SHAPE"] = "round" })
		f := own.startProcess(t, sandboxer.ProcessSpec{Args: s.script("echo $SHAPE")}).attach(t, replay)
		if f.ended(t); f.out.String() != "round\n" {
			t.Errorf("%q", f.out.String())
		}
	})

	s.alone(t, "listed by pid and tag until it ends", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: []string{"sleep", "1000"}, Tag: "sleeper", Dir: "/", Env: map[string]string{"K": "v"}})
		find := func() (sandboxer.Process, bool) {
			all := list(t, sb.b)
			i := slices.IndexFunc(all, func(q sandboxer.Process) bool { return q.PID == p.pid })
			if i < 0 {
				return sandboxer.Process{}, false
			}
			return all[i], true
		}
		got, ok := find()
		if !ok {
			t.Fatalf("process %d is not listed: %+v", p.pid, list(t, sb.b))
		}
		if got.Tag != "sleeper" || !slices.Equal(got.Args, []string{"sleep", "1000"}) || got.Dir != "/" || got.Env["K"] != "v" {
			t.Errorf("listed as %+v", got)
		}
		if err := sb.b.SignalProcess(ctx(t), sb.h, p.pid, int(syscall.SIGTERM)); err != nil {
			t.Fatalf("SignalProcess: %s", describe(err))
		}
		if x := p.attach(t, sandboxer.ProcessStreams{}).ended(t); x.Signal != "TERM" || x.Code != 128+15 {
			t.Errorf("ended with %+v; want TERM", x)
		}
		poll(t, "it to leave the list", s.Patience, func() bool { _, ok := find(); return !ok })
	})

	s.alone(t, "input, and its end", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("while read line; do echo got $line; done; echo closed"), Input: true})
		in := newInput()
		f := p.attach(t, sandboxer.ProcessStreams{Stdin: in})
		in.write("one\n")
		f.says(t, "got one\n")
		in.write("two\n")
		f.says(t, "got two\n")
		in.end()
		if x := f.ended(t); x.Code != 0 || !strings.HasSuffix(f.out.String(), "closed\n") {
			t.Errorf("%+v, %q", x, f.out.String())
		}
	})

	s.alone(t, "no input is the end of it", func(t *testing.T) {
		f := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("cat; echo read all")}).attach(t, replay)
		if f.ended(t); f.out.String() != "read all\n" {
			t.Errorf("%q", f.out.String())
		}
	})

	s.alone(t, "who leaves leaves it running", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("echo begun; while read line; do echo got $line; done"), Input: true})
		in := newInput()
		first := p.attach(t, sandboxer.ProcessStreams{Replay: true, Stdin: in})
		first.says(t, "begun")
		in.write("one\n")
		first.says(t, "got one")
		first.leave()
		<-first.done
		wantKind(t, first.failed, "AttachProcess that was left", sandboxer.Canceled)
		in2 := newInput()
		second := p.attach(t, sandboxer.ProcessStreams{Replay: true, Stdin: in2})
		second.says(t, "begun\ngot one\n")
		in2.write("two\n")
		second.says(t, "got two")
		in2.end()
		if x := second.ended(t); x.Code != 0 {
			t.Errorf("%+v", x)
		}
		in.end()
	})

	s.alone(t, "two who follow", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("read go; seq 1 20000"), Input: true})
		in := newInput()
		a, b := p.attach(t, sandboxer.ProcessStreams{Stdin: in, Replay: true}), p.attach(t, replay)
		// A caller that replays misses nothing, however late the second one is.
		in.write("go\n")
		in.end()
		a.ended(t)
		b.ended(t)
		if a.out.String() != b.out.String() || !strings.HasSuffix(a.out.String(), "20000\n") || strings.Count(a.out.String(), "\n") != 20000 {
			t.Errorf("%d and %d bytes; want the same 20,000 lines", len(a.out.String()), len(b.out.String()))
		}
	})

	s.alone(t, "a terminal and its size", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("stty size; read line; stty size; exit 7"), TTY: &sandboxer.WinSize{Cols: 91, Rows: 31}})
		sizes := make(chan sandboxer.WinSize, 1)
		in := newInput()
		f := p.attach(t, sandboxer.ProcessStreams{Replay: true, Stdin: in, Resize: sizes})
		f.says(t, "31 91")
		sizes <- sandboxer.WinSize{Cols: 100, Rows: 40}
		// The size has arrived once a probe says so; typed input takes another way.
		probe := sandboxer.ProcessSpec{Args: s.script(fmt.Sprintf("for i in $(seq 600); do stty size </proc/%d/fd/0 | grep -q '40 100' && exit 0; sleep 0.1; done; exit 1", p.pid))}
		if x := sb.startProcess(t, probe).attach(t, replay).ended(t); x.Code != 0 {
			t.Fatal("the terminal keeps its old size")
		}
		in.write("\n")
		f.says(t, "40 100")
		in.end()
		if x := f.ended(t); x.Code != 7 {
			t.Errorf("%+v", x)
		}
	})

	s.alone(t, "signals of who follows", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.1; done")})
		signals := make(chan os.Signal, 1)
		f := p.attach(t, sandboxer.ProcessStreams{Replay: true, Signals: signals})
		f.says(t, "ready")
		signals <- syscall.SIGUSR1
		if x := f.ended(t); x.Code != 5 || !strings.Contains(f.out.String(), "caught") {
			t.Errorf("%+v, %q", x, f.out.String())
		}
	})

	s.alone(t, "a kill takes what it started along", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("setsid sleep 987 & echo $!; wait")})
		f := p.attach(t, replay)
		f.says(t, "\n")
		child := strings.TrimSpace(f.out.String())
		if err := sb.b.SignalProcess(ctx(t), sb.h, p.pid, int(syscall.SIGKILL)); err != nil {
			t.Fatal(describe(err))
		}
		if x := f.ended(t); x.Signal != "KILL" {
			t.Errorf("%+v", x)
		}
		check := s.script("for i in $(seq 600); do grep -qz sleep /proc/$1/cmdline 2>/dev/null || exit 0; sleep 0.1; done; exit 1", child)
		if x := sb.startProcess(t, sandboxer.ProcessSpec{Args: check}).attach(t, replay).ended(t); x.Code != 0 {
			t.Errorf("what the killed process had started lives on")
		}
	})

	s.alone(t, "found by another broker", func(t *testing.T) {
		p := sb.startProcess(t, sandboxer.ProcessSpec{Args: s.script("echo before; while read line; do echo got $line; done"), Input: true, Tag: "kept"})
		p.attach(t, replay).says(t, "before")
		next := s.open(t)
		h := viaJSON(t, sb.h)
		if !slices.ContainsFunc(list(t, next), func(q sandboxer.Process) bool { return q.PID == p.pid && q.Tag == "kept" }) {
			t.Fatalf("the next broker does not know process %d", p.pid)
		}
		in := newInput()
		other := &sandbox{s: s, b: next, h: h, spec: sb.spec}
		f := other.attachBy(t, next.AttachProcess, p.pid, sandboxer.ProcessStreams{Replay: true, Stdin: in})
		f.says(t, "before\n")
		in.write("after\n")
		f.says(t, "got after")
		in.end()
		if x := f.ended(t); x.Code != 0 {
			t.Errorf("%+v", x)
		}
	})

	s.alone(t, "what cannot be started", func(t *testing.T) {
		start := func(p sandboxer.ProcessSpec) error {
			_, err := sb.b.StartProcess(ctx(t), sb.h, p)
			return err
		}
		wantKind(t, start(sandboxer.ProcessSpec{Args: []string{"no-such-command-anywhere"}}), "a missing command", sandboxer.NotFound)
		wantKind(t, start(sandboxer.ProcessSpec{Args: []string{"/etc/passwd"}}), "a file that is no program", sandboxer.Denied)
		wantKind(t, start(sandboxer.ProcessSpec{Args: []string{"true"}, Dir: "/no/such/dir"}), "a missing directory", sandboxer.Invalid)
		wantKind(t, start(sandboxer.ProcessSpec{Args: []string{"true"}, User: "nobody-of-this-name"}), "an unknown user", sandboxer.Invalid)
		wantKind(t, start(sandboxer.ProcessSpec{}), "nothing", sandboxer.Invalid)
		wantKind(t, start(sandboxer.ProcessSpec{Args: []string{"true"}, Tag: strings.Repeat("x", sandboxer.MaxProcessTag+1)}), "a tag that is too long", sandboxer.Invalid)
	})

	s.alone(t, "a process that is not there", func(t *testing.T) {
		const none = 1<<22 + 1
		_, err := sb.b.AttachProcess(ctx(t), sb.h, none, sandboxer.ProcessStreams{})
		wantKind(t, err, "AttachProcess", sandboxer.NotFound)
		wantKind(t, sb.b.SignalProcess(ctx(t), sb.h, none, 15), "SignalProcess", sandboxer.NotFound)
		wantKind(t, sb.b.SignalProcess(ctx(t), sb.h, none, 65), "signal 65", sandboxer.Invalid)
		wantKind(t, sb.b.SignalProcess(ctx(t), sb.h, 0, 15), "process 0", sandboxer.Invalid)
	})

	s.alone(t, "unknown sandbox", func(t *testing.T) {
		h := sandboxer.Handle{SandboxID: s.spec().ID, Generation: 1}
		_, err := sb.b.StartProcess(ctx(t), h, sandboxer.ProcessSpec{Args: []string{"true"}})
		wantKind(t, err, "StartProcess", sandboxer.NotFound)
		_, err = sb.b.ListProcesses(ctx(t), h)
		wantKind(t, err, "ListProcesses", sandboxer.NotFound)
	})

	s.alone(t, "teardown ends it", func(t *testing.T) {
		own := s.up(t)
		p := own.startProcess(t, sandboxer.ProcessSpec{Args: []string{"sleep", "1000"}})
		f := p.attach(t, sandboxer.ProcessStreams{})
		if _, err := own.b.Teardown(ctx(t), own.h); err != nil {
			t.Fatal(describe(err))
		}
		select {
		case <-f.done:
		case <-time.After(s.Patience):
			t.Fatal("who follows a process of a sandbox that is gone waits on")
		}
		if f.failed == nil && f.x.Code == 0 {
			t.Errorf("it ended well: %+v", f.x)
		}
	})
}
