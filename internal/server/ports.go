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
)

type inPort struct {
	InRef
	Port int `path:"port" minimum:"1" maximum:"65535" doc:"TCP port inside the sandbox"`
}

func (s *Server) connectPort(ctx context.Context, in *inPort) (*huma.StreamResponse, error) {
	if err := wantsStream(ctx, api.PortProtocol, "connect with: sandboxer port forward"); err != nil {
		return nil, err
	}
	sctx, cancel := s.stream(ctx)
	c, err := s.m.Dial(sctx, in.ID, in.Port)
	if err != nil {
		defer cancel(nil)
		return nil, endOf(sctx, err)
	}
	return streamed(ctx, func(w http.ResponseWriter, r *http.Request) {
		defer cancel(nil)
		defer c.Close()
		ws := s.accept(w, r, api.PortProtocol)
		if ws == nil {
			return
		}
		defer ws.CloseNow()
		// A client that does not read must not hold up the end.
		giveUp := time.AfterFunc(math.MaxInt64, func() { ws.CloseNow() })
		defer giveUp.Stop()
		defer context.AfterFunc(sctx, func() {
			giveUp.Reset(lastWords)
			c.Close()
		})()
		p := &pulse{ws: ws}
		p.watch(sctx, s.pulse, func() { ws.CloseNow() })
		relay(sctx, p, c)
		// The client closes when it has read the end; closing first could take it away.
		giveUp.Reset(2 * time.Second)
		status, why := websocket.StatusNormalClosure, ""
		var e *sandboxer.Error
		if cause := context.Cause(sctx); errors.As(cause, &e) {
			status, why = websocket.StatusPolicyViolation, e.Msg[:min(len(e.Msg), 120)]
		}
		ws.Close(status, why)
	}), nil
}

// relay copies both ways until both directions ended or one broke.
func relay(ctx context.Context, p *pulse, c net.Conn) {
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
				if cw, ok := c.(interface{ CloseWrite() error }); ok {
					cw.CloseWrite()
				}
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
