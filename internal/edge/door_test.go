package edge

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

// form is how a door of TestEveryDoor is found, told keys, and answers errors.
type form struct {
	name, host, path string
	key              func(string) string // header that sends a key
	kind             string              // content type of errors
	fault            func(body string) (status int, msg string)
	door             func(Router) Door
}

var forms = []form{
	{
		name: "path, bearer, problem", host: "localhost", path: "/x",
		key:  func(k string) string { return "Authorization: Bearer " + k },
		kind: ProblemType,
		fault: func(body string) (int, string) {
			var p api.Problem
			_ = json.Unmarshal([]byte(body), &p)
			return p.Status, p.Detail
		},
		door: func(r Router) Door { return Door{Name: "x", Path: "/x/", Routes: r} },
	},
	{
		name: "name, own header, own errors", host: "api.door.example", path: "/x",
		key:  func(k string) string { return "X-API-Key: " + k },
		kind: "application/json",
		fault: func(body string) (int, string) {
			var p struct {
				Code    int
				Message string
			}
			_ = json.Unmarshal([]byte(body), &p)
			return p.Code, p.Message
		},
		door: func(r Router) Door {
			return Door{
				Name: "named", Routes: r,
				Host: func(h string) bool { return h == "api.door.example" },
				Key: func(r *http.Request) (sandboxer.Secret, error) {
					if k := r.Header.Get("X-API-Key"); k != "" {
						return sandboxer.Secret(k), nil
					}
					return "", NoKey("X-API-Key: sbx_key_…")
				},
				Fail: func(w http.ResponseWriter, p *api.Problem) {
					w.Header().Set("Content-Type", "application/json")
					w.WriteHeader(p.Status)
					json.NewEncoder(w).Encode(map[string]any{"code": p.Status, "message": p.Detail})
				},
			}
		},
	},
}

// reached are the handlers that were called.
type reached struct {
	mu   sync.Mutex
	list []string
}

func (r *reached) add(s string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, s)
}

func (r *reached) take() (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	out, r.list = r.list, nil
	return out
}

