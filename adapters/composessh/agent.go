package composessh

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/program"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// The default service of a sandbox mounts the agent's program, read-only: one directory per
// host and digest, which stays for the next sandbox, as layers of images do. Nothing
// of it runs until the first command, or until it is asked for. The engine starts it, as the user that commands
// run as. It is reached by way of the engine too, over a command that leads to a socket inside:
// no port, no shared directory, nothing that a process inside could redirect.

const (
	agentDir  = ".agent" // below the root of a host: a directory for each digest, which is mounted
	agentFile = "sandboxer-agent"
	agentPath = composefile.AgentDir + "/" + agentFile
)

// agentFor adds the agent for h to p, or says in a note why there is none.
func (e *extension) agentFor(h *host, p *plan) {
	prog, err := e.agentProgram(h.known.arch)
	if err != nil {
		p.note("there is no agent inside (%s): processes end with their callers, and files are not watched", sandboxer.Message(err))
	}
	p.meta.Agent = prog.Digest
}

func (e *extension) agentProgram(arch string) (program.Program, error) {
	return e.programs.Find(agentFile, arch, e.cfg.Agent)
}

// bringAgent copies the agent to h, unless it is there, and has it mounted.
func (e *extension) bringAgent(ctx context.Context, h *host, p *plan, r *composefile.Rendering, there bool) error {
	if p.meta.Agent == "" {
		return nil
	}
	dir := path.Join(h.known.root, agentDir, p.meta.Agent)
	r.Agent = &composefile.Agent{Service: p.meta.Service, Source: dir}
	if there {
		return nil
	}
	select { // one that is brought need not be brought again
	case h.known.carrying <- struct{}{}:
		defer func() { <-h.known.carrying }()
	case <-ctx.Done():
		return ctx.Err()
	}
	file := path.Join(dir, agentFile)
	if out, err := e.script(ctx, h, nil, nil, `[ ! -f "$1" ] || { echo there; exit; }; umask 022; mkdir -p -- "${1%/*}"`, file); err != nil || out != "" {
		return err
	}
	prog, err := e.agentProgram(h.known.arch)
	if err == nil && prog.Digest != p.meta.Agent {
		err = sandboxer.E(sandboxer.Unavailable, nil, "sandboxer-agent was replaced while sandbox %s was made", p.spec.ID).WithHint("try again")
	}
	if err != nil {
		return err
	}
	f, err := os.Open(prog.Path)
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "sandboxer-agent cannot be read")
	}
	defer f.Close()
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "copying sandboxer-agent to " + h.Name()})
	err = e.step(pAgent, func() error { return h.WriteFile(ctx, file, 0o755, f) })
	if _, said, ok := sshrun.ExitOf(err); ok {
		return e.failed(h, "bringing sandboxer-agent", said, nil)
	}
	return err
}

const (
	// agentRetry is how long commands go without an agent that could not be reached.
	agentRetry = time.Minute
	// agentDials is how many connections to one agent are opened at once.
	agentDials = 4
	// agentIdle is how long a connection waits for the next call: it takes a program on the host, and
	// one of the sessions that its server admits.
	agentIdle = 15 * time.Second
)

// openAgent is the way to the agent of h's sandbox for one call (agent.Capabilities).
func (e *extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) {
	ho, m, err := e.find(ctx, h)
	if err != nil {
		return agent.Call{}, err
	}
	if m.Agent == "" {
		return agent.Call{}, sandboxer.E(sandboxer.Unsupported, nil, "sandbox %s has no agent inside", m.ID).
			WithHint("create a new one on a host for whose platform the server has a sandboxer-agent")
	}
	id, err := ho.container(ctx, m, m.Service)
	if err != nil {
		return agent.Call{}, err
	}
	return e.agentCall(ctx, ho, m, id)
}

