package edge

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"go.uber.org/goleak"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edgetest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "few" { // an edge with few descriptors
		panic(fewMain(os.Args[2]))
	}
	goleak.VerifyTestMain(m)
}

const (
	goodKey = "sbx_key_00000000_good"
	readKey = "sbx_key_00000001_read" // its tenant is another, and it may only read
)

// fakeAuth knows goodKey and readKey.
type fakeAuth struct {
	get func(ctx context.Context) error // of GET /v1/sandboxes/{id}; nil: NotFound

	mu    sync.Mutex
	bound []context.CancelCauseFunc
	held  map[*int]bool // streams that were bound and not released
	full  bool          // no request is admitted
}

func (l *fakeAuth) Authenticate(_ context.Context, token sandboxer.Secret) (sandboxer.Principal, error) {
	switch token.Reveal() {
	case goodKey:
		return sandboxer.Principal{Tenant: "acme", Actor: "key:00000000", KeyID: "00000000", Scopes: sandboxer.Scopes()}, nil
	case readKey:
		return sandboxer.Principal{Tenant: "rival", Actor: "key:00000001", KeyID: "00000001", Scopes: []sandboxer.Scope{sandboxer.ScopeRead}}, nil
	}
	return sandboxer.Principal{}, sandboxer.E(sandboxer.Unauthenticated, nil, "the API key is not valid")
}

func (l *fakeAuth) AdmitRequest(sandboxer.Principal) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full {
		return sandboxer.OverQuota("acme", sandboxer.QuotaRequests, 1, 1, 0)
	}
	return nil
}

func (l *fakeAuth) Bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.KeyID != "" {
		l.bound = append(l.bound, cancel)
	}
	if l.held == nil {
		l.held = map[*int]bool{}
	}
	id := new(int)
	l.held[id] = true
	return ctx, func() {
		cancel(nil)
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.held, id)
	}
}

// streams is how many streams are bound and not released.
func (l *fakeAuth) streams() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.held)
}

// revoke ends every stream as a revoked key does, and reports whether there was one.
func (l *fakeAuth) revoke() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, cancel := range l.bound {
		cancel(sandboxer.E(sandboxer.Unauthenticated, nil, "the API key was revoked"))
	}
	return len(l.bound) > 0
}

// fakeDoor has routes as a front door has them, behind which is nothing.
func fakeDoor(l *fakeAuth) Door {
	mux := &Mux{Hint: "look around"}
	route := func(pattern string, a Access, h http.HandlerFunc) {
		mux.Handle(Route{Pattern: pattern, Access: a, Handler: h})
	}
	answer := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, "{}")
	}
	whole := func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Content-Type") == "" {
			Fail(w, r, WithStatus(http.StatusUnsupportedMediaType, sandboxer.E(sandboxer.Invalid, nil, "no content type")))
		} else if _, err := ReadAll(r, 1<<20, 30*time.Second); err != nil {
			Fail(w, r, err)
		} else {
			answer(w, r)
		}
	}
	route("GET /healthz", Anyone(), answer)
	route("GET /openapi.yaml", Anyone(), func(w http.ResponseWriter, _ *http.Request) { w.Write(make([]byte, 64<<10)) })
	route("GET /v1/status", Needs(sandboxer.ScopeRead), answer)
	route("POST /v1/sandboxes", Needs(sandboxer.ScopeWrite), whole)
	route("POST /v1/snapshots/import", Needs(sandboxer.ScopeWrite), whole)
	route("PUT /v1/sandboxes/{id}/files", Needs(sandboxer.ScopeWrite), whole)
	route("PUT /v1/sandboxes/{id}/ports/{port}", Needs(sandboxer.ScopeWrite), func(w http.ResponseWriter, r *http.Request) {
		Fail(w, r, sandboxer.E(sandboxer.Invalid, nil, "%s is no port", r.PathValue("port")))
	})
	route("GET /v1/sandboxes/{id}/exec", Needs(sandboxer.ScopeWrite), answer)
	route("GET /v1/sandboxes/{id}", Needs(sandboxer.ScopeRead), func(w http.ResponseWriter, r *http.Request) {
		err := error(sandboxer.E(sandboxer.NotFound, nil, "there is no such sandbox"))
		if l.get != nil {
			err = l.get(r.Context())
		}
		Fail(w, r, err)
	})
	return Door{Name: "fake", Path: "/", Routes: mux}
}

