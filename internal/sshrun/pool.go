package sshrun

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/halfclose"
)

// Options configure a Pool. The zero value is usable.
type Options struct {
	// Dir is where the pool keeps control sockets, in a directory of its own for as
	// long as it lives. It must be ours alone, and short: a socket's name has at
	// most 104 bytes. Empty means a directory below XDG_RUNTIME_DIR or /tmp.
	Dir string
	// Config is the ssh configuration file; empty means the user's and the system's,
	// "none" means none.
	Config string
	// KnownHosts is where host keys without a pin are looked up; empty means where
	// the configuration says.
	KnownHosts string
	// ConnectTimeout bounds making one connection, login included; 0 means 15 s.
	ConnectTimeout time.Duration
	// KeepAlive is how often a silent connection is probed; after
	// three probes without an answer it is lost. 0 means 5 s.
	KeepAlive time.Duration
	// Idle is how long an unused connection is kept; 0 means 5 min.
	Idle time.Duration
	Log  *slog.Logger // nil discards
}

// A Pool keeps connections to hosts. Its methods are safe for concurrent use.
type Pool struct {
	opts   Options
	log    *slog.Logger
	ssh    *openSSH
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu     sync.Mutex
	hosts  map[string]*Host // by all of their targets
	closed bool
}

// New returns a pool. It ends what an earlier pool left in the same directory when
// its process died. NotFound: there is no ssh program.
func New(opts Options) (*Pool, error) {
	opts.ConnectTimeout = cmp.Or(opts.ConnectTimeout, 15*time.Second)
	opts.KeepAlive = cmp.Or(opts.KeepAlive, 5*time.Second)
	opts.Idle = cmp.Or(opts.Idle, 5*time.Minute)
	p := &Pool{opts: opts, log: opts.Log, hosts: map[string]*Host{}}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if p.ssh, err = newOpenSSH(opts, p.log); err != nil {
		return nil, err
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p, nil
}

// Host returns the host that t describes. Nothing is connected yet. The same target
// gives the same Host again. A different target, even with the same name
// and address, gives a different Host with its own connections.
func (p *Pool) Host(t Target) (*Host, error) {
	t, err := t.check()
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, sandboxer.E(sandboxer.Unavailable, nil, "the connections to hosts are closed")
	}
	h := p.hosts[t.key()]
	if h == nil {
		h = &Host{pool: p, target: t, changed: make(chan struct{})}
		p.hosts[t.key()] = h
	}
	return h, nil
}

// Forget closes the connections to the host that t describes, if there are any. Commands
// that run there end with ErrLost.
func (p *Pool) Forget(t Target) {
	t, err := t.check()
	if err != nil {
		return // there is none
	}
	p.mu.Lock()
	h := p.hosts[t.key()]
	delete(p.hosts, t.key())
	p.mu.Unlock()
	if h != nil {
		h.shut() // which may have to wait for a goroutine that waits for us
	}
}

// Scan returns the public keys that t's host shows, as
// authorized_keys lines, without logging in and whether they are trusted or not. It
// is for asking a person; see [Fingerprint].
func (p *Pool) Scan(ctx context.Context, t Target) ([]string, error) {
	t, err := t.check()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, p.opts.ConnectTimeout)
	defer cancel()
	t.HostKeys = nil
	keys, err := p.ssh.scan(ctx, t)
	return keys, failure(ctx, t, err, "asking for the key")
}

// Close ends every connection, with the commands on it, and waits until nothing of
// the pool is left: no process, socket or goroutine.
func (p *Pool) Close() error {
	p.mu.Lock()
	hosts := p.hosts
	p.hosts, p.closed = nil, true
	p.mu.Unlock()
	p.cancel()
	for _, h := range hosts {
		h.shut()
	}
	p.tasks.Wait()
	return p.ssh.close()
}

// task runs f in a goroutine that Close waits for; it reports false once closed.
func (p *Pool) task(f func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.tasks.Go(f)
	return true
}

// A Host is one place where commands run. Its methods are safe for concurrent use.
type Host struct {
	pool   *Pool
	target Target

	mu         sync.Mutex
	changed    chan struct{} // closed and replaced when what follows changes
	links      []*link
	alone      time.Time // when the last of them was lost
	connecting int
	failures   int   // how often connecting has failed
	failed     error // the last time
	closed     bool
	quickest   time.Duration
	debts      []string // runs to be killed: the connection was lost under them
	shells     []*shell // that wait for a command
	starting   int      // shells that are being started
	awaiting   int      // commands that wait for one of these
	sparing    bool     // it admits too few sessions for shells that wait
}

