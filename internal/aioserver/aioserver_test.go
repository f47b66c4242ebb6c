package aioserver

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// api is a client of one sandbox, made of the fake: its commands are real, on this machine.
type api struct {
	t      testing.TB
	s      *Server
	sb     Sandbox
	who    context.Context
	broker *edgetest.Broker
	root   string // the workspace, as commands see it
}

// running are sandboxes of a Manager that are not paused.
type running struct{ *manager.Manager }

func (running) Awake(context.Context, string) error { return nil }

func newAPI(t testing.TB, o Options) *api {
	t.Helper()
	b := edgetest.NewBroker(t, edgetest.BrokerOptions{Profiles: []sandboxer.Profile{{ID: "profile.test", Extension: "ext.fake", TTL: time.Hour}}})
	who := sandboxer.WithPrincipal(t.Context(), sandboxer.Principal{Tenant: "acme", Actor: "key:1", Scopes: []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite}})
	sb, err := b.Create(who, sandboxer.CreateRequest{Profile: "profile.test"})
	if err != nil {
		t.Fatal(err)
	}
	o.Sandboxes = running{b.Manager}
	a := &api{t: t, s: New(o), sb: Sandbox{ID: sb.ID, Generation: sb.Generation}, who: who, broker: b}
	t.Cleanup(a.s.Close)
	a.root = strings.TrimSpace(a.shell(`{"command":"pwd -P"}`).Output)
	return a
}

// call sends a request, and returns the status and the answer.
func (a *api) call(ctx context.Context, method, target, contentType string, body io.Reader) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, body).WithContext(ctx)
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	w := httptest.NewRecorder()
	a.s.Serve(w, r, a.sb)
	return w
}

func (a *api) request() *http.Request {
	return httptest.NewRequest("GET", "/", nil).WithContext(a.who)
}

func (a *api) post(p, body string) *httptest.ResponseRecorder {
	return a.call(a.who, "POST", p, "application/json", strings.NewReader(body))
}

// data decodes what an answer holds, which has the wanted status.
func data[T any](t testing.TB, w *httptest.ResponseRecorder, status int) (v T) {
	t.Helper()
	var e struct {
		Success bool    `json:"success"`
		Message *string `json:"message"`
		Data    T       `json:"data"`
	}
	if w.Code != status {
		t.Fatalf("status %d, want %d: %s", w.Code, status, w.Body)
	}
	if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil {
		t.Fatalf("%v: %s", err, w.Body)
	}
	return e.Data
}

func (a *api) shell(body string) shellResult {
	a.t.Helper()
	return data[shellResult](a.t, a.post("/v1/shell/exec", body), 200)
}

func (a *api) bash(body string) bashResult {
	a.t.Helper()
	return data[bashResult](a.t, a.post("/v1/bash/exec", body), 200)
}

