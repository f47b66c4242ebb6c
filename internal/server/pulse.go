package server

import (
	"context"
	"io"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

// A pulse tells a WebSocket whose peer is dead from one on which nothing happens.
type pulse struct {
	ws      *websocket.Conn
	in, out atomic.Int64 // messages begun in each direction
	reading atomic.Bool  // somebody waits for the next message, and so hears an answer
}

// next waits for the next message.
func (p *pulse) next() (io.Reader, error) {
	p.reading.Store(true)
	_, r, err := p.ws.Reader(context.Background())
	p.reading.Store(false)
	p.in.Add(1)
	return r, err
}

func (p *pulse) write(b []byte) error {
	p.out.Add(1)
	return p.ws.Write(context.Background(), websocket.MessageBinary, b)
}

// watch sends a ping in every period until ctx ends, which also keeps proxies from
// closing what looks idle, and calls dead once the peer is known not to live. A client
// that has output left to read answers only when it has: a pager may rest for hours. So
// silence proves something only after an answer to all that was sent, and while nothing
// that was received waits to be passed on.
func (p *pulse) watch(ctx context.Context, period time.Duration, dead func()) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	answered := int64(0) // of out, by the last pong
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		in, out := p.in.Load(), p.out.Load()
		pctx, cancel := context.WithTimeout(ctx, period)
		err := p.ws.Ping(pctx)
		cancel()
		switch {
		case err == nil:
			answered = out
		case ctx.Err() != nil:
			return
		case p.reading.Load() && p.in.Load() == in && p.out.Load() == answered:
			dead()
			return
		}
	}
}
