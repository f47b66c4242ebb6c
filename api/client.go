package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"iter"
	"math"
	"mime"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/upload"
)

// Options tune a Client; the zero value works.
type Options struct {
	Token     sandboxer.Secret // API key; not needed over the Unix socket
	UserAgent string           // default "sandboxer-go"
	RootCAs   *x509.CertPool   // authorities trusted for https URLs; nil means the system's
	// HTTP replaces the client for http and https URLs (proxies, TLS roots). Its
	// Timeout must be 0: requests are bounded by their ctx.
	HTTP *http.Client
	// MaxAnswer bounds an answer that is held in memory, in bytes: everything but files, archives, connections and what
	// a command writes, which are streams. A longer one is an error, Unavailable. 0 means no bound.
	MaxAnswer int64
	// NoRetry sends every request once, for who measures.
	NoRetry bool
}

// Client speaks the REST interface. Every failure is a *sandboxer.Error: the
// server's own with the same Kind, message, hint and delay, or Unavailable when the
// server cannot be reached. Methods are safe for concurrent use.
//
// A request that cannot have had an effect, or whose effect is the same when
// repeated, is repeated a few times when the connection fails.
type Client struct {
	base  string // scheme and host, without a final slash
	shown string // as given, for messages
	opts  Options
	http  *http.Client
	own   *http.Transport // nil when Options.HTTP was given
}

// New returns a client for a server at unix:///path/to/api.sock, http://host:port
// or https://host. It does not connect yet. Kind: Invalid for a URL of another
// form.
func New(rawURL string, opts Options) (*Client, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, badURL(rawURL)
	}
	if opts.UserAgent == "" {
		opts.UserAgent = "sandboxer-go"
	}
	c := &Client{shown: u.Redacted(), opts: opts, http: opts.HTTP}
	tr := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           upload.Dial((&net.Dialer{Timeout: 10 * time.Second}).DialContext),
		MaxIdleConnsPerHost:   64,
		IdleConnTimeout:       90 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ExpectContinueTimeout: time.Second,
		DisableCompression:    true,
		TLSClientConfig:       &tls.Config{RootCAs: opts.RootCAs, MinVersion: tls.VersionTLS12},
	}
	switch {
	case u.Scheme == "unix" && u.Host == "" && filepath.IsAbs(u.Path):
		sock := u.Path
		tr.Proxy = nil
		tr.DialContext = upload.Dial(func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", sock)
		})
		c.base = "http://localhost"
		c.http = nil
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.User == nil:
		c.base = u.Scheme + "://" + u.Host + strings.TrimRight(u.Path, "/")
	default:
		return nil, badURL(u.Redacted())
	}
	if c.http == nil {
		c.own = tr
		// A redirect would carry the key to another place.
		c.http = &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	return c, nil
}

func badURL(s string) error {
	return sandboxer.E(sandboxer.Invalid, nil, "%q is not the address of a server", s).
		WithHint("write unix:///path/to/api.sock, http://host:port or https://host")
}

// Close closes idle connections.
func (c *Client) Close() {
	if c.own != nil {
		c.own.CloseIdleConnections()
	}
}

// Create asks for a sandbox and, unless r.NoWaiting, waits until it is running. It
// is safe to repeat with the same r.Key: one key makes one sandbox. Found is set in the
// answer when the sandbox is another request's: it was live under the ID or thread.
func (c *Client) Create(ctx context.Context, r CreateSandbox) (*Sandbox, error) {
	if r.Key == "" {
		r.Key = rand.Text()
	}
	q := call{method: "POST", path: "/v1/sandboxes", body: r, again: true, header: http.Header{"Idempotency-Key": {r.Key}}}
	if r.NoWaiting {
		q.header.Set("Prefer", "respond-async")
	}
	return do[*Sandbox](ctx, c, q)
}

// Plan tells what Create with r would lead to and cost, and creates nothing.
func (c *Client) Plan(ctx context.Context, r CreateSandbox) (*Plan, error) {
	return do[*Plan](ctx, c, call{method: "POST", path: "/v1/plan", body: r, again: true})
}