// quote writes s as JSON.
func quote(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// command is a request with a command alone.
func commandOf(text string) string { return `{"command":` + quote(text) + `}` }

// refused checks an answer that is an error in an envelope, and returns its message.
func refused(t testing.TB, w *httptest.ResponseRecorder, status int) string {
	t.Helper()
	var e struct {
		Success *bool  `json:"success"`
		Message string `json:"message"`
	}
	if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || w.Code != status || e.Success == nil || *e.Success || e.Message == "" {
		t.Fatalf("status %d (want %d), %v: %s", w.Code, status, err, w.Body)
	}
	return e.Message
}

func TestSandbox(t *testing.T) {
	a := newAPI(t, Options{})
	w := a.call(a.who, "GET", "/v1/sandbox", "", nil)
	var got struct {
		Success bool   `json:"success"`
		HomeDir string `json:"home_dir"`
		Version string `json:"version"`
		Detail  struct {
			System struct {
				OS, Arch, User, Timezone string
				OSVersion                string    `json:"os_version"`
				HomeDir                  string    `json:"home_dir"`
				OccupiedPorts            *[]string `json:"occupied_ports"`
			}
			Runtime struct{ Python, Nodejs *[]toolSpec }
			Utils   []toolCategory
		}
	}
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || w.Code != 200 {
		t.Fatalf("%d %v: %s", w.Code, err, w.Body)
	}
	sys := got.Detail.System
	if !got.Success || got.HomeDir == "" || got.Version == "" || sys.OS != "Linux" || sys.OSVersion == "" || sys.Arch == "" || sys.User == "" || sys.Timezone == "" ||
		sys.OccupiedPorts == nil || got.Detail.Runtime.Python == nil || got.Detail.Runtime.Nodejs == nil || len(got.Detail.Utils) == 0 {
		t.Errorf("not all of it is there: %s", w.Body)
	}
	if _, err := a.broker.Destroy(a.who, a.sb.ID); err != nil {
		t.Fatal(err)
	}
	if w := a.call(a.who, "GET", "/v1/sandbox", "", nil); w.Code == 200 {
		t.Errorf("a sandbox that has ended is ready: %s", w.Body)
	}
}

func TestShellExec(t *testing.T) {
	a := newAPI(t, Options{})
	r := a.shell(`{"command":"echo out; echo err >&2; exit 3","no_change_timeout":600,"some_newer_field":1}`)
	if r.Output != "out\nerr\n" || r.Status != "completed" || r.ExitCode == nil || *r.ExitCode != 3 || r.SessionID == "" || len(r.Console) != 1 {
		t.Errorf("%+v", r)
	}
	for text, want := range map[string]string{
		"exit":                          "",          // which hangs elsewhere
		"cat; read x; echo [$x]":        "[]\n",      // nothing to read
		"echo $#":                       "0\n",       // no trace of what is around it
		"trap 'echo bye' EXIT; echo hi": "hi\nbye\n", // its own
		"echo 'a":                       "",
	} {
		if r := a.shell(commandOf(text)); r.Status != "completed" || want != "" && r.Output != want {
			t.Errorf("%s: %+v", text, r)
		}
	}
	long := a.shell(`{"command":"head -c 100000 /dev/zero | tr '\\0' x; echo end"}`)
	if n := len([]rune(long.Output)); n > shellChars || n < shellChars-200 || !strings.HasSuffix(long.Output, "end\n") {
		t.Errorf("%d characters of a long output: … %q", n, long.Output[max(0, len(long.Output)-30):])
	}
	if whole := a.shell(`{"command":"head -c 100000 /dev/zero | tr '\\0' x","truncate":false}`); len(whole.Output) != 100000 {
		t.Errorf("%d bytes of what was not to be cut", len(whole.Output))
	}
	big := ": " + strings.Repeat("x", 300_000) + "\ncat; echo $#-done"
	if r := a.shell(commandOf(big)); r.Output != "0-done\n" {
		t.Errorf("a long command: %+v", r.Output)
	}
	if msg := refused(t, a.post("/v1/shell/exec", `{"id":"nobody","command":"true"}`), 404); msg != "Session not found" {
		t.Errorf("message %q", msg)
	}
	if r := a.shell(`{"command":"pwd","exec_dir":"/nowhere"}`); strings.TrimSpace(r.Output) != a.root {
		t.Errorf("a directory that is not there: %+v", r)
	}
	refused(t, a.post("/v1/shell/exec", `{"command":"pwd","exec_dir":"/nowhere","strict":true}`), 400)
	if r := a.shell(`{"command":"pwd -P","exec_dir":"/workspace"}`); strings.TrimSpace(r.Output) != a.root {
		t.Errorf("%+v, want %s", r, a.root)
	}
}

// A session has a directory and an environment of its own, which its commands change.
func TestShellSession(t *testing.T) {
	for _, shell := range []string{"bash", "sh"} {
		t.Run(shell, func(t *testing.T) { testShellSession(t, shell) })
	}
}

func testShellSession(t *testing.T, shell string) {
	a := newAPI(t, Options{})
	shell, err := exec.LookPath(shell)
	if err != nil {
		t.Fatal(err)
	}
	a.s.mu.Lock()
	a.s.known[a.sb.ID].shell = shell
	a.s.mu.Unlock()
	created := data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"one"}`), 200)
	if created.SessionID != "one" || created.WorkingDir == "" {
		t.Fatalf("%+v", created)
	}
	in := func(id, text string) string {
		return a.shell(`{"id":` + quote(id) + `,"command":` + quote(text) + `}`).Output
	}
	in("one", "mkdir d; cd d; export A='x y\n\"z\"' B=b")
	if got := in("one", `printf '%s|%s|' "$A" "$B"; pwd -P; unset B; exit 1`); got != "x y\n\"z\"|b|"+path.Join(a.root, "d")+"\n" {
		t.Errorf("the next command: %q", got)
	}
	in("one", `WAS=$PATH; export WAS PATH=/nowhere`) // which has no shell
	if got := in("one", `pwd >/dev/null; export PATH="$WAS"; echo back`); got != "back\n" {
		t.Errorf("with another search path: %q", got)
	}
	if got := in("one", `echo "${B-gone}"`); got != "gone\n" {
		t.Errorf("after unset: %q", got)
	}
	// Made again it is what it was.
	if again := data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"one"}`), 200); path.Base(again.WorkingDir) != "d" {
		t.Errorf("%+v", again)
	}
	data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"two"}`), 200)
	if got := in("two", `echo "${A-none}"; pwd -P`); got != "none\n"+a.root+"\n" {
		t.Errorf("the other session: %q", got)
	}
	// What is exported without end is not kept, and the command is none the worse for it.
	in("two", fmt.Sprintf("export BIG=$(head -c %d /dev/zero | tr '\\0' x) SMALL=1", maxSessionEnv))
	if got := in("two", `echo "${BIG-none}${SMALL-none}"`); got != "nonenone\n" {
		t.Errorf("an environment that is too large: %d bytes", len(got))
	}
	// A directory that has gone ends one command, not the session.
	in("two", "mkdir gone; cd gone; rmdir ../gone")
	refused(t, a.post("/v1/shell/exec", `{"id":"two","command":"pwd"}`), 400)
	if got := in("two", `pwd -P; echo "${B-}"`); got != a.root+"\n\n" {
		t.Errorf("after that: %q", got)
	}
	// Commands at once do not mix.
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if got := in("two", fmt.Sprintf("echo %d; ls >/dev/null; echo %d", i, i)); got != fmt.Sprintf("%d\n%d\n", i, i) {
				t.Errorf("command %d: %q", i, got)
			}
		})
	}
	wg.Wait()
	data[any](t, a.call(a.who, "DELETE", "/v1/shell/sessions/one", "", nil), 200)
	refused(t, a.call(a.who, "DELETE", "/v1/shell/sessions/one", "", nil), 404)
	known := func(id string, status int) {
		t.Helper()
		refused(t, a.post("/v1/shell/exec", `{"command":"true","id":`+quote(id)+`}`), status)
	}
	known("one", 404)
	// Another sandbox of that ID knows nothing of it.
	data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"three"}`), 200)
	a.sb.Generation++
	known("three", 404)
	// Nor does what was let in to the one before know anything of it.
	data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"four"}`), 200)
	a.sb.Generation--
	known("four", 410)
	refused(t, a.post("/v1/bash/exec", `{"command":"true"}`), 410)
}

func TestBoundedSessions(t *testing.T) {
	a := newAPI(t, Options{})
	for i := range maxSessions {
		data[shellCreated](t, a.post("/v1/shell/sessions/create", fmt.Sprintf(`{"id":"s%d"}`, i)), 200)
	}
	refused(t, a.post("/v1/shell/sessions/create", `{"id":"more"}`), 429)
	first := a.shell(commandOf("true")).SessionID // those without a name do not count, and the oldest go
	for range maxImplicit {
		a.shell(commandOf("true"))
	}
	refused(t, a.post("/v1/shell/exec", `{"command":"true","id":"`+first+`"}`), 404)
	a.s.mu.Lock()
	n := len(a.s.known[a.sb.ID].sessions[shellKind])
	a.s.mu.Unlock()
	if n != maxSessions+maxImplicit {
		t.Errorf("%d sessions are kept", n)
	}
	a.s.Forget(a.sb.ID)
	if a.s.memory.all.sum() != 0 || len(a.s.known) != 0 {
		t.Errorf("after Forget: %d bytes, %d sandboxes", a.s.memory.all.sum(), len(a.s.known))
	}
}

func TestBash(t *testing.T) {
	a := newAPI(t, Options{})
	r := a.bash(`{"command":"echo $A; echo err >&2; cd /; export X=1; exit 4","env":{"A":"secret","Z":null},"hard_timeout":600.0}`)
	if r.Stdout != "secret\n" || r.Stderr != "err\n" || r.Status != "completed" || *r.ExitCode != 4 || r.SessionID == "" || r.CommandID == "" || r.Offset != 7 {
		t.Errorf("%+v", r)
	}
	// Neither cd, export nor env is there for the next; exec_dir is. A session that is not known is made.
	if r := a.bash(`{"command":"echo $PATH","env":{"PATH":"/nowhere"}}`); r.Stdout != "/nowhere\n" {
		t.Errorf("with a search path without a shell: %+v", r)
	}
	a.bash(`{"session_id":"mine","command":"mkdir sub; cd /; export X=1","env":{"A":"secret"}}`)
	if r := a.bash(`{"session_id":"mine","command":"echo ${A-no}${X-no}; pwd -P"}`); r.Stdout != "nono\n"+a.root+"\n" {
		t.Errorf("%+v", r)
	}
	a.bash(`{"session_id":"mine","command":"true","exec_dir":"/workspace/sub"}`)
	if r := a.bash(`{"session_id":"mine","command":"pwd -P"}`); r.Stdout != a.root+"/sub\n" {
		t.Errorf("%+v", r)
	}
	r = a.bash(`{"command":"printf 'a%.0s' $(seq 1000); echo end","max_output_length":100}`)
	if n := len([]rune(r.Stdout)); n > 100 || !strings.HasSuffix(r.Stdout, "end\n") || !strings.HasPrefix(r.Stdout, "aaa") {
		t.Errorf("%d characters: %q", n, r.Stdout)
	}
	if r := a.bash(`{"command":"head -c 60000 /dev/zero | tr '\\0' x","max_output_length":0}`); len(r.Stdout) != 60000 {
		t.Errorf("%d bytes of what was not to be cut", len(r.Stdout))
	}
	made := data[bashSession](t, a.post("/v1/bash/sessions/create", `{"session_id":"mine"}`), 200) // it is there
	if made.SessionID != "mine" || made.WorkingDir != "/workspace/sub" || made.CommandCount != 4 || made.Status != "ready" || made.CreatedAt.IsZero() {
		t.Errorf("%+v", made)
	}
	made = data[bashSession](t, a.post("/v1/bash/sessions/create", `{"session_id":"other","exec_dir":"/workspace/sub"}`), 200)
	if r := a.bash(`{"session_id":"other","command":"pwd -P"}`); r.SessionID != "other" || r.Stdout != a.root+"/sub\n" || made.CommandCount != 0 {
		t.Errorf("%+v, %+v", made, r)
	}
	refused(t, a.post("/v1/bash/sessions/create", `{"session_id":"third","exec_dir":"/nowhere"}`), 400)
	data[any](t, a.post("/v1/bash/sessions/other/close", ""), 200)
	refused(t, a.post("/v1/bash/sessions/other/close", ""), 404)
}

// A command ends with its caller, with its session and with its sandbox, and leaves nothing that runs.
func TestCommandsEnd(t *testing.T) {
	a := newAPI(t, Options{})
	// begin has a command run that says so, and returns its answer.
	n := 0
	begin := func(ctx context.Context, p, fields string) <-chan *httptest.ResponseRecorder {
		t.Helper()
		n++
		marker := path.Join(a.root, fmt.Sprint("started", n))
		done := make(chan *httptest.ResponseRecorder, 1)
		go func() {
			done <- a.call(ctx, "POST", p, "", strings.NewReader(`{`+fields+`"command":`+quote("echo part; touch "+marker+"; sleep 1000 & wait")+`}`))
		}()
		edgetest.Poll(t, "the command", func() bool { _, err := os.Stat(marker); return err == nil })
		return done
	}
	ctx, leave := context.WithCancel(a.who)
	defer leave()
	data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"sh"}`), 200)
	done := begin(ctx, "/v1/shell/exec", `"id":"sh",`)
	leave()
	edgetest.Receive(t, done, "the end of the request")
	a.s.mu.Lock()
	if se := a.s.known[a.sb.ID].sessions[shellKind]["sh"]; se == nil || len(se.running) != 0 || se.count != 1 {
		t.Errorf("the session: %+v", se)
	}
	a.s.mu.Unlock()

	done = begin(a.who, "/v1/shell/exec", `"id":"sh",`)
	data[any](t, a.call(a.who, "DELETE", "/v1/shell/sessions/sh", "", nil), 200)
	if r := data[shellResult](t, edgetest.Receive(t, done, "the answer"), 200); r.Status != "terminated" || r.ExitCode != nil || r.Output != "part\n" {
		t.Errorf("%+v", r)
	}
	done = begin(a.who, "/v1/bash/exec", `"session_id":"b",`)
	data[any](t, a.post("/v1/bash/sessions/b/close", ""), 200)
	if r := data[bashResult](t, edgetest.Receive(t, done, "the answer"), 200); r.Status != "killed" || r.ExitCode != nil || r.Stdout != "part\n" {
		t.Errorf("%+v", r)
	}
	// The end of the sandbox is the end of its commands.
	done = begin(a.who, "/v1/bash/exec", "")
	if _, err := a.broker.Destroy(a.who, a.sb.ID); err != nil {
		t.Fatal(err)
	}
	if w := edgetest.Receive(t, done, "the answer"); w.Code == 200 && *data[bashResult](t, w, 200).ExitCode == 0 {
		t.Errorf("a command of a sandbox that was destroyed: %s", w.Body)
	}
	refused(t, a.post("/v1/bash/exec", commandOf("true")), 409)
}

