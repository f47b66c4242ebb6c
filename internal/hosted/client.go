// Package hosted has what adapters for hosted services share. A Client sends requests and gives every failure a kind. Sandboxes
// makes each sandbox once, and finds it again after an answer was lost. It works with services that let no caller choose names
// and have no idempotency keys.
package hosted

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"mime/multipart"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

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

// A Client sends JSON to one service. It follows no redirect, which would take the key elsewhere.
type Client struct {
	Base string // URL of the service, without a slash at its end
	Keys *Keys  // each request gets the key of its ctx's account; nil if the service wants none
	// Authorize puts a key into the headers of a request; nil makes it a bearer token.
	Authorize func(headers http.Header, key sandboxer.Secret)
	// Tries is how often a request is sent at most; 0 means 5. A request is sent again if it did not reach the service. A GET,
	// HEAD or DELETE is also sent again after an answer of 500 to 599.
	Tries int
	// Refusals are the HTTP statuses with which the service refuses a request without changing anything, with their kinds.
	// After any other failure the caller does not know whether the request had an effect.
	Refusals map[int]sandboxer.Kind

	// Dial opens the connections; nil means over TCP to the host of Base.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	once sync.Once
	http http.Client
}

// do sends req. It keeps no idle connections, so nothing has to be closed.
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

	maxTries              = 5
	firstPause, lastPause = 250 * time.Millisecond, 8 * time.Second // between tries, at random below that
)

// A Request is one request of Send.
type Request struct {
	Method, Path string
	Body         any           // as JSON, or a *Form; nil for none: some services refuse a question with one
	Within       time.Duration // how long the answer may take; 0 means ten seconds
}

// A Form is the body of a request that uploads a file. Each try reads the file again.
type Form struct {
	Field, Value string // comes first
	FileField    string
	Name         string
	File         io.ReaderAt
	Size         int64 // of File, in bytes
}

// A content is the body of a request.
type content struct {
	kind string // of its bytes; empty for none
	size int64
	open func() io.Reader
}

func bodyOf(body any) (c content, err error) {
	f, form := body.(*Form)
	var data []byte
	switch {
	case body == nil:
		return content{open: func() io.Reader { return http.NoBody }}, nil
	case !form:
		data, err = json.Marshal(body)
		return content{"application/json", int64(len(data)), func() io.Reader { return bytes.NewReader(data) }}, err
	}
	var frame bytes.Buffer
	w := multipart.NewWriter(&frame)
	err = w.WriteField(f.Field, f.Value)
	if err == nil {
		_, err = w.CreateFormFile(f.FileField, f.Name)
	}
	head := frame.Len()
	err = cmp.Or(err, w.Close())
	data = frame.Bytes()
	return content{w.FormDataContentType(), int64(len(data)) + f.Size, func() io.Reader {
		return io.MultiReader(bytes.NewReader(data[:head]), io.NewSectionReader(f.File, 0, f.Size), bytes.NewReader(data[head:]))
	}}, err
}

// Call is Send without the headers of the answer.
func Call[T any](ctx context.Context, c *Client, method, path string, body any) (T, error) {
	out, _, err := Send[T](ctx, c, Request{Method: method, Path: path, Body: body})
	return out, err
}

// Send sends one request and reads the answer. The answer may be empty if the status is 204 or T is struct{}. All tries
// together end within r.Within. header has the headers of the last answer, also of a failure; Status returns the status of a
// failure. Kinds: those of c.Refusals, with Error.Untouched set; Unavailable without an answer, or after any other one.
func Send[T any](ctx context.Context, c *Client, r Request) (out T, header http.Header, err error) {
	body, err := bodyOf(r.Body)
	if err != nil {
		return out, nil, err
	}
	key, err := c.Keys.Of(ctx)
	if err != nil {
		return out, nil, sandboxer.Untouched(err)
	}
	if strings.ContainsFunc(key.Reveal(), unicode.IsControl) { // no header can carry it: it would look as if the service did not answer
		return out, nil, Malformed(ctx, "it has a line break, or another control character")
	}
	bounded, cancel := context.WithTimeout(ctx, cmp.Or(r.Within, answerTime))
	defer cancel()
	for try := 1; ; try++ {
		answer, res, again, err := c.try(ctx, bounded, key, r, body)
		if header = nil; res != nil {
			header = res.Header
		}
		switch {
		case err != nil:
		case res.StatusCode == http.StatusNoContent, len(answer) == 0 && any(out) == any(struct{}{}):
			return out, header, nil
		default:
			if _, err := strictjson.DecodeStored(answer, &out); err != nil {
				return out, header, sandboxer.E(sandboxer.Unavailable, err, "the answer of the service cannot be read").WithHint("check that the URL leads to the service")
			}
			return out, header, nil
		}
		if !again || try >= cmp.Or(c.Tries, maxTries) || !pause(bounded, max(sandboxer.RetryAfterOf(err), rand.N(min(firstPause<<(try-1), lastPause)))) {
			return out, header, err
		}
	}
}

