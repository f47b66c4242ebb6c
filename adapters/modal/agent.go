package modal

import (
	"cmp"
	"context"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	modal "github.com/modal-labs/modal-client/go"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/inside"
)

// The agent's program is copied into each sandbox, where root can replace it, and harms nothing but the sandbox. A restored one has
// it already. The file <id>.g<generation> beside it connects to the agent, and starts it if it does not run. It is written last: a
// sandbox with it is complete.

const (
	agentFile = "sandboxer-agent"
	agentArch = "amd64" // Modal has no other machines

	// agentIdle is how long an idle connection is kept: it takes a process in the sandbox, and its streams a connection to Modal.
	agentIdle  = 20 * time.Second
	agentDials = 4
)

// wayIn is the path of the file that connects to the agent of a sandbox.
func wayIn(id string, generation int) string {
	return inside.AgentDir + "/" + id + ".g" + strconv.Itoa(generation)
}

// look says what is in a sandbox: "ready" if it is complete, "there" if it has the agent.
const look = `umask 022
[ -x "$1" ] && { echo ready; exit; }
mkdir -p "$2" && { [ -x "$2/sandboxer-agent" ] && [ "$(cat "$2/digest" 2>/dev/null)" = "$3" ] && echo there; exit 0; }`

// take takes the agent, of $4 bytes, from its input.
const take = `umask 022
n=$2/new && cat >"$n" && [ "$(wc -c <"$n")" -eq "$4" ] && chmod 755 "$n" && mv -f "$n" "$2/sandboxer-agent" && echo "$3" >"$2/digest"`

// script runs a script of ours in a sandbox, and returns what it prints.
func (x *extension) script(ctx context.Context, sb *modal.Sandbox, what, script string, in io.Reader, args ...string) (string, error) {
	out, errs := &capture.First{Max: 1 << 10}, &capture.Last{Max: 1 << 10}
	exit, err := run(ctx, sb, append([]string{"/bin/sh", "-c", script, "sh"}, args...), in, out, errs)
	if err == nil && exit.Code != 0 {
		err = sandboxer.E(sandboxer.Failed, nil, "%s failed in the sandbox (exit %d): %s", what, exit.Code, capture.Text(errs.String(), maxText)).
			WithHint("use an image with a shell, cat, chmod, mkdir, mv and wc, and room on its disk")
	}
	return strings.TrimSpace(out.String()), err
}

// run runs a command in a sandbox by Modal's own means (agent.RunFunc). Modal cannot kill a command: at the end of ctx its input ends.
func run(ctx context.Context, sb *modal.Sandbox, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
	p, err := sb.Exec(ctx, args, &modal.SandboxExecParams{Workdir: "/"})
	if err != nil {
		return sandboxer.Exit{}, failure(ctx, err)
	}
	go func() {
		if in != nil {
			_, _ = io.CopyBuffer(struct{ io.Writer }{p.Stdin}, struct{ io.Reader }{in}, make([]byte, 256<<10))
		}
		_ = p.Stdin.Close()
	}()
	var reading sync.WaitGroup
	var failed error
	reading.Go(func() { _, failed = io.Copy(out, p.Stdout) })
	reading.Go(func() { _, _ = io.Copy(errs, p.Stderr) })
	closeAll := func() { p.Stdout.Close(); p.Stderr.Close() }
	stop := context.AfterFunc(ctx, closeAll)
	code, err := p.Wait(ctx, nil)
	if err != nil {
		closeAll()
	}
	reading.Wait()
	if stop() {
		closeAll()
	}
	if err = cmp.Or(ctx.Err(), err, failed); err != nil {
		return sandboxer.Exit{}, failure(ctx, err)
	}
	return sandboxer.Exit{Code: code}, nil
}

// bring copies the agent's program into a sandbox, unless it is there. ready: the sandbox is complete, and nothing is to be done.
func (x *extension) bring(ctx context.Context, sb *modal.Sandbox, spec sandboxer.Spec) (ready bool, err error) {
	prog, err := x.programs.Find(agentFile, agentArch, x.cfg.Agent)
	if err != nil {
		return false, err
	}
	args := []string{wayIn(spec.ID, spec.Generation), inside.AgentDir, prog.Digest}
	has, err := x.script(ctx, sb, "looking for sandboxer-agent", look, nil, args...)
	if err != nil || has != "" {
		return has == "ready", err
	}
	f, err := os.Open(prog.Path)
	if err != nil {
		return false, sandboxer.E(sandboxer.Unavailable, err, "the program of the agent cannot be read")
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return false, sandboxer.E(sandboxer.Unavailable, err, "the program of the agent cannot be read")
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "copying sandboxer-agent to Modal"})
	_, err = x.script(ctx, sb, "copying sandboxer-agent", take, f, append(args, strconv.FormatInt(fi.Size(), 10))...)
	return false, err
}

