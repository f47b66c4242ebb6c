package agent

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent/proto/filesystem/filesystemconnect"
	"github.com/sand-boxer/sandboxer/agent/proto/process/processconnect"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
	"github.com/sand-boxer/sandboxer/internal/upload"
)

// ClientOptions say how to reach an agent. Dial or BaseURL is required.
type ClientOptions struct {
	// Dial opens a connection to the agent's listener.
	Dial func(ctx context.Context) (net.Conn, error)
	// BaseURL and HTTP reach an agent behind an HTTP server instead ("https://…"). A nil HTTP means
	// http.DefaultClient. Without Dial, Client.Dial and Client.Connect are not available. With Dial and
	// BaseURL, Dial opens the connections to that server.
	BaseURL string
	HTTP    *http.Client
	Token   string      // access token; empty for an agent without one
	Header  http.Header // sent with every request
	// IdleConns is how many idle connections are kept for later calls; 0 means 8. Each may need a
	// process at the sandbox.
	IdleConns int
	// IdleTime is how long an idle connection is kept; 0 means a minute.
	IdleTime time.Duration
	// Dials is how many connections Dial opens at the same time; 0 means any number. With DialsWait, a
	// call that needs one more waits. Without it, the call fails as Unavailable and nothing was sent.
	Dials     int
	DialsWait bool
	// MaxHung is how many dials in a row may hang, because an engine may wait for each without an end. Then
	// one dial is tried every ten minutes until one succeeds, and the other calls fail as Failed. A dial
	// hangs if DialCommand or DialAttached reached a deadline. 0 means any number.
	MaxHung int
	// User owns new files and runs commands without a user; empty means the agent's default.
	User string
}

// Client speaks to the agent of one sandbox. It implements the capabilities exec, files, dial and stats
// for an adapter. It keeps connections for reuse until Close. Its methods are safe for concurrent use.
//
// The agent runs in the sandbox, where another process may take its place. So every answer is bounded
// in bytes, entries and time, and no call depends on the agent to end.
//
// Errors carry a Kind: Unavailable when the agent cannot be reached; Timeout when it does not answer in
// time (a minute; ten minutes to remove a tree; two minutes of the agent's own time for every 64 KiB of
// a transfer); Failed when its answer is too large or cannot be read; Unauthenticated for a wrong
// token; and those of the capability interfaces.
type Client struct {
	wait  patience
	opts  ClientOptions
	base  string
	http  *http.Client
	owned *http.Transport // nil when the HTTP client is the caller's
	dials *dialGate
	proc  processconnect.ProcessClient
	files filesystemconnect.FilesystemClient
}

// NewClient returns a client; it connects with the first call.
func NewClient(o ClientOptions) *Client {
	c := &Client{wait: defaultPatience, opts: o, dials: &dialGate{}, base: strings.TrimSuffix(o.BaseURL, "/"), http: o.HTTP}
	switch {
	case o.Dial != nil:
		o.Dial = c.dials.bounded(o)
		c.opts.Dial = o.Dial
		// HTTP/1.1, because a stream on a connection of its own needs no windows: output
		// flows three times as fast as over HTTP/2.
		c.owned = &http.Transport{
			DialContext:         upload.Dial(func(ctx context.Context, _, _ string) (net.Conn, error) { return o.Dial(ctx) }),
			DisableCompression:  true,
			MaxIdleConnsPerHost: cmp.Or(o.IdleConns, idleConns),
			IdleConnTimeout:     cmp.Or(o.IdleTime, time.Minute),

			MaxResponseHeaderBytes: maxHead,
		}
		c.http = &http.Client{Transport: c.owned}
		c.base = cmp.Or(c.base, "http://sandbox")
	case c.http == nil:
		c.http = http.DefaultClient
	}
	hc := *c.http
	hc.CheckRedirect = noRedirect
	c.http = &hc
	rpc := &headerClient{c}
	opts := []connect.ClientOption{
		connect.WithReadMaxBytes(maxReply),
		connect.WithAcceptCompression("gzip", nil, nil),
	}
	c.proc = processconnect.NewProcessClient(rpc, c.base, opts...)
	c.files = filesystemconnect.NewFilesystemClient(rpc, c.base, opts...)
	return c
}

