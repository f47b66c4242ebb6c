package sshrun

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// This code speaks to an ssh master process over its control socket, as another
// ssh process would (PROTOCOL.mux of OpenSSH). A command's descriptors travel over
// that socket, so that its data goes between us and the master without a third process.
const (
	muxHello        = 0x00000001
	muxNewSession   = 0x10000002
	muxAliveCheck   = 0x10000004
	muxTerminate    = 0x10000005
	muxOpenForward  = 0x10000006
	muxStdioForward = 0x10000008

	muxOK            = 0x80000001
	muxDenied        = 0x80000002
	muxFailure       = 0x80000003
	muxExit          = 0x80000004
	muxAlive         = 0x80000005
	muxSessionOpened = 0x80000006
	muxNoTTY         = 0x80000008

	muxVersion = 4
	// streamLocal, as a port, says that the host is the name of a unix socket.
	streamLocal = 0xfffffffe
)

// A mux is one exchange with a master.
type mux struct{ *net.UnixConn }

type packet []byte

func (p packet) u32(n uint32) packet { return binary.BigEndian.AppendUint32(p, n) }
func (p packet) str(s string) packet { return append(p.u32(uint32(len(s))), s...) }

func (p *packet) take() uint32 {
	if len(*p) < 4 {
		*p = nil
		return 0
	}
	n := binary.BigEndian.Uint32(*p)
	*p = (*p)[4:]
	return n
}

func (p *packet) takeStr() string {
	n := int64(p.take())
	if n > int64(len(*p)) {
		n = int64(len(*p))
	}
	s := string((*p)[:n])
	*p = (*p)[n:]
	return s
}

// muxTimeout bounds an exchange with a process of this machine.
const muxTimeout = 10 * time.Second

func dialMux(socket string) (mux, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return mux{}, err
	}
	m := mux{c}
	m.SetDeadline(time.Now().Add(muxTimeout))
	err = m.send(packet(nil).u32(muxHello).u32(muxVersion))
	if err == nil {
		var p packet
		if p, err = m.receive(); err == nil {
			if kind, version := p.take(), p.take(); kind != muxHello || version != muxVersion {
				err = fmt.Errorf("the ssh program speaks version %d of its control protocol, not %d", version, muxVersion)
			}
		}
	}
	if err != nil {
		m.Close()
	}
	return m, err
}

func (m mux) send(p packet) error {
	_, err := m.Write(append(packet(nil).u32(uint32(len(p))), p...))
	return err
}

