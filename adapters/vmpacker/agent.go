package vmpacker

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// The agent is brought to a machine when it is asked for first, into the directory with what is
// remembered of the sandbox, and is removed with that. It runs as the account, with the
// sandbox's mark, and so ends with all else that carries it. Commands that end with their
// callers do without it: over SSH they are as quick.

const (
	agentFile   = "sandboxer-agent"
	agentSocket = "agent.sock"
	maxSocket   = 107 // bytes of the name of a Unix socket
)

// An agentClient is kept for the next calls.
type agentClient struct {
	*agent.Client
	bringing chan struct{} // held by who brings it
	brought  atomic.Bool
}

// agentDials is how many connections to one agent are opened at once.
const agentDials = 4

// openAgent is the way to the agent of h's sandbox for one call (agent.Capabilities).
func (e *extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) {
	p, err := e.one(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	if p.Kind == managed {
		if err := e.machineIs(p); err != nil {
			return agent.Call{}, err
		}
	}
	g, err := e.guest(p)
	if err != nil {
		return agent.Call{}, err
	}
	end := func(err error) error {
		switch sandboxer.KindOf(err) {
		case sandboxer.Unavailable, sandboxer.Timeout: // the sandbox may be gone, or its machine away
			if why := g.look(ctx); ctx.Err() == nil && why != nil {
				return why
			}
		}
		return err
	}
	return agent.Call{Agent: e.agentOf(p), Ctx: ctx, End: end, Dir: g.dir, User: p.User}, nil
}

// agentOf returns the client of the agent in p.
func (e *extension) agentOf(p *place) *agent.Client {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := e.agents[p.key()]; c != nil {
		return c.Client
	}
	c := &agentClient{bringing: make(chan struct{}, 1)}
	at := *p
	c.Client = agent.NewClient(agent.ClientOptions{IdleConns: 1, IdleTime: agentIdle, Dials: agentDials, Dial: func(ctx context.Context) (net.Conn, error) {
		g, err := e.guest(&at)
		if err != nil {
			return nil, err
		}
		known := c.brought.Load()
		conn, err := e.connectAgent(ctx, g, c)
		if known && sandboxer.KindOf(err) == sandboxer.Unsupported { // somebody inside removed it
			c.brought.Store(false)
			conn, err = e.connectAgent(ctx, g, c)
		}
		return conn, err
	}})
	e.agents[p.key()] = c
	return c.Client
}

// agentIdle is how long a connection waits for the next call: it takes one of the sessions that a
// server admits.
const agentIdle = 15 * time.Second

// connectAgent opens a connection to the agent, which is brought before if it is not there.
func (e *extension) connectAgent(ctx context.Context, g *guest, c *agentClient) (net.Conn, error) {
	if err := e.bringAgent(ctx, g, c); err != nil {
		return nil, err
	}
	return g.attachAgent(ctx)
}

// dropAgent ends the idle connections to the agent in p.
func (e *extension) dropAgent(p *place) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := e.agents[p.key()]; c != nil {
		c.Close()
		delete(e.agents, p.key())
	}
}

// attachAgent opens a connection to the agent, which it starts if it does not run.
func (g *guest) attachAgent(ctx context.Context) (net.Conn, error) {
	args := []string{g.rec, g.mark, "", path.Join(g.rec, agentFile), "attach", "--socket", path.Join(g.rec, agentSocket)}
	if g.user != "" { // whoever names nobody is the sandbox's user
		args = append(args, "--user", g.user)
	}
	return agent.DialAttached(ctx, func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		return g.host.Run(ctx, sshrun.Cmd{Script: fmt.Sprintf(enter, ""), Args: args, Dir: g.dir, Stdin: in, Stdout: out, Stderr: errs})
	}, args...)
}

// bringAgent brings the agent's program into the sandbox, unless it is there: one that runs,
// which another build may have brought, is let in by its own program only.
func (e *extension) bringAgent(ctx context.Context, g *guest, c *agentClient) error {
	if len(path.Join(g.rec, agentSocket)) > maxSocket {
		return sandboxer.E(sandboxer.Unsupported, nil, "the agent has no place on %s: the path %s is too long for a socket", g.host.Name(), g.rec).
			WithHint("choose a shorter workspace_dir")
	}
	select {
	case c.bringing <- struct{}{}:
		defer func() { <-c.bringing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if c.brought.Load() {
		return nil
	}
	file := path.Join(g.rec, agentFile)
	out, err := g.host.Output(ctx, `[ -e "$1/ready" ] || exit 119; uname -s -m; [ ! -f "$2" ] || echo there`, g.rec, file)
	if x, _, ok := sshrun.ExitOf(err); ok && x.Code == goneCode {
		if gone := g.look(ctx); gone != nil {
			return gone
		}
	}
	if err != nil {
		return err
	}
	system, rest, _ := strings.Cut(string(out), "\n")
	if rest == "" {
		arch, ok := map[string]string{"Linux x86_64": "amd64", "Linux aarch64": "arm64", "Linux arm64": "arm64"}[system]
		if !ok {
			return sandboxer.E(sandboxer.Unsupported, nil, "there is no agent for %s, which is %s", g.host.Name(), sshrun.Plain(system))
		}
		prog, err := e.agentProgram(arch)
		if err != nil {
			return sandboxer.E(sandboxer.Unsupported, err, "%s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
		}
		f, err := os.Open(prog.Path)
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "the program of the agent cannot be read")
		}
		defer f.Close()
		sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "bringing sandboxer-agent to " + g.host.Name()})
		if err := g.host.WriteFile(ctx, file, 0o755, f); err != nil {
			return err
		}
	}
	c.brought.Store(true)
	return nil
}

func (e *extension) agentProgram(arch string) (program.Program, error) {
	return e.programs.Find(agentFile, arch, e.cfg.Agent)
}