// probes are routes that show what a handler sees.
func probes(seen *reached) *Mux {
	mux := &Mux{}
	add := func(pattern string, a Access, h http.HandlerFunc) {
		mux.Handle(Route{Pattern: pattern, Access: a, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			seen.add(pattern)
			h(w, r)
		})})
	}
	who := func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", sandboxer.PrincipalFrom(r.Context()).Actor, RequestID(r.Context()))
	}
	add("GET /x/open", Anyone(), who)
	add("POST /x/open", Anyone(), func(w http.ResponseWriter, r *http.Request) {
		n, err := r.Body.Read(make([]byte, 1))
		fmt.Fprintf(w, "%d %v", n, err)
	})
	add("GET /x/read/{part}", Needs(sandboxer.ScopeRead), func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.PathValue("part")+" ")
		who(w, r)
	})
	add("POST /x/write", Needs(sandboxer.ScopeWrite), func(w http.ResponseWriter, r *http.Request) {
		b, err := ReadAll(r, 100, 100*time.Millisecond)
		if err != nil {
			Fail(w, r, err)
			return
		}
		w.Write(b)
	})
	add("GET /x/stream", Needs(sandboxer.ScopeRead), func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := Stream(r.Context())
		defer cancel(nil)
		io.WriteString(w, "begun\n")
		w.(http.Flusher).Flush()
		<-ctx.Done()
		io.WriteString(w, sandboxer.Message(StreamError(ctx, ctx.Err()))+"\n")
	})
	add("GET /x/detached", Needs(sandboxer.ScopeRead), func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := Stream(context.WithoutCancel(r.Context()))
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			cancel(nil)
			Fail(w, r, err)
			return
		}
		Detach(ctx, func() {
			defer cancel(nil)
			defer c.Close()
			if w, r := Exchange(ctx); w != nil || r != nil {
				io.WriteString(c, "what the request took is still held\n")
			}
			io.WriteString(c, "begun\n")
			<-ctx.Done()
			io.WriteString(c, sandboxer.Message(StreamError(ctx, ctx.Err()))+"\n")
		})
	})
	add("GET /x/unbound/flush", Needs(sandboxer.ScopeRead), func(w http.ResponseWriter, _ *http.Request) {
		http.NewResponseController(w).Flush()
	})
	add("GET /x/unbound/hijack", Needs(sandboxer.ScopeRead), func(w http.ResponseWriter, _ *http.Request) {
		http.NewResponseController(w).Hijack()
	})
	add("GET /x/panic", Needs(sandboxer.ScopeRead), func(http.ResponseWriter, *http.Request) { panic("private matters") })
	add("GET /x/stream/panic", Needs(sandboxer.ScopeRead), func(w http.ResponseWriter, r *http.Request) {
		Stream(r.Context())
		io.WriteString(w, "begun\n")
		w.(http.Flusher).Flush()
		panic("private matters")
	})
	add("GET /x/detached/panic", Needs(sandboxer.ScopeRead), func(w http.ResponseWriter, r *http.Request) {
		ctx, _ := Stream(context.WithoutCancel(r.Context()))
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			Fail(w, r, err)
			return
		}
		Detach(ctx, func() {
			defer c.Close()
			io.WriteString(c, "begun\n")
			panic("private matters")
		})
	})
	left := make(chan struct{}, 1)
	add("GET /x/admit/good", AdmittedBy(func(ctx context.Context) (context.Context, sandboxer.Principal, func(), error) {
		return ctx, sandboxer.Principal{Tenant: "acme", Actor: "url:x"}, func() { left <- struct{}{} }, nil
	}), who)
	add("GET /x/admit/left", Anyone(), func(w http.ResponseWriter, _ *http.Request) { <-left })
	add("GET /x/admit/bad", AdmittedBy(func(context.Context) (context.Context, sandboxer.Principal, func(), error) {
		return nil, sandboxer.Principal{}, nil, sandboxer.E(sandboxer.Unauthenticated, nil, "the invitation is not good")
	}), who)
	return mux
}

