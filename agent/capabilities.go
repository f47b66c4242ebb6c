package agent

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"iter"
	"maps"
	"net"
	"sync"

	"github.com/sand-boxer/sandboxer"
)

// Capabilities implements exec, files, archive, dial, stats, agent, processes and watch for adapters
// whose sandboxes have an agent. An adapter embeds it. If the adapter has a better way for a
// capability, its own method of the same name takes precedence.
type Capabilities struct {
	// Open prepares one call to the agent of h's sandbox. A command or a stream may last as long as its
	// caller likes. Kinds: NotFound when the sandbox is gone, Conflict when it is frozen, Unavailable
	// when it cannot be reached, Unsupported for one without an agent.
	Open func(ctx context.Context, h sandboxer.Handle, long bool) (Call, error)
}

// A Call is the access to the agent of one sandbox for one call.
type Call struct {
	Agent *Client
	Ctx   context.Context   // context of the call; it ends when the caller leaves
	Done  func(error) error // called once with the error of the call; returns the error for the caller. nil: no change
	// Why says why the sandbox cannot be used: that it is gone, paused, or cannot be reached. It returns nil
	// if the sandbox can be used, and is nil if nothing can say more than a failed call.
	Why func() error

	// Env, Dir and User are defaults for commands, if the agent was not started with them.
	Env       map[string]string
	Dir, User string
}

// The compiler checks that Capabilities implements these.
var _ interface {
	sandboxer.Execer
	sandboxer.Filer
	sandboxer.Archiver
	sandboxer.Dialer
	sandboxer.StatsReader
	sandboxer.AgentDialer
	sandboxer.ProcessManager
	sandboxer.Watcher
} = Capabilities{}

// End ends a call, which has to happen once. It returns the error for the caller: Done's or, if a missing
// sandbox may have caused that and the caller still waits, Why's.
func (c Call) End(err error) error {
	left := c.Ctx.Err() != nil
	if c.Done != nil {
		err = c.Done(err)
	}
	if left || c.Why == nil {
		return err
	}
	kind := sandboxer.KindOf(err)
	unreached := kind == sandboxer.Unavailable || kind == sandboxer.Timeout
	if !unreached && kind != sandboxer.NotFound && kind != sandboxer.Conflict {
		return err
	}
	why := c.Why()
	if kind := sandboxer.KindOf(why); kind == sandboxer.NotFound || kind == sandboxer.Conflict || why != nil && unreached {
		return why
	}
	return err
}

// with makes one call.
func with[T any](ctx context.Context, c Capabilities, h sandboxer.Handle, long bool, f func(Call) (T, error)) (out T, err error) {
	call, err := c.Open(ctx, h, long)
	if err != nil {
		return out, err
	}
	out, err = f(call)
	return out, call.End(err)
}

func (c Capabilities) do(ctx context.Context, h sandboxer.Handle, f func(Call) error) error {
	_, err := with(ctx, c, h, false, func(call Call) (struct{}, error) { return struct{}{}, f(call) })
	return err
}

// merged returns what a command gets: its own, over the sandbox's.
func (c Call) merged(env map[string]string) map[string]string {
	if len(c.Env) == 0 {
		return env
	}
	all := maps.Clone(c.Env)
	maps.Copy(all, env)
	return all
}

// Exec implements sandboxer.Execer.
func (c Capabilities) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	return with(ctx, c, h, true, func(call Call) (sandboxer.Exit, error) {
		cmd.Env = call.merged(cmd.Env)
		cmd.Dir, cmd.User = or(cmd.Dir, call.Dir), or(cmd.User, call.User)
		return call.Agent.Exec(call.Ctx, cmd)
	})
}

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// ReadFile implements sandboxer.Filer.
func (c Capabilities) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	call, err := c.Open(ctx, h, false)
	if err != nil {
		return nil, err
	}
	r, err := call.Agent.ReadFile(call.Ctx, name)
	if err != nil {
		return nil, call.End(err)
	}
	return &reading{ReadCloser: r, call: call}, nil
}

// reading ends its call when it is closed.
type reading struct {
	io.ReadCloser
	call Call
	once sync.Once
	err  error
}

func (r *reading) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		if r.ended(err); r.err != nil {
			err = r.err
		}
	}
	return n, err
}

func (r *reading) ended(err error) { r.once.Do(func() { r.err = r.call.End(err) }) }

func (r *reading) Close() error {
	err := r.ReadCloser.Close()
	r.ended(nil)
	return err
}

// WriteFile implements sandboxer.Filer.
func (c Capabilities) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	return c.do(ctx, h, func(call Call) error { return call.Agent.WriteFile(call.Ctx, name, mode, r) })
}

// StatFile implements sandboxer.Filer.
func (c Capabilities) StatFile(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
	return with(ctx, c, h, false, func(call Call) (sandboxer.FileInfo, error) { return call.Agent.StatFile(call.Ctx, name) })
}

