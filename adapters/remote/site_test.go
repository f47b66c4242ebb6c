package remote

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/compattest"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// existing starts n servers that answer everything with status, and counts what they are asked.
func existing(t testing.TB, n, status int) (urls []string, asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	for range n {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			if status/100 == 3 {
				w.Header().Set("Location", "http://"+r.Host+"/elsewhere")
			}
			w.WriteHeader(status)
		}))
		t.Cleanup(s.Close)
		urls = append(urls, s.URL)
	}
	return urls, asked
}

func wantKind(t testing.TB, what string, err error, kind sandboxer.Kind) {
	t.Helper()
	if sandboxer.KindOf(err) != kind {
		t.Errorf("%s: got %v (%s); want %s", what, err, sandboxer.KindOf(err), kind)
	}
}

// refusal is what b's check says of spec.
func refusal(ctx context.Context, b *backend.Backend, spec sandboxer.Spec) error {
	_, err := b.Check(ctx, spec)
	return err
}

// opened is an extension behind a backend, closed when the test ends.
func opened(t testing.TB, dir string, config map[string]any) *backend.Backend {
	t.Helper()
	b := backend.New("ext.remote", mustOpen(t, "test", dir, config), backend.Options{Inputs: Adapter.Inputs, Close: time.Minute})
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func order(id string, inputs map[string]string) sandboxer.Spec {
	return sandboxer.Spec{ID: id, Generation: 1, Owner: "test", Inputs: inputs}
}

// A base is one sandbox's at a time, is found by another process, and is left as it is.
func TestURL(t *testing.T) {
	ctx := t.Context()
	urls, asked := existing(t, 2, http.StatusTeapot)
	dir := t.TempDir()
	config := map[string]any{"kind": "url", "bases": map[string]string{"a": urls[0] + "/", "b": urls[1] + "/below"}}
	b, other := opened(t, dir, config), opened(t, dir, config)

	h, err := b.Provision(ctx, order("one", map[string]string{"base": "b"}))
	if err != nil {
		t.Fatal(err)
	}
	if again, err := other.Provision(ctx, order("one", nil)); err != nil || again.Ref != h.Ref || h.Ref != urls[1]+"/below" {
		t.Errorf("provisioned again: %+v, %v; first %+v", again, err, h)
	}
	reach, err := other.WaitReady(ctx, h)
	if err != nil || reach.URL != urls[1]+"/below" || asked.Load() == 0 {
		t.Errorf("WaitReady = %+v, %v after %d requests", reach, err, asked.Load())
	}
	_, err = b.Provision(ctx, order("two", map[string]string{"base": "b"}))
	wantKind(t, "a base that is taken", err, sandboxer.Conflict)
	if h, err := b.Provision(ctx, order("two", nil)); err != nil || h.Ref != urls[0] {
		t.Errorf("any base = %+v, %v; want the free one", h, err)
	}
	_, err = b.Provision(ctx, order("three", nil))
	wantKind(t, "no base left", err, sandboxer.Exhausted)
	if c, err := b.Capacity(ctx, ""); err != nil || c.Free != 0 {
		t.Errorf("Capacity = %+v, %v; want none free", c, err)
	}

	if l, err := other.IsAlive(ctx, h); err != nil || l != sandboxer.Alive {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if f, err := other.Discover(ctx, "one"); err != nil || f.Handle.Ref != h.Ref {
		t.Errorf("Discover = %+v, %v", f, err)
	}
	var ids []string
	for h, err := range other.ListRunning(ctx, "test") {
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, h.SandboxID)
	}
	if !slices.Equal(ids, []string{"one", "two"}) {
		t.Errorf("listed: %q", ids)
	}

	late := order("one", nil)
	late.Generation = 2
	for range 2 {
		r, err := other.Teardown(ctx, sandboxer.Handle{SandboxID: "one", Generation: 1})
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Removed) > 0 {
			t.Errorf("torn down: %+v", r)
		}
		if len(r.Kept) > 0 && !strings.HasPrefix(r.Kept[0], h.Ref) {
			t.Errorf("what is kept: %q", r.Kept)
		}
		if _, err := b.Provision(ctx, late); err != nil { // a teardown of the first that comes again does not touch it
			t.Fatal(err)
		}
	}
	if l, err := b.IsAlive(ctx, h); err != nil || l != sandboxer.Gone {
		t.Errorf("IsAlive of the first generation = %s, %v; want gone", l, err)
	}
	if l, err := b.IsAlive(ctx, sandboxer.Handle{SandboxID: "one", Generation: 2}); err != nil || l != sandboxer.Alive {
		t.Errorf("IsAlive of the second = %s, %v; want alive", l, err)
	}
	for _, id := range []string{"one", "two"} {
		if _, err := b.Teardown(ctx, sandboxer.Handle{SandboxID: id}); err != nil {
			t.Error(err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "notes", "*.note")); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
}

// Of many who want the last base at once one gets it.
func TestOneBaseForMany(t *testing.T) {
	urls, _ := existing(t, 1, http.StatusOK)
	dir := t.TempDir()
	config := map[string]any{"kind": "url", "bases": map[string]string{"a": urls[0]}}
	var got atomic.Int64
	var wg sync.WaitGroup
	for _, id := range []string{"a", "b", "c", "d", "e", "f"} {
		b := opened(t, dir, config)
		wg.Go(func() {
			switch _, err := b.Provision(t.Context(), order(id, nil)); sandboxer.KindOf(err) {
			case "":
				got.Add(1)
			case sandboxer.Exhausted:
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got.Load() != 1 {
		t.Errorf("%d sandboxes have the one base", got.Load())
	}
}

// A request that something that exists already cannot provide is refused before it is lent.
func TestURLRefuses(t *testing.T) {
	urls, _ := existing(t, 1, http.StatusOK)
	dir := t.TempDir()
	b := opened(t, dir, map[string]any{"kind": "url", "bases": map[string]string{"a": urls[0]}})
	for what, change := range map[string]func(*sandboxer.Spec){
		"image":   func(s *sandboxer.Spec) { s.Image, s.Vouched = "x", []string{"image"} },
		"command": func(s *sandboxer.Spec) { s.Command = []string{"x"} },
		"env":     func(s *sandboxer.Spec) { s.Env = map[string]string{"TOKEN": "canary"} },
		"limits":  func(s *sandboxer.Spec) { s.Limits.PIDs = 5 },
		"network": func(s *sandboxer.Spec) { s.Network.Mode = sandboxer.NetworkNone },
		"mounts": func(s *sandboxer.Spec) {
			s.Mounts, s.Vouched = []sandboxer.Mount{{Source: "/tmp", Target: "/x"}}, []string{"mounts"}
		},
		"ports":     func(s *sandboxer.Spec) { s.Ports = []int{80} },
		"workspace": func(s *sandboxer.Spec) { s.Workspace = "/w" },
		"user":      func(s *sandboxer.Spec) { s.User = "ci" },
		"host":      func(s *sandboxer.Spec) { s.Host, s.Vouched = "h", []string{"host"} },
	} {
		spec := order("x", nil)
		change(&spec)
		wantKind(t, what+", checked", refusal(t.Context(), b, spec), sandboxer.Unsupported)
		_, err := b.Provision(t.Context(), spec)
		wantKind(t, what, err, sandboxer.Unsupported)
		if err != nil && strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: the error has a secret: %v", what, err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "notes", "*.note")); len(left) > 0 {
		t.Errorf("lent all the same: %q", left)
	}
}

// Callers name URLs below what is allowed, and administrators others, which lead to the public internet
// alone.
func TestURLOfTheCaller(t *testing.T) {
	ctx := t.Context()
	urls, asked := existing(t, 1, http.StatusOK)
	b := opened(t, t.TempDir(), map[string]any{"kind": "url", "allow": []string{urls[0] + "/ours"}})
	for text, kind := range map[string]sandboxer.Kind{
		urls[0] + "/ours":           "",
		urls[0] + "/ours/":          "",
		urls[0] + "/ours/a/b":       "",
		urls[0] + "/ours/../theirs": sandboxer.Denied,
		urls[0] + "/ours2":          sandboxer.Denied,
		urls[0]:                     sandboxer.Denied,
		strings.Replace(urls[0], "//", "//127.0.0.1@", 1) + "/ours": sandboxer.Denied,
		urls[0] + ".example/ours":                                   sandboxer.Denied,
		"https" + strings.TrimPrefix(urls[0], "http") + "/ours":     sandboxer.Denied,
		"http://169.254.169.254/ours":                               sandboxer.Denied,
		"//evil/ours":                                               sandboxer.Denied,
	} {
		spec := order("x", map[string]string{"url": text})
		wantKind(t, text, refusal(ctx, b, spec), kind)
		if kind == "" {
			if _, err := b.Provision(ctx, spec); err != nil {
				t.Errorf("%s: %v", text, err)
			}
			if _, err := b.WaitReady(ctx, sandboxer.Handle{SandboxID: "x", Generation: 1}); err != nil {
				t.Errorf("%s: %v", text, err)
			}
			if _, err := b.Teardown(ctx, sandboxer.Handle{SandboxID: "x"}); err != nil {
				t.Errorf("%s: %v", text, err)
			}
		}
	}
	before := asked.Load()
	for _, text := range []string{urls[0], strings.Replace(urls[0], "127.0.0.1", "localhost", 1), strings.Replace(urls[0], "127.0.0.1", "[::ffff:127.0.0.1]", 1)} {
		spec := order("y", map[string]string{"url": text})
		spec.Vouched = []string{"url"}
		h, err := b.Provision(ctx, spec)
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.WaitReady(ctx, h)
		wantKind(t, text+" of an administrator", err, sandboxer.Denied)
		_, err = b.DialURL(ctx, h)
		wantKind(t, text+" of an administrator, connected to", err, sandboxer.Denied)
		if l, err := b.IsAlive(ctx, h); l != sandboxer.Unknown || err == nil {
			t.Errorf("%s: IsAlive = %s, %v; want unknown", text, l, err)
		}
		if _, err := b.Teardown(ctx, h); err != nil {
			t.Error(err)
		}
	}
	if n := asked.Load() - before; n > 0 {
		t.Errorf("%d requests came to an address that is not public", n)
	}
}

func TestReach(t *testing.T) {
	for _, tt := range []struct {
		addr                   string
		public, named, written bool
	}{
		{"93.184.216.34", true, true, true},
		{"127.0.0.1", false, true, true},
		{"::1", false, true, true},
		{"10.0.0.1", false, true, true},
		{"::ffff:10.0.0.1", false, true, true},
		{"fd00::1", false, true, true},
		{"100.64.0.1", false, true, true},
		{"169.254.169.254", false, false, true},
		{"fe80::1", false, false, true},
		{"224.0.0.1", false, false, true},
		{"0.0.0.0", false, false, true},
	} {
		a := netip.MustParseAddr(tt.addr)
		if got := (reach{}).admits(a); got != tt.public {
			t.Errorf("%s, of nobody: %t", a, got)
		}
		if got := (reach{named: true}).admits(a); got != tt.named {
			t.Errorf("%s, behind a name of the configuration: %t", a, got)
		}
		if got := (reach{named: true, written: []netip.Addr{a.Unmap()}}).admits(a); got != tt.written {
			t.Errorf("%s, written in the configuration: %t", a, got)
		}
	}
}

// speaking returns the URL of a server that answers every caller with that, and closes the connection.
func speaking(t *testing.T, said string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, said)
			}
			c.Close()
		}
	}()
	return "http://" + l.Addr().String()
}

// A redirect is an answer, and not followed; silence ends in time and proves nothing.
func TestAnswers(t *testing.T) {
	ctx := t.Context()
	urls, asked := existing(t, 1, http.StatusFound)
	b := opened(t, t.TempDir(), map[string]any{"kind": "url", "bases": map[string]string{"here": urls[0]}})
	h, err := b.Provision(ctx, order("here", map[string]string{"base": "here"}))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.WaitReady(ctx, h); err != nil || asked.Load() != 1 {
		t.Errorf("WaitReady: %v after %d requests; want one", err, asked.Load())
	}
	b = opened(t, t.TempDir(), map[string]any{"kind": "url", "wait": 1_000_000_000, "bases": map[string]string{"away": "http://127.0.0.1:1"}})
	if h, err = b.Provision(ctx, order("away", map[string]string{"base": "away"})); err != nil {
		t.Fatal(err)
	}
	_, err = b.WaitReady(ctx, h)
	wantKind(t, "WaitReady of what does not answer", err, sandboxer.Unavailable)
	if said := sandboxer.Message(err); !strings.HasSuffix(said, "http://127.0.0.1:1 does not answer: it refused the connection") {
		t.Errorf("it says %q", said)
	}
	for said, want := range map[string]string{"": "it closed the connection", "\x1b[31mHTTP? no\n\n": "its answer is not HTTP, or is too long"} {
		u, err := url.Parse(speaking(t, said))
		if err != nil {
			t.Fatal(err)
		}
		_, err = ask(ctx, &http.Client{Transport: reach{named: true}.transport(nil)}, u)
		if got := sandboxer.Message(err); !strings.HasSuffix(got, " does not answer: "+want) {
			t.Errorf("of %q it says %q", said, got)
		}
	}
	if l, err := b.IsAlive(ctx, h); l != sandboxer.Unknown || err == nil {
		t.Errorf("IsAlive of what does not answer = %s, %v; want unknown", l, err)
	}
	_, err = b.WaitReady(ctx, sandboxer.Handle{SandboxID: "nobody", Generation: 1})
	wantKind(t, "WaitReady of the unknown", err, sandboxer.NotFound)
}

// What speaks the API of agent-infra's image is ready with exactly 200, below its own path, and not before.
func TestAIOReady(t *testing.T) {
	var asked atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method != http.MethodGet || r.URL.Path != "/s/1/v1/sandbox":
			w.WriteHeader(http.StatusOK) // which would be ready
			t.Errorf("%s %s", r.Method, r.URL)
		case asked.Add(1) < 4:
			w.WriteHeader([]int{http.StatusBadGateway, http.StatusNoContent, http.StatusMovedPermanently}[asked.Load()-1])
		}
	}))
	defer s.Close()
	b := opened(t, t.TempDir(), map[string]any{"kind": "aio", "bases": map[string]string{"a": s.URL + "/s/1"}})
	h, err := b.Provision(t.Context(), order("x", nil))
	if err != nil {
		t.Fatal(err)
	}
	if r, err := b.WaitReady(t.Context(), h); err != nil || r.URL != s.URL+"/s/1" || asked.Load() != 4 {
		t.Errorf("WaitReady = %+v, %v after %d requests; want it ready with the fourth", r, err, asked.Load())
	}
	if l, err := b.IsAlive(t.Context(), h); err != nil || l != sandboxer.Alive {
		t.Errorf("IsAlive = %s, %v", l, err)
	}
	if r, err := b.Teardown(t.Context(), h); err != nil || len(r.Kept) != 1 {
		t.Errorf("Teardown = %+v, %v", r, err)
	}

	never := httptest.NewServer(http.NotFoundHandler())
	defer never.Close()
	for wait := time.Second; ; wait *= 4 { // one answer has to come within it
		b = opened(t, t.TempDir(), map[string]any{"kind": "aio", "wait": wait, "bases": map[string]string{"a": never.URL}})
		if h, err = b.Provision(t.Context(), order("y", nil)); err != nil {
			t.Fatal(err)
		}
		_, err = b.WaitReady(t.Context(), h)
		wantKind(t, "WaitReady of something else", err, sandboxer.Unavailable)
		if err != nil && strings.Contains(sandboxer.Message(err), "answered 404 instead of 200") {
			break
		}
		if wait > time.Minute {
			t.Fatalf("it does not say what was answered: %v", err)
		}
	}
}

