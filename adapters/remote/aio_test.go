package remote

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
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/aioserver"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// door is our own API inside, for sandboxes of ext.fake, whose commands are real: as the broker serves it, below
// /ID.
type door struct {
	t      testing.TB
	broker *edgetest.Broker
	inside *aioserver.Server
	url    string

	mu   sync.Mutex
	gate func(r *http.Request)         // called before each request, if set
	made map[string]*sandboxer.Sandbox // by ID
	lent map[string]string             // the URL of a sandbox of ours
}

// awake are sandboxes of a Manager that are not paused.
type awake struct{ *manager.Manager }

func (awake) Awake(context.Context, string) error { return nil }

func farUser(ctx context.Context) context.Context {
	return sandboxer.WithPrincipal(ctx, sandboxer.Principal{Tenant: "far", Actor: "key:1", Scopes: []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite}})
}

// ask has f called before each request.
func (d *door) ask(f func(r *http.Request)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gate = f
}

func newDoor(t testing.TB) *door {
	t.Helper()
	d := &door{t: t, made: map[string]*sandboxer.Sandbox{}, lent: map[string]string{}}
	// The fake's files have a root of their own, and its commands that of this machine.
	one := fake.Config{Drop: []sandboxer.Capability{sandboxer.CanFiles, sandboxer.CanArchive}}
	d.broker = edgetest.NewBroker(t, edgetest.BrokerOptions{Fake: one, Profiles: []sandboxer.Profile{{ID: "profile.far", Extension: "ext.fake", TTL: time.Hour}}})
	d.inside = aioserver.New(aioserver.Options{Sandboxes: awake{d.broker.Manager}, SpoolDir: t.TempDir()})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		d.mu.Lock()
		sb, gate := d.made[id], d.gate
		d.mu.Unlock()
		if sb == nil {
			http.NotFound(w, r)
			return
		}
		if gate != nil {
			gate(r)
		}
		in := r.Clone(farUser(r.Context()))
		in.URL.Path = "/" + rest
		d.inside.Serve(w, in, aioserver.Sandbox{ID: sb.ID, Generation: sb.Generation})
	}))
	d.url = s.URL
	t.Cleanup(func() { d.inside.Close(); s.Close() })
	return d
}

// lend returns the URL of a sandbox there that nobody else has, the same one for the same sandbox here.
func (d *door) lend(key string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if u := d.lent[key]; u != "" {
		return u
	}
	sb, err := d.broker.Create(farUser(context.Background()), sandboxer.CreateRequest{Profile: "profile.far"})
	if err != nil {
		d.t.Error(err)
		return d.url
	}
	d.made[sb.ID] = sb
	d.lent[key] = d.url + "/" + sb.ID
	return d.lent[key]
}

// lending is the extension with a fresh sandbox there for each of its own.
type lending struct {
	aio
	door *door
}

func (l lending) Provision(ctx context.Context, sp sandboxer.Spec) (sandboxer.Handle, error) {
	sp.Inputs = map[string]string{inputURL: l.door.lend(fmt.Sprint(sp.ID, sp.Generation))}
	return l.aio.Provision(ctx, sp)
}

// open opens the extension in dir.
func (d *door) open(t testing.TB, dir string) lending {
	return lending{mustOpen(t, "conformance", dir, map[string]any{"kind": "aio", "allow": []string{d.url}}).(aio), d}
}

// TestAIOConformance holds kind aio to what of the contract it has, against our own API inside.
func TestAIOConformance(t *testing.T) {
	d, dir := newDoor(t), t.TempDir()
	extensiontest.RunGroups(t, extensiontest.Harness{
		Inputs:        Adapter.Inputs,
		Open:          func(t *testing.T) sandboxer.Extension { return d.open(t, dir) },
		Want:          []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanArchive, sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanCapacity},
		ExistsAlready: true,
	}, "exec", "files", "archive", "probe", "discover", "list", "capacity")
}

