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
		err = sandboxer.E(sandboxer.Unsupported, err, "%s gives no access to the agents of its sandboxes", p.name).WithHint("its version is too old: ask its operator to upgrade")
	}
	return nil, err
}

// agentCall is the way to the agent of a sandbox for one call. The other installation's record of the sandbox fills in
// what the agent does not know of processes.
func (p *peer) agentCall(ctx context.Context, h sandboxer.Handle) (agent.Call, error) {
	sb, err := p.running(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	// An idle connection would count as use of the sandbox there.
	c := agent.NewClient(agent.ClientOptions{User: sb.User, IdleConns: -1, Dial: func(ctx context.Context) (net.Conn, error) { return p.dialAgent(ctx, h, sb) }})
	done := func(err error) error { c.Close(); return err }
	why := func() error { return p.state(ctx, h) } // the sandbox may have ended, or be paused
	return agent.Call{Agent: c, Ctx: ctx, Done: done, Why: why, Dir: sb.Workspace, User: sb.User}, nil
}

// state says why a sandbox cannot be used: it is gone, or does not run. nil: it runs, or that is not known.
func (p *peer) state(ctx context.Context, h sandboxer.Handle) error {
	switch sb, gone := p.running(ctx, h); {
	case sandboxer.KindOf(gone) == sandboxer.NotFound:
		return gone
	case gone == nil && sb.State != sandboxer.Running:
		return sandboxer.E(sandboxer.Conflict, nil, "%s: sandbox %s is %s", p.name, sb.ID, sb.State).WithHint("try again when it runs")
	}
	return nil
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

var errNoAgent = sandboxer.E(sandboxer.Unsupported, nil, "the sandboxes of the other installation's extension have no agent")
