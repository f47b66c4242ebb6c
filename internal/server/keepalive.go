package server

import (
	"context"
	"io"
	"math"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

// A keepalive distinguishes a WebSocket whose peer is dead from an idle one.
type keepalive struct {
	ws      *websocket.Conn
	in, out atomic.Int64 // messages begun in each direction
	reading atomic.Bool  // a reader waits for the next message, and so notices an answer
}

// next waits for the next message.
func (p *keepalive) next() (io.Reader, error) {
	p.reading.Store(true)
	_, r, err := p.ws.Reader(context.Background())
	p.reading.Store(false)
	p.in.Add(1)
	return r, err
}

func (p *keepalive) write(b []byte) error {
	p.out.Add(1)
	return p.ws.Write(context.Background(), websocket.MessageBinary, b)
}

// watch sends a ping in every period until ctx ends, which also keeps proxies from
// closing the connection as idle, and calls dead once the peer is known to be dead. A client
// that has output left to read answers only after reading it: a pager may wait for hours. So
// silence proves something only after an answer to all that was sent, and while nothing
// that was received waits to be passed on. Between two pings it takes no goroutine.
func (p *keepalive) watch(ctx context.Context, period time.Duration, dead func()) {
	answered := int64(0) // of out, by the last pong
	var tick *time.Timer
	tick = time.AfterFunc(math.MaxInt64, func() {
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
		tick.Reset(period)
	})
	tick.Reset(period)
	context.AfterFunc(ctx, func() { tick.Stop() })
}