func TestFiles(t *testing.T) {
	a := newAPI(t, Options{})
	read := func(body string) string {
		t.Helper()
		return data[map[string]string](t, a.post("/v1/file/read", body), 200)["content"]
	}
	// Directories are made on the way.
	w := data[map[string]any](t, a.post("/v1/file/write", `{"file":"/workspace/a/b/f.txt","content":"one\ntwo\nthree\n"}`), 200)
	if w["bytes_written"] != 14.0 || w["file"] != "/workspace/a/b/f.txt" {
		t.Errorf("%v", w)
	}
	if got := read(`{"file":"/workspace/a/b/f.txt"}`); got != "one\ntwo\nthree\n" {
		t.Errorf("%q", got)
	}
	if got := read(`{"file":"/workspace/a/b/f.txt","start_line":1,"end_line":2}`); got != "two" {
		t.Errorf("%q", got)
	}
	if got := read(`{"file":"/workspace/a/b/f.txt","start_line":2}`); got != "three" {
		t.Errorf("%q", got)
	}
	binary := append([]byte{0, 255, 254, '\n'}, bytes.Repeat([]byte("0123456789abcdef"), 128<<10)...) // 2 MiB: it waits in a file
	data[any](t, a.post("/v1/file/write", `{"file":"/workspace/bin","content":"`+base64.StdEncoding.EncodeToString(binary)+`","encoding":"base64"}`), 200)
	if len(a.s.spools) != 0 {
		t.Errorf("spools are left: %v", a.s.spools)
	}
	down := a.call(a.who, "GET", "/v1/file/download?path="+url.QueryEscape("/workspace/bin"), "", nil)
	if down.Code != 200 || !bytes.Equal(down.Body.Bytes(), binary) || !strings.Contains(down.Header().Get("Content-Disposition"), "filename=bin") {
		t.Errorf("%d, %d bytes, %v", down.Code, down.Body.Len(), down.Header())
	}
	refused(t, a.post("/v1/file/read", `{"file":"/workspace/bin"}`), 500)
	refused(t, a.post("/v1/file/write", `{"file":"/workspace/bin","content":"no base64!","encoding":"base64"}`), 422)
	file := path.Join(a.root, "log")
	for range 2 {
		data[any](t, a.post("/v1/file/write", `{"file":`+quote(file)+`,"content":"line","append":true,"trailing_newline":true}`), 200)
	}
	if got := read(`{"file":` + quote(file) + `}`); got != "line\nline\n" {
		t.Errorf("%q", got)
	}
	os.Chmod(file, 0o750)
	data[any](t, a.post("/v1/file/write", `{"file":`+quote(file)+`,"content":"new"}`), 200)
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o750 {
		t.Errorf("the mode is not kept: %v %v", fi.Mode(), err)
	}
	if a.s.memory.all.sum() != 0 {
		t.Errorf("%d bytes are still accounted for", a.s.memory.all.sum())
	}
}