// served is an edge on a TCP listener, one with TLS and a Unix socket.
type served struct {
	*testing.T
	*edgetest.Server
	e   *Edge
	log *edgetest.Log
}

func serve(t *testing.T, l *fakeAuth, opts Options, doors ...Door) *served {
	t.Helper()
	d := &served{T: t, log: &edgetest.Log{}}
	opts.Log = d.log.Logger()
	d.e = New(l, opts)
	d.e.drainTime, d.e.lingerTime = 50*time.Millisecond, edgetest.Patience
	d.e.Mount(fakeDoor(l))
	for _, door := range doors {
		d.e.Mount(door)
	}
	d.Server = edgetest.Serve(t, edgetest.Listen{Unix: ListenUnix, TCP: ListenTCP, TLS: ListenTLS}, opts.Log, d.e.Serve)
	return d
}

// dial opens a connection to one of the listeners.
func (d *served) dial(network string) net.Conn {
	d.Helper()
	return d.Dial(d, network)
}

// roundTrip sends a request and returns the answer.
func (d *served) roundTrip(c net.Conn, request string) (*http.Response, string) {
	d.Helper()
	if _, err := io.WriteString(c, request); err != nil {
		d.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		d.Fatalf("%q: %v", request, err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		d.Fatal(err)
	}
	return resp, string(b)
}

// retry returns a new connection on which request was answered with status. Where
// anonymous connections have little time, a busy machine may need several.
func (d *served) retry(network, request string, status int) net.Conn {
	d.Helper()
	var last any
	for end := time.Now().Add(edgetest.Patience); time.Now().Before(end); {
		c, err := d.Try(d, network)
		if err == nil {
			_, err = io.WriteString(c, request)
		}
		if err == nil {
			var resp *http.Response
			if resp, err = http.ReadResponse(bufio.NewReader(c), nil); err == nil {
				if _, err = io.ReadAll(resp.Body); err == nil && resp.StatusCode == status {
					return c
				}
				err = fmt.Errorf("%s", resp.Status)
			}
		}
		last = err
		if c != nil {
			c.Close() // many of them would be too many
		}
		time.Sleep(5 * time.Millisecond)
	}
	d.Fatalf("%q: %v", request, last)
	return nil
}

// closed waits until the server closes c.
func (d *served) closed(c net.Conn, what string) {
	d.Helper()
	var timeout net.Error
	if _, err := io.Copy(io.Discard, c); errors.As(err, &timeout) && timeout.Timeout() {
		d.Fatalf("%s: the connection is held", what)
	}
}

func request(line string, headers ...string) string {
	return line + " HTTP/1.1\r\nHost: localhost\r\n" + strings.Join(append(headers, "", ""), "\r\n")
}

// A client without a key holds nothing, whatever it promises to send.
func TestNoKeyHoldsNothing(t *testing.T) {
	d := serve(t, &fakeAuth{}, Options{})
	const length, chunks, long = "Content-Length: 10", "Transfer-Encoding: chunked", "Content-Length: 1000000000"
	jsonType, bad, good := "Content-Type: application/json", "Authorization: Bearer sbx_key_11111111_bad", "Authorization: Bearer "+goodKey
	for _, network := range []string{"tcp", "tls"} {
		for _, tt := range []struct {
			request string
			status  int
		}{
			{request("POST /v1/sandboxes", jsonType, length), 401},
			{request("POST /v1/sandboxes", jsonType, chunks), 401},
			{request("POST /v1/sandboxes", jsonType, length, "Expect: 100-continue"), 401},
			{request("POST /v1/sandboxes", jsonType, length, bad), 401},
			{request("POST /v1/sandboxes", jsonType, length, "Authorization: Basic eA=="), 401},
			{request("PUT /v1/sandboxes/x/files?path=/a", long), 401},
			{request("PUT /v1/sandboxes/x/files?path=/a", chunks), 401},
			{request("POST /v1/snapshots/import", chunks), 401},
			{request("GET /v1/status"), 401},
			{request("GET /v1/sandboxes/x/exec", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="), 401},
			{request("GET /healthz", length), 200},
			{request("POST /healthz", length), 405},
			{request("POST /nowhere", chunks), 404},
			{request("POST /v1/sandboxes", jsonType, length, "Sec-Fetch-Site: cross-site"), 403},
			{"POST /v1/sandboxes HTTP/1.1\r\nHost: evil.example\r\n" + length + "\r\n\r\n", 421},
			// With a key the answer does not wait for long, either.
			{request("PUT /v1/sandboxes/x/ports/0", length, good), 400},
			{request("POST /v1/sandboxes", length, good), 415},
		} {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				d := &served{T: t, Server: d.Server}
				c := d.dial(network)
				resp, body := d.roundTrip(c, tt.request)
				if resp.StatusCode != tt.status {
					t.Errorf("%s %q: %d %s; want %d", network, tt.request, resp.StatusCode, body, tt.status)
				}
				d.closed(c, tt.request)
			})
		}
	}
	// The owner of the Unix socket gets an answer, too, before the announced body was sent.
	c := d.dial("unix")
	if resp, body := d.roundTrip(c, request("POST /v1/sandboxes", length)); resp.StatusCode != 415 {
		t.Errorf("Unix: %d %s", resp.StatusCode, body)
	}
	d.closed(c, "unix")
	// No listener speaks another protocol.
	c = d.dial("tcp")
	io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	d.closed(c, "HTTP/2")
}

// A connection without an authenticated caller lasts as long as bytes come.
func TestAnonymousConnectionsHaveLittleTime(t *testing.T) {
	const wait = 50 * time.Millisecond
	d := serve(t, &fakeAuth{}, Options{Conns: ConnLimits{Wait: wait}})
	for _, network := range []string{"tcp", "tls"} {
		if c, err := d.Try(d, network); err == nil { // else it was closed in the handshake
			d.closed(c, network+": nothing sent")
		}
		c, err := d.Try(d, network)
		if err == nil {
			io.WriteString(c, "GET /v1/status HTTP/1.1\r\nHost: ")
			d.closed(c, network+": half a header")
		}
		d.closed(d.retry(network, request("GET /healthz"), 200), network+": idle after an open route")
		// With a key there is time: several times what others have.
		c = d.retry(network, request("GET /v1/sandboxes/x", "Authorization: Bearer "+goodKey), 404)
		for range 3 {
			time.Sleep(4 * wait)
			if resp, _ := d.roundTrip(c, request("GET /v1/sandboxes/x", "Authorization: Bearer "+goodKey)); resp.StatusCode != 404 {
				t.Errorf("%s with a key: %d", network, resp.StatusCode)
			}
		}
	}
	c, err := net.Dial("tcp", d.TLS)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(edgetest.Patience))
	io.WriteString(c, "\x16\x03\x01\x02\x00") // the head of a handshake
	d.closed(c, "half a handshake")
	// One that reads nothing of a long answer.
	c = d.dial("tcp")
	c.(*net.TCPConn).SetReadBuffer(1 << 10)
	for err == nil {
		_, err = io.WriteString(c, request("GET /openapi.yaml"))
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		t.Error("whoever reads nothing holds a connection")
	}
}