// Get returns the sandbox that ref (ID, unique beginning of one, or name) means.
func (c *Client) Get(ctx context.Context, ref string) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "GET", path: sandboxPath(ref)})
}

// Wait returns when the sandbox is in one of states; without states, when it is on
// its way to none. It fails with the sandbox's own failure, or with Conflict, when it
// has ended in another state.
func (c *Client) Wait(ctx context.Context, ref string, states ...sandboxer.State) (*Sandbox, error) {
	if len(states) == 0 {
		states = []sandboxer.State{sandboxer.Warm, sandboxer.Running, sandboxer.Paused, sandboxer.Terminated}
	}
	q := url.Values{"timeout": {"1m"}}
	for _, s := range states {
		q.Add("wait", string(s))
	}
	for {
		sb, err := do[*Sandbox](ctx, c, call{method: "GET", path: sandboxPath(ref), query: q})
		if err != nil {
			return nil, err
		}
		if slices.Contains(states, sb.State) {
			return sb, nil
		}
	}
}

// SandboxQuery selects sandboxes; zero fields do not restrict.
type SandboxQuery struct {
	Profile, Name string
	States        []sandboxer.State
	Labels        map[string]string // all must match
	Thread        sandboxer.Thread  // what has the ID of this
	Tenant        string            // for administrators
	Limit         int
	Cursor        string
}

// List returns one page of sandboxes, newest first.
func (c *Client) List(ctx context.Context, q SandboxQuery) (*List[Sandbox], error) {
	v := url.Values{}
	set(v, "profile", q.Profile)
	set(v, "name", q.Name)
	set(v, "thread", q.Thread.ID)
	set(v, "thread_user", q.Thread.User)
	set(v, "tenant", q.Tenant)
	for _, s := range q.States {
		v.Add("state", string(s))
	}
	for k, val := range q.Labels {
		v.Add("label", k+"="+val)
	}
	page(v, q.Limit, q.Cursor)
	return do[*List[Sandbox]](ctx, c, call{method: "GET", path: "/v1/sandboxes", query: v})
}

// Extend moves the expiry.
func (c *Client) Extend(ctx context.Context, ref string, e ExtendSandbox) (*Sandbox, error) {
	// Adding twice is not adding once; a lifetime from now may be set again.
	return do[*Sandbox](ctx, c, call{method: "POST", path: sandboxPath(ref) + "/extend", body: e, again: e.Add == 0})
}

// SetNetwork changes what a running sandbox may reach.
func (c *Client) SetNetwork(ctx context.Context, ref string, p sandboxer.NetworkPolicy) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "PUT", path: sandboxPath(ref) + "/network", body: p, again: true})
}

// Destroy destroys the sandbox. With wait it returns when nothing is left, or, if
// that has to be tried again later, with the terminating sandbox and an Unavailable
// error; without, as soon as the request is written down. Destroying what is
// terminated already is success.
func (c *Client) Destroy(ctx context.Context, ref string, wait bool) (*Sandbox, error) {
	q := url.Values{}
	if !wait {
		q.Set("wait", "false")
	}
	sb, err := do[*Sandbox](ctx, c, call{method: "DELETE", path: sandboxPath(ref), query: q})
	if err != nil {
		return nil, err
	}
	if wait && sb.State != sandboxer.Terminated {
		return sb, sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s is not gone yet: %s", sb.ID, sb.LastError).
			WithHint("the server goes on trying; destroy it again to see how it stands; if its host is gone for good: sandboxer forget %s", sb.ID)
	}
	return sb, nil
}

// Run runs a command without streaming and returns what it wrote.
func (c *Client) Run(ctx context.Context, ref string, e Exec) (*ExecResult, error) {
	return do[*ExecResult](ctx, c, call{method: "POST", path: sandboxPath(ref) + "/exec", body: e})
}

// Stats measures the sandbox.
func (c *Client) Stats(ctx context.Context, ref string) (*Stats, error) {
	return do[*Stats](ctx, c, call{method: "GET", path: sandboxPath(ref) + "/stats"})
}

