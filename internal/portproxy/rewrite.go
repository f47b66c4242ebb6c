package portproxy

import (
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

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

// insideHost is the address that a program in the sandbox takes for its own.
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
	edge.StripCredentials(h, out.URL)
	if !token {
		h.Del("Authorization") // it was the caller's key, and never the sandbox's own
	}
	cookies := out.Cookies()
	h.Del("Cookie")
	for _, c := range cookies {
		name, ok := c.Name, true
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
// those that concern only the answer. Any other header, present or future, may affect
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

// ownHeader reports whether an unknown header of the sandbox's program passes below Path:
// browsers obey no X- headers except these.
func ownHeader(k string) bool {
	switch k {
	case "X-Request-Id", "X-Frame-Options", "X-Content-Type-Options", "X-Xss-Protection", "X-Dns-Prefetch-Control", "X-Permitted-Cross-Domain-Policies",
		"X-Accel-Redirect", "X-Accel-Buffering", "X-Accel-Expires", "X-Accel-Charset", "X-Accel-Limit-Rate", "X-Sendfile", "X-Lighttpd-Send-File",
		"X-Content-Security-Policy", "X-Webkit-Csp", "X-Robots-Tag", "X-Ua-Compatible":
		return false
	}
	return strings.HasPrefix(k, "X-")
}

// neverPassed are the headers that affect more than an answer even on a name of its own:
// other ports of the host, the time after the sandbox, or a proxy in front.
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
	// On the broker's own address a page must not be of its origin. All of several policies
	// apply, so the sandbox's own cannot weaken this one. Its reports would go to others.
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

// withoutReports is a policy without report targets, since reports name the address of
// the page, which contains the token.
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

// setCookie limits a cookie to the port: to its host, or to its path under a name by
// which it is recognized. Ours cannot be set.
func (m mount) setCookie(line string) string {
	pair, attrs, _ := strings.Cut(line, ";")
	name, value, ok := strings.Cut(pair, "=")
	name = strings.TrimSpace(name)
	if !ok || name == "" || strings.TrimPrefix(strings.ToLower(name), "__host-") == edge.PortCookie {
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