// TestEveryDoor: whatever a door is like, no caller gets past the edge in front of it.
func TestEveryDoor(t *testing.T) {
	for i, f := range forms {
		t.Run(f.name, func(t *testing.T) {
			l, seen := &fakeAuth{}, &reached{}
			var observed reached
			d := serve(t, l, Options{Observe: func(route string, status int, _ time.Duration) { observed.add(fmt.Sprint(route, " ", status)) }}, f.door(probes(seen)))
			next := 0
			// from returns a connection from an address without failures.
			from := func() net.Conn {
				t.Helper()
				next++
				c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, byte(1+i), byte(next))}}).Dial("tcp", d.TCP)
				if err != nil {
					t.Fatal(err)
				}
				c.SetDeadline(time.Now().Add(edgetest.Patience))
				t.Cleanup(func() { c.Close() })
				return c
			}
			text := func(line string, headers ...string) string {
				return line + " HTTP/1.1\r\nHost: " + f.host + "\r\n" + strings.Join(append(headers, "", ""), "\r\n")
			}
			ask := func(line string, headers ...string) (*http.Response, string) {
				t.Helper()
				return d.roundTrip(from(), text(line, headers...))
			}
			// refused checks an answer that no handler gave.
			refused := func(what string, resp *http.Response, body string, status int) {
				t.Helper()
				if code, msg := f.fault(body); resp.StatusCode != status || code != status || msg == "" || resp.Header.Get("Content-Type") != f.kind {
					t.Errorf("%s: %d %v %s; want %d in the door's form", what, resp.StatusCode, resp.Header, body, status)
				}
				if got := seen.take(); len(got) != 0 {
					t.Errorf("%s: %s was reached", what, got)
				}
			}
			good, read, bad := f.key(goodKey), f.key(readKey), f.key("sbx_key_11111111_bad")

			t.Run("identity", func(t *testing.T) {
				for _, r := range []string{"GET /x/read/a", "POST /x/write", "GET /x/stream", "GET /x/detached", "GET /x/panic"} {
					for _, h := range [][]string{nil, {bad}, {f.key("")}} {
						resp, body := ask(r, h...)
						refused(fmt.Sprint(r, h), resp, body, 401)
						if resp.Header.Get("Connection") != "close" && !resp.Close {
							t.Errorf("%s: who has no key keeps a connection", r)
						}
					}
				}
				if resp, body := ask("GET /x/read/a", good); resp.StatusCode != 200 || !strings.HasPrefix(body, "a key:00000000 ") {
					t.Errorf("a good key: %d %s", resp.StatusCode, body)
				}
				c := d.dial("unix")
				if resp, body := d.roundTrip(c, text("GET /x/read/b")); resp.StatusCode != 200 || !strings.HasPrefix(body, fmt.Sprintf("b unix:%d ", os.Getuid())) {
					t.Errorf("the Unix socket: %d %s", resp.StatusCode, body)
				}
				c = d.dial("unix")
				seen.take()
				resp, body := d.roundTrip(c, text("GET /x/read/b", bad))
				refused("a bad key on the Unix socket", resp, body, 401)
				if resp, body := ask("GET /x/open"); resp.StatusCode != 200 || !strings.HasPrefix(body, " ") {
					t.Errorf("an open route: %d %s", resp.StatusCode, body)
				}
				if resp, body := d.roundTrip(from(), text("POST /x/open", good, "Content-Length: 1")+"x"); resp.StatusCode != 200 || !strings.HasPrefix(body, "0 ") {
					t.Errorf("the body of an open route: %d %s; want nothing read of it", resp.StatusCode, body)
				}
				seen.take()
			})
			t.Run("admitted otherwise", func(t *testing.T) {
				c := from()
				if resp, body := d.roundTrip(c, text("GET /x/admit/good")); resp.StatusCode != 200 || !strings.HasPrefix(body, "url:x ") {
					t.Errorf("a good one: %d %s", resp.StatusCode, body)
				}
				if resp, _ := d.roundTrip(c, text("GET /x/admit/left")); resp.StatusCode != 200 { // waits for its end
					t.Errorf("after the end: %d", resp.StatusCode)
				}
				seen.take()
				resp, body := ask("GET /x/admit/bad", good)
				refused("a bad one", resp, body, 401)
			})
			t.Run("scope", func(t *testing.T) {
				resp, body := ask("POST /x/write", read)
				refused("a key that may only read", resp, body, 403)
			})
			t.Run("quota of requests", func(t *testing.T) {
				full := func(b bool) { l.mu.Lock(); l.full = b; l.mu.Unlock() }
				full(true)
				resp, body := ask("GET /x/read/a", good)
				full(false)
				refused("one too many", resp, body, 429)
			})
			t.Run("no route", func(t *testing.T) {
				resp, body := ask("GET /x/nowhere", good)
				refused("nothing there", resp, body, 404)
				resp, body = ask("DELETE /x/write", good)
				refused("no such method", resp, body, 405)
				if resp.Header.Get("Allow") != "POST" {
					t.Errorf("Allow: %q", resp.Header.Get("Allow"))
				}
			})
			t.Run("host", func(t *testing.T) {
				c := from()
				resp, body := d.roundTrip(c, "GET /x/read/a HTTP/1.1\r\nHost: evil.example\r\n"+good+"\r\n\r\n")
				if resp.StatusCode != 421 || len(seen.take()) > 0 {
					t.Errorf("under another name: %d %s", resp.StatusCode, body)
				}
			})
			t.Run("cross-origin", func(t *testing.T) {
				resp, body := ask("POST /x/write", good, "Sec-Fetch-Site: cross-site", "Origin: https://evil.example", "Content-Length: 0")
				refused("another web page", resp, body, 403)
			})
			t.Run("login limiter", func(t *testing.T) {
				c := from()
				address := c.LocalAddr().(*net.TCPAddr).IP
				c.Close()
				for n := range failBurst + 1 {
					c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: address}}).Dial("tcp", d.TCP)
					if err != nil {
						t.Fatal(err)
					}
					c.SetDeadline(time.Now().Add(edgetest.Patience))
					resp, body := d.roundTrip(c, text("GET /x/read/a", bad))
					c.Close()
					want := 401
					if n == failBurst {
						want = 429
					}
					refused(fmt.Sprint("guess ", n+1), resp, body, want)
				}
			})
			t.Run("body", func(t *testing.T) {
				if resp, body := d.roundTrip(from(), text("POST /x/write", good, "Content-Length: 5")+"whole"); resp.StatusCode != 200 || body != "whole" {
					t.Errorf("a whole one: %d %s", resp.StatusCode, body)
				}
				seen.take()
				c := from()
				resp, body := d.roundTrip(c, text("POST /x/write", good, "Content-Length: 5")+"half")
				if code, _ := f.fault(body); resp.StatusCode != 400 || code != 400 {
					t.Errorf("half a body: %d %s", resp.StatusCode, body)
				}
				d.closed(c, "after half a body")
				resp, body = d.roundTrip(from(), text("POST /x/write", good, "Content-Length: 101")+strings.Repeat("x", 101))
				if code, _ := f.fault(body); resp.StatusCode != 413 || code != 413 {
					t.Errorf("too large a body: %d %s", resp.StatusCode, body)
				}
			})
			t.Run("request ID", func(t *testing.T) {
				resp, body := ask("GET /x/read/a", good, "X-Request-Id: mine_1.2")
				if resp.Header.Get("X-Request-Id") != "mine_1.2" || !strings.HasSuffix(body, " mine_1.2") {
					t.Errorf("%v %s", resp.Header, body)
				}
				resp, body = ask("GET /x/read/a", good, "X-Request-Id: <script>")
				if id := resp.Header.Get("X-Request-Id"); id == "" || id == "<script>" || !strings.HasSuffix(body, " "+id) {
					t.Errorf("%v %s", resp.Header, body)
				}
				if resp.Header.Get("X-Content-Type-Options") != "nosniff" || resp.Header.Get("Cache-Control") != "no-store" {
					t.Errorf("headers %v", resp.Header)
				}
			})
			t.Run("faults", func(t *testing.T) {
				for _, path := range []string{"/x/panic", "/x/unbound/flush", "/x/unbound/hijack"} {
					resp, body := ask("GET "+path, good)
					code, msg := f.fault(body)
					id, ok := strings.CutPrefix(msg, "internal error ")
					if resp.StatusCode != 500 || code != 500 || !ok || strings.Contains(body, "private") {
						t.Errorf("%s: %d %s", path, resp.StatusCode, body)
					}
					edgetest.Poll(t, "the cause in the log", func() bool { return strings.Contains(d.log.String(), "error_id="+id) })
				}
				if !strings.Contains(d.log.String(), "private matters") || !strings.Contains(d.log.String(), "without edge.Stream") {
					t.Errorf("the log does not say why:\n%s", d.log)
				}
			})
			t.Run("log and metrics", func(t *testing.T) {
				observed.take()
				ask("GET /x/read/secret?q=secret", good, "X-Request-Id: logged")
				edgetest.Poll(t, "the metric", func() bool {
					return strings.Contains(strings.Join(observed.take(), "\n"), "GET /x/read/{part} 200")
				})
				edgetest.Poll(t, "the log", func() bool { return strings.Contains(d.log.String(), "request_id=logged") })
				for line := range strings.Lines(d.log.String()) {
					if strings.Contains(line, "request_id=logged") && (!strings.Contains(line, "actor=key:00000000") || !strings.Contains(line, "status=200") || strings.Contains(line, "q=")) {
						t.Errorf("logged: %s", line)
					}
				}
			})
			// Last: it ends the server.
			t.Run("streams", func(t *testing.T) {
				begin := func(path string) *bufio.Reader {
					t.Helper()
					c := from()
					io.WriteString(c, text("GET "+path, good, "Connection: close"))
					r := bufio.NewReader(c)
					for {
						line, err := r.ReadString('\n')
						if err != nil {
							t.Fatalf("%s: %v", path, err)
						}
						if line == "begun\n" {
							return r
						}
						if strings.Contains(line, "still held") {
							t.Error(line)
						}
					}
				}
				rest := func(r *bufio.Reader) string { b, _ := io.ReadAll(r); return string(b) }
				for _, path := range []string{"/x/stream/panic", "/x/detached/panic"} {
					rest(begin(path))
					edgetest.Poll(t, "what its panic left to be released", func() bool { return l.streams() == 0 })
				}
				for _, path := range []string{"/x/stream", "/x/detached"} {
					r := begin(path)
					l.revoke()
					if got := rest(r); !strings.Contains(got, "the API key was revoked") {
						t.Errorf("%s of a revoked key ends with %q", path, got)
					}
				}
				one, two := begin("/x/stream"), begin("/x/detached")
				go d.Stop()
				for _, r := range []*bufio.Reader{one, two} {
					if got := rest(r); !strings.Contains(got, "the server is shutting down") {
						t.Errorf("at the server's end a stream ends with %q", got)
					}
				}
			})
		})
	}
}