// What a guest answers is believed as far as it can be, and shown as far as it is fit for that.
func TestAIOAnswers(t *testing.T) {
	for what, tt := range map[string]struct {
		status int
		body   string
		kind   sandboxer.Kind
	}{
		"not of the API":     {200, `<html>`, sandboxer.Failed},
		"a failure with 200": {200, `{"success":false,"message":"no \u001b[31mway"}`, sandboxer.Failed},
		"no end":             {200, `{"success":true,"data":{"status":"running"}}`, sandboxer.Failed},
		"too long":           {200, `{"data":"` + strings.Repeat("x", maxGuest) + `"}`, sandboxer.Failed},
		"no such path":       {404, `{"detail":"Not Found"}`, sandboxer.Unsupported},
		"no rights":          {403, ``, sandboxer.Denied},
		"a full disk":        {507, `{"message":"full"}`, sandboxer.Exhausted},
		"elsewhere":          {302, ``, sandboxer.Unavailable},
		"missing":            {200, `{"success":true,"data":{"status":"completed","exit_code":44}}`, sandboxer.NotFound},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(tt.status)
			_, _ = w.Write([]byte(tt.body))
		}))
		b := opened(t, t.TempDir(), map[string]any{"kind": "aio", "bases": map[string]string{"a": s.URL}})
		h, err := b.Provision(t.Context(), order("x", nil))
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.StatFile(t.Context(), h, "/etc/passwd")
		wantKind(t, what, err, tt.kind)
		if err != nil && strings.ContainsRune(err.Error(), '\x1b') {
			t.Errorf("%s: the error has an escape character", what)
		}
		s.Close()
	}
}

