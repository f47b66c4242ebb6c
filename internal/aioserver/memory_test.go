package aioserver

import (
	"context"
	"io"
	"io/fs"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// What is kept of commands leaves room for requests and for later commands, of its sandbox and of its tenant.
func TestKeptMakesRoom(t *testing.T) {
	const bound = maxHead + maxTail
	piece := strings.Repeat("x", bound)
	prints := func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		io.WriteString(cmd.Stdout, piece)
		io.WriteString(cmd.Stdout, piece)
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
	for i := range 12 {
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
	for i := range 20 {
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
	if shell := a.s.known[a.sb.ID].shell; shell != "/bin/bash" {
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

// texts is a sandbox whose only file has a text, which commands print.
type texts struct {
	stub
	text string
}

func (s *texts) StatFile(_ context.Context, _, name string) (sandboxer.FileInfo, error) {
	return sandboxer.FileInfo{Path: name, Mode: 0o644}, nil
}

func (s *texts) ReadFile(context.Context, string, string) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(s.text)), nil
}

func (s *texts) WriteFile(_ context.Context, _, _ string, _ fs.FileMode, r io.Reader) error {
	_, err := io.Copy(io.Discard, r)
	return err
}

// accounted is an answer, which is accounted for when it is sent.
type accounted struct {
	*httptest.ResponseRecorder
	t *testing.T
	m *memory
}

func (w accounted) Write(p []byte) (int, error) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if n := w.m.all[forRequests]; n < len(p)-smallAnswer {
		w.t.Errorf("an answer of %d bytes, with %d that are accounted for: %.100s", len(p), n, p)
	}
	return w.ResponseRecorder.Write(p)
}

func TestAnswersAreAccountedFor(t *testing.T) {
	b := &texts{}
	b.exec = func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		io.WriteString(cmd.Stdout, b.text)
		return sandboxer.Exit{}, nil
	}
	a := &api{t: t, s: New(Options{Sandboxes: b}), sb: Sandbox{ID: "x"}, who: t.Context()}
	defer a.s.Close()
	post := func(p, body string) *httptest.ResponseRecorder {
		w := accounted{httptest.NewRecorder(), t, a.s.memory}
		a.s.Serve(w, httptest.NewRequest("POST", p, strings.NewReader(body)).WithContext(a.who), a.sb)
		return w.ResponseRecorder
	}
	data[shellCreated](t, post("/v1/shell/sessions/create", `{"id":"s","exec_dir":""}`), 500) // it says nothing of itself
	for _, text := range []string{strings.Repeat("a line, <b>&\n", 8<<20/13), strings.Repeat("\x01", 8<<20)} {
		b.text = text
		read := map[byte]int{'a': 200, '\x01': 413}[text[0]] // of a file whose JSON is six times as long
		for _, c := range []struct {
			p, body string
			status  int
		}{
			{"/v1/bash/exec", `{"session_id":"s","command":"x","max_output_length":0}`, 200},
			{"/v1/bash/output", `{"session_id":"s"}`, 200},
			{"/v1/shell/exec", `{"command":"x","truncate":false}`, 200},
			{"/v1/file/read", `{"file":"/f"}`, read},
			{"/v1/file/read", `{"file":"/f","start_line":0}`, read},
			{"/v1/file/search", `{"file":"/f","regex":"."}`, 200},
			{"/v1/file/str_replace_editor", `{"command":"view","path":"/f"}`, 413}, // with its numbers
			{"/v1/file/str_replace_editor", `{"command":"insert","path":"/f","insert_line":0,"new_str":""}`, read},
		} {
			w := post(c.p, c.body)
			if w.Code != c.status || w.Body.Len() > maxEncoded+smallAnswer {
				t.Errorf("%s %s: %d, %d bytes, %.100s", c.p, c.body, w.Code, w.Body.Len(), w.Body)
			}
			if text[0] == 'a' && w.Code == 200 && !strings.Contains(w.Body.String(), "<b>&") {
				t.Errorf("%s: %.100s", c.p, w.Body)
			}
		}
	}
	b.text = strings.Repeat("x\n", 1<<20)
	for _, body := range []string{`"command":"view"`, `"command":"insert","insert_line":0,"new_str":"y"`, `"command":"str_replace","old_str":"x","new_str":"y","replace_mode":"ALL"`} {
		data[editResult](t, post("/v1/file/str_replace_editor", `{"path":"/f",`+body+`}`), 200)
	}
	// A command that has run is not to be run again because its output finds no room.
	who := account{"", a.sb.ID}
	held := 0
	b.exec = func(_ context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
		io.WriteString(cmd.Stdout, b.text)
		for k := maxMemorySandbox / 8; k > 0; k /= 2 {
			for a.s.memory.grow(who, forRequests, k) {
				held += k
			}
		}
		return sandboxer.Exit{}, nil
	}
	if r := a.bash(commandOf("x")); r.Status != "completed" || !strings.Contains(r.Stdout, "left out") || r.Offset != 0 {
		t.Errorf("%.200v", r)
	}
	a.s.memory.shrink(who, forRequests, held)
	a.s.Forget(a.sb.ID)
	if n := a.s.memory.all.sum(); n != 0 {
		t.Errorf("%d bytes are still accounted for", n)
	}
	for _, s := range []string{"", "a\x00\x7f\n\t\"\\", "<>&ä\u2028\U0001f600", "\b\f\r\x1f"} {
		w := httptest.NewRecorder()
		(&call{s: a.s, w: w}).send(200, s)
		if n := w.Body.Len(); n != encodedSize(s) {
			t.Errorf("%q: %d bytes, not %d", s, n, encodedSize(s))
		}
	}
}
