// Package hosted is what adapters for hosted services share. A Client sends requests and gives every failure a kind.
// Sandboxes makes each sandbox once, and finds it again after an answer was lost: many services have neither names that
// the caller chooses nor keys of requests.
package hosted

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// CheckURL refuses, as Invalid, a service's URL that is not https, unless it leads to this machine's loopback.
func CheckURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return sandboxer.E(sandboxer.Invalid, nil, "want https://host, without a user, a query and a fragment")
	}
	here := u.Hostname() == "localhost" || net.ParseIP(u.Hostname()).IsLoopback()
	if u.Scheme != "https" && (u.Scheme != "http" || !here) {
		return sandboxer.E(sandboxer.Invalid, nil, "want https://, or http:// and an address of this machine's loopback")
	}
	return nil
}

// A Client sends JSON to one service. It follows no redirect, which would take the token elsewhere.
type Client struct {
	Base  string           // URL of the service, without a slash at its end
	Token sandboxer.Secret // bearer token; empty if the service wants none
	// Authorize puts a key into the headers of a request; nil makes it a bearer token.
	Authorize func(headers http.Header, key sandboxer.Secret)
	// Refusals are the statuses by which the service refuses a request and changes nothing, with their kinds. After any other
	// failure it is not known whether something was done.
	Refusals map[int]sandboxer.Kind

	// Dial opens the connections; nil means over TCP to the host of Base.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	once sync.Once
	http http.Client
}

// do sends req. There are no idle connections, and so nothing to close.
func (c *Client) do(req *http.Request) (*http.Response, error) {
	c.once.Do(func() {
		c.http = http.Client{
			Transport:     &http.Transport{DialContext: c.Dial, DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	})
	return c.http.Do(req)
}

const (
	answerTime = 10 * time.Second // for one answer
	maxAnswer  = 4 << 20          // of an answer, in bytes
	maxText    = 500              // of what a service says in an error, in bytes
	maxAfter   = time.Hour        // of what it says when to try again
)

// A Request is what Send sends.
type Request struct {
	Method, Path string
	Body         any           // as JSON; nil for none: some services refuse a question with one
	Within       time.Duration // how long the answer may take; 0 means ten seconds
}

// Call is Send without the headers of the answer.
func Call[T any](ctx context.Context, c *Client, method, path string, body any) (T, error) {
	out, _, err := Send[T](ctx, c, Request{Method: method, Path: path, Body: body})
	return out, err
}

// Send sends one request and reads the answer; that to a request without content (204) is empty. Kinds: those of c.Refusals,
// with Error.Untouched set; Unavailable if there is no answer, or another one. Status has the status of a failure.
func Send[T any](ctx context.Context, c *Client, r Request) (out T, header http.Header, err error) {
	var data []byte
	if r.Body != nil {
		if data, err = json.Marshal(r.Body); err != nil {
			return out, nil, err
		}
	}
	bounded, cancel := context.WithTimeout(ctx, cmp.Or(r.Within, answerTime))
	defer cancel()
	req, err := http.NewRequestWithContext(bounded, r.Method, c.Base+r.Path, bytes.NewReader(data))
	if err != nil {
		return out, nil, err
	}
	if r.Body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	switch {
	case c.Token == "":
	case c.Authorize != nil:
		c.Authorize(req.Header, c.Token)
	default:
		req.Header.Set("Authorization", "Bearer "+string(c.Token))
	}
	res, err := c.do(req)
	if err == nil {
		defer res.Body.Close()
		data, err = io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	}
	if err != nil {
		return out, nil, noAnswer(ctx, err)
	}
	if res.StatusCode/100 != 2 {
		return out, nil, c.failure(res, data)
	}
	if res.StatusCode == http.StatusNoContent {
		return out, res.Header, nil
	}
	if _, err := strictjson.DecodeStored(data, &out); err != nil {
		return out, nil, sandboxer.E(sandboxer.Unavailable, err, "the service answers something that cannot be read").WithHint("check that the URL leads to the service")
	}
	return out, res.Header, nil
}

// A status is the cause of a failure that the service answered.
type status int

func (s status) Error() string { return "status " + strconv.Itoa(int(s)) }

// Status returns the status of the answer that err is about; 0 if there was none.
func Status(err error) int {
	s, _ := errors.AsType[status](err)
	return int(s)
}

// noAnswer is the error for a request without an answer.
func noAnswer(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if e, ok := errors.AsType[*sandboxer.Error](err); ok { // of dial
		return e
	}
	e := sandboxer.E(sandboxer.Unavailable, err, "the service does not answer").WithHint("check that the service runs, and try again later")
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return sandboxer.Untouched(e)
	}
	return e
}

// failure is the error for an answer that is none.
func (c *Client) failure(res *http.Response, body []byte) error {
	var said struct {
		Message string `json:"message"`
	}
	_, err := strictjson.DecodeStored(body, &said)
	kind, refused := c.Refusals[res.StatusCode]
	foreign := err != nil || said.Message == "" // another server's: its word ends no sandbox, and it may have lost an answer of the service
	if !refused || foreign && (kind == sandboxer.NotFound || res.StatusCode/100 == 5) {
		kind, refused = sandboxer.Unavailable, false
	}
	e := sandboxer.E(kind, status(res.StatusCode), "the service answers %d: %s", res.StatusCode, capture.Text(said.Message, maxText))
	switch {
	case res.StatusCode == http.StatusUnauthorized, res.StatusCode == http.StatusForbidden:
		e.WithHint("an administrator sets another token in the extension's file")
	case kind == sandboxer.Unavailable, kind == sandboxer.Exhausted:
		after, _ := strconv.Atoi(res.Header.Get("Retry-After")) // a date, which is rare, is not read
		e.WithHint("try again later").RetryAfter = time.Duration(min(max(after, 0), int(maxAfter/time.Second))) * time.Second
	}
	if refused {
		return sandboxer.Untouched(e)
	}
	return e
}

// maxPages bounds a listing: a service that names the next page for ever is not followed for ever.
const maxPages = 1000

// Pages yields the items of a listing, page after page. fetch gets what the page before named as the next one, or "".
func Pages[T any](fetch func(next string) (items []T, following string, err error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		next := ""
		for range maxPages {
			items, following, err := fetch(next)
			if sandboxer.KindOf(err) == sandboxer.NotFound { // a wrong URL, and no proof of anything
				err = sandboxer.E(sandboxer.Unavailable, err, "the service has no such listing: %s", sandboxer.Message(err)).WithHint("check that the URL leads to the service")
			}
			if err != nil {
				yield(*new(T), err)
				return
			}
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if next = following; next == "" {
				return
			}
		}
		yield(*new(T), sandboxer.E(sandboxer.Unavailable, nil, "the listing of the service has more than %d pages", maxPages))
	}
}
