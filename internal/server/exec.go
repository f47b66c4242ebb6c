package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// The bounds of an exec without streams.
const (
	defRunTime   = time.Minute
	maxRunTime   = time.Hour
	defRunOutput = 1 << 20
	maxRunOutput = 16 << 20
)

// run is exec for callers that cannot stream.
func (s *Server) run(ctx context.Context, in *InRef, b api.Exec) (*reply[api.ExecResult], error) {
	limit, most := b.Timeout.Std(), b.MaxOutput
	if limit == 0 {
		limit = defRunTime
	}
	if most == 0 {
		most = defRunOutput
	}
	switch {
	case limit < 0 || limit > maxRunTime:
		return nil, sandboxer.E(sandboxer.Invalid, nil, "timeout is %s; want more than 0 and at most %s", limit, maxRunTime).
			WithHint("run longer commands with: sandboxer exec")
	case most < 0 || most > maxRunOutput:
		return nil, sandboxer.E(sandboxer.Invalid, nil, "max_output is %d; want 1 to %d bytes", most, maxRunOutput).
			WithHint("stream longer output with: sandboxer exec")
	case b.Stdin != "" && b.StdinBase64 != nil:
		return nil, sandboxer.E(sandboxer.Invalid, nil, "stdin and stdin_base64 are both given").WithHint("give stdin for text, or stdin_base64 for bytes")
	}
	var stdin io.Reader
	if b.StdinBase64 != nil {
		stdin = bytes.NewReader(b.StdinBase64)
	} else if b.Stdin != "" {
		stdin = strings.NewReader(b.Stdin)
	}
	stdout, stderr := capped{limit: int(most), reservation: edge.ReserveMemory(ctx)}, capped{limit: int(most), reservation: edge.ReserveMemory(ctx)}
	sctx, cancel := edge.Stream(ctx)
	defer cancel(nil)
	xctx, stop := context.WithTimeout(sctx, limit)
	defer stop()
	start := time.Now()
	exit, err := s.m.Exec(xctx, in.ID, sandboxer.Cmd{Args: b.Args, Env: b.Env, Dir: b.Dir, User: b.User, Service: b.Service, Stdin: stdin, Stdout: &stdout, Stderr: &stderr})
	out := api.ExecResult{Code: exit.Code, Signal: exit.Signal, OOMKilled: exit.OOMKilled, Took: api.Duration(time.Since(start))}
	if err != nil {
		if sctx.Err() != nil || xctx.Err() == nil {
			return nil, edge.StreamError(sctx, err)
		}
		out.Code, out.Signal, out.TimedOut = 137, "KILL", true
	}
	out.Stdout, out.StdoutBase64, out.StdoutTruncated = stdout.result()
	out.Stderr, out.StderrBase64, out.StderrTruncated = stderr.result()
	return &reply[api.ExecResult]{Body: out}, nil
}

// capped keeps the beginning of what is written to it.
type capped struct {
	mu          sync.Mutex
	b           []byte
	limit       int
	cut         bool
	reservation *edge.MemoryReservation
}

func (c *capped) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(p), c.limit-len(c.b))
	if c.reservation.Grow(len(c.b)+n) != nil {
		n, c.limit = 0, len(c.b) // and no more of what follows
	}
	c.b = append(c.b, p[:n]...)
	c.cut = c.cut || n < len(p)
	return len(p), nil
}

func (c *capped) result() (text string, base64 []byte, cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.b
	if c.cut { // a character cut in two does not make the rest binary
		for range utf8.UTFMax - 1 {
			if r, n := utf8.DecodeLastRune(b); r != utf8.RuneError || n != 1 {
				break
			}
			b = b[:len(b)-1]
		}
	}
	if utf8.Valid(b) {
		return string(b), nil, c.cut
	}
	return "", c.b, c.cut
}

