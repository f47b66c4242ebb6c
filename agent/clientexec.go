package agent

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/sand-boxer/sandboxer"
	pb "github.com/sand-boxer/sandboxer/agent/proto/process"
)

// Exec runs cmd to its end; see sandboxer.Execer. When ctx is done or the connection breaks, the
// command and its child processes are killed. Exec does not wait for a blocked read of cmd.Stdin.
func (c *Client) Exec(ctx context.Context, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	if err := ctx.Err(); err != nil {
		return sandboxer.Exit{}, sandboxer.E(sandboxer.KindOf(err), err, "the command was canceled before it began")
	}
	// The stream outlives ctx: after a cancel we still wait for the command's end.
	streamCtx, cut, began := c.begin(context.WithoutCancel(ctx))
	defer cut()
	req := startRequest(sandboxer.ProcessSpec{Args: cmd.Args, Env: cmd.Env, Dir: cmd.Dir, TTY: cmd.TTY, Input: cmd.Stdin != nil})
	req.Header().Set(foregroundHeader, "true")
	c.as(req.Header(), cmd.User)
	// A cancel before the start event: give the command time to begin, because only then can
	// we see its end.
	defer context.AfterFunc(ctx, func() { time.AfterFunc(c.wait.kill, cut) })()
	stream, err := c.proc.Start(streamCtx, req)
	if err != nil {
		return notStartedExit(cmd, err, c.streamError(ctx, streamCtx, err))
	}
	a := &attachment{c: c, ctx: ctx, stream: streamCtx, cut: cut, began: began, next: func() *pb.ProcessEvent {
		if !stream.Receive() {
			return nil
		}
		return stream.Msg().GetEvent()
	}, err: stream.Err, tty: func() bool { return cmd.TTY != nil }, feedNil: cmd.TTY != nil}
	defer a.close(stream)
	x, err := a.run(sandboxer.ProcessStreams{Stdin: cmd.Stdin, Stdout: cmd.Stdout, Stderr: cmd.Stderr, Resize: cmd.Resize, Signals: cmd.Signals}, true)
	if err != nil && !a.started {
		return notStartedExit(cmd, stream.Err(), err)
	}
	return x, err
}

// notStartedExit turns the failure of a missing command into an exit.
func notStartedExit(cmd sandboxer.Cmd, raw, err error) (sandboxer.Exit, error) {
	var ce *connect.Error
	if errors.As(raw, &ce) {
		if code, e := strconv.Atoi(ce.Meta().Get(exitHeader)); e == nil {
			se := &sandboxer.StartError{Name: cmd.Args[0], Code: code}
			if known := se.Error(); ce.Message() != known {
				se.Why = strings.TrimPrefix(strings.TrimPrefix(ce.Message(), known+": "), se.Name+": ") // earlier agents send the name alone
			}
			return se.Exit(cmd), nil
		}
	}
	var e *sandboxer.Error
	if errors.As(err, &e) && e.Kind == sandboxer.Exhausted {
		return sandboxer.Exit{}, sandboxer.E(e.Kind, errors.Join(ErrNotStarted, e), "%s", e.Msg).WithHint("%s", e.Hint)
	}
	return sandboxer.Exit{}, err
}

// ErrNotStarted is the cause of an Exhausted error of Exec: the sandbox had no resources left to start
// the command.
var ErrNotStarted = errors.New("the command was not started")

func startRequest(p sandboxer.ProcessSpec) *connect.Request[pb.StartRequest] {
	cfg := &pb.ProcessConfig{Envs: p.Env}
	if len(p.Args) > 0 {
		cfg.Cmd, cfg.Args = p.Args[0], p.Args[1:]
	}
	if p.Dir != "" {
		cfg.Cwd = &p.Dir
	}
	msg := &pb.StartRequest{Process: cfg, Stdin: &p.Input}
	if p.Tag != "" {
		msg.Tag = &p.Tag
	}
	if p.TTY != nil {
		msg.Pty = ptySize(*p.TTY)
	}
	return connect.NewRequest(msg)
}

func ptySize(s sandboxer.WinSize) *pb.PTY {
	return &pb.PTY{Size: &pb.PTY_Size{Cols: uint32(s.Cols), Rows: uint32(s.Rows)}}
}

func (c *Client) as(h interface{ Set(k, v string) }, name string) {
	if name != "" {
		h.Set("Authorization", basicUser(name))
	}
}

