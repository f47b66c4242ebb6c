package process_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/process"
	"github.com/sand-boxer/sandboxer/internal/procs"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// evil is an extension that follows, without the package, the command in the ID of the handle that it is asked about:
// "ok" is a proper answer.
func evil() int {
	in := bufio.NewReaderSize(os.Stdin, protocol.MaxLine)
	first, err := in.ReadBytes('\n')
	if err != nil {
		return 0
	}
	var hello struct {
		Hello struct {
			Streams string
			Config  struct {
				Key   string
				Start string
			}
		}
	}
	if err := json.Unmarshal(first, &hello); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if f, err := os.OpenFile("starts", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err == nil {
		fmt.Fprintln(f, os.Getpid())
		f.Close()
	}
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf(format+"\n", args...)
	}
	caps := `"exec","files","probe","dial"`
	start := hello.Hello.Config.Start
	if start == "neighbour" { // what it is like from now on is in a file
		caps = `"probe","list"`
		if now, err := os.ReadFile("now"); err == nil {
			start = string(now)
		}
	}
	switch start {
	case "silent":
		time.Sleep(time.Hour)
	case "huge":
		say(`{"hello":{"protocols":[1],"description":{"title":"%s"}}}`, strings.Repeat("x", 2<<20))
		select {}
	case "nonsense":
		caps = `"world domination"`
	case "escape":
		say(`{"hello":{"protocols":[1],"description":{"isolation_levels":["process"],"pricing_models":["self-hosted"],"capabilities":[],"inputs":[{"name":"a","help":"\u001b]0;x"}]}}}`)
		select {}
	case "version":
		say(`{"hello":{"protocols":[4,5]}}`)
		select {}
	case "die":
		fmt.Fprintln(os.Stderr, "no key for "+hello.Hello.Config.Key)
		return 3
	}
	say(`{"hello":{"protocols":[1],"description":{"isolation_levels":["process"],"pricing_models":["self-hosted"],"capabilities":[%s],"inputs":[],"config_schema":{"title":"<a>"}}}}`, caps)
	if start == "mute" {
		_, _ = io.Copy(io.Discard, in)
		return 0
	}
	token := ""
	for {
		data, err := in.ReadBytes('\n')
		if err != nil {
			return 0
		}
		var l struct {
			ID     int
			Method string
			Stream string
			Params struct {
				Handle sandboxer.Handle
				ID     int
			}
		}
		if err := json.Unmarshal(data, &l); err != nil || l.ID == 0 {
			continue
		}
		sleeper := func(attr *syscall.SysProcAttr) {
			cmd := exec.Command("sleep", "1000")
			cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = os.Stdin, os.Stdout, os.Stderr, attr
			if err := cmd.Start(); err != nil {
				panic(err)
			}
		}
		connect := func(token string) net.Conn {
			c, err := net.Dial("unix", hello.Hello.Streams)
			if err != nil {
				panic(err)
			}
			io.WriteString(c, token+"\n")
			return c
		}
		ok := func() { say(`{"id":%d,"result":{"liveness":"alive"}}`, l.ID) }
		what, arg, _ := strings.Cut(l.Params.Handle.SandboxID, " ")
		switch what {
		case "ok":
			ok()
		case "pid":
			say(`{"id":%d,"error":{"kind":"failed","message":"%d"}}`, l.ID, os.Getpid())
		case "sh":
			cmd := exec.Command("sh", "-c", arg)
			out, _ := cmd.CombinedOutput()
			text, _ := json.Marshal(string(out))
			say(`{"id":%d,"error":{"kind":"failed","message":%s}}`, l.ID, text)
		case "silent":
			os.WriteFile("silent", nil, 0o600)
		case "die":
			fmt.Fprintln(os.Stderr, "the end of "+hello.Hello.Config.Key)
			return 4
		case "secret":
			say(`{"method":"log","params":{"message":"k=%s","attrs":{"a":"%[1]s"}}}`, hello.Hello.Config.Key)
			say(`{"id":%d,"error":{"kind":"failed","message":"k=%s","hint":"%[2]s"}}`, l.ID, hello.Hello.Config.Key)
		case "cut": // every text is so long that it is cut within the secret
			key, dots := hello.Hello.Config.Key, func(n int) string { return strings.Repeat(".", n) }
			fmt.Fprintf(os.Stderr, "line %s%s%s\n", dots(16<<10-5-4), key, dots(32<<10))
			long := "text " + dots(4<<10-9-4) + " k: " + key + dots(4<<10)
			say(`{"method":"log","params":{"message":"%s","attrs":{"a":"%[1]s"}}}`, long)
			say(`{"id":%d,"error":{"kind":"failed","message":"%s","hint":"%[2]s"}}`, l.ID, long)
		case "half":
			fmt.Printf(`{"id":%d,"res`, l.ID)
		case "close": // its standard output only
			os.Stdout.Close()
		case "fork":
			sleeper(nil)
			return 5
		case "setsid": // a helper that says that it is one
			os.Setenv("SANDBOXER_EXTENSION_PROCESS", os.Getenv("SANDBOXER_EXTENSION_MARK"))
			sleeper(&syscall.SysProcAttr{Setsid: true})
			return 5
		case "escape": // it may be a sandbox, and lives on
			cmd := exec.Command("sleep", "30")
			cmd.Env = []string{}
			cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = os.Stdout, os.Stderr, &syscall.SysProcAttr{Setsid: true}
			if err := cmd.Start(); err != nil {
				panic(err)
			}
			os.WriteFile("escaped", []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
			return 5
		case "twice":
			ok()
			ok()
		case "another":
			say(`{"id":%d,"result":{}}`, l.ID+1)
			say(`{"id":%d,"result":{}}`, 1<<40)
			ok()
		case "utf8":
			say("{\"id\":%d,\"result\":{\"liveness\":\"\xff\"}}", l.ID)
		case "number":
			say(`{"id":%d,"result":{"liveness":1e308}}`, l.ID)
		case "keys":
			say(`{"id":%d,"result":{"liveness":"alive","liveness":"dead"}}`, l.ID)
		case "long":
			say(`{"id":%d,"result":{"a":"%s"}}`, l.ID, strings.Repeat("x", 2<<20))
		case "flood":
			ok()
			stop := time.Now().Add(3 * time.Second)
			var wg sync.WaitGroup
			wg.Go(func() {
				for time.Now().Before(stop) {
					fmt.Fprintln(os.Stderr, strings.Repeat("e", 40<<10))
				}
			})
			for i := 1; time.Now().Before(stop); i++ {
				say(`{"method":"log","params":{"message":"flood"}}`)
				say(`{"method":"progress","params":{"id":%d,"step":"flood"}}`, i)
				say(`{"id":%d,"result":{}}`, 1<<40+i)
				say(`{"id":%d,"method":"recorded"}`, i)
			}
			wg.Wait()
		case "stop": // ignores the end of its input, and SIGTERM
			ok()
			syscall.Syscall(syscall.SYS_CLOSE, 0, 0, 0)
			ignore()
			time.Sleep(time.Hour)
		case "none": // no stream
			ok()
		case "keep":
			token = l.Stream
			connect(token)
			ok()
		case "stale":
			connect(strings.Repeat("0", 32))
			connect(token)
			connect(l.Stream).Close()
			connect(l.Stream)
			ok()
		case "crowd":
			for range 64 {
				if _, err := net.Dial("unix", hello.Hello.Streams); err != nil {
					panic(err)
				}
			}
			ok()
		case "result": // on the stream, and no answer
			c := connect(l.Stream)
			c.Write([]byte("\x05\x00\x00\x00\x0a{\"code\":1}"))
		case "streamdie":
			go func() { time.Sleep(200 * time.Millisecond); os.Exit(6) }()
			ok()
		}
	}
}

// ignore has nothing end it but SIGKILL.
func ignore() {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
}

type hostile struct {
	sandboxer.Extension
	dir     string
	program string // besides the test binary
	logs    *logBuffer
}

type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

const canary = "canary-of-the-configuration"

// openEvil opens an evil extension; start is how it says hello.
func openEvil(t *testing.T, start string, p sandboxer.Program) (*hostile, error) {
	t.Helper()
	h := &hostile{dir: t.TempDir(), logs: &logBuffer{}}
	return h, h.open(t, start, p)
}

func (h *hostile) open(t *testing.T, start string, p sandboxer.Program) error {
	p.Command = []string{cmp.Or(h.program, self(t)), "evil"}
	p.Env = append(p.Env[:len(p.Env):len(p.Env)], "GORACE")
	ext, err := process.Adapter.Open(context.WithoutCancel(t.Context()), sandboxer.Env{
		Extension: "ext.evil", Owner: "o", Dir: h.dir, Program: p, Log: slog.New(slog.NewTextHandler(h.logs, nil)),
		Config: func(secrets bool) (json.RawMessage, error) {
			key := "${env:KEY}"
			if secrets {
				key = canary
			}
			return json.Marshal(map[string]string{"key": key, "start": start})
		},
	})
	if err == nil {
		h.Extension = ext
		t.Cleanup(func() { ext.(io.Closer).Close() })
	}
	return err
}

func mustEvil(t *testing.T) *hostile {
	t.Helper()
	h, err := openEvil(t, "", sandboxer.Program{})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *hostile) probe(ctx context.Context, what string) error {
	_, err := h.Extension.(sandboxer.Prober).IsAlive(ctx, sandboxer.Handle{SandboxID: what, Generation: 1})
	return err
}

func (h *hostile) exec(ctx context.Context, what string) error {
	_, err := h.Extension.(sandboxer.Execer).Exec(ctx, sandboxer.Handle{SandboxID: what, Generation: 1}, sandboxer.Cmd{Args: []string{"x"}})
	return err
}

// works wants the extension to answer, after a restart if it must.
func (h *hostile) works(t *testing.T) {
	t.Helper()
	var err error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = h.probe(t.Context(), "ok"); err == nil {
			return
		}
	}
	t.Errorf("it does not work any more: %v", err)
}

