package portproxy_test

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
	"github.com/sand-boxer/sandboxer/internal/manager"
	"github.com/sand-boxer/sandboxer/internal/portproxy"
	"github.com/sand-boxer/sandboxer/internal/server"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "web" { // the program behind a port of a sandbox
		panic(web())
	}
	goleak.VerifyTestMain(m)
}

// web is a program behind a port, which it says: it tells what it was asked, and misbehaves
// where it is asked to.
func web() error {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Cache-Control", "max-age=60")
		json.NewEncoder(w).Encode(map[string]any{"method": r.Method, "uri": r.RequestURI, "host": r.Host, "header": r.Header, "body": string(body)})
	})
	mux.HandleFunc("/cookies", func(w http.ResponseWriter, r *http.Request) {
		for _, c := range []string{"a=1; Path=/x; Domain=ports.test; HttpOnly", "b=2", "sbx-port=stolen", "__Host-sbx-port=stolen; Secure; Path=/"} {
			w.Header().Add("Set-Cookie", c)
		}
		w.Header().Set("Strict-Transport-Security", "max-age=1; includeSubDomains")
		w.Header().Set("Alt-Svc", `h3="evil:443"`)
		w.Header().Set("Clear-Site-Data", `"*"`)
		w.Header().Set("Content-Security-Policy", "default-src *")
	})
	mux.HandleFunc("/beyond", func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		for _, k := range spoken {
			h.Set(k, "evil")
		}
		h.Set("Set-Cookie", "early=1; Path=/")
		w.WriteHeader(http.StatusEarlyHints)
		h.Set("Set-Cookie", "late=1; Path=/")
		h.Set("Content-Security-Policy", "default-src *; report-uri https://evil.test/; Report-To evil, img-src *")
		h.Set("X-Own", "kept")
		h.Set("Etag", `"kept"`)
		h.Set("Access-Control-Allow-Origin", "*")
		h.Set("Trailer", "Announced")
		io.WriteString(w, "body")
		http.NewResponseController(w).Flush()
		h.Set("Announced", "evil")
		h.Set(http.TrailerPrefix+"Set-Cookie", "trailer=1")
	})
	mux.HandleFunc("/redirect", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", r.URL.Query().Get("to"))
		w.WriteHeader(http.StatusFound)
	})
	mux.HandleFunc("/stream", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := 0; ; i++ {
			if _, err := fmt.Fprintf(w, "data: %d\n\n", i); err != nil {
				return
			}
			http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		for {
			typ, b, err := c.Read(context.Background())
			if err != nil || c.Write(context.Background(), typ, b) != nil {
				return
			}
		}
	})
	mux.HandleFunc("/headers", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Big", strings.Repeat("x", 100<<10))
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr().(*net.TCPAddr).Port)
	return http.Serve(l, mux)
}

// spoken are headers that speak for more than the answer they come with.
var spoken = []string{"Strict-Transport-Security", "Alt-Svc", "Nel", "Report-To", "Reporting-Endpoints", "Expect-Ct", "Public-Key-Pins", "X-Accel-Redirect", "X-Sendfile"}

// spokenByPath are those that speak for the origin, which below /p/ is the server's.
var spokenByPath = []string{"Clear-Site-Data", "Service-Worker-Allowed", "Accept-Ch", "Critical-Ch", "Origin-Agent-Cluster", "Use-As-Dictionary", "Set-Login",
	"Content-Security-Policy-Report-Only", "Speculation-Rules", "Something-New"}

// A sandbox's answer speaks for itself alone.
func TestPortProxyAnswersSpeakForThemselves(t *testing.T) {
	spoken = append(spoken, spokenByPath...)
	for _, base := range []string{"", "http://ports.test"} {
		s := newSite(t, base)
		u, err := url.Parse(s.signed(time.Hour).URL)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.tcp, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(edgetest.Patience))
		path := u.Path + "beyond"
		if u.RawQuery != "" {
			path += "?" + u.RawQuery
		}
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nTE: trailers\r\nConnection: close\r\n\r\n", path, u.Host)
		b, err := io.ReadAll(conn)
		if err != nil {
			t.Fatal(err)
		}
		raw := string(b)
		if !strings.HasPrefix(raw, "HTTP/1.1 200 OK\r\n") || !strings.Contains(raw, "body") {
			t.Fatalf("%q: %s", base, raw)
		}
		for _, k := range spoken {
			if base != "" && slices.Contains(spokenByPath, k) {
				continue // the origin is the sandbox's own
			}
			if strings.Contains(raw, "\r\n"+k+": evil") {
				t.Errorf("%q: %s passes", base, k)
			}
		}
		for _, no := range []string{" 103 ", "early=1", "railer", "nnounced", "report-uri"} {
			if strings.Contains(raw, no) && (no != "report-uri" || base == "") {
				t.Errorf("%q: %q passes: %s", base, no, raw)
			}
		}
		for _, yes := range []string{"\r\nX-Own: kept", "\r\nEtag: \"kept\"", "\r\nAccess-Control-Allow-Origin: *", "late=1", "\r\nX-Request-Id: "} {
			if !strings.Contains(raw, yes) {
				t.Errorf("%q: %q does not pass: %s", base, yes, raw)
			}
		}
	}
}