// An attachment follows the stream of one process.
type attachment struct {
	c       *Client
	ctx     context.Context
	stream  context.Context
	cut     context.CancelFunc
	began   func()
	next    func() *pb.ProcessEvent
	err     func() error
	tty     func() bool // whether the process has a terminal; known after the first event
	feedNil bool        // send an end of file to a terminal without an input
	started bool
	ended   atomic.Bool  // the end of the process came
	writing atomic.Int64 // the number of the write that is under way; 0 between two
}

// run copies events until the end. With own set the process belongs to the caller: run
// kills it when ctx is done; otherwise the process continues.
func (a *attachment) run(s sandboxer.ProcessStreams, own bool) (x sandboxer.Exit, err error) {
	first := a.next()
	a.began()
	if first.GetStart() == nil {
		return x, a.broken("the agent did not start the command")
	}
	a.started = true
	pid := int(first.GetStart().GetPid())

	helpers, stop := context.WithCancel(context.WithoutCancel(a.ctx))
	defer stop()
	undelivered := make(chan error, 1)
	if s.Stdin != nil || a.feedNil {
		go func() {
			if err := a.c.feed(helpers, pid, s.Stdin, a.tty()); err != nil {
				undelivered <- err
			}
		}()
	}
	if s.Resize != nil || s.Signals != nil {
		go a.c.control(helpers, pid, s)
	}
	giveUp := func() {
		// An agent that is known not to answer kills the command when it finds the stream broken.
		if own && sandboxer.KindOf(context.Cause(a.ctx)) != sandboxer.Unavailable {
			ctx, cancel := context.WithTimeout(helpers, a.c.wait.kill)
			defer cancel()
			if a.c.Signal(ctx, pid, 9) == nil {
				time.AfterFunc(a.c.wait.kill, a.cut) // the end should come through the stream
				return
			}
		}
		a.cut()
	}
	type outcome struct {
		x   sandboxer.Exit
		err error
	}
	over := make(chan outcome, 1)
	go func() {
		x, err := a.follow(s, own, giveUp)
		over <- outcome{x, err}
	}()
	select {
	case o := <-over:
		return o.x, o.err
	case err := <-undelivered:
		select {
		case o := <-over: // the process or its agent has ended
			return o.x, o.err
		case <-time.After(blockedWrite):
		}
		giveUp()
		select {
		case <-over:
		case <-time.After(a.c.wait.kill):
			a.cut()
		}
		return x, sandboxer.E(sandboxer.KindOf(err), err, "the input of the command could not be delivered: %s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	case <-a.ctx.Done():
	}
	giveUp()
	for blocked := int64(0); ; {
		select {
		case o := <-over: // the end of the leader may be seen before the rest is gone
			return o.x, o.err
		case <-time.After(blockedWrite):
		}
		// A caller that does not read the output does not see the end in the stream.
		n := a.writing.Load()
		if n == 0 || n != blocked {
			blocked = n
			continue
		}
		if own {
			ctx, cancel := context.WithTimeout(helpers, a.c.wait.kill)
			_, _ = a.c.Attach(ctx, pid, sandboxer.ProcessStreams{})
			cancel()
		}
		a.cut()
		return sandboxer.Exit{}, a.gaveUp(own)
	}
}

// blockedWrite is how long a write of output may take after its caller has left.
const blockedWrite = 100 * time.Millisecond

func (a *attachment) gaveUp(own bool) error {
	e := a.ctx.Err()
	if own {
		return sandboxer.E(sandboxer.KindOf(e), e, "the command was killed because its caller gave up")
	}
	return sandboxer.E(sandboxer.KindOf(e), e, "the caller no longer follows the process, which continues to run")
}

// follow copies events to s until the end; it calls giveUp when the output can no longer be
// written.
func (a *attachment) follow(s sandboxer.ProcessStreams, own bool, giveUp func()) (x sandboxer.Exit, err error) {
	for n := int64(1); ; n++ {
		ev := a.next()
		if ev == nil {
			return x, a.broken("the connection to the command broke")
		}
		var w io.Writer
		var b []byte
		switch d := ev.GetData(); {
		case d != nil:
			switch out := d.GetOutput().(type) {
			case *pb.ProcessEvent_DataEvent_Stdout:
				w, b = s.Stdout, out.Stdout
			case *pb.ProcessEvent_DataEvent_Stderr:
				w, b = s.Stderr, out.Stderr
			case *pb.ProcessEvent_DataEvent_Pty:
				w, b = s.Stdout, out.Pty
			}
		case ev.GetEnd() != nil:
			a.ended.Store(true)
			if a.ctx.Err() != nil && own {
				return x, a.gaveUp(own)
			}
			if err != nil {
				return x, err
			}
			end := ev.GetEnd()
			return exitOf(int(end.GetExitCode()), end.GetExited(), end.GetStatus()), nil
		}
		if w == nil || err != nil {
			continue
		}
		a.writing.Store(n)
		_, werr := w.Write(b)
		a.writing.Store(0)
		if werr != nil {
			// The reader has gone: as with a closed pipe, that ends the command.
			err = sandboxer.E(sandboxer.Canceled, werr, "the output of the command could not be written")
			if !own {
				return x, err
			}
			giveUp()
		}
	}
}

func (a *attachment) broken(what string) error {
	if err := a.err(); err != nil {
		return a.c.streamError(a.ctx, a.stream, err)
	}
	return sandboxer.E(sandboxer.Unavailable, nil, "%s", what)
}

// begin returns a context for a stream that ends if began is not called in time.
func (c *Client) begin(parent context.Context) (_ context.Context, cut context.CancelFunc, began func()) {
	ctx, cancel := context.WithCancelCause(parent)
	stop := after(c.wait.answer, func() { cancel(errLate) })
	return ctx, func() { stop(); cancel(nil) }, stop
}

// streamError is rpcError for a stream with a context of its own.
func (c *Client) streamError(ctx, stream context.Context, err error) error {
	if ctx.Err() == nil && context.Cause(stream) == errLate {
		ctx = stream
	}
	return c.rpcError(ctx, err)
}

// feed sends r to the input of a process and then closes it. Its error means that this failed; it is
// nil if the process ended, or closed its input.
func (c *Client) feed(ctx context.Context, pid int, r io.Reader, tty bool) error {
	sel := pidSelector(pid)
	stream := c.proc.StreamInput(ctx)
	err := stream.Send(&pb.StreamInputRequest{Event: &pb.StreamInputRequest_Start{
		Start: &pb.StreamInputRequest_StartEvent{Process: sel}}})
	send := func(b []byte) {
		in := &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: b}}
		if tty {
			in.Input = &pb.ProcessInput_Pty{Pty: b}
		}
		err = stream.Send(&pb.StreamInputRequest{Event: &pb.StreamInputRequest_Data{
			Data: &pb.StreamInputRequest_DataEvent{Input: in}}})
	}
	if r != nil {
		buf := make([]byte, 128<<10)
		for err == nil {
			n, rerr := r.Read(buf)
			if n > 0 {
				send(buf[:n])
			}
			if rerr != nil {
				break
			}
		}
	}
	if tty && err == nil {
		send([]byte{4})
	}
	_, err = stream.CloseAndReceive() // of an error in sending, this says which
	if err = c.rpcError(ctx, err); err == nil && !tty {
		err = c.CloseStdin(alone(ctx), pid)
	}
	if ctx.Err() != nil {
		return nil
	}
	switch sandboxer.KindOf(err) {
	case sandboxer.NotFound, sandboxer.Conflict, sandboxer.Internal: // the process has ended, closed its input, or has none
		return nil
	}
	return err
}

