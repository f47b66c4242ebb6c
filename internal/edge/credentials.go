package edge

import (
	"encoding/base64"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// The headers, the query parameter and the cookie in which doors look for a credential, in addition to Authorization.
const (
	KeyHeader   = "X-Api-Key"         // of deer-flow's door
	TokenHeader = "X-Sandboxer-Token" // of the port proxy, for programs
	TokenQuery  = "sbx_token"         // the same in a URL
	PortCookie  = "sbx-port"          // the same for browsers, perhaps with __Host- before it
)

// credential matches what may be a credential of the broker, even partly escaped: sbx_key_…, sbx_port_…, sbx_box_….
var credential = regexp.MustCompile(`(?i)(?:s|%(?:25)*[57]3)(?:b|%(?:25)*[46]2)(?:x|%(?:25)*[57]8)(?:_|%(?:25)*5f)(?:(?:p|%(?:25)*[57]0)(?:o|%(?:25)*[46]f)(?:r|%(?:25)*[57]2)(?:t|%(?:25)*[57]4)|(?:b|%(?:25)*[46]2)(?:o|%(?:25)*[46]f)(?:x|%(?:25)*[57]8)|(?:k|%(?:25)*[46]b)(?:e|%(?:25)*[46]5)(?:y|%(?:25)*[57]9))(?:_|%(?:25)*5f)[^/?#&;\s]*`)

// secretText matches what may be the rest of a mangled token: IDs have no capital letters. An escaped character is
// not part of such text, or its own capitals would count.
var secretText = regexp.MustCompile(`%(?:25)*[0-9A-Fa-f]{2}|[A-Za-z0-9_-]*[A-Z][A-Za-z0-9_-]*`)

// Redact hides everything in the path of a request that is or may have been the token of a URL, for logs
// and answers.
func Redact(path string) string {
	path = credential.ReplaceAllLiteralString(path, "[token]")
	return secretText.ReplaceAllStringFunc(path, func(s string) string {
		if len(s) < 20 || s[0] == '%' {
			return s
		}
		return "[token]"
	})
}

// HoldsCredential reports whether the text of a header or a URL has a credential of the broker in it.
func HoldsCredential(s string) bool {
	if credential.MatchString(s) || strings.Contains(s, TokenQuery+"=") {
		return true
	}
	scheme, basic, ok := strings.Cut(s, " ")
	if !ok || !strings.EqualFold(scheme, "Basic") {
		return false
	}
	b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(basic))
	return err == nil && credential.Match(b)
}

// StripCredentials removes every credential of the broker from the headers and the URL of a request that goes on to a
// sandbox, and leaves the sandbox's own.
func StripCredentials(h http.Header, u *url.URL) {
	h.Del(TokenHeader)
	h.Del("Proxy-Authorization")
	lines := h["Cookie"]
	h.Del("Cookie")
	for _, line := range lines {
		var kept []string
		for c := range strings.SplitSeq(line, ";") {
			name, _, _ := strings.Cut(strings.TrimSpace(c), "=")
			if strings.TrimPrefix(name, "__Host-") != PortCookie && !HoldsCredential(c) {
				kept = append(kept, strings.TrimSpace(c))
			}
		}
		if len(kept) > 0 {
			h.Add("Cookie", strings.Join(kept, "; "))
		}
	}
	for k, values := range h {
		if slices.ContainsFunc(values, HoldsCredential) {
			if h[k] = slices.DeleteFunc(slices.Clone(values), HoldsCredential); len(h[k]) == 0 {
				delete(h, k)
			}
		}
	}
	if u.RawQuery == "" {
		return
	}
	var kept []string
	for part := range strings.SplitSeq(u.RawQuery, "&") {
		key, _, _ := strings.Cut(part, "=")
		if k, err := url.QueryUnescape(key); (err != nil || k != TokenQuery) && !credential.MatchString(part) {
			kept = append(kept, part)
		}
	}
	u.RawQuery = strings.Join(kept, "&")
}

// one returns the value of a header with a credential, "" if there is none. If there are several it does not guess
// which one counts: a proxy on the way may have checked another one.
func one(h http.Header, name string) (string, error) {
	switch values := h.Values(name); len(values) {
	case 0:
		return "", nil
	case 1:
		return values[0], nil
	}
	return "", sandboxer.E(sandboxer.Unauthenticated, nil, "the header %s is given more than once", name).WithHint("send it once")
}

// HeaderKey reads a key that is the value of a header.
func HeaderKey(r *http.Request, name string) (sandboxer.Secret, error) {
	v, err := one(r.Header, name)
	if err != nil {
		return "", err
	}
	if v = strings.TrimSpace(v); v == "" {
		return "", NoKey(name + ": sbx_key_…")
	}
	return sandboxer.Secret(v), nil
}
