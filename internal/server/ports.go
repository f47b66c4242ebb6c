package server

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

type inPort struct {
	InRef
	Port int `path:"port" minimum:"1" maximum:"65535" doc:"TCP port inside the sandbox"`
}

func (s *Server) connectPort(ctx context.Context, in *inPort) (*huma.StreamResponse, error) {
	if err := wantsStream(ctx, api.PortProtocol, "connect with: sandboxer port forward"); err != nil {
		return nil, err
	}
	sctx, cancel := edge.Stream(ctx)
	c, err := s.m.Dial(sctx, in.ID, in.Port)
	if err != nil {
		defer cancel(nil)
		return nil, edge.StreamError(sctx, err)
	}
	return s.connected(ctx, sctx, cancel, c, api.PortProtocol, func() {}), nil
}

// connectAgent leads to the agent inside, as connectPort does to a port.
func (s *Server) connectAgent(ctx context.Context, in *InRef) (*huma.StreamResponse, error) {
	if err := wantsStream(ctx, api.AgentProtocol, "what it is for: docs/reference/agent.md"); err != nil {
		return nil, err
	}
	sctx, cancel := edge.Stream(ctx)
	v, err := s.m.VisitAgent(sctx, in.ID)
	if err != nil {
		defer cancel(nil)
		return nil, edge.StreamError(sctx, err)
	}
	c, err := v.Dial(sctx)
	if err != nil {
		defer cancel(nil)
		v.End()
		return nil, edge.StreamError(sctx, err)
	}
	return s.connected(ctx, sctx, cancel, &visiting{Conn: c, visit: v, cancel: cancel}, api.AgentProtocol, v.End), nil
}

// visiting is a connection to an agent. When its visit has to end, the stream ends for that reason.
type visiting struct {
	net.Conn
	visit  *manager.AgentVisit
	cancel context.CancelCauseFunc
}

func (c *visiting) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil && c.visit.Context().Err() != nil {
		c.cancel(context.Cause(c.visit.Context()))
	}
	return n, err
}

// CloseWrite ends the sending half, where the connection can do that.
func (c *visiting) CloseWrite() error { return halfclose.CloseWrite(c.Conn) }

// connected relays between c and the client, in sctx, until either is at its end; then it calls end.
func (s *Server) connected(ctx, sctx context.Context, cancel context.CancelCauseFunc, c net.Conn, protocol string, end func()) *huma.StreamResponse {
	return streamed(ctx, func(w http.ResponseWriter, r *http.Request) {
		defer cancel(nil)
		defer end()
		defer c.Close()
		ws := accept(w, r, protocol)
		if ws == nil {
			return
		}
		defer ws.CloseNow()
		// A client that does not read must not delay the end.
		closeTimer := time.AfterFunc(math.MaxInt64, func() { ws.CloseNow() })
		defer closeTimer.Stop()
		defer context.AfterFunc(sctx, func() {
			closeTimer.Reset(closeTimeout)
			c.Close()
		})()
		p := &keepalive{ws: ws}
		p.watch(sctx, s.keepaliveEvery, func() { ws.CloseNow() })
		relay(sctx, p, c)
		// The client closes when it has read the end; if we closed first it might lose the end.
		closeTimer.Reset(2 * time.Second)
		status, why := websocket.StatusNormalClosure, ""
		var e *sandboxer.Error
		if cause := context.Cause(sctx); errors.As(cause, &e) {
			status, why = websocket.StatusPolicyViolation, e.Msg[:min(len(e.Msg), 120)]
		}
		ws.Close(status, why)
	})
}

// relay copies both ways until both directions ended or one broke.
func relay(ctx context.Context, p *keepalive, c net.Conn) {
	ws := p.ws
	ws.SetReadLimit(-1)       // passed on piece by piece
	in := make(chan struct{}) // the client's direction ended
	go func() {
		ended := sync.OnceFunc(func() { close(in) })
		defer ended()
		defer c.Close() // a client that left has no use for the rest
		buf := make([]byte, 32<<10)
		for {
			r, err := p.next()
			if err != nil {
				return
			}
			n, err := io.CopyBuffer(struct{ io.Writer }{c}, r, buf)
			if err != nil {
				ws.CloseNow()
				return
			}
			if n == 0 {
				_ = halfclose.CloseWrite(c)
				ended() // and go on, to notice that the client leaves
			}
		}
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := c.Read(buf)
		if n > 0 && p.write(buf[:n]) != nil {
			return
		}
		if err != nil {
			break
		}
	}
	if ctx.Err() != nil || p.write(nil) != nil {
		return
	}
	<-in
}

// portURL is where a port is served, for the caller of the request; "" if nowhere
// over TCP.
func (s *Server) portURL(ctx context.Context, id string, port int, token sandboxer.Secret) string {
	return s.opts.PortURL(edge.BaseURL(ctx), id, port, token)
}

func (s *Server) listPorts(ctx context.Context, in *InRef) (*reply[api.List[api.SandboxPort]], error) {
	sb, list, err := s.m.Ports(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	unseen := ""
	if len(list) > 0 && list[0].Unseen != nil { // it is the same for all
		unseen = edge.Problem(ctx, list[0].Unseen).Detail
	}
	items := make([]api.SandboxPort, len(list))
	for i, p := range list {
		items[i] = api.SandboxPort{Port: p.Port.Port, Addr: p.Addr, URL: p.URL, Declared: p.Declared, Open: p.Open, Listening: p.Listening, Unseen: unseen}
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
		return nil, sandboxer.E(sandboxer.Invalid, nil, "ttl is negative").WithHint(`give a time above zero, such as "1h", or leave ttl out`)
	}
	token, sb, until, err := s.m.SignPort(ctx, in.ID, in.Port, time.Duration(b.TTL))
	if err != nil {
		return nil, err
	}
	u := s.portURL(ctx, sb.ID, in.Port, token)
	if u == "" {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "the server listens on no address that a browser could reach").
			WithHint("restart it (its sandboxes keep running): sandboxer down; sandboxer up --listen 127.0.0.1:8080")
	}
	return &reply[api.PortURL]{Body: api.PortURL{URL: u, Token: token.Reveal(), ExpiresAt: until}}, nil
}
