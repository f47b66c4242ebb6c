package aioserver

import (
	"context"
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// What is kept of commands leaves room for requests and for later commands, of its sandbox and of its tenant.
func TestKeptMakesRoom(t *testing.T) {
	const bound = maxHead + maxTail
	prints := func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		io.CopyN(cmd.Stdout, &repeated{s: "x"}, 2*bound)
		if cmd.Stdin != nil {
			<-ctx.Done()
		}
		return sandboxer.Exit{}, nil
	}
	a, _ := stubAPI(t, prints)
	defer a.s.Close()
	check := func() {
		t.Helper()
		padding := `","x":"` + strings.Repeat("x", maxJSON-1000)
		refused(t, a.post("/v1/bash/output", `{"session_id":"none`+padding+`"}`), 404)
		a.s.memory.mu.Lock()
		defer a.s.memory.mu.Unlock()
		for what, u := range map[string]use{"all": a.s.memory.all, "tenant": a.s.memory.tenants[""], "sandbox": a.s.memory.sandboxes[a.sb.ID]} {
			if most := map[string]int{"all": maxMemory, "tenant": maxMemoryTenant, "sandbox": maxMemorySandbox}[what]; u[forOutputs] > most/2 || u[forTexts] > most/8 {
				t.Errorf("%s: %v", what, u)
			}
		}
	}
	first := ""
	for i := range 20 {
		r := a.bash(`{"command":"x","max_output_length":0}`)
		if len(r.Stdout) < bound {
			t.Fatalf("command %d: %d bytes of its output", i, len(r.Stdout))
		}
		if first == "" {
			first = r.SessionID
		}
		if i == 10 { // the first is gone by now, but its session is not
			out := data[struct{ Stdout string }](t, a.post("/v1/bash/output", `{"session_id":"`+first+`"}`), 200)
			if !strings.Contains(out.Stdout, strconv.Itoa(2*bound)+" bytes were not kept") || len(out.Stdout) > 100 {
				t.Errorf("%d bytes of the oldest output", len(out.Stdout))
			}
		}
	}
	check()
	for i := range 40 {
		a.sb.ID = "more" + strconv.Itoa(i)
		if r := a.bash(`{"command":"x","max_output_length":0}`); len(r.Stdout) < bound {
			t.Fatalf("sandbox %d: %d bytes of the output", i, len(r.Stdout))
		}
	}
	check()
	// What runs makes no room, and still takes none from others.
	a.sb.ID = "busy"
	for range maxImplicit {
		a.bash(`{"command":"x","async_mode":true}`)
	}
	a.s.mu.Lock()
	a.s.known[a.sb.ID].shell = ""
	a.s.mu.Unlock()
	a.bash(commandOf("x"))
	a.s.mu.Lock()
	if shell := a.s.known[a.sb.ID].shell; shell != "bash" {
		t.Errorf("the shell is %q", shell)
	}
	a.s.mu.Unlock()
	check()
}

// The texts of commands are accounted for, and go when others need their room.
func TestKeptTexts(t *testing.T) {
	a, _ := stubAPI(t, func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		if cmd.Env["RUN"] != "" {
			<-ctx.Done()
		}
		return sandboxer.Exit{}, nil
	})
	defer a.s.Close()
	long := strings.Repeat("x", 900<<10)
	in := func(more string) string { return `{"session_id":"s","command":"` + long + `"` + more + `}` }
	first := a.bash(in(""))
	if first.Command != long {
		t.Errorf("%d bytes of the command", len(first.Command))
	}
	for range maxCommands - 1 {
		a.bash(in(""))
	}
	a.s.memory.mu.Lock()
	n := a.s.memory.all[forTexts]
	a.s.memory.mu.Unlock()
	if n < len(long) || n > maxMemorySandbox/8 {
		t.Errorf("%d bytes of texts", n)
	}
	out := data[struct{ Command *bashCommand }](t, a.post("/v1/bash/output", `{"session_id":"s","command_id":"`+first.CommandID+`"}`), 200)
	if n := len(out.Command.Command); n < 1000 || n > 2000 {
		t.Errorf("%d bytes are left of the oldest", n)
	}
	for range maxMemorySandbox / 8 / len(long) {
		a.bash(in(`,"async_mode":true,"env":{"RUN":"1"}`))
	}
	if w := a.post("/v1/bash/exec", in("")); w.Code != 429 || w.Header().Get("Retry-After") == "" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	a.bash(commandOf("x"))
	a.s.Forget(a.sb.ID)
	a.s.Close()
	if n := a.s.memory.all.sum(); n != 0 || a.s.memory.idle.Len() != 0 {
		t.Errorf("%d bytes, %d outputs are left", n, a.s.memory.idle.Len())
	}
}
