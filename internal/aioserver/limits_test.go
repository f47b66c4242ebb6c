package aioserver

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// stub is a sandbox whose commands are functions, for tests in which time matters.
type stub struct {
	Sandboxes
	exec  func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error)
	sleep time.Duration // until it is awake
	alive atomic.Int32
}

func (s *stub) Awake(ctx context.Context, _ string) error {
	select {
	case <-time.After(s.sleep):
		return nil
	case <-ctx.Done():
		return sandboxer.E(sandboxer.Canceled, ctx.Err(), "the sandbox was not waited for")
	}
}

func (s *stub) Exec(ctx context.Context, ref string, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	if strings.Contains(cmd.Args[len(cmd.Args)-1], "command -v bash") {
		io.WriteString(cmd.Stdout, "/bin/bash\n")
		return sandboxer.Exit{}, nil
	}
	s.alive.Add(1)
	defer s.alive.Add(-1)
	return s.exec(ctx, cmd)
}

// hangs runs until it is ended, after it has written.
func hangs(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	io.WriteString(cmd.Stdout, "part\n")
	<-ctx.Done()
	return sandboxer.Exit{}, sandboxer.E(sandboxer.Canceled, ctx.Err(), "the command was interrupted")
}

func stubAPI(t *testing.T, exec func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error)) (*api, *stub) {
	b := &stub{exec: exec}
	return &api{t: t, s: New(Options{Sandboxes: b}), sb: Sandbox{ID: "x", Generation: 1}, who: t.Context()}, b
}

// Limits hold to the moment, end the command, and what it wrote before is there.
func TestLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := stubAPI(t, hangs)
		defer a.s.Close()
		for _, c := range []struct {
			p, limits, status string
			after             time.Duration
		}{
			{"/v1/shell/exec", `"hard_timeout":2.5`, "hard_timeout", 2500 * time.Millisecond},
			{"/v1/shell/exec", `"no_change_timeout":600`, "no_change_timeout", 600 * time.Second},
			{"/v1/shell/exec", `"no_change_timeout":3,"hard_timeout":2,"timeout":10`, "hard_timeout", 2 * time.Second},
			{"/v1/bash/exec", `"hard_timeout":600.0`, "timed_out", 600 * time.Second},
		} {
			start := time.Now()
			r := data[struct {
				Status, Output, Stdout string
				ExitCode               *int `json:"exit_code"`
			}](t, a.post(c.p, `{"command":"x",`+c.limits+`}`), 200)
			if r.Status != c.status || r.Output+r.Stdout != "part\n" || r.ExitCode != nil || time.Since(start) != c.after || b.alive.Load() != 0 {
				t.Errorf("%+v: %+v after %s, %d alive", c, r, time.Since(start), b.alive.Load())
			}
		}
		// Who waits for less is told that it runs, and it does, with its other limits.
		start := time.Now()
		r := a.bash(`{"session_id":"s","command":"x","timeout":1,"hard_timeout":60}`)
		if r.Status != "running" || r.Stdout != "part\n" || time.Since(start) != time.Second || b.alive.Load() != 1 {
			t.Errorf("%+v after %s", r, time.Since(start))
		}
		out := data[struct{ Command *bashCommand }](t, a.post("/v1/bash/output", `{"session_id":"s","offset":5,"wait":true,"wait_timeout":100}`), 200)
		if out.Command.Status != "timed_out" || time.Since(start) != time.Minute {
			t.Errorf("%+v after %s", out.Command, time.Since(start))
		}
		// What ignores a signal is ended all the same.
		a.bash(`{"session_id":"s","command":"x","async_mode":true}`)
		start = time.Now()
		data[any](t, a.post("/v1/bash/kill", `{"session_id":"s","signal":"SIGINT"}`), 200)
		if time.Since(start) != killGrace || b.alive.Load() != 0 {
			t.Errorf("after %s, %d alive", time.Since(start), b.alive.Load())
		}
	})
}