// alone is ctx without its end, for a short call that may itself end the command, and so ctx. net/http gives a connection to
// the next request before it returns from the one that had it, and closes it if the context of that one ends in between: the
// call of another command would fail.
func alone(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// control forwards sizes and signals until the process has ended.
func (c *Client) control(ctx context.Context, pid int, s sandboxer.ProcessStreams) {
	for s.Resize != nil || s.Signals != nil {
		select {
		case size, ok := <-s.Resize:
			if !ok {
				s.Resize = nil
				continue
			}
			_ = c.Resize(alone(ctx), pid, size)
		case sig, ok := <-s.Signals:
			if !ok {
				s.Signals = nil
				continue
			}
			if n := signalNumber(sig); n > 0 {
				_ = c.Signal(alone(ctx), pid, n)
			}
		case <-ctx.Done():
			return
		}
	}
}

// Start starts a background process and returns its PID; see sandboxer.ProcessManager. The process
// outlives the client; Attach follows it.
func (c *Client) Start(ctx context.Context, p sandboxer.ProcessSpec) (int, error) {
	// Not ctx itself: its deadline would be sent, and would become that of the process.
	streamCtx, cut, began := c.begin(context.WithoutCancel(ctx))
	defer began()
	defer cut()
	defer context.AfterFunc(ctx, cut)()
	req := startRequest(p)
	c.as(req.Header(), p.User)
	stream, err := c.proc.Start(streamCtx, req)
	if err != nil {
		return 0, c.streamError(ctx, streamCtx, err)
	}
	if !stream.Receive() && stream.Err() != nil {
		return 0, c.streamError(ctx, streamCtx, stream.Err())
	}
	start := stream.Msg().GetEvent().GetStart()
	if start == nil {
		return 0, unreadable(nil, "it does not report the process that it started")
	}
	return int(start.GetPid()), nil
}

// Attach follows a process to its end, also if it ended recently; see sandboxer.ProcessManager. When
// ctx is done, Attach returns and the process continues.
func (c *Client) Attach(ctx context.Context, pid int, s sandboxer.ProcessStreams) (sandboxer.Exit, error) {
	streamCtx, cut, began := c.begin(ctx)
	defer cut()
	req := connect.NewRequest(&pb.ConnectRequest{Process: pidSelector(pid)})
	if s.Replay {
		req.Header().Set(replayHeader, "true")
	}
	stream, err := c.proc.Connect(streamCtx, req)
	if err != nil {
		return sandboxer.Exit{}, c.streamError(ctx, streamCtx, err)
	}
	a := &attachment{c: c, ctx: ctx, stream: streamCtx, cut: cut, began: began, next: func() *pb.ProcessEvent {
		if !stream.Receive() {
			return nil
		}
		return stream.Msg().GetEvent()
	}, err: stream.Err, tty: func() bool { return stream.ResponseHeader().Get(ttyHeader) == "true" }}
	defer a.close(stream)
	return a.run(s, false)
}

// trailerTime is how long the end of a stream may take after the end of its process.
const trailerTime = time.Second

// close closes the stream. It reads a stream that has ended to the last byte first, so that its
// connection serves the next call: a new connection may need a process at the sandbox.
func (a *attachment) close(stream io.Closer) {
	defer time.AfterFunc(trailerTime, a.cut).Stop()
	if a.ended.Load() {
		_ = a.next()
	}
	_ = stream.Close()
}

func pidSelector(pid int) *pb.ProcessSelector {
	return &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: uint32(pid)}}
}

