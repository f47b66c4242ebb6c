package agent

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// These tests speak the wire by hand, as clients of the E2B data plane do.

// raw sends one request with the token; a nil header entry removes a header.
func (r *running) raw(method, path string, header map[string]string, body io.Reader) *http.Response {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, "http://sandbox"+path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set(tokenHeader, testToken)
	for k, v := range header {
		if v == "" {
			req.Header.Del(k)
		} else {
			req.Header.Set(k, v)
		}
	}
	res, err := r.http.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { res.Body.Close() })
	return res
}

func (r *running) rawBody(method, path string, header map[string]string, body string) (int, string) {
	r.t.Helper()
	res := r.raw(method, path, header, strings.NewReader(body))
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// unary calls an RPC in JSON.
func (r *running) unary(method, body string, header ...string) (int, map[string]any) {
	r.t.Helper()
	h := map[string]string{"Content-Type": "application/json", "Connect-Protocol-Version": "1"}
	for i := 0; i+1 < len(header); i += 2 {
		h[header[i]] = header[i+1]
	}
	status, text := r.rawBody("POST", "/"+method, h, body)
	var v map[string]any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		r.t.Fatalf("%s answered %d %q: %v", method, status, text, err)
	}
	return status, v
}

// A frame is one envelope of a stream.
type frame struct {
	end  bool
	text string
}

func readFrame(r io.Reader) (frame, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return frame{}, err
	}
	b := make([]byte, binary.BigEndian.Uint32(head[1:]))
	_, err := io.ReadFull(r, b)
	return frame{head[0] == 2, string(b)}, err
}

