package protocol

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// The channels of a stream.
const (
	ChannelIn     = 0 // from the broker: data, input of a command
	ChannelOut    = 1 // from the extension: data, output of a command, values of a list
	ChannelErr    = 2 // error output of a command
	ChannelResize = 3
	ChannelSignal = 4
	ChannelResult = 5
	ChannelError  = 6
	ChannelEnd    = 7
	ChannelWindow = 8
)

// Window is how much input of a command may be under way beyond what windows grant, in bytes.
const Window = 1 << 20

// maxData is how much data goes into one frame.
const maxData = 64 << 10

// NewToken returns the token of a stream.
func NewToken() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

const tokenLen = 32

// ReadToken reads the first line of a stream.
func ReadToken(r *bufio.Reader) (string, error) {
	var b [tokenLen + 1]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return "", err
	}
	token, ok := strings.CutSuffix(string(b[:]), "\n")
	if _, err := hex.DecodeString(token); err != nil || !ok {
		return "", errors.New("a stream does not begin with a token")
	}
	return token, nil
}

// A Stream is the connection of one request for bytes. Frames are sent from several goroutines, and
// received by one.
type Stream struct {
	conn io.ReadWriteCloser
	r    *bufio.Reader
	head []byte // of the frame that is being received: what of its five bytes is there
	buf  []byte // of the frame that is being received, or was last
	got  int    // how much of its payload is there

	mu   sync.Mutex // of sending
	hdr  [5]byte
	sent error // why nothing more can be sent: half a frame may be out

	patience atomic.Int64 // Hurry; 0 for none

	// Hide, if set, filters the texts of errors of the other side.
	Hide func(string) string
	// Trace makes SendError include the origin of an internal error.
	Trace bool
	// OnClose, if set, is called by Close.
	OnClose func()
}

// NewStream returns the stream on conn, whose token was exchanged already; r reads from conn.
func NewStream(conn io.ReadWriteCloser, r *bufio.Reader) *Stream { return &Stream{conn: conn, r: r} }

// OpenStream connects to the socket for streams at path, and sends token.
func OpenStream(path, token string) (*Stream, error) {
	conn, err := net.DialTimeout("unix", path, TokenTime)
	if err != nil {
		return nil, err
	}
	if _, err := io.WriteString(conn, token+"\n"); err != nil {
		conn.Close()
		return nil, err
	}
	return NewStream(conn, bufio.NewReaderSize(conn, maxData)), nil
}

// Close closes the connection, which ends Receive and Send.
func (s *Stream) Close() error {
	if s.OnClose != nil {
		s.OnClose()
	}
	return s.conn.Close()
}

// Hurry makes Receive fail when nothing comes for that long, also one under way.
func (s *Stream) Hurry(patience time.Duration) {
	s.patience.Store(int64(patience))
	s.hurried()
}

func (s *Stream) hurried() {
	if d := s.patience.Load(); d > 0 {
		if conn, ok := s.conn.(net.Conn); ok {
			_ = conn.SetReadDeadline(time.Now().Add(time.Duration(d)))
		}
	}
}

// theirs is the error that a frame of the other side holds.
func (s *Stream) theirs(payload []byte) error {
	var e Error
	if err := DecodeFrame(payload, &e); err != nil {
		return err
	}
	return e.Err(s.Hide)
}

