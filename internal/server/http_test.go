package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/fake"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/backend"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/portproxy"
)

// rig is a server on the real manager, the real store and the fake backend, behind an
// edge with a Unix socket (whose client is the administrator), a TCP port and one with
// TLS.
type rig struct {
	testing.TB
	*edgetest.Server
	m     *edgetest.Broker
	e     *edge.Edge
	world *fake.World
	admin *api.Client
	tcp   string // http://127.0.0.1:port
	log   *edgetest.Log
	stop  func()
}

// setup is what a test changes about a rig.
type setup struct {
	opts                 Options
	edge                 edge.Options
	ports                *url.URL // names of ports are below it
	extend               func(*fake.Extension) sandboxer.Extension
	more                 []manager.Extension // besides ext.fake
	store                manager.SnapshotStore
	sinks                []sandboxer.Sink
	wentBack             time.Time // manager.Options.WentBack
	eventsKeepaliveEvery time.Duration
	keepaliveEvery       time.Duration
}

func newRig(t testing.TB, change ...func(*setup)) *rig {
	t.Helper()
	r := &rig{TB: t, log: &edgetest.Log{}}
	log := r.log.Logger()
	metrics := NewMetrics()
	set := setup{
		opts:                 Options{Version: "v0-test", Owner: "test", Data: "/data", Metrics: metrics},
		edge:                 edge.Options{Log: log, Drain: 5 * time.Second, Observe: metrics.Request},
		eventsKeepaliveEvery: 10 * time.Millisecond,
		keepaliveEvery:       30 * time.Second,
	}
	for _, f := range change {
		f(&set)
	}
	r.m = edgetest.NewBroker(t, edgetest.BrokerOptions{
		Backend: backend.Options{Observe: metrics.Observe}, Extend: set.extend, More: set.more,
		Profiles: []sandboxer.Profile{
			{ID: "profile.test", Title: "For tests", Extension: "ext.fake", TTL: 10 * time.Minute, MaxTTL: 2 * time.Hour, Env: map[string]string{"SECRET": "canary-profile"}},
			{ID: "profile.paid", Extension: "ext.fake", TTL: time.Hour, Price: sandboxer.Price{PerHour: 120_000}},
		},
		Manager: manager.Options{Log: log, OOMKilled: metrics.OOMKilled, SnapshotStore: set.store, Sinks: set.sinks, WentBack: set.wentBack},
	})
	r.world = r.m.World
	proxy := portproxy.New(r.m.Manager, set.ports)
	set.opts.PortURL = proxy.URL
	s := New(r.m.Manager, set.opts)
	s.eventsKeepaliveEvery, s.keepaliveEvery = set.eventsKeepaliveEvery, set.keepaliveEvery
	r.e = edge.New(r.m.Manager, set.edge)
	r.e.Mount(s.Door())
	r.e.Mount(proxy.Door())
	r.Server = edgetest.Serve(t, edgetest.Listen{Unix: edge.ListenUnix, TCP: edge.ListenTCP, TLS: edge.ListenTLS}, log, r.e.Serve)
	r.tcp = "http://" + r.TCP
	r.admin = r.client("unix://"+r.Unix, "")
	r.stop = sync.OnceFunc(func() {
		r.Stop()
		proxy.Close()
		r.m.Stop()
	})
	t.Cleanup(r.stop)
	return r
}

func (r *rig) client(url string, token sandboxer.Secret) *api.Client {
	r.Helper()
	return edgetest.Client(r, url, api.Options{Token: token})
}

// key makes an API key and a TCP client that uses it.
func (r *rig) key(tenant string, scopes ...sandboxer.Scope) (*api.CreatedKey, *api.Client) {
	r.Helper()
	k, err := r.admin.CreateKey(r.Context(), api.NewKey{Name: "test", Tenant: tenant, Scopes: scopes})
	if err != nil {
		r.Fatal(err)
	}
	return k, r.client(r.tcp, sandboxer.Secret(k.Token))
}

func (r *rig) create(c *api.Client, req api.CreateSandbox) *api.Sandbox {
	r.Helper()
	if req.Profile == "" {
		req.Profile = "profile.test"
	}
	sb, err := c.Create(r.Context(), req)
	if err != nil {
		r.Fatalf("create: %v", err)
	}
	return sb
}

// answered is an HTTP answer as a test looks at it.
type answered struct {
	status int
	header http.Header
	body   string
	api.Problem
}

var addresses atomic.Int64

// send makes one request on a connection of its own, from an address of its own: a
// failed login must not count against the next one.
func (r *rig) send(method, path, token, contentType, body string, header ...string) answered {
	r.Helper()
	req, err := http.NewRequestWithContext(r.Context(), method, r.tcp+path, strings.NewReader(body))
	if err != nil {
		r.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		} else {
			req.Header.Set(header[i], header[i+1])
		}
	}
	n := addresses.Add(1)
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, byte(1+n/250), byte(1+n%250))}}
	tr := &http.Transport{DialContext: d.DialContext}
	defer tr.CloseIdleConnections()
	resp, err := tr.RoundTrip(req)
	if err != nil {
		r.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	a := answered{status: resp.StatusCode, header: resp.Header}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return a
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.Fatal(err)
	}
	a.body = string(b)
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "application/problem+json") {
		if err := json.Unmarshal(b, &a.Problem); err != nil {
			r.Errorf("%s %s: %v in %s", method, path, err, b)
		}
		if a.Status != a.status || a.Code == "" || a.Detail == "" || a.Title == "" || a.Type == "" || a.RequestID != resp.Header.Get("X-Request-Id") {
			r.Errorf("%s %s: incomplete problem %s", method, path, b)
		}
	} else if a.status >= 400 {
		r.Errorf("%s %s: %d is not a problem: %s", method, path, a.status, b)
	}
	return a
}

// operation is one route of the description with a request that it accepts.
type operation struct {
	id, method, pattern string
	scope               sandboxer.Scope
	body                string // JSON
}

func operations(t *testing.T) []operation {
	t.Helper()
	var ops []operation
	for path, methods := range readDocument(t).Paths {
		for method, o := range methods {
			op := operation{id: o.OperationID, method: strings.ToUpper(method), pattern: path, scope: sandboxer.Scope(o.Scope)}
			if o.RequestBody != nil {
				if c, ok := o.RequestBody.Content["application/json"]; ok {
					b, err := json.Marshal(c.Example)
					if err != nil {
						t.Fatal(err)
					}
					op.body = string(b)
				}
			}
			ops = append(ops, op)
		}
	}
	slices.SortFunc(ops, func(a, b operation) int { return strings.Compare(a.id, b.id) })
	return ops
}

// path fills the pattern in; id is a sandbox.
func (o operation) path(id string) string {
	p := o.pattern
	switch {
	case strings.HasPrefix(p, "/v1/sandboxes/"):
		p = strings.Replace(p, "{id}", id, 1)
	case strings.HasPrefix(p, "/v1/profiles/"):
		p = strings.Replace(p, "{id}", "test", 1)
	case strings.HasPrefix(p, "/v1/extensions/"):
		p = strings.Replace(p, "{id}", "fake", 1)
	default:
		p = strings.Replace(p, "{id}", "nokey", 1)
	}
	p = strings.NewReplacer("{port}", "80", "{name}", "token", "{profile}", "test").Replace(p)
	if strings.Contains(p, "/files") && o.body == "" {
		p += "?path=/workspace"
	}
	return p
}

func (o operation) contentType() string {
	if o.body != "" {
		return "application/json"
	}
	return ""
}

func (o operation) upgrade() []string {
	protocol := ""
	switch o.id {
	case "execStream":
		protocol = api.ExecProtocol
	case "connectPort":
		protocol = api.PortProtocol
	case "connectAgent":
		protocol = api.AgentProtocol
	default:
		return nil
	}
	return []string{"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13",
		"Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol", protocol}
}

