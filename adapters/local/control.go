//go:build linux

package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/sandbox"
)

// A controller calls a sandbox's kernel over its control socket. It reimplements gVisor's
// urpc for what gVisor's own client lacks: calls end with their context, and a waiting
// call, which may last for days, takes no thread of this process but only a goroutine.
type controller struct {
	sb   *sandbox.Sandbox
	name string
	d    net.Dialer
	turn chan struct{} // held by the call that retries to enter the kernel's queue
}

func newController(sb *sandbox.Sandbox, name string) *controller {
	return &controller{sb: sb, name: name, turn: make(chan struct{}, 1)}
}

// maxAnswer bounds the answer of the kernel inside: programs that run in it are not
// trusted.
const maxAnswer = 16 << 20

// A remoteError is an error from the kernel inside. Other errors of a call mean that it did
// not answer.
type remoteError string

func (e remoteError) Error() string { return string(e) }

// call calls method with arg, passes files along, and stores the answer in result. After
// the end of ctx the kernel may still carry out the call.
func (c *controller) call(ctx context.Context, method string, arg, result any, files ...*os.File) error {
	conn, err := c.ask(ctx, method, arg, files)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	return c.answer(ctx, method, conn, result)
}

// ask begins a call.
func (c *controller) ask(ctx context.Context, method string, arg any, files []*os.File) (*net.UnixConn, error) {
	request, err := json.Marshal(struct {
		Method string `json:"method"`
		Arg    any    `json:"arg"`
	}{method, arg})
	if err != nil {
		return nil, err
	}
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("connecting to the sandbox's kernel: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err = send(conn, request, files)
	if !stop() && ctx.Err() != nil && err != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("%s: %w", method, err)
	}
	return conn, nil
}

// answer waits for the end of a call.
func (c *controller) answer(ctx context.Context, method string, conn *net.UnixConn, result any) error {
	err := receive(conn, result)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if _, ok := errors.AsType[remoteError](err); ok {
		return err
	}
	return fmt.Errorf("%s: %w", method, err)
}

func send(conn *net.UnixConn, request []byte, files []*os.File) error {
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd()) // this makes it blocking, as a program inside expects
		}
		rights = unix.UnixRights(fds...)
	}
	n, _, err := conn.WriteMsgUnix(request, rights, nil)
	runtime.KeepAlive(files)
	if err == nil && n < len(request) {
		_, err = conn.Write(request[n:])
	}
	return err
}

func receive(conn *net.UnixConn, result any) error {
	answer := struct {
		Success bool   `json:"success"`
		Err     string `json:"err"`
		Result  any    `json:"result"`
	}{Result: result}
	// Files in answers are unwanted; a read that does not take them drops them.
	if err := json.NewDecoder(io.LimitReader(conn, maxAnswer)).Decode(&answer); err != nil {
		return err
	}
	if !answer.Success {
		return remoteError(answer.Err)
	}
	return nil
}

// connect waits for room in the short queue of the control socket. Only one call waits at a
// time.
func (c *controller) connect(ctx context.Context) (*net.UnixConn, error) {
	path := c.sb.GetControlSocketPath()
	if path == "" {
		return nil, os.ErrNotExist
	}
	if len(path) >= unixPathMax {
		f, err := os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		path = fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	}
	first := true
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		conn, err := c.d.DialContext(ctx, "unix", path)
		switch {
		case err == nil:
			return conn.(*net.UnixConn), nil
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case !errors.Is(err, unix.EAGAIN):
			return nil, err
		}
		if first {
			select {
			case c.turn <- struct{}{}:
				defer func() { <-c.turn }()
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
			first = false
			continue
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

const unixPathMax = 108

// The calls that this package uses, each with its answer. They start, signal and read in
// the sandbox's own container.

func (c *controller) execute(ctx context.Context, args *control.ExecArgs) (pid int32, err error) {
	args.ContainerID = c.name
	err = c.call(ctx, boot.ContMgrExecuteAsync, args, &pid, args.Files...)
	return pid, err
}

func (c *controller) waitPID(ctx context.Context, pid int32) (ws unix.WaitStatus, err error) {
	err = c.call(ctx, boot.ContMgrWaitPID, &boot.WaitPIDArgs{PID: pid, CID: c.name}, &ws)
	return ws, err
}

// awaitPID is waitPID for a process that may run for days: after the request, p waits for
// the answer. done is called once; the end of ctx is an error, and ends the wait.
func (c *controller) awaitPID(ctx context.Context, p *poller, pid int32, done func(unix.WaitStatus, error)) {
	conn, err := c.ask(ctx, boot.ContMgrWaitPID, &boot.WaitPIDArgs{PID: pid, CID: c.name}, nil)
	if err != nil {
		done(0, err)
		return
	}
	var w *watch
	armed := make(chan struct{})
	var once sync.Once
	end := func(ws unix.WaitStatus, err error) {
		once.Do(func() {
			<-armed
			if w != nil {
				w.stop()
			}
			conn.Close()
			done(ws, err)
		})
	}
	answer := func() {
		var ws unix.WaitStatus
		err := c.answer(ctx, boot.ContMgrWaitPID, conn, &ws)
		end(ws, err)
	}
	context.AfterFunc(ctx, func() {
		_ = conn.SetDeadline(time.Unix(1, 0)) // interrupts an answer that has begun
		end(0, fmt.Errorf("%s: %w", boot.ContMgrWaitPID, context.Cause(ctx)))
	})
	if w, err = p.watch(conn, answer); err == nil {
		err = w.arm()
	}
	close(armed)
	if err != nil {
		answer()
	}
}

func (c *controller) signal(ctx context.Context, pid int32, sig unix.Signal) error {
	return c.call(ctx, boot.ContMgrSignal, &boot.SignalArgs{CID: c.name, Signo: int32(sig), PID: pid, Mode: boot.DeliverToProcess}, nil)
}

func (c *controller) signalAll(ctx context.Context, sig unix.Signal) error {
	return c.call(ctx, boot.ContMgrSignal, &boot.SignalArgs{CID: c.name, Signo: int32(sig), Mode: boot.DeliverToAllProcesses}, nil)
}

func (c *controller) processes(ctx context.Context) (out []*control.Process, err error) {
	err = c.call(ctx, boot.ContMgrProcesses, &c.name, &out)
	return out, err
}

func (c *controller) pause(ctx context.Context) error {
	return c.call(ctx, boot.ContMgrPause, nil, nil)
}

func (c *controller) resume(ctx context.Context) error {
	return c.call(ctx, boot.ContMgrResume, nil, nil)
}

// state is that of the sandbox's first process. The kernel answers it only when it can also
// start commands.
func (c *controller) state(ctx context.Context) (state boot.ContainerRuntimeState, err error) {
	err = c.call(ctx, boot.ContMgrContainerRuntimeState, &c.name, &state)
	return state, err
}

func (c *controller) ping(ctx context.Context) error { _, err := c.state(ctx); return err }

// readFile writes at most size bytes of a file inside to w.
func (c *controller) readFile(ctx context.Context, path string, size int64, w *os.File) error {
	return c.call(ctx, boot.FsRead, &control.ReadOpts{ContainerID: c.name, Path: path, Size: size}, nil, w)
}