// eventually waits until ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited a minute for %s in vain", what)
		}
	}
}

func unavailable(t *testing.T, what string, err error, began time.Time, limit time.Duration) {
	t.Helper()
	if sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("%s: got %v, want unavailable", what, err)
	}
	if d := time.Since(began); d > limit {
		t.Errorf("%s took %v, more than %v", what, d, limit)
	}
}

// left are the processes that are in the extension's directory: it and what it started, but not what escaped.
func (h *hostile) left(t *testing.T) []int {
	t.Helper()
	escaped, _ := os.ReadFile(filepath.Join(h.dir, "escaped"))
	var out []int
	names, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, name := range names {
		dir, err := os.Readlink(name)
		text := filepath.Base(filepath.Dir(name))
		if pid, _ := strconv.Atoi(text); err == nil && dir == h.dir && text != string(escaped) && running(pid) {
			out = append(out, pid)
		}
	}
	return out
}

// Whatever ends its process: calls in flight fail at once, the next ones work, and nothing is left.
func TestDeaths(t *testing.T) {
	for _, what := range []string{"die", "close", "fork", "setsid", "utf8", "keys", "long", "escape"} {
		t.Run(what, func(t *testing.T) {
			h := mustEvil(t)
			waiting := make(chan error, 1)
			h.works(t)
			began := time.Now()
			go func() { waiting <- h.probe(context.Background(), "silent") }()
			eventually(t, "the call in flight", func() bool { _, err := os.Stat(filepath.Join(h.dir, "silent")); return err == nil })
			unavailable(t, what, h.probe(t.Context(), what), began, time.Minute)
			unavailable(t, "a call in flight", <-waiting, began, time.Minute)
			h.works(t)
			h.Extension.(io.Closer).Close()
			if pids := h.left(t); len(pids) > 0 {
				t.Errorf("left over: %v", pids)
			}
			if data, err := os.ReadFile(filepath.Join(h.dir, "escaped")); err == nil {
				pid, _ := strconv.Atoi(string(data))
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Errorf("what is in a session of its own did not live on: %v", err)
				}
			}
			if files, err := os.ReadDir(filepath.Join(h.dir, "streams")); err != nil || len(files) > 0 {
				t.Errorf("sockets are left: %v, %v", files, err)
			}
		})
	}
}