// accept turns the request into a WebSocket that speaks protocol, or answers it and
// returns nil. From then on the caller owns the stream.
func accept(w http.ResponseWriter, r *http.Request, protocol string) *websocket.Conn {
	ws, err := websocket.Accept(smallBuffers{w}, r, &websocket.AcceptOptions{
		Subprotocols: []string{protocol}, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		edge.LogError(r.Context(), sandboxer.E(sandboxer.Invalid, err, "the WebSocket handshake failed"))
		return nil
	}
	return ws
}

// smallBuffers gives a WebSocket small buffers, since they last as long as it does. Larger data
// bypasses them.
type smallBuffers struct{ http.ResponseWriter }

const smallBufferSize = 512

func (w smallBuffers) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, b, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	early, err := b.Peek(b.Reader.Buffered())
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	r := bufio.NewReaderSize(io.MultiReader(bytes.NewReader(bytes.Clone(early)), c), max(len(early), smallBufferSize))
	if _, err := r.Peek(len(early)); err != nil { // Accept takes only buffered data
		return nil, nil, errors.Join(err, c.Close())
	}
	return c, bufio.NewReadWriter(r, bufio.NewWriterSize(c, smallBufferSize)), nil
}

// wantsStream checks that the request asks for a WebSocket with protocol.
func wantsStream(ctx context.Context, protocol, instead string) error {
	_, r := edge.Exchange(ctx)
	h := r.Header
	if !strings.EqualFold(h.Get("Upgrade"), "websocket") {
		return edge.WithStatus(http.StatusUpgradeRequired,
			sandboxer.E(sandboxer.Invalid, nil, "this is a WebSocket and needs an upgrade").WithHint("%s", instead))
	}
	var offered []string
	for _, v := range h.Values("Sec-WebSocket-Protocol") {
		for p := range strings.SplitSeq(v, ",") {
			offered = append(offered, strings.TrimSpace(p))
		}
	}
	if !slices.Contains(offered, protocol) {
		return sandboxer.E(sandboxer.Invalid, nil, "this WebSocket speaks %s, which the request does not offer", protocol).
			WithHint("send the header Sec-WebSocket-Protocol: %s", protocol)
	}
	return nil
}

// execStream runs a command with its streams on one WebSocket.
func (s *Server) execStream(ctx context.Context, in *InRef) (*huma.StreamResponse, error) {
	if err := wantsStream(ctx, api.ExecProtocol, "use POST for an answer in one piece"); err != nil {
		return nil, err
	}
	return streamed(ctx, func(w http.ResponseWriter, r *http.Request) {
		sctx, cancel := edge.Stream(context.WithoutCancel(ctx))
		ws := accept(w, r, api.ExecProtocol)
		if ws == nil {
			cancel(nil)
			return
		}
		edge.Detach(ctx, func() {
			defer cancel(nil)
			x := &execution{ws: ws, keepalive: &keepalive{ws: ws}, buffers: &s.buffers, cancel: cancel, resize: make(chan sandboxer.WinSize, 1), signals: make(chan os.Signal, 16)}
			x.reservation = edge.ReserveMemory(ctx)
			x.stdin.grant, x.stdin.reservation = x.grant, edge.ReserveMemory(ctx)
			x.stdin.changed.L = &x.stdin.mu
			s.execute(sctx, in.ID, x)
		})
	}), nil
}

// closeTimeout is how long ending an unwanted connection may take: until
// the command has ended, and the end was sent to a client that may not read.
const closeTimeout = 5 * time.Second

func (s *Server) execute(ctx context.Context, ref string, x *execution) {
	defer x.ws.CloseNow()
	// A client that does not read must not delay the end.
	closeTimer := time.AfterFunc(math.MaxInt64, func() { x.ws.CloseNow() })
	defer closeTimer.Stop()
	defer context.AfterFunc(ctx, func() { closeTimer.Reset(closeTimeout) })()

	req, err := s.execRequest(x)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		err := x.receive()
		x.stdin.end(io.ErrUnexpectedEOF)
		var e *sandboxer.Error
		if !errors.As(err, &e) { // else the client said something unusable
			err = sandboxer.E(sandboxer.Canceled, err, "the client left")
		}
		x.cancel(err)
	}()
	x.keepalive.watch(ctx, s.keepaliveEvery, func() {
		x.cancel(sandboxer.E(sandboxer.Canceled, nil, "the client does not answer any more"))
		x.ws.CloseNow()
	})
	var exit sandboxer.Exit
	if err == nil {
		exit, err = s.m.Exec(ctx, ref, sandboxer.Cmd{
			Args: req.Args, Env: req.Env, Dir: req.Dir, User: req.User, Service: req.Service, TTY: req.TTY,
			Stdin: &x.stdin, Stdout: &frameWriter{x: x, channel: api.ChanStdout}, Stderr: &frameWriter{x: x, channel: api.ChanStderr},
			Resize: x.resize, Signals: x.signals,
		})
	}
	x.stdin.end(io.ErrClosedPipe) // what still arrives is read and dropped
	s.execEnd(ctx, x, exit, err)
	// The client closes once it has read the end; if we closed first it might lose the end.
	closeTimer.Reset(2 * time.Second)
	<-gone
}

