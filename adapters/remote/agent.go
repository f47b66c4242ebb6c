package remote

import (
	"context"
	"io"
	"iter"
	"net"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/api"
)

// DialAgent implements sandboxer.AgentDialer.
func (p *peer) DialAgent(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	sb, err := p.running(ctx, h)
	if err != nil {
		return nil, err
	}
	return p.dialAgent(ctx, h, sb)
}

func (p *peer) dialAgent(ctx context.Context, h sandboxer.Handle, sb *api.Sandbox) (net.Conn, error) {
	h.Ref = sb.ID
	c, err := use(ctx, p, h, func(ref string) (net.Conn, error) { return p.client.DialAgent(ctx, ref) })
	if sandboxer.KindOf(err) != sandboxer.NotFound {
		return c, err
	}
	if _, gone := p.running(ctx, h); gone == nil { // it is there, and what was asked for is not
		err = sandboxer.E(sandboxer.Unsupported, err, "%s does not lead to the agents of its sandboxes", p.name).WithHint("it is of an older version: an operator there installs a newer one")
	}
	return nil, err
}

// agentCall is the way to the agent of a sandbox for one call. What it does not know of processes is what the other
// installation says of the sandbox.
func (p *peer) agentCall(ctx context.Context, h sandboxer.Handle) (agent.Call, error) {
	sb, err := p.running(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	// A connection that waits for the next call would be a use of the sandbox there.
	c := agent.NewClient(agent.ClientOptions{User: sb.User, IdleConns: -1, Dial: func(ctx context.Context) (net.Conn, error) { return p.dialAgent(ctx, h, sb) }})
	end := func(err error) error {
		c.Close()
		switch sandboxer.KindOf(err) {
		case sandboxer.NotFound, sandboxer.Conflict, sandboxer.Unavailable, sandboxer.Timeout: // the sandbox may have ended, or stand still
			if ctx.Err() == nil {
				err = p.state(ctx, h, err)
			}
		}
		return err
	}
	return agent.Call{Agent: c, Ctx: ctx, End: end, Dir: sb.Workspace, User: sb.User}, nil
}

// state is what the state of a sandbox says of a call that failed with err: that it is gone, or stands still; else it is err.
func (p *peer) state(ctx context.Context, h sandboxer.Handle, err error) error {
	switch sb, gone := p.running(ctx, h); {
	case sandboxer.KindOf(gone) == sandboxer.NotFound:
		return gone
	case gone == nil && sb.State != sandboxer.Running:
		return sandboxer.E(sandboxer.Conflict, err, "%s: sandbox %s is %s", p.name, sb.ID, sb.State).WithHint("ask again once it runs")
	}
	return err
}

// agents are the calls that are made to the agent itself.
func (p *peer) agents() agent.Capabilities {
	return agent.Capabilities{Open: func(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) { return p.agentCall(ctx, h) }}
}

// StartProcess implements sandboxer.ProcessManager.
func (p *peer) StartProcess(ctx context.Context, h sandboxer.Handle, s sandboxer.ProcessSpec) (int, error) {
	return p.agents().StartProcess(ctx, h, s)
}

// AttachProcess implements sandboxer.ProcessManager.
func (p *peer) AttachProcess(ctx context.Context, h sandboxer.Handle, pid int, s sandboxer.ProcessStreams) (sandboxer.Exit, error) {
	return p.agents().AttachProcess(ctx, h, pid, s)
}

// ListProcesses implements sandboxer.ProcessManager.
func (p *peer) ListProcesses(ctx context.Context, h sandboxer.Handle) ([]sandboxer.Process, error) {
	return p.agents().ListProcesses(ctx, h)
}

// SignalProcess implements sandboxer.ProcessManager.
func (p *peer) SignalProcess(ctx context.Context, h sandboxer.Handle, pid, signal int) error {
	return p.agents().SignalProcess(ctx, h, pid, signal)
}

// WatchFiles implements sandboxer.Watcher.
func (p *peer) WatchFiles(ctx context.Context, h sandboxer.Handle, dir string, recursive bool) (iter.Seq2[sandboxer.FileChange, error], error) {
	return p.agents().WatchFiles(ctx, h, dir, recursive)
}

// Archive implements sandboxer.Archiver. Without an agent there it is done by way of commands.
func (p *peer) Archive(ctx context.Context, h sandboxer.Handle, dir string, w io.Writer) error {
	if !p.has(sandboxer.CanAgent) {
		return errNoAgent
	}
	return p.agents().Archive(ctx, h, dir, w)
}

// Unarchive implements sandboxer.Archiver.
func (p *peer) Unarchive(ctx context.Context, h sandboxer.Handle, dir string, r io.Reader) error {
	if !p.has(sandboxer.CanAgent) {
		return errNoAgent
	}
	return p.agents().Unarchive(ctx, h, dir, r)
}

var errNoAgent = sandboxer.E(sandboxer.Unsupported, nil, "the extension of the other installation has no agent in its sandboxes")
