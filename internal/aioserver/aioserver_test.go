package aioserver

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
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
	in("two", "echo nonenone")
	view := data[shellResult](t, a.post("/v1/shell/view", `{"id":"two"}`), 200)
	if view.Output != "nonenone\n" || view.Status != "completed" {
		t.Errorf("view: %+v", view)
	}
	list := data[struct{ Sessions map[string]shellInfo }](t, a.call(a.who, "GET", "/v1/shell/sessions", "", nil), 200)
	if list.Sessions["one"].Status != "ready" || list.Sessions["two"].CreatedAt.IsZero() {
		t.Errorf("list: %+v", list)
	}
	data[any](t, a.call(a.who, "DELETE", "/v1/shell/sessions/one", "", nil), 200)
	refused(t, a.call(a.who, "DELETE", "/v1/shell/sessions/one", "", nil), 404)
	data[any](t, a.call(a.who, "GET", "/v1/shell/sessions/stats", "", nil), 200)
	data[any](t, a.call(a.who, "DELETE", "/v1/shell/sessions", "", nil), 200)
	refused(t, a.post("/v1/shell/view", `{"id":"two"}`), 404)
	// Another sandbox of that ID knows nothing of it.
	data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"three"}`), 200)
	a.sb.Generation++
	refused(t, a.post("/v1/shell/view", `{"id":"three"}`), 404)
	// Nor does what was let in to the one before know anything of it.
	data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"four"}`), 200)
	a.sb.Generation--
	refused(t, a.post("/v1/shell/view", `{"id":"four"}`), 410)
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
	refused(t, a.post("/v1/shell/view", `{"id":"`+first+`"}`), 404)
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
	sessions := data[[]bashSession](t, a.call(a.who, "GET", "/v1/bash/sessions", "", nil), 200)
	if i := slices.IndexFunc(sessions, func(s bashSession) bool { return s.SessionID == "mine" }); i < 0 || sessions[i].CommandCount != 4 || sessions[i].Status != "ready" {
		t.Errorf("%+v", sessions)
	}
	os.WriteFile(path.Join(a.root, "snap"), []byte("SNAP=loaded\n"), 0o644)
	made := data[bashSession](t, a.post("/v1/bash/sessions/create", `{"session_id":"snap","snapshot_path":`+quote(path.Join(a.root, "snap"))+`}`), 200)
	if made.WorkingDir == "" {
		t.Errorf("%+v", made)
	}
	if r := a.bash(`{"session_id":"snap","command":"echo $SNAP"}`); r.Stdout != "loaded\n" {
		t.Errorf("%+v", r)
	}
	data[any](t, a.post("/v1/bash/sessions/snap/close", ""), 200)
	refused(t, a.post("/v1/bash/output", `{"session_id":"snap"}`), 404)
}

