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

// Capabilities is embedded by adapters that have an agent in their sandboxes. It fulfils
// what the agent can do: exec, files, archive, dial, stats, agent, processes and watch. An adapter with something better of its own has a method of the same
// name, which wins.
type Capabilities struct {
	// Open opens the way to the agent of h's sandbox for one call. A long call may last
	// as long as its caller likes: a command, a stream. Kinds: NotFound when the sandbox is
	// gone, Conflict when it is frozen, Unavailable when it cannot be reached, Unsupported
	// for one without an agent.
	Open func(ctx context.Context, h sandboxer.Handle, long bool) (Call, error)
}

// A Call is the way to the agent of one sandbox, for one call.
type Call struct {
	Agent *Client
	Ctx   context.Context   // under which the call is made
	End   func(error) error // called once, with how the call ended; returns what the caller is told. nil: the same

	// What commands get that name nothing else, where the agent was not started with it.
	Env       map[string]string
	Dir, User string
}

// The compiler checks what is promised.
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

func (c Call) end(err error) error {
	if c.End == nil {
		return err
	}
	return c.End(err)
}

// with makes one call.
func with[T any](ctx context.Context, c Capabilities, h sandboxer.Handle, long bool, f func(Call) (T, error)) (out T, err error) {
	call, err := c.Open(ctx, h, long)
	if err != nil {
		return out, err
	}
	out, err = f(call)
	return out, call.end(err)
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
		return nil, call.end(err)
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

func (r *reading) ended(err error) { r.once.Do(func() { r.err = r.call.end(err) }) }

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
		return nil, call.end(err)
	}
	var once sync.Once
	end := func(err error) (told error) {
		told = err
		once.Do(func() { w.Close(); told = call.end(err) })
		return told
	}
	stop := context.AfterFunc(ctx, func() { _ = end(ctx.Err()) }) // also if nobody takes anything of it
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