// One too many connections of a key is refused at every door, in its form.
func TestConnectionsAtEveryDoor(t *testing.T) {
	for _, f := range forms {
		t.Run(f.name, func(t *testing.T) {
			d := serve(t, &fakeAuth{}, Options{Conns: ConnLimits{PerKey: 1}}, f.door(probes(&reached{})))
			text := func(path string) string {
				return "GET " + path + " HTTP/1.1\r\nHost: " + f.host + "\r\n" + f.key(goodKey) + "\r\n\r\n"
			}
			c := d.dial("tcp")
			io.WriteString(c, text("/x/stream"))
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || resp.StatusCode != 200 {
				t.Fatal(resp, err)
			}
			resp, body := d.roundTrip(d.dial("tcp"), text("/x/read/a"))
			if code, msg := f.fault(body); resp.StatusCode != 429 || code != 429 || !strings.Contains(msg, "as many connections as it may have") {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
}

// A door that looks at the origin itself gets requests from everywhere; else the edge
// stays in front of it.
func TestAnyOrigin(t *testing.T) {
	seen := &reached{}
	door := forms[0].door(probes(seen))
	door.AnyOrigin = true
	d := serve(t, &fakeAuth{}, Options{}, door)
	from := []string{"Sec-Fetch-Site: cross-site", "Origin: https://other.example", "Content-Length: 0"}
	if resp, body := d.roundTrip(d.dial("tcp"), request("POST /x/write", append(from, "Authorization: Bearer "+goodKey)...)); resp.StatusCode != 200 {
		t.Errorf("another web page: %d %s", resp.StatusCode, body)
	}
	seen.take()
	if resp, body := d.roundTrip(d.dial("tcp"), request("POST /x/write", from...)); resp.StatusCode != 401 || len(seen.take()) > 0 {
		t.Errorf("another web page without a key: %d %s", resp.StatusCode, body)
	}
}

// zeroRouter finds a route that does not declare who may use it, and does not list it.
type zeroRouter struct{ h http.Handler }

func (z zeroRouter) Route(*http.Request) Route { return Route{Pattern: "zero", Handler: z.h} }
func (zeroRouter) Routes() []Route             { return nil }

// A route that does not declare who may use it is not served.
func TestRoutesDeclareAccess(t *testing.T) {
	panics := func(what string, f func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s is taken", what)
			}
		}()
		f()
	}
	h := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the handler was reached") })
	panics("a route without access", func() { new(Mux).Handle(Route{Pattern: "GET /", Handler: h}) })
	panics("a route that needs no scope", func() { new(Mux).Handle(Route{Pattern: "GET /", Access: Needs(""), Handler: h}) })
	panics("callers whom nobody lets in", func() { new(Mux).Handle(Route{Pattern: "GET /", Access: AdmittedBy(nil), Handler: h}) })
	e := New(&fakeAuth{}, Options{})
	panics("a door that lists such a route", func() {
		e.Mount(Door{Name: "x", Path: "/x/", Routes: &Mux{routes: []Route{{Pattern: "GET /x/", Handler: h}}}})
	})
	for what, d := range map[string]Door{
		"no name": {Path: "/x/", Routes: &Mux{}}, "no routes": {Name: "x", Path: "/x/"}, "no way to it": {Name: "x", Routes: &Mux{}},
		"a path without a slash": {Name: "x", Path: "x/", Routes: &Mux{}},
	} {
		panics("a door with "+what, func() { e.Mount(d) })
	}
	if len(e.Doors()) != 0 {
		t.Errorf("mounted: %v", e.Doors())
	}
	d := serve(t, &fakeAuth{}, Options{}, Door{Name: "x", Path: "/x/", Routes: zeroRouter{h}})
	panics("a path of another door", func() { d.e.Mount(Door{Name: "y", Path: "/x/", Routes: &Mux{}}) })
	if resp, body := d.roundTrip(d.dial("tcp"), request("GET /x/", "Authorization: Bearer "+goodKey)); resp.StatusCode != 500 {
		t.Errorf("a route without access: %d %s", resp.StatusCode, body)
	}
}

// Of two paths the longer has a request; what is no door's is answered all the same.
func TestDoorsOfPaths(t *testing.T) {
	door := func(name, path string) Door {
		mux := &Mux{}
		mux.Handle(Route{Pattern: path, Access: Anyone(), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, name) })})
		return Door{Name: name, Path: path, Routes: mux}
	}
	e := New(&fakeAuth{}, Options{})
	e.Mount(door("short", "/a/"))
	e.Mount(door("long", "/a/b/"))
	for path, want := range map[string]string{"/a/": "short", "/a/b": "short", "/a/b/": "long", "/a/b/c": "long", "/": "404", "/ab": "404"} {
		w := &answer{header: http.Header{}}
		r, _ := http.NewRequestWithContext(t.Context(), "GET", path, nil)
		e.Handler().ServeHTTP(w, r)
		got := w.String()
		if w.status != 0 && w.status != 200 {
			got = fmt.Sprint(w.status)
		}
		if got != want {
			t.Errorf("%s is answered by %q; want %q", path, got, want)
		}
	}
}

