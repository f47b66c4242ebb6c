// Package portproxy carries HTTP between callers outside and open ports of sandboxes.
// It trusts neither side: what a sandbox answers must not reach beyond its own port,
// and no credential of the broker may reach the sandbox.
//
// A port has an address of its own where the operator has given a domain for it,
// https://<port>-<id>.<domain>/, and otherwise lies below /p/ on the broker's own
// address, where browsers are told to keep it apart (Content-Security-Policy:
// sandbox). Who may come is the manager's decision (Visit): somebody with a key, or with a
// token, which a signed URL has in it.
package portproxy

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// Where callers put a token.
const (
	Path        = "/p/"               // /p/<token>/…; also /p/<id>/<port>/… for principals
	TokenHeader = "X-Sandboxer-Token" // for programs
	TokenQuery  = "sbx_token"         // on a name of its own; browsers get a cookie for it
)

const (
	cookieName   = "sbx-port"
	cookiePrefix = "sbx-port." // of a sandbox's cookies below Path
	keyPrefix    = "sbx_key_"

	dialLimit   = 15 * time.Second
	streamIdle  = 15 * time.Minute // nothing moves: the stream is cut, and the sandbox not in use any more
	pooledIdle  = 30 * time.Second
	maxHeaders  = 64 << 10 // of an answer
	maxPooled   = 8        // idle connections to one port
	maxAllPools = 512
)

// Proxy serves ports of sandboxes. Close lets go of idle connections.
type Proxy struct {
	m    *manager.Manager
	base *url.URL
	pool *http.Transport
}

// New returns a proxy in front of m. base is the address below whose host every port has
// a name of its own; nil means that ports lie below Path only.
func New(m *manager.Manager, base *url.URL) *Proxy {
	p := &Proxy{m: m, base: base}
	p.pool = &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			v, _ := ctx.Value(visitKey{}).(*manager.Visit)
			var c net.Conn
			var err error
			ctx, cancel := context.WithTimeout(ctx, dialLimit)
			defer cancel()
			if v != nil && v.Dials() {
				c, err = v.Dial(ctx)
			} else {
				c, err = (&net.Dialer{}).DialContext(ctx, network, addr)
			}
			if err != nil {
				return nil, err
			}
			return &idleConn{Conn: c}, nil
		},
		DisableCompression:     true,
		MaxIdleConns:           maxAllPools,
		MaxIdleConnsPerHost:    maxPooled,
		IdleConnTimeout:        pooledIdle,
		MaxResponseHeaderBytes: maxHeaders,
		TLSHandshakeTimeout:    dialLimit,
		ExpectContinueTimeout:  time.Second,
	}
	return p
}

// Close closes idle connections to sandboxes.
func (p *Proxy) Close() { p.pool.CloseIdleConnections() }

// Door is the proxy as a door of an edge. Pages of sandboxes may be of any origin: whose
// credential a browser could add by itself, its cookie, is held against the origin here.
func (p *Proxy) Door() edge.Door {
	return edge.Door{Name: "port proxy", Path: Path, Routes: p, AnyOrigin: true, Host: func(host string) bool {
		_, _, ok := p.host(host)
		return ok
	}}
}

type visitKey struct{}

// host returns the sandbox and the port that host, as a request has it, is the name
// of; false if it is not below the proxy's own.
func (p *Proxy) host(host string) (id string, port int, ok bool) {
	if p.base == nil {
		return "", 0, false
	}
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	label, ok := strings.CutSuffix(strings.ToLower(strings.TrimSuffix(host, ".")), "."+strings.ToLower(p.base.Hostname()))
	if !ok {
		return "", 0, false
	}
	// Whatever is below the domain belongs to the proxy, also what cannot exist.
	number, id, _ := strings.Cut(label, "-")
	if n, err := strconv.ParseUint(number, 10, 16); err == nil && n > 0 && number[0] != '0' && sandboxer.CheckID(id) == nil {
		return id, int(n), true
	}
	return "", 0, true
}