// A use is the purpose of a session on a connection.
type use int

const (
	command use = iota
	// spare is for ending commands. It keeps sessions free for that when commands have
	// taken all others.
	spare
	// ending is spare for what ends commands. If its caller leaves, it goes on alone: otherwise
	// ending it would have to be ended, and so on, on a slow host.
	ending
	// No server counts a stream against a limit.
	forStream
)

// A link is a connection with the sessions on it.
type link struct {
	*master
	sessions, limit int // limit is for commands
	hard            int // what the server admits, as far as is known
	streams         int
	idle            *time.Timer
}

// Name returns the host's name.
func (h *Host) Name() string { return h.target.Name }

// Target returns where the host is.
func (h *Host) Target() Target { return h.target }

func (l *link) alive() bool {
	select {
	case <-l.done():
		return false
	default:
		return true
	}
}

// carries asks whether the connection still works: it may be gone without our knowing.
func (h *Host) carries(l *link) bool {
	ctx, cancel := context.WithTimeout(h.pool.ctx, h.pool.opts.ConnectTimeout)
	defer cancel()
	s, err := l.start(ctx, "exec true", nil)
	if err == nil {
		s.close()
	}
	return err == nil || errors.Is(err, errFull)
}

// catchUp returns when the host has run a command over l from beginning to end, or cannot.
// A server serves its sessions in turn, and so has passed on what earlier ones wrote.
func (h *Host) catchUp(ctx context.Context, l *link) {
	ctx, cancel := context.WithTimeout(ctx, h.pool.opts.ConnectTimeout)
	defer cancel()
	defer context.AfterFunc(h.pool.ctx, cancel)()
	s, err := l.start(ctx, "exec true", nil)
	if err != nil {
		if errors.Is(err, errFull) { // it cannot be asked
			select {
			case <-time.After(10 * lateOutput):
			case <-l.done():
			case <-ctx.Done():
			}
		}
		return
	}
	defer s.close()
	select {
	case <-s.exit():
	case <-l.done():
	case <-ctx.Done():
	}
}

func (h *Host) wake() {
	close(h.changed)
	h.changed = make(chan struct{})
}

// acquire returns a live connection with a session reserved on it, for release. It
// waits for connections that are being made. If one fails, all callers fail that wait
// for it and have no other. begun is when the caller began to need one: if connections fell
// silent since then, little time is left to make another.
func (h *Host) acquire(ctx context.Context, as use, begun time.Time) (*link, error) {
	if err := ctx.Err(); err != nil {
		return nil, failure(ctx, h.target, err, "connecting")
	}
	h.mu.Lock()
	seen := h.failures
	for {
		if h.closed {
			h.mu.Unlock()
			return nil, h.target.fault(ErrUnreachable, "its connections are closed")
		}
		for _, l := range h.links {
			if as == forStream || l.sessions < l.limit || (as == spare || as == ending) && l.sessions < l.hard {
				if as == forStream {
					l.streams++
				} else {
					l.sessions++
				}
				if l.idle != nil {
					l.idle.Stop()
				}
				h.mu.Unlock()
				return l, nil
			}
		}
		if as != forStream && h.dismissAll(nil) {
			continue
		}
		if h.failures > seen && len(h.links) == 0 && h.connecting == 0 {
			err := h.failed
			h.mu.Unlock()
			return nil, err
		}
		most := h.target.Connections
		if as == spare || as == ending {
			most++
		}
		if h.connecting < h.target.Handshakes && h.connecting+len(h.links) < most && h.failures == seen {
			h.connecting++
			if !h.pool.task(func() { h.connect(h.pool.ctx, h.pool.opts.ConnectTimeout) }) {
				h.connecting--
				h.closed = true
				continue
			}
		}
		changed := h.changed
		var late <-chan time.Time
		var timer *time.Timer
		if len(h.links) == 0 {
			left := time.Until(h.patience(begun))
			if left <= 0 {
				h.mu.Unlock()
				return nil, h.target.fault(ErrUnreachable, "it does not answer")
			}
			timer = time.NewTimer(left)
			late = timer.C
		}
		h.mu.Unlock()
		var err error
		select {
		case <-changed:
		case <-late:
		case <-ctx.Done():
			err = failure(ctx, h.target, ctx.Err(), "waiting for a connection")
		}
		if timer != nil {
			timer.Stop()
		}
		if err != nil {
			return nil, err
		}
		h.mu.Lock()
		if len(h.links) > 0 {
			seen = h.failures
		}
	}
}