type answer struct {
	strings.Builder
	header http.Header
	status int
}

func (a *answer) Header() http.Header    { return a.header }
func (a *answer) WriteHeader(status int) { a.status = status }

// What Go started goes on when its request was answered, and ends with the server, which
// waits for it.
func TestGo(t *testing.T) {
	ended := make(chan error, 1)
	mux := &Mux{}
	mux.Handle(Route{Pattern: "POST /x/", Access: Needs(sandboxer.ScopeWrite), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		Go(r.Context(), func(ctx context.Context) {
			<-ctx.Done()
			ended <- errors.Join(context.Cause(ctx), r.Context().Err())
		})
	})})
	d := serve(t, &fakeAuth{}, Options{}, Door{Name: "x", Path: "/x/", Routes: mux})
	c := d.dial("tcp")
	if resp, _ := d.roundTrip(c, request("POST /x/", "Content-Length: 0", "Authorization: Bearer "+goodKey)); resp.StatusCode != 200 {
		t.Fatal(resp.Status)
	}
	select {
	case err := <-ended:
		t.Fatalf("it ended with its request: %v", err)
	default:
	}
	d.Stop()
	select {
	case err := <-ended:
		if !errors.Is(err, errClosing) {
			t.Errorf("it ended with %v", err)
		}
	default:
		t.Error("the server did not wait for it")
	}
}

