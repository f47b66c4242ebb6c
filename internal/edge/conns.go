package edge

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
	"github.com/sand-boxer/sandboxer/internal/nofile"
)

// ConnLimits bound how many connections are open at once. The default of a field that is 0
// depends on the number of file descriptors that the process may have.
type ConnLimits struct {
	Unauthenticated int           // on the TCP listeners, before a caller is authenticated on them
	PerAddress      int           // of those, from one address; of IPv6 a /64 is one address
	PerKey          int           // authenticated with one key
	PerTenant       int           // authenticated with any key of one tenant
	Authenticated   int           // with any key
	Reserve         int           // descriptors that no connection of a TCP listener takes
	Wait            time.Duration // for the next byte of a connection without an authenticated caller; default 10 s

	// Stall and StreamStall are how long an authenticated client may read nothing of
	// what is sent: of an answer, default 5 minutes, and of a stream such as the output of
	// a command, which a pager may hold up, default an hour.
	Stall, StreamStall time.Duration
}

// withDefaults returns l with its defaults for a process that may have nofile descriptors.
func (l ConnLimits) withDefaults(nofile int) ConnLimits {
	def := func(p *int, n int) {
		if *p == 0 {
			*p = n
		}
	}
	def(&l.Unauthenticated, min(max(nofile/8, 16), 512))
	def(&l.PerAddress, max(l.Unauthenticated/2, 1))
	def(&l.Authenticated, min(max(nofile/2, 32), 8192))
	def(&l.PerTenant, max(l.Authenticated*3/4, 1))
	def(&l.PerKey, max(l.Authenticated/2, 1))
	def(&l.Reserve, min(nofile/8, 256))
	wait := func(p *time.Duration, d time.Duration) {
		if *p == 0 {
			*p = d
		}
	}
	wait(&l.Wait, 10*time.Second)
	wait(&l.Stall, 5*time.Minute)
	wait(&l.StreamStall, time.Hour)
	return l
}

// connections accounts for every connection of a server's listeners. Until a caller is
// authenticated on it, a connection lasts only as long as bytes come and go, and makes
// room for newer ones when there are too many: so a client that sends its key at once is served,
// even if many others send nothing.
type connections struct {
	limits ConnLimits
	nofile int

	mu        sync.Mutex
	anonymous list.List      // of *conn: no caller is authenticated on them; oldest first
	addresses map[string]int // of anonymous
	idle      list.List      // of *conn: authenticated, between two requests; longest idle first
	keys      map[string]int // authenticated, by key or user
	tenants   map[string]int // authenticated with a key, by tenant
	all       int            // authenticated with a key
}

func newConnections(l ConnLimits) *connections {
	n := nofile.Limit()
	return &connections{limits: l.withDefaults(n), nofile: n, addresses: map[string]int{}, keys: map[string]int{}, tenants: map[string]int{}}
}

// A conn is one connection of a listener.
type conn struct {
	net.Conn
	in      *connections
	address string // as it counts while anonymous; "" on a Unix socket
	local   bool   // on a Unix socket

	// Under in.mu.
	anonymous *list.Element
	idle      *list.Element
	key       string // key or user of the last authenticated caller
	tenant    string
	gone      bool

	linger atomic.Int64 // for how long Close takes what still comes

	mu            sync.Mutex
	authenticated bool      // a caller is authenticated on it
	hijacked      bool      // it is a stream now, and no longer one of requests
	read          time.Time // the deadlines that were asked for
	write         time.Time
}

// countedListener is a listener whose connections are accounted for.
type countedListener struct {
	net.Listener
	in *connections
}

func (c *connections) listen(l net.Listener) net.Listener { return &countedListener{l, c} }

func (g *countedListener) Accept() (net.Conn, error) {
	for {
		nc, err := g.Listener.Accept()
		if err != nil {
			if _, unix := g.Addr().(*net.UnixAddr); unix && errors.Is(err, syscall.EMFILE) && g.in.makeRoom(true) {
				continue
			}
			return nil, err
		}
		if c := g.in.add(nc); c != nil {
			return c, nil
		}
	}
}

// add takes a new connection in, or refuses and closes it.
func (c *connections) add(nc net.Conn) *conn {
	n := &conn{Conn: nc, in: c}
	_, n.local = nc.(*net.UnixConn)
	// The kernel gives the lowest free number: so at least that many are in use.
	used := descriptor(nc)
	if n.local {
		if used >= c.nofile-c.limits.Reserve/2 {
			c.makeRoom(true)
		}
		n.authenticated = true // the socket is this user's alone
		return n
	}
	if used >= c.nofile-c.limits.Reserve && !c.makeRoom(false) {
		refuseConn(nc)
		return nil
	}
	n.address = network(nc.RemoteAddr())
	c.mu.Lock()
	var out []*conn
	if c.addresses[n.address] >= c.limits.PerAddress {
		out = append(out, c.evictOldest(n.address))
	} else if c.anonymous.Len() >= c.limits.Unauthenticated {
		out = append(out, c.evictOldest(c.busiestAddress()))
	}
	n.anonymous = c.anonymous.PushBack(n)
	c.addresses[n.address]++
	c.mu.Unlock()
	for _, o := range out {
		o.Close()
	}
	return n
}

