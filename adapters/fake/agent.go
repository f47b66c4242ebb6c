package fake

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
)

// agentQuery asks for the agent of a sandbox, which runs program.
type agentQuery struct {
	Of      query
	Program string
}

// agentTime is how long an agent may take to listen, on a machine with other work.
const agentTime = time.Minute

// agent starts the agent of o, unless it runs, and returns the socket that it listens on.
// It is a process of the sandbox as all others are: paused and ended with it.
func (w *World) agent(ctx context.Context, q agentQuery) (socket string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.burn()
	o, err := w.newest(q.Of)
	if err != nil {
		return "", err
	}
	if o.OOMKilled {
		return "", sandboxer.E(sandboxer.NotFound, nil, "sandbox %s used more memory than its limit and was killed", q.Of.ID)
	}
	if err := running(*o); err != nil {
		return "", err
	}
	if o.Agent != "" {
		return o.Agent, nil
	}
	if err := o.use(); err != nil {
		return "", err
	}
	w.agents++
	socket = filepath.Join(w.base, "agent"+strconv.Itoa(w.agents))
	own := *o
	own.Spec.User = "" // it runs what others run
	c, err := newCommand(own, sandboxer.Cmd{Args: []string{q.Program, "init", "--listen", "unix:" + socket, "--workdir", o.workspace()}})
	if se := (*sandboxer.StartError)(nil); errors.As(err, &se) {
		return "", sandboxer.E(sandboxer.Unsupported, se, "the agent could not be started: %v", se)
	}
	if err != nil {
		return "", err
	}
	if err := c.start(); err != nil {
		return "", sandboxer.E(sandboxer.Unavailable, err, "the agent %s could not be started", q.Program)
	}
	ended := make(chan struct{})
	w.wg.Go(func() {
		_ = c.proc.Wait()
		close(ended)
		w.mu.Lock()
		defer w.mu.Unlock()
		if o.Agent == socket {
			o.Agent = "" // the next call starts another
		}
		_ = os.Remove(socket)
	})
	ctx, cancel := context.WithTimeout(ctx, agentTime)
	defer cancel()
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if err == nil {
			conn.Close()
			o.Agent = socket
			return socket, nil
		}
		select {
		case <-ctx.Done():
			_ = c.proc.Process.Kill() // or each call would leave one
			return "", sandboxer.E(sandboxer.Unavailable, err, "the agent %s does not listen", q.Program)
		case <-ended:
			return "", sandboxer.E(sandboxer.Unavailable, err, "the agent %s ended at once", q.Program)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// openAgent is the way to the agent of a sandbox for one call.
func (e *Extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (c agent.Call, err error) {
	err = e.call(ctx, VerbAgent, h.SandboxID, func(Fault) error {
		o, err := e.use(ctx, h)
		if err != nil {
			return err
		}
		socket, err := e.world.agent(ctx, agentQuery{e.query(h), e.cfg.Agent})
		if err != nil {
			return err
		}
		c = agent.Call{Agent: e.agentAt(o, socket), Ctx: ctx, Env: o.Env, Dir: o.workspace(), User: o.Spec.User}
		return nil
	})
	return c, err
}

func (e *Extension) agentAt(o Object, socket string) *agent.Client {
	return e.agents.Get(o.Ref, socket, agent.ClientOptions{User: o.Spec.User, Dial: func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}})
}