// Over the Unix socket the server's own user and root need no key; anybody else does.
func TestUnixPeers(t *testing.T) {
	e := New(&fakeAuth{}, Options{})
	d := &Door{Key: BearerKey}
	for uid, ok := range map[int]bool{os.Geteuid(): true, 0: true, os.Geteuid() + 1: false} {
		ctx := context.WithValue(t.Context(), peerKey{}, uid)
		r, _ := http.NewRequestWithContext(ctx, "GET", "/", nil)
		p, err := e.identify(d, r)
		if ok && (err != nil || p.Actor != fmt.Sprintf("unix:%d", uid) || !p.Can(sandboxer.ScopeAdmin)) || !ok && !errors.Is(err, sandboxer.Unauthenticated) {
			t.Errorf("user %d: %+v, %v", uid, p, err)
		}
		r.Header.Set("Authorization", "Bearer ") // a key that is empty is not none
		if p, err := e.identify(d, r); !errors.Is(err, sandboxer.Unauthenticated) {
			t.Errorf("user %d with an empty key: %+v, %v", uid, p, err)
		}
	}
	r, _ := http.NewRequestWithContext(t.Context(), "GET", "/", nil) // TCP
	if p, err := e.identify(d, r); !errors.Is(err, sandboxer.Unauthenticated) {
		t.Errorf("a TCP peer: %+v, %v", p, err)
	}
}