func TestFileErrors(t *testing.T) {
	a := newAPI(t, Options{})
	data[any](t, a.post("/v1/file/write", `{"file":"/workspace/d/f","content":""}`), 200)
	for _, c := range []struct {
		p, body   string
		status    int
		errorType string
	}{
		{"/v1/file/read", `{"file":"/workspace/none"}`, 404, "not_found"},
		{"/v1/file/read", `{"file":"/workspace/d"}`, 500, "invalid_target"},
		{"/v1/file/write", `{"file":"/workspace/d","content":"x"}`, 500, "invalid_target"},
		{"/v1/file/list", `{"path":"/workspace/none"}`, 404, "not_found"},
		{"/v1/file/grep", `{"path":"/workspace/none","pattern":"x"}`, 404, "not_found"},
		{"/v1/file/find", `{"path":"/workspace/none","glob":"x"}`, 404, "not_found"},
	} {
		for _, ok := range []bool{false, true} {
			a.s.opts.StatusOK = ok
			want := c.status
			if ok {
				want = 200
			}
			w := a.post(c.p, c.body)
			refused(t, w, want)
			if e := data[fileError](t, w, want); e.ErrorType != c.errorType || e.Path == "" || e.Operation == "" || e.Message == "" {
				t.Errorf("%s %s: %+v", c.p, c.body, e)
			}
		}
		a.s.opts.StatusOK = false
	}
	// What is no error of a file has its status in any case, and so has what is no envelope.
	a.s.opts.StatusOK = true
	refused(t, a.call(a.who, "GET", "/v1/file/download?path=/workspace/none", "", nil), 404)
	exhausted := sandboxer.E(sandboxer.Exhausted, nil, "x")
	exhausted.RetryAfter = time.Second
	for _, x := range []struct {
		err    error
		status int
	}{
		{sandboxer.E(sandboxer.Unavailable, nil, "x"), 503}, {exhausted, 429}, {sandboxer.E(sandboxer.Timeout, nil, "x"), 504}, {sandboxer.E(sandboxer.Conflict, nil, "x"), 409},
		{&statusError{error: sandboxer.E(sandboxer.NotFound, nil, "x"), status: http.StatusGone}, 410}, {sandboxer.E(sandboxer.Exhausted, nil, "x"), 200}, {sandboxer.E(sandboxer.Failed, nil, "x"), 200},
	} {
		w := httptest.NewRecorder()
		(&call{s: a.s, w: w, r: a.request(), operation: "read", path: "/f"}).fail(x.err)
		refused(t, w, x.status)
	}
	a.s.opts.StatusOK = false
	for _, c := range [][2]string{
		{"/v1/file/read", `{"file":"relative"}`}, {"/v1/file/read", `{}`}, {"/v1/file/read", `[`}, {"/v1/file/read", `{"file":1}`},
		{"/v1/file/read", `{"file":"/a","file":"/b"}`}, {"/v1/shell/exec", `{}`}, {"/v1/shell/exec", `{"command":"x","hard_timeout":-1}`},
		{"/v1/bash/exec", `{"command":"x","env":{"A=B":"c"}}`}, {"/v1/bash/exec", `{"command":"x","session_id":"a/b"}`}, {"/v1/bash/exec", ``},
		{"/v1/file/grep", `{"path":"/","pattern":"("}`}, {"/v1/file/write", `{"file":"/x"}`}, {"/v1/file/write", `{"file":"/x","content":"\ud800`},
	} {
		w := a.post(c[0], c[1])
		refused(t, w, 422)
		var d struct{ Detail []refusedField }
		if json.Unmarshal(w.Body.Bytes(), &d); len(d.Detail) != 1 || d.Detail[0].Msg == "" {
			t.Errorf("%v: %s", c, w.Body)
		}
	}
	refused(t, a.post("/v1/file/read", `{"file":"/`+strings.Repeat(" ", maxJSON)+`"}`), 413)
}

