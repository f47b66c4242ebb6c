package server

import (
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

// identify returns who makes the request. The same answer is given for every
// unusable key, whatever is wrong with it. The key is looked at first: failures slow
// down nobody whose key is good.
func (s *Server) identify(r *http.Request) (sandboxer.Principal, error) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if scheme == "" {
		if uid, ok := r.Context().Value(peerKey{}).(int); ok && (uid == os.Geteuid() || uid == 0) {
			return sandboxer.Principal{Tenant: "default", Actor: fmt.Sprintf("unix:%d", uid), Scopes: sandboxer.Scopes()}, nil
		}
		return sandboxer.Principal{}, sandboxer.E(sandboxer.Unauthenticated, nil, "this request needs an API key").
			WithHint("send it as: Authorization: Bearer sbx_key_…")
	}
	var p sandboxer.Principal
	var err error
	token = strings.TrimSpace(token)
	if strings.EqualFold(scheme, "Bearer") {
		p, err = s.m.Authenticate(r.Context(), sandboxer.Secret(token))
	} else {
		err = sandboxer.E(sandboxer.Unauthenticated, nil, "the Authorization header is not of the form Bearer sbx_key_…")
	}
	if err == nil || sandboxer.KindOf(err) != sandboxer.Unauthenticated {
		return p, err
	}
	if what, wait := s.guard.failed(remoteIP(r), keyID(token)); wait > 0 {
		e := sandboxer.E(sandboxer.Exhausted, nil, "too many failed logins %s", what).WithHint("use a key that is good: it is taken at any time")
		e.RetryAfter = wait
		err = e
	}
	return sandboxer.Principal{}, err
}

// keyID is the part of a token by which its key is known; "" if there is none.
func keyID(token string) string {
	rest, ok := strings.CutPrefix(token, "sbx_key_")
	id, _, _ := strings.Cut(rest, "_")
	if !ok || sandboxer.CheckID(id) != nil {
		return ""
	}
	return id
}

// admit checks a request's principal against the scope its route wants ("" for
// none at all).
func (s *Server) admit(r *http.Request, want sandboxer.Scope) (*http.Request, error) {
	if want == "" {
		return r, nil
	}
	p, err := s.identify(r)
	if err == nil {
		callOf(r.Context()).actor = p.Actor
		err = s.welcome(r, p)
	}
	if err != nil {
		callOf(r.Context()).w.Header().Set("Connection", "close") // who has no key holds none
		return r, err
	}
	if err := s.m.AdmitRequest(p); err != nil {
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
func (s *Server) checkHost(r *http.Request) error {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok {
		return nil
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if slices.Contains(s.opts.Hosts, host) {
		return nil
	}
	if local.IP.IsLoopback() {
		if ip, err := netip.ParseAddr(host); host == "localhost" || err == nil && ip.IsLoopback() {
			return nil
		}
	} else if len(s.opts.Hosts) == 0 {
		return nil
	}
	return withStatus(http.StatusMisdirectedRequest, sandboxer.E(sandboxer.Denied, nil, "this server is not known as %q", host).
		WithHint("address it by the name its operator gave it, or allow this name in its configuration"))
}

// welcome notes that r is made by p: from now on it may take its time.
func (s *Server) welcome(r *http.Request, p sandboxer.Principal) error {
	if n := connOf(r.Context()); n != nil {
		if err := s.conns.authenticated(n, p); err != nil {
			return err
		}
	}
	callOf(r.Context()).admitted.Store(true)
	return nil
}

// remoteIP is the address that a request came from, as failures are counted by it.
func remoteIP(r *http.Request) string {
	if a, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		return networkOf(a.Addr())
	}
	return "a local socket"
}

// guard counts failed logins: from one address there may be only so many in a while, and
// fewer with one key. Those above are told so, and when it is enough.
type guard struct {
	mu      sync.Mutex
	buckets map[string]*rate.Limiter
}

const (
	failBurst   = 20 // from one address with one key, or with none
	failBurstIP = 10 * failBurst
	failEvery   = 15 * time.Second // one more of failBurst; of failBurstIP in a tenth of it
	maxGuards   = 10_000
)

func newGuard() *guard { return &guard{buckets: map[string]*rate.Limiter{}} }

// failed notes a failed login from ip with the key id ("" if it named none), and returns
// for how long further ones are too many, and of what; 0 if they are not.
func (g *guard) failed(ip, id string) (what string, wait time.Duration) {
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
func (g *guard) count(name string, burst int, every time.Duration) time.Duration {
	b := g.buckets[name]
	if b == nil {
		if len(g.buckets) >= maxGuards {
			for k, old := range g.buckets {
				if old.Tokens() >= float64(old.Burst()) {
					delete(g.buckets, k)
				}
			}
			for k := range g.buckets { // still full: somebody has many addresses
				if len(g.buckets) < maxGuards {
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
