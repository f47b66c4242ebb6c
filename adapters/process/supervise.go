package process

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/notes"
	"github.com/sand-boxer/sandboxer/internal/protocol"
)

// How long to wait before starting a process that ended again: twice as long every time, unless it has lived for settled.
const (
	firstRest = 100 * time.Millisecond
	longRest  = 30 * time.Second
	settled   = 30 * time.Second
	// patience is how long a call waits for that time to pass, instead of failing.
	patience = time.Second
)

// A supervisor keeps the process of an extension running when it is needed. Calls never wait for long: while the
// process rests after its death they fail.
type supervisor struct {
	env    sandboxer.Env
	p      *program
	hidden secrets
	log    *rateLog
	say    func(line string, cut bool) // gets each line of a process's standard error

	mu          sync.Mutex
	cur         *session
	starting    chan struct{}   // closed when the start under way has ended; nil if there is none
	rest        time.Duration   // how long it rests after the next death
	first, long time.Duration   // firstRest and longRest
	until       time.Time       // it rests until then
	why         error           // why it does not run
	former      <-chan struct{} // closed when nothing of the last one is left
	closed      bool
	once        sync.Once              // of close
	known       *sandboxer.Description // what the broker goes by
	base        context.Context        // of processes, ends with close
	end         context.CancelFunc
}

func newSupervisor(env sandboxer.Env, p *program) *supervisor {
	base, end := context.WithCancel(context.Background())
	s := &supervisor{first: firstRest, long: longRest, env: env, p: p, log: newRateLog(env.Log), base: base, end: end}
	s.say = func(line string, cut bool) {
		s.log.say(slog.LevelInfo, "output of the extension", len(line), func() []any { return []any{"line", line, "cut", cut} })
	}
	return s
}

// A session is one life of the process, or one connection to the service.
type session struct {
	conn        *protocol.Conn
	streams     streamer
	stop        func(why error) // ends it at once
	ended       <-chan struct{} // closed when nothing of it is left
	reason      func() error    // why it ended, after that
	description sandboxer.Description
	began       time.Time
	hide        func(error) error // secrets
}

// A streamer brings the streams of requests.
type streamer interface {
	expect(token string) (<-chan arrival, func())
}

func (s *session) call(ctx context.Context, method string, params, result any, token string) error {
	return s.hide(s.conn.Call(ctx, method, params, result, token))
}

func (s *session) expect(token string) (<-chan arrival, func()) { return s.streams.expect(token) }

// opened sets the description that the broker uses from now on.
func (s *supervisor) opened(d sandboxer.Description) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known = &d
}

// describe starts the process and returns its description.
func (s *supervisor) describe(ctx context.Context) (d sandboxer.Description, err error) {
	sess, err := s.session(ctx)
	if err != nil {
		return d, err
	}
	return sess.description, nil
}