// Every route of the description refuses callers that may not use it, and reveals
// nothing by the way in which it refuses.
func TestAccessMatrix(t *testing.T) {
	r := newRig(t)
	_, acme := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	reader, _ := r.key("acme", sandboxer.ScopeRead)
	writer, _ := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	rival, _ := r.key("rival", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(acme, api.CreateSandbox{})
	stranger := "zzzzzzzz"
	// The same length as the real ID, so that bodies can be compared.
	same := func(a answered, id string) string {
		p := a.Problem
		p.RequestID = ""
		b, _ := json.Marshal(p)
		return strings.ReplaceAll(string(b), id, "ID")
	}
	id, secret := cutToken(t, writer.Token)
	bad := map[string]string{
		"no key":          "",
		"nonsense":        "nonsense",
		"unknown key":     "sbx_key_zzzzzzzz_" + secret,
		"wrong secret":    "sbx_key_" + id + "_" + strings.Repeat("0", len(secret)),
		"no secret":       "sbx_key_" + id + "_",
		"secret of other": "sbx_key_" + id + "_" + strings.TrimPrefix(rival.Token, "sbx_key_"),
	}
	for _, op := range operations(t) {
		t.Run(op.id, func(t *testing.T) {
			r := &rig{TB: t, tcp: r.tcp}
			path := op.path(sb.ID)
			refused := ""
			for name, token := range bad {
				a := r.send(op.method, path, token, op.contentType(), op.body, op.upgrade()...)
				if op.scope == "" {
					if a.status != 200 {
						t.Errorf("%s: %d", name, a.status)
					}
					continue
				}
				if a.status != 401 || a.Code != sandboxer.Unauthenticated || a.header.Get("WWW-Authenticate") == "" {
					t.Errorf("%s: %d %s", name, a.status, a.body)
				}
				if name == "no key" {
					continue
				}
				if got := same(a, sb.ID); refused == "" {
					refused = got
				} else if got != refused {
					t.Errorf("%s is told %s, another %s", name, got, refused)
				}
			}
			if op.scope == sandboxer.ScopeWrite || op.scope == sandboxer.ScopeAdmin {
				if a := r.send(op.method, path, reader.Token, op.contentType(), op.body, op.upgrade()...); a.status != 403 || a.Code != sandboxer.Denied {
					t.Errorf("read-only: %d %s", a.status, a.body)
				}
			} else if op.scope == sandboxer.ScopeRead {
				if a := r.send(op.method, path, reader.Token, op.contentType(), op.body); a.status == 401 || a.status == 403 || a.status >= 500 {
					t.Errorf("read-only: %d %s", a.status, a.body)
				}
			}
			if op.scope == sandboxer.ScopeAdmin {
				if a := r.send(op.method, path, writer.Token, op.contentType(), op.body); a.status != 403 {
					t.Errorf("not an administrator: %d %s", a.status, a.body)
				}
			}
			if !strings.HasPrefix(op.pattern, "/v1/sandboxes/") || op.id == "execStream" {
				return // the stream answers inside: TestExecOfOthers
			}
			other := r.send(op.method, path, rival.Token, op.contentType(), op.body, op.upgrade()...)
			nobody := r.send(op.method, op.path(stranger), rival.Token, op.contentType(), op.body, op.upgrade()...)
			status, code := 404, sandboxer.NotFound
			if op.scope == sandboxer.ScopeAdmin { // refused before anything is looked up
				status, code = 403, sandboxer.Denied
			}
			if other.status != status || other.Code != code {
				t.Errorf("other tenant: %d %s", other.status, other.body)
			}
			if a, b := same(other, sb.ID), same(nobody, stranger); a != b {
				t.Errorf("other tenant's sandbox answers %s, none at all %s", a, b)
			}
		})
	}
	// Nothing that was refused had an effect.
	now, err := acme.Get(t.Context(), sb.ID)
	if err != nil || now.State != sandboxer.Running || !now.ExpiresAt.Equal(sb.ExpiresAt) {
		t.Errorf("after all refusals the sandbox is %+v, %v", now, err)
	}
}

func cutToken(t *testing.T, token string) (id, secret string) {
	t.Helper()
	id, secret, ok := strings.Cut(strings.TrimPrefix(token, "sbx_key_"), "_")
	if !ok {
		t.Fatalf("the token is not of the form sbx_key_<id>_<secret>")
	}
	return id, secret
}

func TestExecOfOthers(t *testing.T) {
	r := newRig(t)
	_, acme := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	_, rival := r.key("rival", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(acme, api.CreateSandbox{})
	_, err := rival.Exec(t.Context(), sb.ID, sandboxer.Cmd{Args: []string{"true"}})
	_, err2 := rival.Exec(t.Context(), "zzzzzzzz", sandboxer.Cmd{Args: []string{"true"}})
	if !errors.Is(err, sandboxer.NotFound) || strings.ReplaceAll(sandboxer.Message(err), sb.ID, "zzzzzzzz") != sandboxer.Message(err2) {
		t.Errorf("another's sandbox: %v; none: %v", err, err2)
	}
}

// Whatever is wrong with a request is said in words that help, and nothing happens.
// upper writes the first field of a body in another case.
func upper(body string) string {
	i := strings.IndexByte(body, '"') + 1
	return body[:i] + strings.ToUpper(body[i:i+1]) + body[i+1:]
}

func TestBadInput(t *testing.T) {
	r := newRig(t)
	k, acme := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite, sandboxer.ScopeAdmin)
	sb := r.create(acme, api.CreateSandbox{})
	const jsonType = "application/json"

	t.Run("every body", func(t *testing.T) {
		r := &rig{TB: t, tcp: r.tcp}
		for _, op := range operations(t) {
			if op.body == "" {
				continue
			}
			path := op.path(sb.ID)
			unknown := `{"zzqqzz": 1, ` + strings.TrimPrefix(op.body, "{")
			for _, tt := range []struct {
				name, contentType, body string
				status                  int
				detail                  string
			}{
				{"not JSON", jsonType, `{"a": }`, 400, "the request body is not JSON: line 1, column 7"},
				{"a field twice", jsonType, `{"a": 1, "a": 2}`, 400, `the field "a" is given twice`},
				{"another case", jsonType, upper(op.body), 400, "unknown field"},
				{"nothing", jsonType, ``, 400, "the request has no body"},
				{"two documents", jsonType, op.body + op.body, 400, "the request body is not JSON"},
				{"a list", jsonType, `[]`, 400, "expected object"},
				{"unknown field", jsonType, unknown, 400, `unknown field "zzqqzz"`},
				{"a form", "application/x-www-form-urlencoded", op.body, 415, "must be JSON, not application/x-www-form-urlencoded"},
				{"no type", "", op.body, 415, "must be JSON, not no content type"},
				{"too large", jsonType, `{"x":"` + strings.Repeat("x", 1<<20) + `"}`, 413, "larger than 1048576 bytes"},
			} {
				a := r.send(op.method, path, k.Token, tt.contentType, tt.body)
				if a.status != tt.status || a.Code != sandboxer.Invalid || !strings.Contains(a.Detail, tt.detail) {
					t.Errorf("%s with %s: %d %q; want %d %q", op.id, tt.name, a.status, a.Detail, tt.status, tt.detail)
				}
			}
		}
	})
	t.Run("every path", func(t *testing.T) {
		r := &rig{TB: t, tcp: r.tcp}
		for _, op := range operations(t) {
			path := op.path(sb.ID)
			a := r.send("PATCH", path, k.Token, "", "")
			if a.status != 405 || a.Code != sandboxer.Invalid || !strings.Contains(a.header.Get("Allow"), op.method) || !strings.Contains(a.Detail, "has no method PATCH") {
				t.Errorf("PATCH %s: %d %q, Allow %q", path, a.status, a.Detail, a.header.Get("Allow"))
			}
			sep := "?"
			if strings.Contains(path, "?") {
				sep = "&"
			}
			a = r.send(op.method, path+sep+"zzqqzz=1", k.Token, op.contentType(), op.body, op.upgrade()...)
			if a.status != 400 || !strings.Contains(a.Detail, `"zzqqzz" is not a query parameter of `+op.method) {
				t.Errorf("%s %s with an unknown parameter: %d %q", op.method, path, a.status, a.Detail)
			}
		}
	})

	at := "/v1/sandboxes/" + sb.ID
	tests := []struct {
		method, path, body string
		status             int
		detail, hint       string
	}{
		{"POST", "/v1/sandboxes", `{"profil":"x"}`, 400, `expected required property profile to be present`, `did you mean "profile"?`},
		{"POST", "/v1/sandboxes", `{"profile":"test","limits":{"memory":1}}`, 400, `unknown field "limits.memory"`, `it has: disk_bytes, gpus, memory_bytes, milli_cpu, pids`},
		{"POST", "/v1/sandboxes", `{"profile":"test","mounts":[{"sorce":"/a","target":"/b"}]}`, 400, `unknown field "mounts[0].sorce"`, `did you mean "source"?`},
		{"POST", "/v1/sandboxes", `{"profile":7}`, 400, "profile: expected string", ""},
		{"POST", "/v1/sandboxes", `{"profile":"test","ttl":"soon"}`, 400, `"soon" is not a duration`, `write a number with a unit: "30m", "1h30m", "90s"`},
		{"POST", "/v1/sandboxes", `{"profile":"test","ttl":60}`, 400, "ttl: expected string", ""},
		{"POST", "/v1/sandboxes", `{"profile":"test","max_cost":"cheap"}`, 400, `"cheap" is not an amount of credits`, ""},
		{"POST", "/v1/sandboxes", `{"profile":"tset"}`, 400, `profile "tset" does not exist`, "profile.test"},
		{"POST", "/v1/sandboxes", `{"profile":"test","inputs":{"rope":"/x"}}`, 400, `"rope"`, "repo"},
		{"POST", "/v1/sandboxes", `{"profile":"test","ttl":"100h"}`, 400, "4d4h", ""},
		{"POST", "/v1/sandboxes", `{"profile":"paid"}`, 402, "", ""},
		{"POST", "/v1/plan", `{"profile":"tset"}`, 400, `profile "tset" does not exist`, ""},
		{"GET", "/v1/sandboxes?limit=abc", "", 400, `query parameter "limit": invalid integer`, ""},
		{"GET", "/v1/sandboxes?limit=5000", "", 400, `query parameter "limit": expected number <= 1000`, ""},
		{"GET", "/v1/sandboxes?state=runing", "", 400, `expected value to be one of`, ""},
		{"GET", "/v1/sandboxes?label=x", "", 400, `the label "x" is not of the form key=value`, ""},
		{"GET", "/v1/sandboxes?cursor=zzz", "", 400, `cursor`, ""},
		{"GET", "/v1/sandboxes?profil=x", "", 400, `"profil" is not a query parameter of GET /v1/sandboxes`, `did you mean "profile"?`},
		{"GET", "/v1/sandboxes?thread=a&thread=b", "", 400, `the query parameter "thread" is given 2 times, and takes one value`, ""},
		{"GET", "/v1/sandboxes?thread_user=a", "", 400, `thread_user is given without a thread`, ""},
		{"GET", "/v1/sandboxes/zzzzzzzz", "", 404, `"zzzzzzzz"`, ""},
		{"GET", "/v1/sandboxes/" + strings.Repeat("z", 300), "", 400, `path parameter "id": expected length <= 256`, ""},
		{"GET", at + "?wait=gone", "", 400, `expected value to be one of`, ""},
		{"GET", at + "?wait=running&timeout=1d", "", 400, `"1d" is not a duration`, ""},
		{"GET", at + "?wait=running&timeout=1h", "", 400, "timeout is 1h0m0s; want more than 0 and at most 5m0s", ""},
		{"DELETE", at + "?wait=perhaps", "", 400, `query parameter "wait": invalid boolean`, ""},
		{"POST", at + "/extend", `{}`, 400, "", ""},
		{"POST", at + "/extend", `{"ttl":"1h","add":"1h"}`, 400, "", ""},
		{"POST", at + "/extend", `{"ttl":"999h"}`, 400, "999h", ""},
		{"POST", at + "/exec", `{"args":[]}`, 400, "args: expected array length >= 1", ""},
		{"POST", at + "/exec", `{"args":["true"],"timeout":"2h"}`, 400, "timeout is 2h0m0s; want more than 0 and at most 1h0m0s", ""},
		{"POST", at + "/exec", `{"args":["true"],"max_output":99999999}`, 400, "max_output is 99999999; want 1 to 16777216 bytes", "sandboxer exec"},
		{"POST", at + "/exec", `{"args":["true"],"stdin":"a","stdin_base64":"YQ=="}`, 400, "stdin and stdin_base64 are both given", ""},
		{"POST", at + "/exec", `{"args":["true"],"stdin_base64":"!"}`, 400, "stdin_base64: expected string to be base64 encoded", ""},
		{"POST", at + "/exec", `{"args":["true"],"dir":"x"}`, 400, `"x" is not absolute`, ""},
		{"GET", at + "/exec", "", 426, "this is a WebSocket and needs an upgrade", "use POST for an answer in one piece"},
		{"GET", at + "/files", "", 400, `the query parameter "path" is missing`, ""},
		{"GET", at + "/files?path=etc", "", 400, `"etc" is not a clean absolute path`, ""},
		{"GET", at + "/files?path=/workspace", "", 400, "/workspace is not a regular file", ""},
		{"GET", at + "/files?path=/workspace/none", "", 404, "none", ""},
		{"PUT", at + "/files?path=/workspace/f&mode=rw", "", 400, `"rw" is not a file mode`, "write permission bits in octal: 0644"},
		{"PUT", at + "/files?path=/workspace/../f", "", 400, "is not a clean absolute path", ""},
		{"DELETE", at + "/files?path=x", "", 400, `"x" is not a clean absolute path`, ""},
		{"GET", at + "/files/stat?path=/workspace/none", "", 404, "none", ""},
		{"GET", at + "/files/list?path=/workspace/none", "", 404, "none", ""},
		{"POST", at + "/files/mkdir", `{"path":"x"}`, 400, `"x" is not a clean absolute path`, ""},
		{"POST", at + "/files/move", `{"from":"/workspace/none","to":"/workspace/x"}`, 404, "none", ""},
		{"GET", at + "/ports/0/connect", "", 400, `path parameter "port": expected number >= 1`, ""},
		{"GET", at + "/ports/ssh/connect", "", 400, `path parameter "port": invalid integer`, ""},
		{"GET", at + "/ports/22/connect", "", 426, "this is a WebSocket and needs an upgrade", ""},
		{"GET", at + "/events?after=-1", "", 400, `query parameter "after": expected number >= 0`, ""},
		{"GET", "/v1/events?after=x", "", 400, `query parameter "after": invalid integer`, ""},
		{"GET", "/v1/profiles/tset", "", 404, `profile "tset" does not exist`, `did you mean "profile.test"?`},
		{"POST", "/v1/extensions/none/probe", "", 404, `"none"`, ""},
		{"POST", "/v1/pools/tset/drain", "", 404, `profile "tset" does not exist`, "profile.test"},
		{"POST", "/v1/pools/paid/drain", "", 400, "profile profile.paid keeps no pool", "sandboxer pool ls"},
		{"POST", "/v1/keys", `{"name":"x","scopes":[]}`, 400, "scopes: expected array length >= 1", ""},
		{"POST", "/v1/keys", `{"name":"x","scopes":["root"]}`, 400, `scopes[0]: expected value to be one of "read, write, admin"`, ""},
		{"DELETE", "/v1/keys/zzzzzzzz", "", 404, `"zzzzzzzz"`, ""},
		{"POST", "/v1/credits/grants", `{"tenant":"acme","amount":"x","key":"k"}`, 400, `"x" is not an amount of credits`, ""},
		{"GET", "/v1/credits/entries?cursor=zzz", "", 400, "cursor", ""},
		{"GET", "/v1/nothing", "", 404, "there is nothing at /v1/nothing", "/openapi.yaml"},
		{"GET", "/", "", 404, "there is nothing at /", ""},
	}
	for _, tt := range tests {
		t.Run(tt.method+" "+tt.path+" "+tt.body, func(t *testing.T) {
			r := &rig{TB: t, tcp: r.tcp}
			ct := ""
			if tt.body != "" {
				ct = jsonType
			}
			a := r.send(tt.method, tt.path, k.Token, ct, tt.body)
			if a.status != tt.status || !strings.Contains(a.Detail, tt.detail) || !strings.Contains(a.Hint+a.Detail, tt.hint) ||
				a.Hint == "" && !strings.Contains(a.Detail, "/workspace/none does not exist") && !strings.Contains(a.Detail, "/workspace is not a regular file") { // those say all
				t.Errorf("%d %q (%q); want %d %q (%q)", a.status, a.Detail, a.Hint, tt.status, tt.detail, tt.hint)
			}
		})
	}
	l, err := r.admin.List(t.Context(), api.SandboxQuery{})
	if err != nil || len(l.Items) != 1 || l.Items[0].Version != sb.Version {
		t.Errorf("after only bad requests there is %+v, %v", l, err)
	}
}

// TestHints: a refusal says how to avoid it. TestBadInput has the faults of one request.
func TestHints(t *testing.T) {
	const jsonType = "application/json"
	r := newRig(t)
	r.m.SetQuotas(sandboxer.Quotas{Tenants: map[string]sandboxer.Quota{
		"full": {sandboxer.QuotaSandboxes: 0}, "disk": {sandboxer.QuotaDisk: 1}, "slow": {sandboxer.QuotaRequests: 0},
	}})
	token := func(tenant string, scopes ...sandboxer.Scope) string {
		k, _ := r.key(tenant, scopes...)
		return k.Token
	}
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(c, api.CreateSandbox{Name: "taken"})
	at := "/v1/sandboxes/" + sb.ID
	reader := token("acme", sandboxer.ScopeRead)
	rw := []sandboxer.Scope{sandboxer.ScopeRead, sandboxer.ScopeWrite}
	check := func(method, path, token, contentType, body string, status int, header ...string) {
		t.Helper()
		a := r.send(method, path, token, contentType, body, header...)
		if a.status != status || a.Detail == "" || a.Hint == "" {
			t.Errorf("%s %s %.60s: %d %q (%q); want %d and a hint", method, path, body, a.status, a.Detail, a.Hint, status)
		}
	}
	post := func(path, body string, status int) {
		t.Helper()
		check("POST", path, k.Token, jsonType, body, status)
	}
	for _, body := range []string{
		`{"profile":"test","ttl":"-1m"}`, `{"profile":"test","ttl":"1ms"}`, `{"profile":"test","idle":"1ms"}`, `{"profile":"test","on_ttl":"vanish"}`,
		`{"profile":"test","on_idle":"pause"}`, `{"profile":"test","name":"A B"}`, `{"profile":"test","env":{"A=":"b"}}`, `{"profile":"test","labels":{"":"b"}}`,
		`{"profile":"test","max_cost":"-1"}`, `{"profile":"test","network":{"mode":"some"}}`, `{"profile":"test","limits":{"pids":-1}}`, `{"profile":"test"`, `{"profile":"test","profile":"test"}`,
		`{"profile":"test","sandbox_id":"x"}`, `{"profile":"test","thread":{"user":"u"}}`, `{"profile":"test","mounts":[{"source":"a","target":"/b"}]}`, ``,
	} {
		post("/v1/sandboxes", body, 400)
	}
	check("POST", "/v1/sandboxes", k.Token, jsonType, `{"profile":"test"}`, 400, "Idempotency-Key", strings.Repeat("k", 300))
	check("POST", "/v1/sandboxes", k.Token, "text/plain", `{"profile":"test"}`, 415)
	post("/v1/sandboxes", `{"profile":"test","name":"taken"}`, 409)
	post("/v1/sandboxes", `{"profile":"test","name":"`+strings.Repeat("x", maxJSON)+`"}`, 413)
	check("POST", "/v1/sandboxes", reader, jsonType, `{"profile":"test"}`, 403)
	check("POST", "/v1/keys", k.Token, jsonType, `{"name":"x","scopes":["read"]}`, 403)
	check("GET", "/v1/quotas?tenant=other", k.Token, "", "", 403)
	check("GET", "/v1/sandboxes", "", "", "", 401)
	check("GET", "/v1/sandboxes", "sbx_key_none", "", "", 401)
	check("GET", "/v1/sandboxes", "", "", "", 401, "Authorization", "Basic eDp5")
	check("PATCH", "/v1/sandboxes", k.Token, "", "", 405)
	check("POST", "/v1/sandboxes", token("full", rw...), jsonType, `{"profile":"test"}`, 429)
	check("POST", "/v1/sandboxes", token("disk", rw...), jsonType, `{"profile":"test","limits":{"disk_bytes":2}}`, 429)
	check("GET", "/v1/sandboxes", token("slow", rw...), "", "", 429)
	for _, p := range []string{at + "/events?limit=0x", at + "/files/list?path=/workspace&cursor=!", "/v1/snapshots?cursor=!", "/v1/events?limit=99999"} {
		check("GET", p, k.Token, "", "", 400)
	}
	post(at+"/ports/4000/url", `{"ttl":"-1h"}`, 400)
	post(at+"/pause", `{"depth":"deep"}`, 400)
	if _, err := c.Pause(t.Context(), sb.ID, api.PauseSandbox{Depth: sandboxer.PauseFiles}); err != nil {
		t.Fatal(err)
	}
	post(at+"/pause", `{"depth":"disk"}`, 409)
	post(at+"/exec", `{"args":["true"]}`, 409)
	check("PUT", at+"/files?path=/workspace/f", k.Token, "", "x", 409)
	post(at+"/snapshots", `{}`, 409)
}

// TestKeysOfFailures: retryable says whether the same request, under the same key, may succeed: a failure that may pass
// frees its key, another one is repeated as it was.
func TestKeysOfFailures(t *testing.T) {
	r := newRig(t)
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(c, api.CreateSandbox{})
	snap, err := c.Snapshot(t.Context(), sb.ID, api.CreateSnapshot{})
	if err != nil {
		t.Fatal(err)
	}
	for _, route := range []struct {
		path, body string
		verb       fake.Verb
	}{
		{"/v1/sandboxes", `{"profile":"test"}`, fake.VerbProvision},
		{"/v1/snapshots/" + snap.ID + "/restore", `{"labels":{}}`, fake.VerbRestore},
		{"/v1/sandboxes/" + sb.ID + "/fork", `{"count":1}`, fake.VerbRestore},
	} {
		for kind, status := range map[sandboxer.Kind]int{sandboxer.Unavailable: 503, sandboxer.Timeout: 504, sandboxer.Exhausted: 429, sandboxer.Failed: 422} {
			ask := func() answered {
				return r.send("POST", route.path, k.Token, "application/json", route.body, "Idempotency-Key", string(route.verb)+"-"+route.body[2:6]+"-"+string(kind))
			}
			passes := kind != sandboxer.Failed
			r.world.Inject(fake.Fault{Verb: route.verb, Kind: kind, Times: 1})
			if a := ask(); a.status != status || a.Retryable != passes {
				t.Errorf("%s after %s: %d, retryable %v (%s)", route.path, kind, a.status, a.Retryable, a.Detail)
			}
			a := ask()
			for deadline := time.Now().Add(time.Minute); passes && a.status >= 400 && a.Retryable && time.Now().Before(deadline); a = ask() {
				time.Sleep(10 * time.Millisecond) // what failed is still being removed
			}
			if passes != (a.status < 300) || !passes && (a.status < 400 || a.Retryable) {
				t.Errorf("%s again after %s: %d, retryable %v (%s)", route.path, kind, a.status, a.Retryable, a.Detail)
			}
		}
	}
}

// What the server has for an error, the client gives back.
// A bug in a handler is answered, too.
func TestPanicIsAnInternalError(t *testing.T) {
	r := newRig(t)
	e := edge.New(r.m, edge.Options{})
	e.Mount(New(nil, Options{}).Door()) // without a manager every handler panics
	ts := httptest.NewServer(e.Handler())
	defer ts.Close()
	k, _ := r.key("acme", sandboxer.ScopeRead)
	if _, err := r.client(ts.URL, sandboxer.Secret(k.Token)).Stats(t.Context(), "x"); !errors.Is(err, sandboxer.Internal) {
		t.Errorf("error %v", err)
	}
}

func TestSandboxLife(t *testing.T) {
	r := newRig(t)
	_, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	ctx := t.Context()

	plan, err := c.Plan(ctx, api.CreateSandbox{Profile: "test", TTL: time.Hour, Env: map[string]string{"TOKEN": "canary-plan"}})
	if err != nil || plan.Extension != "ext.fake" || plan.TTL.Std() != time.Hour || !slices.Contains(plan.Env, "TOKEN") {
		t.Fatalf("plan %+v, %v", plan, err)
	}
	if len(r.world.Live()) != 0 {
		t.Error("planning made something")
	}

	req := api.CreateSandbox{Profile: "test", Name: "build", Labels: map[string]string{"a": "b"}, Env: map[string]string{"TOKEN": "canary-env"}, Key: "once"}
	sb := r.create(c, req)
	if sb.State != sandboxer.Running || sb.Name != "build" || sb.Tenant != "acme" || sb.SchemaVersion != 1 {
		t.Fatalf("created %+v", sb)
	}
	if b, _ := json.Marshal(sb); bytes.Contains(b, []byte("canary")) {
		t.Errorf("a value of the environment came back: %s", b)
	}
	if again := r.create(c, req); again.ID != sb.ID || again.Generation != sb.Generation {
		t.Errorf("the same key made %s and %s", sb.ID, again.ID)
	}
	req.Name = "other"
	if _, err := c.Create(ctx, req); !errors.Is(err, sandboxer.Conflict) {
		t.Errorf("another body under the same key: %v", err)
	}

	for _, ref := range []string{sb.ID, sb.ID[:5], "build"} {
		if got, err := c.Get(ctx, ref); err != nil || got.ID != sb.ID {
			t.Errorf("get %s: %+v, %v", ref, got, err)
		}
	}
	for name, q := range map[string]struct {
		q    api.SandboxQuery
		want int
	}{
		"all":           {api.SandboxQuery{}, 1},
		"profile":       {api.SandboxQuery{Profile: "test"}, 1},
		"other profile": {api.SandboxQuery{Profile: "profile.paid"}, 0},
		"state":         {api.SandboxQuery{States: []sandboxer.State{sandboxer.Creating, sandboxer.Running}}, 1},
		"other state":   {api.SandboxQuery{States: []sandboxer.State{sandboxer.Terminated}}, 0},
		"label":         {api.SandboxQuery{Labels: map[string]string{"a": "b"}}, 1},
		"other label":   {api.SandboxQuery{Labels: map[string]string{"a": "c"}}, 0},
		"name":          {api.SandboxQuery{Name: "build"}, 1},
	} {
		if l, err := c.List(ctx, q.q); err != nil || len(l.Items) != q.want {
			t.Errorf("list by %s: %+v, %v", name, l, err)
		}
	}

	longer, err := c.Extend(ctx, "build", api.ExtendSandbox{Add: time.Minute})
	if err != nil || !longer.ExpiresAt.Equal(sb.ExpiresAt.Add(time.Minute)) {
		t.Errorf("extended to %+v, %v", longer, err)
	}
	if st, err := c.Stats(ctx, sb.ID); err != nil || st.At.IsZero() {
		t.Errorf("stats %+v, %v", st, err)
	}

	// No caller waits: 202, then it runs, then 202 again, then it is gone.
	a := r.send("POST", "/v1/sandboxes", tokenOf(r), "application/json", `{"profile":"test"}`, "Prefer", "respond-async")
	var async api.Sandbox
	if err := json.Unmarshal([]byte(a.body), &async); err != nil || a.status != 202 && a.status != 201 ||
		a.header.Get("Location") != "/v1/sandboxes/"+async.ID || a.header.Get("Preference-Applied") != "respond-async" {
		t.Errorf("respond-async: %d %v %s", a.status, a.header, a.body)
	}
	if got, err := r.admin.Wait(ctx, async.ID, sandboxer.Running); err != nil || got.State != sandboxer.Running {
		t.Errorf("waited for %+v, %v", got, err)
	}
	r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, ID: async.ID, Delay: 100 * time.Millisecond, Times: 1})
	if got, err := r.admin.Destroy(ctx, async.ID, false); err != nil || got.State == sandboxer.Running {
		t.Errorf("destroying without waiting: %+v, %v", got, err)
	}
	if _, err := r.admin.Wait(ctx, async.ID, sandboxer.Terminated); err != nil {
		t.Error(err)
	}

	// A teardown that has to be repeated is accepted, and says so.
	r.world.Inject(fake.Fault{Verb: fake.VerbTeardown, ID: sb.ID, Kind: sandboxer.Unavailable, Times: 1})
	got, err := c.Destroy(ctx, sb.ID, true)
	if !errors.Is(err, sandboxer.Unavailable) || got == nil || got.State != sandboxer.Terminating {
		t.Errorf("a failing teardown: %+v, %v", got, err)
	}
	for range 2 {
		if got, err := c.Destroy(ctx, sb.ID, true); err != nil || got.State != sandboxer.Terminated {
			t.Errorf("destroyed %+v, %v", got, err)
		}
	}
	if live := r.world.Live(); len(live) != 0 {
		t.Errorf("left over: %+v", live)
	}
}

