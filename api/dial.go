package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/sand-boxer/sandboxer"
)

// PortProtocol is the WebSocket subprotocol of a stream to a port, GET
// /v1/sandboxes/{id}/ports/{port}/connect. Binary messages carry the bytes. An empty message ends its
// direction.
const PortProtocol = "sandboxer.port.v1"

// Dial opens a byte stream to a TCP port inside the sandbox; ctx bounds only the opening. The
// connection has CloseWrite, like a *net.TCPConn. A deadline that passes during a Read or Write closes
// the connection.
func (c *Client) Dial(ctx context.Context, ref string, port int) (net.Conn, error) {
	q := call{method: "GET", path: fmt.Sprintf("%s/ports/%d/connect", sandboxPath(ref), port)}
	conn, err := c.upgrade(ctx, q, PortProtocol)
	if err != nil {
		return nil, err
	}
	return &portConn{ws: conn, addr: portAddr(fmt.Sprintf("%s:%d", ref, port))}, nil
}

// AgentProtocol is the WebSocket subprotocol of a stream to the agent inside, GET
// /v1/sandboxes/{id}/agent. Its messages are those of PortProtocol.
const AgentProtocol = "sandboxer.agent.v1"

// DialAgent opens a stream to the agent inside the sandbox, which speaks the agent's wire protocol
// (docs/reference/agent.md). The connection is like that of Dial. Its holder has full access to the
// inside of the sandbox. Kinds: Unsupported when the extension has no agent in its sandboxes, Conflict
// when the sandbox does not run.
func (c *Client) DialAgent(ctx context.Context, ref string) (net.Conn, error) {
	conn, err := c.upgrade(ctx, call{method: "GET", path: sandboxPath(ref) + "/agent"}, AgentProtocol)
	if err != nil {
		return nil, err
	}
	return &portConn{ws: conn, addr: portAddr(ref + ":agent")}, nil
}

type portAddr string

func (portAddr) Network() string  { return "sandbox" }
func (a portAddr) String() string { return string(a) }

type portConn struct {
	ws   *websocket.Conn
	addr portAddr

	rmu  sync.Mutex
	r    io.Reader // of the message being read
	part bool      // something of it was read
	eof  bool
	rd   deadline

	wmu    sync.Mutex
	closed bool // no more writes
	wd     deadline
}

func (p *portConn) Read(b []byte) (int, error) {
	p.rmu.Lock()
	defer p.rmu.Unlock()
	if len(b) == 0 {
		return 0, nil
	}
	if !p.rd.begin(p.ws) {
		return 0, os.ErrDeadlineExceeded
	}
	n, err := p.read(b)
	if p.rd.end() && err != nil && err != io.EOF {
		err = os.ErrDeadlineExceeded
	}
	return n, err
}

func (p *portConn) read(b []byte) (int, error) {
	for !p.eof {
		if p.r == nil {
			_, r, err := p.ws.Reader(context.Background())
			if err != nil {
				return 0, readError(err)
			}
			p.r, p.part = r, false
		}
		n, err := p.r.Read(b)
		if err == io.EOF {
			p.r = nil
			p.eof = n == 0 && !p.part
			err = nil
		}
		p.part = true
		if n > 0 || err != nil {
			return n, err
		}
	}
	return 0, io.EOF
}

func readError(err error) error {
	var ce websocket.CloseError
	switch {
	case errors.As(err, &ce) && ce.Reason != "":
		return sandboxer.E(sandboxer.Unavailable, err, "%s", ce.Reason)
	case errors.As(err, &ce) && (ce.Code == websocket.StatusNormalClosure || ce.Code == websocket.StatusGoingAway):
		return io.EOF
	case errors.Is(err, net.ErrClosed):
		return net.ErrClosed
	}
	return err
}

func (p *portConn) Write(b []byte) (int, error) {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.closed {
		return 0, net.ErrClosed
	}
	if !p.wd.begin(p.ws) {
		return 0, os.ErrDeadlineExceeded
	}
	total := 0
	var err error
	for len(b) > 0 && err == nil {
		n := min(len(b), ExecFrame)
		if err = p.ws.Write(context.Background(), websocket.MessageBinary, b[:n]); err == nil {
			total += n
			b = b[n:]
		}
	}
	if p.wd.end() && err != nil {
		err = os.ErrDeadlineExceeded
	}
	return total, err
}

// CloseWrite tells the other side that nothing more follows.
func (p *portConn) CloseWrite() error {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	return p.ws.Write(context.Background(), websocket.MessageBinary, nil)
}

func (p *portConn) Close() error {
	err := p.ws.Close(websocket.StatusNormalClosure, "")
	if err != nil && (websocket.CloseStatus(err) != -1 || errors.Is(err, net.ErrClosed)) {
		err = nil
	}
	return err
}

func (p *portConn) LocalAddr() net.Addr  { return portAddr("client") }
func (p *portConn) RemoteAddr() net.Addr { return p.addr }

func (p *portConn) SetDeadline(t time.Time) error {
	p.rd.set(t)
	p.wd.set(t)
	return nil
}

func (p *portConn) SetReadDeadline(t time.Time) error {
	p.rd.set(t)
	return nil
}

func (p *portConn) SetWriteDeadline(t time.Time) error {
	p.wd.set(t)
	return nil
}

// deadline bounds operations in one direction, the one under way included.
type deadline struct {
	mu     sync.Mutex
	at     time.Time
	timer  *time.Timer
	ws     *websocket.Conn // of the operation under way
	passed bool
}

// begin starts an operation, unless its deadline has passed.
func (d *deadline) begin(ws *websocket.Conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.at.IsZero() && !time.Now().Before(d.at) {
		return false
	}
	d.ws = ws
	d.arm()
	return true
}

// end ends an operation and reports whether its deadline passed meanwhile.
func (d *deadline) end() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.disarm()
	d.ws = nil
	return d.passed
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at = t
	d.disarm()
	d.arm()
}

func (d *deadline) arm() {
	if d.ws == nil || d.at.IsZero() {
		return
	}
	ws := d.ws
	d.timer = time.AfterFunc(time.Until(d.at), func() {
		d.mu.Lock()
		d.passed = true
		d.mu.Unlock()
		ws.CloseNow()
	})
}

func (d *deadline) disarm() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}