// ReadFile opens a file for reading; the caller closes it. A read that ends in
// io.EOF has seen the whole file.
func (c *Client) ReadFile(ctx context.Context, ref, name string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, call{method: "GET", path: sandboxPath(ref) + "/files", query: url.Values{"path": {name}}})
	if err != nil {
		return nil, err
	}
	return fileBody{resp.Body, name}, nil
}

// fileBody gives an error in the middle of a file a Kind.
type fileBody struct {
	io.ReadCloser
	name string
}

func (b fileBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		kind := sandboxer.Unavailable
		if k := sandboxer.KindOf(err); k == sandboxer.Canceled || k == sandboxer.Timeout {
			kind = k
		}
		err = sandboxer.E(kind, err, "reading %s broke off", b.name)
	}
	return n, err
}

// WriteFile creates or replaces a file with r's content, making its parents. mode 0
// means 0644.
func (c *Client) WriteFile(ctx context.Context, ref, name string, mode fs.FileMode, r io.Reader) error {
	q := url.Values{"path": {name}}
	if mode != 0 {
		q.Set("mode", FormatMode(mode))
	}
	return none(ctx, c, call{method: "PUT", path: sandboxPath(ref) + "/files", query: q, raw: r})
}

// RemoveFile removes a file or a tree; absence is success.
func (c *Client) RemoveFile(ctx context.Context, ref, name string) error {
	return none(ctx, c, call{method: "DELETE", path: sandboxPath(ref) + "/files", query: url.Values{"path": {name}}})
}

// StatFile describes a file.
func (c *Client) StatFile(ctx context.Context, ref, name string) (*FileInfo, error) {
	return do[*FileInfo](ctx, c, call{method: "GET", path: sandboxPath(ref) + "/files/stat", query: url.Values{"path": {name}}})
}

// ListFiles lists a directory in the order of names, following pages.
func (c *Client) ListFiles(ctx context.Context, ref, dir string) iter.Seq2[FileInfo, error] {
	q := url.Values{"path": {dir}, "limit": {strconv.Itoa(sandboxer.MaxPage)}}
	return All(func(cursor string) (*List[FileInfo], error) {
		set(q, "cursor", cursor)
		return do[*List[FileInfo]](ctx, c, call{method: "GET", path: sandboxPath(ref) + "/files/list", query: q})
	})
}

// MakeDir makes a directory and its parents; an existing one is success.
func (c *Client) MakeDir(ctx context.Context, ref, dir string) error {
	var body MakeDir
	body.Path, body.PathBase64 = rawPath(dir)
	return none(ctx, c, call{method: "POST", path: sandboxPath(ref) + "/files/mkdir", body: body, again: true})
}

// MoveFile renames a file or directory.
func (c *Client) MoveFile(ctx context.Context, ref, from, to string) error {
	var body MoveFile
	body.From, body.FromBase64 = rawPath(from)
	body.To, body.ToBase64 = rawPath(to)
	return none(ctx, c, call{method: "POST", path: sandboxPath(ref) + "/files/move", body: body})
}

// Ports lists the ports that are declared or published.
func (c *Client) Ports(ctx context.Context, ref string) (*List[SandboxPort], error) {
	return do[*List[SandboxPort]](ctx, c, call{method: "GET", path: sandboxPath(ref) + "/ports"})
}

// OpenPort makes the port proxy serve a port of the sandbox.
func (c *Client) OpenPort(ctx context.Context, ref string, port int) (*SandboxPort, error) {
	return do[*SandboxPort](ctx, c, call{method: "PUT", path: portPath(ref, port), again: true})
}

// ClosePort closes a port to the port proxy and ends its signed URLs.
func (c *Client) ClosePort(ctx context.Context, ref string, port int) error {
	return none(ctx, c, call{method: "DELETE", path: portPath(ref, port)})
}

// RevokePort ends the signed URLs of an open port.
func (c *Client) RevokePort(ctx context.Context, ref string, port int) error {
	return none(ctx, c, call{method: "POST", path: portPath(ref, port) + "/revoke", again: true})
}