func (m mux) receive() (packet, error) {
	var head [4]byte
	if _, err := io.ReadFull(m, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n < 4 || n > 256<<10 {
		return nil, fmt.Errorf("a control message has %d bytes", n)
	}
	p := make(packet, n)
	_, err := io.ReadFull(m, p)
	return p, err
}

// pass hands descriptors over, each with a byte of its own.
func (m mux) pass(files ...*os.File) error {
	for _, f := range files {
		// Fd would make the file blocking, also where the other end polls.
		rc, err := f.SyscallConn()
		if err != nil {
			return err
		}
		var werr error
		if err := rc.Control(func(fd uintptr) {
			_, _, werr = m.WriteMsgUnix([]byte{0}, syscall.UnixRights(int(fd)), nil)
		}); err != nil {
			return err
		}
		if werr != nil {
			return werr
		}
	}
	return nil
}

// opened awaits the answer to request id: the number of the session.
func (m mux) opened() (uint32, error) {
	p, err := m.receive()
	if err != nil {
		return 0, err
	}
	switch kind := p.take(); kind {
	case muxSessionOpened:
		p.take()
		return p.take(), nil
	case muxFailure, muxDenied:
		p.take()
		return 0, &muxRefusal{p.takeStr()}
	default:
		return 0, fmt.Errorf("an unexpected control message %#x", kind)
	}
}

type muxRefusal struct{ said string }

func (r *muxRefusal) Error() string { return "refused: " + r.said }

// ask sends a request without more than a number and returns the answer's.
func (m mux) ask(kind, answer uint32) (uint32, error) {
	if err := m.send(packet(nil).u32(kind).u32(0)); err != nil {
		return 0, err
	}
	p, err := m.receive()
	if err != nil {
		return 0, err
	}
	if got := p.take(); got != answer {
		return 0, fmt.Errorf("an unexpected control message %#x", got)
	}
	p.take()
	return p.take(), nil
}

// masterPID returns the process behind socket, or 0 if there is no answer.
func masterPID(socket string) int {
	m, err := dialMux(socket)
	if err != nil {
		return 0
	}
	defer m.Close()
	pid, err := m.ask(muxAliveCheck, muxAlive)
	if err != nil {
		return 0
	}
	return int(pid)
}

// A session is one remote command with its streams, run by way of a master. The caller that started
// it reads both outputs until they end and then closes it.
type session struct {
	m             mux
	in, out, errs *os.File
	ended         chan ended // see exit
	pid           int        // of the master, which gets a signal for a new size
	closing       sync.Once
}

type ended struct {
	code  int
	known bool // else the session ended without a word: a signal, or the connection
}

// exchange watches over a mux while it must not outlast ctx; stop ends the watch.
func (m mux) within(ctx context.Context) (stop func() bool) {
	m.SetDeadline(time.Time{})
	return context.AfterFunc(ctx, func() { m.SetDeadline(time.Unix(1, 0)) })
}

// start begins a session with command. errFull: the server admits no more.
func (c *master) start(ctx context.Context, command string, tty *sandboxer.WinSize) (_ *session, err error) {
	m, err := dialMux(c.socket)
	if err != nil {
		return nil, err
	}
	s := &session{m: m, ended: make(chan ended, 1), pid: c.pid}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
		if err != nil {
			s.close()
		}
	}()
	req := packet(nil).u32(muxNewSession).u32(0).str("")
	if tty != nil {
		term, end, err := openTerminal(*tty)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "no terminal could be made on this machine")
		}
		s.in, s.out = term, term
		theirs = []*os.File{end, end, end}
		req = req.u32(1)
	} else {
		for _, f := range []struct {
			ours  **os.File
			input bool
		}{{&s.in, true}, {&s.out, false}, {&s.errs, false}} {
			r, w, err := os.Pipe()
			if err != nil {
				return nil, err
			}
			widen(w)
			if f.input {
				*f.ours, theirs = w, append(theirs, r)
			} else {
				*f.ours, theirs = r, append(theirs, w)
			}
		}
		req = req.u32(0)
	}
	req = req.u32(0).u32(0).u32(0).u32(0xffffffff).str("xterm-256color").str(command)
	defer m.within(ctx)()
	if err := m.send(req); err != nil {
		return nil, err
	}
	if err := m.pass(theirs...); err != nil {
		return nil, err
	}
	id, err := m.opened()
	if r := (*muxRefusal)(nil); errors.As(err, &r) {
		return nil, fmt.Errorf("%w (%s)", errFull, tidy(r.said))
	}
	if err != nil {
		return nil, err
	}
	if tty != nil {
		if err := makeRaw(theirs[0]); err != nil {
			return nil, err
		}
	}
	go s.watch(id)
	return s, nil
}

func (s *session) watch(id uint32) {
	var e ended
	for {
		p, err := s.m.receive()
		if err != nil {
			break
		}
		switch p.take() {
		case muxExit:
			if p.take() == id {
				e = ended{code: int(p.take()), known: true}
			}
		case muxNoTTY:
			e = ended{code: 124, known: true}
		}
		if e.known {
			break
		}
	}
	s.ended <- e
}