// A token is in no log, however its path is written.
func TestTokensAreNotLogged(t *testing.T) {
	s := newSite(t, "")
	u := s.signed(time.Hour)
	secret := u.Token[len("sbx_port_"):]
	for _, path := range []string{
		"/p/" + u.Token + "/x", "/p/%73bx_port_" + secret + "/", "//p/" + u.Token + "/", "/P/" + u.Token, "/p/" + s.sb.ID + "/x/" + u.Token, "/p/x/../" + u.Token + "/",
		"/p/SBX_PORT_" + secret, "/%70/sbx%5fport%5F" + secret + "/", "/p/%2573bx_port_" + secret, "/v1/" + u.Token, "/" + u.Token,
	} {
		req, err := http.NewRequestWithContext(t.Context(), "GET", s.tcp+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || strings.Contains(string(body), secret) && res.StatusCode != 200 {
			t.Errorf("%s: the token is in the answer: %s, %v", path, body, err)
		}
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	if log := s.log.String(); strings.Contains(log, secret[:20]) || !strings.Contains(log, "[token]") {
		t.Error("the log does not hide tokens")
		for line := range strings.Lines(log) {
			if strings.Contains(line, secret[:20]) {
				t.Errorf("in the log: %s", line)
			}
		}
	}
}

// site is a sandbox with that program, whose port is open, and the proxy in front of it,
// behind an edge that also has the REST interface.
type site struct {
	*testing.T
	m     *edgetest.Broker
	proxy *portproxy.Proxy
	tcp   string // http://127.0.0.1:port
	log   *edgetest.Log
	sb    *sandboxer.Sandbox
	port  int
	key   string
	ctx   context.Context // of the sandbox's owner
}

// as is a ctx of somebody who may do everything for a tenant.
func as(tenant string) context.Context {
	return sandboxer.WithPrincipal(context.Background(), sandboxer.Principal{Tenant: tenant, Actor: "test", Scopes: sandboxer.Scopes()})
}

func newSite(t *testing.T, base string) *site {
	t.Helper()
	s := &site{T: t, log: &edgetest.Log{}, ctx: as("acme")}
	log := s.log.Logger()
	s.m = edgetest.NewBroker(t, edgetest.BrokerOptions{
		Profiles: []sandboxer.Profile{{ID: "profile.test", Extension: "ext.fake", TTL: 10 * time.Minute}},
		Manager:  manager.Options{Log: log},
	})
	var names *url.URL
	var err error
	if base != "" {
		if names, err = url.Parse(base); err != nil {
			t.Fatal(err)
		}
	}
	s.proxy = portproxy.New(s.m.Manager, names)
	t.Cleanup(s.proxy.Close)
	e := edge.New(s.m.Manager, edge.Options{Log: log, Drain: 5 * time.Second})
	e.Mount(server.New(s.m.Manager, server.Options{}).Door())
	e.Mount(s.proxy.Door())
	s.tcp = "http://" + edgetest.Serve(t, edgetest.Listen{Unix: edge.ListenUnix, TCP: edge.ListenTCP, TLS: edge.ListenTLS}, log, e.Serve).TCP

	_, s.key = s.newKey("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
	if s.sb, err = s.m.Create(s.ctx, sandboxer.CreateRequest{Profile: "profile.test"}); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan struct{})
	said, says := io.Pipe()
	go func() {
		defer close(done)
		defer says.Close()
		s.m.Exec(ctx, s.sb.ID, sandboxer.Cmd{Args: []string{self, "web"}, Stdout: says})
	}()
	t.Cleanup(func() { cancel(); <-done })
	if _, err := fmt.Fscanln(said, &s.port); err != nil {
		t.Fatalf("it does not say where it is: %v", err)
	}
	go io.Copy(io.Discard, said)
	if _, err := s.m.OpenPort(s.ctx, s.sb.ID, s.port); err != nil {
		t.Fatal(err)
	}
	edgetest.Poll(t, "the program's listener", func() bool {
		c, err := s.m.Dial(s.ctx, s.sb.ID, s.port)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return s
}

// newKey makes an API key.
func (s *site) newKey(tenant string, scopes ...sandboxer.Scope) (id, token string) {
	s.Helper()
	secret, k, err := s.m.CreateKey(as("root"), manager.NewKey{Name: "test", Tenant: tenant, Scopes: scopes})
	if err != nil {
		s.Fatal(err)
	}
	return k.ID, secret.Reveal()
}

// link is a signed URL.
type link struct {
	URL, Token string
	ExpiresAt  time.Time
}

func (s *site) signed(ttl time.Duration) link {
	s.Helper()
	token, sb, until, err := s.m.SignPort(s.ctx, s.sb.ID, s.port, ttl)
	if err != nil {
		s.Fatal(err)
	}
	own, err := url.Parse(s.tcp)
	if err != nil {
		s.Fatal(err)
	}
	return link{URL: s.proxy.URL(own, sb.ID, s.port, token), Token: token.Reveal(), ExpiresAt: until}
}

// seen is a request as the program in the sandbox saw it.
type seen struct {
	Method, URI, Host, Body string
	Header                  http.Header
}

// get asks the proxy. Redirects are not followed.
func (s *site) get(method, rawurl string, header ...string) (*http.Response, seen) {
	s.Helper()
	u, err := url.Parse(rawurl)
	if err != nil {
		s.Fatal(err)
	}
	host := u.Host
	u.Scheme, u.Host = "http", strings.TrimPrefix(s.tcp, "http://")
	req, err := http.NewRequestWithContext(s.Context(), method, u.String(), strings.NewReader("the body"))
	if err != nil {
		s.Fatal(err)
	}
	req.Host = host
	req.Header.Set("User-Agent", "test")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	tr := &http.Transport{DisableKeepAlives: true}
	res, err := tr.RoundTrip(req)
	if err != nil {
		s.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		s.Fatal(err)
	}
	var got seen
	if res.StatusCode == 200 {
		_ = json.Unmarshal(body, &got)
	}
	return res, got
}

func TestPortProxyByPath(t *testing.T) {
	s := newSite(t, "")
	u := s.signed(time.Hour).URL
	if !strings.HasPrefix(u, s.tcp+"/p/sbx_port_") {
		t.Fatalf("the URL is %s", u)
	}
	private := fmt.Sprintf("%s/p/%s/%d/", s.tcp, s.sb.ID, s.port)
	bearer := "Bearer " + s.key

	t.Run("what arrives", func(t *testing.T) {
		res, got := s.get("POST", u+"a%2Fb/c?x=1&y=%20", "Cookie", "console=secret; sbx-port.mine=1; sbx-port=x", "Referer", u, "Origin", "null",
			"Authorization", "Basic dTpw", "X-Forwarded-For", "6.6.6.6", "X-Forwarded-Prefix", "/evil", "Connection", "X-Hop", "X-Hop", "1", "X-Sandboxer-Token", "t")
		if res.StatusCode != 200 || got.Method != "POST" || got.URI != "/a%2Fb/c?x=1&y=%20" || got.Body != "the body" {
			t.Fatalf("%d %+v", res.StatusCode, got)
		}
		if got.Host != fmt.Sprint("localhost:", s.port) || got.Header.Get("Origin") != "http://"+got.Host {
			t.Errorf("host %q, origin %q", got.Host, got.Header.Get("Origin"))
		}
		if c := got.Header.Get("Cookie"); c != "mine=1" {
			t.Errorf("cookies %q", c)
		}
		if got.Header.Get("Authorization") != "Basic dTpw" {
			t.Error("the sandbox's own authorization is taken away")
		}
		for _, k := range []string{"Referer", "X-Hop", "X-Sandboxer-Token"} {
			if v := got.Header.Get(k); v != "" {
				t.Errorf("%s: %s arrives", k, v)
			}
		}
		if got.Header.Get("X-Forwarded-For") != "127.0.0.1" || got.Header.Get("X-Forwarded-Host") != strings.TrimPrefix(s.tcp, "http://") || got.Header.Get("X-Forwarded-Proto") != "http" {
			t.Errorf("forwarded: %v", got.Header)
		}
		if strings.Contains(fmt.Sprint(got), "sbx_port_") {
			t.Errorf("the token arrives: %+v", got)
		}
		csp := res.Header["Content-Security-Policy"]
		if len(csp) == 0 || !strings.HasPrefix(csp[len(csp)-1], "sandbox ") || strings.Contains(csp[len(csp)-1], "same-origin") ||
			res.Header.Get("Referrer-Policy") != "no-referrer" || res.Header.Get("Cache-Control") != "max-age=60" {
			t.Errorf("answer: %v", res.Header)
		}
	})
	t.Run("private", func(t *testing.T) {
		res, got := s.get("GET", private+"x", "Authorization", bearer)
		if res.StatusCode != 200 || got.URI != "/x" || got.Header.Get("Authorization") != "" || strings.Contains(fmt.Sprint(got), "sbx_key_") {
			t.Errorf("with a key: %d %+v", res.StatusCode, got)
		}
		if res, got = s.get("GET", u, "Authorization", bearer); res.StatusCode != 200 || got.Header.Get("Authorization") != "" {
			t.Errorf("with a key and a token: %d %+v", res.StatusCode, got)
		}
		_, k := s.newKey("acme", sandboxer.ScopeRead)
		_, rival := s.newKey("rival", sandboxer.ScopeRead, sandboxer.ScopeWrite)
		other := fmt.Sprintf("%s/p/%s/%d/", s.tcp, s.sb.ID, s.port+1)
		last := "A"
		if strings.HasSuffix(u, "A/") {
			last = "Q"
		}
		wrong := u[:len(u)-2] + last + "/"
		for what, c := range map[string]struct {
			url    string
			header []string
			status int
		}{
			"nothing":                    {private, nil, 401},
			"a wrong key":                {private, []string{"Authorization", "Bearer sbx_key_x_y"}, 401},
			"a key that may read":        {private, []string{"Authorization", "Bearer " + k}, 403},
			"another's key":              {private, []string{"Authorization", "Bearer " + rival}, 404},
			"a closed port":              {other, []string{"Authorization", bearer}, 404},
			"a wrong token":              {wrong, nil, 401},
			"a wrong header, with a key": {private, []string{"X-Sandboxer-Token", "sbx_port_x", "Authorization", bearer}, 401},
			"no port":                    {s.tcp + "/p/" + s.sb.ID + "/x/", []string{"Authorization", bearer}, 404},
			"another host name":          {strings.Replace(u, s.tcp, "http://evil.example", 1), nil, 421},
		} {
			if res, _ := s.get("GET", c.url, c.header...); res.StatusCode != c.status {
				t.Errorf("%s: %d; want %d", what, res.StatusCode, c.status)
			}
		}
	})
	t.Run("redirects and cookies", func(t *testing.T) {
		prefix := strings.TrimSuffix(strings.TrimPrefix(u, s.tcp), "/")
		for to, want := range map[string]string{
			"/login?a=b": prefix + "/login?a=b", "relative": "relative", fmt.Sprintf("http://localhost:%d/x", s.port): prefix + "/x",
			fmt.Sprintf("http://127.0.0.1:%d", s.port): prefix + "/", "https://example.org/x": "https://example.org/x", "//example.org/": "//example.org/",
		} {
			if res, _ := s.get("GET", u+"redirect?to="+url.QueryEscape(to)); res.StatusCode != 302 || res.Header.Get("Location") != want {
				t.Errorf("a redirect to %s: %d %s; want %s", to, res.StatusCode, res.Header.Get("Location"), want)
			}
		}
		if res, _ := s.get("GET", strings.TrimSuffix(u, "/")); res.StatusCode != 308 || res.Header.Get("Location") != prefix+"/" {
			t.Errorf("without the slash: %d %s", res.StatusCode, res.Header.Get("Location"))
		}
		res, _ := s.get("GET", u+"cookies")
		got := strings.Join(res.Header["Set-Cookie"], "|")
		if want := "sbx-port.a=1; HttpOnly; Path=" + prefix + "/x|sbx-port.b=2; Path=" + prefix + "/"; got != want {
			t.Errorf("cookies %q; want %q", got, want)
		}
		for _, k := range []string{"Strict-Transport-Security", "Alt-Svc", "Clear-Site-Data"} {
			if res.Header.Get(k) != "" {
				t.Errorf("%s: %s", k, res.Header.Get(k))
			}
		}
		if csp := res.Header["Content-Security-Policy"]; len(csp) != 2 || !strings.HasPrefix(csp[1], "sandbox ") {
			t.Errorf("policies %q", csp)
		}
	})
	t.Run("limits", func(t *testing.T) {
		if res, _ := s.get("GET", u+"headers"); res.StatusCode != 503 {
			t.Errorf("huge headers of an answer: %d", res.StatusCode)
		}
		if res, _ := s.get("GET", u, "X-Big", strings.Repeat("x", 64<<10)); res.StatusCode != 431 {
			t.Errorf("huge headers of a request: %d", res.StatusCode)
		}
	})
	t.Run("streams", func(t *testing.T) { s.streams(t, u, nil) })
	t.Run("key revoked", func(t *testing.T) {
		id, k := s.newKey("acme", sandboxer.ScopeRead, sandboxer.ScopeWrite)
		next, end := s.follow(t, private+"stream", http.Header{"Authorization": {"Bearer " + k}})
		defer end()
		next()
		if err := s.m.RevokeKey(as("root"), id); err != nil {
			t.Fatal(err)
		}
		for next() {
		}
	})
	if log := s.log.String(); strings.Contains(log, "sbx_port_") || strings.Contains(log, "sbx_key_") {
		t.Error("the log has a token in it")
	}
}

// TestCredentialsStayOutside: by every way to a port, no credential of the broker arrives, wherever it stands.
func TestCredentialsStayOutside(t *testing.T) {
	for _, domain := range []string{"", "http://ports.example.org"} {
		s := newSite(t, domain)
		u := s.signed(time.Hour)
		bearer, basic := "Bearer "+s.key, "Basic "+base64.StdEncoding.EncodeToString([]byte("u:"+s.key))
		ways := map[string][]string{u.URL: nil}
		if domain == "" {
			ways[fmt.Sprintf("%s/p/%s/%d/", s.tcp, s.sb.ID, s.port)] = []string{"Authorization", bearer}
		} else {
			host := strings.SplitN(u.URL, "?", 2)[0]
			ways[host] = []string{"Authorization", bearer}
			ways[host+"?"] = []string{"X-Sandboxer-Token", u.Token}
			ways[host+"?c"] = []string{"Cookie", "sbx-port=" + u.Token}
		}
		for way, header := range ways {
			join := "?"
			if strings.Contains(way, "?") {
				join = "&"
			}
			second := []string{"Authorization", basic}
			if header != nil && header[0] == "Authorization" {
				second = nil // two are refused; see below
			}
			res, got := s.get("POST", way+join+"q="+s.key+"&sbx_token="+u.Token+"&mine=1", slices.Concat(header, second, []string{"X-API-Key", s.key, "X-API-Key", "mine", "X-Other", bearer,
				"Proxy-Authorization", bearer, "Sec-WebSocket-Protocol", "bearer." + s.key, "Referer", "http://x/?sbx_token=" + u.Token, "Cookie", "sbx-port.k=" + s.key + "; __Host-sbx-port=" + u.Token})...)
			if text := fmt.Sprint(got); res.StatusCode != 200 || strings.Contains(text, s.key) || strings.Contains(text, u.Token) || strings.Contains(text, basic) {
				t.Errorf("%s: %d %+v", way, res.StatusCode, got)
			}
			if !strings.HasSuffix(got.URI, "mine=1") || got.Header.Get("X-Api-Key") != "mine" {
				t.Errorf("%s: the sandbox's own does not arrive: %+v", way, got)
			}
		}
	}
	s := newSite(t, "")
	if res, _ := s.get("GET", fmt.Sprintf("%s/p/%s/%d/", s.tcp, s.sb.ID, s.port), "Authorization", "Bearer "+s.key, "Authorization", "Bearer "+s.key); res.StatusCode != 401 {
		t.Errorf("with two keys: %d", res.StatusCode)
	}
}

// follow reads a stream of events line by line until it ends.
func (s *site) follow(t *testing.T, rawurl string, h http.Header) (next func() bool, end func()) {
	t.Helper()
	u, err := url.Parse(rawurl)
	if err != nil {
		t.Fatal(err)
	}
	req, _ := http.NewRequestWithContext(t.Context(), "GET", rawurl, nil)
	req.Host, req.URL.Scheme, req.URL.Host = u.Host, "http", strings.TrimPrefix(s.tcp, "http://")
	for k, v := range h {
		req.Header[k] = v
	}
	tr := &http.Transport{}
	res, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != 200 {
		t.Fatalf("%s: %d", rawurl, res.StatusCode)
	}
	sc := bufio.NewScanner(res.Body)
	return sc.Scan, func() { res.Body.Close(); tr.CloseIdleConnections() }
}

// streams checks what lasts: it is use of the sandbox, and ends with the port.
func (s *site) streams(t *testing.T, u string, h http.Header) {
	ws := strings.Replace(u, "http", "ws", 1)
	parts, err := url.Parse(ws)
	if err != nil {
		t.Fatal(err)
	}
	opts := &websocket.DialOptions{HTTPHeader: h, Host: parts.Host}
	parts.Scheme, parts.Host = "ws", strings.TrimPrefix(s.tcp, "http://")
	parts.Path += "ws"
	c, _, err := websocket.Dial(t.Context(), parts.String(), opts)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	for _, word := range []string{"one", "two"} {
		if err := c.Write(t.Context(), websocket.MessageText, []byte(word)); err != nil {
			t.Fatal(err)
		}
		if _, b, err := c.Read(t.Context()); err != nil || string(b) != word {
			t.Fatalf("echo %q, %v", b, err)
		}
	}
	su, _ := url.Parse(u)
	su.Path += "stream"
	next, end := s.follow(t, su.String(), h)
	defer end()
	for range 4 {
		if !next() {
			t.Fatal("the stream ends early")
		}
	}
	if _, err := s.m.RevokePort(s.ctx, s.sb.ID, s.port); err != nil {
		t.Fatal(err)
	}
	for next() { // until it is cut
	}
	if _, _, err := c.Read(t.Context()); err == nil {
		t.Error("the WebSocket outlives the revocation")
	}
	if res, _ := s.get("GET", u, "Accept", "*/*"); res.StatusCode != 401 {
		t.Errorf("after the revocation: %d", res.StatusCode)
	}
}

func TestPortProxyByName(t *testing.T) {
	s := newSite(t, "https://ports.test")
	signed := s.signed(time.Hour)
	origin := fmt.Sprintf("https://%d-%s.ports.test", s.port, s.sb.ID)
	if signed.URL != origin+"/?sbx_token="+signed.Token {
		t.Fatalf("the URL is %s", signed.URL)
	}
	res, _ := s.get("GET", signed.URL+"&x=1", "Accept", "text/html,*/*")
	cookie := res.Header.Get("Set-Cookie")
	if res.StatusCode != 303 || res.Header.Get("Location") != "/?x=1" || !strings.HasPrefix(cookie, "__Host-sbx-port=sbx_port_") {
		t.Fatalf("exchange: %d %v", res.StatusCode, res.Header)
	}
	for _, attr := range []string{"; Path=/", "; HttpOnly", "; Secure", "; SameSite=Lax", "; Expires="} {
		if !strings.Contains(cookie, attr) {
			t.Errorf("the cookie lacks %s: %s", attr, cookie)
		}
	}
	if strings.Contains(cookie, "Domain") {
		t.Errorf("the cookie goes to other ports: %s", cookie)
	}
	cookie, _, _ = strings.Cut(cookie, ";")
	res, got := s.get("GET", origin+"/x?y=1", "Cookie", "mine=1; "+cookie, "Sec-Fetch-Site", "same-origin", "Origin", origin, "Referer", origin+"/")
	if res.StatusCode != 200 || got.URI != "/x?y=1" || got.Header.Get("Cookie") != "mine=1" || got.Host != strings.TrimPrefix(origin, "https://") ||
		got.Header.Get("Origin") != origin || got.Header.Get("X-Forwarded-Proto") != "https" || strings.Contains(fmt.Sprint(got), "sbx_port_") {
		t.Errorf("with the cookie: %d %+v", res.StatusCode, got)
	}
	if len(res.Header["Content-Security-Policy"]) != 0 {
		t.Error("a page on a name of its own is kept apart from itself")
	}
	// For programs.
	if res, got = s.get("PUT", signed.URL); res.StatusCode != 200 || got.URI != "/" || got.Method != "PUT" {
		t.Errorf("with the token in the address: %d %+v", res.StatusCode, got)
	}
	if res, got = s.get("GET", origin, "X-Sandboxer-Token", signed.Token, "Authorization", "Basic dTpw"); res.StatusCode != 200 ||
		got.Header.Get("Authorization") != "Basic dTpw" || strings.Contains(fmt.Sprint(got), "sbx_port_") {
		t.Errorf("with the token in a header: %d %+v", res.StatusCode, got)
	}
	if res, got = s.get("GET", origin, "Authorization", "Bearer "+s.key); res.StatusCode != 200 || got.Header.Get("Authorization") != "" {
		t.Errorf("with a key: %d %+v", res.StatusCode, got)
	}
	nav := []string{"Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}
	for what, c := range map[string]struct {
		method string
		url    string
		header []string
		status int
	}{
		"nothing":                          {"GET", origin, nil, 401},
		"a wrong cookie":                   {"GET", origin, []string{"Cookie", cookie + "A"}, 401},
		"a wrong token and a good cookie":  {"GET", origin + "/?sbx_token=x", []string{"Cookie", cookie, "Accept", "text/html"}, 401},
		"an empty token and a good cookie": {"GET", origin + "/?sbx_token=", []string{"Cookie", cookie, "Accept", "text/html"}, 401},
		"another port's token":             {"GET", strings.Replace(origin, fmt.Sprint(s.port), "81", 1), []string{"Cookie", cookie}, 401},
		"a sandbox that is none":           {"GET", "https://80-nobody.ports.test", []string{"Cookie", cookie}, 401},
		"a name that is none":              {"GET", "https://console.ports.test", []string{"Authorization", "Bearer " + s.key}, 401},
		"another site":                     {"GET", origin, []string{"Cookie", cookie, "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors"}, 403},
		"a sibling":                        {"GET", origin, []string{"Cookie", cookie, "Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "cors"}, 403},
		"a form of another site":           {"POST", origin, append([]string{"Cookie", cookie, "Sec-Fetch-Site", "cross-site"}, nav...), 403},
		"a link from another site":         {"GET", origin, append([]string{"Cookie", cookie, "Sec-Fetch-Site", "cross-site"}, nav...), 200},
		"another origin, old browser":      {"POST", origin, []string{"Cookie", cookie, "Origin", "https://81-x.ports.test"}, 403},
		"its own origin, old browser":      {"POST", origin, []string{"Cookie", cookie, "Origin", origin}, 200},
		"a WebSocket of another origin":    {"GET", origin, []string{"Cookie", cookie, "Origin", "https://evil.example", "Connection", "Upgrade", "Upgrade", "websocket"}, 403},
	} {
		if res, _ := s.get(c.method, c.url, c.header...); res.StatusCode != c.status {
			t.Errorf("%s: %d; want %d", what, res.StatusCode, c.status)
		}
	}
	for to, want := range map[string]string{
		"/login": "/login", fmt.Sprintf("http://localhost:%d/x", s.port): "/x", "http://" + strings.TrimPrefix(origin, "https://") + "/x": "/x", "https://example.org/": "https://example.org/",
	} {
		if res, _ := s.get("GET", origin+"/redirect?to="+url.QueryEscape(to), "X-Sandboxer-Token", signed.Token); res.Header.Get("Location") != want {
			t.Errorf("a redirect to %s leads to %s; want %s", to, res.Header.Get("Location"), want)
		}
	}
	res, _ = s.get("GET", origin+"/cookies", "X-Sandboxer-Token", signed.Token)
	if got := strings.Join(res.Header["Set-Cookie"], "|"); got != "a=1; Path=/x; HttpOnly|b=2" {
		t.Errorf("cookies %q", got)
	}
	s.streams(t, origin+"/", http.Header{"Cookie": {cookie}, "Origin": {origin}})

	// The URL ends with its sandbox.
	fresh := s.signed(time.Hour)
	if _, err := s.m.Destroy(s.ctx, s.sb.ID); err != nil {
		t.Fatal(err)
	}
	if res, _ := s.get("GET", fresh.URL); res.StatusCode != 401 {
		t.Errorf("after the sandbox's end: %d", res.StatusCode)
	}
	if log := s.log.String(); strings.Contains(log, "sbx_port_") {
		t.Error("the log has a token in it")
	}
}