// URL returns the address of a port: by its own name if there is a domain for that, or
// below base, the broker's own address; "" if there is neither. With a token it lets its
// bearer in.
func (p *Proxy) URL(base *url.URL, id string, port int, token sandboxer.Secret) string {
	if p.base != nil {
		u := url.URL{Scheme: p.base.Scheme, Host: strconv.Itoa(port) + "-" + id + "." + p.base.Host, Path: "/"}
		if token != "" {
			u.RawQuery = url.Values{TokenQuery: {token.Reveal()}}.Encode()
		}
		return u.String()
	}
	if base == nil {
		return ""
	}
	u := url.URL{Scheme: base.Scheme, Host: base.Host, Path: Path + id + "/" + strconv.Itoa(port) + "/"}
	if token != "" {
		u.Path = Path + token.Reveal() + "/"
	}
	return u.String()
}

var errNoPort = sandboxer.E(sandboxer.Unauthenticated, nil, "there is no such port, or it is private").
	WithHint("ask its owner for a signed URL (sandboxer port url), or send an API key")

// pattern is the one of every route of the proxy: in metrics there are not as many as
// there are ports.
const pattern = "port proxy"

// Routes implements edge.Router.
func (p *Proxy) Routes() []edge.Route {
	return []edge.Route{
		p.portRoute(manager.PortAccess{}, mount{}, nil),
		p.portRoute(manager.PortAccess{Token: "token"}, mount{}, nil),
		p.exchangeRoute(manager.PortAccess{}, http.Cookie{}, nil),
		openRoute(nil), // a slash that is missing
	}
}

// Route implements edge.Router.
func (p *Proxy) Route(r *http.Request) edge.Route {
	if id, port, ok := p.host(r.Host); ok {
		if id == "" {
			return refusal(errNoPort)
		}
		return p.byHost(r, id, port)
	}
	return p.byPath(r)
}

// portRoute is the way to a port. r is what the sandbox is to get: without what was meant for
// the proxy.
func (p *Proxy) portRoute(a manager.PortAccess, at mount, r *http.Request) edge.Route {
	access := edge.Needs(sandboxer.ScopeWrite)
	if a.Token != "" {
		access = edge.AdmittedBy(func(ctx context.Context) (context.Context, sandboxer.Principal, func(), error) {
			ctx, v, end, err := p.visit(ctx, a)
			if err != nil {
				return nil, sandboxer.Principal{}, nil, err
			}
			return ctx, sandboxer.Principal{Tenant: v.Tenant, Actor: "url:" + v.SandboxID}, end, nil
		})
	}
	return edge.Route{Pattern: pattern, Access: access, Handler: http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
		ctx := in.Context()
		v, _ := ctx.Value(visitKey{}).(*manager.Visit)
		if v == nil {
			var end func()
			var err error
			if ctx, v, end, err = p.visit(ctx, a); err != nil {
				edge.Fail(w, in, err)
				return
			}
			defer end()
		}
		p.serve(w, r.WithContext(ctx), v, at, a.Token != "")
	})}
}

// visit opens the way to a port: with a token, or for the principal in ctx. The ctx that
// it returns has the visit in it, and ends when the visitor has to go.
func (p *Proxy) visit(ctx context.Context, a manager.PortAccess) (context.Context, *manager.Visit, func(), error) {
	ctx, cancel := edge.Stream(ctx)
	v, err := p.m.Visit(ctx, a)
	if err != nil {
		cancel(nil)
		return nil, nil, nil, err
	}
	stop := context.AfterFunc(v.Ctx, func() { cancel(context.Cause(v.Ctx)) })
	return context.WithValue(ctx, visitKey{}, v), v, func() {
		stop()
		cancel(nil)
		v.End()
	}, nil
}

// exchangeRoute is the way of a browser that comes with a token in its address.
func (p *Proxy) exchangeRoute(a manager.PortAccess, c http.Cookie, r *http.Request) edge.Route {
	return openRoute(func(w http.ResponseWriter, in *http.Request) { p.exchange(w, r.WithContext(in.Context()), a, c) })
}