// evictOldest takes the anonymous connection that has been open longest, of those from address, out of
// their account, and returns it.
func (c *connections) evictOldest(address string) *conn {
	for e := c.anonymous.Front(); e != nil; e = e.Next() {
		if n := e.Value.(*conn); n.address == address {
			c.dropAnonymous(n)
			return n
		}
	}
	return nil
}

// busiestAddress returns the address with the most anonymous connections.
func (c *connections) busiestAddress() (address string) {
	most := 0
	for a, n := range c.addresses {
		if n > most {
			address, most = a, n
		}
	}
	return address
}

// makeRoom closes the most dispensable connection, and reports whether there was
// one: an anonymous one first, then one between two requests. Those of the Unix socket make
// room for each other, and for others where they idly hold most of the descriptors.
func (c *connections) makeRoom(local bool) bool {
	c.mu.Lock()
	var out *conn
	if c.anonymous.Len() > 0 {
		out = c.evictOldest(c.busiestAddress())
	}
	var longest *conn // idle on the Unix socket
	locals := 0
	for e := c.idle.Front(); e != nil && out == nil; e = e.Next() {
		n := e.Value.(*conn)
		if !n.local || local {
			out = n
			break
		}
		if locals++; longest == nil {
			longest = n
		}
	}
	if out == nil && locals > c.nofile/2 {
		out = longest
	}
	c.mu.Unlock()
	if out == nil {
		return false
	}
	out.Close()
	return true
}

// dropAnonymous takes n out of the anonymous connections. Call it with c.mu held.
func (c *connections) dropAnonymous(n *conn) {
	if n.anonymous == nil {
		return
	}
	c.anonymous.Remove(n.anonymous)
	n.anonymous = nil
	decrement(c.addresses, n.address)
}

func decrement(m map[string]int, k string) {
	if m[k]--; m[k] <= 0 {
		delete(m, k)
	}
}

// remove takes a closed connection out of every account.
func (c *connections) remove(n *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n.gone {
		return
	}
	n.gone = true
	c.dropAnonymous(n)
	c.dropAuthenticated(n)
}

// dropAuthenticated takes n from the account of the principal authenticated on it. Call it with
// c.mu held.
func (c *connections) dropAuthenticated(n *conn) {
	if n.idle != nil {
		c.idle.Remove(n.idle)
		n.idle = nil
	}
	if n.key == "" {
		return
	}
	decrement(c.keys, n.key)
	if !n.local {
		decrement(c.tenants, n.tenant)
		c.all--
	}
	n.key, n.tenant = "", ""
}

// authenticated notes that p makes a request on n. Exhausted: p has too many
// connections.
func (c *connections) authenticated(n *conn, p sandboxer.Principal) error {
	key := p.Actor + "\x00" + p.Tenant
	c.mu.Lock()
	if n.gone {
		c.mu.Unlock()
		return sandboxer.E(sandboxer.Canceled, nil, "the client left")
	}
	c.dropAnonymous(n)
	if n.key != key {
		c.dropAuthenticated(n)
		var out *conn
		what := ""
		switch {
		case n.local:
		case c.keys[key] >= c.limits.PerKey:
			what, out = "this key has", c.evictIdle(func(o *conn) bool { return o.key == key })
		case c.tenants[p.Tenant] >= c.limits.PerTenant:
			what, out = "this tenant has", c.evictIdle(func(o *conn) bool { return o.tenant == p.Tenant })
		case c.all >= c.limits.Authenticated:
			what, out = "this server has", c.evictIdle(func(*conn) bool { return true })
		}
		if what != "" && out == nil {
			c.mu.Unlock()
			return exhausted("%s as many connections as it may have", what)
		}
		n.key, n.tenant = key, p.Tenant
		c.keys[key]++
		if !n.local {
			c.tenants[p.Tenant]++
			c.all++
		}
		if out != nil {
			defer out.Close()
		}
	}
	c.mu.Unlock()
	n.setAuthenticated()
	return nil
}

// evictIdle takes a connection that is between two requests out of its accounts. Call it
// with c.mu held.
func (c *connections) evictIdle(of func(*conn) bool) *conn {
	for e := c.idle.Front(); e != nil; e = e.Next() {
		if n := e.Value.(*conn); !n.local && of(n) {
			c.dropAuthenticated(n)
			return n
		}
	}
	return nil
}