// Signal sends a signal, by its Linux number, to a process and its child processes; 9 also kills those
// that left its session. Kinds: NotFound when the process has ended.
func (c *Client) Signal(ctx context.Context, pid, signal int) error {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	_, err := c.proc.SendSignal(ctx, connect.NewRequest(&pb.SendSignalRequest{Process: pidSelector(pid), Signal: pb.Signal(signal)}))
	return c.rpcError(ctx, err)
}

// Resize changes the size of a process's terminal.
func (c *Client) Resize(ctx context.Context, pid int, size sandboxer.WinSize) error {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	_, err := c.proc.Update(ctx, connect.NewRequest(&pb.UpdateRequest{Process: pidSelector(pid), Pty: ptySize(size)}))
	return c.rpcError(ctx, err)
}

// SendInput writes to the input of a process, or to its terminal. It returns when the
// process's pipe has taken all of it.
func (c *Client) SendInput(ctx context.Context, pid int, data []byte, tty bool) error {
	in := &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: data}}
	if tty {
		in.Input = &pb.ProcessInput_Pty{Pty: data}
	}
	_, err := c.proc.SendInput(ctx, connect.NewRequest(&pb.SendInputRequest{Process: pidSelector(pid), Input: in}))
	return c.rpcError(ctx, err)
}

// CloseStdin ends the input of a process that has no terminal.
func (c *Client) CloseStdin(ctx context.Context, pid int) error {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	_, err := c.proc.CloseStdin(ctx, connect.NewRequest(&pb.CloseStdinRequest{Process: pidSelector(pid)}))
	return c.rpcError(ctx, err)
}

// Processes lists the running processes that Start started, oldest first. It leaves out their child
// processes.
func (c *Client) Processes(ctx context.Context) ([]sandboxer.Process, error) {
	ctx, cancel := within(ctx, c.wait.answer)
	defer cancel()
	res, err := c.proc.List(ctx, connect.NewRequest(&pb.ListRequest{}))
	if err != nil {
		return nil, c.rpcError(ctx, err)
	}
	var ps []sandboxer.Process
	for _, p := range res.Msg.GetProcesses() {
		cfg := p.GetConfig()
		ps = append(ps, sandboxer.Process{
			PID: int(p.GetPid()), Tag: p.GetTag(), Args: append([]string{cfg.GetCmd()}, cfg.GetArgs()...),
			Env: cfg.GetEnvs(), Dir: cfg.GetCwd(),
		})
	}
	return ps, nil
}