// openRoute is a route on which nobody is identified and no sandbox is reached.
func openRoute(h http.HandlerFunc) edge.Route {
	return edge.Route{Pattern: pattern, Access: edge.Anyone(), Handler: h}
}

func refusal(err error) edge.Route {
	return openRoute(func(w http.ResponseWriter, r *http.Request) { edge.Fail(w, r, err) })
}

// mount is where a port appears to its visitors.
type mount struct {
	host   bool     // on a name of its own; otherwise below prefix
	prefix string   // without the last slash; "" on a name of its own
	public *url.URL // scheme and host that visitors use
}

func (p *Proxy) byHost(r *http.Request, id string, port int) edge.Route {
	at := mount{host: true, public: &url.URL{Scheme: p.base.Scheme, Host: r.Host}}
	a := manager.PortAccess{ID: id, Port: port}
	q := r.URL.Query()
	cookie := p.cookie()
	switch {
	case r.Header.Get(TokenHeader) != "":
		a.Token = sandboxer.Secret(r.Header.Get(TokenHeader))
	case q.Has(TokenQuery):
		a.Token = sandboxer.Secret(q.Get(TokenQuery))
		r = withoutQuery(r, TokenQuery)
		if (r.Method == http.MethodGet || r.Method == http.MethodHead) && strings.Contains(r.Header.Get("Accept"), "text/html") {
			return p.exchangeRoute(a, cookie, r)
		}
	default:
		if c, err := r.Cookie(cookie.Name); err == nil && !strings.Contains(r.Header.Get("Authorization"), keyPrefix) {
			if !ownOrigin(r, at.public) {
				return refusal(sandboxer.E(sandboxer.Denied, nil, "requests from other web pages are refused"))
			}
			a.Token = sandboxer.Secret(c.Value)
		}
	}
	return p.portRoute(a, at, r)
}

func (p *Proxy) cookie() http.Cookie {
	c := http.Cookie{Name: cookieName, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode}
	if p.base.Scheme == "https" {
		c.Name, c.Secure = "__Host-"+cookieName, true // nobody else's host can set it
	}
	return c
}

