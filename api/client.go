package api

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"math"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

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
	// MaxAnswer bounds an answer that is held in memory, in bytes. Streams are not bounded: files,
	// archives, connections and the output of commands. A longer answer is an Unavailable error. 0
	// means no bound.
	MaxAnswer int64
	// NoRetry sends every request only once, for measurements.
	NoRetry bool
}

// Client is a client of the REST interface. Every failure is a *sandboxer.Error: the server's error
// with the same Kind, message, hint and delay, or Unavailable when the server cannot be reached.
// Methods are safe for concurrent use.
//
// If a connection fails, the client repeats the request a few times, but only if that is safe: the
// request had no effect yet, or a repetition has the same effect.
type Client struct {
	base  string // scheme and host, without a final slash
	shown string // as given, for messages
	opts  Options
	http  *http.Client
	own   *http.Transport // nil when Options.HTTP was given
}

// New returns a client for a server at unix:///path/to/api.sock, http://host:port or https://host. It
// does not connect yet. Kind: Invalid for any other URL.
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

// Create asks for a sandbox and, unless r.NoWaiting is set, waits until it runs. It is safe to repeat
// with the same r.Key: one key makes one sandbox. The answer has Found set if another request made the
// sandbox: it was live under the same ID or thread.
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

// Plan returns the result and the price of Create with r, and creates nothing.
func (c *Client) Plan(ctx context.Context, r CreateSandbox) (*Plan, error) {
	return do[*Plan](ctx, c, call{method: "POST", path: "/v1/plan", body: r, again: true})
}

// Get returns a sandbox. ref is its ID, a unique beginning of the ID, or its name.
func (c *Client) Get(ctx context.Context, ref string) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "GET", path: sandboxPath(ref)})
}

// Wait returns when the sandbox is in one of states; without states, when it is in a state without
// pending work. It fails with the sandbox's own failure, or with Conflict if the sandbox ended in
// another state.
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
	Thread        sandboxer.Thread  // sandboxes with the ID of this thread
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

// Extend moves the expiry. It repeats the request after a failed connection only for a TTL, not for an
// Add.
func (c *Client) Extend(ctx context.Context, ref string, e ExtendSandbox) (*Sandbox, error) {
	// Adding twice is not adding once; a lifetime from now may be set again.
	return do[*Sandbox](ctx, c, call{method: "POST", path: sandboxPath(ref) + "/extend", body: e, again: e.Add == 0})
}

// SetNetwork replaces the network policy of a running sandbox.
func (c *Client) SetNetwork(ctx context.Context, ref string, p sandboxer.NetworkPolicy) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "PUT", path: sandboxPath(ref) + "/network", body: p, again: true})
}

// Destroy destroys the sandbox. With wait it returns when everything is removed. If the teardown must
// be retried later, it returns the terminating sandbox and an Unavailable error. Without wait it
// returns as soon as the request is stored. Destroying a terminated sandbox is success.
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
		e := sandboxer.E(sandboxer.Unavailable, nil, "sandbox %s is not gone yet: %s", sb.ID, sb.LastError)
		if len(sb.Debts) > 0 { // which no one can forget
			return sb, e.WithHint("the server keeps trying; see what is left with: sandboxer get %s", sb.ID)
		}
		return sb, e.WithHint("the server keeps trying; destroy it again to see its state; if its host is gone for good: sandboxer forget %s", sb.ID)
	}
	return sb, nil
}

// Run runs a command without streaming and returns its output.
func (c *Client) Run(ctx context.Context, ref string, e Exec) (*ExecResult, error) {
	return do[*ExecResult](ctx, c, call{method: "POST", path: sandboxPath(ref) + "/exec", body: e})
}

// Stats returns the sandbox's present consumption.
func (c *Client) Stats(ctx context.Context, ref string) (*Stats, error) {
	return do[*Stats](ctx, c, call{method: "GET", path: sandboxPath(ref) + "/stats"})
}

// Ports lists the declared and the published ports.
func (c *Client) Ports(ctx context.Context, ref string) (*List[SandboxPort], error) {
	return do[*List[SandboxPort]](ctx, c, call{method: "GET", path: sandboxPath(ref) + "/ports"})
}

// OpenPort opens a port of the sandbox at the port proxy.
func (c *Client) OpenPort(ctx context.Context, ref string, port int) (*SandboxPort, error) {
	return do[*SandboxPort](ctx, c, call{method: "PUT", path: portPath(ref, port), again: true})
}

// ClosePort closes a port at the port proxy and revokes its signed URLs.
func (c *Client) ClosePort(ctx context.Context, ref string, port int) error {
	return none(ctx, c, call{method: "DELETE", path: portPath(ref, port)})
}

// RevokePort revokes the signed URLs of an open port.
func (c *Client) RevokePort(ctx context.Context, ref string, port int) error {
	return none(ctx, c, call{method: "POST", path: portPath(ref, port) + "/revoke", again: true})
}

// SignPort makes a URL that gives its holder access to an open port for ttl; 0 means an hour.
func (c *Client) SignPort(ctx context.Context, ref string, port int, ttl time.Duration) (*PortURL, error) {
	return do[*PortURL](ctx, c, call{method: "POST", path: portPath(ref, port) + "/url", body: SignPort{TTL: Duration(ttl)}, again: true})
}

func portPath(ref string, port int) string { return sandboxPath(ref) + "/ports/" + strconv.Itoa(port) }