// Send sends one frame.
func (s *Stream) Send(channel byte, payload []byte) error {
	if len(payload) > MaxFrame {
		return fmt.Errorf("a frame of %d bytes is too long", len(payload))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent != nil {
		return s.sent
	}
	s.sent = s.send(channel, payload)
	return s.sent
}

func (s *Stream) send(channel byte, payload []byte) error {
	s.hdr[0] = channel
	binary.BigEndian.PutUint32(s.hdr[1:], uint32(len(payload)))
	if conn, ok := s.conn.(net.Conn); ok {
		bufs := net.Buffers{s.hdr[:], payload}
		_, err := bufs.WriteTo(conn)
		return err
	}
	if _, err := s.conn.Write(s.hdr[:]); err != nil {
		return err
	}
	_, err := s.conn.Write(payload)
	return err
}

// SendJSON sends a frame with v.
func (s *Stream) SendJSON(channel byte, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return s.Send(channel, data)
}

// SendError sends err as the last frame.
func (s *Stream) SendError(err error) error { return s.SendJSON(ChannelError, travels(err, s.Trace)) }

// Receive returns the next frame, whose payload is valid until the next call. io.EOF means that the
// other side has closed between two frames. After a deadline of the connection it continues where it was.
func (s *Stream) Receive() (channel byte, payload []byte, err error) {
	s.hurried()
	for len(s.head) < 5 {
		b, err := s.r.ReadByte()
		if err != nil {
			if len(s.head) > 0 {
				err = unexpected(err)
			}
			return 0, nil, err
		}
		s.head = append(s.head, b)
	}
	n := int(min(binary.BigEndian.Uint32(s.head[1:]), MaxFrame+1))
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("a frame is longer than %d bytes", MaxFrame)
	}
	if s.head[0] > ChannelWindow {
		return 0, nil, fmt.Errorf("a frame is on the unknown channel %d", s.head[0])
	}
	if cap(s.buf) < n {
		s.buf = make([]byte, max(n, 4<<10))
	}
	for s.got < n {
		k, err := s.r.Read(s.buf[s.got:n])
		if s.got += k; err != nil && s.got < n {
			return 0, nil, unexpected(err)
		}
	}
	channel = s.head[0]
	s.head, s.got = s.head[:0], 0
	return channel, s.buf[:n], nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// DecodeFrame reads the JSON of a frame into v.
func DecodeFrame(payload []byte, v any) error {
	if _, err := strictjson.DecodeStored(payload, v); err != nil {
		return sandboxer.E(sandboxer.Internal, err, "a stream of the extension cannot be read")
	}
	return nil
}

// errBroken is the error for a stream that was cut off.
func errBroken(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return sandboxer.E(sandboxer.Unavailable, err, "a stream of the extension broke")
}

// A Reader reads the data that comes on one channel, to its end.
type Reader struct {
	s       *Stream
	channel byte
	rest    []byte
	err     error
}

// Reader returns a reader of the data of channel; frames on others end it.
func (s *Stream) Reader(channel byte) *Reader { return &Reader{s: s, channel: channel} }

// Next returns the payload of the next frame, which must be on channel; it is valid until the next
// call. io.EOF is the proper end. Kinds: those of Read.
func (s *Stream) Next(channel byte) ([]byte, error) { return s.Reader(channel).next() }

// CopyTo writes the data that comes on ChannelOut to w, to its end. mine is an error of w, theirs one of the stream.
func (s *Stream) CopyTo(w io.Writer) (mine, theirs error) {
	_, theirs = s.Reader(ChannelOut).WriteTo(sendTo{w, &mine})
	if mine != nil {
		theirs = nil
	}
	return mine, theirs
}

// Read implements io.Reader. Kinds: those of the other side's error; Unavailable if the stream breaks.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for len(r.rest) == 0 {
		payload, err := r.next()
		if err != nil {
			return 0, err
		}
		r.rest = payload
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// WriteTo implements io.WriterTo: frames are written as they come.
func (r *Reader) WriteTo(w io.Writer) (n int64, err error) {
	for {
		if len(r.rest) > 0 {
			k, err := w.Write(r.rest)
			n += int64(k)
			if r.rest = r.rest[k:]; err != nil {
				return n, err
			}
		}
		payload, err := r.next()
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		r.rest = payload
	}
}

// next returns the next frame of the channel.
func (r *Reader) next() ([]byte, error) {
	if r.err != nil {
		return nil, r.err
	}
	channel, payload, err := r.s.Receive()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, err // what is left may come yet
	case err != nil:
		r.err = errBroken(err)
	case channel == r.channel:
		return payload, nil
	case channel == ChannelEnd:
		r.err = io.EOF
	case channel == ChannelError:
		r.err = r.s.theirs(payload)
	default:
		r.err = sandboxer.E(sandboxer.Internal, nil, "a stream of the extension has a frame on channel %d, where none belongs", channel)
	}
	return nil, r.err
}

// Writer returns a writer that sends data on channel.
func (s *Stream) Writer(channel byte) io.Writer { return &writer{s, channel} }

type writer struct {
	s       *Stream
	channel byte
}

func (w *writer) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		part := p[:min(len(p), maxData)]
		if err := w.s.Send(w.channel, part); err != nil {
			return n, err
		}
		n += len(part)
		p = p[len(part):]
	}
	return n, nil
}

// ReadFrom implements io.ReaderFrom: a frame has as much data as is available.
func (w *writer) ReadFrom(r io.Reader) (n int64, err error) {
	buf := make([]byte, maxData)
	for {
		k, err := r.Read(buf)
		if k > 0 {
			m, werr := w.Write(buf[:k])
			if n += int64(m); werr != nil {
				return n, werr
			}
		}
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// SendAll sends what r has on channel, and how it ends. mine is an error of r, theirs one of the stream.
func (s *Stream) SendAll(channel byte, r io.Reader) (mine, theirs error) {
	var sent error
	_, err := io.CopyBuffer(sendTo{s.Writer(channel), &sent}, struct{ io.Reader }{r}, make([]byte, maxData))
	switch {
	case sent != nil:
		return nil, sent
	case err != nil:
		return err, s.SendError(err)
	}
	return nil, s.Send(ChannelEnd, nil)
}

// sendTo distinguishes errors of the stream from errors of the reader.
type sendTo struct {
	w   io.Writer
	err *error
}

func (t sendTo) Write(p []byte) (int, error) {
	n, err := t.w.Write(p)
	if err != nil {
		*t.err = err
	}
	return n, err
}

// Conn returns s as a connection whose data goes out on one channel and comes in on another.
func (s *Stream) Conn(out, in byte) net.Conn {
	return &conn{Stream: s, r: s.Reader(in), w: s.Writer(out)}
}

type conn struct {
	*Stream
	r    *Reader
	w    io.Writer
	half sync.Once
}

func (c *conn) Read(p []byte) (int, error)  { return c.r.Read(p) }
func (c *conn) Write(p []byte) (int, error) { return c.w.Write(p) }

// CloseWrite ends what this side sends.
func (c *conn) CloseWrite() error {
	var err error
	c.half.Do(func() { err = c.Send(ChannelEnd, nil) })
	return err
}

func (c *conn) LocalAddr() net.Addr  { return addr{} }
func (c *conn) RemoteAddr() net.Addr { return addr{} }

func (c *conn) deadline(set func(net.Conn) error) error {
	if n, ok := c.Stream.conn.(net.Conn); ok {
		return set(n)
	}
	return os.ErrNoDeadline
}

func (c *conn) SetDeadline(t time.Time) error {
	return c.deadline(func(n net.Conn) error { return n.SetDeadline(t) })
}

func (c *conn) SetReadDeadline(t time.Time) error {
	return c.deadline(func(n net.Conn) error { return n.SetReadDeadline(t) })
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	return c.deadline(func(n net.Conn) error { return n.SetWriteDeadline(t) })
}

type addr struct{}

func (addr) Network() string { return "sandboxer" }
func (addr) String() string  { return "extension" }