// A command leaves nothing behind, and its environment and its input are in no text that the far side may show.
func TestAIOCommands(t *testing.T) {
	d := newDoor(t)
	var mu sync.Mutex
	var texts []string
	own := regexp.MustCompile(`/tmp/\.sandboxer-[a-z2-7]+`)
	dirs, limits := map[string]bool{}, 0
	d.ask(func(r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		var said struct {
			Command string   `json:"command"`
			Async   bool     `json:"async_mode"`
			Limit   *float64 `json:"hard_timeout"`
		}
		_ = json.Unmarshal(body, &said)
		mu.Lock()
		defer mu.Unlock()
		texts = append(texts, said.Command)
		for _, dir := range own.FindAllString(said.Command, -1) {
			dirs[dir] = true
		}
		if said.Async && said.Limit != nil {
			limits++
		}
	})
	e := d.open(t, t.TempDir())
	h, err := e.Provision(t.Context(), order("x", nil))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	x, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"sh", "-c", `printf %s "$TOKEN:$1"; cat; exit 5`, "sh", "\xff\xfe'\n"}, Env: map[string]string{"TOKEN": "canary"}, Stdin: strings.NewReader("canary"), Stdout: &out})
	if err != nil || x.Code != 5 || out.String() != "canary:\xff\xfe'\ncanary" {
		t.Errorf("%+v, %v, %q", x, err, out.String())
	}
	for what, env := range map[string]map[string]string{
		"a name":     {"a.b": "x"},
		"no UTF-8":   {"A": "\xff"},
		"too much":   {"A": strings.Repeat("x", maxVars)},
		"a NUL byte": {"A": "\x00"},
	} {
		_, err := e.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}, Env: env})
		wantKind(t, what, err, sandboxer.Unsupported)
	}
	for what, tt := range map[string]struct {
		cmd  sandboxer.Cmd
		kind sandboxer.Kind
	}{
		"a directory that is no UTF-8": {sandboxer.Cmd{Dir: "/\xff"}, sandboxer.Unsupported},
		"a user that is no UTF-8":      {sandboxer.Cmd{User: "\xff"}, sandboxer.Unsupported},
		"a group that is none":         {sandboxer.Cmd{User: "0:0'; : '"}, sandboxer.Invalid},
	} {
		tt.cmd.Args = []string{"true"}
		_, err := e.Exec(t.Context(), h, tt.cmd)
		wantKind(t, what, err, tt.kind)
	}
	in, feed := io.Pipe()
	defer feed.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	_, err = e.Exec(ctx, h, sandboxer.Cmd{Args: []string{"sh", "-c", "echo on; cat"}, Stdin: in, Stdout: writer(func(p []byte) (int, error) { cancel(); return len(p), nil })})
	wantKind(t, "a command that is given up", err, sandboxer.Canceled)

	d.ask(nil)
	mu.Lock()
	defer mu.Unlock()
	for _, text := range texts {
		if strings.Contains(text, "canary") || strings.Contains(text, base64.StdEncoding.EncodeToString([]byte("canary"))) {
			t.Errorf("the environment or the input is in a command: %q", text)
		}
	}
	if len(dirs) != 2 || limits != 1 {
		t.Errorf("%d directories, %d limits", len(dirs), limits)
	}
	for dir := range dirs {
		if left, _ := filepath.Glob(dir + "*"); len(left) > 0 {
			t.Errorf("%q is left", left)
		}
	}
	resp, err := http.Get(d.lend(fmt.Sprint("x", 1)) + "/v1/bash/sessions")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if said, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 || bytes.Contains(said, []byte("sandboxer-")) {
		t.Errorf("the sessions that are left: %d %s, %v", resp.StatusCode, said, err)
	}
	http.DefaultClient.CloseIdleConnections()
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// A far side that lies about a command is found out, within bounds, and the command is given up there.
func TestAIOHostileCommands(t *testing.T) {
	const running = `,"command":{"command_id":"c","status":"running"}`
	for what, tt := range map[string]struct {
		data string
		kind sandboxer.Kind
	}{
		"another number":     {`"stdout":"1 aGkK\n"` + running, sandboxer.Failed},
		"no base64":          {`"stdout":"0 !!!!\n"` + running, sandboxer.Failed},
		"nothing of a piece": {`"stdout":"0 \n"` + running, sandboxer.Failed},
		"a line without end": {`"stdout":"` + strings.Repeat("x", 3*pieceSize) + `"` + running, sandboxer.Failed},
		"a flood":            {`"stderr":"` + strings.Repeat("x", maxQueued+1) + `"` + running, sandboxer.Failed},
		"too long":           {`"stderr":"` + strings.Repeat("x", maxOutput+1) + `"` + running, sandboxer.Failed},
		"a negative offset":  {`"offset":-1` + running, sandboxer.Failed},
		"outputs that end":   {`"command":{"command_id":"c","status":"completed","exit_code":0}`, sandboxer.Failed},
		"killed":             {`"command":{"command_id":"c","status":"ki\u001b[31mlled"}`, sandboxer.Failed},
		"an odd refusal":     {`"stdout":"! \u001b[31m\n"` + running, sandboxer.Failed},
		"no tools":           {`"stdout":"! tools mkfifo\u001b\n"` + running, sandboxer.Unsupported},
		"no such user":       {`"stdout":"! user\n"` + running, sandboxer.Invalid},
	} {
		t.Run(what, func(t *testing.T) {
			var closed, killed atomic.Bool
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				switch {
				case strings.HasSuffix(r.URL.Path, "/close"):
					closed.Store(true)
				case r.URL.Path == "/v1/bash/output":
					_, _ = io.WriteString(w, `{"success":true,"data":{`+tt.data+`}}`)
					return
				case bytes.Contains(body, []byte(`"async_mode":true`)):
					_, _ = io.WriteString(w, `{"success":true,"data":{"session_id":"s","command_id":"c","command":"x","status":"running"}}`)
					return
				case bytes.Contains(body, []byte("kill -KILL")):
					killed.Store(true)
				}
				_, _ = io.WriteString(w, `{"success":true,"data":{"status":"completed","exit_code":0}}`)
			}))
			defer s.Close()
			b := opened(t, t.TempDir(), map[string]any{"kind": "aio", "bases": map[string]string{"a": s.URL}})
			h, err := b.Provision(t.Context(), order("x", nil))
			if err != nil {
				t.Fatal(err)
			}
			_, err = b.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
			wantKind(t, what, err, tt.kind)
			if err != nil && strings.ContainsRune(err.Error(), '\x1b') {
				t.Errorf("the error has an escape character: %q", err)
			}
			if !closed.Load() || !killed.Load() {
				t.Errorf("closed: %t, killed: %t", closed.Load(), killed.Load())
			}
		})
	}
}