// Certificates are verified, by the authorities of ca where they are named.
func TestURLWithTLS(t *testing.T) {
	s := httptest.NewTLSServer(http.NotFoundHandler())
	defer s.Close()
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, certPEM(s.Certificate().Raw), 0o600); err != nil {
		t.Fatal(err)
	}
	config := map[string]any{"kind": "url", "wait": 1_000_000_000, "bases": map[string]string{"a": s.URL}}
	b := opened(t, filepath.Join(dir, "without"), config)
	h, err := b.Provision(t.Context(), order("x", nil))
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.WaitReady(t.Context(), h)
	wantKind(t, "a certificate of nobody", err, sandboxer.Unavailable)
	_, err = b.DialURL(t.Context(), h)
	wantKind(t, "a certificate of nobody, connected to", err, sandboxer.Unavailable)
	config["ca"] = ca
	delete(config, "wait")
	b = opened(t, filepath.Join(dir, "with"), config)
	if h, err = b.Provision(t.Context(), order("x", nil)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.WaitReady(t.Context(), h); err != nil {
		t.Error(err)
	}
}

// A profile that wants an answer at the URL gets it by the extension's authorities.
func TestReadyWithTLS(t *testing.T) {
	var asked atomic.Int64
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/below/healthz" {
			asked.Add(1)
			return
		}
		w.WriteHeader(http.StatusNotFound)
	}))
	defer s.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, certPEM(s.Certificate().Raw), 0o600); err != nil {
		t.Fatal(err)
	}
	b := opened(t, t.TempDir(), map[string]any{"kind": "url", "ca": ca, "bases": map[string]string{"a": s.URL + "/below"}})
	info := sandboxer.ExtensionInfo{ID: "ext.remote", Adapter: "remote", Isolation: Adapter.Isolation, Capabilities: b.Capabilities(), Inputs: Adapter.Inputs}
	r := edgetest.NewBroker(t, edgetest.BrokerOptions{
		More: []manager.Extension{{Info: info, Backend: b}},
		Profiles: []sandboxer.Profile{{ID: "profile.base", Extension: "ext.remote", TTL: time.Hour,
			Ready: sandboxer.ReadyCheck{HTTP: sandboxer.ReadyHTTP{Path: "/healthz"}, Timeout: time.Minute}}},
		Manager: manager.Options{Log: new(edgetest.Log).Logger()},
	})
	ctx := sandboxer.WithPrincipal(t.Context(), sandboxer.Principal{Tenant: "acme", Actor: "test", Scopes: []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite}})
	if sb, err := r.Manager.Create(ctx, sandboxer.CreateRequest{Profile: "profile.base"}); err != nil || sb.State != sandboxer.Running || asked.Load() == 0 {
		t.Errorf("created: %+v, %v; it was asked %d times", sb, err, asked.Load())
	}
}