// SignPort makes a URL with which anybody may use an open port for so long; 0 means an
// hour.
func (c *Client) SignPort(ctx context.Context, ref string, port int, ttl time.Duration) (*PortURL, error) {
	return do[*PortURL](ctx, c, call{method: "POST", path: portPath(ref, port) + "/url", body: SignPort{TTL: Duration(ttl)}, again: true})
}

func portPath(ref string, port int) string { return sandboxPath(ref) + "/ports/" + strconv.Itoa(port) }

// Profiles lists the profiles.
func (c *Client) Profiles(ctx context.Context) (*List[Profile], error) {
	return do[*List[Profile]](ctx, c, call{method: "GET", path: "/v1/profiles"})
}

// Profile returns one profile; its ID is accepted without the prefix too.
func (c *Client) Profile(ctx context.Context, id string) (*Profile, error) {
	return do[*Profile](ctx, c, call{method: "GET", path: "/v1/profiles/" + url.PathEscape(id)})
}

// Extensions lists the configured extensions.
func (c *Client) Extensions(ctx context.Context) (*List[Extension], error) {
	return do[*List[Extension]](ctx, c, call{method: "GET", path: "/v1/extensions"})
}

// Probe asks an extension what it can take now.
func (c *Client) Probe(ctx context.Context, extension string) (*HostCapacity, error) {
	return do[*HostCapacity](ctx, c, call{method: "POST", path: "/v1/extensions/" + url.PathEscape(extension) + "/probe", again: true})
}

// CreateKey makes an API key; its token is in this answer and nowhere else.
func (c *Client) CreateKey(ctx context.Context, k NewKey) (*CreatedKey, error) {
	return do[*CreatedKey](ctx, c, call{method: "POST", path: "/v1/keys", body: k})
}

// Keys lists the API keys.
func (c *Client) Keys(ctx context.Context) (*List[Key], error) {
	return do[*List[Key]](ctx, c, call{method: "GET", path: "/v1/keys"})
}

// RevokeKey makes a key worthless at once and ends the streams opened with it.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	return none(ctx, c, call{method: "DELETE", path: "/v1/keys/" + url.PathEscape(id)})
}

// Balance returns a tenant's balance; "" means the caller's tenant.
func (c *Client) Balance(ctx context.Context, tenant string) (*Balance, error) {
	v := url.Values{}
	set(v, "tenant", tenant)
	return do[*Balance](ctx, c, call{method: "GET", path: "/v1/credits", query: v})
}

// Quotas returns what tenants have and may have.
func (c *Client) Quotas(ctx context.Context, q QuotaQuery) (*List[Quota], error) {
	v := url.Values{}
	set(v, "tenant", q.Tenant)
	if q.All {
		v.Set("all", "true")
	}
	set(v, "cursor", q.Cursor)
	if q.Limit > 0 {
		v.Set("limit", strconv.Itoa(q.Limit))
	}
	return do[*List[Quota]](ctx, c, call{method: "GET", path: "/v1/quotas", query: v})
}

// Grant adds credits to a tenant. An empty g.Key is filled in.
func (c *Client) Grant(ctx context.Context, g Grant) (*Balance, error) {
	if g.Key == "" {
		g.Key = rand.Text()
	}
	return do[*Balance](ctx, c, call{method: "POST", path: "/v1/credits/grants", body: g, again: true})
}

// EntryQuery selects ledger entries; zero fields do not restrict.
type EntryQuery struct {
	Tenant, SandboxID string
	Limit             int
	Cursor            string
}

// Entries returns one page of the ledger, oldest first.
func (c *Client) Entries(ctx context.Context, q EntryQuery) (*List[Entry], error) {
	v := url.Values{}
	set(v, "tenant", q.Tenant)
	set(v, "sandbox", q.SandboxID)
	page(v, q.Limit, q.Cursor)
	return do[*List[Entry]](ctx, c, call{method: "GET", path: "/v1/credits/entries", query: v})
}

// Audit checks the broker's invariants.
func (c *Client) Audit(ctx context.Context) (*Audit, error) {
	return do[*Audit](ctx, c, call{method: "GET", path: "/v1/audit"})
}