// Limits begin when the sandbox is awake. A command that waits for that can be ended.
func TestLimitsBeginAwake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := stubAPI(t, func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
			time.Sleep(time.Second)
			io.WriteString(cmd.Stdout, "ran")
			return sandboxer.Exit{}, nil
		})
		defer a.s.Close()
		b.sleep = 3 * time.Second
		if r := a.bash(`{"command":"x","hard_timeout":2}`); r.Status != "completed" || r.Stdout != "ran" {
			t.Errorf("%+v", r)
		}
		if r := a.shell(`{"command":"x","no_change_timeout":2}`); r.Status != "completed" || r.Output != "ran" {
			t.Errorf("%+v", r)
		}
		b.sleep = time.Hour
		a.bash(`{"session_id":"s","command":"x","async_mode":true}`)
		data[any](t, a.post("/v1/bash/kill", `{"session_id":"s","signal":"SIGKILL"}`), 200)
		if out := data[struct{ Command *bashCommand }](t, a.post("/v1/bash/output", `{"session_id":"s"}`), 200); out.Command.Status != "killed" {
			t.Errorf("%+v", out.Command)
		}
	})
}

// Who asked for a command that the memory limit killed is told so, besides its code.
func TestKilledForMemory(t *testing.T) {
	a, _ := stubAPI(t, func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		io.WriteString(cmd.Stdout, "part\n")
		return sandboxer.Exit{Code: 137, Signal: "KILL", OOMKilled: true}, nil
	})
	defer a.s.Close()
	const said = "sandboxer: killed for its use of memory: the sandbox has a limit\n"
	if r := a.bash(`{"command":"x"}`); r.Stdout != "part\n" || r.Stderr != said || *r.ExitCode != 137 {
		t.Errorf("bash: %+v", r)
	}
	if r := a.shell(`{"command":"x"}`); r.Output != "part\n"+said || *r.ExitCode != 137 {
		t.Errorf("shell: %+v", r)
	}
}

// Of two limits of one wait the shorter counts.
func TestShellWaitLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _ := stubAPI(t, hangs)
		defer a.s.Close()
		id := a.shell(`{"command":"x","async_mode":true}`).SessionID
		for range 8 {
			for limits, want := range map[string]time.Duration{
				`"seconds":3,"max_wait_seconds":5`: 3 * time.Second, `"seconds":5,"max_wait_seconds":3`: 3 * time.Second, `"seconds":4`: 4 * time.Second, `"max_wait_seconds":4`: 4 * time.Second, `"seconds":0`: 0,
			} {
				start := time.Now()
				if r := data[map[string]string](t, a.post("/v1/shell/wait", `{"id":"`+id+`",`+limits+`}`), 200); r["status"] != "running" || time.Since(start) != want {
					t.Errorf("%s: %v after %s", limits, r, time.Since(start))
				}
			}
		}
	})
}

// Input waits for a command that does not read, up to a bound; who has written it need not be there any more.
func TestInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		read := make(chan struct{})
		a, _ := stubAPI(t, func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
			<-read
			b := make([]byte, maxInput+4)
			n, err := io.ReadFull(cmd.Stdin, b)
			fmt.Fprint(cmd.Stdout, n, err, string(b[max(n-4, 0):n]))
			n, err = cmd.Stdin.Read(b)
			fmt.Fprint(cmd.Stdout, n, err)
			return sandboxer.Exit{}, nil
		})
		defer a.s.Close()
		a.bash(`{"session_id":"s","command":"x","async_mode":true}`)
		write := func(ctx context.Context, text string) *httptest.ResponseRecorder {
			return a.call(ctx, "POST", "/v1/bash/write", "", strings.NewReader(`{"session_id":"s","input":"`+text+`"}`))
		}
		left, leave := context.WithCancel(a.who)
		leave()
		data[any](t, write(left, strings.Repeat("x", maxInput)), 200)
		if w := write(a.who, "last"); w.Code != 429 || w.Header().Get("Retry-After") == "" {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		refused(t, write(a.who, strings.Repeat("x", maxInput+1)), 422)
		close(read)
		synctest.Wait()
		data[any](t, write(a.who, "last"), 200)
		synctest.Wait()
		data[any](t, a.post("/v1/bash/kill", `{"session_id":"s","signal":"SIGKILL"}`), 200)
		out := data[struct{ Stdout string }](t, a.post("/v1/bash/output", `{"session_id":"s"}`), 200)
		if want := fmt.Sprint(maxInput+4, nil, "last") + fmt.Sprint(0, io.EOF); out.Stdout != want {
			t.Errorf("%q, want %q", out.Stdout, want)
		}
		refused(t, write(a.who, "x"), 409)
		a.bash(`{"session_id":"t","command":"x","async_mode":true}`)
		a.s.Forget(a.sb.ID)
		synctest.Wait()
		if n := a.s.memory.all.sum(); n != 0 {
			t.Errorf("%d bytes are still accounted for", n)
		}
	})
}

