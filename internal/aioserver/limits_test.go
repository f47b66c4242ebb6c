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
	exec    func(context.Context, sandboxer.Cmd) (sandboxer.Exit, error)
	sleep   time.Duration // until it is awake
	answers string        // to where it is
	alive   atomic.Int32
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
	if s.answers != "" && cmd.Args[len(cmd.Args)-1] == "pwd" {
		io.WriteString(cmd.Stdout, s.answers)
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
			{"/v1/shell/exec", `"no_change_timeout":3,"hard_timeout":2`, "hard_timeout", 2 * time.Second},
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
		done := a.begin("/v1/bash/exec", `{"session_id":"s","command":"x"}`)
		synctest.Wait()
		data[any](t, a.post("/v1/bash/sessions/s/close", ""), 200)
		if r := data[bashResult](t, <-done, 200); r.Status != "killed" || r.Stdout != "" {
			t.Errorf("%+v", r)
		}
	})
}

// A caller whose command the memory limit killed sees that, in addition to its code.
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

// Silence is counted from the last output on.
func TestNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := stubAPI(t, func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
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
		b.answers = "/w\n"
		data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"s","no_change_timeout":3}`), 200)
		start = time.Now()
		if r := a.shell(`{"id":"s","command":"x"}`); r.Status != "no_change_timeout" || time.Since(start) != 8*time.Second {
			t.Errorf("%+v after %s", r, time.Since(start))
		}
	})
}

// begin sends a request and does not wait for its answer.
func (a *api) begin(p, body string) <-chan *httptest.ResponseRecorder {
	done := make(chan *httptest.ResponseRecorder, 1)
	go func() { done <- a.post(p, body) }()
	return done
}

// Unused sessions go; a running command in one keeps it.
func TestIdleSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := stubAPI(t, hangs)
		defer a.s.Close()
		sessions := func(has string) (n int, there bool) {
			a.post("/v1/file/read", "{}") // any request has the old ones go
			a.s.mu.Lock()
			defer a.s.mu.Unlock()
			of := a.s.known[a.sb.ID].sessions[bashKind]
			return len(of), of[has] != nil
		}
		busy := a.begin("/v1/bash/exec", `{"session_id":"busy","command":"x"}`)
		a.bash(`{"session_id":"idle","command":"x","hard_timeout":1}`)
		time.Sleep(sessionIdle + time.Minute)
		if n, there := sessions("busy"); n != 1 || !there {
			t.Errorf("%d sessions, the one that runs among them: %v", n, there)
		}
		// At the bound, a session that was not used for a while makes room.
		for i := range maxSessions - 1 {
			a.bash(fmt.Sprintf(`{"session_id":"s%d","command":"x","hard_timeout":1}`, i))
		}
		if w := a.post("/v1/bash/exec", `{"session_id":"more","command":"x","hard_timeout":1}`); w.Code != 429 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		time.Sleep(sessionRoom)
		a.bash(`{"session_id":"more","command":"x","hard_timeout":1}`)
		for id, want := range map[string]bool{"busy": true, "more": true, "s0": false, "s1": true} {
			if n, there := sessions(id); n != maxSessions || there != want {
				t.Errorf("%d sessions, %s among them: %v", n, id, there)
			}
		}
		// The end of the sandbox, another one of its ID and the end of the server end what runs.
		ended := func(what string, busy <-chan *httptest.ResponseRecorder, status int) {
			t.Helper()
			w := <-busy
			synctest.Wait()
			if w.Code != status || status == 200 && data[bashResult](t, w, 200).Status != "killed" || b.alive.Load() != 0 || a.s.memory.all.sum() != 0 {
				t.Errorf("%s: %d %s, %d alive, %d bytes kept", what, w.Code, w.Body, b.alive.Load(), a.s.memory.all.sum())
			}
		}
		a.s.Forget(a.sb.ID)
		ended("Forget", busy, 200)
		busy = a.begin("/v1/bash/exec", `{"session_id":"busy","command":"x"}`)
		synctest.Wait()
		a.sb.Generation++
		a.bash(`{"command":"x","hard_timeout":1}`)
		ended("the next sandbox", busy, 200)
		busy = a.begin("/v1/bash/exec", `{"session_id":"busy","command":"x"}`)
		synctest.Wait()
		a.s.Close()
		if b.alive.Load() != 0 {
			t.Errorf("%d alive after Close", b.alive.Load())
		}
		ended("Close", busy, 503)
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
	if got, next := o.text(); next != 4_000_000 || got[:maxHead] != all.String()[:maxHead] || got[len(got)-maxTail:] != all.String()[4_000_000-maxTail:] ||
		!strings.Contains(got, fmt.Sprintf("%d bytes were not kept", 4_000_000-maxHead-maxTail)) {
		t.Errorf("%d bytes up to %d", len(got), next)
	}
	if m.all.sum() != maxHead+maxTail {
		t.Errorf("%d bytes are accounted for", m.all.sum())
	}
	o.release()
	io.WriteString(o, "late")
	if got, next := o.text(); m.all.sum() != 0 || len(got) > 100 || next != 4_000_004 {
		t.Errorf("%d bytes after release, %q up to %d", m.all.sum(), got, next)
	}
	m.grow(who, forOutputs, maxMemorySandbox/2-10)
	small := newOutput(m, who, func() {})
	fmt.Fprint(small, "abcdefgh")
	fmt.Fprint(small, "ij0123456789")
	if got, next := small.text(); !strings.HasPrefix(got, "abcdefgh") || next != 20 {
		t.Errorf("%q up to %d", got, next)
	}
	small.release()

	cut := newOutput(m, who, func() {})
	cut.Write([]byte("a\xc3"))
	if got, next := cut.text(); got != "a\uFFFD" || next != 2 {
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