// Too many anonymous connections make room for each other, those of one address first; a client that sends its
// key at once is served.
func TestAnonymousConnectionsMakeRoom(t *testing.T) {
	d := serve(t, &fakeAuth{}, Options{Conns: ConnLimits{Unauthenticated: 6, PerAddress: 4}})
	from := func(ip string) net.Conn {
		t.Helper()
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).Dial("tcp", d.TCP)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(edgetest.Patience))
		t.Cleanup(func() { c.Close() })
		return c
	}
	var one []net.Conn
	for range 5 {
		one = append(one, from("127.0.0.1"))
	}
	d.closed(one[0], "the oldest of an address with too many")
	two := []net.Conn{from("127.0.0.2"), from("127.0.0.2"), from("127.0.0.2")}
	d.closed(one[1], "the oldest of the address with the most")
	for i := range 50 {
		c := from("127.0.0.1")
		if resp, body := d.roundTrip(c, request("GET /v1/sandboxes/x", "Authorization: Bearer "+goodKey)); resp.StatusCode != 404 {
			t.Fatalf("request %d with a key: %d %s", i, resp.StatusCode, body)
		}
	}
	if resp, _ := d.roundTrip(two[2], request("GET /healthz")); resp.StatusCode != 200 {
		t.Errorf("one who waited without a key: %d", resp.StatusCode)
	}
}