// Quarantined lists what this installation has and its database does not know. It needs
// the admin scope.
func (c *Client) Quarantined(ctx context.Context) (*List[Quarantined], error) {
	return do[*List[Quarantined]](ctx, c, call{method: "GET", path: "/v1/quarantine"})
}

// Forget gives up a sandbox that could not be removed because its host is gone for good. It
// needs the admin scope.
func (c *Client) Forget(ctx context.Context, id string) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "POST", path: sandboxPath(id) + "/forget"})
}

// Adopt makes a record anew for a quarantined sandbox. It needs the admin scope.
func (c *Client) Adopt(ctx context.Context, id string, a AdoptSandbox) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "POST", path: sandboxPath(id) + "/adopt", body: a})
}

// DeepAudit is Audit, and reads all that is kept of every portable snapshot.
func (c *Client) DeepAudit(ctx context.Context) (*Audit, error) {
	return do[*Audit](ctx, c, call{method: "GET", path: "/v1/audit", query: url.Values{"deep": {"true"}}})
}

// Sweep runs one pass of the sweep now.
func (c *Client) Sweep(ctx context.Context) (*Sweep, error) {
	return do[*Sweep](ctx, c, call{method: "POST", path: "/v1/sweep", again: true})
}

// Reload lets the server read its profiles anew: all or nothing.
func (c *Client) Reload(ctx context.Context) (*Reload, error) {
	return do[*Reload](ctx, c, call{method: "POST", path: "/v1/reload", again: true})
}

// Status describes the server and who it takes the caller for.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	return do[*Status](ctx, c, call{method: "GET", path: "/v1/status"})
}

func sandboxPath(ref string) string { return "/v1/sandboxes/" + url.PathEscape(ref) }

func set(v url.Values, key, val string) {
	if val != "" {
		v.Set(key, val)
	}
}

func page(v url.Values, limit int, cursor string) {
	if limit > 0 {
		v.Set("limit", strconv.Itoa(limit))
	}
	set(v, "cursor", cursor)
}

// mostPages bounds a list that is followed: a million entries.
const mostPages = 1000

// All follows the pages of a list, which get returns by their cursor, "" for the first. A
// list that has a million entries and more, or goes in a circle, ends with an error
// ([sandboxer.Unavailable]).
func All[T any](get func(cursor string) (*List[T], error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		cursor := ""
		for n := 0; ; n++ {
			var zero T
			if n == mostPages {
				yield(zero, sandboxer.E(sandboxer.Unavailable, nil, "the server's list does not end"))
				return
			}
			l, err := get(cursor)
			if err != nil {
				yield(zero, err)
				return
			}
			for _, it := range l.Items {
				if !yield(it, nil) {
					return
				}
			}
			if l.NextCursor == "" {
				return
			}
			if l.NextCursor == cursor {
				n = mostPages - 1 // in a circle
			}
			cursor = l.NextCursor
		}
	}
}

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

func do[T any](ctx context.Context, c *Client, q call) (T, error) {
	var out T
	resp, err := c.send(ctx, q)
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	body := &io.LimitedReader{R: resp.Body, N: math.MaxInt64}
	if c.opts.MaxAnswer > 0 {
		body.N = c.opts.MaxAnswer + 1
	}
	switch err := json.NewDecoder(body).Decode(&out); {
	case body.N <= 0:
		return out, c.tooLong(q)
	case err != nil:
		return out, c.unreachable(ctx, q, err)
	}
	if v := reflect.ValueOf(out); v.Kind() == reflect.Pointer && v.IsNil() { // a bare null
		return out, c.unreachable(ctx, q, errors.New("the answer is empty"))
	}
	io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<10)) // lets the connection be used again
	return out, nil
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
		return e.WithHint("is the address right, and does a server listen there? it is started on that machine, with: sandboxer serve --listen HOST:PORT")
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
			WithHint("where nobody listens in, address it with http:// instead of https://; elsewhere give it a certificate: sandboxer serve --tls-cert FILE --tls-key FILE")
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