// A command whose start is answered when its caller has long left is ended then, though it was looked for before.
func TestAIOLateStart(t *testing.T) {
	answer, asked := make(chan struct{}), make(chan struct{})
	var begun, ended atomic.Bool
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if bytes.Contains(body, []byte(`"async_mode":true`)) {
			close(asked)
			select {
			case <-answer:
			case <-r.Context().Done():
			}
			begun.Store(true)
			_, _ = io.WriteString(w, `{"success":true,"data":{"session_id":"s","command_id":"c","command":"x","status":"running"}}`)
			return
		}
		if bytes.Contains(body, []byte("kill -KILL")) && begun.Load() {
			ended.Store(true)
		}
		_, _ = io.WriteString(w, `{"success":true,"data":{"status":"completed","exit_code":0}}`)
	}))
	defer s.Close()
	a := mustOpen(t, "test", t.TempDir(), map[string]any{"kind": "aio", "bases": map[string]string{"a": s.URL}}).(aio)
	h, err := a.Provision(t.Context(), order("x", nil))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-asked; cancel() }()
	_, err = a.Exec(ctx, h, sandboxer.Cmd{Args: []string{"true"}})
	wantKind(t, "a command whose caller leaves", err, sandboxer.Canceled)
	if begun.Load() {
		t.Error("the start was not waited for")
	}
	close(answer)
	a.late.Wait()
	if !begun.Load() || !ended.Load() {
		t.Errorf("begun: %t, ended after that: %t", begun.Load(), ended.Load())
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	_, err = a.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
	wantKind(t, "a command of what is closed", err, sandboxer.Unavailable)
}

// answering opens the extension for a far side that answers as answer does, and with a command that went well where it does not.
func answering(t *testing.T, answer func(w http.ResponseWriter, r *http.Request, body []byte) bool) (aio, sandboxer.Handle) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !answer(w, r, body) {
			_, _ = io.WriteString(w, `{"success":true,"data":{"session_id":"s","command_id":"c","status":"completed","exit_code":0}}`)
		}
	}))
	t.Cleanup(s.Close)
	a := mustOpen(t, "test", t.TempDir(), map[string]any{"kind": "aio", "bases": map[string]string{"a": s.URL}}).(aio)
	t.Cleanup(func() { a.Close() })
	h, err := a.Provision(t.Context(), order("x", nil))
	if err != nil {
		t.Fatal(err)
	}
	return a, h
}

// A command that is given up is looked for, however long the far side takes to close its session.
func TestAIOSlowClose(t *testing.T) {
	var killed atomic.Bool
	a, h := answering(t, func(w http.ResponseWriter, r *http.Request, body []byte) bool {
		switch {
		case strings.HasSuffix(r.URL.Path, "/close"):
			<-r.Context().Done()
		case r.URL.Path == "/v1/bash/output":
			w.WriteHeader(http.StatusForbidden)
			return true
		case bytes.Contains(body, []byte("kill -KILL")):
			killed.Store(true)
		}
		return false
	})
	_, err := a.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}})
	wantKind(t, "a command that may not be asked for", err, sandboxer.Denied)
	if !killed.Load() {
		t.Error("nothing was ended")
	}
}

// Of a command whose start is refused nothing is left, neither a session nor what was brought before.
func TestAIORefusedStart(t *testing.T) {
	for what, size := range map[string]int{"short": 1, "brought": maxScript + 1} {
		var refused, closed, brought, removed atomic.Bool
		a, h := answering(t, func(w http.ResponseWriter, r *http.Request, body []byte) bool {
			switch {
			case bytes.Contains(body, []byte(`"async_mode":true`)):
				refused.Store(true)
				w.WriteHeader(http.StatusTooManyRequests)
				return true
			case r.URL.Path == "/v1/file/write":
				brought.Store(true)
			case strings.HasSuffix(r.URL.Path, "/close"):
				closed.Store(refused.Load())
			case bytes.Contains(body, []byte("rm -rf /tmp/.sandboxer-")):
				removed.Store(refused.Load())
			}
			return false
		})
		_, err := a.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"echo", strings.Repeat("x", size)}})
		wantKind(t, what, err, sandboxer.Exhausted)
		if !closed.Load() || brought.Load() != removed.Load() || brought.Load() != (size > 1) {
			t.Errorf("%s: closed: %t, brought: %t, removed: %t", what, closed.Load(), brought.Load(), removed.Load())
		}
	}
}

