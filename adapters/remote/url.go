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

// parseURL reads the URL of something that exists, in the one form in which two that mean the same are equal: the host in
// lower case, the port always there, the path clean and without a slash at its end. A user, a query, a fragment and
// escaped characters of a path are refused. Kind: Invalid.
func parseURL(text string) (*url.URL, error) {
	wrong := func(why string) (*url.URL, error) {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "%.200q is not the URL of a sandbox: %s", text, why).WithHint("write http://host:port/path or https://host/path")
	}
	if len(text) > maxURL {
		return wrong("it is too long")
	}
	if strings.ContainsAny(text, "@?#%\\") { // before it is parsed: what is refused may be a secret, and is not repeated
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the URL of a sandbox has no account, query, fragment, backslash or escaped characters in it").WithHint("write http://host:port/path or https://host/path")
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
		return wrong("its port is none")
	}
	host := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	if host == "" || strings.ContainsFunc(host, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) {
		return wrong("its host is none")
	}
	if a, err := netip.ParseAddr(host); err == nil {
		host = a.Unmap().String() // one of several ways to write it
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	p := strings.TrimSuffix(u.Path, "/")
	if p != "" && path.Clean(p) != p || strings.ContainsFunc(p, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return wrong("its path is not clean")
	}
	return &url.URL{Scheme: u.Scheme, Host: host + ":" + strconv.FormatUint(n, 10), Path: p}, nil
}

// below reports whether u is dir or lies in it. Both are of parseURL.
func below(u, dir *url.URL) bool {
	return u.Scheme == dir.Scheme && u.Host == dir.Host && (u.Path == dir.Path || strings.HasPrefix(u.Path, dir.Path+"/"))
}
