//go:build linux

package local

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// streams connect a command's files with the caller's readers and writers.
type streams struct {
	guest  map[int]*os.File // the command's ends
	stdin  *os.File         // our ends; nil if there are none
	out    []*outStream
	broken chan struct{} // closed when a writer fails
	fail   func()        // closes broken
}

// An outStream is one stream of a command's output. It costs no buffer and no goroutine while
// it is silent.
type outStream struct {
	poll  *poller
	f     *os.File
	raw   syscall.RawConn
	watch *watch
	w     io.Writer
	fail  func() // called when w fails

	over atomic.Bool // finish now handles what comes
	mu   sync.Mutex  // held while it flows
	eof  bool
	err  error
}

const (
	pipeSize = 1 << 20 // the most that an ordinary user gets; fewer switches between writer and reader

	// A stream that pauses after it has moved busyOutput is waited for as long as
	// lingerOutput: more will come soon.
	busyOutput   = 64 << 10
	lingerOutput = 10 * time.Millisecond
)

func newStreams(poll *poller, cmd sandboxer.Cmd) (*streams, error) {
	s := &streams{guest: map[int]*os.File{}, broken: make(chan struct{})}
	s.fail = sync.OnceFunc(func() { close(s.broken) })
	ok := false
	defer func() {
		if !ok {
			s.closeGuest()
			s.abort()
		}
	}()
	if cmd.Stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot open a pipe for the command's input")
		}
		s.guest[0], s.stdin = r, w
	}
	for i, w := range []io.Writer{cmd.Stdout, cmd.Stderr} {
		if w == nil {
			continue
		}
		r, g, err := os.Pipe()
		if err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot open a pipe for the command's output")
		}
		_, _ = unix.FcntlInt(g.Fd(), unix.F_SETPIPE_SZ, pipeSize)
		s.guest[i+1] = g
		o := &outStream{poll: poll, f: r, w: w, fail: s.fail}
		s.out = append(s.out, o)
		if o.raw, err = r.SyscallConn(); err != nil {
			return nil, sandboxer.E(sandboxer.Unavailable, err, "cannot open a pipe for the command's output")
		}
	}
	for i := range 3 {
		if s.guest[i] == nil {
			null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
			if err != nil {
				return nil, sandboxer.E(sandboxer.Unavailable, err, "%s cannot be opened", os.DevNull)
			}
			s.guest[i] = null
		}
	}
	ok = true
	return s, nil
}

func (s *streams) closeGuest() {
	for _, f := range s.guest {
		f.Close()
	}
	s.guest = nil
}

// start begins the copying.
func (s *streams) start(cmd sandboxer.Cmd) {
	if s.stdin != nil {
		// Do not wait for it: a reader may block for ever, and the caller must end it.
		go feed(s.stdin, cmd.Stdin)
	}
	for _, o := range s.out {
		o.mu.Lock() // a stream that already flows waits for its watch
		var err error
		if o.watch, err = o.poll.watch(o.f, o.flow); err == nil {
			err = o.watch.arm()
		}
		o.mu.Unlock()
		if err != nil {
			go o.flow()
		}
	}
}

// feed copies a command's input. Its buffer is small while there is little input.
func feed(w *os.File, r io.Reader) {
	defer w.Close()
	small := make([]byte, 512)
	buf := small
	for {
		n, err := r.Read(buf)
		if _, werr := w.Write(buf[:n]); err != nil || werr != nil {
			return
		}
		switch {
		case n < len(buf):
			buf = small
		case n == len(small):
			buf = make([]byte, 32<<10)
		}
	}
}

// flow passes on what is available, and makes the poller wait for more.
func (o *outStream) flow() {
	o.mu.Lock()
	defer o.mu.Unlock()
	buf := o.poll.buffer(false)
	defer func() { o.poll.recycle(buf) }()
	for moved, linger, stay := 0, false, false; !o.over.Load() && !o.eof && o.err == nil; {
		var n int
		var err error
		if linger {
			linger = false
			n, err = o.f.Read(buf)
		} else {
			n, err = o.ready(buf)
		}
		o.pass(buf[:n], err)
		moved += n
		switch {
		case n > 0:
			if n == len(buf) && n < copySize {
				o.poll.recycle(buf)
				buf = o.poll.buffer(true)
			}
		case err == unix.EAGAIN && moved >= busyOutput:
			moved = 0
			linger = o.f.SetReadDeadline(time.Now().Add(lingerOutput)) == nil // set before checking whether it is over
		case o.eof || o.err != nil:
		case stay || o.watch == nil || o.watch.arm() != nil: // the poller cannot watch it
			stay = true
			linger = o.f.SetReadDeadline(time.Time{}) == nil
		default:
			return
		}
	}
	if o.err != nil {
		o.fail()
	}
}

// ready reads without blocking.
func (o *outStream) ready(buf []byte) (n int, err error) {
	cerr := o.raw.Control(func(fd uintptr) {
		for n, err = -1, unix.EINTR; err == unix.EINTR; {
			n, err = unix.Read(int(fd), buf)
		}
	})
	if cerr != nil {
		return 0, cerr
	}
	if n == 0 && err == nil {
		err = io.EOF
	}
	return max(n, 0), err
}

// pass gives a read's data to the caller. Any error ends the stream, except that there is none now.
func (o *outStream) pass(p []byte, err error) {
	if len(p) > 0 {
		if _, err := o.w.Write(p); err != nil {
			o.err = sandboxer.E(sandboxer.Canceled, err, "the caller no longer reads the command's output")
		}
	}
	o.eof = o.eof || err != nil && err != unix.EAGAIN && !errors.Is(err, os.ErrDeadlineExceeded)
}

// rest moves output until its end. A command may leave a process behind that keeps the
// stream open; now that the command itself has ended, rest takes only what is already in
// the pipe.
func (o *outStream) rest() {
	o.over.Store(true)
	_ = o.f.SetReadDeadline(time.Unix(1, 0)) // a lingering flow notices this
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.eof || o.err != nil {
		return
	}
	buf := o.poll.buffer(false)
	defer func() { o.poll.recycle(buf) }()
	_ = o.f.SetReadDeadline(time.Now().Add(drainTime))
	for late := false; !o.eof && o.err == nil; {
		var n int
		var err error
		if late {
			n, err = o.ready(buf)
		} else {
			n, err = o.f.Read(buf)
		}
		o.pass(buf[:n], err)
		if late && n == 0 {
			return
		}
		late = late || errors.Is(err, os.ErrDeadlineExceeded)
		if n == len(buf) && n < copySize {
			o.poll.recycle(buf)
			buf = o.poll.buffer(true)
		}
	}
}

func (o *outStream) close() {
	o.over.Store(true)
	if o.watch != nil {
		o.watch.stop()
	}
	o.f.Close()
}

// drainTime is how long after a command's end its output may still be in transit from
// other processes that share the stream.
const drainTime = 20 * time.Millisecond

// finish waits until the output of an ended command is delivered.
func (s *streams) finish() error {
	if s.stdin != nil {
		s.stdin.Close()
	}
	var err error
	for _, o := range s.out {
		o.rest()
		o.close()
		err = errors.Join(err, o.err)
	}
	return err
}

// abort closes our ends.
func (s *streams) abort() {
	if s.stdin != nil {
		s.stdin.Close()
	}
	for _, o := range s.out {
		o.close()
	}
}