func tokenOf(r *rig) string {
	k, _ := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	return k.Token
}

// A client that hangs up in the middle of a create strands nothing.
func TestHangUpDuringCreate(t *testing.T) {
	r := newRig(t)
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Delay: 2 * time.Second, Times: 1})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := r.admin.Create(ctx, api.CreateSandbox{Profile: "test", Name: "late", Key: "k"})
		done <- err
	}()
	edgetest.Poll(t, "the record", func() bool {
		l, err := r.admin.List(t.Context(), api.SandboxQuery{Name: "late"})
		return err == nil && len(l.Items) == 1
	})
	cancel()
	if err := edgetest.Receive(t, done, "the end"); sandboxer.KindOf(err) != sandboxer.Canceled {
		t.Errorf("the client is told %v", err)
	}
	sb, err := r.admin.Wait(t.Context(), "late", sandboxer.Running)
	if err != nil || sb.State != sandboxer.Running {
		t.Fatalf("%+v, %v", sb, err)
	}
	again := r.create(r.admin, api.CreateSandbox{Profile: "test", Name: "late", Key: "k"})
	if again.ID != sb.ID {
		t.Errorf("the same key found %s, not %s", again.ID, sb.ID)
	}
}

func TestExecOnFake(t *testing.T) {
	r := newRig(t)
	_, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(c, api.CreateSandbox{Env: map[string]string{"FROM": "create"}})
	ctx := t.Context()
	sh := func(script string) []string { return []string{"sh", "-c", script} }

	t.Run("streams", func(t *testing.T) {
		var out, errs bytes.Buffer
		exit, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: sh(`echo "$FROM $HERE"; cat; echo oops >&2; exit 43`), Env: map[string]string{"HERE": "exec"},
			Stdin: strings.NewReader("in"), Stdout: &out, Stderr: &errs})
		if err != nil || exit.Code != 43 || out.String() != "create exec\nin" || errs.String() != "oops\n" {
			t.Errorf("exit %+v, %v, %q, %q", exit, err, out.String(), errs.String())
		}
	})
	t.Run("stdin left open", func(t *testing.T) {
		pr, pw := io.Pipe()
		defer pw.Close()
		if exit, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: []string{"true"}, Stdin: pr}); err != nil || exit.Code != 0 {
			t.Errorf("exit %+v, %v", exit, err)
		}
	})
	t.Run("missing command", func(t *testing.T) {
		if exit, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: []string{"no-such-command"}}); err != nil || exit.Code != 127 {
			t.Errorf("exit %+v, %v", exit, err)
		}
	})
	t.Run("terminal", func(t *testing.T) {
		resize := make(chan sandboxer.WinSize, 1)
		pr, pw := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			_, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: sh(`stty size; trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done`),
				TTY: &sandboxer.WinSize{Cols: 91, Rows: 33}, Stdout: pw, Resize: resize})
			pw.CloseWithError(io.EOF)
			ended <- err
		}()
		var got []string
		lines := make(chan string)
		go func() {
			defer close(lines)
			var b []byte
			p := make([]byte, 1)
			for {
				if _, err := pr.Read(p); err != nil {
					return
				}
				if p[0] == '\n' {
					lines <- strings.TrimSpace(string(b))
					b = nil
					continue
				}
				b = append(b, p[0])
			}
		}()
		for line := range lines {
			got = append(got, line)
			if line == "ready" {
				resize <- sandboxer.WinSize{Cols: 120, Rows: 40}
			}
		}
		if err := edgetest.Receive(t, ended, "the end"); err != nil || strings.Join(got, ",") != "33 91,ready,40 120" {
			t.Errorf("the terminal showed %q, %v", got, err)
		}
	})
	t.Run("signal", func(t *testing.T) {
		signals := make(chan os.Signal, 1)
		w := writeFunc(func(p []byte) (int, error) { signals <- syscall.SIGTERM; return len(p), nil })
		exit, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: sh(`echo ready; exec sleep 600`), Stdout: w, Signals: signals})
		if err != nil || exit.Code != 143 || exit.Signal != "TERM" {
			t.Errorf("exit %+v, %v", exit, err)
		}
	})
	t.Run("64 MB", func(t *testing.T) {
		var n int64
		exit, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: []string{"head", "-c", "67108864", "/dev/zero"},
			Stdout: writeFunc(func(p []byte) (int, error) { n += int64(len(p)); return len(p), nil })})
		if err != nil || exit.Code != 0 || n != 64<<20 {
			t.Errorf("exit %+v, %v after %d bytes", exit, err, n)
		}
	})
	t.Run("disconnect kills", func(t *testing.T) {
		ctx, cancel := context.WithCancel(ctx)
		pid := make(chan string, 1)
		w := writeFunc(func(p []byte) (int, error) { pid <- strings.TrimSpace(string(p)); return len(p), nil })
		done := make(chan error, 1)
		go func() {
			_, err := c.Exec(ctx, sb.ID, sandboxer.Cmd{Args: sh(`echo $$; exec sleep 600`), Stdout: w})
			done <- err
		}()
		proc := "/proc/" + edgetest.Receive(t, pid, "the process ID")
		if _, err := os.Stat(proc); err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := edgetest.Receive(t, done, "the end"); sandboxer.KindOf(err) != sandboxer.Canceled {
			t.Errorf("error %v", err)
		}
		edgetest.Poll(t, "the end of the process", func() bool { _, err := os.Stat(proc); return err != nil })
	})

	t.Run("in one piece", func(t *testing.T) {
		got, err := c.Run(ctx, sb.ID, api.Exec{Args: sh(`cat; printf '\377' >&2; exit 3`), Stdin: "hello"})
		if err != nil || got.Code != 3 || got.Stdout != "hello" || got.Stderr != "" || !bytes.Equal(got.StderrBase64, []byte{0xff}) || got.Took <= 0 {
			t.Errorf("%+v, %v", got, err)
		}
		got, err = c.Run(ctx, sb.ID, api.Exec{Args: sh(`printf 'ééé'; echo e >&2`), MaxOutput: 3})
		if err != nil || got.Stdout != "é" || !got.StdoutTruncated || got.Stderr != "e\n" || got.StderrTruncated {
			t.Errorf("%+v, %v", got, err)
		}
		// Until there is time enough to begin.
		for limit := 300 * time.Millisecond; limit < 20*time.Second; limit *= 2 {
			got, err = c.Run(ctx, sb.ID, api.Exec{Args: sh(`echo begun; sleep 600`), Timeout: api.Duration(limit)})
			if err != nil || got.Stdout != "" {
				break
			}
		}
		if err != nil || !got.TimedOut || got.Code != 137 || got.Stdout != "begun\n" {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

func TestFilesOnFake(t *testing.T) {
	r := newRig(t)
	_, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(c, api.CreateSandbox{})
	ctx := t.Context()
	want := make([]byte, 5<<20)
	io.ReadFull(pattern(), want)
	if err := c.WriteFile(ctx, sb.ID, "/workspace/d/ü &?.bin", 0o750, bytes.NewReader(want)); err != nil {
		t.Fatal(err)
	}
	f, err := c.ReadFile(ctx, sb.ID, "/workspace/d/ü &?.bin")
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(f)
	f.Close()
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes came back, %v", len(got), err)
	}
	fi, err := c.StatFile(ctx, sb.ID, "/workspace/d/ü &?.bin")
	if err != nil || fi.Size != int64(len(want)) || fi.Mode != "0750" || fi.Type != api.TypeFile || fi.FileMode() != 0o750 {
		t.Errorf("stat %+v, %v", fi, err)
	}
	if err := c.WriteFile(ctx, sb.ID, "/workspace/empty", 0, strings.NewReader("")); err != nil {
		t.Error(err)
	}
	if f, err := c.ReadFile(ctx, sb.ID, "/workspace/empty"); err != nil {
		t.Error(err)
	} else if b, err := io.ReadAll(f); len(b) > 0 || err != nil {
		t.Errorf("the empty file holds %q, %v", b, err)
	}
	if err := c.MakeDir(ctx, sb.ID, "/workspace/many"); err != nil {
		t.Fatal(err)
	}
	for i := range 7 {
		if err := c.WriteFile(ctx, sb.ID, fmt.Sprintf("/workspace/many/f%d", i), 0, strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
	}
	// In pages of 3, each named once and in order.
	var names []string
	cursor, pages := "", 0
	for {
		var l api.List[api.FileInfo]
		a := r.send("GET", "/v1/sandboxes/"+sb.ID+"/files/list?path=/workspace/many&limit=3&cursor="+cursor, tokenOf(r), "", "")
		if err := json.Unmarshal([]byte(a.body), &l); err != nil || a.status != 200 {
			t.Fatal(a.status, a.body)
		}
		pages++
		for _, fi := range l.Items {
			names = append(names, filepath.Base(fi.Path))
		}
		if cursor = l.NextCursor; cursor == "" {
			break
		}
	}
	if strings.Join(names, " ") != "f0 f1 f2 f3 f4 f5 f6" || pages != 3 {
		t.Errorf("%d pages: %q", pages, names)
	}
	n := 0
	for _, err := range c.ListFiles(ctx, sb.ID, "/workspace/many") {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	if n != 7 {
		t.Errorf("the client listed %d files", n)
	}
	if err := c.MoveFile(ctx, sb.ID, "/workspace/many", "/workspace/moved"); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := c.RemoveFile(ctx, sb.ID, "/workspace/moved"); err != nil {
			t.Error(err)
		}
	}
	if _, err := c.StatFile(ctx, sb.ID, "/workspace/moved/f0"); !errors.Is(err, sandboxer.NotFound) {
		t.Errorf("stat of what was removed: %v", err)
	}
}

func TestEvents(t *testing.T) {
	r := newRig(t)
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	_, rival := r.key("rival", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	r.create(rival, api.CreateSandbox{})
	sb := r.create(c, api.CreateSandbox{})

	page, err := c.Events(ctx, api.EventQuery{Sandbox: sb.ID})
	if err != nil || len(page.Items) < 2 {
		t.Fatalf("%+v, %v", page, err)
	}
	for _, ev := range page.Items {
		if ev.SandboxID != sb.ID || ev.Tenant != "acme" || ev.Seq == 0 {
			t.Errorf("event %+v", ev)
		}
	}
	one, err := c.Events(ctx, api.EventQuery{Sandbox: sb.ID, Limit: 1})
	if err != nil || len(one.Items) != 1 || one.NextCursor != fmt.Sprint(one.Items[0].Seq) {
		t.Errorf("one event of several: %+v, %v", one, err)
	}

	// Follow from the start sees the past, then what happens.
	var seen []api.Event
	destroyed := false
	for ev, err := range c.Follow(ctx, api.EventQuery{Sandbox: sb.ID}) {
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, ev)
		if ev.Seq == page.Items[len(page.Items)-1].Seq && !destroyed {
			destroyed = true
			if _, err := c.Destroy(ctx, sb.ID, true); err != nil {
				t.Fatal(err)
			}
		}
		if ev.To == sandboxer.Terminated {
			break
		}
	}
	for i := range seen[1:] {
		if seen[i+1].Seq <= seen[i].Seq {
			t.Errorf("event %d after %d", seen[i+1].Seq, seen[i].Seq)
		}
	}

	// The raw form: resumed after Last-Event-ID, kept alive.
	last := seen[len(seen)-2]
	req, _ := http.NewRequestWithContext(ctx, "GET", r.tcp+"/v1/events", nil)
	req.Header.Set("Authorization", "Bearer "+k.Token)
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("Last-Event-ID", fmt.Sprint(last.Seq))
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
		t.Errorf("content type %q", ct)
	}
	var got strings.Builder
	buf := make([]byte, 1024)
	want := fmt.Sprintf("id: %d\nevent: state\ndata: {", seen[len(seen)-1].Seq)
	for !strings.Contains(got.String(), ": still here") || !strings.Contains(got.String(), want) {
		n, err := resp.Body.Read(buf)
		got.Write(buf[:n])
		if err != nil {
			t.Fatal(err)
		}
	}
	if !strings.Contains(got.String(), want) || strings.Count(got.String(), "event: ") != 1 || strings.Contains(got.String(), "rival") {
		t.Errorf("after event %d the stream was\n%s", last.Seq, got.String())
	}

	// A revoked key ends the stream, with the reason.
	if err := r.admin.RevokeKey(ctx, k.Key.ID); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Contains(rest, []byte("event: problem\ndata: {")) || !bytes.Contains(rest, []byte(`"code":"unauthenticated"`)) {
		t.Errorf("the revoked stream ended with %q, %v", rest, err)
	}
	for _, err := range c.Follow(ctx, api.EventQuery{}) {
		if !errors.Is(err, sandboxer.Unauthenticated) {
			t.Errorf("following with a revoked key: %v", err)
		}
	}
}

// A follower whose server goes away and comes back misses nothing.
func TestFollowReconnects(t *testing.T) {
	var n atomic.Int64
	var s *http.Server
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		after := r.Header.Get("Last-Event-ID")
		switch n.Add(1) {
		case 1:
			fmt.Fprint(w, "id: 1\nevent: state\ndata: {\"seq\":1}\n\nid: 2\nevent: state\ndata: {\"se")
		case 2:
			if after != "1" {
				t.Errorf("resumed after %q", after)
			}
			fmt.Fprint(w, ": hello\n\nid: 2\nevent: state\ndata: {\"seq\":2}\n\n")
		}
	})}
	go s.Serve(l)
	defer s.Close()
	c, err := api.New("http://"+l.Addr().String(), api.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var got []int64
	for ev, err := range c.Follow(t.Context(), api.EventQuery{}) {
		if err != nil {
			t.Fatal(err)
		}
		if got = append(got, ev.Seq); len(got) == 2 {
			break
		}
	}
	if !slices.Equal(got, []int64{1, 2}) {
		t.Errorf("events %v", got)
	}
}

