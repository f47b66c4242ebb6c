package protocol

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
)

// Input is the part of a command's input that has arrived and was not read yet: at most Window bytes.
type Input struct {
	mu     sync.Mutex
	change sync.Cond
	data   []byte
	err    error // after data; io.EOF in order
	owed   int   // read and not granted again yet
	grant  func(n int)
}

func newInput(grant func(n int)) *Input {
	in := &Input{grant: grant}
	in.change.L = &in.mu
	return in
}

func (in *Input) add(p []byte) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.data)+len(p) > Window {
		return errors.New("a command gets more input than its window allows")
	}
	if in.err == nil {
		in.data = append(in.data, p...)
		in.change.Broadcast()
	}
	return nil
}

func (in *Input) end(err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.err == nil {
		in.err = err
		in.change.Broadcast()
	}
}

// Read implements io.Reader.
func (in *Input) Read(p []byte) (int, error) {
	in.mu.Lock()
	for len(in.data) == 0 && in.err == nil {
		in.change.Wait()
	}
	n := copy(p, in.data)
	in.data = in.data[n:]
	err, grant := in.err, 0
	if in.owed += n; in.owed >= Window/4 { // not one for every byte
		grant, in.owed = in.owed, 0
	}
	in.mu.Unlock()
	if grant > 0 && err == nil {
		in.grant(grant)
	}
	if n > 0 {
		return n, nil
	}
	if len(p) == 0 {
		return 0, nil
	}
	return 0, err
}

// A Served command is a command of the extension, with what the broker sends to it.
type Served struct {
	Stdin          *Input
	Stdout, Stderr io.Writer
	Resize         <-chan sandboxer.WinSize
	Signals        <-chan os.Signal
}

// leaveTime is how long a cancelled command may go on reading its input.
const leaveTime = 500 * time.Millisecond

// ServeCommand runs run with the streams that s carries, and sends how it ended. It cancels run's ctx when the
// broker has left.
func (s *Stream) ServeCommand(ctx context.Context, run func(context.Context, Served) (sandboxer.Exit, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resize, signals := make(chan sandboxer.WinSize, 1), make(chan os.Signal, maxSignals)
	in := newInput(func(n int) {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(n))
		_ = s.Send(ChannelWindow, b[:]) // a stream that broke is found by Receive
	})
	over := make(chan struct{})
	go func() {
		defer func() {
			cancel()
			// The input has not ended: if the command took this for its end, it would close what goes on. But
			// a command that only reads has to notice.
			select {
			case <-over:
			case <-time.After(leaveTime):
				in.end(errBroken(io.EOF))
			}
		}()
		for {
			channel, payload, err := s.Receive()
			if err == nil {
				err = deliver(channel, payload, in, resize, signals)
			}
			if err != nil {
				return
			}
		}
	}()
	x, err := run(ctx, Served{in, s.Writer(ChannelOut), s.Writer(ChannelErr), resize, signals})
	close(over)
	in.end(io.ErrClosedPipe)
	if err != nil {
		return err
	}
	return s.SendJSON(ChannelResult, x)
}

// maxSignals bounds signals that a command has not taken; further ones are lost, as is a second one of a kind that is
// pending.
const maxSignals = 16

// deliver handles one frame of the broker. It never waits: an adapter may ignore sizes and signals.
func deliver(channel byte, payload []byte, in *Input, resize chan sandboxer.WinSize, signals chan<- os.Signal) error {
	switch channel {
	case ChannelIn:
		return in.add(payload)
	case ChannelEnd:
		in.end(io.EOF)
	case ChannelError:
		var e Error
		if err := DecodeFrame(payload, &e); err != nil {
			return err
		}
		in.end(e.Err(nil))
	case ChannelResize:
		var size sandboxer.WinSize
		if err := DecodeFrame(payload, &size); err != nil {
			return err
		}
		select { // only the last counts
		case <-resize:
		default:
		}
		resize <- size
	case ChannelSignal:
		if n := unix.SignalNum("SIG" + string(payload[:min(len(payload), 16)])); n != 0 {
			select {
			case signals <- n:
			default:
			}
		}
	default:
		return errors.New("a frame is on a channel of the other side")
	}
	return nil
}