// What is merely odd harms no other call.
func TestOddAnswers(t *testing.T) {
	h := mustEvil(t)
	for _, what := range []string{"twice", "another", "ok", "crowd"} {
		if err := h.probe(t.Context(), what); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := h.probe(t.Context(), "number"); sandboxer.KindOf(err) != sandboxer.Internal {
		t.Errorf("1e308: %v", err)
	}
	starts, _ := os.ReadFile(filepath.Join(h.dir, "starts"))
	if n := strings.Count(string(starts), "\n"); n != 1 {
		t.Errorf("it was started %d times", n)
	}
}

// One that does not answer a cancelled call is replaced; half a line does not help it.
func TestReplaced(t *testing.T) {
	for _, what := range []string{"silent", "half"} {
		h := mustEvil(t)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		began := time.Now()
		if err := h.probe(ctx, what); sandboxer.KindOf(err) != sandboxer.Timeout || time.Since(began) > time.Minute {
			t.Errorf("%s: %v after %v", what, err, time.Since(began))
		}
		h.works(t)
		starts, _ := os.ReadFile(filepath.Join(h.dir, "starts"))
		if n := strings.Count(string(starts), "\n"); n != 2 {
			t.Errorf("%s: it was started %d times, want 2", what, n)
		}
	}
}

// Streams: stale tokens, tokens twice, none, and results without an answer.
func TestOddStreams(t *testing.T) {
	t.Run("stale", func(t *testing.T) {
		h := mustEvil(t)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if err := h.exec(ctx, "keep"); err == nil {
			t.Error("a command without an end has one")
		}
		began := time.Now()
		unavailable(t, "a token that is used twice", h.exec(t.Context(), "stale"), began, time.Minute)
		h.works(t)
	})
	t.Run("none", func(t *testing.T) {
		t.Parallel()
		h := mustEvil(t)
		began := time.Now()
		unavailable(t, "no stream", h.exec(t.Context(), "none"), began, time.Minute)
	})
	t.Run("no answer", func(t *testing.T) {
		t.Parallel()
		h := mustEvil(t)
		began := time.Now()
		unavailable(t, "no answer", h.exec(t.Context(), "result"), began, time.Minute)
		h.works(t)
	})
	t.Run("no end", func(t *testing.T) {
		t.Parallel()
		h := mustEvil(t)
		began := time.Now()
		unavailable(t, "no end of the stream", h.exec(t.Context(), "keep"), began, time.Minute)
	})
	t.Run("dies before it connects", func(t *testing.T) {
		t.Parallel()
		h := mustEvil(t)
		began := time.Now()
		_, err := h.Extension.(sandboxer.Filer).ReadFile(t.Context(), sandboxer.Handle{SandboxID: "streamdie", Generation: 1}, "x")
		unavailable(t, "no stream", err, began, protocol.TokenTime) // in which a stream may come
	})
}

// cutClean reports whether text was cut where the secret begins, and has nothing of it.
func cutClean(text string) bool {
	return strings.Contains(text, "....") && !strings.Contains(text, canary[:3])
}

// Nothing of a configuration's secrets gets out.
func TestSecretsStay(t *testing.T) {
	h := mustEvil(t)
	err := h.probe(t.Context(), "secret")
	if err == nil || strings.Contains(err.Error()+sandboxer.HintOf(err), canary) || !strings.Contains(err.Error(), "[redacted]") {
		t.Errorf("an error: %v, hint %q", err, sandboxer.HintOf(err))
	}
	if err = h.probe(t.Context(), "cut"); err == nil || !cutClean(err.Error()) || !cutClean(sandboxer.HintOf(err)) {
		t.Errorf("an error that is cut: %v, hint %q", err, sandboxer.HintOf(err))
	}
	h.probe(t.Context(), "die")
	h.works(t)
	for _, want := range []string{"line=\"line ", "msg=\"text ", "a=\"text "} {
		if _, text, ok := strings.Cut(h.logs.String(), want); !ok || !cutClean(strings.SplitN(text, "\n", 2)[0]) {
			t.Errorf("the log of %q: %t, %q", want, ok, text)
		}
	}
	if log := h.logs.String(); strings.Contains(log, canary) || !strings.Contains(log, "the end of [redacted]") || !strings.Contains(log, "k=[redacted]") {
		t.Errorf("the log: %s", log)
	}
	_, err = openEvil(t, "die", sandboxer.Program{})
	if err == nil || strings.Contains(err.Error(), canary) || !strings.Contains(err.Error(), "no key for [redacted]") {
		t.Errorf("the last line: %v", err)
	}
	if public := sandboxer.Discreet(err); strings.Contains(sandboxer.Message(public), "no key") {
		t.Errorf("everybody is told %v", public)
	}
}

// Hellos that cannot be.
func TestOddHellos(t *testing.T) {
	for start, want := range map[string]string{
		"nonsense": `there is no capability "world domination"`, "escape": "control characters", "huge": "a line is longer",
		"version": "this side speaks 1, the other 4, 5", "silent": "did not send its hello within",
	} {
		t.Run(start, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			_, err := openEvil(t, start, sandboxer.Program{})
			if err == nil || !strings.Contains(err.Error(), want) || time.Since(began) > 2*time.Minute {
				t.Errorf("%v after %v; want %s", err, time.Since(began), want)
			}
		})
	}
}