// patience is until when a caller that began at begun to need a connection waits while there is
// none. It is enough for one attempt to make one. A caller that saw a connection fall silent,
// which takes as long, gets a part of that.
func (h *Host) patience(begun time.Time) time.Time {
	limit := h.pool.opts.ConnectTimeout
	silence := cmp.Or(h.target.Silence, 3*h.pool.opts.KeepAlive)
	end := begun.Add(limit + silence/2)
	if last := h.alone.Add(limit / 3); last.After(end) {
		end = last
	}
	return end
}

// Login makes a connection if there is none. The attempt may take until the deadline of ctx, where others have
// Options.ConnectTimeout: a host that is still starting may need longer for one login, and would never let us in if
// attempts were given up and started over.
func (h *Host) Login(ctx context.Context) error {
	limit := h.pool.opts.ConnectTimeout
	if end, ok := ctx.Deadline(); ok {
		limit = time.Until(end)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	seen := h.failures
	for begun := false; len(h.links) == 0; {
		switch {
		case h.closed:
			return h.target.fault(ErrUnreachable, "its connections are closed")
		case h.failures > seen:
			return h.failed
		case !begun:
			begun = true
			h.connecting++
			if !h.pool.task(func() { h.connect(ctx, limit) }) {
				h.connecting--
				h.closed = true
				continue
			}
		}
		changed := h.changed
		h.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		h.mu.Lock()
		if err := ctx.Err(); err != nil {
			return failure(ctx, h.target, err, "connecting")
		}
	}
	return nil
}

// connect makes one connection, while ctx lasts and within limit, and watches it to its end.
func (h *Host) connect(ctx context.Context, limit time.Duration) {
	c, err := h.dialHost(ctx, limit)
	h.mu.Lock()
	h.connecting--
	if err == nil && h.closed {
		h.mu.Unlock()
		c.close()
		return
	}
	if err != nil {
		h.failures++
		h.failed = err
		h.wake()
		h.mu.Unlock()
		return
	}
	l := &link{master: c, limit: h.target.Sessions, hard: h.target.Sessions + 2}
	h.links = append(h.links, l)
	h.wake()
	h.mu.Unlock()
	<-c.done()
	h.drop(l)
	c.close()
}

func (h *Host) dialHost(ctx context.Context, limit time.Duration) (c *master, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	defer context.AfterFunc(h.pool.ctx, cancel)()
	for pause := 100 * time.Millisecond; ; pause *= 2 {
		c, err = h.pool.ssh.connect(ctx, h.target)
		if !errors.Is(err, errDropped) {
			break
		}
		h.pool.log.Debug("handshake dropped; trying again", "host", h.target.Name, "after", pause)
		select {
		case <-time.After(pause/2 + rand.N(pause)):
			continue
		case <-ctx.Done():
		}
		break
	}
	if err == nil || isFault(err) {
		return c, err
	}
	detail := err.Error()
	if ctx.Err() != nil && h.pool.ctx.Err() == nil {
		detail = "no answer within " + limit.String()
		if errors.Is(err, errDropped) {
			detail = "it closes every connection before the handshake; perhaps too many clients log in at the same time"
		}
	}
	return nil, h.target.fault(ErrUnreachable, tidy(detail))
}

func isFault(err error) bool {
	var e *sandboxer.Error
	return errors.As(err, &e)
}

func (h *Host) drop(l *link) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.Index(h.links, l); i >= 0 {
		h.links = slices.Delete(h.links, i, i+1)
		if len(h.links) == 0 {
			h.alone = time.Now()
		}
		h.wake()
	}
	h.dismissAll(l)
	if l.idle != nil {
		l.idle.Stop()
	}
}

// release gives a session back. full: the server refused it, so that l admits no
// more than it has.
func (h *Host) release(l *link, full bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l.sessions--
	h.released(l)
	if full && l.sessions < l.hard {
		l.hard = max(l.sessions, 1)
		l.limit = max(min(l.limit, l.hard-1), 1)
	}
	h.wake()
}

func (h *Host) releaseStream(l *link) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l.streams--
	h.released(l)
}