// agentCall is a call of the agent in id, the container of the default service.
func (e *extension) agentCall(ctx context.Context, h *host, m *meta, id string) (agent.Call, error) {
	within, done, err := h.engine.Watch.Attend(ctx)
	if err != nil {
		return agent.Call{}, err
	}
	why := func() error { // the container may have ended, or be paused
		why := e.notRunning(m, h.engine.State(ctx, id))
		if errors.Is(why, engine.ErrNotFound) {
			why = noContainer(m, m.Service) // the call must not be repeated: it was sent
		}
		return why
	}
	return agent.Call{Agent: e.agentIn(h.Name(), m, id), Ctx: within, Done: done, Why: why, Dir: m.service(m.Service).Workspace}, nil
}

// agentIn returns the client of the agent in the container id.
func (e *extension) agentIn(host string, m *meta, id string) *agent.Client {
	return e.agents.Get(m.Name, id, agent.ClientOptions{IdleConns: 1, IdleTime: agentIdle, Dials: agentDials, Dial: func(ctx context.Context) (net.Conn, error) {
		return e.dialAgent(ctx, host, m, id)
	}})
}

// withoutDials calls f, which pauses the sandbox, while no connection of ours is on its way
// to the agent: see agent.Client.WithoutDials.
func (e *extension) withoutDials(ctx context.Context, h *host, m *meta, f func(context.Context) error) error {
	if m.Agent == "" {
		return f(ctx)
	}
	id, err := h.container(ctx, m, m.Service)
	switch {
	case sandboxer.KindOf(err) == sandboxer.NotFound: // nor is anything of it reached
		return f(ctx)
	case err != nil:
		return err
	}
	return e.agentIn(h.Name(), m, id).WithoutDials(ctx, f)
}

// dialAgent opens a connection to the agent in the container id, which it starts if it does
// not run.
func (e *extension) dialAgent(ctx context.Context, host string, m *meta, id string) (net.Conn, error) {
	h, err := e.host(host)
	if err == nil {
		err = e.look(ctx, h)
	}
	if err != nil {
		return nil, err
	}
	args := []string{h.known.engine, "exec", "-i"} // where the container's commands begin
	if m.User != "" {
		args = append(args, "-u", m.User)
	}
	// Containers may share a network, and names of sockets with it.
	args = append(args, id, agentPath, "attach", "--socket", "@sandboxer-agent-"+id[:min(len(id), 12)])
	within, done, err := h.engine.Watch.Attend(ctx)
	if err != nil {
		return nil, err
	}
	c, err := agent.DialAttached(within, func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		return h.Run(ctx, sshrun.Cmd{Args: args, Env: e.engineEnv(), Stdin: in, Stdout: out, Stderr: errs})
	}, args...)
	return c, done(err)
}

// execByAgent runs a command by way of the agent: once it is connected, that takes a tenth of
// the time that the engine takes. false: it is not there, cannot be reached, or could not start anything. Nothing
// was run then, nor read.
func (e *extension) execByAgent(ctx context.Context, h *host, m *meta, id string, cmd sandboxer.Cmd) (sandboxer.Exit, error, bool) {
	switch {
	case m.Agent == "", cmd.Service != "" && cmd.Service != m.Service:
		return sandboxer.Exit{}, nil, false
	case cmd.User != "" && cmd.User != m.User: // which takes rights that the agent may not have
		return sandboxer.Exit{}, nil, false
	case !isUTF8(cmd): // the agent's wire cannot say it
		return sandboxer.Exit{}, nil, false
	case cmd.Stdin != nil || cmd.TTY != nil || cmd.Resize != nil: // a connection more, which commands that hold one may wait for in vain
		return sandboxer.Exit{}, nil, false
	}
	if e.agentIn(h.Name(), m, id).DialFailed(agentRetry) {
		return sandboxer.Exit{}, nil, false
	}
	call, err := e.agentCall(ctx, h, m, id)
	if err != nil {
		return sandboxer.Exit{}, err, true
	}
	cmd.User = "" // as whom it was started
	exit, err := call.Agent.Exec(call.Ctx, cmd)
	if ctx.Err() == nil && (errors.Is(err, agent.ErrNotReached) || errors.Is(err, agent.ErrNotStarted)) {
		_ = call.End(nil)
		return sandboxer.Exit{}, nil, false
	}
	err = call.End(err)
	if err == nil && exit.Code == 137 {
		exit.OOMKilled = h.engine.KilledForMemory(ctx, id)
	}
	return exit, err, true
}