// A key that is revoked while a command runs ends the command.
func TestRevokeDuringExec(t *testing.T) {
	r := newRig(t)
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(c, api.CreateSandbox{})
	var once sync.Once
	w := writeFunc(func(p []byte) (int, error) {
		once.Do(func() {
			if err := r.admin.RevokeKey(t.Context(), k.Key.ID); err != nil {
				t.Error(err)
			}
		})
		return len(p), nil
	})
	begun := time.Now()
	_, err := c.Exec(t.Context(), sb.ID, sandboxer.Cmd{Args: []string{"sh", "-c", "echo ready; exec sleep 600"}, Stdout: w})
	if !errors.Is(err, sandboxer.Unauthenticated) || time.Since(begun) > 10*time.Second {
		t.Errorf("error %v after %s", err, time.Since(begun))
	}
	if _, err := c.Get(t.Context(), sb.ID); !errors.Is(err, sandboxer.Unauthenticated) {
		t.Errorf("the revoked key: %v", err)
	}
}

func TestHostsAndOrigins(t *testing.T) {
	r := newRig(t)
	token := tokenOf(r)
	for _, tt := range []struct {
		name   string
		header []string
		status int
	}{
		{"localhost", []string{"Host", "localhost:99"}, 200},
		{"loopback address", []string{"Host", "127.0.0.1"}, 200},
		{"IPv6 loopback", []string{"Host", "[::1]:80"}, 200},
		{"rebound name", []string{"Host", "evil.example:80"}, 421},
		{"numbers as a name", []string{"Host", "127.0.0.1.evil.example"}, 421},
	} {
		if a := r.send("GET", "/v1/status", token, "", "", tt.header...); a.status != tt.status {
			t.Errorf("%s: %d %s; want %d", tt.name, a.status, a.body, tt.status)
		}
	}
	if a := r.send("POST", "/v1/sandboxes", token, "application/json", `{"profile":"test"}`, "Sec-Fetch-Site", "cross-site", "Origin", "https://evil.example"); a.status != 403 {
		t.Errorf("another web page: %d %s", a.status, a.body)
	}
	if a := r.send("GET", "/v1/status", token, "", "", "Origin", "https://evil.example"); a.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("another web page may read: %v", a.header)
	}
	if a := r.send("GET", "/v1/status", token, "", "", "X-Request-Id", "my-id_1.2"); a.header.Get("X-Request-Id") != "my-id_1.2" {
		t.Errorf("request ID %q", a.header.Get("X-Request-Id"))
	}
	if a := r.send("GET", "/v1/status", token, "", "", "X-Request-Id", "a b<script>"); a.header.Get("X-Request-Id") == "a b<script>" || a.header.Get("X-Request-Id") == "" {
		t.Errorf("request ID %q", a.header.Get("X-Request-Id"))
	}
}