// Commands that nobody waits for are asked after, written to and ended.
func TestAsync(t *testing.T) {
	a := newAPI(t, Options{})
	r := a.bash(`{"session_id":"s","command":"echo ready; read x; echo got $x; exec sleep 1000","async_mode":true}`)
	if r.Status != "running" || r.ExitCode != nil {
		t.Fatalf("%+v", r)
	}
	type output struct {
		Stdout  string
		Offset  int64
		Command *bashCommand
	}
	ask := func(off int64) output {
		t.Helper()
		return data[output](t, a.post("/v1/bash/output", fmt.Sprintf(`{"session_id":"s","command_id":"%s","offset":%d,"wait":true,"wait_timeout":60}`, r.CommandID, off)), 200)
	}
	first := ask(0)
	if first.Stdout != "ready\n" || first.Offset != 6 || first.Command.Status != "running" {
		t.Fatalf("%+v", first)
	}
	data[any](t, a.post("/v1/bash/write", `{"session_id":"s","input":"hello\n"}`), 200)
	if next := ask(first.Offset); next.Stdout != "got hello\n" {
		t.Errorf("%+v", next)
	}
	data[any](t, a.post("/v1/bash/kill", `{"session_id":"s","signal":"SIGTERM"}`), 200)
	if end := ask(16); end.Command.Status != "killed" || end.Command.ExitCode != nil || end.Stdout != "" {
		t.Errorf("%+v %+v", end, end.Command)
	}
	refused(t, a.post("/v1/bash/write", `{"session_id":"s","input":"x"}`), 409)

	data[shellCreated](t, a.post("/v1/shell/sessions/create", `{"id":"sh"}`), 200)
	if r := a.shell(`{"id":"sh","command":"read x; echo got $x; sleep 1000 & wait","async_mode":true}`); r.Status != "running" {
		t.Fatalf("%+v", r)
	}
	data[any](t, a.post("/v1/shell/write", `{"id":"sh","input":"hello","press_enter":true}`), 200)
	edgetest.Poll(t, "the answer", func() bool {
		return data[shellResult](t, a.post("/v1/shell/view", `{"id":"sh"}`), 200).Output == "got hello\n"
	})
	killed := data[map[string]any](t, a.post("/v1/shell/kill", `{"id":"sh"}`), 200)
	waited := data[map[string]any](t, a.post("/v1/shell/wait", `{"id":"sh","seconds":60}`), 200)
	if killed["status"] != "terminated" || waited["status"] != "terminated" {
		t.Errorf("%v %v", killed, waited)
	}
	// A command that somebody waits for has an empty input, and ends with who waits for it.
	ctx, leave := context.WithCancel(a.who)
	done := make(chan *httptest.ResponseRecorder, 1)
	marker := path.Join(a.root, "started")
	go func() {
		done <- a.call(ctx, "POST", "/v1/shell/exec", "", strings.NewReader(`{"id":"sh","command":`+quote("touch "+marker+"; sleep 1000")+`}`))
	}()
	edgetest.Poll(t, "the command", func() bool { _, err := os.Stat(marker); return err == nil })
	refused(t, a.post("/v1/shell/write", `{"id":"sh","input":"x"}`), 409)
	leave()
	edgetest.Receive(t, done, "the end of the request")
	if view := data[shellResult](t, a.post("/v1/shell/view", `{"id":"sh"}`), 200); view.Status != "terminated" {
		t.Errorf("%+v", view)
	}
	// The end of the sandbox is the end of its commands.
	if r := a.bash(`{"session_id":"last","command":"sleep 1000","async_mode":true}`); r.Status != "running" {
		t.Fatalf("%+v", r)
	}
	if _, err := a.broker.Destroy(a.who, a.sb.ID); err != nil {
		t.Fatal(err)
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
	if r := data[map[string]any](t, a.post("/v1/file/replace", `{"file":`+quote(file)+`,"old_str":"line","new_str":"Ä"}`), 200); r["replaced_count"] != 2.0 {
		t.Errorf("%v", r)
	}
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o750 {
		t.Errorf("the mode is not kept: %v %v", fi.Mode(), err)
	}
	found := data[struct {
		Matches     []string
		LineNumbers []int `json:"line_numbers"`
	}](t, a.post("/v1/file/search", `{"file":`+quote(file)+`,"regex":"^Ä$"}`), 200)
	if !slices.Equal(found.LineNumbers, []int{0, 1}) || len(found.Matches) != 2 {
		t.Errorf("%+v", found)
	}

	// Uploads, with the path before the file, after it, and without one.
	for _, c := range []struct{ before, after, want string }{
		{"/workspace/up/one", "", "/workspace/up/one"}, {"", "/workspace/up/two", "/workspace/up/two"}, {"", "", "/tmp/name.txt"},
	} {
		var b bytes.Buffer
		m := multipart.NewWriter(&b)
		if c.before != "" {
			m.WriteField("path", c.before)
		}
		f, _ := m.CreateFormFile("file", "../x/name.txt")
		f.Write(binary)
		if c.after != "" {
			m.WriteField("path", c.after)
		}
		m.Close()
		up := data[map[string]any](t, a.call(a.who, "POST", "/v1/file/upload", m.FormDataContentType(), &b), 200)
		if up["file_path"] != c.want || up["file_size"] != float64(len(binary)) {
			t.Errorf("%v", up)
		}
		if down := a.call(a.who, "GET", "/v1/file/download?path="+c.want, "", nil); !bytes.Equal(down.Body.Bytes(), binary) {
			t.Errorf("%s: %d bytes", c.want, down.Body.Len())
		}
	}
	for fi, err := range a.broker.ListFiles(a.who, a.sb.ID, "/tmp", "") {
		if err != nil || strings.Contains(fi.Path, "sandboxer-upload") {
			t.Errorf("left over: %v %v", fi.Path, err)
		}
	}
	if a.s.memory.all.sum() > 64<<10 {
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
		{"/v1/file/glob", `{"path":"/workspace/none","pattern":"x"}`, 404, "not_found"},
		{"/v1/file/find", `{"path":"/workspace/none","glob":"x"}`, 404, "not_found"},
		{"/v1/file/str_replace_editor", `{"command":"create","path":"/workspace/d/f","file_text":""}`, 409, "already_exists"},
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
		{"/v1/file/upload", `{}`}, {"/v1/code/execute", `{"language":"cobol","code":""}`},
	} {
		w := a.post(c[0], c[1])
		refused(t, w, 422)
		var d struct{ Detail []refusedField }
		if json.Unmarshal(w.Body.Bytes(), &d); len(d.Detail) != 1 || d.Detail[0].Msg == "" {
			t.Errorf("%v: %s", c, w.Body)
		}
	}
	refused(t, a.post("/v1/file/read", `{"file":"/`+strings.Repeat(" ", maxJSON)+`"}`), 413)
	refused(t, a.post("/v1/file/read", `{"file":"/workspace/d/f","sudo":true}`), 501)
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
	if got := list(`{"path":"/workspace/root","recursive":true,"show_hidden":false,"sort_by":"path"}`); !slices.Equal(got, []string{
		"root/a.py", "root/big.log", "root/bin", "root/link", "root/sub", "root/sub/b.py", "root/sub/deep", "root/sub/deep/c.txt"}) {
		t.Errorf("%v", got)
	}
	if got := list(`{"path":"/workspace/t","show_hidden":true,"sort_by":"type"}`); !slices.Equal(got, []string{"t/.hidden", "t/sub", "t/bin", "t/link", "t/big.log", "t/a.py"}) {
		t.Errorf("%v", got)
	}
	if got := list(`{"path":"/workspace/t","recursive":true,"max_depth":2,"show_hidden":false,"file_types":[".py"]}`); !slices.Equal(got, []string{"t/a.py", "t/sub/b.py"}) {
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
	glob := data[struct{ Files []globbed }](t, a.post("/v1/file/glob", `{"path":"/workspace/t","pattern":"**/*.py","exclude":["sub"]}`), 200)
	if len(glob.Files) != 1 || glob.Files[0].Path != "/workspace/t/a.py" || *glob.Files[0].Size != 32 {
		t.Errorf("%+v", glob)
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
	if r := grep(`{"path":"/workspace/t/sub/b.py","pattern":"# todo","fixed_strings":true,"context_after":1}`); len(r.Matches) != 1 || r.Matches[0].File != "/workspace/t/sub/b.py" || !slices.Equal(r.Matches[0].ContextAfter, []string{"end"}) {
		t.Errorf("a single file: %+v", r)
	}
	if r := grep(`{"path":"/workspace/t","pattern":"two.end","multiline":true,"type":"py","include":["b.*"]}`); len(r.Matches) != 1 || r.Matches[0].LineNumber != 1 || r.FilesSearched != 1 {
		t.Errorf("over lines: %+v", r)
	}
}

func TestEditor(t *testing.T) {
	a := newAPI(t, Options{})
	edit := func(status int, body string) editResult {
		t.Helper()
		return data[editResult](t, a.post("/v1/file/str_replace_editor", `{"path":"/workspace/e.txt",`+body+`}`), status)
	}
	content := func() string {
		t.Helper()
		return data[map[string]string](t, a.post("/v1/file/read", `{"file":"/workspace/e.txt"}`), 200)["content"]
	}
	if r := edit(200, `"command":"create","file_text":"a\nb\na\n"`); r.PrevExist || r.Path != "/workspace/e.txt" {
		t.Errorf("%+v", r)
	}
	if r := edit(200, `"command":"view","view_range":[2,-1]`); !strings.Contains(r.Output, "     2\tb\n     3\ta\n") || strings.Contains(r.Output, "\ta\n     2") {
		t.Errorf("%q", r.Output)
	}
	edit(500, `"command":"str_replace","old_str":"a","new_str":"x"`)
	edit(500, `"command":"str_replace","old_str":"nothing","new_str":"x"`)
	edit(200, `"command":"str_replace","old_str":"a","new_str":"x","replace_mode":"LAST"`)
	edit(200, `"command":"insert","insert_line":1,"new_str":"in"`)
	if got := content(); got != "a\nin\nb\nx\n" {
		t.Errorf("%q", got)
	}
	edit(200, `"command":"undo_edit"`)
	edit(200, `"command":"undo_edit"`)
	if got := content(); got != "a\nb\na\n" {
		t.Errorf("%q", got)
	}
	edit(200, `"command":"undo_edit"`)
	refused(t, a.post("/v1/file/read", `{"file":"/workspace/e.txt"}`), 404)
	edit(500, `"command":"undo_edit"`)
	edit(501, `"command":"view","page_range":[1,2]`)
	edit(422, `"command":"fly"`)
	data[any](t, a.post("/v1/file/write", `{"file":"/workspace/d/f","content":"x"}`), 200)
	if r := data[editResult](t, a.post("/v1/file/str_replace_editor", `{"command":"view","path":"/workspace"}`), 200); !strings.Contains(r.Output, "/workspace/d/\n/workspace/d/f\n") {
		t.Errorf("%q", r.Output)
	}
	for i := range 2 * maxEdits { // what is kept is bounded
		edit(200, []string{`"command":"create","file_text":"0"`, ""}[min(i, 1)]+[]string{"", fmt.Sprintf(`"command":"str_replace","old_str":"%d","new_str":"%d"`, i-1, i)}[min(i, 1)])
	}
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	if n := len(a.s.known[a.sb.ID].edits["/workspace/e.txt"]); n != maxEdits {
		t.Errorf("%d edits are kept", n)
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

func TestCode(t *testing.T) {
	a := newAPI(t, Options{})
	if _, err := os.Stat("/usr/bin/python3"); err != nil {
		w := a.post("/v1/code/execute", `{"language":"python","code":"1"}`)
		refused(t, w, 501)
		t.Skip("no python3 here")
	}
	r := data[codeResult](t, a.post("/v1/code/execute", `{"language":"python","code":"import sys\nprint('it\\'s', sys.stdin.read())"}`), 200)
	if r.Status != "ok" || r.Stdout != "it's \n" || *r.ExitCode != 0 {
		t.Errorf("%+v", r)
	}
	if r := data[codeResult](t, a.post("/v1/code/execute", `{"language":"python","code":"1/0"}`), 200); r.Status != "error" || *r.ExitCode != 1 || len(r.Traceback) == 0 {
		t.Errorf("%+v", r)
	}
	refused(t, a.post("/v1/code/execute", `{"language":"python","code":"1","stateful":true}`), 501)
	c := &call{s: a.s, w: httptest.NewRecorder(), r: httptest.NewRequest("GET", "/", nil).WithContext(a.who), sb: a.sb}
	if err := c.packages("pip", `echo '[{"name":"x","version":"1"}]'`, "none"); err != nil || !strings.Contains(c.w.(*httptest.ResponseRecorder).Body.String(), `"data":[{"name":"x"`) {
		t.Errorf("%v", err)
	}
	if err := c.packages("pip", ":", "none"); sandboxer.KindOf(err) != sandboxer.Unsupported {
		t.Errorf("%v", err)
	}
	if err := c.packages("pip", "echo junk", "none"); sandboxer.KindOf(err) != sandboxer.Failed {
		t.Errorf("%v", err)
	}
	info := data[struct{ Languages []map[string]any }](t, a.call(a.who, "GET", "/v1/code/info", "", nil), 200)
	if len(info.Languages) == 0 || info.Languages[0]["language"] != "python" || !strings.HasPrefix(info.Languages[0]["runtime_version"].(string), "3.") {
		t.Errorf("%+v", info)
	}
}

// Whatever a body is, it is answered as the request it is or refused; nothing breaks.
func TestWholeAnswers(t *testing.T) {
	a := newAPI(t, Options{})
	var failures []error
	a.s.opts.Failed = func(_ context.Context, err error) { failures = append(failures, err) }
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
