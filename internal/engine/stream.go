package engine

import (
	"context"
	"io"
	"net"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/agent"
	"github.com/sand-boxer/sandboxer/internal/sshrun"
)

// Stream starts a command in a container, which must have a shell, and returns its standard
// input and output as a connection. cmd has no streams, terminal or signals of its own, and how it
// ends is not reported. The command outlives ctx; Close of the connection ends the engine's program and closes the
// command's input, by which it must know that it is to end. CloseWrite closes the input alone. Failed: the
// command could not be started. Unavailable: the engine is not there, or hangs (ErrHangs).
func (en *Engine) Stream(ctx context.Context, id string, cmd sandboxer.Cmd) (net.Conn, error) {
	within, done, err := en.Watch.Attend(ctx)
	if err != nil {
		return nil, err
	}
	args := []string{en.Program, "exec", "-i"}
	if cmd.User != "" {
		args = append(args, "-u", cmd.User)
	}
	if cmd.Dir != "" {
		args = append(args, "-w", cmd.Dir)
	}
	env := en.with(nil)
	args = append(args, Variables("-e", cmd.Env, env)...)
	// An engine that cannot start the program says so in the stream. Everything after
	// the mark belongs to the stream.
	args = append(args, id, "sh", "-c", `printf '\006'; exec "$@"`, "sh")
	c, err := agent.DialCommand(within, func(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) (sandboxer.Exit, error) {
		_, err := en.Host.Run(ctx, sshrun.Cmd{Args: args, Env: env, Stdin: in, Stdout: out, Stderr: errs})
		return sandboxer.Exit{}, err // a peer that hangs up is no failure of the stream
	}, append(args, carried(cmd.Args)...)...)
	if err != nil && within.Err() == nil {
		err = sandboxer.E(sandboxer.Failed, err, "a command could not be started in a container on host %s", en.Host.Name())
	}
	return c, done(err)
}
