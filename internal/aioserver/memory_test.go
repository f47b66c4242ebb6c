package aioserver

import (
	"context"
	"io"
	"io/fs"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/sand-boxer/sandboxer"
)

// Commands that run leave room for requests, of their sandbox and of their tenant. What they wrote is given back when they
// have ended.
func TestOutputsLeaveRoom(t *testing.T) {
	const bound = maxHead + maxTail
	synctest.Test(t, func(t *testing.T) {
		a, _ := stubAPI(t, func(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
			io.WriteString(cmd.Stdout, strings.Repeat("x", 2*bound))
			<-ctx.Done()
			return sandboxer.Exit{}, ctx.Err()
		})
		defer a.s.Close()
		const each = maxMemorySandbox / 2 / bound
		running := 0
		for i := range maxMemoryTenant / 2 / bound / each * 2 { // twice what there is room for
			a.sb.ID = "box" + strconv.Itoa(i)
			for range 2 * each {
				a.begin("/v1/bash/exec", commandOf("x"))
				running++
			}
			synctest.Wait()
		}
		a.s.memory.mu.Lock()
		for what, u := range map[string]struct {
			used use
			most int
		}{"all": {a.s.memory.all, maxMemory}, "tenant": {a.s.memory.tenants[""], maxMemoryTenant}, "sandbox": {a.s.memory.sandboxes["box0"], maxMemorySandbox}} {
			if u.used[forOutputs] > u.most/2 {
				t.Errorf("%s: %v", what, u.used)
			}
		}
		if n := a.s.memory.tenants[""][forOutputs]; n < maxMemoryTenant/2-bound {
			t.Errorf("the outputs of %d commands take %d bytes: the test shows nothing", running, n)
		}
		a.s.memory.mu.Unlock()
		a.sb.ID = "box0"
		padding := `","x":"` + strings.Repeat("x", maxJSON-1000)
		refused(t, a.post("/v1/shell/exec", `{"id":"none","command":"x`+padding+`"}`), 404)
		for i := range running {
			a.s.Forget("box" + strconv.Itoa(i))
		}
		synctest.Wait()
		a.s.memory.mu.Lock()
		defer a.s.memory.mu.Unlock()
		if n := a.s.memory.all.sum(); n != 0 || len(a.s.memory.tenants) != 0 || len(a.s.memory.sandboxes) != 0 {
			t.Errorf("%d bytes are still accounted for", n)
		}
	})
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
			{"/v1/shell/exec", `{"command":"x","truncate":false}`, 200},
			{"/v1/file/read", `{"file":"/f"}`, read},
			{"/v1/file/read", `{"file":"/f","start_line":0}`, read},
			{"/v1/file/grep", `{"path":"/f","pattern":".","max_file_size":"8M"}`, 200},
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
	if r := a.bash(commandOf("x")); r.Status != "completed" || !strings.Contains(r.Stdout, "left out") || r.Offset != int64(len(b.text)) {
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