// ListFiles implements sandboxer.Filer.
func (c Capabilities) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		left := false
		err := c.do(ctx, h, func(call Call) error {
			for fi, err := range call.Agent.ListFiles(call.Ctx, dir, after) {
				if err != nil {
					return err
				}
				if left = !yield(fi, nil); left {
					return nil
				}
			}
			return nil
		})
		if err != nil && !left {
			yield(sandboxer.FileInfo{}, err)
		}
	}
}

// MakeDir implements sandboxer.Filer.
func (c Capabilities) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return c.do(ctx, h, func(call Call) error { return call.Agent.MakeDir(call.Ctx, dir) })
}

// MoveFile implements sandboxer.Filer.
func (c Capabilities) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	return c.do(ctx, h, func(call Call) error { return call.Agent.MoveFile(call.Ctx, from, to) })
}

// RemoveFile implements sandboxer.Filer.
func (c Capabilities) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	return c.do(ctx, h, func(call Call) error { return call.Agent.RemoveFile(call.Ctx, name) })
}

// Archive implements sandboxer.Archiver.
func (c Capabilities) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	_, err := with(ctx, c, h, true, func(call Call) (struct{}, error) {
		return struct{}{}, call.Agent.Archive(call.Ctx, or(dir, call.Dir), w)
	})
	return err
}

// Unarchive implements sandboxer.Archiver.
func (c Capabilities) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
	_, err := with(ctx, c, h, true, func(call Call) (struct{}, error) {
		return struct{}{}, call.Agent.Unarchive(call.Ctx, or(dir, call.Dir), r)
	})
	return err
}

// Dial implements sandboxer.Dialer.
func (c Capabilities) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	return with(ctx, c, h, false, func(call Call) (net.Conn, error) { return call.Agent.Dial(call.Ctx, port) })
}

// Stats implements sandboxer.StatsReader.
func (c Capabilities) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	return with(ctx, c, h, false, func(call Call) (sandboxer.Stats, error) { return call.Agent.Stats(call.Ctx) })
}

// DialAgent implements sandboxer.AgentDialer.
func (c Capabilities) DialAgent(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	return with(ctx, c, h, false, func(call Call) (net.Conn, error) { return call.Agent.Connect(call.Ctx) })
}

// StartProcess implements sandboxer.ProcessManager.
func (c Capabilities) StartProcess(ctx context.Context, h sandboxer.Handle, p sandboxer.ProcessSpec) (int, error) {
	return with(ctx, c, h, false, func(call Call) (int, error) {
		p.Env = call.merged(p.Env)
		p.Dir, p.User = or(p.Dir, call.Dir), or(p.User, call.User)
		return call.Agent.Start(call.Ctx, p)
	})
}

// AttachProcess implements sandboxer.ProcessManager.
func (c Capabilities) AttachProcess(ctx context.Context, h sandboxer.Handle, pid int, s sandboxer.ProcessStreams) (sandboxer.Exit, error) {
	return with(ctx, c, h, true, func(call Call) (sandboxer.Exit, error) { return call.Agent.Attach(call.Ctx, pid, s) })
}

// ListProcesses implements sandboxer.ProcessManager.
func (c Capabilities) ListProcesses(ctx context.Context, h sandboxer.Handle) ([]sandboxer.Process, error) {
	return with(ctx, c, h, false, func(call Call) ([]sandboxer.Process, error) { return call.Agent.Processes(call.Ctx) })
}

// SignalProcess implements sandboxer.ProcessManager.
func (c Capabilities) SignalProcess(ctx context.Context, h sandboxer.Handle, pid, signal int) error {
	return c.do(ctx, h, func(call Call) error { return call.Agent.Signal(call.Ctx, pid, signal) })
}

// WatchFiles implements sandboxer.Watcher.
func (c Capabilities) WatchFiles(ctx context.Context, h sandboxer.Handle, dir string, recursive bool) (iter.Seq2[sandboxer.FileChange, error], error) {
	call, err := c.Open(ctx, h, true)
	if err != nil {
		return nil, err
	}
	w, err := call.Agent.Watch(call.Ctx, dir, recursive)
	if err != nil {
		return nil, call.End(err)
	}
	var once sync.Once
	end := func(err error) (told error) {
		told = err
		once.Do(func() { w.Close(); told = call.End(err) })
		return told
	}
	stop := context.AfterFunc(ctx, func() { _ = end(ctx.Err()) }) // also if the caller reads nothing
	return func(yield func(sandboxer.FileChange, error) bool) {
		defer func() { stop(); _ = end(nil) }()
		for {
			ch, err := w.Next()
			if err != nil {
				yield(sandboxer.FileChange{}, end(err))
				return
			}
			if !yield(ch, nil) {
				return
			}
		}
	}, nil
}