// What is for a command that is not ready for it is kept until it is, and what cannot be read inside is no end of an input.
func TestAIONotYet(t *testing.T) {
	var mu sync.Mutex
	var codes []int // of the scripts that come, but for those that wait alone
	var in, lines, told []string
	a, h := answering(t, func(w http.ResponseWriter, r *http.Request, body []byte) bool {
		var said struct {
			SessionID string `json:"session_id"`
			Command   string
			Input     string
			File      string
			Env       map[string]string
		}
		_ = json.Unmarshal(body, &said)
		mu.Lock()
		defer mu.Unlock()
		if r.URL.Path == "/v1/file/write" && path.Dir(said.File) != "/tmp/d" {
			t.Errorf("input is in %s", said.File)
		}
		switch {
		case r.URL.Path == "/v1/bash/write":
			lines = append(lines, said.Input)
			return false
		case strings.Contains(said.Command, "kill -15"):
			told = append(told, said.Command)
		case said.SessionID == "s-in" && (len(said.Env) > 0 || strings.Contains(said.Command, "cat >")):
			in = append(in, said.Env["SBX_IN"])
		default:
			return false
		}
		code := codes[0]
		codes = codes[1:]
		fmt.Fprintf(w, `{"success":true,"data":{"command_id":"c","command":"x","status":"completed","exit_code":%d}}`, code)
		return true
	})
	for what, tt := range map[string]struct {
		size  int
		codes []int
		kind  sandboxer.Kind
		ends  bool // the command is told that its input ends
	}{
		"ready":                  {1, []int{0}, "", true},
		"not ready":              {1, []int{exitNotYet, exitNotYet, 0}, "", true},
		"not ready for a draft":  {maxInline + 1, []int{exitNotYet, 0}, "", true},
		"nobody reads":           {1, []int{1}, "", false},
		"a draft that is no use": {maxInline + 1, []int{exitNoDraft}, sandboxer.Failed, false},
	} {
		mu.Lock()
		codes, in, lines = tt.codes, nil, nil
		mu.Unlock()
		c := &command{a: a, h: h, session: "s", dir: "/tmp/d", ended: make(chan struct{})}
		given := false
		c.cmd.Stdin = reader(func(p []byte) (int, error) { // all of it at once
			if given || len(p) < 1 {
				return 0, io.EOF
			}
			given = true
			return copy(p, make([]byte, tt.size)), nil
		})
		wantKind(t, what, c.feed(t.Context()), tt.kind)
		mu.Lock()
		if len(codes) > 0 || len(in) != len(tt.codes) || tt.ends != (len(lines) == 1) {
			t.Errorf("%s: %d scripts, lines %q, %d are left", what, len(in), lines, len(codes))
		}
		mu.Unlock()
	}
	c := &command{a: a, h: h, dir: "/tmp/d", ended: make(chan struct{})}
	codes = []int{exitNotYet, 0}
	c.tell(t.Context(), "a signal", "pid", "kill -15 1")
	if len(told) != 2 {
		t.Errorf("a signal was sent %d times", len(told))
	}
	codes = []int{exitNotYet}
	close(c.ended)
	c.tell(t.Context(), "a signal", "pid", "kill -15 1")
	if len(told) != 2 {
		t.Error("a signal was sent to what has ended")
	}
}