// execRequest reads the first message.
func (s *Server) execRequest(x *execution) (req api.ExecStream, err error) {
	x.ws.SetReadLimit(maxJSON)
	slow := time.AfterFunc(10*time.Second, func() { x.ws.CloseNow() })
	var b []byte
	typ, r, err := x.ws.Reader(context.Background())
	if err == nil {
		b, err = io.ReadAll(x.reservation.Reader(r))
	}
	slow.Stop()
	switch {
	case errors.Is(err, sandboxer.Exhausted):
		return req, err
	case err != nil:
		return req, sandboxer.E(sandboxer.Canceled, err, "the client left before it named a command")
	case typ != websocket.MessageText:
		return req, sandboxer.E(sandboxer.Invalid, nil, "the first message is not the command in JSON").WithHint("send it as a text message")
	}
	x.ws.SetReadLimit(api.ExecWindow + 1)
	reg := s.api.OpenAPI().Components.Schemas
	return req, s.decodeJSON(context.Background(), b, reg, reg.Schema(reflect.TypeFor[api.ExecStream](), true, ""), &req)
}

// execEnd sends the last message.
func (s *Server) execEnd(ctx context.Context, x *execution, exit sandboxer.Exit, err error) {
	channel, v := byte(api.ChanExit), any(exit)
	if err != nil {
		channel, v = api.ChanError, edge.Problem(ctx, edge.StreamError(ctx, err))
	}
	b, _ := json.Marshal(v)
	wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	x.ws.Write(wctx, websocket.MessageBinary, append([]byte{channel}, b...))
}

// execution is one exec stream.
type execution struct {
	ws          *websocket.Conn
	keepalive   *keepalive
	buffers     *buffers
	cancel      context.CancelCauseFunc
	reservation *edge.MemoryReservation // of the first message
	stdin       stdinBuffer
	resize      chan sandboxer.WinSize
	signals     chan os.Signal
}

// receive reads what the client sends until it leaves. Reads run without a ctx:
// to end the stream, close the connection.
func (x *execution) receive() error {
	for {
		r, err := x.keepalive.next()
		if err != nil {
			return err
		}
		if err := x.message(r); err != nil {
			return err
		}
	}
}

func (x *execution) message(r io.Reader) error {
	buf := x.buffers.get(0)
	defer func() { x.buffers.put(buf) }()
	n, err := r.Read(buf[:1])
	if n == 0 {
		if err == io.EOF {
			return nil
		}
		return err
	}
	if channel := buf[0]; channel != api.ChanStdin {
		rest, err := io.ReadAll(io.LimitReader(r, 8<<10))
		if err != nil {
			return err
		}
		return x.control(channel, rest)
	}
	for {
		n, err := r.Read(buf)
		if perr := x.stdin.put(buf[:n]); perr != nil {
			return perr
		}
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if n == len(buf) && n == smallFrame {
			x.buffers.put(buf)
			buf = x.buffers.get(api.ExecFrame)
		}
	}
}

// buffers lends buffers for moving a frame.
type buffers struct{ small, large sync.Pool }

// smallFrame is the size that most frames fit into.
const smallFrame = 4 << 10

// get returns a buffer for n bytes, of 4 KiB or of a whole frame.
func (b *buffers) get(n int) []byte {
	if n > smallFrame {
		if p, ok := b.large.Get().(*[1 + api.ExecFrame]byte); ok {
			return p[:]
		}
		return make([]byte, 1+api.ExecFrame)
	}
	if p, ok := b.small.Get().(*[smallFrame]byte); ok {
		return p[:]
	}
	return make([]byte, smallFrame)
}