// dialByAgent connects to a port of the container id from within, by way of the agent.
func (e *extension) dialByAgent(ctx context.Context, h *host, m *meta, id string, port int) (net.Conn, error) {
	call, err := e.agentCall(ctx, h, m, id)
	if err != nil {
		return nil, err
	}
	conn, err := call.Agent.Dial(call.Ctx, port)
	return conn, call.End(err)
}

func isUTF8(cmd sandboxer.Cmd) bool {
	for k, v := range cmd.Env {
		if !utf8.ValidString(k + v) {
			return false
		}
	}
	return !slices.ContainsFunc(append(cmd.Args[:len(cmd.Args):len(cmd.Args)], cmd.Dir), func(s string) bool { return !utf8.ValidString(s) })
}

// Without implements sandboxer.Narrower: without its program there is no agent.
func (e *extension) Without() []sandboxer.Capability {
	if e.programs.Any(agentFile, e.cfg.Agent) {
		return nil
	}
	return []sandboxer.Capability{sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch}
}

// agentDigest is the digest of the agent for h, "" if there is none.
func (e *extension) agentDigest(h *host) string {
	prog, _ := e.agentProgram(h.known.arch)
	return prog.Digest
}

// unusedAgents removes agents below $1 that no sandbox there names, except $4, and remains of interrupted
// copies and removals. It renames an agent before it looks for it again: a caller that begins a
// sandbox names the agent before it checks whether it is there.
const unusedAgents = `
cd -P -- "$1" || exit
[ -d .agent ] || exit 0
find .agent -mindepth 1 -maxdepth 2 -name '.?*' -mmin +60 -exec rm -rf {} + 2>/dev/null
# 0: a sandbox names it; 1: none does.
named() { set -- "$1" sbx-*/meta.json; [ -e "$2" ] || return 1; n=$1; shift; grep -qF "\"$n\"" "$@" 2>/dev/null; }
for f in .agent/*; do
	d=${f#.agent/}
	case $d in "$4"|"*") continue;; esac
	named "$d"; [ $? = 1 ] || continue
	mv -- "$f" ".agent/.$d" 2>/dev/null || continue
	named "$d"; [ $? = 1 ] || [ -e "$f" ] || { mv -- ".agent/.$d" "$f"; continue; }
	rm -rf -- ".agent/.$d"
done
exit 0`

// agents prints, for every agent below $1, its digest, its size in bytes and when it was copied, in
// seconds since 1970.
const agents = `
cd -- "$1/.agent" 2>/dev/null || exit 0
for f in *; do [ ! -f "$f/sandboxer-agent" ] || echo "$f $(wc -c <"$f/sandboxer-agent") $(stat -c %Y -- "$f" 2>/dev/null || echo 0)"; done`

// agentCaches are the agents on h, or, with prune, those that no sandbox uses: it removes
// them.
func (e *extension) agentCaches(ctx context.Context, h *host, prune bool) ([]sandboxer.Cache, error) {
	list := func() (all []sandboxer.Cache, err error) {
		out, err := e.script(ctx, h, nil, nil, agents, h.known.root)
		for line := range strings.Lines(out) {
			f := strings.Fields(line)
			if len(f) != 3 || len(f[0]) < 12 {
				continue
			}
			size, _ := strconv.ParseInt(f[1], 10, 64)
			sec, _ := strconv.ParseInt(f[2], 10, 64)
			all = append(all, sandboxer.Cache{Host: h.Name(), Name: "sandboxer-agent/" + sshrun.Plain(f[0][:12]), Bytes: size, UsedAt: time.Unix(sec, 0)})
		}
		return all, err
	}
	had, err := list()
	if err != nil || !prune || len(had) == 0 {
		return had, err
	}
	if _, err := e.script(ctx, h, nil, nil, unusedAgents, h.known.root, "", "", ""); err != nil {
		return nil, err
	}
	has, err := list()
	return slices.DeleteFunc(had, func(c sandboxer.Cache) bool { return slices.Contains(has, c) }), err
}