// A piece of input that comes to lie inside once the command has removed its directory, or who gave it up has, is removed, too.
func TestAIOLateDraft(t *testing.T) {
	const dir = "/tmp/d"
	end := []byte("\x00the end of an output, as long\x00\x00\x00\x00\x00\x00")
	piece := base64.StdEncoding.EncodeToString(end)
	for what, tt := range map[string]struct {
		answer string // to questions about outputs; none: they are refused
		kind   sandboxer.Kind
		made   func(r *http.Request, body []byte) bool // whether it is there after this request
	}{
		"ended": {
			`{"success":true,"data":{"stdout":"0 ` + piece + `\n","stderr":"0 ` + piece + `\n","command":{"command_id":"c","status":"completed","exit_code":0}}}`, "",
			func(r *http.Request, _ []byte) bool { return r.URL.Path == "/v1/bash/output" }, // it says that there is no command any more
		},
		"given up": {
			"", sandboxer.Denied,
			func(_ *http.Request, body []byte) bool { return bytes.Contains(body, []byte("kill -KILL")) },
		},
	} {
		t.Run(what, func(t *testing.T) {
			var once sync.Once
			var made, lies atomic.Bool
			sent := make(chan struct{})
			a, h := answering(t, func(w http.ResponseWriter, r *http.Request, body []byte) bool {
				switch {
				case r.URL.Path == "/v1/file/write":
					once.Do(func() { close(sent) })
					<-r.Context().Done() // it is under way
					return true
				case r.URL.Path == "/v1/bash/output":
					select {
					case <-sent:
					case <-r.Context().Done():
					}
					if tt.answer == "" {
						w.WriteHeader(http.StatusForbidden)
					}
				case bytes.Contains(body, []byte("rm -rf "+dir)):
					lies.Store(false)
				}
				if tt.made(r, body) {
					made.Store(true)
					lies.Store(true)
				}
				if r.URL.Path == "/v1/bash/output" {
					_, _ = io.WriteString(w, tt.answer)
					return true
				}
				return false
			})
			c := &command{a: a, h: h, session: "s", dir: dir, mark: "m", tag: "1", end: end, id: "c", ended: make(chan struct{})}
			c.cmd.Stdin = bytes.NewReader(make([]byte, maxInline+1))
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			_, err := c.follow(ctx, cancel)
			wantKind(t, what, err, tt.kind)
			if !made.Load() || lies.Load() {
				t.Errorf("it was made again: %t, and lies there: %t", made.Load(), lies.Load())
			}
		})
	}
}

// A group that could be more than a name is refused before the far side hears of the command: the script inside says it again,
// in quotes.
func TestAIOGroups(t *testing.T) {
	var asked atomic.Int64
	a, h := answering(t, func(http.ResponseWriter, *http.Request, []byte) bool {
		asked.Add(1)
		return false
	})
	for group, ok := range map[string]bool{
		"0": true, "adm": true, "a.b_c-D": true,
		"0'; : '": false, "$(id)": false, "a b": false, "a\nb": false, "0:0": false, "\"": false,
	} {
		before := asked.Load()
		_, err := a.Exec(t.Context(), h, sandboxer.Cmd{Args: []string{"true"}, User: "0:" + group})
		refused := sandboxer.KindOf(err) == sandboxer.Invalid && strings.Contains(sandboxer.Message(err), "is no group")
		if refused == ok || ok != (asked.Load() > before) {
			t.Errorf("the group %q: %v, after %d requests", group, err, asked.Load()-before)
		}
	}
}

// A far side that says at once that a script runs is not asked without a pause.
func TestAIONoWait(t *testing.T) {
	var polls atomic.Int64
	until := time.Now().Add(400 * time.Millisecond)
	a, h := answering(t, func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		if r.URL.Path == "/v1/bash/output" {
			polls.Add(1)
		}
		if time.Now().After(until) {
			return false
		}
		_, _ = io.WriteString(w, `{"success":true,"data":{"command_id":"c","command":"x","status":"running"}}`)
		return true
	})
	if code, err := a.long(t.Context(), h, "s", "true", nil); code != 0 || err != nil {
		t.Errorf("%d, %v", code, err)
	}
	if n := polls.Load(); n > 40 {
		t.Errorf("it was asked %d times", n)
	}
}