// Connections of a key are bounded; those on which nothing happens make room.
func TestConnectionsOfAKey(t *testing.T) {
	for whose, limits := range map[string]ConnLimits{
		"this key has": {PerKey: 3}, "this tenant has": {PerTenant: 3}, "this server has": {Authenticated: 3, PerTenant: 10, PerKey: 10},
	} {
		t.Run(whose, func(t *testing.T) { connectionsAreBounded(t, limits, whose) })
	}
}

func connectionsAreBounded(t *testing.T, limits ConnLimits, whose string) {
	release := make(chan struct{})
	entered := make(chan struct{}, 8)
	m := &fakeAuth{get: func(ctx context.Context) error {
		entered <- struct{}{}
		select {
		case <-release:
		case <-ctx.Done():
		}
		return sandboxer.E(sandboxer.NotFound, nil, "there is no such sandbox")
	}}
	d := serve(t, m, Options{Conns: limits})
	busy, quick := request("GET /v1/sandboxes/x", "Authorization: Bearer "+goodKey), request("POST /v1/sandboxes", "Authorization: Bearer "+goodKey)
	idle := d.dial("tcp")
	d.roundTrip(idle, quick)
	// Its answer can be read before the server has noted that it is idle.
	edgetest.Poll(t, "an idle connection", func() bool {
		d.e.conns.mu.Lock()
		defer d.e.conns.mu.Unlock()
		return d.e.conns.idle.Len() == 1
	})
	hold := func() net.Conn {
		t.Helper()
		c := d.dial("tcp")
		io.WriteString(c, busy)
		edgetest.Receive(t, entered, "a request's handler")
		return c
	}
	held := []net.Conn{hold(), hold()}
	c := hold()
	d.closed(idle, "the idle one")
	resp, body := d.roundTrip(d.dial("tcp"), quick)
	if resp.StatusCode != 429 || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, `"code":"exhausted"`) || !strings.Contains(body, whose) {
		t.Errorf("one too many: %d %v %s", resp.StatusCode, resp.Header, body)
	}
	close(release)
	for _, c := range append(held, c) {
		if resp, _ := http.ReadResponse(bufio.NewReader(c), nil); resp == nil || resp.StatusCode != 404 {
			t.Errorf("a held one: %v", resp)
		}
	}
}

// Near the limit of descriptors the Unix socket, health and keys are served.
func TestDescriptorsRunOut(t *testing.T) {
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "few", filepath.Join(dir, "s", "api.sock"))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	d := &served{T: t, Server: &edgetest.Server{Unix: filepath.Join(dir, "s", "api.sock")}}
	if _, err := fmt.Fscanln(out, &d.TCP); err != nil {
		t.Fatal(err)
	}
	// A client that has not sent its key yet may have to make room for others that come at the
	// same moment, and then tries again.
	check := func(when string) {
		t.Helper()
		for _, network := range []string{"unix", "tcp"} {
			d.retry(network, request("GET /healthz", "Connection: close"), 200)
			d.retry(network, request("GET /v1/sandboxes/x", "Authorization: Bearer "+goodKey, "Connection: close"), 404)
		}
	}
	check("at first")
	for range 400 { // idle ones without a key
		d.dial("tcp")
	}
	check("beside anonymous connections")
	for range 300 { // idle ones with a key
		c, err := net.Dial("tcp", d.TCP)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io.WriteString(c, request("GET /v1/sandboxes/x", "Authorization: Bearer "+goodKey))
	}
	check("beside idle connections with a key")
	for range 300 {
		d.dial("unix")
	}
	check("beside idle connections of the Unix socket")
}

// fewMain is the edge of TestDescriptorsRunOut.
func fewMain(sock string) error {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 128, Max: 128}); err != nil {
		return err
	}
	lu, err := ListenUnix(sock)
	if err != nil {
		return err
	}
	lt, err := ListenTCP("127.0.0.1:0", false)
	if err != nil {
		return err
	}
	fmt.Println(lt.Addr())
	e := New(&fakeAuth{}, Options{})
	e.Mount(fakeDoor(&fakeAuth{}))
	return e.Serve(context.Background(), lu, lt)
}