func (s *session) stdin() io.WriteCloser {
	if s.errs == nil {
		// A terminal has one descriptor for both directions.
		return nopCloser{s.in}
	}
	return s.in
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

func (s *session) stdout() io.Reader { return s.out }

// stderr is nil with a terminal.
func (s *session) stderr() io.Reader { return s.errs }

// exit yields, once, what is known about the end. It comes when the command has ended or
// the session broke.
func (s *session) exit() <-chan ended { return s.ended }

func (s *session) resize(size sandboxer.WinSize) {
	if s.errs == nil && setSize(s.in, size) == nil {
		syscall.Kill(s.pid, syscall.SIGWINCH)
	}
}

func (s *session) close() {
	s.closing.Do(func() {
		s.m.Close()
		for _, f := range []*os.File{s.in, s.out, s.errs} {
			if f != nil {
				f.Close()
			}
		}
	})
}

func (c *master) dial(ctx context.Context, network, addr string) (_ net.Conn, err error) {
	host, port := addr, uint32(streamLocal)
	if network == "tcp" {
		h, p, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return nil, invalid("%q is not the number of a port", p)
		}
		host, port = h, uint32(n)
	}
	if network == "unix" && !c.unixStdio {
		return c.dialForward(ctx, addr)
	}
	m, err := dialMux(c.socket)
	if err != nil {
		return nil, err
	}
	s := &muxStream{m: m, addr: addr}
	theirIn, ourOut, err := os.Pipe()
	if err != nil {
		m.Close()
		return nil, err
	}
	ourIn, theirOut, err := os.Pipe()
	if err != nil {
		m.Close()
		theirIn.Close()
		ourOut.Close()
		return nil, err
	}
	defer theirIn.Close()
	defer theirOut.Close()
	s.r, s.w = ourIn, ourOut
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	defer m.within(ctx)()
	if err := m.send(packet(nil).u32(muxStdioForward).u32(0).str("").str(host).u32(port)); err != nil {
		return nil, err
	}
	if err := m.pass(theirIn, theirOut); err != nil {
		return nil, err
	}
	_, err = m.opened()
	if r := (*muxRefusal)(nil); errors.As(err, &r) {
		return nil, fmt.Errorf("%w (%s)", errRefused, tidy(r.said))
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// dialForward opens a stream to a unix socket with an ssh before 9.4, which has only
// forwards for that: one is opened for each socket and kept.
// Such a forward accepts us whatever the host answers, so the socket is checked first.
func (c *master) dialForward(ctx context.Context, addr string) (_ net.Conn, err error) {
	s, err := c.start(ctx, "exec /bin/sh -c "+Quote(`test -S "$0"`)+" "+Quote(addr), nil)
	if err != nil {
		return nil, err
	}
	var e ended
	select {
	case e = <-s.exit():
	case <-ctx.Done():
	}
	s.close()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if !e.known || e.code != 0 {
		return nil, fmt.Errorf("%w (the socket does not exist)", errRefused)
	}
	local, err := c.forward(ctx, addr)
	if err != nil {
		return nil, err
	}
	return (&net.Dialer{}).DialContext(ctx, "unix", local)
}

// forward returns the socket here that leads to addr there, for as long as the
// connection lasts.
func (c *master) forward(ctx context.Context, addr string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if local := c.forwards[addr]; local != "" {
		return local, nil
	}
	m, err := dialMux(c.socket)
	if err != nil {
		return "", err
	}
	defer m.Close()
	defer m.within(ctx)()
	local := c.socket + "u" + strconv.Itoa(len(c.forwards))
	if err := m.send(packet(nil).u32(muxOpenForward).u32(0).u32(1).str(local).u32(streamLocal).str(addr).u32(streamLocal)); err != nil {
		return "", err
	}
	p, err := m.receive()
	if err != nil {
		return "", err
	}
	if p.take() != muxOK {
		p.take()
		return "", fmt.Errorf("%w (%s)", errRefused, tidy(p.takeStr()))
	}
	if c.forwards == nil {
		c.forwards = map[string]string{}
	}
	c.forwards[addr] = local
	return local, nil
}

// A muxStream is a forwarded connection: two pipes and the exchange that holds them.
type muxStream struct {
	m    mux
	r, w *os.File
	addr string
}

func (s *muxStream) Read(p []byte) (int, error)         { return s.r.Read(p) }
func (s *muxStream) Write(p []byte) (int, error)        { return s.w.Write(p) }
func (s *muxStream) CloseWrite() error                  { return s.w.Close() }
func (s *muxStream) LocalAddr() net.Addr                { return forwarded("ssh") }
func (s *muxStream) RemoteAddr() net.Addr               { return forwarded(s.addr) }
func (s *muxStream) SetReadDeadline(t time.Time) error  { return s.r.SetReadDeadline(t) }
func (s *muxStream) SetWriteDeadline(t time.Time) error { return s.w.SetWriteDeadline(t) }
func (s *muxStream) SetDeadline(t time.Time) error {
	return errors.Join(s.r.SetDeadline(t), s.w.SetDeadline(t))
}

func (s *muxStream) Close() error {
	s.w.Close()
	s.r.Close()
	return s.m.Close()
}

// forwarded is the address of an end of a stream over ssh.
type forwarded string

func (forwarded) Network() string  { return "ssh" }
func (a forwarded) String() string { return string(a) }