// Questions about a command that fail for a while are asked again, and each answer makes up for those before.
func TestAIOFailedPolls(t *testing.T) {
	end := []byte("\x00end-of-it\x00\x00\x00\x00\x00\x00")
	said := []string{"0 " + base64.StdEncoding.EncodeToString([]byte("a")) + "\n", "1 " + base64.StdEncoding.EncodeToString(end) + "\n"}
	const between = pollTries - 2
	polls := 0
	a, h := answering(t, func(w http.ResponseWriter, r *http.Request, body []byte) bool {
		if r.URL.Path != "/v1/bash/output" {
			return false
		}
		defer func() { polls++ }()
		var from struct {
			Offset int `json:"offset"`
		}
		_ = json.Unmarshal(body, &from)
		all, status := strings.Join(said, ""), `"completed","exit_code":3`
		switch {
		case polls < between:
			w.WriteHeader(http.StatusBadGateway)
			return true
		case polls == between:
			all, status = said[0], `"running"`
		case polls <= 2*between:
			w.WriteHeader(http.StatusTooManyRequests)
			return true
		}
		data, _ := json.Marshal(all[from.Offset:])
		fmt.Fprintf(w, `{"success":true,"data":{"stdout":%s,"offset":%d,"command":{"status":%s}}}`, data, len(all), status)
		return true
	})
	c := &command{a: a, h: h, end: end, id: "c", ended: make(chan struct{})}
	var got bytes.Buffer
	out, errs := c.output(&got, "o"), c.output(nil, "e")
	if x, err := c.poll(t.Context(), out, errs); err != nil || x.Code != 3 {
		t.Fatalf("%+v, %v", x, err)
	}
	if err := out.deliver(t.Context()); err != nil || got.String() != "a" {
		t.Errorf("%q, %v", got.String(), err)
	}
}

// What a command wrote that has ended arrives also where nobody takes it for long: what asks it for more is refused then.
func TestAIOSlowReader(t *testing.T) {
	end := []byte("\x00end-of-it\x00\x00\x00\x00\x00\x00")
	var said strings.Builder
	for i, piece := range [][]byte{[]byte("a"), []byte("b"), []byte("c"), end} {
		fmt.Fprintf(&said, "%d %s\n", i, base64.StdEncoding.EncodeToString(piece))
	}
	var refused atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/bash/write":
			refused.Add(1)
			w.WriteHeader(http.StatusConflict)
		case "/v1/bash/output":
			var from struct {
				Offset int `json:"offset"`
			}
			_ = json.NewDecoder(r.Body).Decode(&from)
			data, _ := json.Marshal(map[string]any{"stdout": said.String()[from.Offset:], "stderr": "", "offset": said.Len(), "stderr_offset": 0, "command": map[string]any{"status": "completed", "exit_code": 3}})
			fmt.Fprintf(w, `{"success":true,"data":%s}`, data)
		default:
			_, _ = io.WriteString(w, `{"success":true,"data":{"status":"completed","exit_code":0}}`)
		}
	}))
	defer s.Close()
	a := mustOpen(t, "test", t.TempDir(), map[string]any{"kind": "aio", "bases": map[string]string{"a": s.URL}}).(aio)
	defer a.Close()
	h, err := a.Provision(t.Context(), order("x", nil))
	if err != nil {
		t.Fatal(err)
	}
	c := &command{a: a, h: h, end: end, id: "c", ended: make(chan struct{})}
	var got bytes.Buffer
	c.cmd.Stdout = writer(func(p []byte) (int, error) {
		select {
		case <-c.ended:
		case <-time.After(30 * time.Second):
			t.Error("the end of the command was not seen while its output was not taken")
		}
		return got.Write(p)
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	out, errs := c.output(c.cmd.Stdout, "o"), c.output(nil, "e")
	close(errs.over)
	go func() { _ = out.deliver(ctx) }()
	if x, err := c.poll(ctx, out, errs); err != nil || x.Code != 3 {
		t.Errorf("%+v, %v", x, err)
	}
	<-out.over
	if got.String() != "abc" {
		t.Errorf("%q was delivered", got.String())
	}
	for _, line := range []string{"o 2", "i"} {
		before := refused.Load()
		if err := c.write(ctx, line); err != nil || refused.Load() > before+1 {
			t.Errorf("%q to a command that has ended: %v after %d tries", line, err, refused.Load()-before)
		}
	}
}

// The content of a file is sent as it comes, and not gathered.
func TestAIOWrites(t *testing.T) {
	seen, broken := make(chan struct{}, 1), errors.New("it broke off")
	var whole atomic.Int64 // files that the guest has
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/file/write" {
			_, _ = io.WriteString(w, `{"success":true,"data":{"status":"completed","exit_code":0,"stdout":"0\n"}}`)
			return
		}
		first := make([]byte, 64<<10)
		if n, _ := io.ReadFull(r.Body, first); n == len(first) {
			select {
			case seen <- struct{}{}:
			default:
			}
		}
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			whole.Add(1)
		}
		_, _ = io.WriteString(w, `{"success":true}`)
	}))
	defer s.Close()
	b := opened(t, t.TempDir(), map[string]any{"kind": "aio", "bases": map[string]string{"a": s.URL}})
	h, err := b.Provision(t.Context(), order("x", nil))
	if err != nil {
		t.Fatal(err)
	}
	write := func(r io.Reader) error { return b.WriteFile(t.Context(), h, "/f", 0o644, r) }

	half := bytes.NewReader(make([]byte, 1<<20))
	err = write(io.MultiReader(half, reader(func([]byte) (int, error) {
		select {
		case <-seen:
		case <-time.After(30 * time.Second):
			t.Error("nothing was sent before the end of the content")
		}
		return 0, broken
	})))
	wantKind(t, "content that breaks off", err, sandboxer.Invalid)
	if !errors.Is(err, broken) {
		t.Errorf("the error does not say why: %v", err)
	}
	read := 0
	err = write(reader(func(p []byte) (int, error) { read += len(p); return len(p), nil }))
	wantKind(t, "content without an end", err, sandboxer.Unsupported)
	if read > maxWrite+1<<20 {
		t.Errorf("%d bytes of it were read", read)
	}
	s.Close() // waits for what it does
	if n := whole.Load(); n > 0 {
		t.Errorf("%d of the files are whole", n)
	}
}