// exchange gives a browser a cookie for the token in its address, which then is in
// neither history nor referrers.
func (p *Proxy) exchange(w http.ResponseWriter, r *http.Request, a manager.PortAccess, c http.Cookie) {
	if a.Token == "" {
		edge.Fail(w, r, errNoPort)
		return
	}
	v, err := p.m.Visit(r.Context(), a)
	if err != nil {
		edge.Fail(w, r, err)
		return
	}
	v.End()
	c.Value, c.Expires = a.Token.Reveal(), v.Until
	http.SetCookie(w, &c)
	w.Header().Set("Referrer-Policy", "no-referrer")
	w.Header().Set("Cache-Control", "no-store")
	to := url.URL{Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
	if strings.HasPrefix(to.Path, "//") || to.Path == "" {
		to.Path, to.RawPath = "/", "" // "//host" would lead elsewhere
	}
	w.Header().Set("Location", to.String())
	w.WriteHeader(http.StatusSeeOther)
}

// ownOrigin reports whether a request that a cookie speaks for comes from the port's
// own pages, or is somebody following a link. Pages of sibling ports count as the
// same site to browsers, and must not.
func ownOrigin(r *http.Request, public *url.URL) bool {
	origin := r.Header.Get("Origin")
	switch r.Header.Get("Sec-Fetch-Site") {
	case "same-origin":
		return true
	case "none", "":
		if origin == "" {
			return r.Header.Get("Sec-Fetch-Site") != "" || r.Header.Get("Upgrade") == "" && isSafe(r.Method)
		}
		u, err := url.Parse(origin)
		return err == nil && u.Scheme == public.Scheme && strings.EqualFold(u.Host, public.Host)
	}
	return isSafe(r.Method) && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}

// withoutQuery returns r without one parameter of its query, the others as they came.
func withoutQuery(r *http.Request, name string) *http.Request {
	var kept []string
	for part := range strings.SplitSeq(r.URL.RawQuery, "&") {
		key, _, _ := strings.Cut(part, "=")
		if k, err := url.QueryUnescape(key); err != nil || k != name {
			kept = append(kept, part)
		}
	}
	u := *r.URL
	u.RawQuery = strings.Join(kept, "&")
	out := *r
	out.URL = &u
	return &out
}

func isSafe(method string) bool { return method == http.MethodGet || method == http.MethodHead }

func (p *Proxy) byPath(r *http.Request) edge.Route {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	at := mount{public: &url.URL{Scheme: scheme, Host: r.Host}}
	var a manager.PortAccess
	first, rest, slash := strings.Cut(strings.TrimPrefix(r.URL.EscapedPath(), Path), "/")
	at.prefix = Path + first
	switch {
	case strings.HasPrefix(first, manager.PortTokenPrefix):
		a.Token = sandboxer.Secret(first)
	default:
		var number string
		number, rest, slash = strings.Cut(rest, "/")
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil || n == 0 {
			return refusal(sandboxer.E(sandboxer.NotFound, nil, "there is nothing at %s", edge.Redact(r.URL.Path)).
				WithHint("a port is at %s<sandbox>/<port>/", Path))
		}
		a.Ref, a.Port = first, int(n)
		at.prefix += "/" + number
		if t := r.Header.Get(TokenHeader); t != "" {
			a.Token = sandboxer.Secret(t)
		}
	}
	if !slash { // so that relative references work
		to := at.prefix + "/"
		if r.URL.RawQuery != "" {
			to += "?" + r.URL.RawQuery
		}
		return openRoute(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Referrer-Policy", "no-referrer")
			w.Header().Set("Location", to)
			w.WriteHeader(http.StatusPermanentRedirect)
		})
	}
	path, err := url.PathUnescape(rest)
	if err != nil {
		return refusal(sandboxer.E(sandboxer.Invalid, err, "the path is not well escaped"))
	}
	r2 := *r
	u := *r.URL
	u.Path, u.RawPath = "/"+path, "/"+rest
	r2.URL = &u
	return p.portRoute(a, at, &r2)
}

// serve carries one request, whose ctx has the visit v in it, to its port.
func (p *Proxy) serve(w http.ResponseWriter, r *http.Request, v *manager.Visit, at mount, token bool) {
	ctx := r.Context()
	to := &url.URL{Scheme: "http", Host: target(v)}
	header := http.Header{}
	if !v.Dials() {
		e, err := v.Endpoint(ctx)
		if err == nil {
			to, err = url.Parse(e.URL)
			header = e.Header
		}
		if err != nil {
			edge.Fail(w, r, err)
			return
		}
	}
	for _, h := range []string{"Cache-Control", "X-Content-Type-Options"} {
		w.Header().Del(h) // the sandbox's to say
	}
	rp := &httputil.ReverseProxy{
		Transport:     finalResponses{p.pool},
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0), // the edge notes how each request went
		Rewrite:       func(pr *httputil.ProxyRequest) { rewrite(pr, v, at, to, header, token) },
		ModifyResponse: func(res *http.Response) error {
			restrictHeader(res.Header, v, at, to)
			res.Header.Del("Trailer")
			res.Trailer = nil // see withoutTrailers
			if res.StatusCode != http.StatusSwitchingProtocols {
				res.Body = &withoutTrailers{res.Body, res}
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if cause := context.Cause(ctx); cause != nil && r.Context().Err() != nil {
				err = cause
			}
			var e *sandboxer.Error
			if !errors.As(err, &e) {
				err = sandboxer.E(sandboxer.Unavailable, err, "port %d of sandbox %s did not answer as HTTP does", v.Port, v.SandboxID)
			}
			edge.Fail(w, r, err)
		},
	}
	rp.ServeHTTP(w, r)
}

