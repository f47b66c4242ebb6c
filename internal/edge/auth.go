package edge

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/sand-boxer/sandboxer"
)

// noKey is the error of NoKey.
type noKey struct{ error }

func (e *noKey) Unwrap() error { return e.error }

// NoKey is what Door.Key returns for a request without a key; form says how one is sent.
func NoKey(form string) error {
	return &noKey{sandboxer.E(sandboxer.Unauthenticated, nil, "this request needs an API key").WithHint("send it as: %s", form)}
}

// BearerKey reads a key that is sent as a bearer token (RFC 6750).
func BearerKey(r *http.Request) (sandboxer.Secret, error) {
	auth, err := one(r.Header, "Authorization")
	if err != nil {
		return "", err
	}
	scheme, token, _ := strings.Cut(auth, " ")
	if scheme == "" {
		return "", NoKey("Authorization: Bearer sbx_key_…")
	}
	key := sandboxer.Secret(strings.TrimSpace(token))
	if !strings.EqualFold(scheme, "Bearer") {
		return key, sandboxer.E(sandboxer.Unauthenticated, nil, "the Authorization header is not of the form Bearer sbx_key_…").
			WithHint("send: Authorization: Bearer sbx_key_…")
	}
	return key, nil
}

// identify returns the principal of a request. It gives the same answer for every
// unusable key, whatever is wrong with it. It checks the key first: failures never slow
// down a caller whose key is valid.
func (e *Edge) identify(d *Door, r *http.Request) (sandboxer.Principal, error) {
	token, err := d.Key(r)
	var none *noKey
	if errors.As(err, &none) {
		if uid, ok := r.Context().Value(peerKey{}).(int); ok && (uid == os.Geteuid() || uid == 0) {
			return sandboxer.Principal{Tenant: "default", Actor: fmt.Sprintf("unix:%d", uid), Scopes: sandboxer.Scopes()}, nil
		}
		return sandboxer.Principal{}, err
	}
	var p sandboxer.Principal
	if err == nil {
		p, err = e.auth.Authenticate(r.Context(), token)
	}
	if err == nil || sandboxer.KindOf(err) != sandboxer.Unauthenticated {
		return p, err
	}
	if what, wait := e.logins.failed(remoteIP(r), keyID(token.Reveal())); wait > 0 {
		e := sandboxer.E(sandboxer.Exhausted, nil, "too many failed logins %s", what).WithHint("use a valid key: it is accepted at any time")
		e.RetryAfter = wait
		err = e
	}
	return sandboxer.Principal{}, err
}

// keyID is the part of a token that identifies its key; "" if there is none.
func keyID(token string) string {
	rest, ok := strings.CutPrefix(token, "sbx_key_")
	id, _, _ := strings.Cut(rest, "_")
	if !ok || sandboxer.CheckID(id) != nil {
		return ""
	}
	return id
}

// authorize admits a request to a route, and returns it with its principal in its ctx.
func (e *Edge) authorize(r *http.Request, a Access) (*http.Request, error) {
	c := callOf(r.Context())
	switch {
	case a.anyone:
		return r, nil
	case a.scope != "":
		return e.admit(r, a.scope)
	case a.admitter != nil:
		ctx, p, end, err := a.admitter(r.Context())
		if err != nil {
			return r, err
		}
		c.endGuest = end
		if err := e.admitConn(r, p); err != nil {
			return r, err
		}
		return r.WithContext(sandboxer.WithPrincipal(ctx, p)), nil
	}
	return r, sandboxer.E(sandboxer.Internal, nil, "the route %q does not declare who may use it", c.route)
}

// admit identifies the principal of a request, and checks its rights and its scope.
func (e *Edge) admit(r *http.Request, want sandboxer.Scope) (*http.Request, error) {
	c := callOf(r.Context())
	p, err := e.identify(c.door, r)
	if err == nil {
		c.actor = p.Actor
		err = e.admitConn(r, p)
	}
	if err != nil {
		c.w.Header().Set("Connection", "close") // a caller without a key must not hold a connection
		return r, err
	}
	if err := e.auth.AdmitRequest(p); err != nil {
		return r, err
	}
	if !p.Can(want) {
		return r, sandboxer.E(sandboxer.Denied, nil, "this needs the scope %q, which %s does not have", want, p.Actor).
			WithHint("ask an administrator for a key with it: sandboxer key create NAME --scope %s", want)
	}
	return r.WithContext(sandboxer.WithPrincipal(r.Context(), p)), nil
}

// checkHost refuses names under which a web page could reach a listener that is
// meant for this machine only.
func (e *Edge) checkHost(r *http.Request) error {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok {
		return nil
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if slices.Contains(e.opts.Hosts, host) {
		return nil
	}
	if local.IP.IsLoopback() {
		if ip, err := netip.ParseAddr(host); host == "localhost" || err == nil && ip.IsLoopback() {
			return nil
		}
	} else if len(e.opts.Hosts) == 0 {
		return nil
	}
	return WithStatus(http.StatusMisdirectedRequest, sandboxer.E(sandboxer.Denied, nil, "this server is not known as %q", host).
		WithHint("address it by the name that its operator gave it, or allow this name in its configuration"))
}

// admitConn notes that r is made by p: from now on its connection has no short deadline.
func (e *Edge) admitConn(r *http.Request, p sandboxer.Principal) error {
	if n := connOf(r.Context()); n != nil {
		if err := e.conns.authenticated(n, p); err != nil {
			return err
		}
	}
	callOf(r.Context()).admitted.Store(true)
	return nil
}

// remoteIP is the address that a request came from, by which failures are counted.
func remoteIP(r *http.Request) string {
	if a, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		return networkOf(a.Addr())
	}
	return "a local socket"
}

// A loginLimiter bounds failed logins from one address in a while, and more strictly those
// with one key. Callers above that get an error that says when to try again.
type loginLimiter struct {
	mu      sync.Mutex
	buckets map[string]*rate.Limiter
}

const (
	failBurst       = 20 // from one address with one key, or with none
	failBurstIP     = 10 * failBurst
	failEvery       = 15 * time.Second // one more of failBurst; of failBurstIP in a tenth of it
	maxLoginBuckets = 10_000
)

func newLoginLimiter() *loginLimiter { return &loginLimiter{buckets: map[string]*rate.Limiter{}} }

// failed notes a failed login from ip with the key id ("" if it named none), and returns
// for how long further ones are refused, and what is counted; 0 if they are not.
func (g *loginLimiter) failed(ip, id string) (what string, wait time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	what, wait = "from "+ip, g.count(ip, failBurstIP, failEvery/10)
	if w := g.count(ip+" "+id, failBurst, failEvery); w > wait {
		if wait = w; id != "" {
			what += " with the key " + id
		}
	}
	return what, wait
}

// count takes from a bucket and returns for how long it is empty.
func (g *loginLimiter) count(name string, burst int, every time.Duration) time.Duration {
	b := g.buckets[name]
	if b == nil {
		if len(g.buckets) >= maxLoginBuckets {
			for k, old := range g.buckets {
				if old.Tokens() >= float64(old.Burst()) {
					delete(g.buckets, k)
				}
			}
			for k := range g.buckets { // still full: a client has many addresses
				if len(g.buckets) < maxLoginBuckets {
					break
				}
				delete(g.buckets, k)
			}
		}
		b = rate.NewLimiter(rate.Every(every), burst)
		g.buckets[name] = b
	}
	if b.Allow() {
		return 0
	}
	return max(time.Duration((1-b.Tokens())*float64(every)), time.Second)
}
