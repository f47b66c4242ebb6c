package server

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// visitor is the principal of a request to a port of a sandbox.
func (s *Server) visitor(r *http.Request, token bool) (context.Context, func(), error) {
	if !token {
		var err error
		if r, err = s.admit(r, sandboxer.ScopeWrite); err != nil {
			return nil, nil, err
		}
	}
	ctx, cancel := s.stream(r.Context())
	return ctx, func() { cancel(nil) }, nil
}

// visits is told of a visitor whose right was found good: one with a token is
// authenticated by that.
func (s *Server) visits(r *http.Request, v *manager.Visit) error {
	if callOf(r.Context()).admitted.Load() {
		return nil
	}
	return s.welcome(r, sandboxer.Principal{Tenant: v.Tenant, Actor: "url:" + v.SandboxID})
}

// reachable is the address under which this machine's programs reach a listener.
func reachable(a *net.TCPAddr, plain bool) *url.URL {
	u := &url.URL{Scheme: "https", Host: a.String()}
	if plain {
		u.Scheme = "http"
	}
	if a.IP.IsUnspecified() {
		u.Host = (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: a.Port}).String()
	}
	return u
}

// portURL is where a port is served, for whoever made the request; "" if nowhere
// over TCP.
func (s *Server) portURL(ctx context.Context, id string, port int, token sandboxer.Secret) string {
	base := &url.URL{Scheme: "http"}
	if r := callOf(ctx).r; r != nil {
		if _, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
			base.Host = r.Host
			if r.TLS != nil {
				base.Scheme = "https"
			}
		}
	}
	if own := s.address.Load(); base.Host == "" && own != nil {
		base = own
	}
	if base.Host == "" && s.opts.PortURL == nil {
		return ""
	}
	return s.ports.URL(base, id, port, token)
}

func (s *Server) listPorts(ctx context.Context, in *InRef) (*reply[api.List[api.SandboxPort]], error) {
	sb, list, err := s.m.Ports(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	items := make([]api.SandboxPort, len(list))
	for i, p := range list {
		items[i] = api.SandboxPort{Port: p.Port.Port, Addr: p.Addr, URL: p.URL, Declared: p.Declared, Open: p.Open, Listening: p.Listening}
		if p.Open {
			items[i].Proxy = s.portURL(ctx, sb.ID, p.Port.Port, "")
		}
	}
	return listOf(items, ""), nil
}

func (s *Server) openPort(ctx context.Context, in *inPort) (*reply[api.SandboxPort], error) {
	sb, err := s.m.OpenPort(ctx, in.ID, in.Port)
	if err != nil {
		return nil, err
	}
	return &reply[api.SandboxPort]{Body: api.SandboxPort{Port: in.Port, Open: true, Proxy: s.portURL(ctx, sb.ID, in.Port, "")}}, nil
}

func (s *Server) closePort(ctx context.Context, in *inPort) (*none, error) {
	_, err := s.m.ClosePort(ctx, in.ID, in.Port)
	return &none{}, err
}

func (s *Server) revokePort(ctx context.Context, in *inPort) (*none, error) {
	_, err := s.m.RevokePort(ctx, in.ID, in.Port)
	return &none{}, err
}

func (s *Server) signPort(ctx context.Context, in *inPort, b api.SignPort) (*reply[api.PortURL], error) {
	if b.TTL < 0 {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "ttl is negative")
	}
	token, sb, until, err := s.m.SignPort(ctx, in.ID, in.Port, time.Duration(b.TTL))
	if err != nil {
		return nil, err
	}
	u := s.portURL(ctx, sb.ID, in.Port, token)
	if u == "" {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "the server listens on no address that a browser could reach").
			WithHint("start it anew, which its sandboxes survive: sandboxer down; sandboxer up --listen 127.0.0.1:8080")
	}
	return &reply[api.PortURL]{Body: api.PortURL{URL: u, Token: token.Reveal(), ExpiresAt: until}}, nil
}
