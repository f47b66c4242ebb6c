package remote

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/extensiontest"
)

// insideAPI is as much of agent-infra's API as this adapter uses, with this machine's bash and files.
func insideAPI(t testing.TB) string {
	mux, dir := http.NewServeMux(), t.TempDir()
	answer := func(w http.ResponseWriter, status int, message string, data any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(map[string]any{"success": status < 300, "message": message, "data": data})
	}
	mux.HandleFunc("GET /{n}/v1/sandbox", func(w http.ResponseWriter, _ *http.Request) {
		home, err := os.MkdirTemp(dir, "home") // nobody else's, as in a sandbox
		if err != nil {
			t.Error(err)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"success": true, "home_dir": home, "version": "1"})
	})
	mux.HandleFunc("POST /{n}/v1/bash/exec", func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			Command     string            `json:"command"`
			Env         map[string]string `json:"env"`
			HardTimeout float64           `json:"hard_timeout"`
		}
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil || in.Command == "" {
			answer(w, http.StatusUnprocessableEntity, "no command", nil)
			return
		}
		cmd := exec.CommandContext(r.Context(), "bash", "-c", in.Command)
		cmd.Env = os.Environ()
		for k, v := range in.Env {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		code := 0
		if err := cmd.Run(); err != nil {
			code = -1
			if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
				code = exit.ExitCode()
			}
		}
		cut := func(b bytes.Buffer) string { return b.String()[:min(b.Len(), 50_000)] }
		answer(w, http.StatusOK, "", map[string]any{"session_id": "s", "command_id": "c", "command": in.Command, "status": "completed",
			"stdout": cut(stdout), "stderr": cut(stderr), "exit_code": code})
	})
	mux.HandleFunc("POST /{n}/v1/file/write", func(w http.ResponseWriter, r *http.Request) {
		var in struct{ File, Content, Encoding string }
		err := json.NewDecoder(r.Body).Decode(&in)
		data, derr := base64.StdEncoding.DecodeString(in.Content)
		if err != nil || derr != nil || in.Encoding != "base64" {
			answer(w, http.StatusUnprocessableEntity, "no content", nil)
			return
		}
		if err := os.WriteFile(in.File, data, 0o644); err != nil {
			answer(w, http.StatusInternalServerError, err.Error(), nil)
			return
		}
		answer(w, http.StatusOK, "", map[string]any{"file": in.File, "bytes_written": len(data)})
	})
	mux.HandleFunc("GET /{n}/v1/file/download", func(w http.ResponseWriter, r *http.Request) {
		f, err := os.Open(r.FormValue("path"))
		if err != nil {
			answer(w, http.StatusNotFound, err.Error(), nil)
			return
		}
		defer f.Close()
		_, _ = f.WriteTo(w)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}

// TestAIOConformance holds kind aio to what of the contract it has: life and files.
func TestAIOConformance(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("needs bash")
	}
	base := insideAPI(t)
	bases := map[string]string{}
	for i := range 8 {
		bases["b"+strconv.Itoa(i)] = base + "/" + strconv.Itoa(i)
	}
	dir := t.TempDir()
	config := map[string]any{"kind": "aio", "bases": bases}
	extensiontest.RunGroups(t, extensiontest.Harness{
		Inputs: Adapter.Inputs,
		Open:   func(t *testing.T) sandboxer.Extension { return mustOpen(t, "conformance", dir, config) },
		Want:   []sandboxer.Capability{sandboxer.CanFiles, sandboxer.CanProbe, sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanCapacity},
	}, "files", "probe", "discover", "list", "capacity")
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

func FuzzRecord(f *testing.F) {
	f.Add("name/644/f/12/1700000000.5/root/root/")
	f.Add("name/777/l/12/1700000000/root/root/../a/b")
	for _, name := range []string{"", ".", ".."} {
		f.Add(name + "/1777/d/0/0/0/0/")
	}
	f.Fuzz(func(t *testing.T, rec string) {
		name, fi, err := parseEntry(rec)
		if err == nil && (path.Base(name) != name || name == "." || name == ".." || fi.Size < 0) {
			t.Errorf("%q is %q, %+v", rec, name, fi)
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