// finalResponses gets the final answers alone: what comes before them, such as early hints, can
// set cookies and speak for the origin as well as they, and nobody needs it.
type finalResponses struct{ pool http.RoundTripper }

func (f finalResponses) RoundTrip(r *http.Request) (*http.Response, error) {
	return f.pool.RoundTrip(r.WithContext(withoutValues{r.Context()}))
}

// withoutValues is a ctx without the values of others, among them what is to be called for
// answers that are not final.
type withoutValues struct{ context.Context }

func (u withoutValues) Value(key any) any {
	if _, ok := key.(visitKey); ok {
		return u.Context.Value(key)
	}
	return nil
}

// withoutTrailers is the body of an answer, whose trailers are dropped: they are headers, too.
type withoutTrailers struct {
	io.ReadCloser
	res *http.Response
}

func (b *withoutTrailers) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.res.Trailer = nil
	}
	return n, err
}

func (b *withoutTrailers) Close() error {
	err := b.ReadCloser.Close()
	b.res.Trailer = nil
	return err
}

// target is a name for the pool of connections to a port: one generation's are not
// used for the next.
func target(v *manager.Visit) string {
	return strconv.Itoa(v.Port) + "-g" + strconv.Itoa(v.Generation) + "-" + v.SandboxID + ".sandbox.invalid:" + strconv.Itoa(v.Port)
}

// insideHost is what a program in the sandbox takes its own address for.
func insideHost(v *manager.Visit) string { return "localhost:" + strconv.Itoa(v.Port) }

// rewrite makes the request that the sandbox gets.
func rewrite(pr *httputil.ProxyRequest, v *manager.Visit, at mount, to *url.URL, header http.Header, token bool) {
	out := pr.Out
	out.URL.Scheme, out.URL.Host = to.Scheme, to.Host
	if base := strings.TrimSuffix(to.Path, "/"); base != "" {
		out.URL.Path, out.URL.RawPath = base+out.URL.Path, ""
	}
	out.Host = insideHost(v)
	if at.host {
		out.Host = pr.In.Host // as it is in Origin, which many compare
	}
	if !v.Dials() {
		out.Host = to.Host
	}
	h := out.Header
	h.Del(TokenHeader)
	// Without a token the header was the caller's key; with one it is the sandbox's own,
	// unless somebody sends his key where it is not wanted.
	if auth := h.Get("Authorization"); !token || strings.Contains(auth, keyPrefix) {
		h.Del("Authorization")
	}
	cookies := out.Cookies()
	h.Del("Cookie")
	for _, c := range cookies {
		name, ok := c.Name, strings.TrimPrefix(c.Name, "__Host-") != cookieName
		if !at.host {
			name, ok = strings.CutPrefix(c.Name, cookiePrefix) // others are the broker's
		}
		if ok {
			out.AddCookie(&http.Cookie{Name: name, Value: c.Value, Quoted: c.Quoted})
		}
	}
	if !at.host {
		h.Del("Referer") // the token may be in it
		if h.Get("Origin") != "" {
			h.Set("Origin", "http://"+out.Host)
		}
	}
	ip, _, err := net.SplitHostPort(pr.In.RemoteAddr)
	if _, perr := netip.ParseAddr(ip); err == nil && perr == nil {
		h.Set("X-Forwarded-For", ip)
	}
	h.Set("X-Forwarded-Host", at.public.Host)
	h.Set("X-Forwarded-Proto", at.public.Scheme)
	h.Del("X-Forwarded-Prefix")
	if at.prefix != "" {
		prefix := at.prefix
		if token {
			prefix = Path // never the token
		}
		h.Set("X-Forwarded-Prefix", prefix)
	}
	for k, vs := range header {
		h[http.CanonicalHeaderKey(k)] = slices.Clone(vs)
	}
}