// stream opens a server stream in JSON.
func (r *running) stream(method, body string, header ...string) *http.Response {
	r.t.Helper()
	h := map[string]string{"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
	for i := 0; i+1 < len(header); i += 2 {
		h[header[i]] = header[i+1]
	}
	env := append([]byte{0, 0, 0, 0, 0}, body...)
	binary.BigEndian.PutUint32(env[1:], uint32(len(body)))
	return r.raw("POST", "/"+method, h, bytes.NewReader(env))
}

// streamAll reads a stream to its end and returns the texts, the last one being that
// of the end. It normalises JSON: its encoder varies the spaces.
func (r *running) streamAll(method, body string, header ...string) []string {
	r.t.Helper()
	res := r.stream(method, body, header...)
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "application/connect+json" {
		b, _ := io.ReadAll(res.Body)
		r.t.Fatalf("%s answered %s, %s: %s", method, res.Status, res.Header.Get("Content-Type"), b)
	}
	var texts []string
	for {
		f, err := readFrame(res.Body)
		if err != nil {
			r.t.Fatalf("%s: the stream broke after %q: %v", method, texts, err)
		}
		texts = append(texts, canonical(r.t, f.text))
		if f.end {
			if _, err := res.Body.Read(make([]byte, 1)); err != io.EOF {
				r.t.Errorf("%s: more after the end of the stream", method)
			}
			return texts
		}
	}
}

func canonical(t testing.TB, text string) string {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	b, _ := json.Marshal(v)
	return string(b)
}

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

func TestWireStart(t *testing.T) {
	a := startAgent(t)
	got := a.streamAll("process.Process/Start", `{"process":{"cmd":"/bin/sh","args":["-c","echo err >&2; sleep 1; echo hi; exit 3"],"envs":{"X":"1"},"cwd":"/tmp"},"stdin":false,"future":{"unknown":1}}`,
		"Keepalive-Ping-Interval", "50", "Connect-Timeout-Ms", "60000")
	var pid int
	if n, _ := fmt.Sscanf(got[0], `{"event":{"start":{"pid":%d}}}`, &pid); n != 1 || pid < 2 {
		t.Errorf("first event %s", got[0])
	}
	want := []string{
		`{"event":{"data":{"stderr":"ZXJyCg=="}}}`, `{"event":{"data":{"stdout":"aGkK"}}}`,
		`{"event":{"end":{"error":"exit status 3","exitCode":3,"exited":true,"status":"exit status 3"}}}`, `{}`,
	}
	if !reflect.DeepEqual(got[1:], want) {
		t.Errorf("events %q\nwant %q", got[1:], want)
	}
	for _, tt := range []struct{ name, script, end string }{
		{"no exit code when it is 0", "true", `{"event":{"end":{"exited":true,"status":"exit status 0"}}}`},
		{"killed", "kill -KILL $$", `{"event":{"end":{"error":"signal: killed","exitCode":-1,"status":"signal: killed"}}}`},
	} {
		got := a.streamAll("process.Process/Start", `{"process":{"cmd":"/bin/sh","args":["-c","`+tt.script+`"]}}`)
		if got[len(got)-2] != tt.end || got[len(got)-1] != "{}" {
			t.Errorf("%s: %q", tt.name, got)
		}
	}
	t.Run("deadline kills", func(t *testing.T) {
		began := time.Now()
		mark := filepath.Join(a.dir, "pid")
		got := a.streamAll("process.Process/Start", `{"process":{"cmd":"/bin/sh","args":["-c","echo $$ > `+mark+`; sleep 1000; true"]}}`, "Connect-Timeout-Ms", "3000")
		if !strings.Contains(got[len(got)-1], `"deadline_exceeded"`) || time.Since(began) > 10*time.Second {
			t.Errorf("%q", got)
		}
		pid := readPID(t, mark)
		eventually(t, "the process outlives its deadline", func() bool { return !alive(pid) })
	})
	t.Run("keepalive", func(t *testing.T) {
		got := a.streamAll("process.Process/Start", `{"process":{"cmd":"sleep","args":["1.2"]}}`, "Keepalive-Ping-Interval", "1")
		// One, or more if the process was slow to start or end.
		if len(got) < 4 || slices.ContainsFunc(got[1:len(got)-2], func(s string) bool { return s != `{"event":{"keepalive":{}}}` }) {
			t.Errorf("%q", got)
		}
	})
	t.Run("disconnect does not kill", func(t *testing.T) {
		res := a.stream("process.Process/Start", `{"process":{"cmd":"sh","args":["-c","read x; echo $x"]},"tag":"t1"}`)
		f, err := readFrame(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		var pid int
		_, _ = fmt.Sscanf(canonical(t, f.text), `{"event":{"start":{"pid":%d}}}`, &pid)
		res.Body.Close()
		sel := fmt.Sprintf(`{"process":{"pid":%d}`, pid)
		status, list := a.unary("process.Process/List", "{}")
		if want := fmt.Sprintf(`[{"config":{"args":["-c","read x; echo $x"],"cmd":"sh"},"pid":%d,"tag":"t1"}]`, pid); status != 200 || jsonText(list["processes"]) != want {
			t.Errorf("List: %d %s", status, jsonText(list))
		}
		again := a.stream("process.Process/Connect", `{"process":{"tag":"t1"}}`)
		if f, err = readFrame(again.Body); err != nil || !strings.Contains(f.text, "start") {
			t.Fatal(f, err)
		}
		if status, v := a.unary("process.Process/SendInput", sel+`,"input":{"stdin":"`+b64("abc\n")+`"}}`); status != 200 {
			t.Errorf("SendInput: %d %v", status, v)
		}
		if f, err = readFrame(again.Body); err != nil || canonical(t, f.text) != `{"event":{"data":{"stdout":"`+b64("abc\n")+`"}}}` {
			t.Errorf("after the input: %+v, %v", f, err)
		}
		for !f.end && err == nil {
			f, err = readFrame(again.Body)
		}
		// The end is kept for late callers; the output is only repeated on request.
		got := a.streamAll("process.Process/Connect", sel+"}")
		if len(got) != 3 || !strings.Contains(got[1], `"exited":true`) {
			t.Errorf("late Connect: %q", got)
		}
	})
	t.Run("pty", func(t *testing.T) {
		res := a.stream("process.Process/Start", `{"process":{"cmd":"sh","args":["-c","stty size; read x; stty size; exit 4"],"envs":{"TERM":"xterm-256color"}},"pty":{"size":{"cols":90,"rows":20}}}`)
		f, _ := readFrame(res.Body)
		var pid int
		_, _ = fmt.Sscanf(canonical(t, f.text), `{"event":{"start":{"pid":%d}}}`, &pid)
		// The kernel may return a line and its end one by one.
		shown := ""
		for !strings.HasSuffix(shown, "\r\n") {
			var v struct {
				Event struct{ Data struct{ PTY []byte } }
			}
			f, err := readFrame(res.Body)
			if err != nil || json.Unmarshal([]byte(f.text), &v) != nil || len(v.Event.Data.PTY) == 0 {
				t.Fatalf("after %q: %+v, %v", shown, f, err)
			}
			shown += string(v.Event.Data.PTY)
		}
		if shown != "20 90\r\n" {
			t.Errorf("first output %q", shown)
		}
		sel := fmt.Sprintf(`{"process":{"pid":%d}`, pid)
		if status, v := a.unary("process.Process/Update", sel+`,"pty":{"size":{"cols":100,"rows":30}}}`); status != 200 {
			t.Errorf("Update: %d %v", status, v)
		}
		if status, v := a.unary("process.Process/CloseStdin", sel+`}`); status != 400 || v["code"] != "failed_precondition" {
			t.Errorf("CloseStdin on a terminal: %d %v", status, v)
		}
		if status, v := a.unary("process.Process/SendInput", sel+`,"input":{"pty":"`+b64("\r")+`"}}`); status != 200 {
			t.Errorf("SendInput: %d %v", status, v)
		}
		all := ""
		for {
			f, err := readFrame(res.Body)
			if err != nil {
				t.Fatal(err)
			}
			if f.end {
				break
			}
			all += canonical(t, f.text)
		}
		if !strings.Contains(all, b64("30 100\r\n")) && !strings.Contains(all, b64("\r\n30 100\r\n")) || !strings.Contains(all, `"exitCode":4`) {
			t.Errorf("the rest: %s", all)
		}
	})
}

func jsonText(v any) string { b, _ := json.Marshal(v); return string(b) }

func TestWireErrors(t *testing.T) {
	a := startAgent(t)
	for _, tt := range []struct {
		name, method, body string
		status             int
		code               string
		header             []string
	}{
		{"unknown pid", "process.Process/SendSignal", `{"process":{"pid":4194305},"signal":"SIGNAL_SIGKILL"}`, 404, "not_found", nil},
		{"unknown tag", "process.Process/SendInput", `{"process":{"tag":"x"},"input":{"stdin":""}}`, 404, "not_found", nil},
		{"no selector", "process.Process/CloseStdin", `{}`, 400, "invalid_argument", nil},
		{"no signal", "process.Process/SendSignal", `{"process":{"pid":1}}`, 400, "invalid_argument", nil},
		{"no such method", "filesystem.Filesystem/Stat", `{`, 400, "invalid_argument", nil},
		{"missing file", "filesystem.Filesystem/Stat", `{"path":"nothing"}`, 404, "not_found", nil},
		{"unknown user", "filesystem.Filesystem/Stat", `{"path":"/"}`, 401, "unauthenticated", []string{"Authorization", "Basic " + b64("no-such-user:")}},
		{"list a file", "filesystem.Filesystem/ListDir", `{"path":"/etc/passwd"}`, 400, "invalid_argument", nil},
		{"list nothing", "filesystem.Filesystem/ListDir", `{"path":"/nothing"}`, 404, "not_found", nil},
		{"make what exists", "filesystem.Filesystem/MakeDir", `{"path":"/tmp"}`, 409, "already_exists", nil},
		{"make over a file", "filesystem.Filesystem/MakeDir", `{"path":"/etc/passwd"}`, 400, "invalid_argument", nil},
		{"make below a file", "filesystem.Filesystem/MakeDir", `{"path":"/etc/passwd/x"}`, 400, "invalid_argument", nil},
		{"move nothing", "filesystem.Filesystem/Move", `{"source":"/nothing","destination":"/tmp/x"}`, 404, "not_found", nil},
		{"remove the root", "filesystem.Filesystem/Remove", `{"path":"/"}`, 400, "invalid_argument", nil},
		{"NUL in a path", "filesystem.Filesystem/Stat", `{"path":"a\u0000b"}`, 400, "invalid_argument", nil},
		{"unknown watcher", "filesystem.Filesystem/GetWatcherEvents", `{"watcherId":"x"}`, 404, "not_found", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, v := a.unary(tt.method, tt.body, tt.header...)
			if status != tt.status || v["code"] != tt.code || v["message"] == "" {
				t.Errorf("%d %v; want %d %s", status, v, tt.status, tt.code)
			}
		})
	}
	for _, tt := range []struct{ name, method, body, want string }{
		{"missing directory", "process.Process/Start", `{"process":{"cmd":"true","cwd":"/nothing"}}`, `"invalid_argument"`},
		{"missing command", "process.Process/Start", `{"process":{"cmd":"nothing-of-this-name"}}`, `"not_found"`},
		{"no command", "process.Process/Start", `{}`, `"invalid_argument"`},
		{"unknown pid", "process.Process/Connect", `{"process":{"pid":4194305}}`, `"not_found"`},
		{"watch nothing", "filesystem.Filesystem/WatchDir", `{"path":"/nothing"}`, `"not_found"`},
		{"watch a file", "filesystem.Filesystem/WatchDir", `{"path":"/etc/passwd"}`, `"invalid_argument"`},
	} {
		t.Run("stream "+tt.name, func(t *testing.T) {
			if got := a.streamAll(tt.method, tt.body); len(got) != 1 || !strings.Contains(got[0], `"code":`+tt.want) {
				t.Errorf("%q; want %s", got, tt.want)
			}
		})
	}
}

func TestWireInput(t *testing.T) {
	a := startAgent(t)
	res := a.stream("process.Process/Start", `{"process":{"cmd":"cat"},"stdin":false}`)
	if _, err := io.ReadAll(res.Body); err != nil { // /dev/null: cat ends by itself
		t.Error(err)
	}
	pid, err := a.Start(t.Context(), sandboxer.ProcessSpec{Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	sel := fmt.Sprintf(`{"process":{"pid":%d}`, pid)
	if status, v := a.unary("process.Process/SendInput", sel+`,"input":{"stdin":"YQ=="}}`); status != 500 || v["code"] != "internal" {
		t.Errorf("input to a process without one: %d %v", status, v)
	}
	if status, v := a.unary("process.Process/SendInput", sel+`,"input":{"pty":"YQ=="}}`); status != 400 {
		t.Errorf("keys to a process without a terminal: %d %v", status, v)
	}
	if status, v := a.unary("process.Process/SendSignal", sel+`,"signal":"SIGNAL_SIGTERM"}`); status != 200 {
		t.Errorf("SendSignal: %d %v", status, v)
	}
	eventually(t, "sleep survives SIGTERM", func() bool { return !alive(pid) })
}

func TestAuthentication(t *testing.T) {
	a := startAgent(t)
	for _, tt := range []struct {
		name, method, path, token string
		status                    int
	}{
		{"health is open", "GET", "/health", "", 204},
		{"no token", "POST", "/process.Process/List", "", 401},
		{"wrong token", "POST", "/process.Process/List", "tok-2", 401},
		{"wrong token, stream", "POST", "/process.Process/Start", "tok-10", 401},
		{"metrics", "GET", "/metrics", "", 401},
		{"envs", "GET", "/envs", "", 401},
		{"stats", "GET", "/stats", "", 401},
		{"relay", "GET", "/relay?port=1", "", 401},
		{"archive", "GET", "/archive?path=/etc", "", 401},
		{"empty", "DELETE", "/archive?path=/etc", "", 401},
		{"files", "GET", "/files?path=/etc/passwd", "", 401},
		{"upload", "POST", "/files?path=/tmp/x", "", 401},
		{"init", "POST", "/init", "", 401},
		{"nowhere", "GET", "/nowhere", "", 401},
		{"nowhere, with token", "GET", "/nowhere", testToken, 404},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, body := a.rawBody(tt.method, tt.path, map[string]string{tokenHeader: tt.token, "Content-Type": "application/json"}, "{}")
			if status != tt.status {
				t.Errorf("%d %s; want %d", status, body, tt.status)
			}
			var v struct {
				Code    int
				Message string
			}
			if tt.status == 401 && (json.Unmarshal([]byte(body), &v) != nil || v.Code != 401 || v.Message == "") {
				t.Errorf("body %q", body)
			}
		})
	}
	wrong := a.client(ClientOptions{Token: "tok-2"})
	if _, err := wrong.Exec(t.Context(), sandboxer.Cmd{Args: []string{"true"}}); sandboxer.KindOf(err) != sandboxer.Unauthenticated {
		t.Errorf("Exec with a wrong token: %v", err)
	}
	if _, err := wrong.Stats(t.Context()); sandboxer.KindOf(err) != sandboxer.Unauthenticated {
		t.Errorf("Stats with a wrong token: %v", err)
	}
}

func TestSign(t *testing.T) {
	for _, tt := range []struct {
		path, op, user string
		expires        time.Time
		want           string
	}{
		{"/home/user/a b.txt", "write", "", time.Unix(1893456000, 0), "v1_pV6os/mZg+rlWumK7vhhh5Hm50R8gEhsGg/OMHYK18I"},
		{"notes.txt", "read", "root", time.Time{}, "v1_8T2ZbJY2Bj1M6enOBFyGqcAfSDEo8lKL7ZRg/FyLG7g"},
	} {
		if got := Sign("tok-1", tt.op, tt.path, tt.user, tt.expires); got != tt.want {
			t.Errorf("Sign(%s %s) = %s; want %s", tt.op, tt.path, got, tt.want)
		}
	}
}

func TestSignedURLs(t *testing.T) {
	a := startAgent(t)
	get := func(method string, q url.Values) (int, string) {
		return a.rawBody(method, "/files?"+q.Encode(), map[string]string{tokenHeader: "", "Content-Type": "application/octet-stream"}, "signed")
	}
	soon, past := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	q := func(op, user string, expires time.Time) url.Values {
		v := url.Values{"path": {"signed.txt"}, "signature": {Sign(testToken, op, "signed.txt", user, expires)}}
		if user != "" {
			v.Set("username", user)
		}
		if !expires.IsZero() {
			v.Set("signature_expiration", strconv.FormatInt(expires.Unix(), 10))
		}
		return v
	}
	if status, body := get("POST", q("write", "", soon)); status != 200 {
		t.Fatalf("signed upload: %d %s", status, body)
	}
	if status, body := get("GET", q("read", "", time.Time{})); status != 200 || body != "signed" {
		t.Errorf("signed download: %d %s", status, body)
	}
	if status, body := get("GET", q("read", "root", soon)); status != 200 || body != "signed" {
		t.Errorf("signed download as root: %d %s", status, body)
	}
	if status, body := get("GET", q("write", "", soon)); status != 401 {
		t.Errorf("download with the signature of an upload: %d %s", status, body)
	}
	if status, body := get("GET", q("read", "", past)); status != 401 || !strings.Contains(body, `"signature is already expired"`) {
		t.Errorf("expired: %d %s", status, body)
	}
	later := q("read", "", past)
	later.Set("signature_expiration", strconv.FormatInt(soon.Unix(), 10))
	if status, body := get("GET", later); status != 401 || strings.Contains(body, "expired") {
		t.Errorf("prolonged: %d %s", status, body)
	}
	other := q("read", "", soon)
	other.Set("path", "/etc/passwd")
	if status, body := get("GET", other); status != 401 {
		t.Errorf("another path: %d %s", status, body)
	}
}

func TestWireFiles(t *testing.T) {
	a := startAgent(t)
	a.dir, _ = filepath.EvalSymlinks(a.dir)
	var form bytes.Buffer
	mw := multipart.NewWriter(&form)
	part := func(name, file, content string) {
		h := textproto.MIMEHeader{"Content-Disposition": {fmt.Sprintf(`form-data; name=%q; filename=%q`, name, file)}, "Content-Type": {"application/octet-stream"}}
		w, err := mw.CreatePart(h)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(w, content)
	}
	part("file", a.dir+"/deep/er/m1", "one")
	part("file", "m2", "two")
	part("other", "m3", "three")
	mw.Close()
	res := a.raw("POST", "/files", map[string]string{"Content-Type": mw.FormDataContentType()}, struct{ io.Reader }{bytes.NewReader(form.Bytes())})
	b, _ := io.ReadAll(res.Body)
	want := fmt.Sprintf(`[{"name":"m1","path":"%s/deep/er/m1","type":"file"},{"name":"m2","path":"%s/m2","type":"file"}]`, a.dir, a.dir)
	if res.StatusCode != 200 || canonical(t, string(b)) != want {
		t.Errorf("multipart: %d %s", res.StatusCode, b)
	}
	if b, _ := os.ReadFile(a.dir + "/deep/er/m1"); string(b) != "one" {
		t.Errorf("m1: %q", b)
	}
	if _, err := os.Stat(a.dir + "/m3"); err == nil {
		t.Error("a part that is not named file was stored")
	}

	form.Reset()
	mw = multipart.NewWriter(&form)
	part("file", "twice", "1")
	part("file", "./twice", "2")
	mw.Close()
	if status, body := a.rawBody("POST", "/files", map[string]string{"Content-Type": mw.FormDataContentType()}, form.String()); status != 400 || !strings.Contains(body, "twice") {
		t.Errorf("one path twice: %d %s", status, body)
	}

	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = io.WriteString(z, "content")
	z.Close()
	raw := map[string]string{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
	if status, body := a.rawBody("POST", "/files?path=gz.txt", raw, packed.String()); status != 200 {
		t.Errorf("gzip upload: %d %s", status, body)
	}
	if status, body := a.rawBody("POST", "/files?path=gz2.txt", raw, "not gzip"); status != 400 {
		t.Errorf("false gzip: %d %s", status, body)
	}
	if status, body := a.rawBody("GET", "/files?path=gz.txt", map[string]string{"Accept-Encoding": "identity"}, ""); status != 200 || body != "content" {
		t.Errorf("download: %d %q", status, body)
	}
	res = a.raw("GET", "/files?path="+url.QueryEscape(a.dir+"/gz.txt"), map[string]string{"Accept-Encoding": "gzip, deflate"}, nil)
	if res.Header.Get("Content-Encoding") != "gzip" || !strings.HasPrefix(res.Header.Get("Content-Disposition"), "inline; filename=gz.txt") {
		t.Errorf("headers %v", res.Header)
	}
	if z, err := gzip.NewReader(res.Body); err != nil {
		t.Error(err)
	} else if b, _ := io.ReadAll(z); string(b) != "content" {
		t.Errorf("gzip download: %q", b)
	}
	res = a.raw("GET", "/files?path=gz.txt", map[string]string{"Accept-Encoding": "gzip", "Range": "bytes=3-"}, nil)
	if b, _ := io.ReadAll(res.Body); res.StatusCode != 206 || string(b) != "tent" {
		t.Errorf("range: %d %q", res.StatusCode, b)
	}
	if status, body := a.rawBody("GET", "/files?path=/proc/version", map[string]string{"Accept-Encoding": "identity"}, ""); status != 403 {
		t.Errorf("a file of the kernel's: %d %q", status, body)
	}
	for _, tt := range []struct {
		name, method, query, contentType string
		status                           int
		text                             string
	}{
		{"missing", "GET", "path=nothing", "", 404, "path '" + a.dir + "/nothing' does not exist"},
		{"a directory", "GET", "path=/tmp", "", 400, "path '/tmp' is a directory"},
		{"a device", "GET", "path=/dev/null", "", 400, "not a regular file"},
		{"unknown user", "GET", "path=gz.txt&username=no-such-user", "", 401, "invalid username: 'no-such-user'"},
		{"raw without path", "POST", "", "application/octet-stream", 400, "lacks path"},
		{"over a directory", "POST", "path=/tmp", "application/octet-stream", 400, "is a directory"},
		{"through a file", "POST", "path=gz.txt/x", "application/octet-stream", 400, "not a directory"},
		{"no content type", "POST", "path=x", "", 400, "content type"},
		{"other content type", "POST", "path=x", "text/plain", 400, "text/plain"},
	} {
		status, body := a.rawBody(tt.method, "/files?"+tt.query, map[string]string{"Content-Type": tt.contentType}, "x")
		if status != tt.status || !strings.Contains(body, tt.text) || !strings.Contains(body, fmt.Sprintf(`"code":%d`, tt.status)) {
			t.Errorf("%s: %d %s; want %d with %q", tt.name, status, body, tt.status, tt.text)
		}
	}
}

func TestMetadata(t *testing.T) {
	a := startAgent(t)
	up := func(header map[string]string) (int, string) {
		header["Content-Type"] = "application/octet-stream"
		return a.rawBody("POST", "/files?path=m.txt", header, "x")
	}
	status, body := up(map[string]string{"X-Metadata-Author": "me", "X-Metadata-Two-Words": "b"})
	if strings.Contains(body, "keeps no metadata") {
		t.Skip(body)
	}
	if status != 200 || !strings.Contains(body, `"metadata":{"author":"me","two-words":"b"}`) {
		t.Errorf("upload: %d %s", status, body)
	}
	if _, v := a.unary("filesystem.Filesystem/Stat", `{"path":"m.txt"}`); jsonText(v["entry"].(map[string]any)["metadata"]) != `{"author":"me","two-words":"b"}` {
		t.Errorf("Stat: %v", v)
	}
	if status, body = up(map[string]string{"X-Metadata-New": "1"}); status != 200 {
		t.Errorf("second upload: %d %s", status, body)
	}
	if _, v := a.unary("filesystem.Filesystem/Stat", `{"path":"m.txt"}`); jsonText(v["entry"].(map[string]any)["metadata"]) != `{"new":"1"}` {
		t.Errorf("an upload replaces the whole set: %v", v)
	}
	if status, body = up(map[string]string{"X-Metadata-Big": strings.Repeat("x", 4096)}); status != 400 {
		t.Errorf("too much: %d %s", status, body)
	}
}

func TestInitEndpoint(t *testing.T) {
	a := startAgent(t)
	init := func(token, body string) (int, string) {
		return a.rawBody("POST", "/init", map[string]string{tokenHeader: token}, body)
	}
	for _, tt := range []struct {
		name, body string
		status     int
	}{
		{"empty", "", 204},
		{"no JSON", "{", 400},
		{"empty token", `{"accessToken":""}`, 400},
		{"unknown user", `{"defaultUser":"no-such-user"}`, 400},
		{"relative directory", `{"defaultWorkdir":"x"}`, 400},
		{"bad variable", `{"envVars":{"A=B":"c"}}`, 400},
		{"unknown fields", `{"hyperloopIP":"1.2.3.4"}`, 204},
		{"settings", `{"envVars":{"FROM_INIT":"yes"},"defaultWorkdir":"/usr","timestamp":"2026-01-02T00:00:00Z"}`, 204},
		{"older", `{"envVars":{"FROM_INIT":"older"},"timestamp":"2026-01-01T00:00:00Z"}`, 204},
	} {
		if status, body := init(testToken, tt.body); status != tt.status {
			t.Errorf("%s: %d %s; want %d", tt.name, status, body, tt.status)
		}
	}
	if out, _, _ := a.sh("echo $FROM_INIT; pwd"); out != "yes\n/usr\n" {
		t.Errorf("after init: %q", out)
	}
	if _, body := a.rawBody("GET", "/envs", nil, ""); canonical(t, body) != `{"FROM_INIT":"yes"}` {
		t.Errorf("/envs: %s", body)
	}
	token := "tok-new"
	if err := a.Init(t.Context(), Settings{Token: &token}); err != nil {
		t.Fatal(err)
	}
	if status, _ := init(testToken, "{}"); status != 401 {
		t.Errorf("the old token: %d", status)
	}
	if status, _ := init(token, "{}"); status != 204 {
		t.Errorf("the new token: %d", status)
	}
}

func TestRelay(t *testing.T) {
	a := startAgent(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.WriteString(c, "hello ")
				b, _ := io.ReadAll(c) // until the other side has closed its direction
				_, _ = c.Write(b)
			}()
		}
	}()
	port := l.Addr().(*net.TCPAddr).Port
	conn, err := a.Dial(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	sent := bytes.Repeat([]byte("0123456789"), 100_000)
	if _, err := conn.Write(sent); err != nil {
		t.Fatal(err)
	}
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, append([]byte("hello "), sent...)) {
		t.Errorf("%d bytes back, %v", len(got), err)
	}
	l.Close()
	if _, err := a.Dial(t.Context(), port); sandboxer.KindOf(err) != sandboxer.Unavailable {
		t.Errorf("a closed port: %v", err)
	}
	if status, body := a.rawBody("GET", "/relay?port=0", nil, ""); status != 400 {
		t.Errorf("port 0: %d %s", status, body)
	}
	if status, body := a.rawBody("GET", fmt.Sprintf("/relay?port=%d", port), nil, ""); status != 400 {
		t.Errorf("no upgrade: %d %s", status, body)
	}
}

func TestStats(t *testing.T) {
	a := startAgent(t)
	a.sh("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
	st, err := a.Stats(t.Context())
	if err != nil || st.CPU <= 0 || st.MemoryBytes <= 0 || st.PIDs < 1 || st.DiskBytes <= 0 || time.Since(st.At) > time.Minute {
		t.Errorf("%+v, %v", st, err)
	}
	_, body := a.rawBody("GET", "/metrics", nil, "")
	var m map[string]float64
	if err := json.Unmarshal([]byte(body), &m); err != nil || m["cpu_count"] < 1 || m["mem_total"] < m["mem_used"] || m["disk_total"] <= 0 || m["ts"] <= 0 {
		t.Errorf("/metrics: %s, %v", body, err)
	}
}

// TestStatsRise: processes that ended have consumed what they did.
func TestStatsRise(t *testing.T) {
	s := newServer(settings{}, nil, 4<<10, slog.New(slog.DiscardHandler))
	const before = 100_000 * time.Hour // more than all processes of this machine
	s.cpu.rising(before)
	if got := s.measure().CPU; got != before {
		t.Errorf("the processor time fell from %s to %s", before, got)
	}
}
