package modal

import (
	"cmp"
	"context"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	modal "github.com/modal-labs/modal-client/go"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/inside"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// The file that is written last into a sandbox (inside.Shell.Done) connects to the agent, and starts it if it does not run.

const (
	agentArch = "amd64" // Modal has no other machines

	// agentIdle is how long an idle connection is kept: it takes a process in the sandbox, and its streams a connection to Modal.
	agentIdle  = 20 * time.Second
	agentDials = 4
)

// shell is Modal's own way into a sandbox.
func (x *extension) shell(sb *modal.Sandbox) inside.Shell {
	return inside.Shell{
		Dir: inside.AgentDir,
		Run: func(ctx context.Context, what, script string, args ...string) (string, error) {
			return x.script(ctx, sb, what, script, nil, args...)
		},
		Write: func(ctx context.Context, name string, f *os.File, _ int64) error {
			_, err := x.script(ctx, sb, "writing "+name, `cat >"$1"`, f, name)
			return err
		},
	}
}

// wayIn is the path of the file that connects to the agent of a sandbox.
func wayIn(id string, generation int) string {
	return inside.Shell{Dir: inside.AgentDir}.Done(id, generation)
}

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

// fill completes a sandbox: with the agent, the workspace and the main command. It can be repeated.
func (x *extension) fill(ctx context.Context, spec sandboxer.Spec, ref string, restored bool) error {
	unlock, err := x.Env.Notes.Lock(ctx, spec.ID) // a teardown waits
	if err != nil {
		return err
	}
	defer unlock()
	sb := x.sandbox(ctx, ref)
	defer func() { _ = sb.Detach() }()
	workspace, file := cmp.Or(spec.Workspace, inside.Workspace), wayIn(spec.ID, spec.Generation)
	ready, err := x.shell(sb).Bring(ctx, file, func(string) (program.Program, error) {
		return x.programs.Find(inside.AgentFile, agentArch, x.cfg.Agent)
	})
	if err != nil || ready {
		return x.gone(ctx, ref, err)
	}
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
		err = inside.StartOnce(ctx, c, sandboxer.ProcessSpec{Args: spec.Command, Dir: workspace, User: spec.User})
	}
	if err == nil {
		err = c.WriteFile(ctx, file, 0o755, strings.NewReader("#!/bin/sh\nexec "+inside.Quoted(args...)+` "$@"`+"\n"))
	}
	return x.gone(ctx, ref, err)
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