// passedByPath are the headers of an answer that pass below Path, on the broker's own address:
// those that speak for the answer alone. Whatever else there is or will be may speak for
// the origin, which is not the sandbox's.
var passedByPath = set(
	"Access-Control-Allow-Credentials", "Access-Control-Allow-Headers", "Access-Control-Allow-Methods", "Access-Control-Allow-Origin",
	"Access-Control-Expose-Headers", "Access-Control-Max-Age", "Cross-Origin-Embedder-Policy", "Cross-Origin-Opener-Policy", "Cross-Origin-Resource-Policy",
	"Link", "Mcp-Protocol-Version", "Mcp-Session-Id", "Permissions-Policy", "Refresh", "Timing-Allow-Origin",
	"Accept-Patch", "Accept-Post", "Accept-Ranges", "Age", "Allow", "Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language",
	"Content-Length", "Content-Location", "Content-Md5", "Content-Range", "Content-Security-Policy", "Content-Type", "Date", "Digest", "Etag", "Expires",
	"Last-Modified", "Location", "Pragma", "Preference-Applied", "Ratelimit", "Ratelimit-Limit", "Ratelimit-Policy", "Ratelimit-Remaining", "Ratelimit-Reset",
	"Repr-Digest", "Retry-After", "Server", "Server-Timing", "Set-Cookie", "Sourcemap", "Vary", "Warning", "Www-Authenticate",
	"Connection", "Upgrade", "Sec-Websocket-Accept", "Sec-Websocket-Extensions", "Sec-Websocket-Protocol", "Sec-Websocket-Version", // of streams
)

func set(names ...string) map[string]bool {
	m := map[string]bool{}
	for _, n := range names {
		m[n] = true
	}
	return m
}

// ownHeader reports whether below Path a header of the sandbox's program passes although
// nobody knows it: browsers take no orders from X- headers but from these.
func ownHeader(k string) bool {
	switch k {
	case "X-Request-Id", "X-Frame-Options", "X-Content-Type-Options", "X-Xss-Protection", "X-Dns-Prefetch-Control", "X-Permitted-Cross-Domain-Policies",
		"X-Accel-Redirect", "X-Accel-Buffering", "X-Accel-Expires", "X-Accel-Charset", "X-Accel-Limit-Rate", "X-Sendfile", "X-Lighttpd-Send-File",
		"X-Content-Security-Policy", "X-Webkit-Csp", "X-Robots-Tag", "X-Ua-Compatible":
		return false
	}
	return strings.HasPrefix(k, "X-")
}

// neverPassed are the headers that speak for more than an answer also on a name of its own:
// for other ports of the host, for the time after the sandbox, or to a proxy in front.
var neverPassed = []string{
	"Alt-Svc", "Alt-Used", "Strict-Transport-Security", "Public-Key-Pins", "Public-Key-Pins-Report-Only", "Expect-Ct", "Nel", "Report-To", "Reporting-Endpoints",
	"X-Request-Id", "X-Accel-Redirect", "X-Accel-Buffering", "X-Accel-Expires", "X-Accel-Charset", "X-Accel-Limit-Rate", "X-Sendfile", "X-Lighttpd-Send-File",
	"Proxy-Authenticate", "Proxy-Authorization",
}

