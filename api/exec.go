package api

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/sand-boxer/sandboxer"
)

// ExecProtocol is the WebSocket subprotocol of an exec stream, GET /v1/sandboxes/{id}/exec.
//
// The client's first message is text: an ExecStream in JSON, so that no argument and no environment
// value is ever in a URL. Every further message is binary: one byte with the channel, then the payload.
// The server ends the stream after one ChanExit or ChanError.
//
// Output flows at the client's reading speed. Input has a window: the client may have at most
// ExecWindow bytes of stdin in flight, and ChanWindow messages grant more as the command reads them. A
// command that does not read its input thus never delays signals, resizes or the detection of a
// disconnected client.
const ExecProtocol = "sandboxer.exec.v1"

// The channels of an exec stream.
const (
	ChanStdin    = 0 // to the command
	ChanStdout   = 1 // from the command; with a terminal, everything
	ChanStderr   = 2 // from the command
	ChanResize   = 3 // to the command: WinSize in JSON
	ChanSignal   = 4 // to the command: a name without SIG ("TERM")
	ChanExit     = 5 // last: sandboxer.Exit in JSON
	ChanError    = 6 // last: Problem in JSON; the command did not start or was lost
	ChanStdinEOF = 7 // to the command: no more input
	ChanWindow   = 8 // from the server: the number of further bytes of stdin that it accepts, 4 bytes big-endian
	ChanCancel   = 9 // to the command: kill it and its child processes; ChanError or ChanExit follows when that is done
)

const (
	// ExecWindow is the largest amount of stdin in flight, in bytes.
	ExecWindow = 1 << 20
	// ExecFrame is the largest payload of a stdin, stdout or stderr message, in bytes.
	ExecFrame = 128 << 10
)

// cancelTime is how long the end of a command is waited for that was given up.
const cancelTime = 5 * time.Second

// Exec runs cmd in the sandbox with its streams attached and returns how it ended. A non-zero exit is a
// result, not an error. The command is killed, with an error that says so, when ctx ends, when a write
// to cmd.Stdout or cmd.Stderr fails, or when a read of cmd.Stdin fails. After ctx ends, Exec returns
// when the command has ended, or after five seconds. Exec does not wait for a Read of cmd.Stdin that
// still blocks when the command has ended. It waits at most the same five seconds for a Write that
// blocks when ctx ends.
func (c *Client) Exec(ctx context.Context, ref string, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	q := call{method: "GET", path: sandboxPath(ref) + "/exec"}
	first, err := json.Marshal(ExecStream{Args: cmd.Args, Env: cmd.Env, Dir: cmd.Dir, User: cmd.User, Service: cmd.Service, TTY: cmd.TTY})
	if err != nil {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.Invalid, err, "the command cannot be encoded")
	}
	conn, err := c.upgrade(ctx, q, ExecProtocol)
	if err != nil {
		return sandboxer.Exit{}, err
	}
	// Reads and writes run without a ctx of their own: watching one for every
	// message costs more than the message.
	defer conn.CloseNow()
	closing := time.AfterFunc(math.MaxInt64, func() { conn.CloseNow() })
	defer closing.Stop()
	stop := context.AfterFunc(ctx, func() { closing.Reset(cancelTime) })
	defer stop()

	s := &execClient{conn: conn, cmd: cmd, window: ExecWindow, done: make(chan struct{})}
	s.more.L = &s.mu
	defer s.finish()
	if err := conn.Write(context.Background(), websocket.MessageText, first); err != nil {
		return sandboxer.Exit{}, c.unreachable(ctx, q, err)
	}
	go s.input()
	if cmd.Resize != nil || cmd.Signals != nil {
		go s.control()
	}
	var exit sandboxer.Exit
	over := make(chan struct{})
	go func() {
		defer close(over)
		exit, err = s.output()
	}()
	select {
	case <-over:
	case <-ctx.Done():
		// Closing would end the command, too, but would not tell when it has ended.
		limit := time.After(cancelTime)
		s.send([]byte{ChanCancel})
		select {
		case <-over:
		case <-limit:
			return sandboxer.Exit{}, c.unreachable(ctx, q, ctx.Err())
		}
	}
	if err != nil {
		if e := s.failure(); e != nil {
			return exit, e
		}
		var e *sandboxer.Error
		if errors.As(err, &e) && ctx.Err() == nil {
			return exit, err
		}
		return exit, c.unreachable(ctx, q, err)
	}
	return exit, nil
}

// upgrade opens a WebSocket.
func (c *Client) upgrade(ctx context.Context, q call, protocol string) (*websocket.Conn, error) {
	if err := q.check(); err != nil {
		return nil, err
	}
	h := http.Header{}
	c.identify(h)
	target := c.base + q.path
	conn, resp, err := websocket.Dial(ctx, target, &websocket.DialOptions{
		HTTPClient: c.http, HTTPHeader: h, Subprotocols: []string{protocol}, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols && ctx.Err() == nil {
			return nil, problemOf(resp)
		}
		return nil, c.unreachable(ctx, q, err)
	}
	if conn.Subprotocol() != protocol {
		conn.CloseNow()
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "the server at %s does not speak %s", c.shown, protocol)
	}
	conn.SetReadLimit(-1) // what is read is passed on piece by piece, not gathered
	return conn, nil
}