type reader func([]byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

func FuzzHome(f *testing.F) {
	f.Add([]byte(`{"home_dir":"/home/gem","version":"1"}`))
	f.Add([]byte(`{"home_dir":"/a/../b"}`))
	f.Add([]byte(`{"home_dir":"/` + strings.Repeat("a", 300) + `\u001b[31m"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if home := readHome(data); home != "" && (!path.IsAbs(home) || path.Clean(home) != home || len(home) > maxShown || strings.ContainsFunc(home, func(r rune) bool { return !unicode.IsPrint(r) })) {
			t.Errorf("%q is taken for a directory: %q", data, home)
		}
	})
}

func FuzzBash(f *testing.F) {
	f.Add([]byte(`{"command":"true","status":"completed","exit_code":3,"stdout":"x"}`))
	f.Add([]byte(`{"command":{"status":"running"},"offset":5}`))
	f.Add([]byte(`{"command":7,"offset":-5}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		x, err := readBash(data)
		if err != nil && sandboxer.KindOf(err) != sandboxer.Failed || err == nil && (x.Offset < 0 || x.StderrOffset < 0) {
			t.Errorf("%q: %+v, %v", data, x, err)
		}
	})
}

// What a guest says of an output never becomes more than it is, nor goes on after its end.
func FuzzOutput(f *testing.F) {
	f.Add([]byte("0 aGkK\n1 AGVuZA==\n"))
	f.Add([]byte("0 AGVu\n1 ZCE=\n"))
	f.Add([]byte("1 aGkK\n0 !\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var got bytes.Buffer
		o := (&command{end: []byte("\x00end!")}).output(&got, "oa")
		for line := range bytes.SplitSeq(text, []byte("\n")) {
			if err := o.piece(line); err != nil || o.ended {
				break
			}
		}
		if got.Len() > len(text) || bytes.Contains(got.Bytes(), o.c.end) {
			t.Errorf("%q became %q", text, got.Bytes())
		}
	})
}

func FuzzEnvelope(f *testing.F) {
	f.Add([]byte(`{"success":true,"message":null,"data":{"stdout":"x"}}`))
	f.Add([]byte(`{"success":false,"message":"m"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, err := readEnvelope(data); err != nil && sandboxer.KindOf(err) != sandboxer.Failed {
			t.Errorf("%q: %v", data, err)
		}
	})
}
