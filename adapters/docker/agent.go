package docker

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/inside"
)

const (
	agentFile   = "sandboxer-agent"
	agentDir    = inside.AgentDir // mount point of the volume in containers
	agentPath   = inside.AgentPath
	agentSocket = "@sandboxer-agent"
	agentUser   = "0:0" // its socket accepts no other user

	// agentIdle is how long an idle connection is kept: it takes a process in the container.
	// There is at most one.
	agentIdle = time.Minute
	// agentDials is how many connections to one agent are opened at once; further calls wait.
	agentDials = 8
	// connectTime is how long opening a connection may take.
	connectTime = time.Minute
	// maxHung is how many connections to one agent in a row may hang; then only one is tried now and then.
	maxHung = 3
)

// agentIn returns the client of the agent in a container.
func (e *extension) agentIn(b *box) *agent.Client {
	return e.agents.Get(e.name(b.id, b.generation), b.container, agent.ClientOptions{
		IdleConns: 1, IdleTime: agentIdle, Dials: agentDials, DialsWait: true, MaxHung: maxHung,
		Dial: func(ctx context.Context) (net.Conn, error) { return e.connect(ctx, b.host, b.container) },
	})
}

// connect opens a connection to an agent. If the container's processes are on this machine, it bypasses the engine (reach).
// Otherwise it is a command that the engine starts. Before that, an engine reads the container's /etc/passwd and /etc/group into its
// own memory, for every user. At a named pipe that root inside has put there it waits forever. (For a container without a user
// Docker's engine does not read them. But then the runtime waits at the pipe while the engine holds a lock that destroying the
// container needs.) Podman can be asked about the files before, which opens nothing. Docker's engine would mount the container's
// volumes for that, at places that root inside can redirect. There the number of connections that hang is bounded
// (agent.ClientOptions.MaxHung).
func (e *extension) connect(ctx context.Context, h *host, container string) (net.Conn, error) {
	within, done, err := h.api.Attend(ctx)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(within, e.connectTime)
	defer cancel()
	if conn, err := e.reach(limited, h, container); !errors.Is(err, engine.ErrElsewhere) {
		return conn, done(err)
	}
	info, err := h.look(within)
	if info.Podman {
		var file, wrong string
		if file, wrong, err = h.unreadable(within, container); wrong != "" {
			err = sandboxer.E(sandboxer.Failed, nil, "root inside the sandbox has changed %s: it is %s, and the engine %s would read all of it", file, wrong, h.name).
				WithHint("destroy the sandbox; what is outside of it is not harmed")
		}
	}
	if err != nil {
		return nil, done(err)
	}
	conn, err := agent.DialAttached(limited, func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		return h.api.Exec(ctx, container, agentUser, args, in, out, errs)
	}, agentPath, "connect", "--socket="+agentSocket, "--pid=1")
	return conn, done(err)
}

// reach connects to the agent of a container whose processes are on this machine: it enters the container's network, where the agent's socket is. The engine reads
// nothing of the container. The error is engine.ErrElsewhere if this is not possible: the engine is on another machine, this process does not have root's rights, or
// another kernel than this machine's has the socket, as with gVisor.
func (e *extension) reach(ctx context.Context, h *host, container string) (net.Conn, error) {
	if h.socket == "" {
		return nil, engine.ErrElsewhere
	}
	c, err := h.api.InspectContainer(ctx, container)
	switch {
	case err != nil:
		return nil, err
	case c.State.Paused:
		return nil, sandboxer.E(sandboxer.Conflict, nil, "the sandbox is paused")
	case !c.State.Running:
		return nil, sandboxer.E(sandboxer.NotFound, nil, "the sandbox has ended")
	}
	first, err := h.here(c)
	if err != nil {
		return nil, engine.ErrElsewhere
	}
	defer first.Close()
	return first.Dial(ctx, agentPath, agentSocket)
}

// running returns the sandbox of h, which must run. Kinds: NotFound for one that is gone or has ended,
// Conflict for one that is paused.
func (e *extension) running(ctx context.Context, h sandboxer.Handle) (*box, error) {
	b, err := e.find(ctx, h)
	if err == nil {
		err = e.runs(ctx, b)
	}
	return b, err
}

// lives is runs for operations that a paused sandbox supports, too.
func (e *extension) lives(ctx context.Context, b *box) error {
	if b.state == "paused" {
		return b.unread
	}
	return e.runs(ctx, b)
}

func (e *extension) runs(ctx context.Context, b *box) error {
	switch b.state {
	case "running":
		return b.unread
	case "paused":
		return sandboxer.E(sandboxer.Conflict, nil, "sandbox %s is paused", b.id).WithHint("resume it: sandboxer resume %s", b.id)
	}
	c, err := b.host.api.InspectContainer(ctx, b.container)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound:
		return sandboxer.E(sandboxer.NotFound, err, "there is no sandbox %s", b.id)
	case err != nil:
		return err
	case c.State.Running && !c.State.Paused: // it has started meanwhile
		return b.unread
	case outOfMemory(c):
		return sandboxer.E(sandboxer.NotFound, nil, "sandbox %s used more memory than its limit and was killed", b.id)
	}
	return sandboxer.E(sandboxer.NotFound, nil, "sandbox %s has ended (its container is %s, code %d)", b.id, c.State.Status, c.State.ExitCode)
}

// outOfMemory reports whether the memory limit killed the whole container. The engine records any such kill; the
// agent has another exit code unless it was killed itself.
func outOfMemory(c engine.ContainerDetail) bool {
	return !c.State.Running && c.State.OOMKilled && c.State.ExitCode == 137
}

// openAgent connects one call to the agent of h's sandbox (agent.Capabilities). It asks the engine first: in a
// paused sandbox the call would wait.
func (e *extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) {
	b, err := e.running(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	if err := e.await(ctx, b); err != nil {
		return agent.Call{}, err
	}
	return e.call(ctx, b)
}

// call connects one call to the agent of a running sandbox.
func (e *extension) call(ctx context.Context, b *box) (agent.Call, error) {
	within, done, err := b.host.api.Attend(ctx)
	if err != nil {
		return agent.Call{}, err
	}
	why := func() error { _, err := e.running(ctx, e.handle(b)); return err } // the container may have ended, or be paused
	return agent.Call{Agent: e.agentIn(b), Ctx: within, Done: done, Why: why, Dir: b.made.Workspace, User: b.made.User}, nil
}