func (b *buffers) put(p []byte) {
	if len(p) > smallFrame {
		b.large.Put((*[1 + api.ExecFrame]byte)(p))
	} else {
		b.small.Put((*[smallFrame]byte)(p))
	}
}

func (x *execution) control(channel byte, p []byte) error {
	switch channel {
	case api.ChanStdinEOF:
		x.stdin.end(io.EOF)
	case api.ChanResize:
		var size sandboxer.WinSize
		if err := strictjson.Decode(p, &size); err != nil || size.Cols == 0 || size.Rows == 0 {
			return sandboxer.E(sandboxer.Invalid, err, "a resize message is not a terminal size")
		}
		for { // only the latest size matters
			select {
			case x.resize <- size:
				return nil
			default:
			}
			select {
			case <-x.resize:
			default:
			}
		}
	case api.ChanSignal:
		sig, err := api.ParseSignal(string(p))
		if err != nil {
			return err
		}
		select {
		case x.signals <- sig:
		default: // the command does not take them; a client that leaves must still be seen
		}
	case api.ChanCancel:
		x.stdin.end(io.ErrUnexpectedEOF)
		x.cancel(sandboxer.E(sandboxer.Canceled, nil, "the client gave the command up"))
	}
	return nil
}

func (x *execution) grant(n int) {
	b := binary.BigEndian.AppendUint32([]byte{api.ChanWindow}, uint32(n))
	x.keepalive.write(b)
}

// stdinBuffer is the stdin of a command: a buffer of at most ExecWindow bytes between
// the connection and the command, granted again as the command reads.
type stdinBuffer struct {
	mu          sync.Mutex
	changed     sync.Cond
	buf         bytes.Buffer
	err         error // after buf
	taken       int   // read, not yet granted again
	reservation *edge.MemoryReservation
	grant       func(n int)
}

// put adds p. It waits while the buffer is full, which does not happen to a client that keeps to its
// window. Exhausted: there is no memory for it.
func (i *stdinBuffer) put(p []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	for i.err == nil && i.buf.Len() > 0 && i.buf.Len()+len(p) > api.ExecWindow {
		i.changed.Wait()
	}
	if i.err == nil {
		if n := i.buf.Len() + len(p); n > unreservedInput {
			if err := i.reservation.Grow(n); err != nil {
				return err
			}
		}
		i.buf.Write(p)
		i.changed.Broadcast()
	}
	return nil
}

// unreservedInput is how much input of a command is not accounted for: nearly all is read
// before it gets more.
const unreservedInput = 64 << 10

// end says that nothing follows, and why. The first reason stays.
func (i *stdinBuffer) end(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.err == nil {
		i.err = err
	}
	i.changed.Broadcast()
}

func (i *stdinBuffer) Read(p []byte) (int, error) {
	i.mu.Lock()
	for i.buf.Len() == 0 && i.err == nil {
		i.changed.Wait()
	}
	if i.buf.Len() == 0 || errors.Is(i.err, io.ErrClosedPipe) {
		defer i.mu.Unlock()
		return 0, i.err
	}
	n, _ := i.buf.Read(p)
	i.taken += n
	give := 0
	if i.taken >= api.ExecWindow/4 && i.err == nil {
		give, i.taken = i.taken, 0
	}
	i.changed.Broadcast()
	i.mu.Unlock()
	if give > 0 {
		i.grant(give)
	}
	return n, nil
}

// frameWriter writes one channel of output.
type frameWriter struct {
	x       *execution
	channel byte
}

func (f *frameWriter) Write(p []byte) (int, error) {
	buf := f.x.buffers.get(1 + len(p))
	defer f.x.buffers.put(buf)
	done := 0
	for len(p) > 0 {
		buf[0] = f.channel
		n := copy(buf[1:], p)
		if err := f.x.keepalive.write(buf[:1+n]); err != nil {
			return done, err
		}
		done += n
		p = p[n:]
	}
	return done, nil
}