// Profiles lists the profiles.
func (c *Client) Profiles(ctx context.Context) (*List[Profile], error) {
	return do[*List[Profile]](ctx, c, call{method: "GET", path: "/v1/profiles"})
}

// Profile returns one profile; its ID is also accepted without the prefix.
func (c *Client) Profile(ctx context.Context, id string) (*Profile, error) {
	return do[*Profile](ctx, c, call{method: "GET", path: "/v1/profiles/" + url.PathEscape(id)})
}

// Extensions lists the configured extensions.
func (c *Client) Extensions(ctx context.Context) (*List[Extension], error) {
	return do[*List[Extension]](ctx, c, call{method: "GET", path: "/v1/extensions"})
}

// Probe returns how many sandboxes an extension can take now.
func (c *Client) Probe(ctx context.Context, extension string) (*HostCapacity, error) {
	return do[*HostCapacity](ctx, c, call{method: "POST", path: "/v1/extensions/" + url.PathEscape(extension) + "/probe", again: true})
}

// CreateKey makes an API key. The token is in this answer and cannot be read again.
func (c *Client) CreateKey(ctx context.Context, k NewKey) (*CreatedKey, error) {
	return do[*CreatedKey](ctx, c, call{method: "POST", path: "/v1/keys", body: k})
}

// Keys lists the API keys.
func (c *Client) Keys(ctx context.Context) (*List[Key], error) {
	return do[*List[Key]](ctx, c, call{method: "GET", path: "/v1/keys"})
}

// RevokeKey makes a key invalid immediately and ends the streams that were opened with it.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	return none(ctx, c, call{method: "DELETE", path: "/v1/keys/" + url.PathEscape(id)})
}

// SetSecret stores a value as the newest version of a secret of the caller's tenant, or of the operator. The value
// cannot be read again. Kind: Invalid for a value that is not UTF-8.
func (c *Client) SetSecret(ctx context.Context, name string, operators bool, value sandboxer.Secret) (*Secret, error) {
	if len(value) <= sandboxer.MaxSecretBytes && !utf8.ValidString(value.Reveal()) { // which JSON would replace without an error
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the value of secret %s is not text in UTF-8", name).WithHint("encode it, for example with base64")
	}
	return do[*Secret](ctx, c, call{method: "PUT", path: "/v1/secrets/" + url.PathEscape(name), query: secretQuery(operators, false),
		body: SetSecret{Value: value.Reveal()}, again: true})
}

// Secrets lists the secrets of the caller's tenant, or of the operator, without values.
func (c *Client) Secrets(ctx context.Context, operators bool) (*List[Secret], error) {
	return do[*List[Secret]](ctx, c, call{method: "GET", path: "/v1/secrets", query: secretQuery(operators, false)})
}

// RemoveSecret removes all versions of a secret. With force, which is for administrators, it does so although something
// needs it.
func (c *Client) RemoveSecret(ctx context.Context, name string, operators, force bool) error {
	return none(ctx, c, call{method: "DELETE", path: "/v1/secrets/" + url.PathEscape(name), query: secretQuery(operators, force)})
}

func secretQuery(operators, force bool) url.Values {
	v := url.Values{}
	for name, set := range map[string]bool{"operator": operators, "force": force} {
		if set {
			v.Set(name, "true")
		}
	}
	return v
}

// Balance returns a tenant's balance; "" means the caller's tenant.
func (c *Client) Balance(ctx context.Context, tenant string) (*Balance, error) {
	v := url.Values{}
	set(v, "tenant", tenant)
	return do[*Balance](ctx, c, call{method: "GET", path: "/v1/credits", query: v})
}

// Quotas returns the quotas of tenants and their use.
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

// Grant adds credits to a tenant. If g.Key is empty, the client generates one.
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

// Quarantined lists objects of this installation that its database does not know. It needs the admin
// scope.
func (c *Client) Quarantined(ctx context.Context) (*List[Quarantined], error) {
	return do[*List[Quarantined]](ctx, c, call{method: "GET", path: "/v1/quarantine"})
}

// Forget gives up a sandbox that cannot be removed because its host is gone for good. It needs the
// admin scope.
func (c *Client) Forget(ctx context.Context, id string) (*Sandbox, error) {
	return do[*Sandbox](ctx, c, call{method: "POST", path: sandboxPath(id) + "/forget"})
}

// AcceptDatabase has deadlines count again after the database went back in time. It needs the admin
// scope.
func (c *Client) AcceptDatabase(ctx context.Context) (*Status, error) {
	return do[*Status](ctx, c, call{method: "POST", path: "/v1/database/accept"})
}

// DeepAudit is Audit and also reads all data of every portable snapshot.
func (c *Client) DeepAudit(ctx context.Context) (*Audit, error) {
	return do[*Audit](ctx, c, call{method: "GET", path: "/v1/audit", query: url.Values{"deep": {"true"}}})
}

// Sweep runs one pass of the sweep now.
func (c *Client) Sweep(ctx context.Context) (*Sweep, error) {
	return do[*Sweep](ctx, c, call{method: "POST", path: "/v1/sweep", again: true})
}

// Reload makes the server read its profiles again: either all changes apply or none.
func (c *Client) Reload(ctx context.Context) (*Reload, error) {
	return do[*Reload](ctx, c, call{method: "POST", path: "/v1/reload", again: true})
}

// Status describes the server and the caller's identity.
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

// All yields the items of all pages of a list. get returns the page at a cursor, "" for the first. A
// list of more than a million entries, or one whose cursors form a circle, ends with an Unavailable
// error ([sandboxer.Unavailable]).
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
