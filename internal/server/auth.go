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
// unusable key, whatever is wrong with it.
func (s *Server) identify(r *http.Request) (sandboxer.Principal, error) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if scheme == "" {
		if uid, ok := r.Context().Value(peerKey{}).(int); ok && (uid == os.Geteuid() || uid == 0) {
			return sandboxer.Principal{Tenant: "default", Actor: fmt.Sprintf("unix:%d", uid), Scopes: sandboxer.Scopes()}, nil
		}
		return sandboxer.Principal{}, sandboxer.E(sandboxer.Unauthenticated, nil, "this request needs an API key").
			WithHint("send it as: Authorization: Bearer sbx_key_…")
	}
	ip := remoteIP(r)
	if wait := s.guard.blocked(ip); wait > 0 {
		e := sandboxer.E(sandboxer.Exhausted, nil, "too many failed logins from %s", ip)
		e.RetryAfter = wait
		return sandboxer.Principal{}, e
	}
	if !strings.EqualFold(scheme, "Bearer") {
		s.guard.failed(ip)
		return sandboxer.Principal{}, sandboxer.E(sandboxer.Unauthenticated, nil, "the Authorization header is not of the form Bearer sbx_key_…")
	}
	p, err := s.m.Authenticate(r.Context(), sandboxer.Secret(strings.TrimSpace(token)))
	if err != nil && sandboxer.KindOf(err) == sandboxer.Unauthenticated {
		s.guard.failed(ip)
	}
	return p, err
}

// admit checks a request's principal against the scope its route wants ("" for
// none at all).
func (s *Server) admit(r *http.Request, want sandboxer.Scope) (*http.Request, error) {
	if want == "" {
		return r, nil
	}
	p, err := s.identify(r)
	if err != nil {
		return r, err
	}
	callOf(r.Context()).actor = p.Actor
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

func remoteIP(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return "a local socket"
	}
	return host
}

// guard slows down guessing: each address has a bucket of failed logins.
type guard struct {
	mu      sync.Mutex
	buckets map[string]*rate.Limiter
}

const (
	failBurst = 20
	failEvery = 15 * time.Second
	maxGuards = 10_000
)

func newGuard() *guard { return &guard{buckets: map[string]*rate.Limiter{}} }

// blocked returns how long ip has to wait, or 0.
func (g *guard) blocked(ip string) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	b := g.buckets[ip]
	if b == nil {
		return 0
	}
	t := b.Tokens()
	if t >= 1 {
		return 0
	}
	return time.Duration((1 - t) * float64(failEvery))
}

func (g *guard) failed(ip string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b := g.buckets[ip]
	if b == nil {
		if len(g.buckets) >= maxGuards {
			for k, old := range g.buckets {
				if old.Tokens() >= failBurst {
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
		b = rate.NewLimiter(rate.Every(failEvery), failBurst)
		g.buckets[ip] = b
	}
	b.Allow()
}