// TestRedact: a token in a path is in no log, however it is written.
func TestRedact(t *testing.T) {
	for _, c := range [][2]string{
		{"/v1/sandboxes/abc", "/v1/sandboxes/abc"}, {"/p/sbx_port_AQBQ/x", "/p/[token]/x"}, {"/s/abc/sbx_box_AAAA-_9/v1/bash/exec", "/s/abc/[token]/v1/bash/exec"},
		{"/s/abc/%73bx%5Fbox_secret/v1", "/s/abc/[token]/v1"}, {"/s/abc/SBX_BOX_secret", "/s/abc/[token]"},
		{"/v1/sandboxes/ours%2Fthe-sandbox-of-a-thread", "/v1/sandboxes/ours%2Fthe-sandbox-of-a-thread"}, {"/v1/sandboxes/ours%252Fthe-sandbox-of-a-thread", "/v1/sandboxes/ours%252Fthe-sandbox-of-a-thread"},
		{"/s/abc/x%2FAbl9Zk3-QvWm2xT0sRpYhJ", "/s/abc/x%2F[token]"}, {"/s/abc/sbx%255f%2562ox_secret", "/s/abc/[token]"},
	} {
		if got := Redact(c[0]); got != c[1] {
			t.Errorf("%s becomes %s, want %s", c[0], got, c[1])
		}
	}
}

// TestRedactMangled: a token that is nearly right is as secret as the right one.
func TestRedactMangled(t *testing.T) {
	secret := "AAAAAbl9Zk3-_QvWm2xT0sRpYhJcKfEdGnUoBiLaMXDeCrVg"
	whole := "sbx_box_" + secret
	check := func(path string) {
		got := Redact(path)
		for i := range len(secret) - 19 {
			if strings.Contains(got, secret[i:i+20]) {
				t.Errorf("%s becomes %s", path, got)
				return
			}
		}
		if !strings.HasPrefix(got, "/s/abc/") {
			t.Errorf("%s becomes %s: too much is hidden", path, got)
		}
	}
	for i := range len(whole) + 1 {
		for _, other := range []string{"", "x", "/", ".", "%2F", " ", "sbx_"} {
			check("/s/abc/" + whole[:i] + other + whole[i:] + "/v1/bash/exec")
			check("/s/abc/" + whole[:max(i-1, 0)] + other + whole[i:] + "/v1/bash/exec")
		}
		check("/s/abc/" + whole[i:])
	}
}