// ErrNotReached is the cause of errors of calls that sent nothing to the agent, because there was no
// connection to it.
var ErrNotReached = errors.New("no connection to the agent")

// idleConns is how many connections to one agent are kept for the next calls.
const idleConns = 8

// Close closes idle connections, and those that are being opened without a waiting call. Running calls
// continue.
func (c *Client) Close() error {
	c.dials.end()
	if c.owned != nil {
		c.owned.CloseIdleConnections()
	}
	return nil
}

// headerClient adds our headers to the calls of the RPC clients.
type headerClient struct{ c *Client }

func (h *headerClient) Do(r *http.Request) (*http.Response, error) {
	h.c.decorate(r.Header)
	if r.Header.Get("Authorization") == "" && h.c.opts.User != "" {
		r.Header.Set("Authorization", basicUser(h.c.opts.User))
	}
	res, err := h.c.send(r)
	switch {
	case err != nil:
	case strings.HasPrefix(res.Header.Get("Content-Type"), "application/connect+"):
		res.Body = &envelopes{ReadCloser: res.Body}
	default:
		res.Body = &message{res.Body, maxReply}
	}
	return res, err
}

// send sends a request. It refuses an unrequested upgrade: the body of such an answer does not
// end with the request's context.
func (c *Client) send(r *http.Request) (*http.Response, error) {
	res, err := c.http.Do(r)
	if err == nil && res.StatusCode == http.StatusSwitchingProtocols {
		res.Body.Close()
		return nil, unreadable(nil, "an upgrade of the connection")
	}
	return res, err
}

func basicUser(name string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(name+":"))
}

func (c *Client) decorate(h http.Header) {
	for k, vs := range c.opts.Header {
		h[http.CanonicalHeaderKey(k)] = vs
	}
	if c.opts.Token != "" {
		h.Set(tokenHeader, c.opts.Token)
	}
}

// do sends a plain request and turns an unsuccessful answer into an error. It gives up when
// no data moves; a caller that reads an answer that should be small bounds ctx.
func (c *Client) do(ctx context.Context, method, path string, query url.Values, header http.Header, body *content, size int64) (_ *http.Response, err error) {
	if c.opts.User != "" && !query.Has("username") {
		query.Set("username", c.opts.User)
	}
	ctx, cancel, still := moving(ctx, c.wait.progress)
	defer func() {
		still.ours(0)
		if err != nil {
			cancel(nil)
		}
	}()
	var sent io.Reader
	if body != nil {
		body.still = still
		body.sent, ctx = upload.New(ctx, body)
		sent = body.sent
	}
	r, err := http.NewRequestWithContext(ctx, method, c.base+path+"?"+query.Encode(), sent)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Internal, err, "cannot make a request to the agent")
	}
	for k, v := range header {
		r.Header[k] = v
	}
	r.Header.Set("Accept-Encoding", "identity")
	if size >= 0 {
		r.ContentLength = size
	}
	c.decorate(r.Header)
	res, err := c.send(r)
	if err != nil {
		return nil, c.transportError(ctx, err)
	}
	res.Body = &transfer{res.Body, c, ctx, cancel, still}
	if res.StatusCode/100 == 2 {
		return res, nil
	}
	defer res.Body.Close()
	return nil, c.plainError(res)
}

// plainError reads a failure of a plain endpoint.
func (c *Client) plainError(res *http.Response) error {
	var answer struct {
		Message string `json:"message"`
	}
	b, _ := readAnswer(res.Body)
	if json.Unmarshal(b, &answer) != nil || answer.Message == "" {
		answer.Message = "the agent answered " + res.Status
	}
	said := res.Header.Get(kindHeader)
	if said == "" && (res.StatusCode == http.StatusNotFound || res.StatusCode == http.StatusMethodNotAllowed) {
		return sandboxer.E(sandboxer.NotFound, errNoRoute, "%s", text(answer.Message))
	}
	kind := sandboxer.Failed
	switch res.StatusCode {
	case http.StatusBadRequest, http.StatusNotAcceptable:
		kind = sandboxer.Invalid
	case http.StatusUnauthorized:
		kind = sandboxer.Unauthenticated
	case http.StatusForbidden:
		kind = sandboxer.Denied
	case http.StatusNotFound:
		kind = sandboxer.NotFound
	case http.StatusInsufficientStorage, http.StatusTooManyRequests:
		kind = sandboxer.Exhausted
	case http.StatusNotImplemented:
		kind = sandboxer.Unsupported
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		kind = sandboxer.Unavailable
	}
	return c.failure(kind, res.Header, answer.Message)
}