func TestConfig(t *testing.T) {
	for what, config := range map[string]map[string]any{
		"no kind":              {},
		"another kind":         {"kind": "pigeon"},
		"url with a token":     {"kind": "url", "token": "x"},
		"url with a profile":   {"kind": "url", "profile": "x"},
		"sandboxer with bases": {"kind": "sandboxer", "url": "http://x", "profile": "p", "bases": map[string]string{"a": "http://x"}},
		"sandboxer, no url":    {"kind": "sandboxer", "profile": "p"},
		"no profile":           {"kind": "sandboxer", "url": "http://x"},
		"one base twice":       {"kind": "url", "bases": map[string]string{"a": "http://x", "b": "http://X:80/"}},
		"a base with a secret": {"kind": "url", "bases": map[string]string{"a": "http://me:canary@x"}},
		"a base with a query":  {"kind": "url", "bases": map[string]string{"a": "http://x/?token=canary"}},
		"allow of anything":    {"kind": "url", "allow": []string{"*"}},
		"an odd address":       {"kind": "sandboxer", "url": "ftp://x", "profile": "p"},
	} {
		_, err := opens(t.Context(), "test", t.TempDir(), config)
		wantKind(t, what, err, sandboxer.Invalid)
		if err != nil && strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: the error has a secret: %v", what, err)
		}
	}
	if _, err := opens(t.Context(), "test", t.TempDir(), map[string]any{"kind": "sandboxer", "url": "http://127.0.0.1:1", "profile": "p", "token": "canary"}); sandboxer.KindOf(err) != sandboxer.Unavailable || strings.Contains(err.Error(), "canary") {
		t.Errorf("an installation that is away: %v; want unavailable", err)
	}
}