// session returns the running process, and starts it if it does not run. Kinds: Unavailable while it rests;
// the kinds of its hello.
func (s *supervisor) session(ctx context.Context) (*session, error) {
	for {
		s.mu.Lock()
		if s.cur != nil && s.cur.conn.Err() != nil {
			s.lost(s.cur)
		}
		switch {
		case s.closed:
			s.mu.Unlock()
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "%s is closed", s.env.Extension)
		case s.cur != nil:
			defer s.mu.Unlock()
			return s.cur, nil
		}
		wait, starting := time.Until(s.until), s.starting
		why := s.why
		if starting == nil && wait <= 0 {
			starting = make(chan struct{})
			s.starting = starting
			go s.start(starting)
		}
		s.mu.Unlock()
		if starting == nil {
			if wait > patience {
				return nil, s.resting(why, wait)
			}
			select {
			case <-time.After(wait):
				continue
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		select {
		case <-starting:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		s.mu.Lock()
		cur, why, wait := s.cur, s.why, time.Until(s.until)
		s.mu.Unlock()
		if cur == nil {
			return nil, s.resting(why, wait)
		}
	}
}

// resting is the error of a call while the process does not run.
func (s *supervisor) resting(why error, wait time.Duration) error {
	if why == nil {
		why = sandboxer.E(sandboxer.Unavailable, nil, "%s is not running", s.p.title())
	}
	e := sandboxer.E(sandboxer.KindOf(why), why, "%s is not available: %s", s.env.Extension, sandboxer.Message(why)).
		WithPublic("%s is not available now", s.env.Extension)
	if e.Kind != sandboxer.Unavailable && e.Kind != sandboxer.Unsupported {
		return why // its configuration is wrong
	}
	e.Hint = sandboxer.HintOf(why)
	if wait > 0 {
		e.Kind, e.RetryAfter = sandboxer.Unavailable, wait.Round(time.Millisecond)
	}
	return e
}

// start starts the process, for all callers that wait for done.
func (s *supervisor) start(done chan struct{}) {
	sess, err := s.afterFormer()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.starting = nil
	defer close(done)
	if err != nil {
		s.failed(err)
		return
	}
	if s.closed {
		sess.stop(errClosed)
		<-sess.ended
		return
	}
	if s.known != nil && !sameDescription(*s.known, sess.description) {
		s.env.Log.Warn("the description of the extension has changed since it was opened: restart the server")
		if err := forgetDescription(s.env.Dir); err != nil { // else it would be found again
			s.env.Log.Warn("the stored description of the extension cannot be removed", "err", err)
		}
	}
	s.cur, s.why = sess, nil
	go s.watch(sess)
}

// afterFormer begins when the former process is gone: an extension has one at a time.
func (s *supervisor) afterFormer() (*session, error) {
	s.mu.Lock()
	former := s.former
	s.mu.Unlock()
	if former != nil {
		select {
		case <-former:
		case <-s.base.Done():
			return nil, errClosed
		case <-time.After(2 * stopTime):
			return nil, sandboxer.E(sandboxer.Unavailable, nil, "the previous process of %s was killed, but still exists", s.p.title())
		}
	}
	return s.begin()
}

var errClosed = errors.New("the extension is closed")

// failed makes the process rest. s.mu is held.
func (s *supervisor) failed(err error) {
	s.rest = min(max(2*s.rest, s.first), s.long)
	s.until, s.why = time.Now().Add(s.rest), err
}

// lost keeps further calls from a session that has ended. s.mu is held.
func (s *supervisor) lost(sess *session) {
	if s.cur != sess {
		return
	}
	s.cur, s.former = nil, sess.ended
	if time.Since(sess.began) >= settled {
		s.rest = 0
	}
	s.failed(sandboxer.E(sandboxer.Unavailable, nil, "%s has ended", s.p.title()))
}

// watch waits for the end of a session.
func (s *supervisor) watch(sess *session) {
	<-sess.conn.Done()
	s.mu.Lock()
	s.lost(sess)
	closed := s.closed
	s.mu.Unlock()
	if closed { // in order: it may take its time
		sess.stop(errClosed)
	} else {
		sess.stop(sess.conn.Err())
	}
	<-sess.ended
	err := sess.reason()
	s.mu.Lock()
	if s.cur == nil && s.starting == nil && err != nil {
		s.why = err
	}
	s.mu.Unlock()
	if !closed {
		s.env.Log.Warn("the extension's process ended", "err", s.hidden.hide(fmt.Sprint(err)))
	}
}

// close ends the process and waits until nothing of it is left.
func (s *supervisor) close() { s.once.Do(s.shut) }

func (s *supervisor) shut() {
	s.mu.Lock()
	s.closed = true
	cur, starting := s.cur, s.starting
	s.mu.Unlock()
	s.end()
	if starting != nil {
		<-starting
	}
	if cur != nil {
		cur.conn.Close()
		cur.stop(errClosed)
		<-cur.ended
	}
	s.mu.Lock()
	former := s.former
	s.mu.Unlock()
	if former != nil { // one that is about to be gone
		<-former
	}
}

// hello is the broker's first message.
func (s *supervisor) hello(streams string) (h protocol.Hello, err error) {
	h = protocol.Hello{Protocols: protocol.Versions, Program: "sandboxer", Extension: s.env.Extension, Owner: s.env.Owner, Dir: s.env.Dir, Hosts: s.env.Hosts, Own: s.env.Own,
		NotesKey: notes.Key(s.env.Notes), Streams: streams, Handler: s.p.Handler, Path: s.p.Path, Concurrency: s.p.Concurrency}
	if h.Config, err = s.env.Config(true); err == nil {
		s.hidden.learn(s.p.config, h.Config)
		h.Secrets = different(s.p.config, h.Config)
	}
	return h, err
}

// greet exchanges hellos, within protocol.HelloTime. giveUp unblocks reading and writing.
func (s *supervisor) greet(r *bufio.Reader, w io.Writer, streams string, giveUp func(error)) (d sandboxer.Description, err error) {
	ours, err := s.hello(streams)
	if err != nil {
		return d, err
	}
	timer := time.AfterFunc(protocol.HelloTime, func() { giveUp(fmt.Errorf("%s did not send its hello within %s", s.p.title(), protocol.HelloTime)) })
	defer timer.Stop()
	stop := context.AfterFunc(s.base, func() { giveUp(errClosed) })
	defer stop()
	wrote := make(chan error, 1)
	go func() { wrote <- protocol.WriteHello(w, ours) }()
	theirs, err := protocol.ReadHello(r)
	if err != nil {
		giveUp(err)
		<-wrote
		return d, err
	}
	if _, err := protocol.Agree(theirs.Protocols); err != nil {
		return d, sandboxer.E(sandboxer.Unavailable, nil, "%s: %s", s.p.title(), sandboxer.Message(err)).WithHint("upgrade sandboxer or the extension, so that both know one protocol")
	}
	if theirs.Error != nil {
		return d, theirs.Error.Err(s.hidden.hide)
	}
	if theirs.Description == nil {
		return d, sandboxer.E(sandboxer.Unavailable, nil, "the hello of %s has no description", s.p.title())
	}
	if err := <-wrote; err != nil {
		return d, err
	}
	return *theirs.Description, checkDescription(*theirs.Description, s.hidden.hide)
}

// hide blanks secrets out of an extension's messages.
func (s *supervisor) hide(err error) error {
	if err == nil {
		return nil
	}
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		var all []error
		for _, err := range joined.Unwrap() {
			all = append(all, s.hide(err))
		}
		return errors.Join(all...)
	}
	var e *sandboxer.Error
	if !errors.As(err, &e) {
		return err
	}
	own := *e
	own.Msg, own.Hint, own.Public = s.hidden.hide(e.Msg), s.hidden.hide(e.Hint), s.hidden.hide(e.Public)
	if e.Err != nil {
		own.Err = errors.New(s.hidden.hide(e.Err.Error()))
	}
	return &own
}

// maxAsked is how many requests of the broker are under way at once.
const maxAsked = 256

// connect makes the session's control connection.
func (s *supervisor) connect(sess *session, r *bufio.Reader, w io.Writer) {
	sess.began, sess.hide = time.Now(), s.hide
	sess.conn = protocol.New(r, w, protocol.Options{
		MaxAsked: maxAsked,
		Serve:    s.serve,
		Hide:     s.hidden.hide,
		Log: func(level slog.Level, msg string, attrs map[string]string) {
			size := len(msg)
			for k, v := range attrs {
				size += len(k) + len(v)
			}
			s.log.say(level, msg, size, func() (out []any) {
				for k, v := range attrs {
					out = append(out, k, v)
				}
				return out
			})
		},
		Unanswered: func(method string) {
			s.env.Log.Warn("the extension does not end a cancelled request: its process is replaced", "method", method)
			sess.stop(fmt.Errorf("it did not end a cancelled request (%s)", method))
		},
	})
	go sess.conn.Run(s.base)
}

// serve answers requests of the extension.
func (s *supervisor) serve(ctx context.Context, r *protocol.Request) (any, error) {
	if r.Method != protocol.MethodRecorded {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "the broker has no method %.64q", r.Method)
	}
	var p protocol.RecordedParams
	if err := r.Decode(&p); err != nil {
		return nil, err
	}
	if s.env.Recorded == nil {
		return nil, sandboxer.E(sandboxer.Unsupported, nil, "this program keeps no records")
	}
	all, err := s.env.Recorded(ctx)
	if err != nil {
		return nil, err
	}
	return protocol.PageOf(all, p.Skip), nil
}

// A rateLog logs an extension's messages, up to a number of lines and bytes per second.
type rateLog struct {
	log *slog.Logger

	mu      sync.Mutex
	second  time.Time
	lines   int
	bytes   int
	dropped int // lines
	lost    int // bytes of them
}

// The bounds for one second.
const (
	maxLogLines = 100
	maxLogBytes = 64 << 10
)

func newRateLog(log *slog.Logger) *rateLog { return &rateLog{log: log} }

func (l *rateLog) say(level slog.Level, msg string, size int, attrs func() []any) {
	l.mu.Lock()
	if now := time.Now(); now.Sub(l.second) >= time.Second {
		if l.dropped > 0 {
			l.log.Warn("the extension logs too much: some lines were dropped", "lines", l.dropped, "bytes", l.lost)
		}
		l.second, l.lines, l.bytes, l.dropped, l.lost = now, 0, 0, 0, 0
	}
	l.lines++
	drop := l.lines > maxLogLines || l.bytes+size > maxLogBytes
	if drop {
		l.dropped++
		l.lost += size
	} else {
		l.bytes += size
	}
	l.mu.Unlock()
	if !drop {
		l.log.Log(context.Background(), level, msg, attrs()...)
	}
}