// setIdle notes whether n is between two requests.
func (c *connections) setIdle(n *conn, now bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case now && n.idle == nil && n.anonymous == nil && !n.gone:
		n.idle = c.idle.PushBack(n)
	case !now && n.idle != nil:
		c.idle.Remove(n.idle)
		n.idle = nil
	}
}

// state is called with each new state of a connection.
func (c *connections) state(nc net.Conn, now http.ConnState) {
	if n := belowTLS(nc); n != nil {
		c.setIdle(n, now == http.StateIdle || now == http.StateNew && n.local)
		if now == http.StateHijacked {
			n.mu.Lock()
			n.hijacked = true
			n.mu.Unlock()
		}
	}
}

func exhausted(format string, args ...any) error {
	e := sandboxer.E(sandboxer.Exhausted, nil, format, args...)
	e.RetryAfter = time.Second
	return e.WithHint("try again when some of them have ended")
}

// refuseConn answers a connection without reading from it. Over TLS the client cannot read the
// answer, and finds the connection closed.
func refuseConn(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(time.Second))
	io.WriteString(c, "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/problem+json\r\n\r\n"+
		`{"type":"urn:sandboxer:problem:exhausted","title":"Exhausted","status":429,"code":"exhausted","detail":"this server has as many connections as it may have","retryable":true,"retry_after":"1s"}`+"\n")
	c.Close()
}

// descriptor is the file descriptor of nc.
func descriptor(nc net.Conn) (n int) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return 0
	}
	if raw, err := sc.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { n = int(fd) })
	}
	return n
}

// network is what counts as one address: for IPv6 a /64, since each host in it may use any
// of its addresses.
func network(a net.Addr) string {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return a.String()
	}
	return networkOf(t.AddrPort().Addr())
}

func networkOf(ip netip.Addr) string {
	ip = ip.Unmap().WithZone("")
	if ip.Is6() {
		if p, err := ip.Prefix(64); err == nil {
			return p.String()
		}
	}
	return ip.String()
}

// setAuthenticated lifts the deadlines of anonymous connections.
func (n *conn) setAuthenticated() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.authenticated {
		return
	}
	n.authenticated = true
	n.Conn.SetReadDeadline(n.read)
	n.Conn.SetWriteDeadline(n.writeDeadline(n.write))
}

// lingerTime is how long the rest of a body is read after its answer, before the connection ends, and maxLingered how
// much of it. A connection that is closed with unread data is reset, and the answer may be lost.
const (
	lingerTime  = time.Second
	maxLingered = 64 << 20
)

func (n *conn) Close() error {
	if d := n.linger.Swap(0); d > 0 && n.CloseWrite() == nil {
		n.Conn.SetReadDeadline(time.Now().Add(time.Duration(d)))
		_, _ = io.CopyN(io.Discard, n.Conn, maxLingered)
	}
	n.in.remove(n)
	return n.Conn.Close()
}

// CloseWrite ends the sending half, where the connection can do that.
func (n *conn) CloseWrite() error { return halfclose.CloseWrite(n.Conn) }

// progress is how much a client has to read in the time that it has.
const progress = 64 << 10

// Write ends for a client that reads nothing for longer than it may, which frees the resources
// behind it.
func (n *conn) Write(b []byte) (done int, err error) {
	for {
		p := b[done:min(len(b), done+progress)]
		n.mu.Lock()
		n.Conn.SetWriteDeadline(n.writeDeadline(n.write))
		n.mu.Unlock()
		w, err := n.Conn.Write(p)
		if done += w; err != nil || done == len(b) {
			return done, err
		}
	}
}

// writeDeadline is t, or the end of the time that the client has if that is earlier. Call it with
// n.mu held.
func (n *conn) writeDeadline(t time.Time) time.Time {
	wait := n.in.limits.Wait
	switch {
	case n.authenticated && n.hijacked:
		wait = n.in.limits.StreamStall
	case n.authenticated:
		wait = n.in.limits.Stall
	}
	if end := time.Now().Add(wait); t.IsZero() || t.After(end) {
		return end
	}
	return t
}

func (n *conn) SetReadDeadline(t time.Time) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.read = t; !n.authenticated {
		t = n.writeDeadline(t)
	}
	return n.Conn.SetReadDeadline(t)
}

func (n *conn) SetWriteDeadline(t time.Time) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.write = t
	return n.Conn.SetWriteDeadline(n.writeDeadline(t))
}

func (n *conn) SetDeadline(t time.Time) error {
	return errors.Join(n.SetReadDeadline(t), n.SetWriteDeadline(t))
}

type connKey struct{}

// connOf returns the connection that a request came on; nil if it is not ours.
func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}

// belowTLS returns the connection below TLS.
func belowTLS(c net.Conn) *conn {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	n, _ := c.(*conn)
	return n
}