// TestStripCredentials: of each credential, wherever it stands and however often, nothing is left; what is the
// sandbox's own stays.
func TestStripCredentials(t *testing.T) {
	const secret = "s3cretOfTheBroker"
	h := http.Header{
		"Authorization": {"Bearer own", "Bearer sbx_key_k1_" + secret, "bearer sbx_key_k1_" + secret, "Basic " + base64.StdEncoding.EncodeToString([]byte("u:sbx_key_k1_"+secret)), "Basic dTpw"},
		"X-Api-Key":     {"own", "sbx_key_k1_" + secret}, "X-Sandboxer-Token": {secret, "sbx_port_" + secret}, "Proxy-Authorization": {"Basic " + secret},
		"Cookie":                 {"a=1; sbx-port=" + secret + "; __Host-sbx-port=" + secret, "sbx-port=" + secret, "b=sbx_key_k1_" + secret + "; c=2"},
		"Referer":                {"https://80-abc.ports.example.org/?sbx_token=" + secret},
		"Sec-Websocket-Protocol": {"chat", "bearer.sbx_key_k1_" + secret}, "X-Other": {"sbx%5Fbox%5F" + secret}, "Accept": {"text/html"},
	}
	u, _ := url.Parse("/x?a=1&sbx_token=" + secret + "&sbx%5Ftoken=" + secret + "&key=sbx_key_k1_" + secret + "&b=%20&c=sbx%5Fport%5F" + secret)
	StripCredentials(h, u)
	if text := fmt.Sprint(h, u); strings.Contains(text, secret) {
		t.Errorf("left: %s", text)
	}
	want := http.Header{
		"Authorization": {"Bearer own", "Basic dTpw"}, "X-Api-Key": {"own"}, "Cookie": {"a=1", "c=2"}, "Sec-Websocket-Protocol": {"chat"}, "Accept": {"text/html"},
	}
	if !maps.EqualFunc(h, want, slices.Equal) || u.RawQuery != "a=1&b=%20" {
		t.Errorf("left %v, %s; want %v", h, u.RawQuery, want)
	}
}

// TestSeveralKeys: the edge does not guess which of several keys counts.
func TestSeveralKeys(t *testing.T) {
	for name, key := range map[string]func(*http.Request) (sandboxer.Secret, error){
		"Authorization": BearerKey, KeyHeader: func(r *http.Request) (sandboxer.Secret, error) { return HeaderKey(r, KeyHeader) },
	} {
		r := httptest.NewRequest("GET", "/", nil)
		if _, err := key(r); !errors.As(err, new(*noKey)) {
			t.Errorf("%s, none: %v", name, err)
		}
		r.Header.Add(name, "Bearer sbx_key_a_b")
		if k, err := key(r); err != nil || !strings.HasSuffix(k.Reveal(), "sbx_key_a_b") {
			t.Errorf("%s, one: %v", name, err)
		}
		r.Header.Add(name, "Bearer sbx_key_a_b")
		if k, err := key(r); k != "" || sandboxer.KindOf(err) != sandboxer.Unauthenticated || errors.As(err, new(*noKey)) {
			t.Errorf("%s, two: %v", name, err)
		}
	}
}

// TestOnePath: a door can have a single path, and nothing below or next to it.
func TestOnePath(t *testing.T) {
	e := New(&fakeAuth{}, Options{})
	for _, d := range []string{"/one", "/one/more/", "/"} {
		m := &Mux{}
		m.Handle(Route{Pattern: "/", Access: Anyone(), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, d) })})
		e.Mount(Door{Name: d, Path: d, Routes: m})
	}
	for path, want := range map[string]string{"/one": "/one", "/one/": "/", "/ones": "/", "/one/more/x": "/one/more/", "/on": "/"} {
		w := httptest.NewRecorder()
		if e.Handler().ServeHTTP(w, httptest.NewRequest("GET", path, nil)); w.Body.String() != want {
			t.Errorf("%s is answered by the door at %q, want %q", path, w.Body, want)
		}
	}
}