// A good key passes at any time, also from where others guess.
func TestGuessingIsSlowedDown(t *testing.T) {
	d := serve(t, &fakeAuth{}, Options{})
	good := edgetest.Client(t, "http://"+d.TCP, api.Options{Token: goodKey, NoRetry: true})
	for _, token := range []sandboxer.Secret{"sbx_key_zzzzzzzz_guess", "guess", "sbx_key_00000000_guess"} {
		bad := edgetest.Client(t, "http://"+d.TCP, api.Options{Token: token, NoRetry: true})
		var err error
		n := 0
		for ; n < 100; n++ {
			if _, err = bad.Status(t.Context()); !errors.Is(err, sandboxer.Unauthenticated) {
				break
			}
		}
		if !errors.Is(err, sandboxer.Exhausted) || sandboxer.RetryAfterOf(err) <= 0 || n != failBurst {
			t.Errorf("guess %d: %v, retry after %s", n+1, err, sandboxer.RetryAfterOf(err))
		}
		if _, err := good.Status(t.Context()); err != nil {
			t.Errorf("the same address with a good key: %v", err)
		}
	}
	// With another key each time.
	var err error
	for n := 0; n < 2*failBurstIP && !errors.Is(err, sandboxer.Exhausted); n++ {
		_, err = edgetest.Client(t, "http://"+d.TCP, api.Options{Token: sandboxer.Secret(fmt.Sprintf("sbx_key_%08d_guess", n+2)), NoRetry: true}).Status(t.Context())
	}
	if !errors.Is(err, sandboxer.Exhausted) {
		t.Errorf("%d guesses from one address: %v", 2*failBurstIP, err)
	}
	if _, err := good.Status(t.Context()); err != nil {
		t.Errorf("the same address with a good key: %v", err)
	}
	// From elsewhere even a bad one is simply told so.
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}}).Dial("tcp", d.TCP)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if resp, _ := d.roundTrip(c, request("GET /v1/status", "Authorization: Bearer sbx_key_zzzzzzzz_guess")); resp.StatusCode != 401 {
		t.Errorf("from another address: %d", resp.StatusCode)
	}
}

func TestNetworkOf(t *testing.T) {
	for in, want := range map[string]string{
		"127.0.0.1:1": "127.0.0.1", "[::ffff:10.0.0.1]:1": "10.0.0.1", "[2001:db8:1:2:3::4]:1": "2001:db8:1:2::/64",
		"[2001:db8:1:2:ffff::]:9": "2001:db8:1:2::/64", "[fe80::1%25eth0]:1": "fe80::/64",
	} {
		a, err := net.ResolveTCPAddr("tcp", strings.Replace(in, "%25", "%", 1))
		if err != nil {
			t.Fatal(err)
		}
		if got := network(a); got != want {
			t.Errorf("%s counts as %s; want %s", in, got, want)
		}
	}
}

// A server that gets the signal to end does so, even with requests that never end.
func TestShutdownHasAnEnd(t *testing.T) {
	release, entered := make(chan struct{}), make(chan struct{})
	d := serve(t, &fakeAuth{get: func(context.Context) error {
		close(entered)
		<-release // deaf to its ctx
		return sandboxer.E(sandboxer.NotFound, nil, "there is no such sandbox")
	}}, Options{Drain: 10 * time.Millisecond})
	c := edgetest.Client(t, "unix://"+d.Unix, api.Options{NoRetry: true})
	answered := make(chan error, 1)
	go func() {
		_, err := c.Get(t.Context(), "x")
		answered <- err
	}()
	edgetest.Receive(t, entered, "the request's handler")
	d.Stop()
	if err := edgetest.Receive(t, answered, "the request's answer"); !errors.Is(err, sandboxer.Unavailable) {
		t.Errorf("the request: %v", err)
	}
	if !strings.Contains(d.log.String(), "requests=1") {
		t.Errorf("the log does not say what was left: %s", d.log)
	}
	close(release)
	d.e.work.Wait()
}