// Silence is counted from the last output on.
func TestNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, _ := stubAPI(t, func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
			for i := range 5 {
				time.Sleep(time.Second)
				fmt.Fprint(cmd.Stdout, i)
			}
			return hangs(ctx, cmd)
		})
		defer a.s.Close()
		start := time.Now()
		r := a.shell(`{"command":"x","no_change_timeout":2}`)
		if r.Status != "no_change_timeout" || r.Output != "01234part\n" || time.Since(start) != 7*time.Second {
			t.Errorf("%+v after %s", r, time.Since(start))
		}
		// A session's own limit holds for commands that have none.
		c := &call{s: a.s, r: httptest.NewRequest("GET", "/", nil), sb: a.sb}
		if _, _, err := c.openSession(shellKind, "id", "s", func(se *session) { se.noChange = 3 * time.Second }); err != nil {
			t.Fatal(err)
		}
		start = time.Now()
		if r := a.shell(`{"id":"s","command":"x"}`); r.Status != "no_change_timeout" || time.Since(start) != 8*time.Second {
			t.Errorf("%+v after %s", r, time.Since(start))
		}
	})
}

// Sessions that nobody uses go; what runs in one keeps it.
func TestIdleSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := stubAPI(t, hangs)
		defer a.s.Close()
		a.bash(`{"session_id":"busy","command":"x","async_mode":true}`)
		a.bash(`{"session_id":"idle","command":"x","hard_timeout":1}`)
		synctest.Wait()
		time.Sleep(sessionIdle + time.Minute)
		sessions := data[[]bashSession](t, a.call(a.who, "GET", "/v1/bash/sessions", "", nil), 200)
		if len(sessions) != 1 || sessions[0].SessionID != "busy" || *sessions[0].CurrentCommand != "x" {
			t.Errorf("%+v", sessions)
		}
		// Where there are as many as there may be, one that was not used for a while makes room.
		for i := range maxSessions - 1 {
			a.bash(fmt.Sprintf(`{"session_id":"s%d","command":"x","hard_timeout":1}`, i))
		}
		if w := a.post("/v1/bash/exec", `{"session_id":"more","command":"x","hard_timeout":1}`); w.Code != 429 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		time.Sleep(sessionRoom)
		a.bash(`{"session_id":"more","command":"x","hard_timeout":1}`)
		sessions = data[[]bashSession](t, a.call(a.who, "GET", "/v1/bash/sessions", "", nil), 200)
		has := func(id string) bool {
			return slices.ContainsFunc(sessions, func(s bashSession) bool { return s.SessionID == id })
		}
		if len(sessions) != maxSessions || !has("busy") || !has("more") || has("s0") || !has("s1") {
			t.Errorf("%+v", sessions)
		}
		a.s.Forget(a.sb.ID)
		synctest.Wait()
		if b.alive.Load() != 0 || a.s.memory.all.sum() != 0 {
			t.Errorf("%d alive, %d bytes kept", b.alive.Load(), a.s.memory.all.sum())
		}
		a.bash(`{"session_id":"busy","command":"x","async_mode":true}`)
		a.s.Close()
		if b.alive.Load() != 0 {
			t.Errorf("%d alive after Close", b.alive.Load())
		}
		refused(t, a.post("/v1/bash/exec", commandOf("x")), 503)
	})
}