// fill completes a sandbox: with the agent, the workspace and the main command. It can be repeated.
func (x *extension) fill(ctx context.Context, spec sandboxer.Spec, ref string, restored bool) error {
	unlock, err := x.Env.Notes.Lock(ctx, spec.ID) // a teardown waits
	if err != nil {
		return err
	}
	defer unlock()
	sb := x.sandbox(ctx, ref)
	defer func() { _ = sb.Detach() }()
	ready, err := x.bring(ctx, sb, spec)
	if err != nil || ready {
		return x.gone(ctx, ref, err)
	}
	workspace, file := cmp.Or(spec.Workspace, inside.Workspace), wayIn(spec.ID, spec.Generation)
	args := []string{inside.AgentPath, "attach", "--socket", file + ".sock", "--workdir", workspace}
	if spec.User != "" {
		args = append(args, "--user", spec.User)
	}
	c := agent.NewClient(options(sb, args))
	defer c.Close()
	repo := spec.Inputs[inputRepo]
	if restored {
		repo = ""
	}
	if _, err = inside.Fill(ctx, c.Exec, workspace, spec.User, repo); err == nil {
		err = x.startMain(ctx, c, spec, workspace)
	}
	if err == nil {
		err = c.WriteFile(ctx, file, 0o755, strings.NewReader("#!/bin/sh\nexec "+quoted(args)+` "$@"`+"\n"))
	}
	return x.gone(ctx, ref, err)
}

// startMain starts the main command, unless an earlier call did.
func (x *extension) startMain(ctx context.Context, c *agent.Client, spec sandboxer.Spec, workspace string) error {
	if len(spec.Command) == 0 {
		return nil
	}
	running, err := c.Processes(ctx)
	if err != nil || slices.ContainsFunc(running, func(p sandboxer.Process) bool { return p.Tag == agent.MainTag }) {
		return err
	}
	return inside.Start(ctx, c, sandboxer.ProcessSpec{Args: spec.Command, Dir: workspace, User: spec.User})
}

// quoted quotes arguments for a shell.
func quoted(args []string) string {
	q := make([]string, len(args))
	for i, a := range args {
		q[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	return strings.Join(q, " ")
}

// gone is err, or that the sandbox is gone, if that may have caused it.
func (x *extension) gone(ctx context.Context, ref string, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	if _, why := x.get(ctx, ref); sandboxer.KindOf(why) == sandboxer.NotFound {
		return sandboxer.E(sandboxer.Unavailable, why, "the sandbox ended while it was being made: %s", sandboxer.Message(why))
	}
	return err
}

// options are the ways to the agent of a sandbox over a command.
func options(sb *modal.Sandbox, args []string) agent.ClientOptions {
	return agent.ClientOptions{IdleConns: 1, IdleTime: agentIdle, Dials: agentDials, DialsWait: true, Dial: func(ctx context.Context) (net.Conn, error) {
		return agent.DialAttached(ctx, func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
			return run(ctx, sb, args, in, out, errs)
		}, args...)
	}}
}

// openAgent connects one call to the agent of h's sandbox (agent.Capabilities).
func (x *extension) openAgent(ctx context.Context, h sandboxer.Handle, _ bool) (agent.Call, error) {
	if h.Ref == "" || h.Generation == 0 {
		o, err := x.Find(ctx, h)
		if err != nil {
			return agent.Call{}, err
		}
		h, _ = x.Handle(o, x.Env.Owner)
	}
	c := x.agents.Get(h.Ref, h.Ref, options(x.sandbox(ctx, h.Ref), []string{wayIn(h.SandboxID, h.Generation)}))
	why := func() error { _, err := x.get(ctx, h.Ref); return err } // it may have ended
	within, done := x.attend(ctx)
	return agent.Call{Agent: c, Ctx: within, Done: done, Why: why}, nil
}

// WaitReady implements sandboxer.Extension. Provision makes a sandbox whole, or does not.
func (x *extension) WaitReady(ctx context.Context, h sandboxer.Handle) (sandboxer.Reachability, error) {
	o, err := x.Find(ctx, h)
	if err != nil {
		return sandboxer.Reachability{}, err
	}
	if _, err = x.StatFile(ctx, h, "/"); sandboxer.KindOf(err) == sandboxer.Unsupported {
		err = sandboxer.E(sandboxer.Failed, err, "sandbox %s was never completed", h.SandboxID).WithHint("destroy it and create it again")
	}
	return sandboxer.Reachability{Extra: map[string]string{"modal_sandbox": o.Ref}}, err
}
