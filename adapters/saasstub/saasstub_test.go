package saasstub

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/saasstub/service"
	"github.com/sand-boxer/sandboxer/extensiontest"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/procs/procstest"
)

// TestMain makes the test binary the service, too.
func TestMain(m *testing.M) {
	if service.IsChild() {
		service.Main()
	}
	os.Exit(m.Run())
}

// opens opens the extension as a process of the broker does; the config is written as JSON, durations in nanoseconds.
func opens(t testing.TB, owner, dir, config string) *extension {
	t.Helper()
	x, err := Adapter.Open(t.Context(), sandboxer.Env{Extension: "ext.saas-stub", Owner: owner, Dir: dir, Notes: notes.New(dir, "ext.saas-stub", []byte("key")), Decode: func(v any) error {
		d := json.NewDecoder(bytes.NewReader([]byte(config)))
		d.DisallowUnknownFields()
		return d.Decode(v)
	}})
	if err != nil {
		t.Fatal(err)
	}
	return x.(*extension)
}

// home is the directory of an extension. The service that was started there is ended with the test.
func home(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	t.Cleanup(func() { kill(t, dir) })
	return dir
}

// direct reaches the service of dir around the adapter.
func direct(dir string) *hosted.Client {
	return &hosted.Client{Base: "http://stub", Refusals: refusals, Dial: service.Launcher{Dir: filepath.Join(dir, "service")}.Dial}
}

func pidOf(t testing.TB, dir string) int {
	t.Helper()
	h, err := hosted.Call[service.Health](context.WithoutCancel(t.Context()), direct(dir), http.MethodGet, "/v1/health", nil)
	if err != nil {
		t.Fatal(err)
	}
	return h.PID
}

// kill kills the service of dir, if it runs.
func kill(t testing.TB, dir string) {
	t.Helper()
	own := service.Launcher{Dir: filepath.Join(dir, "service")}
	if !own.Running(context.WithoutCancel(t.Context())) {
		return
	}
	pid := pidOf(t, dir)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("the service, process %d: %v", pid, err)
	}
	tick, late := time.NewTicker(time.Millisecond), time.After(time.Minute)
	defer tick.Stop()
	for own.Running(context.WithoutCancel(t.Context())) {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("the service, process %d, does not end", pid)
		}
	}
}

// elsewhere serves the service of dir at a URL of the loopback.
func elsewhere(t testing.TB, dir string, front func(http.Handler) http.Handler) string {
	t.Helper()
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "stub"})
	proxy.Transport = &http.Transport{DialContext: service.Launcher{Dir: filepath.Join(dir, "service")}.Dial, DisableKeepAlives: true}
	s := httptest.NewServer(front(proxy))
	t.Cleanup(s.Close)
	return s.URL
}

func same(h http.Handler) http.Handler { return h }

func order(id string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "test", Fuse: time.Now().Add(time.Hour), Inputs: map[string]string{inputNote: "of " + id}}
}

func wantKind(t testing.TB, what string, err error, kind sandboxer.Kind) {
	t.Helper()
	if sandboxer.KindOf(err) != kind {
		t.Errorf("%s: %v (%s); want %s", what, err, sandboxer.KindOf(err), kind)
	}
}

func TestConformance(t *testing.T) {
	dir := home(t)
	url := elsewhere(t, dir, same)
	extensiontest.Run(t, extensiontest.Harness{
		Open:         func(t *testing.T) sandboxer.Extension { return opens(t, "conformance", dir, `{"settle":0}`) },
		Stranger:     func(t *testing.T) sandboxer.Extension { return opens(t, "stranger", t.TempDir(), `{"url":"`+url+`"}`) },
		Inputs:       Adapter.Inputs,
		Want:         Adapter.Capabilities,
		MayRefuseEnv: true,
		Parallel:     4,
		Kill: func(t *testing.T, h sandboxer.Handle) {
			if _, err := hosted.Call[service.Sandbox](t.Context(), direct(dir), http.MethodDelete, at(h.Ref), nil); err != nil {
				t.Fatal(err)
			}
		},
		Hang: func(t *testing.T, _ sandboxer.Handle) func() {
			return procstest.Stop(t, pidOf(t, dir))
		},
	})
}
