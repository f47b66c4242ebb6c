package remote

import (
	"net/netip"
	"net/url"
	"path"
	"strconv"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// maxURL bounds a URL, in bytes.
const maxURL = 2 << 10

// parseURL reads the URL of something that exists, in a form in which equivalent ones are equal: the host in
// lower case, the port always present, the path clean and without a slash at its end. A user, a query, a fragment and
// escaped characters of a path are refused. Kind: Invalid.
func parseURL(text string) (*url.URL, error) {
	wrong := func(why string) (*url.URL, error) {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%.200q is not the URL of a sandbox: %s", text, why).WithHint("write http://host:port/path or https://host/path")
	}
	if len(text) > maxURL {
		return wrong("it is too long")
	}
	if strings.ContainsAny(text, "@?#%\\") { // before it is parsed: what is refused may be a secret, and is not repeated
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the URL of a sandbox cannot contain an account, a query, a fragment, a backslash or escaped characters").WithHint("write http://host:port/path or https://host/path")
	}
	u, err := url.Parse(text)
	if err != nil {
		return wrong("it cannot be read")
	}
	port := u.Port()
	switch u.Scheme {
	case "http":
		if port == "" {
			port = "80"
		}
	case "https":
		if port == "" {
			port = "443"
		}
	default:
		return wrong("it begins with neither http:// nor https://")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return wrong("its port is not valid")
	}
	host := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	if host == "" || strings.HasPrefix(host, ".") || strings.HasSuffix(host, ".") || strings.ContainsFunc(host, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) {
		return wrong("its host is not valid")
	}
	if a, err := netip.ParseAddr(host); err == nil {
		host = a.Unmap().String() // one of several ways to write it
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	p := strings.TrimSuffix(u.Path, "/")
	if p == "/" || p != "" && path.Clean(p) != p || strings.ContainsFunc(p, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return wrong("its path is not clean")
	}
	out := &url.URL{Scheme: u.Scheme, Host: host + ":" + strconv.FormatUint(n, 10), Path: p}
	if out.EscapedPath() != p {
		return wrong("its path contains characters that must be escaped")
	}
	return out, nil
}

// below reports whether u is dir or within it. Both come from parseURL.
func below(u, dir *url.URL) bool {
	return u.Scheme == dir.Scheme && u.Host == dir.Host && (u.Path == dir.Path || strings.HasPrefix(u.Path, dir.Path+"/"))
}