func TestOperation(t *testing.T) {
	r := newRig(t)
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	ctx := t.Context()
	sb := r.create(c, api.CreateSandbox{})

	st, err := r.admin.Status(ctx)
	if err != nil || st.Version != "v0-test" || st.Sandboxes[sandboxer.Running] != 1 || st.Actor != fmt.Sprintf("unix:%d", os.Getuid()) || st.Data != "/data" || st.Extensions != 1 {
		t.Errorf("%+v, %v", st, err)
	}
	if st, err := c.Status(ctx); err != nil || st.Data != "" || st.Tenant != "acme" || st.Actor != "key:"+k.Key.ID {
		t.Errorf("%+v, %v", st, err)
	}
	if l, err := c.Profiles(ctx); err != nil || len(l.Items) != 2 {
		t.Errorf("%+v, %v", l, err)
	} else if b, _ := json.Marshal(l); bytes.Contains(b, []byte("canary")) {
		t.Errorf("a value of the environment came back: %s", b)
	}
	if p, err := r.admin.Profile(ctx, "test"); err != nil || p.ID != "profile.test" || p.TTL.Std() != 10*time.Minute || !slices.Equal(p.Env, []string{"SECRET"}) {
		t.Errorf("%+v, %v", p, err)
	}
	if l, err := c.Extensions(ctx); err != nil || len(l.Items) != 1 || l.Items[0].ID != "ext.fake" {
		t.Errorf("%+v, %v", l, err)
	}
	if o, err := c.Probe(ctx, "fake"); err != nil || len(o.Hosts) == 0 {
		t.Errorf("%+v, %v", o, err)
	}
	if l, err := c.Pools(ctx); err != nil || l.Items == nil || len(l.Items) != 0 {
		t.Errorf("%+v, %v", l, err)
	}
	for range 2 {
		if b, err := r.admin.Grant(ctx, api.Grant{Tenant: "acme", Amount: 5_000_000, Key: "g1"}); err != nil || b.Balance != 5_000_000 {
			t.Errorf("%+v, %v", b, err)
		}
	}
	paid := r.create(c, api.CreateSandbox{Profile: "paid"})
	if paid.Quote == nil || paid.Quote.Amount != 120_000 {
		t.Errorf("quote %+v", paid.Quote)
	}
	if b, err := c.Balance(ctx, ""); err != nil || b.Balance != 4_880_000 || b.Tenant != "acme" {
		t.Errorf("%+v, %v", b, err)
	}
	if l, err := c.Entries(ctx, api.EntryQuery{SandboxID: paid.ID}); err != nil || len(l.Items) != 1 || l.Items[0].Amount != -120_000 {
		t.Errorf("%+v, %v", l, err)
	}
	if a, err := r.admin.Audit(ctx); err != nil || a.Checked == 0 || len(a.Violations) != 0 {
		t.Errorf("%+v, %v", a, err)
	}
	if s, err := r.admin.Sweep(ctx); err != nil || s.Seen != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	if l, err := r.admin.Keys(ctx); err != nil || len(l.Items) != 1 || l.Items[0].ID != k.Key.ID {
		t.Errorf("%+v, %v", l, err)
	}
	if l, err := c.Ports(ctx, sb.ID); err != nil || l.Items == nil {
		t.Errorf("%+v, %v", l, err)
	}

	admin, _ := r.key("root", sandboxer.ScopeAdmin)
	a := r.send("GET", "/metrics", admin.Token, "", "")
	for _, want := range []string{
		`sandboxer_sandboxes{state="running"} 2`,
		`sandboxer_backend_call_duration_seconds_count{extension="ext.fake",kind="ok",op="provision"} 2`,
		`sandboxer_http_request_duration_seconds_count{route="POST /v1/sandboxes",status="201"} 2`,
	} {
		if !strings.Contains(a.body, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	if a := r.send("GET", "/openapi.yaml", "", "", ""); a.body != string(api.OpenAPI) {
		t.Error("/openapi.yaml is not the committed description")
	}
}

// No secret and no query value gets into the log.
func TestLogHasNoSecrets(t *testing.T) {
	r := newRig(t)
	k, c := r.key("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	sb := r.create(c, api.CreateSandbox{Env: map[string]string{"TOKEN": "canary-1"}})
	c.Exec(t.Context(), sb.ID, sandboxer.Cmd{Args: []string{"echo", "canary-2"}, Env: map[string]string{"X": "canary-3"}, Stdin: strings.NewReader("canary-4")})
	c.Run(t.Context(), sb.ID, api.Exec{Args: []string{"sh", "-c", "exit 1 # canary-5"}, Stdin: "canary-6"})
	c.WriteFile(t.Context(), sb.ID, "/workspace/canary-7", 0, strings.NewReader("canary-8"))
	r.send("GET", "/v1/status?token=canary-9", "sbx_key_zzzzzzzz_canary-10", "", "")
	r.stop()
	log := r.log.String()
	_, secret := cutToken(t, k.Token)
	for line := range strings.Lines(log) {
		if strings.Contains(line, "canary") || strings.Contains(line, secret) {
			t.Errorf("logged: %s", line)
		}
	}
	if !strings.Contains(log, `path=/v1/sandboxes/`+sb.ID+`/exec`) || !strings.Contains(log, "actor=key:"+k.Key.ID) {
		t.Errorf("the access log is missing:\n%s", log)
	}
}

func TestClientWithoutServer(t *testing.T) {
	c, err := api.New("unix://"+filepath.Join(t.TempDir(), "none.sock"), api.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func() error{
		"get":  func() error { _, err := c.Get(t.Context(), "x"); return err },
		"exec": func() error { _, err := c.Exec(t.Context(), "x", sandboxer.Cmd{Args: []string{"x"}}); return err },
	} {
		if err := call(); !errors.Is(err, sandboxer.Unavailable) || sandboxer.HintOf(err) != "start one with: sandboxer up" {
			t.Errorf("%s: %v (%s)", name, err, sandboxer.HintOf(err))
		}
	}
	for _, url := range []string{"", "api.sock", "unix://api.sock", "ftp://x", "http://", "http://user:pw@host"} {
		if _, err := api.New(url, api.Options{}); !errors.Is(err, sandboxer.Invalid) || strings.Contains(err.Error(), "pw") {
			t.Errorf("New(%q): %v", url, err)
		}
	}
}

// A server that is asked to end answers what it has begun, and nothing new.
func TestShutdownWaits(t *testing.T) {
	r := newRig(t)
	r.world.Inject(fake.Fault{Verb: fake.VerbProvision, Delay: 200 * time.Millisecond, Times: 1})
	type result struct {
		sb  *api.Sandbox
		err error
	}
	done := make(chan result, 1)
	go func() {
		sb, err := r.admin.Create(t.Context(), api.CreateSandbox{Profile: "test", Name: "last"})
		done <- result{sb, err}
	}()
	edgetest.Poll(t, "the record", func() bool {
		l, err := r.admin.List(t.Context(), api.SandboxQuery{Name: "last"})
		return err == nil && len(l.Items) == 1
	})
	r.stop()
	if got := edgetest.Receive(t, done, "the end"); got.err != nil || got.sb.State != sandboxer.Running {
		t.Errorf("the create under way: %+v, %v", got.sb, got.err)
	}
	if _, err := r.admin.Get(t.Context(), "last"); !errors.Is(err, sandboxer.Unavailable) {
		t.Errorf("after the end: %v", err)
	}
	if _, err := os.Stat(r.Unix); err == nil {
		t.Error("the socket is still there")
	}
}
