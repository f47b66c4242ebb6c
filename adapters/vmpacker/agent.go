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

// The agent is copied to a machine when it is first needed, into the directory with the sandbox's
// data, and is removed with that. It runs as the account, with the sandbox's mark, and so ends
// with all other marked processes. Commands that end with their callers do not use it: over SSH
// they are as fast.

const (
	agentFile   = "sandboxer-agent"
	agentSocket = "agent.sock"
	maxSocket   = 107 // bytes of the name of a Unix socket
)

// A supply says whether the program of the agent is in a sandbox.
type supply struct {
	bringing chan struct{} // holds a value while a call brings it
	brought  atomic.Bool
}

// agentDials is how many connections to one agent are opened at once.
const agentDials = 4

// openAgent connects one call to the agent of h's sandbox (agent.Capabilities).
func (e *extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) {
	p, err := e.one(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	if p.Kind == managed {
		if err := e.machineIs(ctx, p); err != nil {
			return agent.Call{}, err
		}
	}
	g, err := e.guest(p)
	if err != nil {
		return agent.Call{}, err
	}
	why := func() error { return g.look(ctx) } // the sandbox may be gone, or its machine unreachable
	return agent.Call{Agent: e.agentOf(p), Ctx: ctx, Why: why, Dir: g.dir, User: p.User}, nil
}

// agentOf returns the client of the agent in p.
func (e *extension) agentOf(p *place) *agent.Client {
	at, s := *p, &supply{bringing: make(chan struct{}, 1)}
	return e.agents.Get(p.key(), "", agent.ClientOptions{IdleConns: 1, IdleTime: agentIdle, Dials: agentDials, Dial: func(ctx context.Context) (net.Conn, error) {
		g, err := e.guest(&at)
		if err != nil {
			return nil, err
		}
		known := s.brought.Load()
		conn, err := e.connectAgent(ctx, g, s)
		if known && sandboxer.KindOf(err) == sandboxer.Unsupported { // a process inside removed it
			s.brought.Store(false)
			conn, err = e.connectAgent(ctx, g, s)
		}
		return conn, err
	}})
}

// agentIdle is how long an idle connection is kept: it takes one of the sessions that a server
// admits.
const agentIdle = 15 * time.Second

// connectAgent opens a connection to the agent; it copies the agent there first if it is missing.
func (e *extension) connectAgent(ctx context.Context, g *guest, s *supply) (net.Conn, error) {
	if err := e.bringAgent(ctx, g, s); err != nil {
		return nil, err
	}
	return g.attachAgent(ctx)
}

// attachAgent opens a connection to the agent, and starts the agent if it does not run.
func (g *guest) attachAgent(ctx context.Context) (net.Conn, error) {
	args := []string{g.rec, g.mark, "", path.Join(g.rec, agentFile), "attach", "--socket", path.Join(g.rec, agentSocket)}
	if g.user != "" { // the default user is the sandbox's
		args = append(args, "--user", g.user)
	}
	return agent.DialAttached(ctx, func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		return g.host.Run(ctx, sshrun.Cmd{Script: fmt.Sprintf(enter, ""), Args: args, Dir: g.dir, Stdin: in, Stdout: out, Stderr: errs})
	}, args...)
}

// bringAgent copies the agent's program into the sandbox, unless it is there: a running agent,
// perhaps of another build, accepts only connections of its own program.
func (e *extension) bringAgent(ctx context.Context, g *guest, s *supply) error {
	if len(path.Join(g.rec, agentSocket)) > maxSocket {
		return sandboxer.E(sandboxer.Unsupported, nil, "the agent has no place on %s: the path %s is too long for a socket", g.host.Name(), g.rec).
			WithHint("choose a shorter workspace_dir")
	}
	select {
	case s.bringing <- struct{}{}:
		defer func() { <-s.bringing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if s.brought.Load() {
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
	s.brought.Store(true)
	return nil
}

func (e *extension) agentProgram(arch string) (program.Program, error) {
	return e.programs.Find(agentFile, arch, e.cfg.Agent)
}