// One that ignores everything ends all the same.
func TestStubborn(t *testing.T) {
	h := mustEvil(t)
	if err := h.probe(t.Context(), "stop"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	h.Extension.(io.Closer).Close()
	if d := time.Since(began); d < 900*time.Millisecond || d > time.Minute { // it has a second to end in order
		t.Errorf("Close took %v", d)
	}
	if pids := h.left(t); len(pids) > 0 {
		t.Errorf("left over: %v", pids)
	}
}

// A flood does not fill the log or the memory.
func TestFlood(t *testing.T) {
	h := mustEvil(t)
	if err := h.probe(t.Context(), "flood"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was left out", func() bool { return strings.Contains(h.logs.String(), "lines were dropped") })
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	if m.HeapInuse > 200<<20 {
		t.Errorf("the heap has %d MiB", m.HeapInuse>>20)
	}
	h.works(t)
	if n := strings.Count(h.logs.String(), "\n"); n > 2000 {
		t.Errorf("%d lines are in the log", n)
	}
	for line := range strings.Lines(h.logs.String()) {
		if len(line) > 20<<10 {
			t.Errorf("a line of %d bytes is in the log", len(line))
			break
		}
	}
}

// It is started when it is needed, once, and asked what it is only when it may have changed.
func TestStartedWhenNeeded(t *testing.T) {
	h := mustEvil(t)
	h.Extension.(io.Closer).Close()
	starts := func() int {
		data, _ := os.ReadFile(filepath.Join(h.dir, "starts"))
		return strings.Count(string(data), "\n")
	}
	if n := starts(); n != 1 {
		t.Fatalf("to describe it, it was started %d times", n)
	}
	if err := h.open(t, "", sandboxer.Program{}); err != nil || starts() != 1 {
		t.Fatalf("opened again: %v, %d starts", err, starts())
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := h.probe(t.Context(), "ok"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := starts(); n != 2 {
		t.Errorf("20 calls: %d starts, want 2", n)
	}
	if log := h.logs.String(); strings.Contains(log, "other things") {
		t.Errorf("it is said to have changed: %s", log)
	}
	// The directory may be its own: what it puts in place of the description does not stop the broker.
	h.Extension.(io.Closer).Close()
	name := filepath.Join(h.dir, "description.json")
	os.Remove(name)
	if err := unix.Mkfifo(name, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := h.open(t, "", sandboxer.Program{}); err != nil {
		t.Error(err)
	}
}

// What the process has: a directory, a group, few variables, the rights and limits of the file.
func TestRights(t *testing.T) {
	t.Setenv("SANDBOXER_TOKEN", "x")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "x")
	t.Setenv("WANTED", "yes")
	ask := func(h *hostile, cmd string) string {
		return sandboxer.Message(h.probe(t.Context(), "sh "+cmd))
	}
	h, err := openEvil(t, "", sandboxer.Program{Env: []string{"WANTED"}})
	if err != nil {
		t.Fatal(err)
	}
	env := ask(h, "env; pwd -P")
	if strings.Contains(env, "SANDBOXER_TOKEN") || strings.Contains(env, "AWS_") || !strings.Contains(env, "WANTED=yes") || !strings.Contains(env, h.dir) {
		t.Errorf("environment and directory: %s", env)
	}
	pid, err := strconv.Atoi(sandboxer.Message(h.probe(t.Context(), "pid")))
	if err != nil {
		t.Fatal(err)
	}
	// Its group is led by what ends it if this program is killed, which therefore was there first.
	group, err := syscall.Getpgid(pid)
	if err != nil {
		t.Fatal(err)
	}
	if leader, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", group)); err != nil || !bytes.Contains(leader, []byte("sandboxer-guard")) {
		t.Errorf("its group is led by %q, %v", leader, err)
	}
	if os.Getuid() != 0 {
		_, err := openEvil(t, "", sandboxer.Program{RunAs: "root"})
		if sandboxer.KindOf(err) != sandboxer.Invalid || !strings.Contains(err.Error(), "only root can") {
			t.Errorf("run_as without rights: %v", err)
		}
		return
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("/tmp", "rights")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o711)
	h = &hostile{dir: filepath.Join(dir, "d"), logs: &logBuffer{}}
	h.program = filepath.Join(dir, "program") // which nobody may run
	data, err := os.ReadFile(self(t))
	if err == nil {
		err = os.WriteFile(h.program, data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	os.Mkdir(h.dir, 0o700)
	if err := h.open(t, "", sandboxer.Program{RunAs: "nobody", PIDs: 77, MemoryBytes: 8 << 30}); err != nil {
		t.Fatal(err)
	}
	defer h.Extension.(io.Closer).Close()
	pid, err = strconv.Atoi(sandboxer.Message(h.probe(t.Context(), "pid")))
	if err != nil {
		t.Fatal(err)
	}
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for _, want := range []string{
		"Uid:\t" + strings.Repeat(nobody.Uid+"\t", 3) + nobody.Uid, "Gid:\t" + strings.Repeat(nobody.Gid+"\t", 3) + nobody.Gid, "Groups:\t" + nobody.Gid + " \n",
	} {
		if !strings.Contains(string(status), want) {
			t.Errorf("want %q in %s", want, status)
		}
	}
	if soft, hard, err := procs.Limit(pid, "Max processes"); soft != 77 || hard != 77 || err != nil {
		t.Errorf("limits.pids: %d, %d, %v", soft, hard, err)
	}
	if soft, hard, err := procs.Limit(pid, "Max data size"); soft != 8<<30 || hard != 8<<30 || err != nil {
		t.Errorf("limits.memory: %d, %d, %v", soft, hard, err)
	}
	if err := h.probe(t.Context(), "crowd"); err != nil {
		t.Errorf("the socket for streams: %v", err)
	}
}

// holder is a broker that will be killed: it has an extension run and says its number.
func holder(dir string) int {
	ext, err := process.Adapter.Open(context.Background(), sandboxer.Env{Extension: "ext.evil", Owner: "o", Dir: dir,
		Program: sandboxer.Program{Command: []string{"/proc/self/exe", "evil"}}})
	if err == nil {
		_, err = ext.(sandboxer.Prober).IsAlive(context.Background(), sandboxer.Handle{SandboxID: "pid", Generation: 1})
	}
	fmt.Println(err)
	select {}
}

func TestBrokerKilled(t *testing.T) {
	cmd := exec.Command(self(t), "holder", t.TempDir())
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	pid, aerr := strconv.Atoi(strings.TrimSpace(line))
	if err = errors.Join(err, aerr); err != nil || syscall.Kill(pid, 0) != nil {
		t.Errorf("the broker says %q, %v", line, err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	for end := time.Now().Add(20 * time.Second); pid > 0 && running(pid); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the extension lives on")
		}
	}
}

func running(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(data), ") Z ")
}

// Restarts leave nothing behind. restarts is 1,000 where there is time.
func TestRestarts(t *testing.T) {
	if testing.Short() {
		t.Skip("restarts often")
	}
	h := mustEvil(t)
	process.NoRest(h.Extension)
	h.works(t)
	files := func() int { e, _ := os.ReadDir("/proc/self/fd"); return len(e) }
	settle := func(what string, now func() int, before int) {
		for end := time.Now().Add(20 * time.Second); now() > before+2; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("%d %s, %d before", now(), what, before)
				return
			}
		}
	}
	fds, routines := files(), runtime.NumGoroutine()
	var died atomic.Int64
	for range 1000 {
		if err := h.probe(t.Context(), "die"); sandboxer.KindOf(err) == sandboxer.Unavailable {
			died.Add(1)
		}
	}
	h.works(t)
	starts, _ := os.ReadFile(filepath.Join(h.dir, "starts"))
	if n := strings.Count(string(starts), "\n"); n < 900 {
		t.Errorf("it was started %d times", n)
	}
	settle("descriptors", files, fds)
	settle("goroutines", runtime.NumGoroutine, routines)
	children, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
	for _, c := range strings.Fields(string(children)) {
		pid, _ := strconv.Atoi(c)
		if data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); strings.Contains(string(data), ") Z ") {
			t.Errorf("%d is a zombie", pid)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(h.dir, "streams")); err != nil || len(entries) > 1 {
		t.Errorf("sockets are left: %v, %v", entries, err)
	}
}

// It rests for longer after each death, from 100 ms to half a minute.
func TestRests(t *testing.T) {
	rests := process.Rests(mustEvil(t).Extension, 12)
	for i, rest := range rests {
		if want := min(100*time.Millisecond<<i, 30*time.Second); rest != want {
			t.Errorf("after death %d it rests %v; want %v", i+1, rest, want)
		}
	}
}