// The beginning and the end of an output are kept, within what the sandbox may have in memory.
func TestOutput(t *testing.T) {
	m := newMemory()
	who := account{"t", "s"}
	o := newOutput(m, who, func() {})
	var all strings.Builder
	for i := range 400 {
		io.WriteString(io.MultiWriter(o, &all), strings.Repeat(fmt.Sprintf("%09d\n", i), 1000))
	}
	if got, next := o.since(0, false); next != 4_000_000 || got[:maxHead] != all.String()[:maxHead] || got[len(got)-maxTail:] != all.String()[4_000_000-maxTail:] ||
		!strings.Contains(got, fmt.Sprintf("%d bytes were not kept", 4_000_000-maxHead-maxTail)) {
		t.Errorf("%d bytes up to %d", len(got), next)
	}
	if got, _ := o.since(3_999_990, false); got != "000000399\n" {
		t.Errorf("%q", got)
	}
	if got, _ := o.since(1<<60, false); got != "" {
		t.Errorf("%q", got)
	}
	if m.all.sum() != maxHead+maxTail {
		t.Errorf("%d bytes are accounted for", m.all.sum())
	}
	o.release()
	if m.all.sum() != 0 {
		t.Errorf("%d bytes after release", m.all.sum())
	}
	m.grow(who, forOutputs, maxMemorySandbox/2-10)
	small := newOutput(m, who, func() {})
	fmt.Fprint(small, "abcdefgh")
	fmt.Fprint(small, "ij0123456789")
	if got, next := small.since(0, false); !strings.HasPrefix(got, "abcdefgh") || next != 20 {
		t.Errorf("%q up to %d", got, next)
	}
	small.release()

	cut := newOutput(m, who, func() {})
	cut.Write([]byte("a\xc3"))
	if got, next := cut.since(0, true); got != "a" || next != 1 {
		t.Errorf("%q up to %d", got, next)
	}
	cut.Write([]byte("\xa4"))
	if got, next := cut.since(1, true); got != "ä" || next != 3 {
		t.Errorf("%q up to %d", got, next)
	}
	if got := shorten(strings.Repeat("ä", 1000), 100); len([]rune(got)) > 100 || len([]rune(got)) < 95 || !strings.HasPrefix(got, "ä") || !strings.HasSuffix(got, "ä") {
		t.Errorf("%q", got)
	}
	if got := shorten("abcdef", 3); got != "abc" {
		t.Errorf("%q", got)
	}
}

// Every shell says where it was left and what it exports, in its own way of writing.
func TestShellState(t *testing.T) {
	for _, shell := range [][]string{{"bash"}, {"bash", "--posix"}, {"dash"}, {"busybox", "sh"}} {
		if _, err := exec.LookPath(shell[0]); err != nil {
			continue
		}
		args := shellArgs(shell[0], "export A='x'\\''y\n' B=\"q\\\"\\$\"; cd /tmp; echo $HOME; exit 3", script{reports: true, unset: []string{"HOME"}})
		cmd := exec.Command(shell[0], append(slices.Clone(shell[1:]), args[1:]...)...)
		cmd.Env = []string{"HOME=/", "PATH=" + os.Getenv("PATH"), "KEPT=1"}
		var out strings.Builder
		r := &stateReader{memory: newMemory()}
		cmd.Stdout, cmd.Stderr = &out, r
		cmd.Run()
		st, said := r.end()
		if cmd.ProcessState.ExitCode() != 3 || out.String() != "\n" || len(said) > 0 || !st.ok || st.dir != "/tmp" || len(st.unset) > 0 || !maps.Equal(st.set, map[string]string{"A": "x'y\n", "B": `q"$`}) {
			t.Errorf("%s: %v, %q, %+v, %q", shell, cmd.ProcessState, out.String(), st, said)
		}
		if r.memory.all.sum() != 0 {
			t.Errorf("%d bytes are still accounted for", r.memory.all.sum())
		}
	}
}