func FuzzURL(f *testing.F) {
	for _, s := range []string{"http://x", "https://X.example:443/a/b/", "http://[::1]:80/a", "http://127.0.0.1", "http://0x7f.1/", "http://a/../b", "//x", "http://a:b@c/", "http://[fe80::1%25eth0]/"} {
		f.Add(s, "http://x/a")
	}
	f.Fuzz(func(t *testing.T, text, dir string) {
		u, err := parseURL(text)
		if err != nil {
			if sandboxer.KindOf(err) != sandboxer.Invalid {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		again, err := parseURL(u.String())
		if err != nil || *again != *u {
			t.Errorf("%q is %q, and that %v, %v", text, u, again, err)
		}
		d, err := parseURL(dir)
		if err != nil || !below(u, d) {
			return
		}
		if u.Host != d.Host || u.Scheme != d.Scheme || !strings.HasPrefix(u.Path+"/", d.Path+"/") || strings.Contains(u.Path, "..") && strings.Contains("/"+u.Path+"/", "/../") {
			t.Errorf("%q is below %q", u, d)
		}
	})
}

func FuzzLease(f *testing.F) {
	f.Add([]byte(`{"v":1,"id":"x","generation":1,"owner":"o","url":"http://x:80"}`))
	f.Add([]byte(`{"v":2,"id":"x"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := readLease(data)
		if err != nil {
			return
		}
		if sandboxer.CheckID(l.ID) != nil || l.Generation < 1 {
			t.Errorf("%q is believed: %+v", data, l)
		}
		out, err := l.encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := readLease(out); err != nil {
			t.Errorf("%q comes back as %q, which is not read: %v", data, out, err)
		}
	})
}

// What is kept of a sandbox of kind url.
func TestFormOfLease(t *testing.T) {
	compattest.CheckForm(t, "remote-lease", compattest.Shape("1", lease{}))
	compattest.CheckSamples(t, "remote-lease", lease{V: leaseVersion, ID: "x", Generation: 1, Owner: "o", URL: "http://x.example:80/a"},
		func(data []byte) (any, error) { return readLease(data) }, "stamp")
	for _, bad := range []string{`{"v":2}`, `{"v":1,"id":"../x","generation":1,"url":"http://x:80"}`, `{"v":1,"id":"x","generation":1,"url":"http://x"}`, `[`} {
		if _, err := readLease([]byte(bad)); err == nil {
			t.Errorf("%s is believed", bad)
		}
	}
}

// TestFormerLeases: what an earlier version lent stays lent. One damaged lease holds up what would lend, and the error
// names the file to remove.
func TestFormerLeases(t *testing.T) {
	urls, _ := existing(t, 2, http.StatusOK)
	dir := t.TempDir()
	config := map[string]any{"kind": "url", "bases": map[string]string{"a": urls[0], "b": urls[1]}}
	spec, other := order("x", nil), order("y", nil)
	former := func(name, text string) {
		t.Helper()
		d := filepath.Join(dir, formerDir)
		if err := errors.Join(os.MkdirAll(d, 0o700), os.WriteFile(filepath.Join(d, name), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	at, err := parseURL(urls[0])
	if err != nil {
		t.Fatal(err)
	}
	former("x.g1.json", fmt.Sprintf(`{"v":1,"id":"x","generation":1,"owner":%q,"url":%q}`, spec.Owner, at))
	for range 2 {
		b := opened(t, dir, config)
		if h, err := b.Provision(t.Context(), spec); err != nil || h.Ref != at.String() {
			t.Errorf("the lease of an earlier version: %+v, %v", h, err)
		}
		if h, err := b.Provision(t.Context(), other); err != nil || h.Ref == at.String() {
			t.Errorf("another lease: %+v, %v", h, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, formerDir)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the former directory: %v", err)
	}
	former("z.g1.json", "{")
	b := opened(t, dir, config)
	_, err = b.Provision(t.Context(), order("z", nil))
	wantKind(t, "Provision with a damaged lease", err, sandboxer.Unavailable)
	if !strings.Contains(sandboxer.HintOf(err), filepath.Join(dir, "notes", "z.g1.note")) {
		t.Errorf("the hint does not name the file: %v (%s)", err, sandboxer.HintOf(err))
	}
}