// Bodies half sent wait in memory only up to a bound.
func TestHalfBodiesAreBounded(t *testing.T) {
	d := serve(t, &fakeAuth{}, Options{})
	var refused atomic.Int64
	for range maxReservedKey>>20 + 8 {
		c := d.dial("tcp")
		go func() {
			io.WriteString(c, request("POST /v1/sandboxes", "Authorization: Bearer "+goodKey, "Content-Type: application/json", "Content-Length: 1048576")+
				strings.Repeat(" ", 1<<20-100))
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err == nil && resp.StatusCode == 429 && resp.Header.Get("Retry-After") != "" {
				refused.Add(1)
			}
		}()
	}
	edgetest.Poll(t, "a refusal", func() bool { return refused.Load() > 0 })
	if got := d.e.memory.of("acme"); got > maxReservedKey {
		t.Errorf("%d bytes of one key are held; want %d at most", got, maxReservedKey)
	}
}

func (m *memory) of(tenant string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tenants[tenant]
}

// What one request holds is accounted for until it ends, to its key and tenant.
func TestMemory(t *testing.T) {
	m := newMemory()
	p := sandboxer.Principal{Actor: "key:a", Tenant: "t"}
	var rooms []*MemoryReservation
	for range maxReservedKey >> 20 {
		h := &MemoryReservation{of: m, p: p}
		rooms = append(rooms, h)
		for n := range 4 {
			if err := h.Grow((n + 1) << 18); err != nil {
				t.Fatal(err)
			}
		}
	}
	late := &MemoryReservation{of: m, p: p}
	if err := late.Grow(1); !errors.Is(err, sandboxer.Exhausted) || sandboxer.RetryAfterOf(err) <= 0 {
		t.Errorf("one key takes more than it may: %v", err)
	}
	sibling, other := &MemoryReservation{of: m, p: sandboxer.Principal{Actor: "key:b", Tenant: "t"}}, &MemoryReservation{of: m, p: sandboxer.Principal{Actor: "key:c", Tenant: "u"}}
	if err := sibling.Grow(maxReservedTenant - maxReservedKey); err != nil {
		t.Errorf("another key of the tenant: %v", err)
	}
	if err := sibling.Grow(maxReservedTenant - maxReservedKey + 1); !errors.Is(err, sandboxer.Exhausted) {
		t.Errorf("one tenant takes more than it may: %v", err)
	}
	if err := other.Grow(maxReserved - maxReservedTenant); err != nil {
		t.Errorf("another tenant: %v", err)
	}
	if err := other.Grow(maxReserved - maxReservedTenant + 1); !errors.Is(err, sandboxer.Exhausted) {
		t.Errorf("all take more than they may: %v", err)
	}
	for _, h := range append(rooms, late, sibling, other) {
		h.release()
	}
	if m.total != 0 || len(m.keys) != 0 || len(m.tenants) != 0 {
		t.Errorf("left: %+v", m)
	}
	if rooms[0].Grow(1) == nil {
		t.Error("a request that ended takes memory")
	}
}

// TestEarlyAnswerArrives: an answer to an unread body arrives also if the client sends all of the body first.
func TestEarlyAnswerArrives(t *testing.T) {
	d := serve(t, &fakeAuth{}, Options{})
	part := strings.Repeat("x", 64<<10)
	const parts = 64
	for _, network := range []string{"tcp", "tls", "unix"} {
		for _, chunked := range []bool{false, true} {
			for i := range 3 {
				c := d.dial(network)
				c.SetDeadline(time.Now().Add(edgetest.Patience))
				length, begin, end := fmt.Sprintf("Content-Length: %d", parts*len(part)), "", ""
				if chunked {
					length, begin, end = "Transfer-Encoding: chunked", fmt.Sprintf("%x\r\n", len(part)), "\r\n"
				}
				fmt.Fprintf(c, "PUT /v1/sandboxes/abc/ports/x HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "+goodKey+"\r\n%s\r\n\r\n", length)
				for range parts {
					if _, err := io.WriteString(c, begin+part+end); err != nil {
						t.Fatalf("%s, chunked %t, request %d: %v", network, chunked, i, err)
					}
				}
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil || resp.StatusCode != 400 {
					t.Fatalf("%s, chunked %t, request %d: %v, %v", network, chunked, i, resp, err)
				}
				c.Close()
			}
		}
	}
}