// errNoRoute is the cause of an error if an agent does not know the call.
var errNoRoute = errors.New("the agent has no such call")

func (c *Client) transportError(ctx context.Context, err error) error {
	var e *sandboxer.Error
	switch {
	case context.Cause(ctx) == errLate:
		return sandboxer.E(sandboxer.Timeout, err, "the sandbox's agent did not answer in time")
	case ctx.Err() != nil:
		return sandboxer.E(sandboxer.KindOf(ctx.Err()), err, "the call to the sandbox's agent was given up")
	case errors.As(err, &e): // of the dial function, or of a bound
		return e
	case strings.Contains(err.Error(), "server response headers exceeded"):
		return tooLarge("64 KiB of head")
	}
	return sandboxer.E(sandboxer.Unavailable, err, "the sandbox's agent cannot be reached")
}

// rpcError gives an error of an RPC its Kind.
func (c *Client) rpcError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return c.transportError(ctx, err)
	}
	said := ce.Meta().Get(kindHeader)
	switch code := ce.Code(); {
	case said != "", code == connect.CodeUnauthenticated, code == connect.CodePermissionDenied: // may be the bare status of a proxy
	case connect.IsWireError(err):
	case code == connect.CodeResourceExhausted:
		return tooLarge("1 MiB in one message")
	case ctx.Err() == nil && !broke(err) && (code == connect.CodeInternal || code == connect.CodeUnknown || code == connect.CodeInvalidArgument):
		return unreadable(err, text(ce.Message()))
	default: // raised on our side
		return c.transportError(ctx, err)
	}
	kind := sandboxer.Failed
	switch ce.Code() {
	case connect.CodeInvalidArgument, connect.CodeOutOfRange:
		kind = sandboxer.Invalid
	case connect.CodeUnauthenticated:
		kind = sandboxer.Unauthenticated
		if strings.HasPrefix(ce.Message(), "invalid username") {
			kind = sandboxer.Invalid
		}
	case connect.CodePermissionDenied:
		kind = sandboxer.Denied
	case connect.CodeNotFound:
		kind = sandboxer.NotFound
	case connect.CodeAlreadyExists, connect.CodeFailedPrecondition, connect.CodeAborted:
		kind = sandboxer.Conflict
	case connect.CodeResourceExhausted:
		kind = sandboxer.Exhausted
	case connect.CodeUnimplemented:
		kind = sandboxer.Unsupported
	case connect.CodeUnavailable:
		kind = sandboxer.Unavailable
	case connect.CodeDeadlineExceeded:
		kind = sandboxer.Timeout
	case connect.CodeCanceled:
		kind = sandboxer.Canceled
	}
	return c.failure(kind, ce.Meta(), ce.Message())
}