type execClient struct {
	conn *websocket.Conn
	cmd  sandboxer.Cmd
	done chan struct{}

	mu     sync.Mutex
	more   sync.Cond
	window int
	ended  bool
	err    error // of a stream of the caller's
}

func (s *execClient) finish() {
	s.mu.Lock()
	s.ended = true
	s.more.Broadcast()
	s.mu.Unlock()
	close(s.done)
}

// fail ends the stream because of the caller's own streams.
func (s *execClient) fail(err error) {
	s.mu.Lock()
	if s.err == nil && !s.ended {
		s.err = err
	}
	s.mu.Unlock()
	s.conn.CloseNow()
}

func (s *execClient) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// take waits until n bytes of stdin may be sent.
func (s *execClient) take(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.window < n && !s.ended {
		s.more.Wait()
	}
	s.window -= n
	return !s.ended
}

func (s *execClient) send(b []byte) bool {
	return s.conn.Write(context.Background(), websocket.MessageBinary, b) == nil
}

func (s *execClient) input() {
	if s.cmd.Stdin == nil {
		s.send([]byte{ChanStdinEOF})
		return
	}
	buf := make([]byte, 4<<10)
	buf[0] = ChanStdin
	for {
		n, err := s.cmd.Stdin.Read(buf[1:])
		if n > 0 && (!s.take(n) || !s.send(buf[:1+n])) {
			return
		}
		switch {
		case err == io.EOF:
			s.send([]byte{ChanStdinEOF})
			return
		case err != nil:
			s.fail(sandboxer.E(sandboxer.Canceled, err, "reading the command's input failed; the command was killed"))
			return
		}
		if n == len(buf)-1 && n < ExecFrame {
			buf = make([]byte, 1+ExecFrame)
			buf[0] = ChanStdin
		}
	}
}

func (s *execClient) control() {
	resize, signals := s.cmd.Resize, s.cmd.Signals
	for {
		select {
		case <-s.done:
			return
		case size, ok := <-resize:
			if !ok {
				resize = nil
				continue
			}
			b, _ := json.Marshal(size)
			s.send(append([]byte{ChanResize}, b...))
		case sig, ok := <-signals:
			if !ok {
				signals = nil
				continue
			}
			if name := SignalName(sig); name != "" {
				s.send(append([]byte{ChanSignal}, name...))
			}
		}
	}
}

// output passes on what the server sends until the command's end.
func (s *execClient) output() (sandboxer.Exit, error) {
	buf := make([]byte, 4<<10)
	for {
		_, r, err := s.conn.Reader(context.Background())
		if err != nil {
			return sandboxer.Exit{}, err
		}
		n, err := r.Read(buf)
		if n == 0 {
			if err == io.EOF {
				continue
			}
			return sandboxer.Exit{}, err
		}
		channel, p := buf[0], buf[1:n]
		switch channel {
		case ChanStdout, ChanStderr:
			w := s.cmd.Stdout
			if channel == ChanStderr {
				w = s.cmd.Stderr
			}
			for {
				if w != nil && len(p) > 0 {
					if _, werr := w.Write(p); werr != nil {
						s.fail(sandboxer.E(sandboxer.Canceled, werr, "writing the command's output failed; the command was killed"))
						return sandboxer.Exit{}, werr
					}
				}
				if err == io.EOF {
					break
				} else if err != nil {
					return sandboxer.Exit{}, err
				}
				if n == len(buf) && n < ExecFrame {
					buf = make([]byte, 1+ExecFrame)
				}
				n, err = r.Read(buf)
				p = buf[:n]
			}
		default:
			rest, err := io.ReadAll(io.LimitReader(r, 1<<20))
			if err != nil {
				return sandboxer.Exit{}, err
			}
			if exit, done, err := s.message(channel, append(p[:len(p):len(p)], rest...)); done || err != nil {
				return exit, err
			}
		}
	}
}

func (s *execClient) message(channel byte, p []byte) (exit sandboxer.Exit, done bool, err error) {
	switch channel {
	case ChanExit:
		if err := json.Unmarshal(p, &exit); err != nil {
			return exit, true, err
		}
		return exit, true, nil
	case ChanError:
		var pr Problem
		if err := json.Unmarshal(p, &pr); err != nil {
			return exit, true, err
		}
		return exit, true, pr.Err()
	case ChanWindow:
		if len(p) == 4 {
			s.mu.Lock()
			s.window += int(binary.BigEndian.Uint32(p))
			s.more.Broadcast()
			s.mu.Unlock()
		}
	}
	return exit, false, nil
}

// SignalName returns the name of sig without SIG ("TERM"), or "" for a signal that cannot be sent.
func SignalName(sig os.Signal) string {
	for name, s := range signals {
		if s == sig {
			return name
		}
	}
	return ""
}

// ParseSignal returns the signal with that name, with or without SIG. Kind: Invalid.
func ParseSignal(name string) (os.Signal, error) {
	short := name
	if len(short) > 3 && short[:3] == "SIG" {
		short = short[3:]
	}
	if s, ok := signals[short]; ok {
		return s, nil
	}
	return nil, sandboxer.E(sandboxer.Invalid, nil, "%q is not a signal that can be sent", name).
		WithHint("write its name: TERM, INT, HUP, QUIT, KILL, USR1, USR2, …")
}