// pause waits for d, and reports whether there was time for it.
func pause(ctx context.Context, d time.Duration) bool {
	if end, ok := ctx.Deadline(); ok && time.Until(end) <= d {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// try sends a request once, and reports whether it may be sent again. The caller's own ctx says whether the caller left.
func (c *Client) try(ctx, bounded context.Context, key sandboxer.Secret, r Request, body content) (answer []byte, res *http.Response, again bool, err error) {
	req, err := http.NewRequestWithContext(bounded, r.Method, c.Base+r.Path, body.open())
	if err != nil {
		return nil, nil, false, err
	}
	if body.kind != "" {
		req.ContentLength = body.size
		req.Header.Set("Content-Type", body.kind)
	}
	switch {
	case key == "":
	case c.Authorize != nil:
		c.Authorize(req.Header, key)
	default:
		req.Header.Set("Authorization", "Bearer "+key.Reveal())
	}
	res, err = c.do(req)
	if err == nil {
		defer res.Body.Close()
		answer, err = io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	}
	switch {
	case err != nil:
		err = noAnswer(ctx, err)
		return nil, nil, sandboxer.IsUntouched(err), err
	case res.StatusCode/100 != 2:
		return nil, res, res.StatusCode/100 == 5 && (r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodDelete), c.failure(ctx, res, answer)
	}
	return answer, res, false, nil
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

// failure is the error for an answer that reports a failure.
func (c *Client) failure(ctx context.Context, res *http.Response, body []byte) error {
	var said struct {
		Message string `json:"message"`
	}
	_, err := strictjson.DecodeStored(body, &said)
	kind, refused := c.Refusals[res.StatusCode]
	if res.StatusCode == http.StatusUnauthorized || res.StatusCode == http.StatusForbidden && !refused {
		return Refused(ctx, strings.TrimSpace(fmt.Sprintf("%d %s", res.StatusCode, said.Message)))
	}
	foreign := err != nil || said.Message == "" // another server's: its word ends no sandbox, and it may have lost an answer of the service
	if !refused || foreign && (kind == sandboxer.NotFound || res.StatusCode/100 == 5) {
		kind, refused = sandboxer.Unavailable, false
	}
	e := sandboxer.E(kind, status(res.StatusCode), "the service answers %d: %s", res.StatusCode, capture.Text(said.Message, maxText))
	if kind == sandboxer.Unavailable || kind == sandboxer.Exhausted {
		e.WithHint("try again later").RetryAfter = retryAfter(res.Header)
	}
	if refused {
		return sandboxer.Untouched(e)
	}
	return e
}

// retryAfter is the longest time that the service asks the caller to wait. Some services have a header for each of their
// limits: Retry-After-<limit>.
func retryAfter(h http.Header) (longest time.Duration) {
	for name, values := range h {
		if name = http.CanonicalHeaderKey(name); name == "Retry-After" || strings.HasPrefix(name, "Retry-After-") {
			after, _ := strconv.Atoi(values[0]) // a date, which is rare, is not read
			longest = max(longest, time.Duration(min(max(after, 0), int(maxAfter/time.Second)))*time.Second)
		}
	}
	return longest
}

// Clock returns the time of an answer by the clock of the service, or by ours if the answer has none.
func Clock(header http.Header) time.Time {
	now, err := http.ParseTime(header.Get("Date"))
	if err != nil {
		return time.Now()
	}
	return now
}

// maxPages bounds a listing, so that a service which always names a next page does not keep us busy for ever.
const maxPages = 1000

// Pages yields the items of a listing, page after page. fetch gets the name of the page, as the previous page gave it; "" for
// the first.
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