func (h *Host) released(l *link) {
	if l.sessions+l.streams > 0 || h.closed {
		return
	}
	if l.idle == nil {
		l.idle = time.AfterFunc(h.pool.opts.Idle, func() { h.retire(l) })
	} else {
		l.idle.Reset(h.pool.opts.Idle)
	}
}

// retire closes l if it is still unused; connections opened by Dial over it end too.
func (h *Host) retire(l *link) {
	h.mu.Lock()
	i := slices.Index(h.links, l)
	if l.sessions+l.streams > 0 || i < 0 {
		h.mu.Unlock()
		return
	}
	h.links = slices.Delete(h.links, i, i+1)
	h.mu.Unlock()
	l.close()
}

// start begins a session on any connection that admits it.
func (h *Host) start(ctx context.Context, line string, tty *sandboxer.WinSize, as use) (*session, *link, error) {
	begun, died := time.Now(), 0
	for try := 0; ; try++ {
		l, err := h.acquire(ctx, as, begun)
		if err != nil {
			return nil, nil, err
		}
		s, err := l.start(ctx, line, tty)
		if err == nil {
			return s, l, nil
		}
		full := errors.Is(err, errFull)
		if full && h.tight() {
			// Our own waiting shells took the sessions: they are gone in a moment.
			h.release(l, false)
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		h.release(l, full)
		switch {
		case ctx.Err() != nil:
			return nil, nil, failure(ctx, h.target, err, "starting a command")
		case full:
			// With no other session on the connection it is not a limit; perhaps the
			// server is shutting down. Asking in a circle would not help.
			if try >= 200 {
				return nil, nil, h.target.fault(ErrUnreachable, "it allows no session")
			}
			h.mu.Lock()
			alone, changed := l.sessions == 0, h.changed
			h.mu.Unlock()
			if alone {
				select {
				case <-changed:
				case <-time.After(20 * time.Millisecond):
				case <-ctx.Done():
				}
			}
		case isFault(err):
			return nil, nil, err
		default:
			// The connection was dead already and nothing was sent over it.
			h.drop(l)
			l.close()
			if died++; died > 3 {
				return nil, nil, h.target.fault(ErrUnreachable, tidy(err.Error()))
			}
		}
	}
}

// Dial opens a stream to addr as seen from the host. network is "tcp", with addr in
// the form host:port, or "unix", with addr an absolute name. Unavailable: nothing
// listens there, or the server does not forward. Ending ctx after Dial has returned
// does not close the stream.
func (h *Host) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	switch network {
	case "tcp":
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return nil, invalid("%q is not host:port", addr)
		}
	case "unix":
		if len(addr) == 0 || addr[0] != '/' {
			return nil, invalid("the path of the socket %q is not absolute", addr)
		}
	default:
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "streams over ssh are tcp or unix, not %s", network)
	}
	begun := time.Now()
	for try := 0; ; try++ {
		l, err := h.acquire(ctx, forStream, begun)
		if err != nil {
			return nil, err
		}
		c, err := l.dial(ctx, network, addr)
		if err == nil {
			return &stream{Conn: c, release: sync.OnceFunc(func() { h.releaseStream(l) })}, nil
		}
		h.releaseStream(l)
		switch {
		case ctx.Err() != nil:
			return nil, failure(ctx, h.target, err, "connecting to "+addr)
		case isFault(err):
			return nil, err
		case errors.Is(err, errRefused):
			return nil, sandboxer.E(sandboxer.Unavailable, err, "host %s cannot connect to %s", h.target.Name, addr)
		case try >= 3:
			return nil, h.target.fault(ErrUnreachable, tidy(err.Error()))
		}
		h.drop(l)
		l.close()
	}
}

// errRefused is a stream that the host did not open.
var errRefused = errors.New("refused")

// A stream keeps its connection from being retired until it is closed.
type stream struct {
	net.Conn
	release func()
}

func (s *stream) Close() error {
	defer s.release()
	return s.Conn.Close()
}

// CloseWrite signals the end of the data to the other side.
func (s *stream) CloseWrite() error { return halfclose.CloseWrite(s.Conn) }

// shut closes the host's connections; acquire fails from now on.
func (h *Host) shut() {
	h.mu.Lock()
	h.closed = true
	links := h.links
	h.links = nil
	h.dismissAll(nil)
	h.wake()
	for _, l := range links {
		if l.idle != nil {
			l.idle.Stop()
		}
	}
	h.mu.Unlock()
	for _, l := range links {
		l.close()
	}
}