// restrictHeader keeps an answer within the port's own bounds.
func restrictHeader(h http.Header, v *manager.Visit, at mount, to *url.URL) {
	for _, k := range neverPassed {
		h.Del(k)
	}
	if !at.host {
		for k := range h {
			if k := http.CanonicalHeaderKey(k); !passedByPath[k] && !ownHeader(k) {
				h.Del(k)
			}
		}
	}
	for _, k := range []string{"Location", "Content-Location"} {
		if s := h.Get(k); s != "" {
			h.Set(k, at.publicURL(s, v, to))
		}
	}
	lines := h["Set-Cookie"]
	h.Del("Set-Cookie")
	for _, line := range lines {
		if line = at.setCookie(line); line != "" {
			h.Add("Set-Cookie", line)
		}
	}
	if at.host {
		return
	}
	// On the broker's own address a page must not be of its origin. Several policies all
	// hold, so the sandbox's own cannot weaken this one. Its reports would go to others.
	var policies []string
	for _, line := range h["Content-Security-Policy"] {
		for policy := range strings.SplitSeq(line, ",") {
			if policy = withoutReports(policy); policy != "" {
				policies = append(policies, policy)
			}
		}
	}
	h["Content-Security-Policy"] = append(policies, "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("X-Content-Type-Options", "nosniff")
}

// withoutReports is a policy without where to report, since reports name the address of
// the page, in which the token is.
func withoutReports(policy string) string {
	var kept []string
	for d := range strings.SplitSeq(policy, ";") {
		name, _, _ := strings.Cut(strings.TrimSpace(d), " ")
		if n := strings.ToLower(name); n != "" && n != "report-uri" && n != "report-to" {
			kept = append(kept, strings.TrimSpace(d))
		}
	}
	return strings.Join(kept, "; ")
}

// publicURL turns a reference to the sandbox's own address into one that works outside.
func (m mount) publicURL(s string, v *manager.Visit, to *url.URL) string {
	u, err := url.Parse(s)
	if err != nil {
		return s
	}
	if u.Host != "" {
		own := []string{insideHost(v), "127.0.0.1:" + strconv.Itoa(v.Port), "[::1]:" + strconv.Itoa(v.Port), to.Host}
		if m.host {
			own = append(own, m.public.Host)
		}
		if v.Port == 80 {
			own = append(own, "localhost", "127.0.0.1", "[::1]")
		}
		if !slices.Contains(own, u.Host) {
			return s
		}
		u.Scheme, u.Host = "", ""
		if u.Path == "" {
			u.Path = "/"
		}
		if strings.HasPrefix(u.Path, "//") {
			return s
		}
	}
	if !strings.HasPrefix(u.Path, "/") || m.host {
		return u.String()
	}
	if u.RawPath != "" {
		u.RawPath = m.prefix + u.RawPath
	}
	u.Path = m.prefix + u.Path
	return u.String()
}

// setCookie bounds a cookie to the port: to its host, or to its path under a name by
// which it is known again. Ours cannot be set.
func (m mount) setCookie(line string) string {
	pair, attrs, _ := strings.Cut(line, ";")
	name, value, ok := strings.Cut(pair, "=")
	name = strings.TrimSpace(name)
	if !ok || name == "" || strings.TrimPrefix(strings.ToLower(name), "__host-") == cookieName {
		return ""
	}
	out := name + "=" + value
	path := ""
	var kept []string
	if attrs != "" {
		for a := range strings.SplitSeq(attrs, ";") {
			k, val, _ := strings.Cut(strings.TrimSpace(a), "=")
			switch strings.ToLower(strings.TrimSpace(k)) {
			case "domain":
				continue
			case "path":
				path = strings.TrimSpace(val)
				if !m.host {
					continue
				}
			}
			kept = append(kept, strings.TrimSpace(a))
		}
	}
	if !m.host {
		if !strings.HasPrefix(path, "/") {
			path = "/"
		}
		out = cookiePrefix + out
		kept = append(kept, "Path="+m.prefix+path)
	}
	for _, a := range kept {
		out += "; " + a
	}
	return out
}

// idleConn is cut when nothing moves over it for streamIdle.
type idleConn struct {
	net.Conn
	mu   sync.Mutex
	last time.Time
}

func (c *idleConn) touch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	// Moving a deadline takes a lock of the connection's; once a minute is enough.
	if now := time.Now(); now.Sub(c.last) > streamIdle/16 {
		c.last = now
		_ = c.Conn.SetDeadline(now.Add(streamIdle))
	}
}

func (c *idleConn) Read(b []byte) (int, error)  { c.touch(); return c.Conn.Read(b) }
func (c *idleConn) Write(b []byte) (int, error) { c.touch(); return c.Conn.Write(b) }

// CloseWrite ends the sending half, where the stream can do that.
func (c *idleConn) CloseWrite() error { return halfclose.CloseWrite(c.Conn) }
