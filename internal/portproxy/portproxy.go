// Package portproxy carries HTTP between callers outside and open ports of sandboxes.
// It trusts neither side: a sandbox's answer must not affect anything beyond its own port,
// and no credential of the broker may reach the sandbox.
//
// A port has an address of its own where the operator has given a domain for it,
// https://<port>-<id>.<domain>/, and otherwise is below /p/ on the broker's own
// address, where a header makes browsers isolate it (Content-Security-Policy:
// sandbox). The manager decides who may visit (Visit): a caller with a key, or with a
// token, which a signed URL contains.
package portproxy

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/access"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// Path is where ports are without a name of their own: /p/<token>/…, and /p/<id>/<port>/… for principals.
const Path = "/p/"

const (
	cookiePrefix = edge.PortCookie + "." // of a sandbox's cookies below Path

	dialLimit   = 15 * time.Second
	streamIdle  = 15 * time.Minute // nothing moves: the stream is cut, and the sandbox not in use any more
	pooledIdle  = 30 * time.Second
	maxHeaders  = 64 << 10 // of an answer
	maxPooled   = 8        // idle connections to one port
	maxAllPools = 512
)

// Sandboxes opens the way to ports, for the principal of ctx or with a token. Its errors have kinds.
type Sandboxes interface {
	Visit(ctx context.Context, a manager.PortAccess) (*manager.Visit, error)
}

// Proxy serves ports of sandboxes. Close closes idle connections.
type Proxy struct {
	sandboxes Sandboxes

	base *url.URL
	pool *http.Transport
}

// New returns a proxy in front of sandboxes. base is the address below whose host every port has
// a name of its own; nil means that ports are below Path only.
func New(sandboxes Sandboxes, base *url.URL) *Proxy {
	p := &Proxy{sandboxes: sandboxes, base: base}
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

// Door is the proxy as a door of an edge. Pages of sandboxes may be of any origin: the origin
// is checked here for the one credential that a browser adds on its own, a cookie.
func (p *Proxy) Door() edge.Door {
	return edge.Door{Name: "port proxy", Path: Path, Routes: p, AnyOrigin: true, Host: func(host string) bool {
		_, _, ok := p.host(host)
		return ok
	}}
}

type visitKey struct{}

// host returns the sandbox and the port that host, as in a request, names;
// false if it is not below the proxy's own.
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
	// Every name below the domain belongs to the proxy, even one that cannot exist.
	number, id, _ := strings.Cut(label, "-")
	if n, err := strconv.ParseUint(number, 10, 16); err == nil && n > 0 && number[0] != '0' && sandboxer.CheckID(id) == nil {
		return id, int(n), true
	}
	return "", 0, true
}

// URL returns the address of a port: by its own name if there is a domain for that, or
// below base, the broker's own address; "" if there is neither. With a token it gives its
// bearer access.
func (p *Proxy) URL(base *url.URL, id string, port int, token sandboxer.Secret) string {
	if p.base != nil {
		u := url.URL{Scheme: p.base.Scheme, Host: strconv.Itoa(port) + "-" + id + "." + p.base.Host, Path: "/"}
		if token != "" {
			u.RawQuery = url.Values{edge.TokenQuery: {token.Reveal()}}.Encode()
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
	WithHint("ask its owner for a signed URL (sandboxer port url ID PORT), or send an API key")

// pattern is the pattern of every route of the proxy: so metrics do not have one for each
// port.
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

// portRoute is the route to a port. r is the request for the sandbox: without what was meant for
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

// visit opens the way to a port: with a token, or for the principal in ctx. The returned ctx
// has the visit in it, and ends when the visit has to end.
func (p *Proxy) visit(ctx context.Context, a manager.PortAccess) (context.Context, *manager.Visit, func(), error) {
	ctx, cancel := edge.Stream(ctx)
	v, err := p.sandboxes.Visit(ctx, a)
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

// exchangeRoute is the route for a browser that comes with a token in its address.
func (p *Proxy) exchangeRoute(a manager.PortAccess, c http.Cookie, r *http.Request) edge.Route {
	return openRoute(func(w http.ResponseWriter, in *http.Request) { p.exchange(w, r.WithContext(in.Context()), a, c) })
}

// openRoute is a route that identifies no caller and reaches no sandbox.
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
	case r.Header.Get(edge.TokenHeader) != "":
		a.Token = sandboxer.Secret(r.Header.Get(edge.TokenHeader))
	case q.Has(edge.TokenQuery):
		a.Token = sandboxer.Secret(q.Get(edge.TokenQuery))
		r = withoutQuery(r, edge.TokenQuery)
		if (r.Method == http.MethodGet || r.Method == http.MethodHead) && strings.Contains(r.Header.Get("Accept"), "text/html") {
			return p.exchangeRoute(a, cookie, r)
		}
	default:
		if c, err := r.Cookie(cookie.Name); err == nil && !slices.ContainsFunc(r.Header.Values("Authorization"), edge.HoldsCredential) {
			if !ownOrigin(r, at.public) {
				return refusal(sandboxer.E(sandboxer.Denied, nil, "requests from other web pages are refused"))
			}
			a.Token = sandboxer.Secret(c.Value)
		}
	}
	return p.portRoute(a, at, r)
}

func (p *Proxy) cookie() http.Cookie {
	c := http.Cookie{Name: edge.PortCookie, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode}
	if p.base.Scheme == "https" {
		c.Name, c.Secure = "__Host-"+edge.PortCookie, true // no other host can set it
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
	v, err := p.sandboxes.Visit(r.Context(), a)
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

// ownOrigin reports whether a request with a cookie comes from the port's
// own pages, or from a user who follows a link. Browsers count pages of sibling ports as the
// same site; they must not pass.
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
	case strings.HasPrefix(first, access.PortTokenPrefix):
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
		if t := r.Header.Get(edge.TokenHeader); t != "" {
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

// finalResponses gets only final answers: earlier ones, such as early hints, can
// set cookies and speak for the origin too, and they are not needed.
type finalResponses struct{ pool http.RoundTripper }

func (f finalResponses) RoundTrip(r *http.Request) (*http.Response, error) {
	return f.pool.RoundTrip(r.WithContext(withoutValues{r.Context()}))
}

// withoutValues is a ctx without the values of others, among them the function to call for
// answers that are not final.
type withoutValues struct{ context.Context }

func (u withoutValues) Value(key any) any {
	if _, ok := key.(visitKey); ok {
		return u.Context.Value(key)
	}
	return nil
}

// target is a name for the pool of connections to a port: connections of one generation are not
// used for the next.
func target(v *manager.Visit) string {
	return strconv.Itoa(v.Port) + "-g" + strconv.Itoa(v.Generation) + "-" + v.SandboxID + ".sandbox.invalid:" + strconv.Itoa(v.Port)
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
