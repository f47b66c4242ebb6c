package api

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/upload"
)

// call is one request.
type call struct {
	method, path string
	query        url.Values
	header       http.Header
	body         any       // encoded as JSON
	raw          io.Reader // sent as it is, instead of body
	again        bool      // safe to repeat although it is a POST
}

// check refuses names that would make the path another route.
func (q call) check() error {
	for part := range strings.SplitSeq(strings.TrimPrefix(q.path, "/"), "/") {
		switch part {
		case "":
			return sandboxer.E(sandboxer.Invalid, nil, "the name that was given is empty")
		case ".", "..":
			return sandboxer.E(sandboxer.Invalid, nil, "%q is not a name", part)
		}
	}
	return nil
}

// tooLong refuses an answer beyond Options.MaxAnswer.
func (c *Client) tooLong(q call) error {
	return sandboxer.E(sandboxer.Unavailable, nil, "the answer of the server at %s to %s %s is too long", c.shown, q.method, q.path)
}

func none(ctx context.Context, c *Client, q call) error {
	resp, err := c.send(ctx, q)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// retries is how often a request is repeated after a failed connection.
const retries = 3

// send returns a successful response or an error with a Kind.
func (c *Client) send(ctx context.Context, q call) (*http.Response, error) {
	var body []byte
	if q.body != nil {
		var err error
		if body, err = json.Marshal(q.body); err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "the request cannot be encoded")
		}
	}
	again := !c.opts.NoRetry && q.raw == nil && (q.again || q.method == "GET" || q.method == "PUT" || q.method == "DELETE")
	for left := retries; ; left-- {
		resp, err := c.once(ctx, q, body)
		if err == nil {
			return resp, nil
		}
		var p *Problem
		if !again || left == 0 || ctx.Err() != nil || errors.As(err, &p) || !errors.Is(err, sandboxer.Unavailable) || absent(err) {
			return nil, err
		}
		if !sleep(ctx, 50*time.Millisecond<<(2*(retries-left))) {
			return nil, err
		}
	}
}

// absent reports whether err proves that no server runs there: the caller learns
// it at once, to start one perhaps.
func absent(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

func (c *Client) once(ctx context.Context, q call, body []byte) (*http.Response, error) {
	if err := q.check(); err != nil {
		return nil, err
	}
	var r io.Reader
	var sent *upload.Body
	inner := ctx
	switch l, ok := q.raw.(interface{ Len() int }); {
	case ok && l.Len() == 0:
		r = http.NoBody
	case q.raw != nil:
		sent, inner = upload.New(ctx, q.raw)
		r = sent
	case body != nil:
		r = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(inner, q.method, c.base+q.path, r)
	if err != nil {
		if sent != nil {
			sent.Close()
		}
		return nil, sandboxer.E(sandboxer.Invalid, err, "the request cannot be made")
	}
	req.URL.RawQuery = q.query.Encode()
	for k, v := range q.header {
		req.Header[k] = v
	}
	c.identify(req.Header)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	} else if q.raw != nil {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if sent != nil && sent.Err() != nil && ctx.Err() == nil {
			kind := sandboxer.Invalid
			if e := (*sandboxer.Error)(nil); errors.As(sent.Err(), &e) {
				kind = e.Kind
			}
			return nil, sandboxer.E(kind, sent.Err(), "what was to be sent could not be read")
		}
		return nil, c.unreachable(ctx, q, err)
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		return nil, problemOf(resp)
	}
	return resp, nil
}

func (c *Client) identify(h http.Header) {
	h.Set("User-Agent", c.opts.UserAgent)
	if t := c.opts.Token.Reveal(); t != "" {
		h.Set("Authorization", "Bearer "+t)
	}
}

// unreachable explains a failed connection. The text of err may hold the URL and
// stays the cause.
func (c *Client) unreachable(ctx context.Context, q call, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		kind := sandboxer.KindOf(ctx.Err())
		return sandboxer.E(kind, err, "%s %s was given up", q.method, q.path)
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		e := sandboxer.E(sandboxer.Unavailable, err, "no server answers at %s", c.shown)
		if strings.HasPrefix(c.shown, "unix:") {
			return e.WithHint("start one with: sandboxer up")
		}
		return e.WithHint("check the address, and that a server listens there; start it on that machine with: sandboxer serve --listen HOST:PORT")
	}
	var unsafe *tls.CertificateVerificationError
	if errors.As(err, &unsafe) {
		e := sandboxer.E(sandboxer.Unavailable, err, "the certificate of the server at %s is not trusted: %s", c.shown, unsafe.Err)
		if errors.As(err, new(x509.UnknownAuthorityError)) {
			return e.WithHint("if it is your server, name the authority that signed its certificate: --tls-ca FILE")
		}
		return e.WithHint("give the server a certificate that is valid for this address and time")
	}
	if errors.As(err, new(tls.RecordHeaderError)) || errors.Is(err, http.ErrSchemeMismatch) {
		return sandboxer.E(sandboxer.Unavailable, err, "the server at %s does not speak TLS", c.shown).
			WithHint("in a trusted network, address it with http:// instead of https://; elsewhere give it a certificate: sandboxer serve --tls-cert FILE --tls-key FILE")
	}
	return sandboxer.E(sandboxer.Unavailable, err, "the connection to the server at %s broke", c.shown)
}

// problemOf turns an unsuccessful answer into an error.
func problemOf(resp *http.Response) error {
	p := Problem{Status: resp.StatusCode}
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	ct, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if ct != "application/problem+json" || json.Unmarshal(b, &p) != nil || p.Code == "" {
		// Not ours: a proxy in between, or another program.
		p = Problem{Status: resp.StatusCode, Code: kindOfStatus(resp.StatusCode),
			Detail: "the server answered " + resp.Status + " and is perhaps not a sandboxer server"}
		if resp.StatusCode == http.StatusBadRequest && strings.Contains(string(b), "HTTP request to an HTTPS server") {
			p = Problem{Status: resp.StatusCode, Code: sandboxer.Unavailable, Detail: "the server speaks TLS there, and nothing else",
				Hint: "address it with https:// instead of http://"}
		}
	}
	if p.RequestID == "" {
		p.RequestID = resp.Header.Get("X-Request-Id")
	}
	return p.Err()
}

func kindOfStatus(status int) sandboxer.Kind {
	switch status {
	case http.StatusUnauthorized:
		return sandboxer.Unauthenticated
	case http.StatusForbidden:
		return sandboxer.Denied
	case http.StatusNotFound:
		return sandboxer.NotFound
	case http.StatusTooManyRequests:
		return sandboxer.Exhausted
	case http.StatusBadGateway, http.StatusServiceUnavailable:
		return sandboxer.Unavailable
	case http.StatusGatewayTimeout:
		return sandboxer.Timeout
	}
	if status >= 400 && status < 500 {
		return sandboxer.Invalid
	}
	return sandboxer.Internal
}

// sleep waits for d and reports whether ctx is still alive.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