func TestTrees(t *testing.T) {
	a := newAPI(t, Options{})
	for name, content := range map[string]string{
		"t/a.py": "import os\nprint('x')\n# TODO one\n", "t/sub/b.py": "# todo two\nend\n", "t/sub/deep/c.txt": "TODO three", "t/.hidden/d.py": "TODO four",
		"t/bin": "\x00TODO", "t/big.log": strings.Repeat("TODO ", 1000),
	} {
		os.MkdirAll(path.Dir(path.Join(a.root, name)), 0o755)
		if err := os.WriteFile(path.Join(a.root, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	os.Symlink("sub", path.Join(a.root, "t/link"))
	os.Symlink("t", path.Join(a.root, "root")) // what is asked for is what paths begin with

	list := func(body string) (paths []string) {
		t.Helper()
		for _, f := range data[struct{ Files []listed }](t, a.post("/v1/file/list", body), 200).Files {
			paths = append(paths, strings.TrimPrefix(f.Path, "/workspace/"))
		}
		return paths
	}
	if got := list(`{"path":"/workspace/root","recursive":true,"show_hidden":false}`); !slices.Equal(got, []string{
		"root/a.py", "root/sub/b.py", "root/big.log", "root/bin", "root/sub/deep/c.txt", "root/sub/deep", "root/link", "root/sub"}) {
		t.Errorf("%v", got)
	}
	if got := list(`{"path":"/workspace/t","show_hidden":true}`); !slices.Equal(got, []string{"t/.hidden", "t/a.py", "t/big.log", "t/bin", "t/link", "t/sub"}) {
		t.Errorf("%v", got)
	}
	find := func(glob string) []string {
		t.Helper()
		return data[struct{ Files []string }](t, a.post("/v1/file/find", `{"path":"/workspace/root","glob":`+quote(glob)+`}`), 200).Files
	}
	all := []string{"/workspace/root/.hidden/d.py", "/workspace/root/a.py", "/workspace/root/sub/b.py"}
	for _, glob := range []string{"*.py", "**/*.py"} {
		if got := find(glob); !slices.Equal(got, all) {
			t.Errorf("%s: %v", glob, got)
		}
	}
	if got := find("sub/*.py"); !slices.Equal(got, all[2:]) {
		t.Errorf("%v", got)
	}
	grep := func(body string) grepResult {
		t.Helper()
		return data[grepResult](t, a.post("/v1/file/grep", body), 200)
	}
	where := func(r grepResult) (at []string) {
		for _, m := range r.Matches {
			at = append(at, fmt.Sprintf("%s:%d:%s", strings.TrimPrefix(m.File, "/workspace/"), m.LineNumber, m.LineContent))
		}
		return at
	}
	r := grep(`{"path":"/workspace/root","pattern":"todo \\w+","case_insensitive":true,"fixed_strings":false,"max_results":100,"max_file_size":"1K","recursive":true}`)
	if got := where(r); !slices.Equal(got, []string{"root/a.py:3:# TODO one", "root/.hidden/d.py:1:TODO four", "root/sub/b.py:1:# todo two", "root/sub/deep/c.txt:1:TODO three"}) || r.Truncated || r.FilesMatched != 4 {
		t.Errorf("%v %+v", got, r)
	}
	if r := grep(`{"path":"/workspace/t","pattern":"TODO","max_results":1}`); len(r.Matches) != 1 || !r.Truncated {
		t.Errorf("%+v", r)
	}
	if r := grep(`{"path":"/workspace/t/sub/b.py","pattern":"# todo","fixed_strings":true}`); len(r.Matches) != 1 || r.Matches[0].File != "/workspace/t/sub/b.py" {
		t.Errorf("a single file: %+v", r)
	}
	if r := grep(`{"path":"/workspace/t","pattern":"TODO","recursive":false}`); len(r.Matches) != 2 || r.FilesSearched != 2 {
		t.Errorf("one directory: %+v", r)
	}
}

func TestUnserved(t *testing.T) {
	a := newAPI(t, Options{})
	for _, u := range unserved {
		for _, p := range []string{u.prefix, u.prefix + "/x"} {
			if msg := refused(t, a.call(a.who, "GET", p, "", nil), 501); !strings.Contains(msg, u.what) {
				t.Errorf("%s: %s", p, msg)
			}
		}
	}
	refused(t, a.call(a.who, "GET", "/v1/nothing", "", nil), 404)
	w := a.call(a.who, "GET", "/v1/shell/exec", "", nil)
	refused(t, w, 405)
	if w.Header().Get("Allow") != "POST" {
		t.Errorf("%v", w.Header())
	}
	for p, r := range routes { // what is not served of a path that is says so, unless it is not asked for
		_, at, _ := strings.Cut(p, " ")
		for _, option := range r.lacks {
			for _, value := range []string{"true", "1", `"x"`, `["x"]`} {
				if msg := refused(t, a.post(at, `{"file":"/f","path":"/","pattern":"x","command":"true",`+quote(option)+`:`+value+`}`), 501); !strings.Contains(msg, option) {
					t.Errorf("%s: %s", p, msg)
				}
			}
			if w := a.post(at, `{"file":"/f","path":"/workspace","pattern":"x","command":"true",`+quote(option)+`:null}`); w.Code == 501 {
				t.Errorf("%s %s: %d %s", p, option, w.Code, w.Body)
			}
		}
	}
	refused(t, a.post("/v1/file/write", `{"file":"/f","content":"","sudo":true}`), 501)
	refused(t, a.call(a.who, "GET", "/v1/file/download?path=/f&change_policy=abort", "", nil), 501)
	for p := range routes { // each one answers, whatever is sent
		method, at, _ := strings.Cut(p, " ")
		if method == "GET" {
			continue // some take their time
		}
		if w := a.call(a.who, method, at, "", strings.NewReader("{}")); w.Code == 404 && !strings.Contains(w.Body.String(), `"success":false`) {
			t.Errorf("%s: %d %s", p, w.Code, w.Body)
		}
	}
}

// Whatever a body is, it is answered as the request it is or refused; nothing breaks.
func TestWholeAnswers(t *testing.T) {
	a := newAPI(t, Options{})
	var failures []error
	a.s.opts.Failed = func(_ context.Context, err error) (string, string) {
		failures = append(failures, err)
		return sandboxer.Message(err), sandboxer.HintOf(err)
	}
	for p := range routes {
		method, at, _ := strings.Cut(p, " ")
		if method == "GET" {
			continue
		}
		for _, body := range []string{"", "null", "[]", `"x"`, "{", `{"path":"/workspace","file":"/workspace/x","id":"x"}`} {
			w := a.call(a.who, method, at, "application/json", strings.NewReader(body))
			var e envelope
			if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || w.Code == 500 && bytes.Contains(w.Body.Bytes(), []byte("internal error")) {
				t.Errorf("%s %q: %d %s", p, body, w.Code, w.Body)
			}
		}
	}
	for _, err := range failures {
		if sandboxer.KindOf(err) == sandboxer.Internal && !errors.As(err, new(badField)) {
			t.Errorf("internal: %v", err)
		}
	}
	var _ http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.s.Serve(w, r, a.sb) })
}