// Health reports whether the agent answers.
func (c *Client) Health(ctx context.Context) error {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	res, err := c.do(ctx, http.MethodGet, "/health", url.Values{}, nil, nil, -1)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// WaitReady returns when the agent answers. It tries until ctx is done. Its error is that of the last
// attempt, Unavailable; Unauthenticated ends it immediately.
func (c *Client) WaitReady(ctx context.Context) error {
	pause := time.Millisecond
	for {
		err := c.Health(ctx)
		if err == nil {
			return nil
		}
		switch sandboxer.KindOf(err) {
		case sandboxer.Unavailable, sandboxer.Timeout, sandboxer.Canceled:
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return sandboxer.E(sandboxer.Unavailable, err, "the sandbox's agent did not answer in time")
		case <-time.After(pause):
		}
		pause = min(2*pause, 100*time.Millisecond)
	}
}

// Settings of a running agent. A nil field keeps the present value.
type Settings struct {
	Token   *string           `json:"accessToken,omitempty"`
	Env     map[string]string `json:"envVars,omitempty"` // replaces the whole set
	User    *string           `json:"defaultUser,omitempty"`
	Workdir *string           `json:"defaultWorkdir,omitempty"`
	At      *time.Time        `json:"timestamp,omitempty"` // older settings than the last ones are ignored
	Fuse    *time.Time        `json:"fuse,omitempty"`      // time at which the agent ends itself and the sandbox; zero means never
}

// Init changes settings of the agent. If it changes the token, this client keeps the old one: make a
// new client.
func (c *Client) Init(ctx context.Context, s Settings) error {
	b, err := json.Marshal(s)
	if err != nil {
		return sandboxer.E(sandboxer.Internal, err, "cannot encode the settings")
	}
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	res, err := c.do(ctx, http.MethodPost, "/init", url.Values{}, http.Header{"Content-Type": {"application/json"}},
		&content{r: bytes.NewReader(b)}, int64(len(b)))
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// Stats measures the sandbox; see sandboxer.StatsReader.
func (c *Client) Stats(ctx context.Context) (sandboxer.Stats, error) {
	var st sandboxer.Stats
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	res, err := c.do(ctx, http.MethodGet, statsPath, url.Values{}, nil, nil, -1)
	if err != nil {
		return st, err
	}
	defer res.Body.Close()
	b, err := readAnswer(res.Body)
	if err != nil {
		return st, c.transportError(ctx, err)
	}
	if err := json.Unmarshal(b, &st); err != nil {
		return sandboxer.Stats{}, unreadable(err, "invalid figures")
	}
	for _, n := range []*int64{&st.MemoryBytes, &st.DiskBytes, &st.PIDs, &st.RxBytes, &st.TxBytes} {
		*n = max(*n, -1)
	}
	st.CPU, st.MemoryLimit, st.DiskLimit = max(st.CPU, -1), max(st.MemoryLimit, 0), max(st.DiskLimit, 0)
	st.At = time.Now().UTC() // the clock inside is the sandbox's
	return st, nil
}

// Connect opens a separate connection to the agent for a caller that speaks its wire protocol; see
// sandboxer.AgentDialer. An agent with a token cannot be handed on this way: the error is Unsupported.
func (c *Client) Connect(ctx context.Context) (net.Conn, error) {
	if c.opts.Dial == nil || c.opts.Token != "" {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "connections to this agent need credentials, and cannot be passed on")
	}
	conn, err := c.opts.Dial(ctx)
	if err != nil {
		return nil, c.transportError(ctx, err)
	}
	return conn, nil
}

// Dial opens a stream to a TCP port inside the sandbox; see sandboxer.Dialer. The stream is a separate
// connection with CloseWrite.
func (c *Client) Dial(ctx context.Context, port int) (net.Conn, error) {
	if c.opts.Dial == nil {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "this agent is reached through an HTTP front, which carries no raw streams")
	}
	conn, err := c.opts.Dial(ctx)
	if err != nil {
		return nil, c.transportError(ctx, err)
	}
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	if u, err := url.Parse(c.base); err == nil && u.Scheme == "https" {
		conn = tls.Client(conn, &tls.Config{ServerName: u.Hostname(), MinVersion: tls.VersionTLS12})
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	r, err := http.NewRequest(http.MethodGet, c.base+relayPath+"?port="+strconv.Itoa(port), nil)
	if err != nil {
		conn.Close()
		return nil, sandboxer.E(sandboxer.Internal, err, "cannot make a request to the agent")
	}
	c.decorate(r.Header)
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", relayName)
	br := bufio.NewReader(&headLimit{conn, maxHead + maxAnswer})
	err = r.Write(conn)
	var res *http.Response
	if err == nil {
		res, err = http.ReadResponse(br, r)
	}
	if err == nil && res.StatusCode != http.StatusSwitchingProtocols {
		defer stop()
		defer conn.Close()
		return nil, c.plainError(res)
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, c.transportError(ctx, err)
	}
	if br.Buffered() == 0 {
		return conn, nil
	}
	return &bufferedConn{Conn: conn, r: br}, nil
}

// A bufferedConn first returns the bytes that were read too early.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (b *bufferedConn) Read(p []byte) (int, error) {
	if b.r != nil {
		if b.r.Buffered() > 0 {
			return b.r.Read(p)
		}
		b.r = nil
	}
	return b.Conn.Read(p)
}

func (b *bufferedConn) CloseWrite() error { return halfclose.CloseWrite(b.Conn) }
