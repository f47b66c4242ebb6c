package backend

import (
	"context"
	"iter"
	"net"
	"path"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// DialAgent opens a connection to the agent inside the sandbox; see
// sandboxer.AgentDialer. The caller closes it.
func (b *Backend) DialAgent(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	if b.agent == nil {
		return nil, b.cannot(sandboxer.CanAgent)
	}
	return call(ctx, b, "dial_agent", b.opts.Short, func(ctx context.Context) (net.Conn, error) { return b.agent.DialAgent(ctx, h) })
}

// maxProcesses and maxArguments bound what a sandbox may report about its processes.
const (
	maxProcesses = 100_000
	maxArguments = 2 << 20 // bytes of one command line, as Linux bounds it
)

// StartProcess starts a process that outlives the call; see sandboxer.ProcessManager.
func (b *Backend) StartProcess(ctx context.Context, h sandboxer.Handle, p sandboxer.ProcessSpec) (pid int, err error) {
	if b.processes == nil {
		return 0, b.cannot(sandboxer.CanProcesses)
	}
	if err := checkCmd(sandboxer.Cmd{Args: p.Args, Env: p.Env, Dir: p.Dir, TTY: p.TTY}); err != nil {
		return 0, err
	}
	if len(p.Tag) > sandboxer.MaxProcessTag || strings.ContainsRune(p.Tag, 0) {
		return 0, sandboxer.E(sandboxer.Invalid, nil, "the tag of a process has at most %d bytes, and no NUL byte", sandboxer.MaxProcessTag)
	}
	pid, err = call(ctx, b, "start_process", b.opts.Short, func(ctx context.Context) (int, error) { return b.processes.StartProcess(ctx, h, p) })
	if err == nil && pid < 1 {
		err = sandboxer.E(sandboxer.Failed, nil, "the sandbox reports an impossible process ID: %d", pid)
	}
	return pid, err
}

// AttachProcess follows a process to its end; see sandboxer.ProcessManager.
func (b *Backend) AttachProcess(ctx context.Context, h sandboxer.Handle, pid int, s sandboxer.ProcessStreams) (sandboxer.Exit, error) {
	if err := b.process(pid); err != nil {
		return sandboxer.Exit{}, err
	}
	g := &gate{}
	defer g.shut()
	s.Stdin, s.Stdout, s.Stderr = g.reader(s.Stdin), g.writer(s.Stdout), g.writer(s.Stderr)
	return call(ctx, b, "attach_process", 0, func(ctx context.Context) (sandboxer.Exit, error) { return b.processes.AttachProcess(ctx, h, pid, s) })
}

// ListProcesses lists what StartProcess started. An impossible answer of a sandbox is
// Failed.
func (b *Backend) ListProcesses(ctx context.Context, h sandboxer.Handle) ([]sandboxer.Process, error) {
	if b.processes == nil {
		return nil, b.cannot(sandboxer.CanProcesses)
	}
	list, err := call(ctx, b, "list_processes", b.opts.Short, func(ctx context.Context) ([]sandboxer.Process, error) { return b.processes.ListProcesses(ctx, h) })
	if err != nil {
		return nil, err
	}
	if len(list) > maxProcesses {
		return nil, sandboxer.E(sandboxer.Failed, nil, "the sandbox lists more than %d processes", maxProcesses)
	}
	for _, p := range list {
		size := len(p.Dir) + len(p.Tag)
		for _, a := range p.Args {
			size += len(a)
		}
		if p.PID < 1 || size > maxArguments {
			return nil, sandboxer.E(sandboxer.Failed, nil, "the sandbox lists an impossible process: ID %d, with a description of %d bytes", p.PID, size)
		}
	}
	return list, nil
}

// SignalProcess sends a signal to a process and what it started.
func (b *Backend) SignalProcess(ctx context.Context, h sandboxer.Handle, pid, signal int) error {
	if err := b.process(pid); err != nil {
		return err
	}
	if signal < 1 || signal > 64 {
		return sandboxer.E(sandboxer.Invalid, nil, "%d is not a signal: want 1 to 64", signal)
	}
	return do(ctx, b, "signal_process", b.opts.Short, func(ctx context.Context) error { return b.processes.SignalProcess(ctx, h, pid, signal) })
}

func (b *Backend) process(pid int) error {
	if b.processes == nil {
		return b.cannot(sandboxer.CanProcesses)
	}
	if pid < 1 || pid > 1<<31-1 {
		return sandboxer.E(sandboxer.Invalid, nil, "%d is not the ID of a process", pid)
	}
	return nil
}

// WatchFiles reports changes of files below dir from its return on, until ctx is done or
// the sequence is left; the caller must take it, or end ctx. An impossible answer of the
// sandbox, or a file that is not below dir, ends it.
func (b *Backend) WatchFiles(ctx context.Context, h sandboxer.Handle, dir string, recursive bool) (iter.Seq2[sandboxer.FileChange, error], error) {
	if b.watch == nil {
		return nil, b.cannot(sandboxer.CanWatch)
	}
	if err := checkPath(dir); err != nil {
		return nil, err
	}
	return news(ctx, b, "watch_files", func(ctx context.Context) (iter.Seq2[sandboxer.FileChange, error], error) {
		return b.watch.WatchFiles(ctx, h, dir, recursive)
	}, func(ch *sandboxer.FileChange) error { return checkChange(dir, ch) })
}

// Notify yields the IDs of sandboxes to which something may have happened, from its return on, until ctx is
// done or the sequence is left; see sandboxer.Notifier. An invalid ID ends it.
func (b *Backend) Notify(ctx context.Context, owner string) (iter.Seq2[string, error], error) {
	if b.notify == nil {
		return nil, b.cannot(sandboxer.CanNotify)
	}
	return news(ctx, b, "notify", func(ctx context.Context) (iter.Seq2[string, error], error) {
		return b.notify.Notify(ctx, owner)
	}, func(id *string) error { return sandboxer.CheckID(*id) })
}

// news is call for methods that answer soon and then yield values, which are checked one by one.
func news[T any](ctx context.Context, b *Backend, op string, f func(context.Context) (iter.Seq2[T, error], error), check func(*T) error) (iter.Seq2[T, error], error) {
	// It lasts longer than the call that begins it, and has a context of its own.
	lasting, stop := context.WithCancel(ctx)
	begun, err := call(ctx, b, op, b.opts.Short, func(ctx context.Context) (iter.Seq2[T, error], error) {
		inTime := context.AfterFunc(ctx, stop)
		seq, err := f(lasting)
		if !inTime() { // what it says is that it was stopped
			err = ctx.Err()
		}
		return seq, err
	})
	if err != nil {
		stop()
		return nil, err
	}
	return func(yield func(T, error) bool) {
		defer stop()
		for v, err := range begun {
			if err == nil {
				err = check(&v)
			} else {
				err = b.discreet(ctx, op, b.classify(ctx, op, 0, err))
			}
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			if !yield(v, nil) {
				return
			}
		}
	}, nil
}

func checkChange(dir string, ch *sandboxer.FileChange) error {
	inside := ch.Path == dir || dir == "/" || strings.HasPrefix(ch.Path, dir+"/")
	known := false
	for _, op := range sandboxer.FileOps() {
		known = known || op == ch.Op
	}
	if checkPath(ch.Path) != nil || len(ch.Path) > 1<<15 || !inside || !known {
		return sandboxer.E(sandboxer.Failed, nil, "the sandbox reports an impossible change in %s: %.20q of %.100q", dir, ch.Op, ch.Path)
	}
	if ch.File == nil {
		return nil
	}
	if path.Base(ch.File.Path) != path.Base(ch.Path) {
		return sandboxer.E(sandboxer.Failed, nil, "the sandbox reports a change of %.100q with a description of %.100q", ch.Path, ch.File.Path)
	}
	return checkFile(ch.File)
}