// A Caller is what the broker connects to a command.
type Caller struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Resize         <-chan sandboxer.WinSize
	Signals        <-chan os.Signal
}

// CallCommand connects c to the command at the other end, and returns how that ended. Closing the stream
// ends it early. mine is an error of c's writers, theirs one of the stream.
func (s *Stream) CallCommand(c Caller) (x sandboxer.Exit, mine, theirs error) {
	over := make(chan struct{})
	defer close(over)
	w := newWindow()
	defer w.close()
	if c.Stdin != nil {
		go s.feed(c.Stdin, w)
	}
	go s.steer(c, over)
	for {
		channel, payload, err := s.Receive()
		if err != nil {
			return x, nil, errBroken(err)
		}
		switch channel {
		case ChannelOut, ChannelErr:
			to := c.Stdout
			if channel == ChannelErr {
				to = c.Stderr
			}
			if to != nil {
				if _, err := to.Write(payload); err != nil {
					return x, err, nil
				}
			}
		case ChannelWindow:
			if len(payload) != 4 {
				return x, nil, sandboxer.E(sandboxer.Internal, nil, "a stream of the extension has a window of %d bytes", len(payload))
			}
			w.add(int(min(binary.BigEndian.Uint32(payload), Window)))
		case ChannelResult:
			return x, nil, DecodeFrame(payload, &x)
		case ChannelError:
			return x, nil, s.theirs(payload)
		case ChannelEnd: // of the output: how it ended follows
		default:
			return x, nil, sandboxer.E(sandboxer.Internal, nil, "a stream of the extension has a frame on channel %d, where none belongs", channel)
		}
	}
}

// A window is how much input may be sent.
type window struct {
	mu     sync.Mutex
	change sync.Cond
	n      int // -1 when it is closed
}

func newWindow() *window {
	w := &window{n: Window}
	w.change.L = &w.mu
	return w
}

func (w *window) add(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n >= 0 {
		w.n = min(w.n+n, Window)
		w.change.Broadcast()
	}
}

func (w *window) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.n = -1
	w.change.Broadcast()
}

// size waits until it is open, and returns how far, or -1 when it is closed.
func (w *window) size() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.n == 0 {
		w.change.Wait()
	}
	return w.n
}

func (w *window) take(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n >= 0 {
		w.n -= n
	}
}

// feed sends what r has, as w allows.
func (s *Stream) feed(r io.Reader, w *window) {
	buf := make([]byte, maxData)
	for {
		open := w.size()
		if open < 0 {
			return
		}
		n, err := r.Read(buf[:min(open, len(buf))])
		if n > 0 {
			w.take(n)
			if s.Send(ChannelIn, buf[:n]) != nil {
				return
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			_ = s.Send(ChannelEnd, nil)
			return
		case err != nil:
			_ = s.SendError(err)
			return
		}
	}
}

// steer sends sizes and signals.
func (s *Stream) steer(c Caller, over <-chan struct{}) {
	resize, signals := c.Resize, c.Signals
	for resize != nil || signals != nil {
		select {
		case size, ok := <-resize:
			if !ok {
				resize = nil
				continue
			}
			data, _ := json.Marshal(size)
			_ = s.Send(ChannelResize, data)
		case sig, ok := <-signals:
			if !ok {
				signals = nil
				continue
			}
			if n, ok := sig.(syscall.Signal); ok {
				if name := unix.SignalName(n); len(name) > 3 {
					_ = s.Send(ChannelSignal, []byte(name[3:]))
				}
			}
		case <-over:
			return
		}
	}
}
